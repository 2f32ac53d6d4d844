"""`CheckpointRetention`: makes and keeps the checkpoints that save the most prefill per byte."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.checkpoints import CheckpointIndex
from sagellm.core.protocols.eviction import Hint, bonus_of
from sagellm.kvmgr.eviction._base import FEW, MAX_STALE
from sagellm.kvmgr.eviction.adaptive.history import CLOSED, OpenRecords
from sagellm.kvmgr.eviction.adaptive.reuse_model import AGE_ENDS_S, ReuseModel, age_bin

NUM_FEATURES = 7
END, JUNCTION, BEFORE_END = 0, 1, 2
"""Why a checkpoint is there: a prompt ended, two parted, or it is so many blocks before an end."""
BACK = (1, 2)
"""Blocks before the end of a prompt at which checkpoints are made too, for a last turn that is edited."""
GROWN = 1.02
"""A checkpoint whose value has grown by this factor is not evicted on its old one."""
SHARED_USES = 4
"""A place that was used so often is a prefix that many requests share, not a conversation."""
FIT_FIRST, FIT_LAST, FIT_SHARE = 192, 12_288, 3
"""The model is fitted after 192 new places, later after one in three of all so far, at most 12,288."""
FEWEST_USES = 48
"""No fit before so many uses, those of shared prefixes left out."""
MAX_HEIRS = 16
"""Dropped checkpoints behind one whose uses it would get."""


@dataclass(slots=True, eq=False)
class CheckpointRecord:
    """A place for a checkpoint, from its last use to the next. Kept when the checkpoint is dropped.

    `reason`: `END`, `JUNCTION` or from `BEFORE_END` on; `num_new`: blocks of that prompt which no earlier one
    had; `turn`: places in a row that continue each other; `latest`: the place that continued it last;
    `hint`: the last one since its last use; `bonus_s`: seconds by which retention makes it look younger;
    `stamp`: counts the values that it had.
    """

    key: int
    depth: int
    reason: int
    num_new: int
    used_s: float
    num_output_tokens: int
    turn: int = 1
    num_uses: int = 0
    gap_s: float | None = None
    latest: CheckpointRecord | None = None
    kind: int = 0
    open_index: int = CLOSED
    hint: Hint | None = None
    bonus_s: float = 0.0
    stamp: int = 0

    def age_s(self, now_s: float) -> float:
        """Seconds since its last use, less the bonus."""
        return max(0.0, now_s - self.used_s - self.bonus_s)


class CheckpointRetention:
    """Values a checkpoint by the prefill that it saves per second and byte.

    Uses per second come from a `ReuseModel`, which learns from all places where a checkpoint was or could
    have been; tokens and bytes are marginal: with a checkpoint shortly in front, or one behind that keeps the
    same blocks, it saves or costs less. Until the first fit the rate is 1 / age.

    An event takes O(log n) amortised, beside the walk over the prompt's own keys: a value is computed anew
    when a checkpoint's age enters the next of 24 bins, when the model was fitted, or when it is the least.
    Of `max_records` places the oldest are forgotten, none that has a checkpoint. Raises `ConfigError` if that
    is less than 64.
    """

    def __init__(self, index: CheckpointIndex, *, max_records: int = 65_536) -> None:
        if max_records < FEW:
            raise ConfigError(f"max_records must be at least {FEW}, got {max_records}")
        self._index, self._max_records = index, max_records
        self._rates = _Rates()
        self._records: OrderedDict[int, CheckpointRecord] = OrderedDict()
        self._resident: dict[int, CheckpointRecord] = {}
        self._hinted: set[int] = set()
        self._by_value: list[tuple[float, int, int]] = []
        self._due: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._resident)

    def places(
        self, keys: Sequence[int], num_known: int, num_reused: int, num_output_tokens: int, now_s: float
    ) -> list[int]:
        """Returns where a request should keep checkpoints; learns from the request.

        Depths in blocks, ascending. `keys`: one per block of the prompt, for the prefix that ends with it;
        `num_known`: leading blocks that an earlier request had, resident or not; `num_reused`: where prefill
        begins.
        """
        if not keys:
            return []
        self._forget_hints(self._hinted.intersection(keys), now_s)
        before = self._deepest(keys, num_known)
        if before is not None:
            self._close(before, now_s)
        wanted = self._wanted(len(keys), num_known)
        chain = [] if before is None else [before]
        for depth, reason in wanted.items():
            key = keys[depth - 1]
            if key in self._records:
                self._records.move_to_end(key)
                continue
            record = CheckpointRecord(key, depth, reason, len(keys) - num_known, now_s, num_output_tokens)
            if before is not None and before.num_uses < SHARED_USES:
                record.turn, record.gap_s = before.turn + 1, before.gap_s
            self._records[key] = record
            self._rates.num_begun += 1
            chain.append(record)
        for front, behind in itertools.pairwise(chain):
            front.latest = behind
        for record in chain:
            self._reopen(record, now_s)
        self._forget()
        return [depth for depth in wanted if depth > num_reused]

    def made(self, key: int, depth: int, now_s: float) -> None:
        """A checkpoint is resident. `places` asked for it, or it is the end of what was generated."""
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = CheckpointRecord(key, depth, END, 0, now_s, 0)
            self._rates.num_begun += 1
            self._reopen(record, now_s)
        self._resident[key] = record
        self._rank(record, now_s)
        if len(self._by_value) > FEW + MAX_STALE * len(self._resident):
            self._rank_all(now_s)

    def victim(self, now_s: float) -> int:
        """The key of the checkpoint of least value, which the caller drops. Raises `BookkeepingError` if
        there is none."""
        if self._rates.learn(now_s):
            self._rank_all(now_s)
        while self._due and self._due[0][0] <= now_s:
            _, key, stamp = heapq.heappop(self._due)
            record = self._resident.get(key)
            if record is not None and record.stamp == stamp:
                self._rank(record, now_s)
        while self._by_value:
            value, key, stamp = heapq.heappop(self._by_value)
            record = self._resident.get(key)
            if record is not None and record.stamp == stamp:
                if self._value(record, now_s) <= GROWN * value:
                    heapq.heappush(self._by_value, (value, key, stamp))
                    return key
                self._rank(record, now_s)
        raise BookkeepingError("there is no checkpoint to be dropped")

    def removed(self, key: int, above: int | None, now_s: float) -> None:
        """A checkpoint was dropped; `above` is the next one in front of it."""
        del self._resident[key]
        if above is not None:
            self._rank(self._resident[above], now_s)

    def hint(self, key: int, hint: Hint, now_s: float) -> None:
        """Rank a checkpoint by a hint.

        What has ended goes first and what is wanted last; what is retained counts as used later.
        """
        record = self._records.get(key)
        if record is None:
            return
        self._hinted.add(key)
        record.hint = hint.over(record.hint)
        if hint.duration_s is not None:
            record.bonus_s = max(record.bonus_s, bonus_of(hint, now_s - record.used_s))
        if key in self._resident:
            self._rank(record, now_s)

    def check(self) -> None:
        """Raises `BookkeepingError` for a checkpoint without a record or a rank."""
        ranked = {(key, stamp) for _, key, stamp in self._by_value}
        for key, record in self._resident.items():
            if self._records.get(key) is not record or (key, record.stamp) not in ranked:
                raise BookkeepingError(f"checkpoint {key:x} is not in the order of values")

    # -- values

    def _value(self, record: CheckpointRecord, now_s: float) -> float:
        """Tokens saved per second and byte. A dropped checkpoint behind it adds its uses."""
        hint = record.hint
        if hint is not None and hint.wanted:
            return math.inf
        if hint is not None and (hint.ended or hint.superseded):
            return 0.0
        rate = 0.0
        place: CheckpointRecord | None = record
        for _ in range(MAX_HEIRS):
            if place is None or (place is not record and place.key in self._resident):
                break
            rate += self._rate(place, now_s)
            place = place.latest
        saved_tokens, freed_bytes, _ = self._index.marginal(record.key)
        return rate * saved_tokens / max(1, freed_bytes)

    def _rate(self, record: CheckpointRecord, now_s: float) -> float:
        return self._rates.rate(record.kind, record.age_s(now_s))

    def _rank(self, record: CheckpointRecord, now_s: float) -> None:
        """Give a checkpoint the place of its value now."""
        record.stamp += 1
        heapq.heappush(self._by_value, (self._value(record, now_s), record.key, record.stamp))
        end_s = AGE_ENDS_S[age_bin(record.age_s(now_s))]
        if end_s < math.inf:
            due_s = record.used_s + record.bonus_s + end_s
            heapq.heappush(self._due, (due_s, record.key, record.stamp))

    def _rank_all(self, now_s: float) -> None:
        self._by_value, self._due = [], []
        for record in self._resident.values():
            self._rank(record, now_s)

    # -- uses

    def _forget_hints(self, keys: set[int], now_s: float) -> None:
        """A use ends the hints of a prefix, but for other waiting requests."""
        for key in keys:
            record = self._records[key]
            wanted_by, record.bonus_s = None if record.hint is None else record.hint.wanted_by, 0.0
            record.hint = Hint(wanted_by=wanted_by) if wanted_by else None
            if not wanted_by:
                self._hinted.discard(key)
            if key in self._resident:
                self._rank(record, now_s)

    def _wanted(self, end: int, num_known: int) -> dict[int, int]:
        """Depths where a prompt of `end` blocks should have a checkpoint, ascending, and why."""
        wanted = {end - back: BEFORE_END + number for number, back in enumerate(BACK)}
        wanted = {depth: reason for depth, reason in wanted.items() if depth > num_known}
        if num_known:
            wanted[num_known] = JUNCTION
        wanted[end] = END
        return dict(sorted(wanted.items()))

    def _deepest(self, keys: Sequence[int], num_known: int) -> CheckpointRecord | None:
        """The deepest known place: with a checkpoint there, the request would use it."""
        for depth in range(num_known, 0, -1):
            record = self._records.get(keys[depth - 1])
            if record is not None:
                return record
        return None

    def _close(self, record: CheckpointRecord, now_s: float) -> None:
        """The next use of a place: learn from it."""
        self._rates.close(record, now_s)
        record.num_uses += 1
        record.gap_s, record.used_s = now_s - record.used_s, now_s

    def _reopen(self, record: CheckpointRecord, now_s: float) -> None:
        """Wait for the next use of a place that was used or begun now."""
        record.kind = self._rates.model.kind(
            (
                record.reason,
                min(4, record.turn.bit_length()),
                0 if record.gap_s is None else _level(int(min(4 * record.gap_s, 1e9)), 6),
                min(6, record.num_uses.bit_length()),
                _level(8 * record.num_new, 5),
                _level(8 * record.depth, 6),
                _level(record.num_output_tokens // 16, 5),
            )
        )
        record.open_index = self._rates.open.open(record.kind, now_s, now_s)
        self._records.move_to_end(record.key)
        if record.key in self._resident:
            self._rank(record, now_s)

    def _forget(self) -> None:
        """Forget the oldest places beyond `max_records` that have no checkpoint."""
        for _ in range(max(0, len(self._records) - max(self._max_records, 2 * len(self._resident)))):
            key, record = next(iter(self._records.items()))
            if key in self._resident:
                self._records.move_to_end(key)
            else:
                self._rates.end(record)
                record.latest = None
                del self._records[key]
                self._hinted.discard(key)


class _Rates:
    """Uses per second of places, learned online.

    It learns from all places, with a checkpoint or without. `open`: the places that wait for their next use.
    """

    def __init__(self) -> None:
        self.model = ReuseModel(NUM_FEATURES)
        self.open = OpenRecords()
        self.num_begun = self._num_begun_at_fit = self._num_used = 0

    def rate(self, kind: int, age_s: float) -> float:
        """Expected uses per second of memory, so long after the last use."""
        return self.model.value(kind, age_s) if self.model.num_fits else 1.0 / (age_s + 1.0)

    def close(self, record: CheckpointRecord, now_s: float) -> None:
        """A place was used."""
        age_s = now_s - record.used_s
        self.model.at_risk(record.kind, self.end(record) - record.used_s, age_s)
        self.model.used(record.kind, age_s)
        self._num_used += record.num_uses < SHARED_USES

    def end(self, record: CheckpointRecord) -> float:
        """The place is no longer waited for; returns until when its seconds were counted."""
        index, record.open_index = record.open_index, CLOSED
        return self.open.close(index)

    def learn(self, now_s: float) -> bool:
        """Fit the model if there are enough new records; returns whether it did."""
        num_new = self.num_begun - self._num_begun_at_fit
        due = min(FIT_LAST, max(FIT_FIRST, self.num_begun // FIT_SHARE))
        if num_new < due or self._num_used < FEWEST_USES:
            return False
        self.model.all_at_risk(*self.open.count(now_s))
        self.model.fit(num_new)
        self._num_begun_at_fit = self.num_begun
        return True


def _level(value: int, most: int) -> int:
    """0 below 1, then one more for each factor of 4, at most `most`."""
    return min(most, (value.bit_length() + 1) // 2)
