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

from sagellm.comm.collectives._backend import CheckedBackend
from sagellm.comm.collectives._buffers import (
    Broken,
    Finish,
    FinishedWork,
    as_result,
    check_reducible,
    no_copy,
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
from sagellm.comm.collectives.shared_twin import TwinKernel, check_processor
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


class SharedMemoryBackend(CheckedBackend):
    """One rank of a group on this host, for CPU tensors.

    An operation but a send or a receive ends inside its method. Sends and receives move on when the rank
    submits, polls or waits, and end before the next collective begins. The sizes are those of rank 0:
    `slot_bytes` are shown to the others at a time, `cell_bytes` are a part of a message, and up to
    `one_shot_bytes` are reduced in one shot. A peer that is alive and does not answer for `timeout_s` counts
    as dead; with `math.inf` a rank may wait for work for days. Without `native` the group uses the kernel's
    slow twin. `region`: memory that all ranks have mapped already, which the group closes. `broken`: of
    another backend, with which this one fails.
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
        region: SharedRegion | None = None,
        broken: Broken | None = None,
    ) -> None:
        super().__init__(rank, world_size, broken)
        if world_size > MOST_RANKS:
            raise ValueError(f"shared memory takes at most {MOST_RANKS} ranks, got {world_size}")
        if slot_bytes % 4096 or slot_bytes < _LEAST_SLOT_BYTES or cell_bytes % 64 or cell_bytes <= 0:
            raise ValueError(
                f"slot_bytes must be a multiple of 4096 and cell_bytes of 64, got {slot_bytes}, {cell_bytes}"
            )
        self._timeout_s, self._clock = timeout_s, clock or MonotonicClock()
        self._awaited, self._awaited_since_s = _NOTHING, 0.0
        self._reason = ""
        """Why the last long wait was given up."""
        self._is_busy = False
        library = usable_kernel() if native else None
        layout = RegionLayout(world_size, slot_bytes, cell_bytes, one_shot_bytes)
        self._region = region or SharedRegion(rank, store, layout, min(timeout_s, TIMEOUT_S), self._clock)
        self.one_shot_bytes = self._region.layout.one_shot_bytes
        self._broken.elsewhere = self._region.why_broken
        self._broken.on_failure.append(lambda _: self._region.fail())
        try:
            self.is_native = self._region.join(has_kernel=library is not None)
            self._kernel: Kernel
            if library is not None and self.is_native:
                self._kernel = NativeKernel(library, self._region, self._stalled)
            else:
                self._kernel = TwinKernel(self._region, self._stalled)
            self._boxes = Mailboxes(self._region, self._kernel, self._broken, timeout_s, self._clock)
        except BaseException:
            self._region.close()
            raise

    def all_reduce(
        self, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, num_shots: int | None = None
    ) -> FinishedWork:
        """`num_shots` is chosen by size unless it is given, the same on all ranks."""
        op = check_reducible(buffer, op)
        if self._broken.reason is not None or not buffer.is_cpu:
            self._check(buffer)  # small buffers notice the cost of a call
        data, finish = as_result(buffer)
        shots = num_shots or (1 if data.nbytes <= self.one_shot_bytes else 2)
        return self._carry_out(self._kernel.all_reduce, finish, data, op, shots)

    def end_messages(self) -> None:
        """Wait for all sends and receives. Raises `CommError` if the group breaks; what else fails is said by
        the work's own `wait`."""
        if self._boxes.pending:
            self._boxes.finish()
            self._broken.check()

    def barrier(self) -> FinishedWork:
        self._check()
        return self._carry_out(self._kernel.barrier, no_copy)

    def _all_gather(self, output: torch.Tensor, part: torch.Tensor, finish: Finish) -> FinishedWork:
        return self._carry_out(self._kernel.all_gather, finish, output, part)

    def _reduce_scatter(
        self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp, finish: Finish
    ) -> FinishedWork:
        return self._carry_out(self._kernel.reduce_scatter, finish, output, data, op)

    def _broadcast(self, data: torch.Tensor, source: int, finish: Finish) -> FinishedWork:
        return self._carry_out(self._kernel.broadcast, finish, data, source)

    def _all_to_all(
        self,
        output: torch.Tensor,
        data: torch.Tensor,
        expected: Sequence[int],
        sent: Sequence[int],
        finish: Finish,
    ) -> FinishedWork:
        return self._carry_out(self._kernel.all_to_all, finish, output, data, expected, sent)

    def _send(self, memory: torch.Tensor, target: int, tag: int) -> MessageWork:
        return self._boxes.submit(MessageWork(self._boxes, target, tag, memory))

    def _recv(self, memory: torch.Tensor, source: int, tag: int, finish: Finish) -> MessageWork:
        return self._boxes.submit(MessageWork(self._boxes, source, tag, memory, finish))

    def _leave(self) -> None:
        self._boxes.fail(CommError(f"rank {self.rank} has closed its group"))
        self._region.close()

    def _check(self, *buffers: torch.Tensor) -> None:
        self._broken.check()
        for buffer in buffers:
            if not buffer.is_cpu:
                raise ValueError(
                    f"shared memory takes CPU tensors, got one on {buffer.device}: use torch_distributed"
                )

    def _carry_out(self, operation: Callable[..., int], finish: Finish, *arguments: Any) -> FinishedWork:
        if self._boxes.pending:
            self.end_messages()
        if self._is_busy:  # in the handler of a signal, say: two operations would take each other's steps
            self._broken.fail(CommError(f"rank {self.rank} was called within an operation"))
            self._broken.check()
        self._is_busy = True
        try:
            outcome = operation(*arguments)
            if not outcome:
                finish()
        except BaseException as error:
            self._broken.fail(CommError(f"rank {self.rank} was interrupted: {error!r}"))
            raise
        self._is_busy = False
        if not outcome:
            return _DONE
        if outcome == Outcome.DISAGREE:
            raise ValueError(self._disagreement())
        return FinishedWork(self._broken.fail(CommError(self._reason)))

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
def usable_kernel() -> ctypes.CDLL | None:
    """The C++ kernel, or None where its slow twin takes its place.

    Raises `KernelError` where neither can be used.
    """
    try:
        return native_library()
    except KernelError as error:
        check_processor(error)
        log.warning("collectives in shared memory are slow, Python adds: %s", error)
        return None


PLUGIN = SharedMemoryBackend
