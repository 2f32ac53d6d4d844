"""Replays a trace at policies x capacities x seeds, in parallel processes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.benchmarks.replay.optimum import optimum
from sagellm.benchmarks.replay.replayer import (
    HitMeasures,
    Replayed,
    check_bound,
    first_counted,
    measure,
    replay,
)
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError, CapacityError, ConfigError
from sagellm.core.events import EventBus
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.prefix_cache import MissCounts, PrefixReuseIndex
from sagellm.core.registry import registry
from sagellm.engines.build_kv import make_policy
from sagellm.kvmgr.eviction.cost_model import PrefillCostModel
from sagellm.kvmgr.prefix_cache.attribution import MissAttribution

OPTIMUM = "optimum"
"""Stands for the offline bound wherever a policy's name is expected."""
GIVEN = ("capacity", "clock", "seed")
"""Options that replay itself sets if the policy has them."""
DEFAULT_COST = PrefillCostModel()
CAPACITIES = ("0.5%", "1%", "2%", "5%", "10%", "25%")
NUM_MOMENTS = 48
"""Number of equal intervals of the trace's time for which misses are summed."""


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """A capacity as the user wrote it, and in blocks."""

    text: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """One replay. `seed` is None for a policy without a seed, which runs once."""

    policy: str
    capacity: CacheCapacity
    seed: int | None


@dataclass(frozen=True, slots=True)
class ReplaySweepPlan:
    """What to replay. `capacities` are counts of blocks, or shares of the trace's unique blocks as `1%`.
    `options` are by policy. `causes`: report why blocks were missing; it takes longer than the replay, so
    no speed is reported. See `PrefillCostModel` for `seconds_per_token` and `seconds_per_token_squared`."""

    policies: tuple[str, ...]
    capacities: tuple[str, ...] = CAPACITIES
    seeds: tuple[int, ...] = (0,)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    warmup: str = "0%"
    causes: bool = False
    premature_s: float = 60.0
    seconds_per_token: float = DEFAULT_COST.seconds_per_token
    seconds_per_token_squared: float = DEFAULT_COST.seconds_per_token_squared

    def cost(self, block_tokens: int = 1) -> PrefillCostModel:
        """Seconds of prefill for extents of blocks of that size."""
        return PrefillCostModel(
            block_size=block_tokens,
            seconds_per_token=self.seconds_per_token,
            seconds_per_token_squared=self.seconds_per_token_squared,
        )

    def cases(self, trace: BlockTrace) -> list[ReplayCase]:
        """Returns all replays in order of policy, capacity and seed. Raises the error of any unknown name
        or value out of range."""
        self._check(trace)
        capacities = [capacity(text, trace.num_unique) for text in self.capacities]
        return [
            ReplayCase(policy, size, seed)
            for policy in dict.fromkeys(self.policies)
            for size in dict.fromkeys(capacities)
            for seed in (dict.fromkeys(self.seeds) if "seed" in _options_of(policy) else (None,))
        ]

    def _check(self, trace: BlockTrace) -> None:
        if not (self.policies and self.capacities and self.seeds):
            raise ConfigError("a sweep needs at least one policy, one capacity and one seed")
        self.cost()
        first_counted(trace, self.warmup)
        if not (self.premature_s >= 0 and math.isfinite(self.premature_s)):
            raise ConfigError(f"premature_s must be 0 or more seconds, got {self.premature_s}")
        for policy in self.options:
            if policy not in self.policies:
                raise ConfigError(f"options are given for {policy!r}, but the sweep runs {self.policies}")
        for policy in self.policies:
            named = [name for name in _options_of(policy) if name not in GIVEN]
            for option in self.options.get(policy, {}):
                if option in GIVEN:
                    raise ConfigError(f"option {policy}.{option}: replay itself gives it to the policy")
                if option not in named:
                    raise ConfigError(
                        f"policy {policy!r} has no option {option!r}; it takes {', '.join(named) or 'none'}"
                    )


def _options_of(policy: str) -> Collection[str]:
    return registry("policy").options(policy) if policy != OPTIMUM else ()


