"""What LRU would hold in a cache of the same size, and how much of that the cache does not hold."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent

FEW = 64


class PathUse:
    """The blocks of a path that were last used together: its positions from `base` on.

    LRU holds those before `kept`, the cache those before `own`. `firm` is at most `kept`: from there on LRU
    gives the blocks up once what the cache is making room for has come. `awaited`: the key of the last of the
    cached extents, where the shadow's owner waits until LRU gives up a block of it. `number` counts the uses.
    """

    __slots__ = ("awaited", "base", "firm", "kept", "number", "own")

    def __init__(self, number: int) -> None:
        self.number = number
        self.base = self.firm = self.kept = self.own = 0
        self.awaited: int | None = None


Place = tuple[int, bytes]
"""A position, and the content of the block there."""


class Gone:
    """Blocks that the cache gave up and LRU held then: a run of them, and what follows it at which place."""

    __slots__ = ("content", "first", "followers", "use")

    def __init__(self, use: PathUse, first: int, content: bytes, followers: dict[Place, Gone]) -> None:
        self.use, self.first, self.content, self.followers = use, first, content, followers

    @property
    def is_held(self) -> bool:
        """Whether LRU still holds the first of these blocks: if not, it holds nothing that follows either."""
        return self.use.base <= self.first < self.use.kept


class LRUShadow:
    """The contents of LRU, one entry per use. A request uses all blocks of its path, so LRU holds the blocks
    that were used last, and of one use those nearest to the root.

    `num_kept`: blocks that LRU holds, `num_firm`: those that it is not about to give up; `num_missing` and
    `num_firm_missing`: how many of these the cache does not hold. Their content is kept, so that they are
    known when they come back. `on_lapse` is called with the key of an awaited extent when LRU is about to
    give up a block of it.
    """

    def __init__(self, on_lapse: Callable[[int], None]) -> None:
        self.num_kept = self.num_firm = self.num_missing = self.num_firm_missing = 0
        self._on_lapse = on_lapse
        self._leaving: OrderedDict[PathUse, None] = OrderedDict()  # the oldest: none of their blocks is firm
        self._order: OrderedDict[PathUse, None] = OrderedDict()
        self._newest = PathUse(0)
        self._use_of: dict[int, PathUse] = {}  # by key of a cached extent
        self._awaited: list[tuple[int, int]] = []  # a heap: number of the use, key; some wait no longer
        self._gone: dict[
            int, dict[Place, Gone]
        ] = {}  # by key of the cached extent, or root, that they follow
        self._num_gone = 0  # at most so many
        self._next_sweep = FEW

    def __contains__(self, key: int) -> bool:
        """Whether the use of a cached extent is known."""
        return key in self._use_of

    def use(self, extent: Extent) -> int:
        """A request uses the path that ends with an extent; the cache and LRU hold all of it now. Returns how
        many of its leading blocks LRU held before."""
        use_of, newest, end = self._use_of, self._newest, extent.first_position + extent.num_blocks
        found, path = 0, []
        node: Extent | None = extent
        while node is not None and node.num_blocks:
            use = use_of.get(node.key)
            if use is not None:
                stop = node.first_position + node.num_blocks
                if use is newest and use.base == 0 and use.firm == use.own == stop:
                    self._change(use, 0, end, end, end)  # the same request goes on
                    found = max(found, stop)
                    break
                found = max(found, self._take(use, stop))
            path.append(node)
            node = node.parent
        else:
            newest = self._newest = PathUse(newest.number + 1)
            self._order[newest] = None
            self._change(newest, 0, end, end, end)
        for node in reversed(path):
            if node.key not in use_of and self._gone:
                found = max(found, self._take_back(node))
            use_of[node.key] = newest
        if len(use_of) + self._num_gone > self._next_sweep:
            self._sweep()
        return found

    def shrink(self, num_blocks: int, num_firm: int) -> None:
        """LRU gives up what it holds beyond `num_blocks`; beyond `num_firm` (at most that) it is about to."""
        order, leaving = self._order, self._leaving
        while self.num_firm > num_firm:
            use = next(iter(order))
            self._change(use, use.base, use.firm - (self.num_firm - num_firm), use.kept, use.own)
            if use.firm == use.base and use.kept > use.base:
                del order[use]
                leaving[use] = None
        while self.num_kept > num_blocks:
            use = next(iter(leaving or order))
            kept = max(use.firm, use.kept - (self.num_kept - num_blocks))
            self._change(use, use.base, use.firm, kept, use.own)

    def split(self, head: Extent, tail: Extent) -> None:
        """An extent became two; the head keeps the key."""
        use = self._use_of.get(head.key)
        if use is not None:
            self._use_of[tail.key] = use
        gone = self._gone.pop(head.key, None)
        if gone is not None:
            for place, run in gone.items():
                owner = head if place[0] <= tail.first_position else tail
                self._gone.setdefault(owner.key, {})[place] = run

    def forget(self, extent: Extent) -> None:
        """LRU gives up an extent at the end of its path: it has ended."""
        use = self._use_of.get(extent.key)
        if use is not None and use.own <= extent.first_position + extent.num_blocks:
            self._change(use, use.base, use.firm, min(use.kept, extent.first_position), use.own)

    def num_free(self, extent: Extent) -> int:
        """How many of its last blocks LRU does not hold, or is about to give up."""
        use = self._use_of.get(extent.key)
        if use is None:
            return extent.num_blocks
        end = extent.first_position + extent.num_blocks
        return max(0, end - max(use.firm, extent.first_position))

    def cut(self, extent: Extent, num_blocks: int) -> None:
        """The cache is about to give up the last blocks of an extent that nothing follows."""
        key, parent = extent.key, extent.parent
        is_whole = num_blocks == extent.num_blocks
        end = extent.first_position + extent.num_blocks - num_blocks
        followers = self._gone.pop(key, {})
        use = self._use_of.pop(key, None) if is_whole else self._use_of.get(key)
        if use is None:
            return
        if is_whole:
            use.awaited = None
        if use.kept > use.base:
            self._change(use, use.base, use.firm, use.kept, end)
        if end < use.kept and extent.content:
            step = len(extent.content) // extent.num_blocks
            content = extent.content[-num_blocks * step :]
            owner = parent.key if is_whole and parent is not None else key
            gone = self._gone.setdefault(owner, {})
            if not is_whole:
                gone.update((place, run) for place, run in followers.items() if place[0] <= end)
                followers = {place: run for place, run in followers.items() if place[0] > end}
            gone[end, content[:step]] = Gone(use, end, content, followers)
            self._num_gone += 1

    def wait(self, key: int) -> None:
        """Have `on_lapse` called for a cached extent of which LRU holds all."""
        use = self._use_of[key]
        use.awaited = key
        heapq.heappush(self._awaited, (use.number, key))
        if len(self._awaited) > FEW + 2 * len(self._use_of):
            self._awaited = sorted({one for one in self._awaited if self._waits(one)})

    def first_awaited(self, among: Container[int]) -> int | None:
        """Of the awaited extents, the one that LRU gives up first. Those before it that are not among the
        given keys are left out from now on, until `wait` names them again.
        """
        awaited = self._awaited
        while awaited and not (awaited[0][1] in among and self._waits(awaited[0])):
            heapq.heappop(awaited)
        return awaited[0][1] if awaited else None

    def check(self) -> None:
        """Raise `BookkeepingError` where the counts are not those of the uses."""
        uses = [*self._leaving, *self._order]
        counts = (self.num_kept, self.num_firm, self.num_missing, self.num_firm_missing)
        held = (
            sum(use.kept - use.base for use in uses),
            sum(use.firm - use.base for use in uses),
            sum(max(0, use.kept - use.own) for use in uses),
            sum(max(0, use.firm - use.own) for use in uses),
        )
        if counts != held:
            raise BookkeepingError(f"the LRU shadow counts {counts} blocks, its uses hold {held}")
        for use in uses:
            if not 0 <= use.base <= use.firm <= use.kept or use.base == use.kept or use.own < use.base:
                raise BookkeepingError("a use in the LRU shadow has no blocks, or fewer than none")
        if any(use.firm > use.base for use in self._leaving):
            raise BookkeepingError("the LRU shadow is about to give up what it holds")
        if sum(1 for _ in self._runs()) > self._num_gone:
            raise BookkeepingError(f"the LRU shadow remembers more than {self._num_gone} runs of gone blocks")

    # -- inside

    def _waits(self, one: tuple[int, int]) -> bool:
        number, key = one
        use = self._use_of.get(key)
        return use is not None and use.number == number and use.awaited == key and use.kept > use.base

    def _take(self, use: PathUse, stop: int) -> int:
        """A path is used again up to `stop`, of which `use` was the last use; returns how many leading blocks
        LRU held of it, 0 if that is for others to say."""
        reached = min(use.kept, stop)
        if reached <= use.base:
            return 0
        self._change(use, reached, use.firm, use.kept, use.own)
        return reached

    def _take_back(self, extent: Extent) -> int:
        """A new extent: the cache has again what it gave up of that content. Returns up to where LRU held it,
        0 if it held nothing."""
        parent, at, end = extent.parent, extent.first_position, extent.first_position + extent.num_blocks
        owner = parent.key if parent is not None else extent.key
        content, found = extent.content, 0
        step = len(content) // extent.num_blocks
        before, here = self._gone.get(owner), self._gone.setdefault(extent.key, {})
        start, place = at, (at, content[:step])
        while before is not None and (run := before.pop(place, None)) is not None:
            num_same = _common_blocks(run.content, content, (at - start) * step, step)
            at += num_same
            if run.is_held:
                found = max(found, self._take(run.use, at))
            rest = {one: follower for one, follower in run.followers.items() if one[0] > at}
            here.update((one, follower) for one, follower in run.followers.items() if one[0] <= at)
            left = run.content[num_same * step :]
            if left:
                here[at, left[:step]] = Gone(run.use, at, left, rest)
                self._num_gone += 1
            if at == end:
                break
            offset = (at - start) * step
            before, place = here, (at, content[offset : offset + step])
        if not here:
            del self._gone[extent.key]
        return found

    def _change(self, use: PathUse, base: int, firm: int, kept: int, own: int) -> None:
        """Change a use, and the counts with it; one without blocks is dropped."""
        kept = max(base, kept)
        firm = max(base, min(kept, firm))
        own = max(base, own)
        self.num_kept += kept - base - use.kept + use.base
        self.num_firm += firm - base - use.firm + use.base
        self.num_missing += max(0, kept - own) - max(0, use.kept - use.own)
        self.num_firm_missing += max(0, firm - own) - max(0, use.firm - use.own)
        use.base, use.firm, use.kept, use.own = base, firm, kept, own
        if firm < own and use.awaited is not None:
            key, use.awaited = use.awaited, None
            self._on_lapse(key)
        if kept == base:
            self._order.pop(use, None)
            self._leaving.pop(use, None)

    def _runs(self) -> Iterator[Gone]:
        """All runs of gone blocks."""
        stack = list(self._gone.values())
        while stack:
            for run in stack.pop().values():
                yield run
                stack.append(run.followers)

    def _sweep(self) -> None:
        """Forget the extents of which LRU holds nothing."""
        self._use_of = {key: use for key, use in self._use_of.items() if use.kept > use.base}
        stack = list(self._gone.values())
        self._num_gone = 0
        while stack:
            runs = stack.pop()
            for place in [place for place, run in runs.items() if not run.is_held]:
                del runs[place]
            self._num_gone += len(runs)
            stack += [run.followers for run in runs.values()]
        self._gone = {key: runs for key, runs in self._gone.items() if runs}
        self._next_sweep = max(FEW, 2 * (len(self._use_of) + self._num_gone))


def _common_blocks(run: bytes, content: bytes, offset: int, step: int) -> int:
    """How many leading blocks of a run, of `step` bytes each, stand in the content from `offset` on."""
    if content.startswith(run, offset):
        return len(run) // step
    low, high = 0, min(len(run), len(content) - offset) // step + 1  # so many do; so many do not
    while high - low > 1:
        middle = (low + high) // 2
        if content.startswith(run[low * step : middle * step], offset + low * step):
            low = middle
        else:
            high = middle
    return low
