"""Block tables of running requests, and what the backend lacks of them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sagellm.core.binding import Binding
from sagellm.core.blocks import NO_PAGE
from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import BlockTableDelta, RequestState
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.types import BlockIds

INDEX_OWNER = "prefix index"


@dataclass(slots=True, eq=False)
class RequestPages:
    """Pages of one running request in KV groups with one window (see `page_groups`).

    `tables`: a block table for each group. `own` has, in order of position and then of group, the pages from
    block `first_own` on; those before it are attached to the index, or gone. The request needs what is
    attached from block `needed_from` on. `end`: the leading block of the last end on its path.

    `tail`: a block before `first_own` whose pages are its own, too, and the first of them: the window has
    passed it, but the request's group copies it.
    """

    own: Allocation
    tables: list[BlockIds]
    first_own: int
    needed_from: int
    end: int | None
    tail: int | None = None

    @property
    def num_passed(self) -> int:
        """Leading blocks of `own` that the window has passed."""
        return max(0, self.needed_from - self.first_own) + (self.tail is not None)

    @property
    def first_passed(self) -> int | None:
        """The first own block that the window has passed."""
        if self.tail is None and self.needed_from > self.first_own:
            return self.first_own
        return self.tail

    def own_blocks(self, stop: int) -> list[int]:
        """Positions before `stop` that have own pages, in their order."""
        first = [] if self.tail is None else [self.tail]
        return [*first, *range(self.first_own, stop)]

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: block `source` of any table is now block `target`."""
        self.tables = [array("i", [moves.get(page, page) for page in table]) for table in self.tables]
        self.end = None if self.end is None else moves.get(self.end, self.end)

    def check(self, blocks: RequestBlocks, num_groups: int, attached: Mapping[int, BlockIds]) -> None:
        """Raise `BookkeepingError` unless the tables are what is attached, and then the request's own."""
        name, own = blocks.state.request_id, self.own.block_ids
        for number, table in enumerate(self.tables):
            if len(table) != len(blocks.block_ids):
                raise BookkeepingError(f"{name}: tables of {len(table)} and {len(blocks.block_ids)} blocks")
            if [table[i] for i in self.own_blocks(len(table))] != own[number::num_groups].tolist():
                raise BookkeepingError(f"{name}: the table of a group and its own pages differ")
            for position in range(self.needed_from, min(self.first_own, blocks.num_shared)):
                if attached[blocks.block_ids[position]][number] != table[position]:
                    raise BookkeepingError(f"{name}: a page of block {position} is not the attached one")


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """The blocks of one running request, from its admission to its release.

    `block_ids` is its block table. The first `num_shared` blocks belong to the index, where `hit` pins them;
    the blocks behind them are `own`, one for one. Once a sliding window has freed blocks of the request
    (`is_windowed`), its first `num_shared` entries mean nothing.

    `pages`: what it has in KV groups behind the first, where there are several. `kept_states`: checkpoints of
    its recurrent state that are not in the index, by depth in blocks.

    `num_exact`: KV behind so many tokens is an approximation. It belongs to this request alone: only exact KV
    enters the index, which tiers save from, and only exact tails are shared.

    `num_dropped_blocks`: so many of its own blocks were dropped (`DroppedBlocks`). Its table has `NO_PAGE` in
    their places.

    `num_reused_blocks`: the blocks that it found in the index when it was admitted. `unsent_from`: the
    backend lacks the table from this index on, because of a change that bind `unsent_since` did not send.
    """

    state: RequestState
    hit: PrefixHit
    block_ids: BlockIds
    own: Allocation
    num_shared: int
    num_reused_blocks: int
    pages: list[RequestPages] = field(default_factory=list)
    kept_states: dict[int, Allocation] = field(default_factory=dict)
    is_windowed: bool = False
    num_exact: int = sys.maxsize
    num_dropped_blocks: int = 0
    unsent_from: int | None = None
    unsent_since: int = 0

    @property
    def num_groups(self) -> int:
        """KV groups, each with a block at each index of the table."""
        return 1 + sum(len(pages.tables) for pages in self.pages)

    def allocations(self) -> list[Allocation]:
        """What it owns, of all groups and recurrent states."""
        return [self.own, *(pages.own for pages in self.pages), *self.kept_states.values()]

    def blocks_at(self, position: int) -> list[int]:
        """The block of each group at this index of its table."""
        return [self.block_ids[position], *(t[position] for pages in self.pages for t in pages.tables)]

    def table(self, first: int = 0) -> BlockIds:
        """The blocks of all groups, position by position, from position `first` on."""
        if not self.pages:
            return self.block_ids[first:] if first else self.block_ids
        tables = [self.block_ids, *(table for pages in self.pages for table in pages.tables)]
        mixed = array("i", bytes(4 * len(tables) * (len(self.block_ids) - first)))
        for number, table in enumerate(tables):
            mixed[number :: len(tables)] = table[first:]
        return mixed

    def check(self, indexed: BlockIds) -> None:
        """Raise `BookkeepingError` unless the table is `indexed`, the pinned blocks, and then its own."""
        table, shared, name = self.block_ids, self.num_shared, self.state.request_id
        own = table[shared:]
        if self.num_dropped_blocks:
            own = array("i", [block for block in own if block != NO_PAGE])
            if len(table) - shared - len(own) != self.num_dropped_blocks:
                raise BookkeepingError(
                    f"{name}: {self.num_dropped_blocks} blocks were dropped, its table says otherwise"
                )
        if own != self.own.block_ids:
            raise BookkeepingError(f"{name}: the table and the request's own blocks differ")
        if not self.is_windowed and (self.hit.num_blocks != shared or table[:shared] != indexed):
            raise BookkeepingError(f"{name}: the table and the blocks of its pinned prefix differ")


