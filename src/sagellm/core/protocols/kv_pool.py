"""Contract of the block pool: who owns which block of KV memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from sagellm.core.plan import BlockCopy
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds


class Allocation:
    """Blocks of one owner, in order of position. It grows and shrinks at its end, and is freed once.

    Made by a pool alone. `block_ids` is the pool's to change: read it, do not keep it. Empty once freed.
    """

    __slots__ = ("account", "block_ids", "owner")

    def __init__(self, owner: str, block_ids: BlockIds, account: Account = NO_ACCOUNT) -> None:
        self.owner = owner
        self.block_ids = block_ids
        self.account = account

    def __repr__(self) -> str:
        return f"Allocation({self.owner!r}, {len(self.block_ids)} blocks)"


class BlockInfo(NamedTuple):
    """The pool's record of one block; `owner` is None for a free one. `last_access_time`: when its allocation
    was made, by the pool's clock."""

    block_id: int
    owner: str | None
    sequence_id: str | None = None
    last_access_time: float = 0.0


class KVPool(Protocol):
    """A fixed number of equal blocks. `free + allocated + held == total` at all times.

    Blocks are in the hands of allocations, which the pool knows block by block, or of holders (the prefix
    index, a tier), of which it knows how many they have: a holder names its blocks when they come back. Every
    call is all or nothing: what raises `BookkeepingError` or answers None has changed nothing.
    """

    @property
    def total_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def allocate(self, num_blocks: int, owner: str, account: Account = ...) -> Allocation | None:
        """Exactly `num_blocks` blocks, or None (too few are free, or the quota says no). A negative count is
        an error."""
        ...

    def append_blocks(self, allocation: Allocation, num_blocks: int) -> BlockIds | None:
        """Exactly `num_blocks` more at the end of the allocation, or None; returns the new ones."""
        ...

    def append_block_to_each(self, allocations: Sequence[Allocation]) -> BlockIds | None:
        """One block more at the end of each allocation, or None and no change. All are of one account."""
        ...

    def shrink(self, allocation: Allocation, num_blocks: int) -> None:
        """The last `num_blocks` are free again."""
        ...

    def free(self, allocation: Allocation | Sequence[int]) -> None:
        """All of the allocation is free again; freed twice, or another pool's, is an error. A list of single
        ids is the slow path: each is looked up, and cut out of the allocation that it is in."""
        ...

    def hand_over(self, allocation: Allocation, start: int, stop: int, holder: str) -> BlockIds:
        """Blocks `[start, stop)` of the allocation leave it for `holder`; the account goes on paying."""
        ...

    def hand_back(self, holder: str, block_ids: BlockIds, allocation: Allocation, start: int) -> None:
        """Undo a `hand_over`: blocks of the holder stand in the allocation again, from place `start` on."""
        ...

    def take_back(self, holder: str, block_ids: BlockIds, account: Account = ...) -> None:
        """Blocks of a holder are free again. It is an error to return more than it has."""
        ...

    def num_held(self, holder: str) -> int: ...

    @property
    def block_info(self) -> Mapping[int, BlockInfo]:
        """Records of the blocks in use, by id. Built when asked: not for hot paths."""
        ...

    def get_utilization(self) -> float:
        """Used blocks over all blocks, 0 to 1."""
        ...

    def get_fragmentation(self) -> float:
        """External fragmentation, 0 to 1: 1 - longest free run / free blocks (0 where nothing is free)."""
        ...

    def get_block_info(self, block_id: int) -> BlockInfo:
        """The record of one block; a block of a holder is known as held by someone. The slow path."""
        ...

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: block `source` of anybody is now `target`, which was free; sources are free."""
        ...

    def check(self, held: Mapping[str, Iterable[int]] | None = None) -> None:
        """Raise `BookkeepingError` naming the block and its owner where the books do not balance.

        With the blocks that each holder says it has, every single block must be accounted for exactly once.
        """
        ...


class BlockQuota(Protocol):
    """How many blocks each account may have: a guaranteed share, a ceiling, and what is idle on loan.

    Counts blocks in use and blocks in the cache alike, on the account that allocated them. Answers in O(1),
    but for `reclaim`.
    """

    def charge(self, account: Account, num_blocks: int) -> bool:
        """Book the blocks, or answer False and change nothing: a ceiling of the tenant or class is in the
        way."""
        ...

    def refund(self, account: Account, num_blocks: int) -> None:
        """Blocks came back; more than were charged is an error."""
        ...

    def headroom(self, account: Account) -> int:
        """Blocks that the account could still be charged before a ceiling is met; all there are without
        one."""
        ...

    def headrooms(self, account: Account) -> Mapping[str, int]:
        """Blocks left below each ceiling that the account counts on, by the ceiling's name; nothing without
        one."""
        ...

    def paying(self, account: Account) -> Account:
        """The account that pays for this one: those without a share of their own pay together."""
        ...

    def ceiling(self, account: Account) -> int:
        """Blocks that the account can have at most, if nobody else shares its tenant and class."""
        ...

    def used(self, account: Account) -> int: ...

    def reclaim(
        self, account: Account, num_blocks: int, evictable: Mapping[Account, int], num_free: int = 0
    ) -> dict[Account, int] | None:
        """Who gives how many of its evictable blocks so that `account` can have `num_blocks`, or None.

        They sum to `num_blocks - num_free`, `num_free` being blocks that nobody has; to more only where a
        ceiling is in the way, since room below it comes from those that share it. Whoever is furthest above
        its guarantee gives first, down to its guarantee; then the account itself. An account within its
        guarantee gives nothing to others.
        """
        ...


class KVStorage(Protocol):
    """The bytes behind block ids: reads and writes whole blocks. The layout is the backend's property."""

    def read_block(self, block_id: int) -> Any: ...

    def write_block(self, block_id: int, payload: Any) -> None: ...

    def copy(self, copies: Sequence[BlockCopy]) -> None: ...
