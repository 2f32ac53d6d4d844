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


def check_group(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1, got rank {rank} of {world_size}")


def check_rank(name: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"{name} must be a rank from 0 to {world_size - 1}, got {rank}")


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
    """Elements of each rank's piece of a buffer. Raises `ValueError` where they do not add up."""
    if sizes is None:
        if buffer.numel() % world_size:
            raise ValueError(
                f"{what} has {buffer.numel()} elements: not {world_size} equal pieces; give sizes"
            )
        return [buffer.numel() // world_size] * world_size
    pieces = [int(size) for size in sizes]
    if len(pieces) != world_size or min(pieces) < 0 or sum(pieces) != buffer.numel():
        raise ValueError(
            f"{what}: sizes must be {world_size} counts that add up to {buffer.numel()}, got {pieces}"
        )
    return pieces


def contiguous(buffer: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
    """The buffer or a contiguous copy, and what copies a result back."""
    if buffer.is_contiguous():
        return buffer, lambda: None
    copy = buffer.contiguous()
    return copy, lambda: buffer.copy_(copy)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes, which may have any dtype."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


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
    """Whether a group is broken or closed, and why."""

    def __init__(self) -> None:
        self.reason: CommError | None = None
        self.is_closed = False

    def check(self) -> None:
        """Raise a `CommError` with the reason if the group can no longer be used."""
        if self.reason is not None:
            raise CommError(str(self.reason)) from self.reason

    def fail(self, error: CommError) -> CommError:
        """Keep the first reason, and return it."""
        self.reason = self.reason or error
        return self.reason

    def close(self, rank: int) -> None:
        self.is_closed = True
        self.fail(CommError(f"rank {rank} has closed its group"))
