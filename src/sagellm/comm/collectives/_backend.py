"""`CheckedBackend`: the checks and copies that every backend needs, in front of its operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from sagellm.comm.collectives._buffers import (
    Broken,
    Finish,
    as_bytes,
    as_result,
    as_sent,
    check_group,
    check_rank,
    check_reducible,
    check_tag,
    check_whole,
    piece_sizes,
)
from sagellm.core.protocols.collectives import ReduceOp, Work


class CheckedBackend(ABC):
    """Checks arguments, and gives tensors in one piece to the operations of a subclass.

    Those are the methods with an underscore. They write to the first tensor, and call `finish` when the
    result is there. The subclass has the whole of all_reduce, whose time matters most. Bad input raises
    before anything is sent.
    """

    def __init__(self, rank: int, world_size: int, broken: Broken | None) -> None:
        check_group(rank, world_size)
        self.rank, self.world_size = rank, world_size
        self._broken = broken or Broken()
        self._is_closed = False

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Work:
        check_whole(output, part, self.world_size, "all_gather")
        self._check(output, part)
        gathered, finish = as_result(output)
        return self._all_gather(gathered, as_sent(part, gathered), finish)

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        op = check_reducible(buffer, op)
        check_whole(buffer, output, self.world_size, "reduce_scatter")
        self._check(output, buffer)
        piece, finish = as_result(output)
        return self._reduce_scatter(piece, as_sent(buffer, piece), op, finish)

    def broadcast(self, buffer: torch.Tensor, source: int) -> Work:
        check_rank("source", source, self.world_size)
        self._check(buffer)
        data, finish = as_result(buffer)
        return self._broadcast(data, source, finish)

    def all_to_all(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
    ) -> Work:
        if output.dtype != buffer.dtype:
            raise ValueError(f"all_to_all: dtypes differ, {output.dtype} and {buffer.dtype}")
        expected = piece_sizes(output_sizes, output, self.world_size, "output")
        sizes = piece_sizes(input_sizes, buffer, self.world_size, "buffer")
        self._check(output, buffer)
        received, finish = as_result(output)
        return self._all_to_all(received, as_sent(buffer, received), expected, sizes, finish)

    def send(self, buffer: torch.Tensor, target: int, *, tag: int = 0) -> Work:
        check_rank("target", target, self.world_size)
        check_tag(tag)
        self._check(buffer)
        return self._send(as_bytes(as_sent(buffer)), target, tag)

    def recv(self, buffer: torch.Tensor, source: int, *, tag: int = 0) -> Work:
        check_rank("source", source, self.world_size)
        check_tag(tag)
        self._check(buffer)
        received, finish = as_result(buffer)
        return self._recv(as_bytes(received), source, tag, finish)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._broken.close(self.rank)
            self._leave()

    def _check(self, *buffers: torch.Tensor) -> None:
        """Raise `CommError` where the group is broken, `ValueError` for buffers that it cannot take."""
        self._broken.check()

    @abstractmethod
    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work: ...

    @abstractmethod
    def barrier(self) -> Work: ...

    @abstractmethod
    def _all_gather(self, output: torch.Tensor, part: torch.Tensor, finish: Finish) -> Work: ...

    @abstractmethod
    def _reduce_scatter(
        self, output: torch.Tensor, data: torch.Tensor, op: ReduceOp, finish: Finish
    ) -> Work: ...

    @abstractmethod
    def _broadcast(self, data: torch.Tensor, source: int, finish: Finish) -> Work: ...

    @abstractmethod
    def _all_to_all(
        self,
        output: torch.Tensor,
        data: torch.Tensor,
        expected: Sequence[int],
        sent: Sequence[int],
        finish: Finish,
    ) -> Work:
        """Sizes in bytes, by rank."""

    @abstractmethod
    def _send(self, memory: torch.Tensor, target: int, tag: int) -> Work:
        """`memory` are bytes, as in `_recv`."""

    @abstractmethod
    def _recv(self, memory: torch.Tensor, source: int, tag: int, finish: Finish) -> Work: ...

    @abstractmethod
    def _leave(self) -> None:
        """End pending work with an error, and free what the group holds. Called once."""
