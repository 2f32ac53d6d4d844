"""What LRU would hold, and what of that the cache lacks."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import FEW


@dataclass(slots=True, eq=False)
class PathUse:
    """The blocks of a path that were last used together.

    These are its positions from `base` on. LRU holds those before `kept`, the cache those before `own`. LRU
    is about to drop those from `firm` (at most `kept`) on, for the request for which the cache makes room.
    `awaited`: the key of the path's last cached extent, if the policy waits until LRU drops a block of it.
    `number` counts the uses.
    """

    number: int
    base: int = 0
    firm: int = 0
    kept: int = 0
    own: int = 0
    awaited: int | None = None


Place = tuple[int, bytes]
"""A position, and the content of the block there."""


@dataclass(slots=True, eq=False)
class MissingRun:
    """Consecutive blocks that LRU held when the cache evicted them.

    `first`: the position of the first one; `followers`: the runs behind it, by place.
    """

    use: PathUse
    first: int
    content: bytes
    followers: dict[Place, MissingRun]

    @property
    def is_held(self) -> bool:
        """Whether LRU still holds the first block. If not, it holds none of the others."""
        return self.use.base <= self.first < self.use.kept


class LRUShadow:
    """The contents of LRU, one `PathUse` for each use of a path.

    A request uses all blocks of its path, so LRU holds the blocks that were used last, and of one use those
    nearest to the root. `num_kept`: blocks that LRU holds; `num_firm`: those that it is not about to drop;
    `num_missing` and `num_firm_missing`: how many of these the cache lacks. The content of missing blocks is
    kept, to recognise them when they come back. `on_free` is called with the key of an awaited extent when
    LRU is about to drop a block of it.

    Unlike `PathHistory`, which has one record for the end of a path, this knows for every block whether LRU
    holds it: counts by position instead of by block keep a use at a few microseconds.
    """

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self.num_kept = self.num_firm = self.num_missing = self.num_firm_missing = 0
        self._on_free = on_free
        self._leaving: OrderedDict[PathUse, None] = OrderedDict()  # the oldest: none of their blocks is firm
        self._order: OrderedDict[PathUse, None] = OrderedDict()  # the others, oldest first
        self._newest = PathUse(0)
        self._use_of: dict[int, PathUse] = {}  # by key of a cached extent
        self._awaited: list[tuple[int, int]] = []  # a heap: number of the use, key; some are not awaited now
        self._missing: dict[int, dict[Place, MissingRun]] = {}  # by key of the extent or root in front
        self._num_runs = 0  # an upper bound of the runs in `_missing`
        self._next_sweep = FEW

    def __contains__(self, key: int) -> bool:
        """Whether the use of a cached extent is known."""
        return key in self._use_of

    def use(self, extent: Extent) -> int:
        """A request uses the path that ends with an extent.

        The cache and LRU hold all of it now. Returns how many of its leading blocks LRU held before.
        """
        use_of, newest, end = self._use_of, self._newest, extent.first_position + extent.num_blocks
        found, path = 0, []
        node: Extent | None = extent
        while node is not None and node.num_blocks:
            use = use_of.get(node.key)
            if use is not None:
                stop = node.first_position + node.num_blocks
                if use is newest and use.base == 0 and use.firm == use.own == stop:
                    self._change(use, 0, end, end, end)  # the same request continues
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
            if node.key not in use_of and self._missing:
                found = max(found, self._take_back(node))
            use_of[node.key] = newest
        if len(use_of) + self._num_runs > self._next_sweep:
            self._sweep()
        return found

    def shrink(self, num_blocks: int, num_firm: int) -> None:
        """LRU drops blocks beyond `num_blocks`, and is about to drop those beyond `num_firm`."""
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
        runs = self._missing.pop(head.key, None)
        if runs is not None:
            for place, run in runs.items():
                owner = head if place[0] <= tail.first_position else tail
                self._missing.setdefault(owner.key, {})[place] = run

    def forget(self, extent: Extent) -> None:
        """LRU drops an extent at the end of its path: it has ended."""
        use = self._use_of.get(extent.key)
        if use is not None and use.own <= extent.first_position + extent.num_blocks:
            self._change(use, use.base, use.firm, min(use.kept, extent.first_position), use.own)

    def num_free(self, extent: Extent) -> int:
        """How many of the last blocks LRU lacks or is about to drop."""
        use = self._use_of.get(extent.key)
        if use is None:
            return extent.num_blocks
        first, num_blocks = extent.first_position, extent.num_blocks
        if use.firm <= first:
            return num_blocks
        return max(0, first + num_blocks - use.firm)

    def cut(self, extent: Extent, num_blocks: int) -> None:
        """The cache is about to evict the last blocks of a leaf."""
        key, parent = extent.key, extent.parent
        is_whole = num_blocks == extent.num_blocks
        end = extent.first_position + extent.num_blocks - num_blocks
        followers = self._missing.pop(key, {})
        use = self._use_of.pop(key, None) if is_whole else self._use_of.get(key)
        if use is None:
            return
        if is_whole:
            use.awaited = None
        if use.kept > use.base:
            self._change(use, use.base, use.firm, use.kept, end)
        content = extent.content if end < use.kept else b""
        if content:
            step = len(content) // extent.num_blocks
            content = content[-num_blocks * step :]
            owner = parent.key if is_whole and parent is not None else key
            runs = self._missing.setdefault(owner, {})
            if not is_whole:
                runs.update((place, run) for place, run in followers.items() if place[0] <= end)
                followers = {place: run for place, run in followers.items() if place[0] > end}
            runs[end, content[:step]] = MissingRun(use, end, content, followers)
            self._num_runs += 1

    def wait(self, key: int) -> None:
        """Ask for `on_free` for a cached extent of which LRU holds all blocks."""
        use = self._use_of[key]
        use.awaited = key
        heapq.heappush(self._awaited, (use.number, key))
        if len(self._awaited) > FEW + 2 * len(self._use_of):
            self._awaited = sorted({item for item in self._awaited if self._is_awaited(*item)})

    def first_awaited(self, among: Container[int]) -> int | None:
        """The key of the awaited extent `among` these that LRU drops first, if any.

        Extents before it with other keys are no longer awaited, until `wait` is called for them.
        """
        awaited = self._awaited
        while awaited:
            number, key = awaited[0]
            if key in among and self._is_awaited(number, key):
                return key
            heapq.heappop(awaited)
        return None

    def check(self) -> None:
        """Raises `BookkeepingError` where the counts are not those of the uses."""
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
        if sum(1 for _ in self._runs()) > self._num_runs:
            raise BookkeepingError(f"the LRU shadow remembers more than {self._num_runs} runs of gone blocks")

    # -- inside

    def _is_awaited(self, number: int, key: int) -> bool:
        use = self._use_of.get(key)
        return use is not None and use.number == number and use.awaited == key and use.kept > use.base

    def _take(self, use: PathUse, stop: int) -> int:
        """A path is used again up to position `stop`; `use` was its last use.

        Returns how many of its leading blocks LRU held, 0 if they belong to other uses.
        """
        reached = min(use.kept, stop)
        if reached <= use.base:
            return 0
        self._change(use, reached, use.firm, use.kept, use.own)
        return reached

    def _take_back(self, extent: Extent) -> int:
        """A new extent: the cache has the missing blocks of that content again.

        Returns the position up to which LRU held them, 0 if it held none.
        """
        parent, at, end = extent.parent, extent.first_position, extent.first_position + extent.num_blocks
        owner = parent.key if parent is not None else extent.key
        content, found = extent.content, 0
        step = len(content) // extent.num_blocks
        before, followers = self._missing.get(owner), self._missing.setdefault(extent.key, {})
        start, place = at, (at, content[:step])
        while before is not None and (run := before.pop(place, None)) is not None:
            num_same = _common_blocks(run.content, content, (at - start) * step, step)
            at += num_same
            if run.is_held:
                found = max(found, self._take(run.use, at))
            behind_rest = {spot: follower for spot, follower in run.followers.items() if spot[0] > at}
            followers.update((spot, follower) for spot, follower in run.followers.items() if spot[0] <= at)
            rest = run.content[num_same * step :]
            if rest:
                followers[at, rest[:step]] = MissingRun(run.use, at, rest, behind_rest)
                self._num_runs += 1
            if at == end:
                break
            offset = (at - start) * step
            before, place = followers, (at, content[offset : offset + step])
        if not followers:
            del self._missing[extent.key]
        return found

    def _change(self, use: PathUse, base: int, firm: int, kept: int, own: int) -> None:
        """Change a use and the counts. A use of which LRU holds nothing is dropped."""
        # Without `min` and `max`, which cost a tenth of an eviction (`sagellm bench micro eviction`).
        kept = max(base, kept)
        firm = min(kept, firm)
        firm = max(base, firm)
        own = max(base, own)
        shift = use.base - base
        self.num_kept += kept - use.kept + shift
        self.num_firm += firm - use.firm + shift
        if kept > own:
            self.num_missing += kept - own
        if use.kept > use.own:
            self.num_missing -= use.kept - use.own
        if firm > own:
            self.num_firm_missing += firm - own
        if use.firm > use.own:
            self.num_firm_missing -= use.firm - use.own
        use.base, use.firm, use.kept, use.own = base, firm, kept, own
        if firm < own and use.awaited is not None:
            key, use.awaited = use.awaited, None
            self._on_free(key)
        if kept == base:
            self._order.pop(use, None)
            self._leaving.pop(use, None)

    def _runs(self) -> Iterator[MissingRun]:
        """All runs of missing blocks."""
        stack = list(self._missing.values())
        while stack:
            for run in stack.pop().values():
                yield run
                stack.append(run.followers)

    def _sweep(self) -> None:
        """Forget the extents of which LRU holds nothing."""
        self._use_of = {key: use for key, use in self._use_of.items() if use.kept > use.base}
        stack = list(self._missing.values())
        self._num_runs = 0
        while stack:
            runs = stack.pop()
            for place in [place for place, run in runs.items() if not run.is_held]:
                del runs[place]
            self._num_runs += len(runs)
            stack += [run.followers for run in runs.values()]
        self._missing = {key: runs for key, runs in self._missing.items() if runs}
        self._next_sweep = max(FEW, 2 * (len(self._use_of) + self._num_runs))


def _common_blocks(run: bytes, content: bytes, offset: int, step: int) -> int:
    """How many leading blocks of a run, of `step` bytes, `content` has at `offset`."""
    if content.startswith(run, offset):
        return len(run) // step
    low, high = 0, min(len(run), len(content) - offset) // step + 1  # so many are the same; so many are not
    while high - low > 1:
        middle = (low + high) // 2
        if content.startswith(run[low * step : middle * step], offset + low * step):
            low = middle
        else:
            high = middle
    return low
