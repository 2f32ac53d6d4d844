"""`PageGroups`: the blocks of KV groups behind the first. Which cached prefixes they still serve.

The layers of a model are dealt into groups (`core.types.KVGroup`). Each group takes one block of the pool, a
page, for `block_size` tokens, and all groups of a request have equally long block tables. The first group
sees all tokens and leads: its blocks are those that the prefix index knows. A page of another group is
attached to the leading block of the same tokens, and leaves with it at the latest.

    own        of a running request, behind its indexed prefix; what its window has passed is freed first
    attached   to a block of the index, and there one of
      needed     in the window of a running request: cannot go
      kept       in the last window of a prefix that ended here: goes with the prefix
      behind     neither: goes before any cached prefix, the longest unneeded first

Pages of equal size for all kinds of layers are the way of Zhang et al. 2025, "Jenga" (arXiv:2503.18292). What
is kept is ours: the last three ends of a path, so that a prompt sent again, or with its last turn edited,
finds its window; the last three from which requests went two ways, and all with more ways. With an end go the
branches from it to which no request came back: an agent that drops its reasoning leaves one with each turn.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from sagellm.core.blocks import NO_PAGE, cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.types import BlockIds, KVGroup
from sagellm.kvmgr.manager.checkpoints import Checkpoints
from sagellm.kvmgr.manager.tables import (
    INDEX_OWNER,
    BlockTables,
    RequestBlocks,
    RequestPages,
    free_leading,
)
from sagellm.kvmgr.manager.window_pages import WindowPages

BEHIND_WINDOW = "behind the window"


class PageGroups:
    """Pages of all groups behind the first, for all running requests and the index.

    Its blocks count as the index's in the pool. There are no quotas: one account pays for everything.
    `max_chunk` is the most tokens that one step computes of a request. `num_passed` counts the own pages of
    all requests that their windows have passed.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        pool: KVPool,
        tables: BlockTables,
        max_chunk: int,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        counts = Counter(group.window for group in groups[1:])
        if [group.window for group in groups[1:]] != list(counts.elements()):
            raise ValueError("KV groups with the same window must follow each other")
        self._pool, self._tables, self._block_size = pool, tables, pool.block_size
        self.rules = [WindowPages(window, count, pool.block_size) for window, count in counts.items()]
        self.per_block = max(1, len(groups))
        self.checkpoints = checkpoints
        self.num_passed = 0
        self._with_passed: dict[RequestBlocks, None] = {}
        self._detached = array("i")  # from all blocks, not yet back in the pool
        self._chunk_blocks = cdiv(max_chunk, pool.block_size) + 1

    # -- prefix hits

    def servable(self, leads: Sequence[int]) -> int:
        """The longest prefix of these leading blocks from which all groups can go on."""
        longest = self._with_windows(leads)
        while self.checkpoints is not None:
            kept = self.checkpoints.servable(leads[:longest])
            longest = self._with_windows(leads[:kept])
            if longest == kept:
                break
        return longest

    def _with_windows(self, leads: Sequence[int]) -> int:
        """The longest prefix of these leading blocks whose last windows all groups have."""
        longest = at = len(leads)
        windowed = [rule for rule in self.rules if rule.window is not None]
        while at > 0:
            at -= 1
            reaching = [r for r in windowed if r.first_needed(longest * self._block_size) <= at]
            if not reaching:
                break
            if any(leads[at] not in rule.attached for rule in reaching):
                longest = at
        return longest

    def hold(self, leads: Sequence[int]) -> None:
        """Keep what a prefix with these leading blocks needs, until `let_go`."""
        for rule in self.rules:
            rule.need(leads[rule.first_needed(len(leads) * self._block_size) :])
        if self.checkpoints is not None and leads:
            self.checkpoints.need(leads[-1])

    def let_go(self, leads: Sequence[int]) -> None:
        """Undo `hold`."""
        for rule in self.rules:
            rule.pass_by(leads[rule.first_needed(len(leads) * self._block_size) :])
        if self.checkpoints is not None and leads:
            self.checkpoints.let_go(leads[-1])

    # -- running requests

    def admit(self, blocks: RequestBlocks) -> None:
        """Give a request the tables of all groups. They begin with its pinned hit.

        If it raises an error, nothing has changed.
        """
        leads, name = blocks.block_ids, blocks.state.request_id
        allocations: list[Allocation] = []
        try:
            for _ in self.rules:
                own = self._pool.allocate(0, name)
                assert own is not None
                allocations.append(own)
        except Exception:
            for own in allocations:
                self._pool.free(own)
            raise
        for rule, own in zip(self.rules, allocations, strict=True):
            first = rule.first_needed(len(leads) * self._block_size)
            tables = [array("i", [NO_PAGE]) * first for _ in range(rule.num_groups)]
            for lead in leads[first:]:
                for table, page in zip(tables, rule.attached[lead], strict=True):
                    table.append(page)
            end = next(filter(rule.has_end, reversed(leads)), None)
            rule.use_end(end)
            blocks.pages.append(RequestPages(own, tables, len(leads), first, end))
            rule.need(leads[first:])
        if self.checkpoints is not None:
            self.checkpoints.admit(blocks)

    def append(self, blocks: RequestBlocks, num_blocks: int) -> None:
        """Append pages for so many blocks to every table. Enough are free.

        If it raises an error, nothing has changed.
        """
        taken: list[BlockIds] = []
        try:
            for rule, pages in zip(self.rules, blocks.pages, strict=True):
                ids = self._pool.append_blocks(pages.own, num_blocks * rule.num_groups)
                assert ids is not None
                taken.append(ids)
        except Exception:
            for pages, ids in zip(blocks.pages, taken, strict=False):
                self._pool.shrink(pages.own, len(ids))
            raise
        for rule, pages, ids in zip(self.rules, blocks.pages, taken, strict=True):
            for j, table in enumerate(pages.tables):
                table += ids[j :: rule.num_groups]

    def shrink(self, blocks: RequestBlocks, num_blocks: int) -> None:
        """Undo `append`."""
        for rule, pages in zip(self.rules, blocks.pages, strict=True):
            self._pool.shrink(pages.own, num_blocks * rule.num_groups)
            for table in pages.tables:
                del table[len(table) - num_blocks :]

    def advance(self, requests: Iterable[RequestBlocks]) -> None:
        """The windows of requests have moved on to their computed tokens."""
        for blocks in requests:
            for rule, pages in zip(self.rules, blocks.pages, strict=True):
                first = rule.first_needed(blocks.state.num_computed)
                if first > pages.needed_from:
                    rule.pass_by(blocks.block_ids[pages.needed_from : min(first, blocks.num_shared)])
                    self._move(blocks, rule, pages, needed_from=first)

    def hand_over(self, blocks: RequestBlocks, num_blocks: int, handed: list[BlockIds]) -> None:
        """Hand own pages of the first `num_blocks` blocks to the index.

        Those of each rule go into `handed`.
        """
        for rule, pages in zip(self.rules, blocks.pages, strict=True):
            count = len(pages.own_blocks(num_blocks)) * rule.num_groups
            handed.append(self._pool.hand_over(pages.own, 0, count, INDEX_OWNER))

    def hand_back(self, blocks: RequestBlocks, handed: Sequence[BlockIds]) -> None:
        """Undo `hand_over`, also one that an error has broken off."""
        for pages, ids in zip(blocks.pages, handed, strict=False):
            self._pool.hand_back(INDEX_OWNER, ids, pages.own, 0)

    def registered(
        self, blocks: RequestBlocks, handed: Sequence[BlockIds], num_before: int, num_existing: int
    ) -> None:
        """Attach the pages `handed` over to the `num_shared` blocks of a request.

        Its first `num_before` were there before, and `num_existing` of some request. Pages that the index
        lacks become its own; of others the request's are freed, and it goes on with those of the index. An
        error of the pool comes when all else is done; the pages are freed later then.
        """
        leads, duplicates = blocks.block_ids[: blocks.num_shared], array("i")
        for rule, pages, ids in zip(self.rules, blocks.pages, handed, strict=True):
            each, positions = rule.num_groups, pages.own_blocks(len(leads))
            for k, position in enumerate(positions):
                mine, theirs = ids[k * each : (k + 1) * each], rule.attached.get(leads[position])
                if theirs is None:
                    rule.attach(leads[position], mine)
                    continue
                duplicates += mine
                for table, page in zip(pages.tables, theirs, strict=True):
                    table[position] = page
            self._move(blocks, rule, pages, first_own=max(len(leads), pages.first_own))
            rule.need(leads[max(pages.needed_from, num_before) :])
            if 0 < num_existing < len(leads):  # another request went another way from there
                pages.end = rule.add_end(leads[:num_existing], pages.end, on_path=True)
            pages.end = rule.add_end(leads, pages.end, on_path=num_existing == len(leads))
        self.free_detached(duplicates)
        if self.checkpoints is not None:
            self.checkpoints.registered(blocks)

    def release(self, blocks: RequestBlocks) -> None:
        """The request leaves the batch; its own pages are free."""
        for rule, pages in zip(self.rules, blocks.pages, strict=True):
            rule.pass_by(blocks.block_ids[pages.needed_from : blocks.num_shared])
            self.num_passed -= rule.num_groups * pages.num_passed
        self._with_passed.pop(blocks, None)
        blocks.pages.clear()
        if self.checkpoints is not None:
            self.checkpoints.release(blocks)

    # -- memory

    def num_evictable(self, num_leads: int) -> int:
        """Attached pages that can go; `num_leads` leading blocks are evictable."""
        states = 0 if self.checkpoints is None else self.checkpoints.num_evictable_pages
        return states + sum(
            rule.num_groups * (num_leads if rule.window is None else rule.num_unneeded) for rule in self.rules
        )

    def num_passed_of(self, blocks: RequestBlocks) -> int:
        """Own pages of a request that its windows have passed."""
        return sum(
            rule.num_groups * pages.num_passed for rule, pages in zip(self.rules, blocks.pages, strict=True)
        )

    def num_passed_of_tail(self, blocks: RequestBlocks) -> int:
        """Those of the block behind its indexed prefix, which others of its group copy."""
        return sum(
            rule.num_groups
            for rule, pages in zip(self.rules, blocks.pages, strict=True)
            if pages.first_passed == blocks.num_shared
        )

    def pages_of(self, num_blocks: int) -> int:
        """Pages for so many new blocks of tokens.

        They are computed in chunks, so what a window has passed is reused.
        """
        return self.pages_to_admit((), 0, num_blocks)

    def pages_to_admit(self, leads: Sequence[int], num_unpinned: int, num_blocks: int) -> int:
        """Pages for a hit with these leading blocks and so many new ones.

        What a window needs of the hit is passed as well: a hit costs at most what computing it costs.
        """
        pages = num_unpinned + num_blocks
        if self.checkpoints is not None and leads:
            pages += self.checkpoints.num_to_need(leads[-1])
        for rule in self.rules:
            tail = leads[rule.first_needed(len(leads) * self._block_size) :]
            held = num_unpinned if rule.window is None else rule.num_to_need(tail)
            pages += rule.num_groups * self._most_blocks(rule, held + num_blocks)
        return pages

    def pages_freed(self, blocks: RequestBlocks, num_leads: int) -> int:
        """Pages that a request has for itself, passed ones included.

        It holds `num_leads` leading blocks of the index alone.
        """
        freed = 0
        for rule, pages in zip(self.rules, blocks.pages, strict=True):
            freed += len(pages.own.block_ids)
            window = blocks.block_ids[pages.needed_from : blocks.num_shared]
            alone = num_leads if rule.window is None else sum(rule.is_needed_once(lead) for lead in window)
            freed += rule.num_groups * alone
        return freed

    def most_blocks(self, num_pages: int) -> int:
        """Blocks of tokens that one request can have in so many pages.

        Passes count whole blocks of all groups.
        """
        num_pages -= num_pages % self.per_block
        low, high = num_pages // self.per_block, num_pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.pages_of(middle) <= num_pages else (low, middle - 1)
        return low

    def can_hit(self, leads: Sequence[int], num_blocks: int, pinned: Sequence[BlockIds]) -> bool:
        """Whether a request of `num_blocks` can begin with these leading blocks, alone.

        Then it fits beside the leading blocks and the checkpoints of `pinned` prefixes, and beside the
        checkpoint that it begins with. True also where it fits only with what it shares with them.
        """
        assert self.checkpoints is not None
        pages, state_pages = self.pages_of(num_blocks), self.checkpoints.state_pages
        held, ends = set().union(*pinned), {ids[-1] for ids in pinned}
        left = self._pool.total_blocks - self.per_block * len(held) - state_pages * len(ends)
        saved = len(held.intersection(leads)) + (state_pages if leads[-1] in ends else 0)
        return pages + state_pages - saved <= left or (saved > 0 and pages > left)

    def free_passed(self, num_free: int, donors: Collection[RequestBlocks]) -> None:
        """Free own pages that windows have passed, until so many are free.

        Of `donors` the block that others of their group copy stays (`RequestPages.tail`).
        """
        for blocks in list(self._with_passed):
            if self._pool.num_free >= num_free:
                return
            for rule, pages in zip(self.rules, blocks.pages, strict=True):
                keeps_tail = blocks in donors and pages.first_passed == blocks.num_shared
                self._free_passed(blocks, rule, pages, num_kept=int(keeps_tail))

    def _free_passed(
        self, blocks: RequestBlocks, rule: WindowPages, pages: RequestPages, num_kept: int
    ) -> None:
        passed, each = pages.own_blocks(pages.needed_from), rule.num_groups
        gone = passed[num_kept:]
        free_leading(self._pool, pages.own, len(gone) * each, BEHIND_WINDOW, keep=num_kept * each)
        for table in pages.tables if gone else ():
            for position in gone:
                table[position] = NO_PAGE
        tail = passed[0] if num_kept else None
        self._move(blocks, rule, pages, first_own=max(pages.first_own, pages.needed_from), tail=tail)

    def shed(self, num_pages: int, *, kept: bool = False) -> BlockIds:
        """Take at least so many attached pages out of the index, behind or `kept`."""
        gone = array("i")
        for rule in self.rules:
            gone += rule.shed(num_pages - len(gone), kept=kept)
        return gone

    def free_detached(self, pages: BlockIds) -> None:
        """Free pages that have left the index, and those that an exception kept back."""
        self._detached += pages
        if self._detached:
            self._pool.take_back(INDEX_OWNER, self._detached)
            self._detached = array("i")

    def evicted(self, leads: BlockIds) -> BlockIds:
        """These blocks have left the index; returns the pages that leave with them."""
        gone = array("i")
        for rule in self.rules:
            gone += rule.evicted(leads)
        return gone if self.checkpoints is None else gone + self.checkpoints.evicted(leads)

    def all_pages(self) -> BlockIds:
        """Every attached page, and those that are detached and not yet free."""
        pages = array("i", [page for rule in self.rules for ids in rule.attached.values() for page in ids])
        if self.checkpoints is not None:
            pages += self.checkpoints.all_pages()
        return pages + self._detached

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: block `source` is now block `target`."""
        self._detached = array("i", [moves.get(page, page) for page in self._detached])
        for rule in self.rules:
            rule.remap(moves)
        if self.checkpoints is not None:
            self.checkpoints.remap(moves)
        for blocks in self._tables:
            for pages in blocks.pages:
                pages.remap(moves)

    def check(self, index: PrefixReuseIndex, held: Sequence[PrefixHit]) -> None:
        """Raise `BookkeepingError` where tables, pages and index disagree; `held` are held besides."""
        indexed = set(index.all_block_ids())
        if self.checkpoints is not None:
            self.checkpoints.check(self._tables, held)
        passed = {blocks: self.num_passed_of(blocks) for blocks in self._tables}
        if self.num_passed != sum(passed.values()) or self._with_passed.keys() != set(
            filter(passed.get, passed)
        ):
            raise BookkeepingError(f"{self.num_passed} own pages are counted as passed by windows")
        for number, rule in enumerate(self.rules):
            needed: Counter[int] = Counter()
            for blocks in self._tables:
                blocks.pages[number].check(blocks, rule.num_groups, rule.attached)
                needed.update(blocks.block_ids[blocks.pages[number].needed_from : blocks.num_shared])
            for hit in held:
                leads = index.block_ids(hit)
                needed.update(leads[rule.first_needed(len(leads) * self._block_size) :])
            rule.check(needed, indexed)

    def _move(
        self,
        blocks: RequestBlocks,
        rule: WindowPages,
        pages: RequestPages,
        needed_from: int | None = None,
        first_own: int | None = None,
        tail: int | None = None,
    ) -> None:
        """Change where a request's needed or own pages begin. With `first_own`, its `tail` changes, too."""
        self.num_passed -= rule.num_groups * pages.num_passed
        pages.needed_from = pages.needed_from if needed_from is None else needed_from
        if first_own is not None:
            pages.first_own, pages.tail = first_own, tail
        self.num_passed += rule.num_groups * pages.num_passed
        if any(pages.num_passed for pages in blocks.pages):
            self._with_passed[blocks] = None
        else:
            self._with_passed.pop(blocks, None)

    def _most_blocks(self, rule: WindowPages, num_blocks: int) -> int:
        most = num_blocks if rule.window is None else rule.window_blocks + self._chunk_blocks
        return min(num_blocks, most)
