"""Evaluates predictors of block reuse on a trace, as a cache uses them.

Every use of a block is one case. The predictor is asked at the use, and once more after a time drawn
log-uniformly if the block is still unused then: that is when an eviction policy asks. It learns an outcome
only when it has happened: a reuse at the next use, and a rest in several reports while the rest goes on, each
as long as all before it.
"""

from __future__ import annotations

import heapq
import random
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

from sagellm.benchmarks.lifetime.score import ReuseScore, score_reuse
from sagellm.benchmarks.lifetime.workloads import Part, ReuseTrace, part_at
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.lifetime import ReuseFeatures, ReusePrediction, ReusePredictor
from sagellm.kvmgr.lifetime.reuse.reuse_table import ReuseTable

MAX_USES = 400_000
"""Of a longer trace, only a share of the blocks is evaluated, drawn by hash."""
MAX_HORIZON_S = 1800.0
TIMED_EVERY = 64
FIRST_REPORT_S = 2.0
NO_FEATURES = ReuseFeatures(1, 0, 0, 0)
MOMENTS = ("at use", "at rest")

Block = tuple[object, int]


@dataclass(frozen=True, slots=True)
class ReuseRow:
    """One predictor at one moment of one workload. `share_below`: the share of reused blocks that were
    reused within each quantile's time. `*_us` is the median of single calls minus the clock's cost;
    `*_mean_us` includes amortised work and other load of the machine."""

    workload: str
    moment: str
    predictor: str
    score: ReuseScore
    share_below: dict[float, float]
    predict_us: float
    update_us: float
    predict_mean_us: float
    update_mean_us: float


@dataclass(slots=True)
class _Use:
    """The last use of a sampled block. `reported_s` is the part of the rest that is reported."""

    features: ReuseFeatures
    time_s: float
    next_s: float | None
    reported_s: float = 0.0

    def reused(self, horizon_s: float) -> bool:
        return self.next_s is not None and self.next_s - self.time_s < horizon_s


class _Event(NamedTuple):
    """A planned prediction (`rest_s` 0), or a planned report of `rest_s` seconds of rest. Events sort by
    time; no two have the same number."""

    time_s: float
    number: int
    block: Block
    use: _Use
    rest_s: float

    @property
    def is_prediction(self) -> bool:
        return self.rest_s == 0


@dataclass(slots=True)
class _Cases:
    predicted: list[float] = field(default_factory=list)
    happened: list[bool] = field(default_factory=list)
    below: dict[float, int] = field(default_factory=dict)
    num_reused: int = 0

    def add(self, prediction: ReusePrediction, use: _Use, now_s: float, *, reused: bool) -> None:
        self.predicted.append(prediction.probability)
        self.happened.append(reused)
        if reused and use.next_s is not None:
            self.num_reused += 1
            for level, seconds in prediction.quantiles.items():
                self.below[level] = self.below.get(level, 0) + (use.next_s - now_s <= seconds)


def horizon_of(trace: ReuseTrace) -> float:
    """Returns a third of the trace's time, at most 30 minutes. So the outcomes in the other two thirds are
    known to the end."""
    requests = trace.trace.requests
    return min(MAX_HORIZON_S, (requests[-1].time_s - requests[0].time_s) / 3)


