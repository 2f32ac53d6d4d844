"""Contract of the block pool: who owns which block of KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sagellm.core.plan import BlockCopy
from sagellm.core.types import TransportPlan


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks given to one owner in one go; hand it back whole with `free`."""

    owner: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """The pool's record of one block; `owner` is None for a free one. `last_access_time` is the clock's."""

    block_id: int
    owner: str | None
    sequence_id: str | None = None
    last_access_time: float = 0.0


class KVPool(Protocol):
    """A fixed number of equal blocks. `free + used == total` at all times.

    `allocate` is all or nothing. Freeing what is not allocated, or not owned, raises `BookkeepingError` and
    changes nothing.
    """

    @property
    def total_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def allocate(self, num_blocks: int, owner: str) -> Allocation | None:
        """Exactly `num_blocks` blocks, or None. A negative count is an error."""
        ...

    def free(self, allocation: Allocation | Sequence[int]) -> None:
        """Give blocks back; a list of ids is the slow path."""
        ...

    def hand_over(self, block_ids: Sequence[int], owner: str) -> None:
        """Blocks in use change their owner without being freed (a request's blocks enter the prefix
        index)."""
        ...

    def get_utilization(self) -> float:
        """Used blocks over all blocks, 0 to 1."""
        ...

    def get_fragmentation(self) -> float:
        """External fragmentation, 0 to 1: 1 - longest free run / free blocks (0 where nothing is free)."""
        ...

    def get_block_info(self, block_id: int) -> BlockInfo: ...

    def check(self) -> None:
        """Raise `BookkeepingError` naming the block and its owner where the books do not balance."""
        ...


class KVStorage(Protocol):
    """The bytes behind block ids: reads and writes whole blocks. The layout is the backend's property."""

    def read_block(self, block_id: int) -> Any: ...

    def write_block(self, block_id: int, payload: Any) -> None: ...

    def copy(self, copies: Sequence[BlockCopy]) -> None: ...


class KVBackendProtocol(Protocol):
    """The design documents' door to a host engine's KV: pool operations plus migration of blocks."""

    def allocate(self, num_blocks: int, owner: str) -> Allocation | None: ...

    def free(self, allocation: Allocation | Sequence[int]) -> None: ...

    def migrate(self, plan: TransportPlan) -> str:
        """Begin to move blocks; returns a ticket for `poll`."""
        ...

    def poll(self) -> Sequence[str]:
        """Tickets of the moves that have ended since the last call."""
        ...

    def get_utilization(self) -> float: ...

    def get_fragmentation(self) -> float: ...

    def get_block_info(self, block_id: int) -> BlockInfo: ...
