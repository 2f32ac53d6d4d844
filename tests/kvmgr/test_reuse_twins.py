"""What `learned` counts, fits and orders with arrays and rows, against the plain way to do it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.core.protocols.eviction import SimpleExtent
from sagellm.kvmgr.eviction.adaptive.history import OpenRecords
from sagellm.kvmgr.eviction.adaptive.reuse_model import (
    _MIDDLE_S,
    _NEAR,
    BORDERS_S,
    FIRST_FITS,
    FIRST_ROUNDS,
    MAX_HAZARD,
    NUM_AGES,
    ReuseModel,
    age_bin,
    seconds_at_risk,
)
from sagellm.kvmgr.eviction.adaptive.value_queue import ValueQueue

NUM_KINDS = 5
BINS_S = list(pairwise(BORDERS_S.tolist()))
ages_s = st.floats(0.0, 20_000.0) | st.sampled_from([0.0, 0.5, *BORDERS_S.tolist()])
spans = st.tuples(st.integers(0, NUM_KINDS - 1), ages_s, ages_s).map(
    lambda span: (span[0], min(span[1:]), max(span[1:]))
)
"""A kind, and the ages from and to which it was watched."""


# -- seconds at risk


def slow_seconds(paths: Sequence[tuple[int, float, float]]) -> list[list[float]]:
    seconds = [[0.0] * NUM_AGES for _ in range(NUM_KINDS)]
    for kind, from_s, to_s in paths:
        for age, (begin_s, end_s) in enumerate(BINS_S):
            seconds[kind][age] += max(0.0, min(to_s, end_s) - max(from_s, begin_s))
    return seconds


def columns(paths: Sequence[tuple[int, float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kinds, from_s, to_s = ([record[number] for record in paths] for number in range(3))
    return np.array(kinds, dtype=np.int64), np.array(from_s, dtype=float), np.array(to_s, dtype=float)


@given(st.lists(spans, max_size=40))
def test_seconds_at_risk_are_those_of_each_path_in_each_bin(paths: list[tuple[int, float, float]]) -> None:
    counted = seconds_at_risk(*columns(paths), NUM_KINDS)
    assert counted == pytest.approx(np.array(slow_seconds(paths)), rel=1e-9, abs=1e-6)


def test_a_clock_that_lags_behind_counts_no_seconds() -> None:
    assert not seconds_at_risk(*columns([(0, -5.0, -1.0)]), 1).any()


@dataclass
class SlowRecord:
    kind: int
    used_s: float
    counted_s: float


class OpenRecordsMachine(RuleBasedStateMachine):
    """Against a dictionary of records."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.records, self.now_s = OpenRecords(), dict[int, SlowRecord](), 100.0

    @rule(kind=st.integers(0, 3), age_s=st.floats(0.0, 100.0))
    def begins(self, kind: int, age_s: float) -> None:
        index = self.open.open(kind, self.now_s - age_s, self.now_s - age_s / 2)
        assert index not in self.records
        self.records[index] = SlowRecord(kind, self.now_s - age_s, self.now_s - age_s / 2)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.records)))
        assert self.open.close(index) == self.records.pop(index).counted_s

    @rule(after_s=st.floats(0.0, 50.0))
    def counts(self, after_s: float) -> None:
        self.now_s += after_s
        kinds, from_s, to_s = self.open.count(self.now_s)
        told = sorted(zip(kinds.tolist(), from_s.tolist(), to_s.tolist(), strict=True))
        assert told == sorted(
            (record.kind, record.counted_s - record.used_s, self.now_s - record.used_s)
            for record in self.records.values()
        )
        for record in self.records.values():
            record.counted_s = self.now_s

    @invariant()
    def are_as_many(self) -> None:
        assert len(self.open) == len(self.records)


TestOpenRecords = OpenRecordsMachine.TestCase
TestOpenRecords.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


# -- the fit

Factors = dict[tuple[int, int, int], float]
"""By feature, level, age."""


