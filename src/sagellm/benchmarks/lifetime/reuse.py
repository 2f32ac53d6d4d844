"""Predict block reuse over a trace as a cache would: asked when blocks are used and while they rest.

Every use of a block is one case. It is asked about at once, and once more after a time drawn log-uniformly,
if it still rests then, for that is when an eviction policy asks. What happened is told when it has happened:
at the next use, and while a block rests, in pieces, for as long as it has rested.
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
from sagellm.kvmgr.lifetime.reuse_table import ReuseTable

MAX_USES = 400_000
"""Of a longer trace, a share of the blocks is watched, drawn by hash."""
MAX_HORIZON_S = 1800.0
TIMED_EVERY = 64
FIRST_PIECE_S = 2.0
NOBODY = ReuseFeatures(1, 0, 0, 0)
MOMENTS = ("at use", "at rest")

Block = tuple[object, int]


@dataclass(frozen=True, slots=True)
class ReuseRow:
    """`share_below`: of the blocks that were used again, how many were within each quantile's time; `*_us`:
    median of single calls, the clock's own cost taken off; `*_mean_us` holds what is amortised, and what else
    the machine did."""

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
    """The last use of a watched block."""

    features: ReuseFeatures
    time_s: float
    next_s: float | None
    told_s: float = 0.0

    def reused(self, horizon_s: float) -> bool:
        return self.next_s is not None and self.next_s - self.time_s < horizon_s


class _Event(NamedTuple):
    """A question, or a rest that has lasted `rest_s`. Events sort by time; no two have one number."""

    time_s: float
    number: int
    block: Block
    use: _Use
    rest_s: float

    @property
    def is_question(self) -> bool:
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
    """A third of the trace, so that two thirds have outcomes that were seen to the end; 30 minutes at
    most."""
    requests = trace.trace.requests
    return min(MAX_HORIZON_S, (requests[-1].time_s - requests[0].time_s) / 3)


class ReuseStream:
    """One predictor's way through a trace. Of the requests whose outcomes are seen to the end, the first 60 %
    are the time for training, the next 20 % for validation, the rest for test."""

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
            self._until(now_s)
            ids = request.ids
            for position, block, next_s in next(upcoming):
                key = request.namespace, block
                use = _Use(self._used(key, now_s, turn, position, len(ids)), now_s, next_s)
                self._uses[key] = use
                self._ask("at use", use, now_s)
                self._await(key, use)
        return self

    def _used(self, block: Block, now_s: float, turn: int, position: int, num_blocks: int) -> ReuseFeatures:
        """Tell what became of the block's last use, and describe this one."""
        last = self._uses.get(block)
        self._counts[block] = count = self._counts.get(block, 0) + 1
        if last is None:
            return ReuseFeatures(count, turn, position, num_blocks)
        gap_s = now_s - last.time_s
        if gap_s < self._predictor.horizon_s:
            self._tell(last, gap_s, reused=True)
        return ReuseFeatures(count, turn, position, num_blocks, gap_s)

    def _until(self, now_s: float) -> None:
        """What comes to pass before that: questions at rest, and pieces of rests that are over."""
        while self._events and self._events[0].time_s < now_s:
            event = heapq.heappop(self._events)
            if self._uses.get(event.block) is not event.use:
                continue  # used again since
            if event.is_question:
                self._ask("at rest", event.use, event.time_s)
            else:
                self._tell(event.use, event.rest_s, reused=False)
                self._plan(event.block, event.use, 2 * event.rest_s)

    def _await(self, block: Block, use: _Use) -> None:
        """One question at rest, after a time drawn log-uniformly from 1 s to the horizon; and the first
        piece."""
        asked_s = use.time_s + self._predictor.horizon_s ** self._random.random()
        self._push(asked_s, block, use)
        self._plan(block, use, FIRST_PIECE_S)

    def _plan(self, block: Block, use: _Use, rest_s: float) -> None:
        """A rest is told in pieces, each as long as all before it, up to the horizon."""
        rest_s = min(rest_s, self._predictor.horizon_s)
        if rest_s > use.told_s:
            self._push(use.time_s + rest_s, block, use, rest_s)

    def _push(self, time_s: float, block: Block, use: _Use, rest_s: float = 0.0) -> None:
        self._num_events += 1
        heapq.heappush(self._events, _Event(time_s, self._num_events, block, use, rest_s))

    def _ask(self, moment: str, use: _Use, now_s: float) -> None:
        place = (bisect_right(self._times, now_s) - 0.5) / max(1, len(self._times))
        if now_s > self._end_s or part_at(place) != self._part:
            return
        self._calls += 1
        begun = time.perf_counter()
        prediction = self._predictor.predict(use.features, now_s - use.time_s)
        if self._calls % TIMED_EVERY == 0:
            self.predict_s.append(time.perf_counter() - begun)
        self.cases[moment].add(prediction, use, now_s, reused=use.reused(self._predictor.horizon_s))

    def _tell(self, use: _Use, seconds: float, *, reused: bool) -> None:
        self._calls += 1
        begun = time.perf_counter()
        self._predictor.update(use.features, seconds, reused=reused, since_s=use.told_s)
        if self._calls % TIMED_EVERY == 0:
            self.update_s.append(time.perf_counter() - begun)
        use.told_s = seconds


