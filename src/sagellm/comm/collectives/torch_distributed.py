"""Collectives over `torch.distributed`: gloo, nccl, or the backend of a chip's maker, by name.

The process group is the backend's own: it is neither the default group of `torch.distributed` nor needs one,
so several groups (tensor, pipeline, expert parallelism) live beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from sagellm.comm.collectives._buffers import (
    Broken,
    as_bytes,
    check_group,
    check_rank,
    check_reducible,
    check_whole,
    contiguous,
    piece_sizes,
)
from sagellm.core.errors import CommError, UnknownNameError, nearest
from sagellm.core.protocols.collectives import ReduceOp, WorkStatus

TIMEOUT_S = 300.0
_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
}
_SHOWN_CHARS = 200
_LONGEST_TIMEOUT_S = 365 * 86400.0
ProcessGroup = Any
"""A `torch.distributed` backend: `ProcessGroupGloo`, `ProcessGroupNCCL`, or what a plug-in made."""


def process_group(
    backend: str, rank: int, world_size: int, store: Any, timeout_s: float = TIMEOUT_S,
    hostname: str | None = None,
) -> ProcessGroup:  # fmt: skip
    """A process group of its own, as `torch.distributed` would make it for this backend.

    Gloo listens at `hostname`; without it, at the interface that GLOO_SOCKET_IFNAME or the name of this host
    gives, where strangers may connect.

    Backends of other packages are known by `torch.distributed.Backend.register_backend`, which a chip's torch
    module calls when it is imported. Raises `UnknownNameError` for any other name.
    """
    timeout = timedelta(seconds=min(timeout_s, _LONGEST_TIMEOUT_S))
    if backend == "gloo" and dist.is_gloo_available():
        if hostname is None:
            return dist.ProcessGroupGloo(store, rank, world_size, timeout)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=hostname)]
        gloo._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, world_size, gloo)
    if backend == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        known = [name.lower() for name in dist.Backend._plugins]
        known += [
            name
            for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
            if there
        ]
        raise UnknownNameError(
            f"this torch has no backend {backend!r}: import the torch module that brings it first."
            f"{nearest(backend, known)}"
        )
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, world_size, timeout)
    given = c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    given.store, given.group_rank, given.group_size, given.timeout = store, rank, world_size, timeout
    given.group_id, given.global_ranks_in_group = "", list(range(world_size))
    return plugin.creator_fn(given, None)


class TorchDistributedBackend:
    """One rank of a group over a process group of torch.

    `backend` names the transport; gloo listens at `hostname`: give the loopback address where all ranks are
    on this host. `store` is a `torch.distributed.Store`; groups that share one need a `PrefixStore` each.
    `group` is a process group that exists already, and replaces both.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any = None,
        *,
        backend: str = "gloo",
        timeout_s: float = TIMEOUT_S,
        hostname: str | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        check_group(rank, world_size)
        self.rank, self.world_size, self.backend = rank, world_size, backend
        self._broken = Broken()
        self._group: ProcessGroup = group
        if group is None:
            if store is None:
                raise ValueError("give a store that all ranks share, or a process group")
            self._group = process_group(backend, rank, world_size, store, timeout_s, hostname)

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> _TorchWork:
        op = check_reducible(buffer, op)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        sent, widened = self._reducible(buffer)
        return self._submit(
            lambda: self._group.allreduce([sent], options), lambda: widened and buffer.copy_(sent), [sent]
        )

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> _TorchWork:
        check_whole(output, part, self.world_size, "all_gather")
        gathered, copy_back = contiguous(output)
        sent = part.contiguous()
        return self._submit(
            lambda: self._group._allgather_base(as_bytes(gathered), as_bytes(sent)),
            copy_back,
            [gathered, sent],
        )

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> _TorchWork:
        op = check_reducible(buffer, op)
        check_whole(buffer, output, self.world_size, "reduce_scatter")
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        sent, _ = self._reducible(buffer)
        if sent is buffer:
            sent = buffer.clone()  # gloo reduces in place
        piece = torch.empty(output.numel(), dtype=sent.dtype, device=sent.device)
        return self._submit(
            lambda: self._group._reduce_scatter_base(piece, sent, options),
            lambda: output.copy_(piece.view(output.shape)),
            [piece, sent],
        )

    def broadcast(self, buffer: torch.Tensor, source: int) -> _TorchWork:
        check_rank("source", source, self.world_size)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        sent, copy_back = contiguous(buffer)
        return self._submit(lambda: self._group.broadcast([as_bytes(sent)], options), copy_back, [sent])

    def all_to_all(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
    ) -> _TorchWork:
        if output.dtype != buffer.dtype:
            raise ValueError(f"all_to_all: dtypes differ, {output.dtype} and {buffer.dtype}")
        size = buffer.element_size()
        received_bytes, sent_bytes = (
            [count * size for count in piece_sizes(sizes, tensor, self.world_size, what)]
            for sizes, tensor, what in ((output_sizes, output, "output"), (input_sizes, buffer, "buffer"))
        )
        received, copy_back = contiguous(output)
        sent = buffer.contiguous()
        return self._submit(
            lambda: self._group.alltoall_base(
                as_bytes(received), as_bytes(sent), received_bytes, sent_bytes, dist.AllToAllOptions()
            ),
            copy_back,
            [received, sent],
        )

    def send(self, buffer: torch.Tensor, target: int, *, tag: int = 0) -> _TorchWork:
        check_rank("target", target, self.world_size)
        sent = buffer.contiguous()
        return self._submit(lambda: self._group.send([as_bytes(sent)], target, tag), _nothing, [sent])

    def recv(self, buffer: torch.Tensor, source: int, *, tag: int = 0) -> _TorchWork:
        check_rank("source", source, self.world_size)
        received, copy_back = contiguous(buffer)
        return self._submit(
            lambda: self._group.recv([as_bytes(received)], source, tag), copy_back, [received]
        )

    def barrier(self) -> _TorchWork:
        return self._submit(lambda: self._group.barrier(), _nothing, [])

    def close(self) -> None:
        if not self._broken.is_closed:
            self._broken.close(self.rank)
            abort = getattr(self._group, "abort", None)
            if abort is not None:
                abort()

    def _reducible(self, buffer: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """What is sent for a buffer, and whether the result must be copied back. No backend of torch sums
        int16; sums in int32 wrap around alike when they are cut to 16 bits."""
        if buffer.dtype == torch.int16:
            return buffer.to(torch.int32).contiguous(), True
        return buffer.contiguous(), not buffer.is_contiguous()

    def _submit(
        self, call: Callable[[], Any], finish: Callable[[], object], held: list[torch.Tensor]
    ) -> _TorchWork:
        self._broken.check()
        try:
            return _TorchWork(call(), finish, held, self._broken)
        except RuntimeError as error:
            raise self._broken.fail(_failure(error)) from error


class _TorchWork:
    """A work of torch, with the tensors that it uses and what ends it.

    Works of gloo's sends and receives complete in `wait` only, so a thread waits for one that is polled.
    """

    def __init__(
        self, work: Any, finish: Callable[[], object], held: list[torch.Tensor], broken: Broken
    ) -> None:
        self._work, self._finish, self._held, self._broken = work, finish, held, broken
        self._status = WorkStatus.PENDING
        self._error: CommError | None = None
        self._waiting: Thread | None = None
        self._ended = Event()

    def poll(self) -> WorkStatus:
        if self._status is WorkStatus.PENDING and self._waiting is None:
            if self._work.is_completed():
                self._wait()
            else:
                self._waiting = Thread(target=self._wait, daemon=True)
                self._waiting.start()
        return self._status

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._status is WorkStatus.PENDING and timeout_s is None and self._waiting is None:
            self._wait()
        elif self.poll() is WorkStatus.PENDING and not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def error(self) -> Exception | None:
        return self._error

    def _wait(self) -> None:
        try:
            self._work.wait()
            self._finish()
        except RuntimeError as error:
            self._error = self._broken.fail(_failure(error))
            self._status = WorkStatus.FAILED
        else:
            self._status = WorkStatus.DONE
        self._held.clear()
        self._ended.set()


def _failure(error: RuntimeError) -> CommError:
    [first, *_] = str(error).splitlines() or [""]
    return CommError(f"a rank died, left or did not answer in time: {first[:_SHOWN_CHARS]}")


def _nothing() -> None:
    """Of operations after which nothing is to be copied."""


PLUGIN = TorchDistributedBackend