class SlowModel:
    """Proportional fitting as it is written down: sums over kinds, one feature, level and age at a time."""

    def __init__(
        self, kinds: Sequence[tuple[int, ...]], shrinkage: float = 4.0, early_s: float = 20.0
    ) -> None:
        self.kinds, self.shrinkage = kinds, shrinkage
        self.factors: Factors = {}
        self.base = [0.0] * NUM_AGES
        self.prior = [1.0 / (middle_s + early_s) for middle_s in _MIDDLE_S]

    def product(self, kind: int, age: int) -> float:
        features = enumerate(self.kinds[kind])
        return math.prod(self.factors.get((number, level, age), 1.0) for number, level in features)

    def hazard(self, kind: int, age: int) -> float:
        return min(MAX_HAZARD, self.base[age] * self.product(kind, age))

    def fit(self, uses: Sequence[Sequence[float]], at_risk_s: Sequence[Sequence[float]], rounds: int) -> None:
        every, ages = range(len(self.kinds)), range(NUM_AGES)
        for _ in range(rounds):
            seconds = [sum(at_risk_s[kind][age] * self.product(kind, age) for kind in every) for age in ages]
            seen = [sum(uses[kind][age] for kind in every) for age in ages]
            expected = sum(s * prior for s, prior in zip(seconds, self.prior, strict=True))
            scale = (sum(seen) + 0.1) / (expected + 0.1)
            self.base = [(seen[age] + 3.0) / (seconds[age] + 3.0 / (scale * self.prior[age])) for age in ages]
            clipped = [
                [
                    self.hazard(kind, age) / max(1e-300, self.base[age] * self.product(kind, age))
                    for age in ages
                ]
                for kind in every
            ]
            for number in range(len(self.kinds[0])):
                self.fit_feature(number, uses, at_risk_s, clipped)

    def fit_feature(
        self,
        number: int,
        uses: Sequence[Sequence[float]],
        at_risk_s: Sequence[Sequence[float]],
        clipped: Sequence[Sequence[float]],
    ) -> None:
        """`clipped`: the share of each hazard that its bound left over, when the round began."""
        ages, weight = range(NUM_AGES), self.shrinkage
        for level in {features[number] for features in self.kinds}:
            of_level = [kind for kind, features in enumerate(self.kinds) if features[number] == level]
            seen = [sum(uses[kind][age] for kind in of_level) for age in ages]
            due = [0.0] * NUM_AGES
            for age in ages:
                for kind in of_level:
                    hazard = self.base[age] * self.product(kind, age) * clipped[kind][age]
                    due[age] += at_risk_s[kind][age] * hazard / self.factors.get((number, level, age), 1.0)
            height = (sum(seen) + weight) / (sum(due) + weight)
            for age in ages:
                seen_near = sum(seen[other] * _NEAR[other, age] for other in ages)
                due_near = sum(due[other] * _NEAR[other, age] for other in ages)
                shape = (seen_near + 2 * weight) / (due_near * height + 2 * weight)
                self.factors[number, level, age] = height * shape