def capacity(text: str, num_unique: int) -> CacheCapacity:
    """Parses `1%` of the unique blocks, rounded, or a count of blocks. At least one block. Raises
    `ConfigError` for another text."""
    try:
        size = float(text.removesuffix("%")) if text.endswith("%") else int(text)
        num_blocks = max(1, round(num_unique * size / 100)) if text.endswith("%") else int(size)
    except (ValueError, OverflowError):
        size = num_blocks = 0
    if not size > 0:
        raise ConfigError(f"capacity {text!r}: write blocks from 1 on, or a share of the unique ones as 1%")
    return CacheCapacity(text, num_blocks)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One replay, measured.

    Evicted blocks and CPU times are of the whole replay, the warm-up included. They are None for the optimum,
    which evicts no real blocks; times also if causes were asked for. `of_gap`: the share of the distance from
    LRU's to the optimum's block ratio, if both were run. `misses`: missing blocks after the warm-up by cause,
    without those by which a prompt exceeds the capacity. `misses_over_time`: the same for the whole replay,
    in each of `NUM_MOMENTS` intervals.
    """

    case: ReplayCase
    measures: HitMeasures
    num_evicted: int | None = None
    cpu_s: float | None = None
    evict_s: float | None = None
    accesses: int = 0
    of_gap: float | None = None
    misses: MissCounts | None = None
    misses_over_time: tuple[MissCounts, ...] = ()

    @property
    def block_ratio(self) -> float:
        return _ratio(self.measures.hit_blocks, self.measures.blocks)

    @property
    def token_ratio(self) -> float:
        return _ratio(self.measures.hit_tokens, self.measures.tokens)

    @property
    def request_ratio(self) -> float:
        return _ratio(self.measures.hit_requests, self.measures.requests)

    @property
    def saved_ratio(self) -> float:
        """Seconds of prefill saved by hits, over those that all prompts would take."""
        return _ratio(self.measures.saved_s, self.measures.prefill_s)

    @property
    def us_per_evicted(self) -> float | None:
        """CPU time in µs of the whole replay, look-ups included, per evicted block."""
        return self._us_per_evicted(self.cpu_s)

    @property
    def us_in_evict(self) -> float | None:
        """CPU time in µs inside the index's `evict`, per evicted block."""
        return self._us_per_evicted(self.evict_s)

    def _us_per_evicted(self, seconds: float | None) -> float | None:
        return None if seconds is None or not self.num_evicted else 1e6 * seconds / self.num_evicted

    @property
    def accesses_per_s(self) -> float | None:
        """Prompt blocks per second of CPU time."""
        return self.accesses / self.cpu_s if self.cpu_s else None


def run_sweep(
    trace: BlockTrace, plan: ReplaySweepPlan, *, jobs: int = 1, on_done: Callable[[], None] = lambda: None
) -> list[ReplayResult]:
    """Returns the results in the order of `plan.cases(trace)`; calls `on_done` after each. With more than
    one job, replays run in child processes, each of which gets the trace once. Raises `CapacityError` if a
    child process dies."""
    cases, run = plan.cases(trace), partial(run_case, trace, plan)
    jobs = min(jobs, len(cases))
    if jobs <= 1:
        return with_gaps(_collected(map(run, cases), on_done))
    with ProcessPoolExecutor(jobs, get_context("spawn"), _set_run, (run,)) as pool:
        try:
            return with_gaps(_collected(pool.map(_run_in_pool, cases), on_done))
        except BrokenProcessPool as error:
            raise CapacityError("a process of the sweep died, maybe of memory: try fewer jobs") from error


def _collected(results: Iterable[ReplayResult], on_done: Callable[[], None]) -> list[ReplayResult]:
    collected = []
    for result in results:
        collected.append(result)
        on_done()
    return collected


# Each process of the pool gets the trace once; functions that the pool calls can only find it in a global.
_runs: list[Callable[[ReplayCase], ReplayResult]] = []


def _set_run(run: Callable[[ReplayCase], ReplayResult]) -> None:
    _runs.append(run)