class AgeAlone:
    """Hazards by time since the last use, the same for all blocks: what recency knows, calibrated."""

    def __init__(self, horizon_s: float) -> None:
        self._table = ReuseTable(horizon_s)
        self.horizon_s = horizon_s

    def predict(self, features: ReuseFeatures, age_s: float = 0.0) -> ReusePrediction:
        return self._table.predict(NOBODY, age_s)

    def update(self, features: ReuseFeatures, seconds: float, *, reused: bool, since_s: float = 0.0) -> None:
        self._table.update(NOBODY, seconds, reused=reused, since_s=since_s)


def evaluate_reuse(
    trace: ReuseTrace,
    predictors: dict[str, Callable[[float], ReusePredictor]],
    part: Part = "test",
    on_row: Callable[[str], None] = lambda name: None,
) -> list[ReuseRow]:
    """The baselines and the predictors, each made for the trace's horizon; raises `ConfigError` for a trace
    in which nothing of the part can be seen to the end."""
    rows = []
    everyone: dict[str, Callable[[float], ReusePredictor]] = {"age alone": AgeAlone}
    for name, make in {**everyone, **predictors}.items():
        on_row(f"{trace.name}: {name}")
        stream = ReuseStream(make(horizon_of(trace)), trace, part).run()
        for moment, cases in stream.cases.items():
            if not cases.happened:
                raise ConfigError(f"trace {trace.name} is too short: its {part} part has no block {moment}")
            rows.append(_reuse_row(trace.name, moment, name, stream, cases))
    return rows


def _reuse_row(workload: str, moment: str, name: str, stream: ReuseStream, cases: _Cases) -> ReuseRow:
    clock_s = _cost_of_clock()
    return ReuseRow(
        workload,
        moment,
        name,
        score_reuse(cases.predicted, cases.happened),
        {level: count / max(1, cases.num_reused) for level, count in sorted(cases.below.items())},
        *(
            1e6 * max(0.0, average(times or [0.0]) - clock_s)
            for average in (median, fmean)
            for times in (stream.predict_s, stream.update_s)
        ),
    )


def _cost_of_clock() -> float:
    return median(-time.perf_counter() + time.perf_counter() for _ in range(1000))


def _next_uses(trace: ReuseTrace) -> Iterator[list[tuple[int, int, float | None]]]:
    """Of each request, its watched blocks: position, id, and when the block is used next."""
    requests = trace.trace.requests
    watched = _watched(trace)
    upcoming: dict[Block, float] = {}
    out: list[list[tuple[int, int, float | None]]] = []
    for request in reversed(requests):
        found = []
        for position, block in enumerate(request.ids):
            key = request.namespace, block
            if key in watched:
                found.append((position, block, upcoming.get(key)))
                upcoming[key] = request.time_s
        out.append(found)
    return reversed(out)


def _watched(trace: ReuseTrace) -> set[Block]:
    """All blocks, or of a longer trace those whose checksum is small enough."""
    requests = trace.trace.requests
    blocks = {(request.namespace, block) for request in requests for block in request.ids}
    limit = 2**32 * MAX_USES / max(1, sum(len(request.ids) for request in requests))
    return {block for block in blocks if zlib.crc32(repr(block).encode()) < limit}
