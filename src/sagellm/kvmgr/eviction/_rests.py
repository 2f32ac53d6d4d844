"""Rests of extents: from one use to the next, kept or not, as a predictor is asked about them and taught."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Protocol

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent
from sagellm.core.protocols.lifetime import ReuseFeatures

FIRST_PIECE_S, PIECE_GROWTH = 2.0, 4.0
MAX_STEPS_UP = 16
HOT_BRANCHES = 3
"""More continuations than this make an extent a prefix that many share, not a conversation."""
CONTINUED_SHARE = 0.75
"""A use of the first blocks of a path continues it, if it is this share of it."""
NOT_KNOWN = 0
"""The turn of what a continuation left behind: no turn of a session ends there."""


class Sequence:
    """The turns of one conversation as one sequence. Lengths in blocks; `goes_on_s`: how long after its last
    use it is predicted to be used."""

    __slots__ = ("began_s", "end", "goes_on_s", "name", "num_prompt", "open", "used_s")

    def __init__(self, name: str, began_s: float, end: int) -> None:
        self.name, self.began_s, self.num_prompt = name, began_s, end
        self.used_s, self.end, self.goes_on_s = began_s, end, 0.0
        self.open = True


class Rest:
    """One extent since its last use at `used_s`. `end`: where its path ends, in blocks; `told_s`: how long
    the predictor knows it to have rested; `due_s`: when its rank is to be looked at again.

    `open`: nobody used it since. `taken`: somebody does, who has not come back yet. Of a closed one, `turn`
    and `gap_s` are those of the use that ended it.
    """

    __slots__ = (
        "branches", "due_s", "end", "features", "gap_s", "key", "num_blocks", "open", "sequence", "taken",
        "told_s", "turn", "used_s",
    )  # fmt: skip

    def __init__(self, extent: Extent, turn: int, gap_s: float, used_s: float) -> None:
        self.key, self.num_blocks = extent.key, extent.num_blocks
        self.end = extent.first_position + extent.num_blocks
        self.turn, self.gap_s, self.used_s = turn, gap_s, used_s
        self.features = ReuseFeatures(extent.num_uses, turn, extent.first_position, self.end, gap_s)
        self.told_s = self.due_s = 0.0
        self.branches = 0
        self.open, self.taken = True, False
        self.sequence: Sequence | None = None


class Listener(Protocol):
    """Whoever wants to know what becomes of rests. `seconds` count from the last use."""

    def began(self, rest: Rest, before: Rest | None) -> None:
        """`before`: what it goes on from, if it is a later turn."""
        ...

    def used(self, rest: Rest, seconds: float) -> None: ...

    def rested(self, rest: Rest, seconds: float) -> None:
        """It still rests; said when it has for 2, 8, 32, ... seconds."""
        ...

    def forgotten(self, rest: Rest) -> None: ...


class Rests:
    """The last rests by key of extent, those of evicted extents too: an extent that comes back was reused."""

    def __init__(self, listener: Listener, watched_s: float, max_rests: int) -> None:
        self.max_rests = max_rests
        self._listener = listener
        self._by_key: OrderedDict[int, Rest] = OrderedDict()
        self._watched: list[tuple[float, deque[Rest]]] = []
        seconds = FIRST_PIECE_S
        while seconds < watched_s:
            self._watched.append((seconds, deque()))
            seconds *= PIECE_GROWTH
        self._watched.append((watched_s, deque()))

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: int) -> Rest | None:
        return self._by_key.get(key)

    def of(self, extent: Extent, now_s: float) -> Rest:
        """The rest of an extent that is evictable now: a new one if it was used since."""
        rest = self._by_key.get(extent.key)
        if rest is not None and rest.open and rest.used_s >= extent.used_s:
            return rest
        return self._begin(extent, rest if rest is not None else self._above(extent), now_s)

    def use(self, key: int, now_s: float) -> None:
        rest = self._by_key.get(key)
        if rest is not None and rest.open:
            self._use(rest, now_s)

    def split(self, head: Extent, tail: Extent, now_s: float) -> None:
        """A request goes on from the head of an extent, which keeps its key. If that is most of the path, it
        was used, and the tail is left behind; otherwise the rest goes on in the tail."""
        rest = self._by_key.get(head.key)
        if rest is None or not rest.open:
            return
        end = head.first_position + head.num_blocks
        continued = end >= CONTINUED_SHARE * rest.end and now_s > rest.used_s
        turn, gap_s = (NOT_KNOWN, -1.0) if continued else (rest.turn, rest.gap_s)
        left = Rest(tail, turn, gap_s, rest.used_s)
        left.told_s = rest.told_s
        left.sequence = rest.sequence
        if continued:
            self._use(rest, now_s)
            left.told_s = now_s - left.used_s
        else:
            rest.open, rest.turn, rest.branches = False, NOT_KNOWN, 1
        rest.end, rest.num_blocks = end, head.num_blocks
        self._keep(left, now_s)

    def succeed(self, parent: Extent, child_key: int, now_s: float) -> None:
        """The parent is an evictable leaf after its last child went: it rests since their last use. A path
        without branches rests on there alone, for if it comes back whole, nothing comes under the old key."""
        above, child = self._by_key.get(parent.key), self._by_key.get(child_key)
        if above is not None and above.open:
            return
        latest = above
        if child is not None and (above is None or child.used_s > above.used_s):
            latest = child
        turn, gap_s = (latest.turn, latest.gap_s) if latest is not None else (NOT_KNOWN, -1.0)
        rest = Rest(parent, turn, gap_s, parent.used_s)
        rest.told_s = max(0.0, now_s - parent.used_s)
        rest.branches = above.branches if above is not None else 0
        rest.sequence = latest.sequence if latest is not None else None
        if child is not None and child.open and rest.branches <= 1:
            self._move(child, now_s)
        self._keep(rest, now_s)

    def tell(self, now_s: float) -> None:
        """Say which rests have gone on; where there are too many, earlier than they should be told."""
        max_rests = self.max_rests
        for level, (seconds, rests) in enumerate(self._watched):
            while rests and (rests[0].used_s + seconds <= now_s or len(rests) > max_rests):
                rest = rests.popleft()
                if not rest.open:
                    continue
                rested_s = now_s - rest.used_s
                if rested_s > rest.told_s:
                    self._listener.rested(rest, rested_s)
                    rest.told_s = rested_s
                if level + 1 < len(self._watched):
                    self._watched[level + 1][1].append(rest)

    def check(self) -> None:
        """Raises `BookkeepingError` where rests are not under their keys, or more than there may be."""
        if any(rest.key != key or rest.told_s < 0 for key, rest in self._by_key.items()):
            raise BookkeepingError("a rest is not under its key, or was told from before it began")
        most = max(len(self._by_key), *(len(rests) for _, rests in self._watched))
        if most > self.max_rests:
            raise BookkeepingError(f"{most} rests are remembered, at most {self.max_rests} may be")

    # -- inside

    def _above(self, extent: Extent) -> Rest | None:
        """The rest of the nearest extent in front that has one."""
        parent = extent.parent
        for _ in range(MAX_STEPS_UP):
            if parent is None or not parent.num_blocks:
                return None
            rest = self._by_key.get(parent.key)
            if rest is not None:
                return rest
            parent = parent.parent
        return None

    def _begin(self, extent: Extent, before: Rest | None, now_s: float) -> Rest:
        turn, gap_s, continued = 1, -1.0, None
        if before is not None:
            if self._goes_on(extent, before, now_s):
                turn, gap_s, continued = before.turn + 1, before.gap_s, before
            before.turn = turn
            before.used_s = max(before.used_s, extent.used_s)
        rest = Rest(extent, turn, gap_s, extent.used_s)
        rest.told_s = max(0.0, now_s - rest.used_s)
        if before is not None and before.key == rest.key:
            rest.branches = before.branches
        self._listener.began(rest, continued)
        self._keep(rest, now_s)
        return rest

    def _goes_on(self, extent: Extent, before: Rest, now_s: float) -> bool:
        """Note the use of `before`; whether the extent is its next turn, and not one of many branches."""
        if before.open:
            self._use(before, now_s)
        elif not before.taken:
            before.gap_s, before.used_s = max(0.0, now_s - before.used_s), now_s
        before.taken = False
        if before.key == extent.key:
            return True
        before.branches += 1
        return before.branches <= HOT_BRANCHES

    def _use(self, rest: Rest, now_s: float) -> None:
        seconds = max(rest.told_s, now_s - rest.used_s)
        self._listener.used(rest, seconds)
        rest.open, rest.taken = False, True
        rest.gap_s, rest.used_s = seconds, now_s

    def _move(self, rest: Rest, now_s: float) -> None:
        """What is known of a rest is told, and it goes on elsewhere."""
        seconds = now_s - rest.used_s
        if seconds > rest.told_s:
            self._listener.rested(rest, seconds)
        rest.open = False
        del self._by_key[rest.key]

    def _keep(self, rest: Rest, now_s: float) -> None:
        old = self._by_key.pop(rest.key, None)
        if old is not None:
            old.open = False
        self._by_key[rest.key] = rest
        if len(self._by_key) > self.max_rests:
            self._forget(self._by_key.popitem(last=False)[1])
        first = self._watched[0][1]
        first.append(rest)
        if len(first) > self.max_rests:
            self.tell(now_s)

    def _forget(self, rest: Rest) -> None:
        if rest.open:
            self._listener.forgotten(rest)
            rest.open = False
