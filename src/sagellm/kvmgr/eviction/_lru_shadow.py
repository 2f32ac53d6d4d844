"""What LRU would hold in a cache of the same size, and how much of that the cache does not hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent

FEW = 64


class PathUse:
    """The blocks of a path that were last used together: its positions from `base` on.

    LRU holds those before `kept`, the cache those before `own`. `firm` is at most `kept`: from there on LRU
    gives the blocks up once what the cache is making room for has come. `awaited`: the key of the last of the
    cached extents, where the shadow's owner waits until LRU gives up a block of it.
    """

    __slots__ = ("awaited", "base", "firm", "kept", "own")

    def __init__(self) -> None:
        self.base = self.firm = self.kept = self.own = 0
        self.awaited: int | None = None


class LRUShadow:
    """The contents of LRU as sizes, one entry per use. A request uses all blocks of its path, so LRU holds the
    blocks that were used last, and of one use those nearest to the root.

    Of what the cache gave up, keys and sizes are known, but no tokens. A path that comes back with the key of
    a gone extent is taken to go on as the gone path did, as far as it reaches.

    `num_kept`: blocks that LRU holds, `num_firm`: those that it is not about to give up; `num_missing` and
    `num_firm_missing`: how many of these the cache does not hold. `on_lapse` is called with the key of an
    awaited extent when LRU is about to give up a block of it.
    """

    def __init__(self, on_lapse: Callable[[int], None]) -> None:
        self.num_kept = self.num_firm = self.num_missing = self.num_firm_missing = 0
        self._on_lapse = on_lapse
        self._leaving: OrderedDict[PathUse, None] = OrderedDict()  # the oldest: none of their blocks is firm
        self._order: OrderedDict[PathUse, None] = OrderedDict()
        self._newest = PathUse()
        self._use_of: dict[int, PathUse] = {}  # by key of a cached extent
        self._gone: dict[int, tuple[PathUse, int]] = {}  # by key of a gone extent: its use, its position
        self._cut: dict[int, PathUse] = {}  # by key of an extent that lost its end: the use of that end
        self._next_sweep = FEW

    def __contains__(self, key: int) -> bool:
        """Whether the use of a cached extent is known."""
        return key in self._use_of

    def use(self, extent: Extent) -> int:
        """A request uses the path that ends with an extent; the cache and LRU hold all of it now. Returns how
        many of its leading blocks LRU held before."""
        use_of, newest, end = self._use_of, self._newest, extent.first_position + extent.num_blocks
        found, keys = 0, []
        node: Extent | None = extent
        while node is not None and node.num_blocks:
            last, stop = use_of.get(node.key), node.first_position + node.num_blocks
            if last is None:
                last, stop = self._gone_from(node), end
            elif last is newest and last.base == 0 and last.firm == last.own == stop:
                self._set(last, 0, end, end, end)  # the same request goes on
                found = max(found, stop)
                break
            if last is not None and last.kept > last.base:
                reached = min(last.kept, stop)
                found = max(found, reached)
                if reached > last.base:
                    self._set(last, reached, last.firm, last.kept, last.own)
            keys.append(node.key)
            node = node.parent
        else:
            newest = self._newest = PathUse()
            self._order[newest] = None
            self._set(newest, 0, end, end, end)
        for key in keys:
            use_of[key] = newest
        if self._num_keys > self._next_sweep:
            self._sweep()
        return found

    def shrink(self, num_blocks: int, num_firm: int) -> None:
        """LRU gives up what it holds beyond `num_blocks`; beyond `num_firm` it is about to."""
        order, leaving = self._order, self._leaving
        while self.num_firm > num_firm and order:
            use = next(iter(order))
            self._set(use, use.base, use.firm - (self.num_firm - num_firm), use.kept, use.own)
            if use.firm == use.base and use in order:
                del order[use]
                leaving[use] = None
        while self.num_kept > num_blocks and (leaving or order):
            use = next(iter(leaving or order))
            kept = max(use.firm, use.kept - (self.num_kept - num_blocks))
            self._set(use, use.base, use.firm, kept, use.own)

    def split(self, old: int, tail_key: int) -> None:
        """An extent became two; the first of them keeps the key."""
        use = self._use_of.get(old)
        if use is not None:
            self._use_of[tail_key] = use
            self._gone.pop(tail_key, None)
        cut = self._cut.pop(old, None)
        if cut is not None:
            self._cut[tail_key] = cut

    def forget(self, extent: Extent) -> None:
        """LRU gives up an extent at the end of its path: it has ended."""
        use = self._use_of.get(extent.key)
        if use is not None and use.own <= extent.first_position + extent.num_blocks:
            self._set(use, use.base, use.firm, min(use.kept, extent.first_position), use.own)

    def num_free(self, extent: Extent) -> int:
        """How many of its last blocks LRU does not hold, or is about to give up."""
        use = self._use_of.get(extent.key)
        if use is None:
            return extent.num_blocks
        end = extent.first_position + extent.num_blocks
        return max(0, end - max(use.firm, extent.first_position))

    def cut(self, extent: Extent, num_blocks: int) -> None:
        """The cache is about to give up the last blocks of an extent that nothing follows."""
        is_whole = num_blocks == extent.num_blocks
        use = self._use_of.pop(extent.key, None) if is_whole else self._use_of.get(extent.key)
        if use is None or use.kept <= use.base:
            return
        end = extent.first_position + extent.num_blocks - num_blocks
        self._set(use, use.base, use.firm, use.kept, end)
        if not is_whole:
            self._cut[extent.key] = use
        else:
            use.awaited = None
            self._cut.pop(extent.key, None)
            if use.kept > end:
                self._gone[extent.key] = use, end

    def wait(self, key: int) -> None:
        """Have `on_lapse` called for a cached extent."""
        self._use_of[key].awaited = key

    def first_awaited(self) -> int | None:
        """The awaited extent that LRU gives up first."""
        waiting = (use.awaited for use in chain(self._leaving, self._order) if use.awaited is not None)
        return next(waiting, None)

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
            if not 0 <= use.base <= use.firm <= use.kept or use.base == use.kept:
                raise BookkeepingError("a use in the LRU shadow has no blocks, or fewer than none")
        if any(use.firm > use.base for use in self._leaving):
            raise BookkeepingError("the LRU shadow is about to give up what it holds")

    # -- inside

    def _gone_from(self, node: Extent) -> PathUse | None:
        """The use of what the cache gave up in the place of a new extent."""
        at = node.first_position
        use, _ = self._gone.pop(node.key, (None, 0))
        if use is not None and use.own <= at < use.kept:
            return use
        use = self._cut.pop(node.parent.key, None) if node.parent is not None else None
        return use if use is not None and use.own == at < use.kept else None

    def _set(self, use: PathUse, base: int, firm: int, kept: int, own: int) -> None:
        """Change a use, and the counts with it; one without blocks is dropped."""
        kept = max(base, kept)
        firm = max(base, min(kept, firm))
        own = max(base, own)
        before = use.own
        self.num_kept += kept - base - use.kept + use.base
        self.num_firm += firm - base - use.firm + use.base
        self.num_missing += (kept - own if kept > own else 0) - (use.kept - before if use.kept > before else 0)
        self.num_firm_missing += (firm - own if firm > own else 0) - (
            use.firm - before if use.firm > before else 0
        )
        use.base, use.firm, use.kept, use.own = base, firm, kept, own
        if firm < own and use.awaited is not None:
            key, use.awaited = use.awaited, None
            self._on_lapse(key)
        if kept == base:
            self._order.pop(use, None)
            self._leaving.pop(use, None)

    @property
    def _num_keys(self) -> int:
        return len(self._use_of) + len(self._gone) + len(self._cut)

    def _sweep(self) -> None:
        """Forget the extents of which LRU holds nothing."""
        self._use_of = {key: use for key, use in self._use_of.items() if use.kept > use.base}
        self._gone = {key: (use, at) for key, (use, at) in self._gone.items() if use.own <= at < use.kept}
        self._cut = {key: use for key, use in self._cut.items() if use.own < use.kept}
        self._next_sweep = max(FEW, 2 * self._num_keys)
