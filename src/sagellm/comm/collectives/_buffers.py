"""What all backends share: checks of arguments, views of buffers, the reduction in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sagellm.core.errors import CommError
from sagellm.core.protocols.collectives import ReduceOp, WorkStatus

REDUCIBLE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
LARGEST_TAG = 2**31 - 1
Finish = Callable[[], object]
"""What copies a result to where the caller wants it."""


class FinishedWork:
    """An operation that ended inside the call that submitted it."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def poll(self) -> WorkStatus:
        return WorkStatus.DONE if self._error is None else WorkStatus.FAILED

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._error is not None:
            raise self._error
        return True

    def error(self) -> Exception | None:
        return self._error

    def then(self, copy: Finish) -> None:
        """Copy the result."""
        if self._error is None:
            copy()


def check_group(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1, got rank {rank} of {world_size}")


def check_rank(name: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"{name} must be a rank from 0 to {world_size - 1}, got {rank}")


def check_tag(tag: int) -> None:
    if type(tag) is not int or not 0 <= tag <= LARGEST_TAG:
        raise ValueError(f"tag must be a whole number from 0 to {LARGEST_TAG}, got {tag!r}")


_IS_REDUCIBLE = frozenset(REDUCIBLE)


def check_reducible(buffer: torch.Tensor, op: ReduceOp) -> ReduceOp:
    """The operation. Raises `ValueError` for a dtype that cannot be reduced."""
    if buffer.dtype not in _IS_REDUCIBLE:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE)
        raise ValueError(f"{buffer.dtype} cannot be reduced; {names} can")
    return op if type(op) is ReduceOp else ReduceOp(op)


def check_whole(whole: torch.Tensor, part: torch.Tensor, world_size: int, what: str) -> None:
    """Raise `ValueError` unless `whole` is `world_size` times `part`."""
    if whole.dtype != part.dtype:
        raise ValueError(f"{what}: dtypes differ, {whole.dtype} and {part.dtype}")
    if whole.numel() != world_size * part.numel():
        raise ValueError(
            f"{what}: the whole has {whole.numel()} elements, not {world_size} times {part.numel()}"
        )


def piece_sizes(sizes: Sequence[int] | None, buffer: torch.Tensor, world_size: int, what: str) -> list[int]:
    """Bytes of each rank's piece of a buffer, from `sizes` in elements.

    Raises `ValueError` where they do not add up.
    """
    if sizes is None:
        if buffer.numel() % world_size:
            raise ValueError(
                f"{what} has {buffer.numel()} elements: not {world_size} equal pieces; give sizes"
            )
        return [buffer.nbytes // world_size] * world_size
    pieces = [int(size) for size in sizes]
    if len(pieces) != world_size or min(pieces) < 0 or sum(pieces) != buffer.numel():
        raise ValueError(
            f"{what}: sizes must be {world_size} counts that add up to {buffer.numel()}, got {pieces}"
        )
    return [size * buffer.element_size() for size in pieces]


def as_result(buffer: torch.Tensor) -> tuple[torch.Tensor, Finish]:
    """The buffer's values in one piece, and what copies a result back.

    Raises `ValueError` for a buffer whose elements share memory: no result could be written to it.
    """
    if buffer.is_contiguous() and not (buffer.is_neg() or buffer.is_conj()):
        return buffer, no_copy
    check_apart(buffer)
    copy = buffer.detach().resolve_conj().resolve_neg().contiguous()

    def copy_back() -> None:
        with torch.no_grad():
            buffer.copy_(copy)

    return copy, copy_back


def as_sent(buffer: torch.Tensor, result: torch.Tensor | None = None) -> torch.Tensor:
    """The buffer's values in one piece, in other memory than the result."""
    sent = buffer.resolve_conj().resolve_neg().contiguous()
    if result is None:
        return sent
    first, other = sent.data_ptr(), result.data_ptr()
    return sent.clone() if first < other + result.nbytes and other < first + sent.nbytes else sent


def check_apart(buffer: torch.Tensor) -> None:
    """Raise `ValueError` unless each stride leads beyond all elements of the smaller ones."""
    if buffer.is_contiguous():
        return
    last = 0
    for stride, size in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if size > 1 and buffer.numel():
            if stride <= last:
                raise ValueError(
                    f"elements of a result share memory (shape {tuple(buffer.shape)}, strides "
                    f"{buffer.stride()}): give a tensor that has its own, as `clone` makes it"
                )
            last += stride * (size - 1)


def no_copy() -> None:
    """Of operations whose result lies where the caller wants it, or that have none."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes, which may have any dtype."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def reduced(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reduction, in order of rank; of float16 and bfloat16 in float32, rounded once."""
    is_short = parts[0].dtype in (torch.float16, torch.bfloat16)
    total, *others = [part.float() for part in parts] if is_short else parts
    for part in others:
        if op is ReduceOp.SUM:
            total = total + part
        else:
            first = total > part if op is ReduceOp.MAX else total < part
            total = torch.where(first | (total != total), total, part)
    return total.to(parts[0].dtype)


class Broken:
    """Whether a group is broken or closed, and why. Backends that share one break together.

    `on_failure` are called once, when this rank finds the group broken. `elsewhere` says why another rank has
    found it broken; None if none has.
    """

    def __init__(self) -> None:
        self.reason: CommError | None = None
        self.on_failure: list[Callable[[CommError], object]] = []
        self.elsewhere: Callable[[], str | None] = lambda: None

    def check(self) -> None:
        """Raise a `CommError` with the reason if the group can no longer be used."""
        if self.reason is None and (found := self.elsewhere()) is not None:
            self.fail(CommError(found))
        if self.reason is not None:
            raise CommError(str(self.reason)) from self.reason

    def fail(self, error: CommError) -> CommError:
        """Keep the first reason, and return it."""
        if self.reason is None:
            self.reason = error
            for call in self.on_failure:
                call(error)
        return self.reason

    def close(self, rank: int) -> None:
        """The rank leaves. The others learn it where they wait for it, so nothing is called."""
        if self.reason is None:
            self.reason = CommError(f"rank {rank} has closed its group")
