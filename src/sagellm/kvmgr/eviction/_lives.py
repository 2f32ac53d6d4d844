"""The lives of extents: from a use to the next, whether they are kept until then or not."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._lru_shadow import Lineage
from sagellm.kvmgr.eviction._reuse_model import AGE_ENDS_S, YOUNGEST_S, Features, ReuseModel, age_bin

FIT_FIRST, FIT_LAST, FIT_SHARE = 64, 2048, 8
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
MAX_LINEAGE = 64


class Life:
    """One use of a path until the next one.

    `end`: where the path ends, in blocks. Of the path before it, `known` blocks may have been found again,
    and `claimed` is how long that was; `lineage`: the branches of the tree that the path is made of. `turn`:
    uses in a row; `gap_s`: how long the use before this one lasted; `taken_s`: when the next use came;
    `weight` 0: it is over. `heir`: the key of the last extent that continued this one; `branches`: how many
    did. A value that was told stays what it is until `ranked_until_s`, and while the model is the one
    numbered `ranked_by`.
    """

    __slots__ = (
        "born_s", "branches", "claimed", "end", "features", "gap_s", "heir", "key", "kind", "known",
        "lineage", "ranked_by", "ranked_until_s", "seen_s", "taken_s", "turn", "weight",
    )  # fmt: skip

    def __init__(self, key: int, born_s: float, end: int, turn: int, features: Features, kind: int) -> None:
        self.key, self.end, self.turn = key, end, turn
        self.born_s = self.seen_s = born_s
        self.features, self.kind = features, kind
        self.gap_s: float | None = None
        self.taken_s: float | None = None
        self.heir: int | None = None
        self.branches = self.known = self.claimed = 0
        self.lineage: Lineage = ()
        self.ranked_by, self.ranked_until_s = 0, 0.0
        self.weight = 1.0


class Lives:
    """The last `max_lives` lives by key of extent, ghosts included; they teach the model.

    A life goes on under another key where an extent is split or its tail is given up, so that a whole
    conversation that comes back meets the life of its last turn.
    """

    def __init__(self, model: ReuseModel, max_lives: int) -> None:
        self.model = model
        self.max_lives = max_lives
        self._by_key: OrderedDict[int, Life] = OrderedDict()
        self._num_begun = self._fitted_at = self._num_paths = self._num_used = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Life]:
        return iter(self._by_key.values())

    def get(self, key: int) -> Life | None:
        return self._by_key.get(key)

    def of(self, extent: Extent, now_s: float) -> tuple[Life, bool]:
        """The life of an extent that is evictable now, and whether it is a new one."""
        life = self._by_key.get(extent.key)
        if life is not None and life.born_s >= extent.used_s and (life.weight or life.kind == HOT):
            return life, False
        before = life if life is not None else self._above(extent)
        return self._begin(extent, before, now_s), True

    def use(self, key: int, now_s: float) -> None:
        """The life of an extent ends: somebody uses it."""
        life = self._by_key.get(key)
        if life is not None and life.weight:
            self._take(life, now_s, 1.0)

    def split(self, old: int, head: Extent, tail: Extent, now_s: float) -> None:
        """An extent was cut because a request goes on from its first blocks: that is a use of it, if it is of
        most of it, and the rest is superseded; otherwise the life goes on in the tail."""
        life = self._by_key.get(old)
        if life is None or not life.weight:
            return
        end = head.first_position + head.num_blocks
        if end >= CONTINUED_SHARE * life.end:
            self._supersede(life, tail.key, end, now_s)
        else:
            rest = Life(tail.key, life.born_s, life.end, life.turn, life.features, life.kind)
            rest.seen_s, rest.gap_s, rest.lineage = life.seen_s, life.gap_s, life.lineage
            self._keep(rest)
            life.weight = 0.0
            life.branches += 1
        life.end, life.claimed = end, life.end

    def succeed(self, parent: Extent, child_key: int) -> None:
        """The child is gone, and with it the path ends at its parent: the life goes on there."""
        above = self._by_key.get(parent.key)
        heir = self._by_key.get(above.heir) if above is not None and above.heir is not None else None
        child = self._by_key.get(child_key)
        lives = [one for one in (heir, child) if one is not None and one.weight]
        if not lives or (above is not None and above.weight):
            return
        life = max(lives, key=lambda one: one.born_s)
        del self._by_key[life.key]
        if above is not None:
            life.branches = max(0, above.branches - 1)
        life.key, life.heir = parent.key, None
        self._keep(life)

    def learn(self, now_s: float) -> bool:
        """Fit the model if enough came since; answers whether it did."""
        new = self._num_begun - self._fitted_at
        due = min(FIT_LAST, max(FIT_FIRST, self._num_begun // FIT_SHARE))
        if new < due or self._num_used < FEWEST_USES:
            return False
        for life in self._by_key.values():
            if life.weight:
                born_s = life.born_s
                self.model.at_risk(life.kind, life.seen_s - born_s, now_s - born_s, life.weight)
                life.seen_s = now_s
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

    def value(self, life: Life, now_s: float) -> float:
        """Expected uses per second of memory from now on; the model must have been fitted."""
        age_s = now_s - life.born_s
        if life.kind == HOT:
            life.ranked_until_s = now_s + YOUNGEST_S
            return 1.0 / (max(age_s, life.gap_s or 0.0) + 1e-3)
        age = age_bin(age_s)
        life.ranked_until_s = life.born_s + AGE_ENDS_S[age]
        return self.model.values[life.kind][age]

    def _begin(self, extent: Extent, before: Life | None, now_s: float) -> Life:
        end = extent.first_position + extent.num_blocks
        turn, gap_s, branches, start = 1, None, 0, 0
        if before is not None:
            before = self._latest(before, extent, now_s)
            if before.weight:
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
            0 if gap_s is None else _level(4 * gap_s, 6),
            _level(branches, 2),
            _level(8 * (end - start), 5),
            _level(8 * end, 6),
            _level(extent.use.num_output_tokens / 16, 5),
            0,
        )
        life = Life(extent.key, extent.used_s, end, turn, features, self.model.kind(features))
        life.known = start
        if before is not None:
            life.claimed, before.claimed = max(start, before.claimed), 0
        stem = before.lineage if before is not None else ()
        while stem and stem[-1][1] >= start:  # what was cut off is not of this path
            stem = stem[:-1]
        if branches or not stem:
            self._num_paths += 1
            stem = (*stem, (self._num_paths, start if stem else 0))
        life.lineage = stem[-MAX_LINEAGE:]
        if before is not None and before.key == extent.key:
            life.branches = before.branches
        self._keep(life)
        self._num_begun += 1
        return life

    def _latest(self, before: Life, extent: Extent, now_s: float) -> Life:
        """What an extent below `before` continues: the last one there, if that had little more of its own
        (the end of a prompt that its continuation does not repeat), which is superseded now."""
        heir = self._by_key.get(before.heir) if before.heir is not None else None
        if heir is None or not heir.weight or heir.key == extent.key or before.branches > HOT_BRANCHES:
            return before
        if before.weight or before.end < CONTINUED_SHARE * heir.end:
            return before
        self._supersede(heir, heir.key, before.end, now_s)
        before.branches -= 1
        before.turn, before.gap_s, before.taken_s = heir.turn, heir.gap_s, now_s
        return before

    def _supersede(self, life: Life, rest_key: int, end: int, now_s: float) -> None:
        """A life ends by a use up to `end`; what is behind it lives on under `rest_key`, with less hope."""
        rest = Life(rest_key, life.born_s, life.end, life.turn, life.features, life.kind)
        self._take(life, now_s, end / life.end)
        rest.seen_s, rest.lineage = now_s, life.lineage
        rest.features = (*life.features[:-1], 1)
        rest.kind = self.model.kind(rest.features)
        self._keep(rest)

    def _share(self, hot: Life, now_s: float) -> None:
        """A prefix that many share was used: it has a rate, and would tell the model nothing of others."""
        gap_s = now_s - hot.born_s
        hot.gap_s = gap_s if hot.kind >= 0 or hot.gap_s is None else 0.9 * hot.gap_s + 0.1 * gap_s
        hot.born_s, hot.taken_s, hot.kind = now_s, None, HOT

    def _take(self, life: Life, now_s: float, share: float) -> None:
        """The next use came: what is learned of the life."""
        self.model.at_risk(life.kind, life.seen_s - life.born_s, now_s - life.born_s, life.weight)
        self._num_used += 1
        self.model.used(life.kind, now_s - life.born_s, life.weight * share)
        life.gap_s, life.taken_s, life.weight = now_s - life.born_s, now_s, 0.0

    def _keep(self, life: Life) -> None:
        self._by_key[life.key] = life
        self._by_key.move_to_end(life.key)
        if len(self._by_key) > self.max_lives:
            self._by_key.popitem(last=False)


def _level(value: float, most: int) -> int:
    """0 below 1, then one more for each factor of 4."""
    if value < 1:
        return 0
    return most if value >= 4.0**most else min(most, 1 + int(math.log(value, 4)))