observed = st.tuples(
    st.tuples(st.integers(0, 2), st.integers(0, 1)), st.floats(0.0, 4.0).map(lambda x: 10.0**x), st.booleans()
)
"""Features, seconds watched, and whether it was used then."""


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(observed, min_size=1, max_size=30), min_size=1, max_size=FIRST_FITS + 2))
def test_fits_are_those_of_the_plain_sums(
    batches: list[list[tuple[tuple[int, int], float, bool]]],
) -> None:
    """One after the other; each starts from the factors of the one before, and counts fade in between."""
    fast = ReuseModel(2, half_life=100.0)
    kinds = sorted({features for batch in batches for features, _, _ in batch})
    rows = [fast.kind(features) for features in kinds]
    slow = SlowModel(kinds)
    uses, seconds = ([[0.0] * NUM_AGES for _ in kinds] for _ in range(2))
    for number, batch in enumerate(batches):
        for features, watched_s, used in batch:
            kind = kinds.index(features)
            fast.at_risk(rows[kind], 0.0, watched_s)
            for age, (begin_s, end_s) in enumerate(BINS_S):
                seconds[kind][age] += max(0.0, min(watched_s, end_s) - begin_s)
            if used:
                fast.used(rows[kind], watched_s)
                uses[kind][age_bin(watched_s)] += 1.0
        fast.fit(len(batch))
        slow.fit(uses, seconds, FIRST_ROUNDS if number < FIRST_FITS else 1)
        for kind in range(len(kinds)):
            mine = fast._hazards(fast._products(slice(kind, kind + 1)))[0]
            assert mine == pytest.approx([slow.hazard(kind, age) for age in range(NUM_AGES)], rel=1e-6)
        fade = 0.5 ** (len(batch) / 100.0)
        uses, seconds = ([[fade * x for x in row] for row in counts] for counts in (uses, seconds))


# -- the order


@dataclass(eq=False)
class Worth:
    """What the queue reads of a record."""

    kind: int
    used_s: float


class ValueQueueMachine(RuleBasedStateMachine):
    """Against all extents looked at each time. Where all came when they were born and all that is due was
    swept, the order is exact; of equal values any may come."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.next_key = ValueQueue(), 0
        self.runs: dict[int, tuple[Worth, SimpleExtent]] = {}
        self.values = [[float((7 * kind + 5 * age) % 31 + 1) for age in range(NUM_AGES)] for kind in range(3)]
        self.queue.renew(self.values)
        self.is_exact = True

    def value(self, worth: Worth) -> float:
        return self.values[worth.kind][age_bin(self.queue.now_s - worth.used_s)]

    @rule(kind=st.integers(0, 2), size=st.integers(1, 4))
    def comes(self, kind: int, size: int, age_s: float = 0.0) -> None:
        worth, run = Worth(kind, self.queue.now_s - age_s), SimpleExtent(self.next_key, size)
        self.next_key += 1
        self.runs[run.key] = (worth, run)
        self.queue.push(worth, run, size)

    @rule(kind=st.integers(0, 2), age_s=st.sampled_from([0.5, 3.0, 700.0]))
    def comes_late(self, kind: int, age_s: float) -> None:
        """Its row may look at it only when the one that stood at its head would have moved on."""
        self.is_exact = False
        self.comes(kind, 1, age_s)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.runs)))
        worth, run = self.runs.pop(key)
        entry = self.queue.take(key, run.num_blocks)
        assert (entry.rank, entry.extent) == (worth, run)

    @rule(seconds=st.sampled_from([0.4, 2.0, 60.0, 5_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.queue.now_s += seconds

    @rule(seed=st.integers(0, 100))
    def values_change(self, seed: int) -> None:
        self.values = [
            [float((seed * (7 * kind + 5 * age)) % 29 + 1) for age in range(NUM_AGES)] for kind in range(3)
        ]
        self.queue.renew(self.values)

    @rule(count=st.integers(0, 3))
    def some_are_swept(self, count: int) -> None:
        self.queue.sweep(count)

    @precondition(lambda self: self.runs)
    @rule(is_chosen=st.booleans())
    def the_first_is_worth_least(self, is_chosen: bool) -> None:
        self.queue.sweep(1_000)
        entry = self.queue.first()
        worth, run = self.runs[entry.extent.key]
        assert entry.extent is run
        assert self.value(worth) == self.queue.least
        if self.is_exact:
            assert self.queue.least == min(self.value(worth) for worth, _ in self.runs.values())
        if is_chosen:
            self.queue.drop_first(entry)
            del self.runs[run.key]
            self.is_exact = self.is_exact or not self.runs

    @invariant()
    def books_balance(self) -> None:
        self.queue.check()
        assert self.queue.live.keys() == self.runs.keys()


TestValueQueue = ValueQueueMachine.TestCase
TestValueQueue.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
