"""Contract of collective operations over a fixed group of ranks.

Every operation has two halves: the method submits it and returns a `Work`, `Work.wait()` ends it. All ranks
submit the same operations in the same order, sends and receives included. A backend may do the whole
operation inside the method, so a caller that wants to compute meanwhile gives the backend to a thread: the
methods let other threads run. One thread at a time calls a backend, and no signal's handler does meanwhile.

On a device with streams (NCCL, HCCL, ...) an operation begins behind what the current stream was given, and
`Work.wait()` lets the current stream wait for it, as torch's does: what is launched afterwards sees the
result, and the host goes on. `Work.wait(timeout_s)` lets the host wait too, and `Work.poll` tells what the
device has done. A rank that dies there is found by the vendor's library, which may end the process.

Buffers are torch tensors. Those that are not contiguous are copied in and out; a result whose elements share
memory (an expanded tensor) is a `ValueError`. An input may lie in the memory of the result. A buffer belongs
to the operation until its work is done, and results are written in place. Reductions take float64, float32,
float16, bfloat16, int64, int32, int16, int8 and uint8; everything else takes any dtype. Sums of float16 and
bfloat16 are formed in at least that precision, those of integers wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class ReduceOp(str, Enum):
    SUM = "sum"
    MAX = "max"
    MIN = "min"

    __hash__ = str.__hash__  # that of Enum is Python code


class WireFormat(str, Enum):
    """How floating-point values travel. `EXACT`: as they are; the others round, within a known bound."""

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"


class WorkStatus(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Work(Protocol):
    """One submitted operation."""

    def poll(self) -> WorkStatus:
        """Never blocks. After `DONE` or `FAILED` the answer does not change. `DONE`: the result is there."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the work is done. Returns False if the timeout passed first; the work goes on.

        Without a timeout the group's own bounds the wait; on a device with streams the current stream waits
        instead, not the host. Raises `error()` where the work failed, so that no
        caller takes the contents of a failed buffer for a result.
        """

    def error(self) -> Exception | None:
        """Why the work failed. A rank that dies fails the work of all others, so that none waits for ever."""


class RendezvousStore(Protocol):
    """What ranks find each other through: torch's `TCPStore` or `FileStore`, made by the launcher."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes:
        """The value; waits until another rank has set it, at most the store's timeout."""


class CommBackendProtocol(Protocol):
    """A group of `world_size` ranks, of which this is `rank`.

    A backend is made by `registry("collectives").create(name, rank=, world_size=, store=, ...)`. The
    constructor returns when all ranks have called theirs. After a failed work the group is broken: every
    later call raises `CommError`, and contents of buffers under way are undefined. So it is after a call that
    an exception has left in the middle, as a signal's handler raises it. Sizes and dtypes must
    agree on all ranks; where a rank can see that they do not, it raises `ValueError`.
    """

    rank: int
    world_size: int

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Every rank ends with the reduction, in equal bits.

        The order of summation depends on sizes and `world_size` only: equal runs give equal bits.
        A backend that adds in order of rank whatever the size may have a true `adds_in_order`.
        """

    def all_gather(self, output: torch.Tensor, part: torch.Tensor) -> Work:
        """Gather the parts of all ranks into `output`, in order of rank. `output` has `world_size` times as
        many elements as a part."""

    def reduce_scatter(self, output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        """Rank r ends with the r-th of `world_size` equal pieces of the reduction. `buffer` is kept."""

    def broadcast(self, buffer: torch.Tensor, source: int) -> Work:
        """Every rank ends with the buffer of rank `source`."""

    def all_to_all(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
    ) -> Work:
        """Rank r's i-th piece of `buffer` becomes rank i's r-th piece of `output`.

        Sizes are in elements along the flattened tensors and add up to them; without sizes all pieces are
        equal. What r sends to i must be what i expects from r.
        """

    def send(self, buffer: torch.Tensor, target: int, *, tag: int = 0) -> Work:
        """Done when the buffer may be reused, which says nothing about the receiver.

        A tag is a whole number from 0 to 2^31 - 1. A rank may leave a message that no receive asks for with
        its sender.
        """

    def recv(self, buffer: torch.Tensor, source: int, *, tag: int = 0) -> Work:
        """Messages of one (source, tag) arrive in the order in which they were sent.

        Raises `ValueError` from `wait` where the message has another size; the group goes on. Between tags a
        receive may overtake as many messages as the receiver holds (shared memory: 64 MB from a rank).
        """

    def barrier(self) -> Work:
        """Done when every rank has submitted it."""

    def close(self) -> None:
        """Leave the group. Pending work fails, here and on the other ranks. May be called twice."""


class RankGroup(CommBackendProtocol, Protocol):
    """A backend with wire formats of fewer bytes, and many tensors in one call."""

    def all_reduce(
        self,
        buffer: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        wire: WireFormat = WireFormat.EXACT,
    ) -> Work:
        """As the backend's. Other wire formats than `EXACT` round the result, alike on all ranks."""

    def all_reduce_many(self, buffers: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM) -> Work:
        """Reduce each buffer in place; those of one dtype travel together."""
