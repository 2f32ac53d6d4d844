"""The slow twin of the C++ kernel, in torch and numpy.

It serves where no compiler is installed. Every operation is a sequence of steps in which each rank shows the
others one slot of bytes: first a note of what it submitted, then its data, slot by slot.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sagellm.comm.collectives._buffers import as_bytes, reduced
from sagellm.comm.collectives.shared_kernels import (
    DTYPES,
    OPS,
    Outcome,
    SharedOperation,
    Stalled,
    Submitted,
)
from sagellm.comm.collectives.shared_region import SharedRegion
from sagellm.core.errors import KernelError
from sagellm.core.protocols.collectives import ReduceOp

_WORDS_PER_RANK = 64
_YIELDS = 200
_SLEEP_S = 0.0002
_ASK_S = 0.02


class _AbortedError(Exception):
    """A wait was given up."""


def check_processor(cause: KernelError | None = None) -> None:
    """Raise `KernelError` where the processor may reorder writes, which Python cannot prevent."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise KernelError(
            f"collectives in shared memory need a C++ compiler on {platform.machine()}: install g++, or use "
            "torch_distributed"
        ) from cause


class TwinKernel:
    """The kernel in Python. Raises `KernelError` as `check_processor` does."""

    def __init__(self, region: SharedRegion, stalled: Stalled) -> None:
        check_processor()
        layout = region.layout
        self._rank, self._world_size = region.rank, layout.world_size
        self._layout, self._stalled, self._step = layout, stalled, 0
        self._words: npt.NDArray[np.uint32] = region.memory.view(np.uint32)
        self._memory = torch.from_numpy(region.memory)
        self._submitted: list[Submitted] = []

    def all_reduce(self, data: torch.Tensor, op: ReduceOp, num_shots: int) -> int:
        argument = OPS.index(op) * 4 + num_shots
        return self._run(
            SharedOperation.ALL_REDUCE, data, argument, data.numel(), self._reduce_chunks(data, data, 0, op)
        )

    def reduce_scatter(self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp) -> int:
        first = self._rank * output.numel()
        chunks = self._reduce_chunks(data, output, first, op)
        return self._run(SharedOperation.REDUCE_SCATTER, data, OPS.index(op), output.numel(), chunks)

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> int:
        sent, received = as_bytes(part), as_bytes(output).view(self._world_size, -1)

        def chunks() -> Iterator[None]:
            for start in range(0, len(sent), self._layout.slot_bytes):
                piece = sent[start : start + self._layout.slot_bytes]
                for rank, slot in enumerate(self._exchange(piece)):
                    received[rank, start : start + len(piece)] = slot[: len(piece)]
                yield

        return self._run(SharedOperation.ALL_GATHER, part, 0, part.nbytes, chunks())

    def broadcast(self, data: torch.Tensor, source: int) -> int:
        moved = as_bytes(data)

        def chunks() -> Iterator[None]:
            for start in range(0, len(moved), self._layout.slot_bytes):
                piece = moved[start : start + self._layout.slot_bytes]
                slots = self._exchange(piece if self._rank == source else piece[:0])
                piece[:] = slots[source][: len(piece)]
                yield

        return self._run(SharedOperation.BROADCAST, data, source, data.nbytes, chunks())

    def all_to_all(
        self, output: torch.Tensor, data: torch.Tensor, expected: Sequence[int], sent: Sequence[int]
    ) -> int:
        """Each rank shows all of its data; the others take what is for them."""
        world_size, rank = self._world_size, self._rank
        shown, received = as_bytes(data), as_bytes(output)
        sizes = torch.tensor([*sent, *expected], dtype=torch.int64).view(torch.uint8)

        def chunks() -> Iterator[None]:
            table = torch.stack([slot[: len(sizes)].clone() for slot in self._exchange(sizes)])
            given, wanted = table.view(torch.int64).view(world_size, 2, world_size).unbind(1)
            if not torch.equal(given, wanted.T):
                raise _DisagreementError
            begins = (given.cumsum(1) - given)[:, rank].tolist()
            places = (wanted.cumsum(1) - wanted)[rank].tolist()
            counts = given[:, rank].tolist()
            for start in range(0, int(given.sum(1).max()), self._layout.slot_bytes):
                slots = self._exchange(shown[start : start + self._layout.slot_bytes])
                for source, slot in enumerate(slots):
                    first = max(start, begins[source])
                    last = min(start + self._layout.slot_bytes, begins[source] + counts[source])
                    if first < last:
                        place = places[source] + first - begins[source]
                        received[place : place + last - first] = slot[first - start : last - start]
                yield

        return self._run(SharedOperation.ALL_TO_ALL, data, 0, 0, chunks())

    def barrier(self) -> int:
        return self._run(SharedOperation.BARRIER, torch.empty(0), 0, 0, iter(()))

    def submitted(self) -> list[Submitted]:
        return self._submitted

    def load(self, word_at: int) -> int:
        return int(self._words[word_at // 4])

    def store(self, word_at: int, value: int) -> None:
        self._words[word_at // 4] = value

    def _run(
        self,
        operation: SharedOperation,
        data: torch.Tensor,
        argument: int,
        count: int,
        chunks: Iterator[None],
    ) -> int:
        """Compare what all submitted, then carry the chunks out."""
        dtype = DTYPES.index(data.dtype) if data.dtype in DTYPES else len(DTYPES)
        note = torch.tensor([operation, dtype, argument, count], dtype=torch.int64).view(torch.uint8)
        try:
            slots = self._exchange(note)
            self._submitted = [Submitted(*slot[: len(note)].view(torch.int64).tolist()) for slot in slots]
            if len(set(self._submitted)) > 1:
                return Outcome.DISAGREE
            for _ in chunks:
                pass
        except _AbortedError:
            return Outcome.ABORTED
        except _DisagreementError:
            return Outcome.DISAGREE
        return Outcome.OK

    def _reduce_chunks(
        self, data: torch.Tensor, output: torch.Tensor, first: int, op: ReduceOp
    ) -> Iterator[None]:
        """Write elements `first` and on of the reduction of `data` to `output`."""
        flat, results = data.view(-1), output.view(-1)
        most = self._layout.slot_bytes // data.element_size()
        for start in range(0, len(flat), most):
            part = flat[start : start + most]
            slots = self._exchange(as_bytes(part))
            begin, end = max(start, first), min(start + len(part), first + len(results))
            if begin < end:
                parts = [slot[: part.nbytes].view(part.dtype)[begin - start : end - start] for slot in slots]
                results[begin - first : end - first] = reduced(parts, op)
            yield

    def _exchange(self, shown: torch.Tensor) -> list[torch.Tensor]:
        """Show bytes to the others. Returns the slots of all ranks, which are valid until the next call."""
        layout, step = self._layout, self._step
        self._step += 1
        slots = []
        for rank in range(self._world_size):
            start = layout.slot_at(rank, step)
            slots.append(self._memory[start : start + layout.slot_bytes])
        slots[self._rank][: len(shown)] = shown
        counts = self._words[layout.flags_at // 4 :: _WORDS_PER_RANK][: self._world_size]
        wanted = np.uint32(self._step & 0xFFFFFFFF)
        counts[self._rank] = wanted
        for rank in range(self._world_size):
            self._wait(counts, rank, wanted)
        return slots

    def _wait(self, counts: npt.NDArray[np.uint32], rank: int, wanted: np.uint32) -> None:
        turns, asked_s = 0, time.monotonic()
        while (int(counts[rank]) - int(wanted)) & 0x80000000:
            turns += 1
            time.sleep(0 if turns < _YIELDS else _SLEEP_S)
            if time.monotonic() - asked_s > _ASK_S:
                asked_s = time.monotonic()
                if self._stalled(rank) and (int(counts[rank]) - int(wanted)) & 0x80000000:
                    raise _AbortedError


class _DisagreementError(Exception):
    """The ranks' sizes do not fit each other."""
