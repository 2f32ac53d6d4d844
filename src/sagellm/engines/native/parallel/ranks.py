"""`Ranks`: the other ranks of a divided model, as one rank sees them."""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, Store

from sagellm.comm.collectives.shared_kernels import native_library
from sagellm.comm.collectives.shared_memory import SharedMemoryBackend
from sagellm.comm.collectives.torch_distributed import TorchDistributedBackend
from sagellm.core.errors import CommError, EngineFailedError, KernelError
from sagellm.core.processes import REPORT_S, ProcessGroup, Role
from sagellm.core.protocols.collectives import CommBackendProtocol
from sagellm.core.protocols.fusion import KernelSet
from sagellm.core.registry import registry
from sagellm.core.types import KVGroup
from sagellm.engines.native.loading import ModelWeights
from sagellm.engines.native.model import DecoderModel
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.parallel.split import Split
from sagellm.engines.native.parallel.stage import StageModel
from sagellm.engines.native.parallel.tensor_ranks import TensorRanks

log = logging.getLogger("sagellm.ranks")
TIMEOUT_S = 3600.0
"""A rank waits so long for others: one may still load its weights. The end of a process is seen at once."""
OWN_COLLECTIVES = ("auto", "gloo")
"""Names of `parallel.backend` that are no plug-ins."""
_LOOK_S = 0.02


class Ranks:
    """A group of ranks: its collectives, and which part of it is this rank's.

    The first rank has the `processes` of the others. `spent_s`: seconds of communication, waiting included.
    """

    def __init__(
        self, split: Split, group: CommBackendProtocol, processes: ProcessGroup | None = None
    ) -> None:
        self.split, self._group, self._processes = split, group, processes
        self._adds_in_order = group.world_size == 2 or isinstance(group, SharedMemoryBackend)
        self.spent_s = 0.0

    @property
    def is_first(self) -> bool:
        return self.split.rank == 0

    def model(
        self, spec: ModelSpec, weights: ModelWeights, dtype: torch.dtype, device: torch.device,
        kernels: KernelSet, groups: Sequence[KVGroup],
    ) -> DecoderModel:  # fmt: skip
        """This rank's part of a model; `spec` and `weights` are of that part."""
        given = (spec, weights, dtype, device, kernels, groups)
        if self.split.pipeline > 1:
            return StageModel(*given, self)
        return DecoderModel(*given, TensorRanks(self, kernels, spec.vocab_size))

    def agreed(self, value: int) -> int:
        """The first rank's `value`, on all ranks."""
        given = torch.tensor([value], dtype=torch.int64)
        self._group.broadcast(given, 0).wait()
        return int(given[0])

    def sum(self, part: torch.Tensor) -> None:
        """Add up the parts of all ranks, in place.

        `part` is contiguous. The bits are the same on all ranks, and in any batch: of two parts any order of
        addition gives the same, and shared memory adds in order of rank. Other backends choose an order by
        the size of the tensor, so there the parts are gathered first.
        """
        began_s = time.perf_counter()
        if self._adds_in_order:
            self._group.all_reduce(part).wait()
        else:
            parts = part.new_empty((self._group.world_size, *part.shape))
            self._group.all_gather(parts, part).wait()
            part.copy_(parts[0])
            for other in parts[1:]:
                part.add_(other)
        self.spent_s += time.perf_counter() - began_s

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The equal parts of all ranks, [num_ranks, ...]."""
        began_s = time.perf_counter()
        parts = part.new_empty((self._group.world_size, *part.shape))
        self._group.all_gather(parts, part).wait()
        self.spent_s += time.perf_counter() - began_s
        return parts

    def send(self, x: torch.Tensor, rank: int) -> None:
        self._group.send(x, rank).wait()

    def receive(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        self._group.recv(x, rank).wait()
        return x

    def announce(self, message: bytes) -> None:
        """Send a message to all other ranks. Raises `EngineFailedError` if one has ended."""
        if self._processes is not None:
            self._processes.send(message)

    def check(self) -> None:
        """Raise `EngineFailedError` if the process of another rank has ended."""
        if self._processes is not None:
            self._processes.check()

    def failure(self, error: Exception) -> EngineFailedError:
        """What ends the engine: the end of a rank's process, else `error`."""
        if self._processes is not None:
            try:
                self._processes.wait_for_failure(REPORT_S if isinstance(error, CommError) else 0.0)
            except EngineFailedError as failed:
                return failed
        return EngineFailedError(f"rank {self.split.rank} failed in the middle of a step: {error}")

    def close(self) -> None:
        """End the other ranks. May be called twice."""
        if self._processes is not None:
            self._processes.close()
        self._group.close()


def launch(split: Split, entry: str, options: dict[str, object], backend: str) -> Ranks:
    """Start the other ranks, and join them. `entry(options, inbox)` calls `join` with what is added to
    `options`: "split", "store" and "collectives".

    Raises `EngineFailedError` with the reason of a rank that ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="sagellm-ranks-"))
    store = str(folder / "store")
    backend = _usual_collectives() if backend == "auto" else backend
    shared = {
        "tensor": split.tensor,
        "pipeline": split.pipeline,
        "whole_experts": split.whole_experts,
    }
    roles = [
        Role(
            f"rank {rank}",
            entry,
            {**options, "store": store, "collectives": backend, "split": {"rank": rank, **shared}},
        )
        for rank in range(1, split.num_ranks)
    ]
    processes = ProcessGroup.start(roles)
    try:
        found = FileStore(store, split.num_ranks)
        for rank in range(1, split.num_ranks):
            while not found.check([_ready(rank)]):
                processes.wait_for_failure(_LOOK_S)
        group = _collectives(backend, split, found)
        group.barrier().wait()
        return Ranks(split, group, processes)
    except BaseException:
        processes.close(0.0)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def join(split: Split, store: str, backend: str) -> Ranks:
    """Join the ranks that `launch` has started."""
    found = FileStore(store, split.num_ranks)
    found.set(_ready(split.rank), "")
    group = _collectives(backend, split, found)
    group.barrier().wait()
    return Ranks(split, group)


def _ready(rank: int) -> str:
    return f"rank {rank} is there"


def _collectives(name: str, split: Split, store: Store) -> CommBackendProtocol:
    """The collectives of that name: gloo, or a plug-in's."""
    if name == "gloo":
        return TorchDistributedBackend(split.rank, split.num_ranks, group=_local_gloo(split, store))
    if name == "shared_memory":
        return SharedMemoryBackend(split.rank, split.num_ranks, store, timeout_s=TIMEOUT_S)
    made: CommBackendProtocol = registry("collectives").create(
        name, rank=split.rank, world_size=split.num_ranks, store=store
    )
    return made


def _usual_collectives() -> str:
    """Shared memory, or gloo where its kernel cannot be compiled."""
    try:
        native_library()
    except KernelError as error:
        log.warning("ranks add over gloo, not in shared memory: %s", error)
        return "gloo"
    return "shared_memory"


def _local_gloo(split: Split, store: Store) -> object:
    """Gloo on the loopback device: on others, strangers could connect to it."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=TIMEOUT_S)
    return ProcessGroupGloo(store, split.rank, split.num_ranks, options)
