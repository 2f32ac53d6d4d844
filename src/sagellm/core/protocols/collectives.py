"""Contract of collective operations over a fixed group of ranks.

Every operation has two halves: the method submits and returns a `Work` at once, `Work.poll()` reports. All
ranks submit the same operations in the same order. Buffers are contiguous one-dimensional arrays that export
the buffer protocol or DLPack; they belong to the operation until its work is done, and results are written in
place.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol


class ReduceOp(str, Enum):
    SUM = "sum"
    MAX = "max"
    MIN = "min"


class WorkStatus(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Work(Protocol):
    """One submitted operation."""

    def poll(self) -> WorkStatus:
        """Never blocks. After `DONE` or `FAILED` the answer does not change."""

    def wait(self, timeout_s: float) -> WorkStatus:
        """Block until done, failed or timed out. `PENDING`: the timeout passed and the work goes on."""

    def error(self) -> Exception | None:
        """Why the work failed. A rank that dies fails the work of all others, so that none waits for ever."""


class CommBackendProtocol(Protocol):
    """A group of `world_size` ranks, of which this is `rank`.

    After a `FAILED` work the group is broken: every later call raises `SageError`, and contents of buffers
    under way are undefined. Sizes and dtypes must agree on all ranks; where a backend can see that they do
    not, it raises `ValueError` on submission and sends nothing.
    """

    rank: int
    world_size: int

    def all_reduce(self, buffer: Any, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Every rank ends with the reduction. The order of summation is fixed: equal runs give equal bits."""

    def all_gather(self, output: Any, part: Any) -> Work:
        """Gather the parts of all ranks into `output`, in order of rank. `output` has `world_size` times the
        size of a part."""

    def reduce_scatter(self, output: Any, buffer: Any, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Rank r ends with the r-th of `world_size` equal pieces of the reduction."""

    def broadcast(self, buffer: Any, source: int) -> Work: ...

    def send(self, buffer: Any, target: int, *, tag: int = 0) -> Work:
        """Done when the buffer may be reused, which says nothing about the receiver."""

    def recv(self, buffer: Any, source: int, *, tag: int = 0) -> Work:
        """Messages of one (source, tag) arrive in the order in which they were sent."""

    def barrier(self) -> Work:
        """Done when every rank has submitted it."""

    def close(self) -> None:
        """Leave the group; pending work fails, here and on the other ranks."""
