"""`Ranks`: the other ranks of a divided model, as one rank sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from sagellm.core.errors import CommError, EngineFailedError
from sagellm.core.processes import REPORT_S, ProcessGroup
from sagellm.core.protocols.collectives import CommBackendProtocol, ReduceOp, Work
from sagellm.core.protocols.fusion import KernelSet
from sagellm.core.types import KVGroup
from sagellm.engines.native.loading import ModelWeights
from sagellm.engines.native.model import DecoderModel
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.parallel.attention_model import AttentionModel
from sagellm.engines.native.parallel.split import Split
from sagellm.engines.native.parallel.stage import StageModel
from sagellm.engines.native.parallel.tensor_ranks import TensorRanks


class Ranks:
    """A group of ranks: its collectives, and which part of it is this rank's.

    The first rank has the `processes` of the others. `spent_s`: seconds of communication, waiting included.
    `is_midway`: a step was announced, and the first rank has not said that it has its logits.
    The `store` in which the ranks have met lives as long as they do: torch writes to the file of a
    `FileStore` once more when it is dropped, and holds up the whole process for minutes if the first rank
    removes the folder at that moment.
    """

    def __init__(
        self, split: Split, group: CommBackendProtocol, processes: ProcessGroup | None = None,
        store: object = None,
    ) -> None:  # fmt: skip
        self.split, self._group, self._processes, self._store = split, group, processes, store
        self._adds_in_order = group.world_size == 2 or getattr(group, "adds_in_order", False)
        self.spent_s, self.is_midway = 0.0, False

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
        if self.split.ffn:
            return AttentionModel(*given, self)
        return DecoderModel(*given, TensorRanks(self, kernels, spec.vocab_size))

    def decide(self, choose: Callable[[], int]) -> int:
        """What `choose` gives on the first rank. It is not called on the others."""
        given = torch.tensor([choose() if self.is_first else 0], dtype=torch.int64)
        self._group.broadcast(given, 0).wait()
        return int(given[0])

    def least(self, value: int) -> int:
        """The smallest of the values of all ranks with KV."""
        if self.split.num_kv_ranks == 1:
            return value
        given = torch.tensor([value], dtype=torch.int64)
        self._group.all_reduce(given, ReduceOp.MIN).wait()
        return int(given[0])

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._group.barrier().wait()

    def sum(self, part: torch.Tensor) -> None:
        """Add up the parts of all ranks, in place.

        `part` is contiguous. The bits are the same on all ranks, and in any batch: of two parts any order of
        addition gives the same, and a group that `adds_in_order` adds in order of rank. Other groups choose
        an order by the size of the tensor, so there the parts are gathered first.
        """
        began_s = time.perf_counter()
        if self._adds_in_order:
            self._group.all_reduce(part).wait()
        else:
            with torch.inference_mode():  # a recorded step is replayed outside of it
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
        began_s = time.perf_counter()
        self._group.send(x, rank).wait()
        self.spent_s += time.perf_counter() - began_s

    def receive(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        began_s = time.perf_counter()
        self._group.recv(x, rank).wait()
        self.spent_s += time.perf_counter() - began_s
        return x

    def exchange(self, inputs: Sequence[torch.Tensor], output: torch.Tensor, rank: int) -> list[Work]:
        """Send `inputs` to a rank, which answers with `output`. `finish` waits for that."""
        began_s = time.perf_counter()
        works = [self._group.send(x, rank) for x in inputs] + [self._group.recv(output, rank)]
        self.spent_s += time.perf_counter() - began_s
        return works

    def finish(self, works: Sequence[Work]) -> None:
        """Wait for operations of `exchange`. Once the answer is there, what was sent has been read."""
        began_s = time.perf_counter()
        for work in reversed(works):
            work.wait()
        self.spent_s += time.perf_counter() - began_s

    def announce(self, message: bytes) -> None:
        """Send a message to all other ranks. Raises `EngineFailedError` if one has ended."""
        self.is_midway = True  # a rank may have the message when another one cannot be told
        if self._processes is not None:
            began_s = time.perf_counter()
            self._processes.send(message)
            self.spent_s += time.perf_counter() - began_s

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
        return EngineFailedError(f"rank {self.split.rank} failed: {error}")

    def end(self, grace_s: float = REPORT_S) -> None:
        """End the processes of the other ranks, by force after `grace_s`. What waits for them fails soon.

        May be called twice, and from any thread.
        """
        if self._processes is not None:
            self._processes.close(grace_s)

    def close(self) -> None:
        """End the other ranks, and leave the group. May be called twice."""
        self.end()
        self._group.close()