class BlockTables:
    """Owns the `RequestBlocks` of all running requests.

    Of many requests in decode, a step touches those that need a block, and those whose table changed
    otherwise (`sagellm bench micro scheduler_ir`). `num_changes` counts removals and compactions.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._by_id: dict[str, RequestBlocks] = {}
        self._by_state: dict[RequestState, RequestBlocks] = {}
        self._unsent: dict[str, RequestBlocks] = {}
        self._num_binds = 0
        self._last_executed = 0
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RequestBlocks]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> RequestBlocks:
        """Raises `KeyError` for a request that is not running."""
        return self._by_id[request_id]

    def of(self, states: Sequence[RequestState]) -> list[RequestBlocks]:
        return list(map(self._by_state.__getitem__, states))

    def find(self, state: RequestState) -> RequestBlocks | None:
        """None if the request is not running (any more)."""
        return self._by_state.get(state)

    def add(self, blocks: RequestBlocks) -> None:
        """A request is admitted."""
        self._by_id[blocks.state.request_id] = self._by_state[blocks.state] = blocks

    def remove(self, state: RequestState) -> None:
        """A request leaves the batch."""
        del self._by_id[state.request_id]
        del self._by_state[state]
        self._unsent.pop(state.request_id, None)
        self.num_changes += 1

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: block `source` of any table is now block `target`."""
        self.num_changes += 1
        for blocks in self:
            blocks.block_ids = array("i", [moves.get(block, block) for block in blocks.block_ids])
            self.mark_unsent(blocks, 0)

    # -- what the backend has been sent

    @property
    def all_sent(self) -> bool:
        """Whether the next bind sends nothing but appended blocks."""
        return not self._unsent

    def start_bind(self, binding: Binding) -> None:
        """Number a bind: it sends all changes until now, and none to come."""
        self._num_binds += 1
        binding.number = self._num_binds

    def mark_unsent(self, blocks: RequestBlocks, first: int) -> None:
        """The backend has to be sent the table from index `first` on."""
        before = blocks.unsent_from
        blocks.unsent_from = first if before is None else min(first, before)
        blocks.unsent_since = self._num_binds
        self._unsent[blocks.state.request_id] = blocks

    def executed(self, binding: Binding) -> None:
        """The backend has executed the step, and has the tables that it was sent."""
        self._last_executed = binding.number
        for name in [name for name, blocks in self._unsent.items() if binding.draft.computes(blocks.state)]:
            self.mark_sent(name)

    def mark_sent(self, request_id: str) -> None:
        """The request took part in the step that was executed last.

        The backend has its table as it was when that step was bound; another may have been bound since.
        """
        blocks = self._unsent.get(request_id)
        if blocks is not None and blocks.unsent_since < self._last_executed:
            del self._unsent[request_id]
            blocks.unsent_from = None

    def note_appended(
        self, binding: Binding, states: Sequence[RequestState], firsts: Sequence[int], block_ids: BlockIds
    ) -> None:
        """Note in the binding the new block of each request, at index `firsts[i]`.

        With several KV groups, `block_ids` has a block of each for each request.
        """
        binding.appended_to += states
        binding.appended_ids += block_ids
        each = len(block_ids) // len(states)
        for i, (state, first) in enumerate(zip(states, firsts, strict=True)):
            if not self._unsent or self._by_state[state].unsent_from is None:
                new = tuple(block_ids[i * each : (i + 1) * each])
                binding.table_deltas.append(BlockTableDelta(state.row, first * each, new))

    def note_unsent(self, binding: Binding) -> None:
        """Note in the binding which other tables the backend has to be sent."""
        for blocks in self._unsent.values():
            state, first = blocks.state, blocks.unsent_from
            if first is not None and state.decoding and binding.draft.computes(state):
                new = tuple(blocks.table(first))
                binding.table_deltas.append(BlockTableDelta(state.row, first * blocks.num_groups, new))

    def unused_share(self) -> float:
        """Share of the slots in requests' blocks without a token, 0 to 1."""
        size = self._pool.block_size
        slots = size * sum(len(blocks.block_ids) - blocks.num_dropped_blocks for blocks in self)
        tokens = sum(blocks.state.num_computed - size * blocks.num_dropped_blocks for blocks in self)
        return 1 - tokens / slots if slots else 0.0

    def check(self, index: PrefixReuseIndex) -> None:
        """Raise `BookkeepingError` unless each table is what the index and the pool say."""
        for blocks in self:
            blocks.check(index.block_ids(blocks.hit))
        known = set(self._by_state.values())
        if known != set(self) or not known.issuperset(self._unsent.values()):
            raise BookkeepingError(f"{len(self._by_id)} requests run, tables of {len(known)} are kept")


def free_leading(pool: KVPool, own: Allocation, num_blocks: int, reason: str, *, keep: int = 0) -> None:
    """Free the first blocks of an allocation behind `keep` others.

    If it raises an error, nothing has changed. `reason` is their holder for as long as that takes.
    """
    if not num_blocks:
        return
    block_ids = pool.hand_over(own, keep, keep + num_blocks, reason)
    try:
        pool.take_back(reason, block_ids, own.account)
    except Exception:
        pool.hand_back(reason, block_ids, own, keep)
        raise
