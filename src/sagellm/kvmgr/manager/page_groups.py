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
finds its window; and every end from which requests went two ways.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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

BEHIND_WINDOW = "behind the window"
ENDS_PER_PATH = 3


@dataclass(slots=True)
class PrefixEnd:
    """Where a request's prefix ended: the leading blocks of the last window before it.

    Ends are a forest, named by their last leading blocks: `previous` is the one before this on its path,
    `longer` are those of which this is the previous. `num_ways`: in how many ways requests went on from here.
    `was_used`: a later request came to this end, or to one behind it.
    """

    leads: BlockIds
    previous: int | None
    num_ways: int = 0
    longer: dict[int, None] = field(default_factory=dict)
    was_used: bool = False


class WindowPages:
    """Pages of all groups with one window, by leading block.

    With `window` None the groups see all tokens, as the leading one does; then pages only come and go with
    their leading blocks.
    """

    def __init__(self, window: int | None, num_groups: int, block_size: int) -> None:
        self.window, self.num_groups, self._block_size = window, num_groups, block_size
        self.attached: dict[int, BlockIds] = {}
        self._needed: Counter[int] = Counter()
        self._ends: dict[int, PrefixEnd] = {}
        self._ends_over: Counter[int] = Counter()
        self._behind: dict[int, None] = {}
        self._kept: dict[int, None] = {}

    @property
    def window_blocks(self) -> int:
        """Blocks that a window reaches into at most."""
        assert self.window is not None
        return cdiv(self.window - 1, self._block_size) + 1

    @property
    def num_unneeded(self) -> int:
        """Leading blocks with pages that no running request needs."""
        return len(self._behind) + len(self._kept)

    def first_needed(self, num_tokens: int) -> int:
        """The first block that a token behind `num_tokens` computed ones attends to."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self._block_size

    def num_to_need(self, leads: Iterable[int]) -> int:
        """How many of these leading blocks no running request needs yet."""
        return sum(lead not in self._needed for lead in leads)

    def is_needed_once(self, lead: int) -> bool:
        """Whether a single running request needs the pages of this block."""
        return self._needed[lead] == 1

    def need(self, leads: Iterable[int]) -> None:
        """A running request's window covers these."""
        for lead in leads if self.window is not None else ():
            self._needed[lead] += 1
            self._behind.pop(lead, None)
            self._kept.pop(lead, None)

    def pass_by(self, leads: Iterable[int]) -> None:
        """It covers them no longer."""
        for lead in leads if self.window is not None else ():
            self._needed[lead] -= 1
            if not self._needed[lead]:
                del self._needed[lead]
                self._place(lead)

    def attach(self, lead: int, pages: BlockIds) -> None:
        """Attach the pages of these tokens to a block of the index."""
        self.attached[lead] = pages
        self._place(lead)

    def has_end(self, lead: int) -> bool:
        """Whether a prefix ended with this leading block."""
        return lead in self._ends

    def use_end(self, last: int | None) -> None:
        """A request comes to this end: its branch is not abandoned."""
        while last is not None and not self._ends[last].was_used:
            self._ends[last].was_used = True
            last = self._ends[last].previous

    def add_end(self, leads: Sequence[int], previous: int | None, *, on_path: bool) -> int | None:
        """A prefix ends with these leading blocks. Its last window is kept, if it is whole.

        `previous` is the end before it on the path. `on_path`: other requests' blocks go on from here.
        Returns where the new one stands.
        """
        last = leads[-1]
        if last in self._ends:
            if on_path and last != previous:
                self.use_end(last)
            return last
        tail = leads[self.first_needed(len(leads) * self._block_size) :]
        if self.window is None or any(lead not in self.attached for lead in tail):
            return previous
        if previous is not None and previous not in self._ends:  # it was given up meanwhile
            previous = next(filter(self.has_end, reversed(leads)), None)
        self._ends[last] = PrefixEnd(array("i", tail), previous, int(on_path))
        for lead in tail:
            self._ends_over[lead] += 1
            if lead in self._behind:
                del self._behind[lead]
                self._kept[lead] = None
        if previous is not None:
            self._link(last, previous, on_path=on_path)
        self._forget_old_ends(last)
        return last

    def evicted(self, leads: Iterable[int]) -> BlockIds:
        """These blocks have left the index; returns their pages."""
        gone = array("i")
        for lead in leads:
            if lead in self._ends:
                self._remove_end(lead)
            self._behind.pop(lead, None)
            self._kept.pop(lead, None)
            gone += self.attached.pop(lead, array("i"))
        return gone

    def shed(self, num_pages: int, *, kept: bool = False) -> BlockIds:
        """Detach at least so many pages that are behind, or `kept`. All, if there are fewer."""
        queue, gone = self._kept if kept else self._behind, array("i")
        while queue and len(gone) < num_pages:
            lead = next(iter(queue))
            del queue[lead]
            gone += self.attached.pop(lead)
        return gone

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: block `source` is now block `target`."""

        def moved(block: int) -> int:
            return moves.get(block, block)

        self.attached = {moved(lead): array("i", map(moved, pages)) for lead, pages in self.attached.items()}
        self._needed = Counter({moved(lead): count for lead, count in self._needed.items()})
        self._ends_over = Counter({moved(lead): count for lead, count in self._ends_over.items()})
        self._behind = dict.fromkeys(map(moved, self._behind))
        self._kept = dict.fromkeys(map(moved, self._kept))
        self._ends = {moved(last): end for last, end in self._ends.items()}
        for end in self._ends.values():
            end.leads = array("i", map(moved, end.leads))
            end.previous = None if end.previous is None else moved(end.previous)
            end.longer = dict.fromkeys(map(moved, end.longer))

    def check(self, needed: Counter[int], indexed: set[int]) -> None:
        """Raise `BookkeepingError` unless every attached page is in the state that its holders imply."""
        strangers = self.attached.keys() - indexed
        if strangers or not indexed.issuperset(self._ends):
            raise BookkeepingError(f"pages are attached to {sorted(strangers)}, which the index has not")
        for last, end in self._ends.items():
            before = None if end.previous is None else self._ends[end.previous]
            if before is not None and (last not in before.longer or before.was_used < end.was_used):
                raise BookkeepingError(f"the end at block {last} and the one before it disagree")
            if any(self._ends[longer].previous != last for longer in end.longer):
                raise BookkeepingError(f"the end at block {last} and those behind it disagree")
        if self.window is None:
            if self.attached.keys() != indexed:
                raise BookkeepingError(f"blocks {sorted(indexed - self.attached.keys())} lack pages")
            return
        over = Counter(lead for end in self._ends.values() for lead in end.leads)
        if needed != self._needed or over != self._ends_over:
            raise BookkeepingError("the windows of requests or of ended prefixes are counted wrong")
        free = self.attached.keys() - needed.keys()
        if self._kept.keys() != free & over.keys() or self._behind.keys() != free - over.keys():
            raise BookkeepingError("pages are kept that no prefix needs, or the other way round")
        if not needed.keys() <= self.attached.keys():
            raise BookkeepingError(f"{sorted(needed.keys() - self.attached.keys())} are needed and gone")

    def _place(self, lead: int) -> None:
        if self.window is not None and lead in self.attached and lead not in self._needed:
            (self._kept if lead in self._ends_over else self._behind)[lead] = None

    def _link(self, last: int, previous: int, *, on_path: bool) -> None:
        """A new end follows `previous`. Ends on the same way that lie behind the new one follow it."""
        new, end = self._ends[last], self._ends[previous]
        if not on_path:
            end.num_ways += 1
        elif end.num_ways == 1:
            new.longer, end.longer = end.longer, {}
            new.was_used = any(self._ends[other].was_used for other in new.longer)
            for other in new.longer:
                self._ends[other].previous = last
        end.longer[last] = None

    def _forget_old_ends(self, last: int) -> None:
        """Keep `ENDS_PER_PATH` ends before here, as many two-way junctions, and all of more ways.

        With an end go the branches from it to which no request came back.
        """
        on_path: set[int] = set()
        found: int | None = last
        num_junctions = 0
        while found is not None:
            end = self._ends[found]
            num_junctions += end.num_ways == 2
            most = ENDS_PER_PATH if end.num_ways == 2 else 0
            on_path.add(found)
            if len(on_path) > ENDS_PER_PATH and end.num_ways <= 2 and num_junctions >= most + (most > 0):
                for other in end.longer.keys() - on_path:
                    if not self._ends[other].was_used:
                        self._remove_branch(other)
                self._remove_end(found)
            found = end.previous

    def _remove_branch(self, last: int) -> None:
        branch = [last]
        for end in branch:
            branch += self._ends[end].longer
        for end in reversed(branch):
            self._remove_end(end)

    def _remove_end(self, last: int) -> None:
        end = self._ends.pop(last)
        for longer in end.longer:
            self._ends[longer].previous = end.previous
        if end.previous is not None:
            before = self._ends[end.previous]
            del before.longer[last]
            before.longer |= end.longer
        for lead in end.leads:
            self._ends_over[lead] -= 1
            if not self._ends_over[lead]:
                del self._ends_over[lead]
                if lead in self._kept:
                    del self._kept[lead]
                    self._behind[lead] = None


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

    def can_hit(self, num_blocks: int) -> bool:
        """Whether so large a request fits beside the checkpoint it begins with."""
        if self.checkpoints is None:
            return True
        return self.pages_of(num_blocks) + self.checkpoints.state_pages <= self._pool.total_blocks

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
