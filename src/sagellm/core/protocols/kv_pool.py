"""Contract of the block pool: the owner of each block of KV memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from sagellm.core.types import NO_ACCOUNT, Account, BlockIds


class Allocation:
    """Blocks of one owner, in order of position. It grows and shrinks at its end and is freed once. Only a
    pool makes one and changes its `block_ids`: read them, do not keep them. They are empty once freed."""

    __slots__ = ("account", "block_ids", "owner")

    def __init__(self, owner: str, block_ids: BlockIds, account: Account = NO_ACCOUNT) -> None:
        self.owner = owner
        self.block_ids = block_ids
        self.account = account

    def __repr__(self) -> str:
        return f"Allocation({self.owner!r}, {len(self.block_ids)} blocks)"


class BlockInfo(NamedTuple):
    """The pool's record of one block; `owner` is None for a free block. `last_access_time`: when its
    allocation was made, by the pool's clock."""

    block_id: int
    owner: str | None
    sequence_id: str | None = None
    last_access_time: float = 0.0


class KVPool(Protocol):
    """A fixed number of equal blocks. `free + allocated + held + unowned == total` at all times.

    A block belongs to an allocation or to a holder (the prefix index, a tier). The pool knows each block of
    an allocation, but only the number of blocks of a holder, which names them when it gives them back. Every
    call is all or nothing: if it raises `BookkeepingError` or returns None, nothing has changed.
    """

    @property
    def total_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def allocate(self, num_blocks: int, owner: str, account: Account = ...) -> Allocation | None:
        """Exactly `num_blocks` blocks; None if too few are free or the quota refuses them."""

    def append_blocks(self, allocation: Allocation, num_blocks: int) -> BlockIds | None:
        """Exactly `num_blocks` more at the end of the allocation, or None. Returns the new ones."""

    def append_block_to_each(self, allocations: Sequence[Allocation]) -> BlockIds | None:
        """One block more at the end of each allocation, or None. All must be of one account."""

    def shrink(self, allocation: Allocation, num_blocks: int) -> None:
        """Free the last `num_blocks` blocks."""

    def free(self, allocation: Allocation | Sequence[int], *others: Allocation) -> None:
        """Free all blocks of live allocations; none if one is not live. Single ids are the slow
        path: each is looked up, and cut out of the allocation that it is in."""

    def hand_over(self, allocation: Allocation, start: int, stop: int, holder: str) -> BlockIds:
        """Move blocks `[start, stop)` from the allocation to `holder`; the account stays charged."""

    def hand_back(self, holder: str, block_ids: BlockIds, allocation: Allocation, start: int) -> None:
        """Undo a `hand_over`: blocks of the holder return into the allocation, at index `start`."""

    def take_back(self, holder: str, block_ids: BlockIds, account: Account = ...) -> None:
        """Free blocks of a holder; it cannot return more than it has."""

    def num_held(self, holder: str) -> int: ...

    def keep(self, block_ids: Sequence[int]) -> None:
        """A transfer reads blocks that are in use.

        If they are freed, no owner gets them before `let_go`, which is called once for each `keep`.
        """

    def let_go(self, block_ids: Sequence[int]) -> None:
        """They are read no longer."""

    @property
    def num_kept(self) -> int:
        """Blocks that are kept. They cannot move."""

    @property
    def num_unowned(self) -> int:
        """Those of them that were freed."""

    @property
    def block_info(self) -> Mapping[int, BlockInfo]:
        """Records of the blocks in use, by id. Built on each access: not for hot paths."""

    def get_utilization(self) -> float:
        """Used blocks over all blocks, 0 to 1."""

    def get_fragmentation(self) -> float:
        """External fragmentation, 0 to 1: 1 - longest free run / free blocks. 0 where nothing is free."""

    def get_block_info(self, block_id: int) -> BlockInfo:
        """The record of one block. The slow path; the owner of a held block may be one of several holders."""

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: each block `source` is now block `target`, which was free."""

    def check(self, held: Mapping[str, Iterable[int]] | None = None) -> None:
        """Raise `BookkeepingError` where blocks and owners do not add up, naming both. With the blocks that
        each holder says it has, every single block must be accounted for exactly once."""


class BlockQuota(Protocol):
    """How many blocks each account may have: a guaranteed share and a ceiling.

    Idle guarantees are lent. Blocks in use and in the cache count alike, for the account that allocated them.
    Answers in O(1), but for `reclaim`.
    """

    def charge(self, account: Account, num_blocks: int) -> bool:
        """Charge the blocks; False, and no change, if that exceeds a ceiling."""

    def refund(self, account: Account, num_blocks: int) -> None:
        """Take back a charge; never more than was charged."""

    def headroom(self, account: Account) -> int:
        """Blocks that the account can still be charged; without a ceiling, the whole pool."""

    def headrooms(self, account: Account) -> Mapping[str, int]:
        """Blocks left below each ceiling of its tenant and class, by name."""

    def paying(self, account: Account) -> Account:
        """The account that is charged for this one. Those without a share are charged together."""

    def ceiling(self, account: Account) -> int:
        """Blocks that the account can have if it alone uses its share."""

    def used(self, account: Account) -> int: ...

    def reclaim(
        self, account: Account, num_blocks: int, evictable: Mapping[Account, int], num_free: int = 0
    ) -> dict[Account, int] | None:
        """Evictable blocks that each account gives so that `account` can have `num_blocks`.

        They sum to `num_blocks - num_free`, where `num_free` blocks belong to no account; to more only where
        a ceiling is in the way, since headroom below it comes from the accounts that share it. The account
        furthest above its guarantee gives first, down to its guarantee; then `account` itself. An account
        within its guarantee gives nothing to others. None if there is no way.
        """