def _run_in_pool(case: ReplayCase) -> ReplayResult:
    return _runs[-1](case)


def with_gaps(results: Sequence[ReplayResult]) -> list[ReplayResult]:
    """Sets `of_gap`: the place between LRU and the optimum of the same capacity."""
    ends = {(result.case.policy, result.case.capacity): result.block_ratio for result in results}
    placed = []
    for result in results:
        low, high = (ends.get((name, result.case.capacity)) for name in ("lru", OPTIMUM))
        if low is not None and high is not None and high > low:
            result = replace(result, of_gap=(result.block_ratio - low) / (high - low))
        placed.append(result)
    return placed


def run_case(trace: BlockTrace, plan: ReplaySweepPlan, case: ReplayCase) -> ReplayResult:
    """Replays one case; checks the hits and the causes. `of_gap` needs other cases and stays None."""
    capacity, first = case.capacity.num_blocks, first_counted(trace, plan.warmup)
    bound = trace.bound_at(capacity)
    if case.policy == OPTIMUM:
        hits = optimum(trace.requests, capacity)
        check_bound(hits, bound)
        return ReplayResult(case, measure(trace, hits, first, plan.cost()))
    replayed = _replay(trace, plan, case)
    check_bound(replayed.hits, bound)
    result = ReplayResult(case, measure(trace, replayed.hits, first, plan.cost()), replayed.num_evicted)
    if not plan.causes:
        return replace(result, cpu_s=replayed.cpu_s, evict_s=replayed.evict_s, accesses=trace.num_blocks)
    _check_causes(trace, replayed, bound, capacity)
    over_time = _misses_over_time(trace, replayed)
    return replace(result, misses=total(replayed.misses[first:]), misses_over_time=over_time)


def _replay(trace: BlockTrace, plan: ReplaySweepPlan, case: ReplayCase) -> Replayed:
    clock, events, causes = ManualClock(trace.requests[0].time_s), EventBus(), None
    if plan.causes:
        causes = MissAttribution(
            events,
            clock,
            premature_s=plan.premature_s,
            max_ghosts=None,
            across_namespaces=trace.across_namespaces,
        )
    capacity, options = case.capacity.num_blocks, dict(plan.options.get(case.policy, {}))
    if "model" in _options_of(case.policy):
        options.setdefault("model", plan.cost(trace.block_tokens))

    def policy() -> EvictionPolicy:
        return make_policy(case.policy, capacity=capacity, clock=clock, seed=case.seed or 0, **options)

    index: PrefixReuseIndex = registry("index").create(
        "radix", block_size=1, policy_factory=policy, events=events, clock=clock
    )
    return replay(trace.requests, index, clock, capacity, causes)


def _check_causes(trace: BlockTrace, replayed: Replayed, bound: Sequence[int], capacity: int) -> None:
    """Checks that every missing block has a cause and no known block is cold."""
    for number, (request, misses) in enumerate(zip(trace.requests, replayed.misses, strict=True)):
        hit = replayed.hits[number]
        missing, known = min(len(request.ids), capacity) - hit, bound[number] - hit
        if sum(misses) != missing or missing - misses.cold - misses.namespace != known:
            raise BookkeepingError(
                f"request {number} misses {missing} blocks, {known} of which were computed before; "
                f"their causes are {misses}"
            )


def _misses_over_time(trace: BlockTrace, replayed: Replayed) -> tuple[MissCounts, ...]:
    """Sums the misses of each interval of the trace's time."""
    times = [request.time_s for request in trace.requests]
    span_s = times[-1] - times[0]
    borders = [times[0] + part * span_s / NUM_MOMENTS for part in range(NUM_MOMENTS)]
    intervals: list[list[MissCounts]] = [[] for _ in borders]
    for time_s, misses in zip(times, replayed.misses, strict=True):
        intervals[bisect_right(borders, time_s) - 1].append(misses)
    return tuple(map(total, intervals))


def total(counts: Sequence[MissCounts]) -> MissCounts:
    """Sums each cause."""
    return MissCounts(*map(sum, zip(*counts, strict=True))) if counts else MissCounts()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