class ReuseStream:
    """Feeds a trace to one predictor. Only requests count whose outcomes are known to the end. The first
    60 % of them are for training, the next 20 % for validation, the rest for test."""

    def __init__(self, predictor: ReusePredictor, trace: ReuseTrace, part: Part, seed: int = 0) -> None:
        self._predictor, self._trace, self._part = predictor, trace, part
        self._random = random.Random(seed)
        times = [request.time_s for request in trace.trace.requests]
        self._end_s = times[-1] - predictor.horizon_s
        self._times = [time_s for time_s in times if time_s <= self._end_s]
        self._uses: dict[Block, _Use] = {}
        self._counts: dict[Block, int] = {}
        self._events: list[_Event] = []
        self._num_events = 0
        self._calls = 0
        self.cases = {moment: _Cases() for moment in MOMENTS}
        self.predict_s: list[float] = []
        self.update_s: list[float] = []

    def run(self) -> ReuseStream:
        requests, turns = self._trace.trace.requests, self._trace.turns
        upcoming = _next_uses(self._trace)
        for request, turn in zip(requests, turns, strict=True):
            now_s = request.time_s
            self._run_events(now_s)
            ids = request.ids
            for position, block, next_s in next(upcoming):
                key = request.namespace, block
                use = _Use(self._observe_use(key, now_s, turn, position, len(ids)), now_s, next_s)
                self._uses[key] = use
                self._predict("at use", use, now_s)
                # One prediction at rest, after a time drawn log-uniformly from 1 s to the horizon.
                self._push(now_s + self._predictor.horizon_s ** self._random.random(), key, use)
                self._plan_report(key, use, FIRST_REPORT_S)
        return self

    def _observe_use(
        self, block: Block, now_s: float, turn: int, position: int, num_blocks: int
    ) -> ReuseFeatures:
        """Reports the outcome of the block's last use. Returns the features of this use."""
        last = self._uses.get(block)
        self._counts[block] = count = self._counts.get(block, 0) + 1
        if last is None:
            return ReuseFeatures(count, turn, position, num_blocks)
        gap_s = now_s - last.time_s
        if gap_s < self._predictor.horizon_s:
            self._update(last, gap_s, reused=True)
        return ReuseFeatures(count, turn, position, num_blocks, gap_s)

    def _run_events(self, now_s: float) -> None:
        """Runs the predictions at rest and the reports that are due before `now_s`."""
        while self._events and self._events[0].time_s < now_s:
            event = heapq.heappop(self._events)
            if self._uses.get(event.block) is not event.use:
                continue  # used again since
            if event.is_prediction:
                self._predict("at rest", event.use, event.time_s)
            else:
                self._update(event.use, event.rest_s, reused=False)
                self._plan_report(event.block, event.use, 2 * event.rest_s)

    def _plan_report(self, block: Block, use: _Use, rest_s: float) -> None:
        """Plans to report the rest when it reaches `rest_s`, at most the horizon."""
        rest_s = min(rest_s, self._predictor.horizon_s)
        if rest_s > use.reported_s:
            self._push(use.time_s + rest_s, block, use, rest_s)

    def _push(self, time_s: float, block: Block, use: _Use, rest_s: float = 0.0) -> None:
        self._num_events += 1
        heapq.heappush(self._events, _Event(time_s, self._num_events, block, use, rest_s))

    def _predict(self, moment: str, use: _Use, now_s: float) -> None:
        place = (bisect_right(self._times, now_s) - 0.5) / max(1, len(self._times))
        if now_s > self._end_s or part_at(place) != self._part:
            return
        self._calls += 1
        begun = time.perf_counter()
        prediction = self._predictor.predict(use.features, now_s - use.time_s)
        if self._calls % TIMED_EVERY == 0:
            self.predict_s.append(time.perf_counter() - begun)
        self.cases[moment].add(prediction, use, now_s, reused=use.reused(self._predictor.horizon_s))

    def _update(self, use: _Use, seconds: float, *, reused: bool) -> None:
        self._calls += 1
        begun = time.perf_counter()
        self._predictor.update(use.features, seconds, reused=reused, since_s=use.reported_s)
        if self._calls % TIMED_EVERY == 0:
            self.update_s.append(time.perf_counter() - begun)
        use.reported_s = seconds


class AgeAlone:
    """Predicts from the time since the last use only: a calibrated form of recency."""

    def __init__(self, horizon_s: float) -> None:
        self._table = ReuseTable(horizon_s)
        self.horizon_s = horizon_s

    def predict(self, features: ReuseFeatures, age_s: float = 0.0) -> ReusePrediction:
        return self._table.predict(NO_FEATURES, age_s)

    def update(self, features: ReuseFeatures, seconds: float, *, reused: bool, since_s: float = 0.0) -> None:
        self._table.update(NO_FEATURES, seconds, reused=reused, since_s=since_s)


def evaluate_reuse(
    trace: ReuseTrace,
    predictors: dict[str, Callable[[float], ReusePredictor]],
    part: Part = "test",
    on_row: Callable[[str], None] = lambda name: None,
) -> list[ReuseRow]:
    """Scores the baseline and the predictors, each made for the trace's horizon. Raises `ConfigError` if
    the trace is too short for an outcome in the part."""
    rows = []
    baselines: dict[str, Callable[[float], ReusePredictor]] = {"age alone": AgeAlone}
    for name, make in {**baselines, **predictors}.items():
        on_row(f"{trace.name}: {name}")
        stream = ReuseStream(make(horizon_of(trace)), trace, part).run()
        clock_s = median(-time.perf_counter() + time.perf_counter() for _ in range(1000))
        times_us = [
            1e6 * max(0.0, average(times or [0.0]) - clock_s)
            for average in (median, fmean)
            for times in (stream.predict_s, stream.update_s)
        ]
        for moment, cases in stream.cases.items():
            if not cases.happened:
                raise ConfigError(f"trace {trace.name} is too short: its {part} part has no block {moment}")
            score = score_reuse(cases.predicted, cases.happened)
            below = {level: count / max(1, cases.num_reused) for level, count in sorted(cases.below.items())}
            rows.append(ReuseRow(trace.name, moment, name, score, below, *times_us))
    return rows


def _next_uses(trace: ReuseTrace) -> Iterator[list[tuple[int, int, float | None]]]:
    """Yields the sampled blocks of each request: position, id, time of the next use."""
    requests = trace.trace.requests
    watched = _sampled_blocks(trace)
    upcoming: dict[Block, float] = {}
    uses: list[list[tuple[int, int, float | None]]] = []
    for request in reversed(requests):
        found = []
        for position, block in enumerate(request.ids):
            key = request.namespace, block
            if key in watched:
                found.append((position, block, upcoming.get(key)))
                upcoming[key] = request.time_s
        uses.append(found)
    return reversed(uses)


def _sampled_blocks(trace: ReuseTrace) -> set[Block]:
    """Returns all blocks; of a longer trace those whose checksum is small enough."""
    requests = trace.trace.requests
    blocks = {(request.namespace, block) for request in requests for block in request.ids}
    limit = 2**32 * MAX_USES / max(1, sum(len(request.ids) for request in requests))
    return {block for block in blocks if zlib.crc32(repr(block).encode()) < limit}
