"""Predictive eviction: asks a predictor which extents are used again, and teaches it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeGuard, cast

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent, GiveUp
from sagellm.core.protocols.lifetime import (
    LifetimePredictor,
    PredictionRequest,
    ReuseFeatures,
    ReusePrediction,
    ReusePredictor,
)
from sagellm.kvmgr.eviction._base import ExtentQueue, QueueEntry, recency
from sagellm.kvmgr.eviction._history import MAX_BRANCHES, HistoryPolicy, PathHistory, PathRecord

Rank = tuple[float, int, int]

MAX_RECORDS = 16_384
SWEEP = 2
"""Extents ranked anew for each extent that is evicted, in turn: values change while time passes."""
CHANGED = 1.05
"""An extent whose value has changed by this factor since it was ranked takes another place."""
AGED = 0.33
"""A value is good until the extent has been idle for this share longer, or for a second."""
LONG_AGO_S = 1e12
"""Makes ranks by time of use smaller than any value."""
LEAST_HELD_S = 1.0
"""The least seconds of memory that a use costs."""
MAX_VALUES = 4096
"""Predictions whose value is remembered."""
FULL_BLOCKS = 4
"""Extents with fewer blocks than this are sampled: the predictor learns of one in this many blocks."""
PATIENCE_S = 1800.0
"""A sequence that is idle for so long has ended."""
MAX_BLOCKS = 1 << 20
FIRST_REPORT_S, REPORT_GROWTH = 2.0, 4.0
"""An idle extent is reported to the predictor after 2, 8, 32, ... seconds."""
UNKNOWN_TURN = 0
"""The turn of what a continuation left behind: no turn of a session ends there."""
NO_FEATURES = ReuseFeatures(0, UNKNOWN_TURN, 0, 0)


class PredictivePolicy(HistoryPolicy):
    """Ranks extents by a predictor's answers, and reports what became of them.

    With a `ReusePredictor`, extents are evicted in order of uses expected per second of memory, from now to
    the best moment to give them up; in order of last use while the predictor abstains. With a
    `LifetimePredictor`, a conversation is one sequence that grows by blocks (the unit of the lengths; the
    predictor should be this policy's own): the sequence whose predicted end is nearest goes first, and where
    the predictor abstains it ends with its last use. Without a predictor this is LRU. The history of at most
    `MAX_RECORDS` extents is known; extents without history go first.

    The `estimated_lifetime` of an extent of `sagellm.compat` is taken for the predicted seconds to its end,
    except with a `ReusePredictor`.
    """

    def __init__(
        self,
        *,
        predictor: ReusePredictor | LifetimePredictor | None = None,
        capacity: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(capacity, clock)
        self._predictor = predictor
        self._queue = ExtentQueue()
        self._ranks = RecencyRanks()
        if _predicts_reuse(predictor):
            self._ranks = ReuseRanks(predictor)
        elif predictor is not None:
            self._ranks = EndRanks(cast(LifetimePredictor, predictor))
        self._history: IdleHistory = IdleHistory(self._ranks, MAX_RECORDS)
        self._num_evicted = 0
        self._by_value = False

    # -- events

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        self._history.report_idle(self._now())
        if self._ranks.by_value != self._by_value:
            self._by_value = self._ranks.by_value
            self._rank_all()
        if self._by_value:
            count = min(SWEEP * (1 + self._num_evicted), len(self._queue.live))
            for entry in self._queue.in_turn(count):  # all are after one round of evictions
                self._rerank(entry)
        self._num_evicted = 0
        return super().evict(num_blocks, give_up)

    # -- what a policy decides

    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        if extent.used_s > self._now_s:
            self._now_s = extent.used_s
        now_s = self._now()
        record = self._history.record(extent, now_s)
        self._push(extent, self._queue, self._ranks.rank(extent, record, now_s))

    def _next_queue(self) -> ExtentQueue | None:
        queue = self._queue
        while queue.live:
            if not (self._by_value and self._rerank(queue.first())):
                return queue
        return None

    def _evicted(self, entry: QueueEntry) -> None:
        self._num_evicted += 1

    # -- ranks

    def _rank_all(self) -> None:
        for entry in list(self._queue.live.values()):
            record = self._history.get(entry.extent.key)
            if record is not None:
                record.rank_until_s = self._now()
            self._rerank(entry)

    def _rerank(self, entry: QueueEntry) -> bool:
        """Move an extent if its value has changed; returns whether it moved."""
        extent, now_s = entry.extent, self._now()
        record = self._history.get(extent.key)
        if record is not None and record.rank_until_s > now_s:
            return False
        rank = below_values(extent) if record is None else self._ranks.rank(extent, record, now_s)
        old = entry.rank[0]
        if old / CHANGED <= rank[0] <= old * CHANGED or rank[0] == old:
            return False
        self._requeue(extent, self._queue, self._queue, rank)
        return True

    def fresh(self) -> Self:
        """Another policy that asks the same reuse predictor and teaches it nothing.

        A `LifetimePredictor` is left out: extents of `sagellm.compat` bring their predictions.
        """
        predictor = ReadOnly(self._predictor) if _predicts_reuse(self._predictor) else None
        return type(self)(predictor=predictor, capacity=self._given_capacity, clock=self._clock)

    def check(self) -> None:
        super().check()
        self._history.check()


# -- history


@dataclass(slots=True, eq=False)
class PredictedSequence:
    """All turns of one conversation, for a `LifetimePredictor`.

    Lengths in blocks. `goes_on_s`: predicted seconds from its last use to its end.
    """

    name: str
    num_prompt: int
    began_s: float
    used_s: float
    end: int
    goes_on_s: float = 0.0
    is_open: bool = True


@dataclass(slots=True, eq=False)
class IdleRecord(PathRecord):
    """A `PathRecord` with what the predictor knows of it.

    `reported_s`: for how long it is known to be idle; `rank_until_s`: when it should be ranked anew. Of a
    closed record, `turn`, `gap_s` and `used_s` are those of the use that closed it; `is_in_use` is true until
    that request's own record begins.
    """

    features: ReuseFeatures = NO_FEATURES
    num_blocks: int = 0
    reported_s: float = 0.0
    rank_until_s: float = 0.0
    is_in_use: bool = False
    sequence: PredictedSequence | None = None


class IdleHistory(PathHistory[IdleRecord]):
    """Reports to `ranks` when records begin, are used, stay idle, and are forgotten."""

    def __init__(self, ranks: RecencyRanks, max_records: int) -> None:
        super().__init__(max_records)
        self._ranks = ranks
        self._watched: list[tuple[float, deque[IdleRecord]]] = []
        """By idle time in seconds, the records to report then, in order of last use."""
        seconds = FIRST_REPORT_S
        while seconds < ranks.watched_s:
            self._watched.append((seconds, deque()))
            seconds *= REPORT_GROWTH
        self._watched.append((ranks.watched_s, deque()))

    def replace_child(self, parent: Extent, child_key: int, now_s: float) -> None:
        """The parent's last child was evicted: the parent is idle since their last use.

        The record of a child without siblings is dropped: if the path comes back whole, nothing is inserted
        under the child's key.
        """
        above, child = self._records.get(parent.key), self._records.get(child_key)
        if above is not None and above.is_open:
            return
        latest = above
        if child is not None and (above is None or child.used_s > above.used_s):
            latest = child
        turn, gap_s = (latest.turn, latest.gap_s) if latest is not None else (UNKNOWN_TURN, None)
        record = self._make(parent, turn, gap_s, parent.used_s)
        record.reported_s = max(0.0, now_s - parent.used_s)
        record.num_branches = above.num_branches if above is not None else 0
        record.sequence = latest.sequence if latest is not None else None
        if child is not None and child.is_open and record.num_branches <= 1:
            idle_s = now_s - child.used_s
            if idle_s > child.reported_s:
                self._ranks.idle(child, idle_s)
            child.is_open = False
            del self._records[child.key]
        self._store_watched(record, now_s)

    def report_idle(self, now_s: float) -> None:
        """Report the records that were idle for another step. Too many are reported earlier."""
        for level, (seconds, records) in enumerate(self._watched):
            while records and (records[0].used_s + seconds <= now_s or len(records) > self.max_records):
                record = records.popleft()
                if not record.is_open:
                    continue
                idle_s = now_s - record.used_s
                if idle_s > record.reported_s:
                    self._ranks.idle(record, idle_s)
                    record.reported_s = idle_s
                if level + 1 < len(self._watched):
                    self._watched[level + 1][1].append(record)

    def check(self) -> None:
        """Raises `BookkeepingError` where records are not under their keys, or too many."""
        if any(record.key != key or record.reported_s < 0 for key, record in self._records.items()):
            raise BookkeepingError("a record is not under its key, or was reported from before it began")
        most = max(len(self._records), *(len(records) for _, records in self._watched))
        if most > self.max_records:
            raise BookkeepingError(f"{most} records are kept, at most {self.max_records} may be")

    # -- the rules of PathHistory

    def _make(self, extent: Extent, turn: int, gap_s: float | None, used_s: float) -> IdleRecord:
        end = extent.first_position + extent.num_blocks
        known_gap_s = -1.0 if gap_s is None else gap_s
        features = ReuseFeatures(extent.num_uses, turn, extent.first_position, end, known_gap_s)
        return IdleRecord(
            extent.key, used_s, end, turn, gap_s, features=features, num_blocks=extent.num_blocks
        )

    def _begin(self, extent: Extent, before: IdleRecord | None, now_s: float) -> IdleRecord:
        turn, gap_s, continued = 1, None, None
        if before is not None:
            if before.is_open:
                self._close(before, now_s)
            elif not before.is_in_use:
                before.gap_s, before.used_s = max(0.0, now_s - before.used_s), now_s
            before.is_in_use = False
            if before.key != extent.key:
                before.num_branches += 1
            if before.key == extent.key or before.num_branches <= MAX_BRANCHES:
                turn, gap_s, continued = before.turn + 1, before.gap_s, before
            before.turn = turn
            before.used_s = max(before.used_s, extent.used_s)
        record = self._make(extent, turn, gap_s, extent.used_s)
        record.reported_s = max(0.0, now_s - record.used_s)
        if before is not None and before.key == record.key:
            record.num_branches = before.num_branches
        self._ranks.began(record, continued)
        self._store_watched(record, now_s)
        return record

    def _close(self, record: IdleRecord, now_s: float) -> None:
        idle_s = max(record.reported_s, now_s - record.used_s)
        self._ranks.used(record, idle_s)
        record.is_open, record.is_in_use = False, True
        record.gap_s, record.used_s = idle_s, now_s

    def _continues(self, record: IdleRecord, end: int, now_s: float) -> bool:
        return super()._continues(record, end, now_s) and now_s > record.used_s

    def _supersede(self, record: IdleRecord, tail: Extent, end: int, now_s: float) -> None:
        rest = self._make(tail, UNKNOWN_TURN, None, record.used_s)
        rest.sequence = record.sequence
        rest.reported_s = now_s - rest.used_s
        self._close(record, now_s)
        self._store_watched(rest, now_s)

    def _move_to_tail(self, record: IdleRecord, tail: Extent, now_s: float) -> None:
        rest = self._make(tail, record.turn, record.gap_s, record.used_s)
        rest.sequence, rest.reported_s = record.sequence, record.reported_s
        record.is_open, record.turn, record.num_branches = False, UNKNOWN_TURN, 1
        self._store_watched(rest, now_s)

    def _forget(self, record: IdleRecord) -> None:
        if record.is_open:
            self._ranks.forgotten(record)
            record.is_open = False

    def _store_watched(self, record: IdleRecord, now_s: float) -> None:
        replaced = self._records.get(record.key)
        if replaced is not None:
            replaced.is_open = False
        self._store(record)
        first = self._watched[0][1]
        first.append(record)
        if len(first) > self.max_records:
            self.report_idle(now_s)


# -- ranks


class RecencyRanks:
    """LRU, where a predicted lifetime makes an extent look younger; reports nothing.

    `watched_s`: for how long idle extents are of interest. `by_value`: whether ranks are values, which change
    while time passes.
    """

    watched_s = 0.0
    by_value = False

    def rank(self, extent: Extent, record: IdleRecord, now_s: float) -> Rank:
        """Lower ranks are evicted first."""
        when_s, last_use, depth = recency(extent)
        lifetime_s = _given_lifetime_s(extent)
        return (when_s if lifetime_s is None else when_s + lifetime_s, last_use, depth)

    def began(self, record: IdleRecord, before: IdleRecord | None) -> None:
        """A record begins. `before`: the record that it continues, if it is a later turn."""

    def used(self, record: IdleRecord, idle_s: float) -> None:
        """A request uses the path again, after so many seconds."""

    def idle(self, record: IdleRecord, idle_s: float) -> None:
        """The path has been idle for so many seconds since its last use."""

    def forgotten(self, record: IdleRecord) -> None:
        """An open record is dropped, as there are too many."""


class ReuseRanks(RecencyRanks):
    """By expected uses per second of memory; LRU until the predictor does not abstain."""

    def __init__(self, predictor: ReusePredictor) -> None:
        self._predictor = predictor
        self.watched_s = predictor.horizon_s
        self._values: dict[int, tuple[ReusePrediction, float]] = {}

    def rank(self, extent: Extent, record: IdleRecord, now_s: float) -> Rank:
        age_s = max(0.0, now_s - extent.used_s - extent.bonus_s)
        prediction = self._predictor.predict(record.features, age_s)
        if not self.by_value:
            if prediction.abstained:
                return below_values(extent)
            self.by_value = True
        record.rank_until_s = now_s + max(1.0, AGED * age_s)
        return (self._value(prediction), extent.last_use, -extent.first_position)

    def used(self, record: IdleRecord, idle_s: float) -> None:
        if _is_sampled(record):
            self._predictor.update(record.features, idle_s, reused=True, since_s=record.reported_s)

    def idle(self, record: IdleRecord, idle_s: float) -> None:
        if _is_sampled(record):
            self._predictor.update(record.features, idle_s, reused=False, since_s=record.reported_s)

    def _value(self, prediction: ReusePrediction) -> float:
        """`density`, remembered by identity: predictors with tables return the same object many times.

        The prediction is kept with its value, so that no other object gets its id.
        """
        known = self._values.get(id(prediction))
        if known is not None:
            return known[1]
        if len(self._values) >= MAX_VALUES:
            self._values.clear()
        value = density(prediction, self._predictor.horizon_s)
        self._values[id(prediction)] = (prediction, value)
        return value


class EndRanks(RecencyRanks):
    """By the predicted end of the sequence: last use plus predicted time."""

    watched_s = PATIENCE_S

    def __init__(self, predictor: LifetimePredictor) -> None:
        self._predictor = predictor
        self._num_begun = 0

    def rank(self, extent: Extent, record: IdleRecord, now_s: float) -> Rank:
        rank = super().rank(extent, record, now_s)
        sequence = record.sequence
        if sequence is None or _given_lifetime_s(extent) is not None:
            return rank
        return (rank[0] + sequence.goes_on_s, *rank[1:])

    def began(self, record: IdleRecord, before: IdleRecord | None) -> None:
        sequence = before.sequence if before is not None else None
        if sequence is None or not sequence.is_open:
            self._num_begun += 1
            name = f"sequence {self._num_begun}"
            sequence = PredictedSequence(name, record.end, record.used_s, record.used_s, record.end)
        sequence.used_s, sequence.end = record.used_s, max(sequence.end, record.end)
        record.sequence = sequence
        prediction = self._predictor.predict(
            PredictionRequest(sequence.name, (), sequence.end, MAX_BLOCKS, sequence.num_prompt)
        )
        sequence.goes_on_s = 0.0 if prediction.abstained else max(0.0, prediction.estimated_time)

    def idle(self, record: IdleRecord, idle_s: float) -> None:
        if idle_s >= PATIENCE_S:
            self.forgotten(record)

    def forgotten(self, record: IdleRecord) -> None:
        """The sequence has ended, if this is its latest record. Earlier ones may be kept too."""
        sequence = record.sequence
        if sequence is not None and sequence.is_open and record.used_s >= sequence.used_s:
            sequence.is_open = False
            self._predictor.update(sequence.name, sequence.end, sequence.used_s - sequence.began_s)


class ReadOnly:
    """A `ReusePredictor` that answers as another does, and learns nothing."""

    def __init__(self, predictor: ReusePredictor) -> None:
        self._predictor = predictor

    @property
    def horizon_s(self) -> float:
        return self._predictor.horizon_s

    def predict(self, features: ReuseFeatures, age_s: float = 0.0) -> ReusePrediction:
        return self._predictor.predict(features, age_s)

    def update(
        self, features: ReuseFeatures, seconds: float, *, reused: bool, since_s: float = 0.0
    ) -> None: ...


def density(prediction: ReusePrediction, horizon_s: float) -> float:
    """Expected uses per second of memory, up to the best moment to give up.

    This is the index of Gittins (1979). The moments are those that the quantiles name, and the horizon. 0
    where no use is expected.
    """
    probability, best = prediction.probability, 0.0
    held_s, level, time_s = LEAST_HELD_S, 0.0, 0.0
    for next_level, next_s in (*sorted(prediction.quantiles.items()), (1.0, horizon_s)):
        still_idle = 1.0 - probability * (level + next_level) / 2
        held_s += max(0.0, next_s - time_s) * still_idle
        level, time_s = next_level, max(time_s, next_s)
        best = max(best, probability * level / held_s)
    return best


def below_values(extent: Extent) -> Rank:
    """In order of last use, below all ranks that are values."""
    when_s, last_use, depth = recency(extent)
    return (when_s - LONG_AGO_S, last_use, depth)


def _predicts_reuse(predictor: ReusePredictor | LifetimePredictor | None) -> TypeGuard[ReusePredictor]:
    return hasattr(predictor, "horizon_s")


def _given_lifetime_s(extent: Extent) -> float | None:
    """The prediction that an extent of `sagellm.compat` brings. The contract asks for none."""
    meta = getattr(extent, "meta", None)
    given = meta.get("estimated_lifetime") if isinstance(meta, Mapping) else None
    return float(given) if given is not None and math.isfinite(given) else None


def _is_sampled(record: IdleRecord) -> bool:
    """Whether the predictor learns of a record. By key, so the same in each run.

    Small extents are many, and their blocks should count no more than others.
    """
    return record.num_blocks >= FULL_BLOCKS or record.key % FULL_BLOCKS < record.num_blocks


PLUGIN = PredictivePolicy
