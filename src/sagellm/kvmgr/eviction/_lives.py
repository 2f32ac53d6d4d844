"""The lives of extents: from a use to the next, whether they are kept until then or not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._exposure import OpenLives
from sagellm.kvmgr.eviction._reuse_model import Features, ReuseModel

FIT_FIRST, FIT_LAST, FIT_SHARE = 64, 4096, 8
"""A fit after so many lives, at most so many, and in between one in so many of all; but not before anything
to speak of was used again."""
FEWEST_USES = 16
MAX_STEPS_UP = 16
HOT = -1
"""The kind of what many share."""
HOT_BRANCHES = 3
"""More continuations than this make an extent a prefix that many share, not a conversation."""
CONTINUED_SHARE = 0.75
"""A use of the first blocks of a path continues it, and supersedes the rest, if it is this share of it."""
NUM_FEATURES = 7
NOWHERE = -1


class Life:
    """One use of a path until the next one.

    `end`: where the path ends, in blocks. `turn`: uses in a row; `gap_s`: how long the use before this one
    lasted; `taken_s`: when the next use came; `is_open`: nothing has ended it yet, and `place` is where
    `OpenLives` has it. `heir`: the key of the last extent that continued this one; `branches`: how many did.
    """

    __slots__ = (
        "born_s", "branches", "end", "features", "gap_s", "heir", "is_open", "key", "kind", "place",
        "taken_s", "turn",
    )  # fmt: skip

    def __init__(self, key: int, born_s: float, end: int, turn: int, features: Features, kind: int) -> None:
        self.key, self.end, self.turn = key, end, turn
        self.born_s = born_s
        self.features, self.kind = features, kind
        self.gap_s: float | None = None
        self.taken_s: float | None = None
        self.heir: int | None = None
        self.branches = 0
        self.is_open, self.place = True, NOWHERE


class Lives:
    """The last `max_lives` lives by key of extent, ghosts included; they teach the model.

    A life goes on under another key where an extent is split or its tail is given up, so that a whole
    conversation that comes back meets the life of its last turn. `changed`: keys whose lives became others
    while nobody asked for them; who ranks by lives looks at them and empties it.
    """

    def __init__(self, model: ReuseModel, max_lives: int) -> None:
        self.model = model
        self.max_lives = max_lives
        self.changed: list[int] = []
        self._by_key: OrderedDict[int, Life] = OrderedDict()
        self._open = OpenLives()
        self._num_begun = self._fitted_at = self._num_used = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Life]:
        return iter(self._by_key.values())

    def get(self, key: int) -> Life | None:
        return self._by_key.get(key)

    def of(self, extent: Extent, now_s: float) -> Life:
        """The life of an extent that is evictable now; where it was used since, a new one."""
        life = self._by_key.get(extent.key)
        if life is not None and life.born_s >= extent.used_s and (life.is_open or life.kind == HOT):
            return life
        before = life if life is not None else self._above(extent)
        return self._begin(extent, before, now_s)

    def use(self, key: int, now_s: float) -> None:
        """The life of an extent ends: somebody uses it."""
        life = self._by_key.get(key)
        if life is not None and life.is_open:
            self._take(life, now_s, 1.0)

    def split(self, old: int, head: Extent, tail: Extent, now_s: float) -> None:
        """An extent was cut because a request goes on from its first blocks: that is a use of it, if it is of
        most of it, and the rest is superseded; otherwise the life goes on in the tail."""
        life = self._by_key.get(old)
        if life is None or not life.is_open:
            return
        end = head.first_position + head.num_blocks
        if end >= CONTINUED_SHARE * life.end:
            self._supersede(life, tail.key, end, now_s)
        else:
            rest = Life(tail.key, life.born_s, life.end, life.turn, life.features, life.kind)
            rest.gap_s = life.gap_s
            self._keep(rest, self._end(life))
            life.branches += 1
        life.end = end

    def succeed(self, parent: Extent, child_key: int) -> None:
        """The child is gone, and with it the path ends at its parent: the life goes on there."""
        above = self._by_key.get(parent.key)
        heir = self._by_key.get(above.heir) if above is not None and above.heir is not None else None
        child = self._by_key.get(child_key)
        lives = [one for one in (heir, child) if one is not None and one.is_open]
        if not lives or (above is not None and above.is_open):
            return
        life = max(lives, key=lambda one: one.born_s)
        del self._by_key[life.key]
        if above is not None:
            life.branches = max(0, above.branches - 1)
        life.key, life.heir = parent.key, None
        self._enter(life)

    def learn(self, now_s: float) -> bool:
        """Fit the model if enough came since; answers whether it did."""
        new = self._num_begun - self._fitted_at
        due = min(FIT_LAST, max(FIT_FIRST, self._num_begun // FIT_SHARE))
        if new < due or self._num_used < FEWEST_USES:
            return False
        self.model.all_at_risk(*self._open.count(now_s))
        self.model.fit(new)
        self._fitted_at = self._num_begun
        return True

    # -- inside

    def _above(self, extent: Extent) -> Life | None:
        """The life of the nearest extent in front that has one."""
        parent = extent.parent
        for _ in range(MAX_STEPS_UP):
            if parent is None or not parent.num_blocks:
                return None
            life = self._by_key.get(parent.key)
            if life is not None:
                return life
            parent = parent.parent
        return None

    def _begin(self, extent: Extent, before: Life | None, now_s: float) -> Life:
        end = extent.first_position + extent.num_blocks
        turn, gap_s, branches, start = 1, None, 0, 0
        if before is not None:
            before = self._latest(before, extent, now_s)
            if before.is_open:
                self._take(before, now_s, 1.0)
            start = min(before.end, end)
            if before.key != extent.key:
                branches = before.branches
                before.branches += 1
                before.heir = extent.key
            if branches <= HOT_BRANCHES:
                turn, gap_s = before.turn + 1, before.gap_s
            else:
                self._share(before, now_s)
        features = (
            min(4, turn.bit_length()),
            0 if gap_s is None else _level(int(min(4 * gap_s, 1e9)), 6),
            _level(branches, 2),
            _level(8 * (end - start), 5),
            _level(8 * end, 6),
            _level(extent.use.num_output_tokens // 16, 5),
            0,
        )
        life = Life(extent.key, extent.used_s, end, turn, features, self.model.kind(features))
        if before is not None and before.key == extent.key:
            life.branches = before.branches
        self._keep(life, life.born_s)
        self._num_begun += 1
        return life

    def _latest(self, before: Life, extent: Extent, now_s: float) -> Life:
        """What an extent below `before` continues: the last one there, if that had little more of its own
        (the end of a prompt that its continuation does not repeat), which is superseded now."""
        heir = self._by_key.get(before.heir) if before.heir is not None else None
        if heir is None or not heir.is_open or heir.key == extent.key or before.branches > HOT_BRANCHES:
            return before
        if before.is_open or before.end < CONTINUED_SHARE * heir.end:
            return before
        self._supersede(heir, heir.key, before.end, now_s)
        self.changed.append(heir.key)
        before.branches -= 1
        before.turn, before.gap_s, before.taken_s = heir.turn, heir.gap_s, now_s
        return before

    def _supersede(self, life: Life, rest_key: int, end: int, now_s: float) -> None:
        """A life ends by a use up to `end`; what is behind it lives on under `rest_key`, with less hope."""
        rest = Life(rest_key, life.born_s, life.end, life.turn, life.features, life.kind)
        self._take(life, now_s, end / life.end)
        rest.features = (*life.features[:-1], 1)
        rest.kind = self.model.kind(rest.features)
        self._keep(rest, now_s)

    def _share(self, hot: Life, now_s: float) -> None:
        """A prefix that many share was used: it has a rate, and would tell the model nothing of others."""
        gap_s = now_s - hot.born_s
        hot.gap_s = gap_s if hot.kind >= 0 or hot.gap_s is None else 0.9 * hot.gap_s + 0.1 * gap_s
        hot.born_s, hot.taken_s, hot.kind = now_s, None, HOT
        self.changed.append(hot.key)

    def _take(self, life: Life, now_s: float, share: float) -> None:
        """The next use came: what is learned of the life."""
        age_s = now_s - life.born_s
        self.model.at_risk(life.kind, self._end(life) - life.born_s, age_s)
        self.model.used(life.kind, age_s, share)
        self._num_used += 1
        life.gap_s, life.taken_s = age_s, now_s

    def _keep(self, life: Life, counted_s: float) -> None:
        """A life that is open: the seconds since `counted_s` are still to be counted."""
        life.place = self._open.open(life.kind, life.born_s, counted_s)
        self._enter(life)

    def _enter(self, life: Life) -> None:
        lives = self._by_key
        before = lives.get(life.key)
        if before is not None:
            self._forget(before)
            lives.move_to_end(life.key)
        lives[life.key] = life
        if len(lives) > self.max_lives:
            self._forget(lives.popitem(last=False)[1])

    def _forget(self, life: Life) -> None:
        if life.is_open:
            self._end(life)

    def _end(self, life: Life) -> float:
        """Nothing is open any more; returns until when the life was counted."""
        place, life.is_open, life.place = life.place, False, NOWHERE
        return self._open.close(place)


def _level(value: int, most: int) -> int:
    """0 below 1, then one more for each factor of 4."""
    return min(most, (value.bit_length() + 1) // 2)
