"""Collectives of ranks on one host, in memory that all of them have mapped.

Small buffers are reduced in one shot: every rank reads all of the others' data. Large ones take two: each
rank reduces a piece, then all gather the pieces. Both add in order of rank, so their bits are equal.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from sagellm.comm.collectives._buffers import (
    Broken,
    FinishedWork,
    as_bytes,
    check_group,
    check_rank,
    check_reducible,
    check_whole,
    contiguous,
    piece_sizes,
)
from sagellm.comm.collectives.mailboxes import Mailboxes, MessageWork
from sagellm.comm.collectives.shared_kernels import (
    DTYPES,
    Kernel,
    NativeKernel,
    Outcome,
    SharedOperation,
    native_library,
)
from sagellm.comm.collectives.shared_region import MOST_RANKS, RegionLayout, SharedRegion
from sagellm.comm.collectives.shared_twin import TwinKernel
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import CommError, KernelError
from sagellm.core.protocols.collectives import ReduceOp, RendezvousStore

log = logging.getLogger("sagellm.collectives")
TIMEOUT_S = 300.0
SLOT_BYTES = 128 << 10
CELL_BYTES = 64 << 10
ONE_SHOT_BYTES = 16 << 10
_LEAST_SLOT_BYTES = 64 * MOST_RANKS
_DONE = FinishedWork()
_NOTHING = (-1, 0)


class SharedMemoryBackend:
    """One rank of a group on this host, for CPU tensors.

    An operation but a send or a receive ends inside its method. Sends and receives move on when the rank
    submits, polls or waits, and end before the next collective begins. The sizes are those of rank 0:
    `slot_bytes` are shown to the others at a time, `cell_bytes` are a part of a message, and up to
    `one_shot_bytes` are reduced in one shot. A peer that is alive and does not answer for `timeout_s` counts
    as dead; with `math.inf` a rank may wait for work for days. Without `native` the group uses the kernel's
    slow twin.
    """

    adds_in_order = True
    """Sums are formed in order of rank, whatever the size."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: RendezvousStore,
        *,
        slot_bytes: int = SLOT_BYTES,
        cell_bytes: int = CELL_BYTES,
        one_shot_bytes: int = ONE_SHOT_BYTES,
        timeout_s: float = TIMEOUT_S,
        native: bool = True,
        clock: Clock | None = None,
    ) -> None:
        check_group(rank, world_size)
        if world_size > MOST_RANKS:
            raise ValueError(f"shared memory takes at most {MOST_RANKS} ranks, got {world_size}")
        if slot_bytes % 4096 or slot_bytes < _LEAST_SLOT_BYTES or cell_bytes % 64 or cell_bytes <= 0:
            raise ValueError(
                f"slot_bytes must be a multiple of 4096 and cell_bytes of 64, got {slot_bytes}, {cell_bytes}"
            )
        self.rank, self.world_size = rank, world_size
        self._timeout_s, self._clock = timeout_s, clock or MonotonicClock()
        self._broken = Broken()
        self._awaited, self._awaited_since_s = _NOTHING, 0.0
        self._reason = ""
        """Why the last long wait was given up."""
        library = _library() if native else None
        layout = RegionLayout(world_size, slot_bytes, cell_bytes, one_shot_bytes)
        self._region = SharedRegion(rank, store, layout, min(timeout_s, TIMEOUT_S), self._clock)
        self.one_shot_bytes = self._region.layout.one_shot_bytes
        try:
            self.is_native = self._region.join(has_kernel=library is not None)
        except BaseException:
            self._region.close()
            raise
        self._kernel: Kernel
        if library is not None and self.is_native:
            self._kernel = NativeKernel(library, self._region, self._stalled)
        else:
            self._kernel = TwinKernel(self._region, self._stalled)
        self._boxes = Mailboxes(self._region, self._kernel, self._broken, timeout_s, self._clock)

    def all_reduce(
        self, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, num_shots: int | None = None
    ) -> FinishedWork:
        """`num_shots` is chosen by size unless it is given, the same on all ranks."""
        op = check_reducible(buffer, op)
        if self._broken.reason is not None or self._boxes.num_pending or not buffer.is_cpu:
            self._begin(buffer)  # small buffers notice the cost of a call
        shots = num_shots or (1 if buffer.nbytes <= self.one_shot_bytes else 2)
        if buffer.is_contiguous():
            return self._carry_out(self._kernel.all_reduce, buffer, op, shots)
        data, copy_back = contiguous(buffer)
        work = self._carry_out(self._kernel.all_reduce, data, op, shots)
        copy_back()
        return work

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> FinishedWork:
        check_whole(output, part, self.world_size, "all_gather")
        self._begin(output, part)
        gathered, copy_back = contiguous(output)
        work = self._carry_out(self._kernel.all_gather, gathered, part.contiguous())
        copy_back()
        return work

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> FinishedWork:
        op = check_reducible(buffer, op)
        check_whole(buffer, output, self.world_size, "reduce_scatter")
        self._begin(output, buffer)
        piece, copy_back = contiguous(output)
        work = self._carry_out(self._kernel.reduce_scatter, piece, buffer.contiguous(), op)
        copy_back()
        return work

    def broadcast(self, buffer: torch.Tensor, source: int) -> FinishedWork:
        check_rank("source", source, self.world_size)
        self._begin(buffer)
        data, copy_back = contiguous(buffer)
        work = self._carry_out(self._kernel.broadcast, data, source)
        copy_back()
        return work

    def all_to_all(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
    ) -> FinishedWork:
        if output.dtype != buffer.dtype:
            raise ValueError(f"all_to_all: dtypes differ, {output.dtype} and {buffer.dtype}")
        size = buffer.element_size()
        expected, sent = (
            [count * size for count in piece_sizes(sizes, tensor, self.world_size, what)]
            for sizes, tensor, what in ((output_sizes, output, "output"), (input_sizes, buffer, "buffer"))
        )
        self._begin(output, buffer)
        received, copy_back = contiguous(output)
        work = self._carry_out(self._kernel.all_to_all, received, buffer.contiguous(), expected, sent)
        copy_back()
        return work

    def send(self, buffer: torch.Tensor, target: int, *, tag: int = 0) -> MessageWork:
        check_rank("target", target, self.world_size)
        self._check(buffer)
        memory = as_bytes(buffer.contiguous())
        return self._boxes.send(MessageWork(self._boxes, target, tag, memory, lambda: None))

    def recv(self, buffer: torch.Tensor, source: int, *, tag: int = 0) -> MessageWork:
        check_rank("source", source, self.world_size)
        self._check(buffer)
        data, copy_back = contiguous(buffer)
        memory = as_bytes(data)
        return self._boxes.receive(MessageWork(self._boxes, source, tag, memory, copy_back))

    def barrier(self) -> FinishedWork:
        self._begin()
        return self._carry_out(self._kernel.barrier)

    def close(self) -> None:
        if not self._broken.is_closed:
            self._broken.close(self.rank)
            self._boxes.fail(CommError(f"rank {self.rank} has closed its group"))
            self._region.close()

    def _check(self, *buffers: torch.Tensor) -> None:
        if self._broken.reason is not None:
            self._broken.check()
        for buffer in buffers:
            if not buffer.is_cpu:
                raise ValueError(
                    f"shared memory takes CPU tensors, got one on {buffer.device}: use torch_distributed"
                )

    def _begin(self, *buffers: torch.Tensor) -> None:
        self._check(*buffers)
        if self._boxes.num_pending:
            self._boxes.finish()

    def _carry_out(self, operation: Callable[..., int], *arguments: Any) -> FinishedWork:
        try:
            outcome = operation(*arguments)
        except BaseException:
            self._give_up(f"rank {self.rank} was interrupted")
            raise
        if not outcome:
            return _DONE
        if outcome == Outcome.DISAGREE:
            raise ValueError(self._disagreement())
        self._give_up(self._reason)
        return FinishedWork(self._broken.reason)

    def _stalled(self, rank: int) -> bool:
        """Whether to give up waiting for a rank. The kernel asks now and then while it waits."""
        now_s = self._clock.now()
        progress = rank, self._region.progress_of(rank)
        if progress != self._awaited:
            self._awaited, self._awaited_since_s = progress, now_s
        reason = self._region.why_broken() or self._region.why_unable(rank)
        if reason is None and now_s - self._awaited_since_s > self._timeout_s:
            reason = f"rank {rank} has not answered for {self._timeout_s:g} s"
        self._reason = reason or self._reason
        return reason is not None

    def _give_up(self, reason: str) -> None:
        self._region.fail()
        self._boxes.fail(self._broken.fail(CommError(reason)))

    def _disagreement(self) -> str:
        submitted = self._kernel.submitted()
        if len(set(submitted)) == 1:
            return "all_to_all: what a rank sends is not what the other expects"
        parts = []
        for rank, (operation, dtype, argument, size) in enumerate(submitted):
            name = str(DTYPES[dtype]).removeprefix("torch.") if dtype < len(DTYPES) else "another dtype"
            what = f"{SharedOperation(operation).name.lower()} of {size} {name} ({argument})"
            parts.append(f"rank {rank}: {what}")
        return f"the ranks submitted different operations: {'; '.join(parts)}"


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return native_library()
    except KernelError as error:
        log.warning("collectives in shared memory are slow, Python adds: %s", error)
        return None


PLUGIN = SharedMemoryBackend
