"""Replays a trace at policies x capacities x seeds, in parallel processes."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

from sagellm.benchmarks.replay.block_trace import BlockTrace
from sagellm.benchmarks.replay.measures import HitMeasures, check_bound, first_counted, measure
from sagellm.benchmarks.replay.optimum import optimum
from sagellm.benchmarks.replay.replayer import Replayed, replay
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError, CapacityError, ConfigError
from sagellm.core.events import EventBus
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.prefix_cache import MissCounts, PrefixReuseIndex
from sagellm.core.registry import registry
from sagellm.engines.build import make_policy
from sagellm.kvmgr.eviction._cost import PrefillCostModel
from sagellm.kvmgr.prefix_cache.attribution import MissAttribution

OPTIMUM = "optimum"
"""The offline bound, where a policy's name is asked for: it knows the future."""
GIVEN = ("capacity", "clock", "seed")
"""What replay itself gives to a policy that takes it."""
DEFAULT_COST = PrefillCostModel()
CAPACITIES = ("0.5%", "1%", "2%", "5%", "10%", "25%")


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """As it was asked for, and in blocks."""

    text: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ReplayCase:
    """One replay. `seed` is None for a policy that takes none, which runs once."""

    policy: str
    capacity: CacheCapacity
    seed: int | None


@dataclass(frozen=True, slots=True)
class ReplaySweepPlan:
    """`capacities`: counts of blocks, or shares of the trace's unique ones as `1%`. `options`: by policy.
    `causes`: say why blocks were missing, which takes more time than the replay; no speed is reported then.
    `seconds_per_token`, `seconds_per_token_squared`: see `PrefillCostModel`.
    """

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
        """Seconds of prefill for extents of such blocks."""
        return PrefillCostModel(
            block_size=block_tokens,
            seconds_per_token=self.seconds_per_token,
            seconds_per_token_squared=self.seconds_per_token_squared,
        )

    def cases(self, trace: BlockTrace) -> list[ReplayCase]:
        """All replays, in order of policy, capacity and seed. Raises the error of whatever in the plan is
        unknown or out of range, before anything runs."""
        self._check(trace)
        capacities = [capacity(text, trace.num_unique) for text in self.capacities]
        return [
            ReplayCase(policy, size, seed)
            for policy in dict.fromkeys(self.policies)
            for size in dict.fromkeys(capacities)
            for seed in self._seeds(policy)
        ]

    def _seeds(self, policy: str) -> tuple[int | None, ...]:
        takes_seed = policy != OPTIMUM and "seed" in registry("policy").options(policy)
        return tuple(dict.fromkeys(self.seeds)) if takes_seed else (None,)

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
            _check_options(policy, self.options.get(policy, {}))


def _check_options(policy: str, options: Mapping[str, Any]) -> None:
    takes = registry("policy").options(policy) if policy != OPTIMUM else {}
    named = [name for name in takes if name not in GIVEN]
    for option in options:
        if option in GIVEN:
            raise ConfigError(f"option {policy}.{option}: replay itself gives it to the policy")
        if option not in named:
            raise ConfigError(
                f"policy {policy!r} has no option {option!r}; it takes {', '.join(named) or 'none'}"
            )


def capacity(text: str, num_unique: int) -> CacheCapacity:
    """`1%` of the unique blocks, rounded, or a count of blocks; at least one. Raises `ConfigError`."""
    try:
        size = float(text.removesuffix("%")) if text.endswith("%") else int(text)
        num_blocks = max(1, round(num_unique * size / 100)) if text.endswith("%") else int(size)
    except (ValueError, OverflowError):
        size = num_blocks = 0
    if not size > 0:
        raise ConfigError(f"capacity {text!r}: write blocks from 1 on, or a share of the unique ones as 1%")
    return CacheCapacity(text, num_blocks)


NUM_MOMENTS = 48
"""Stretches of equal length into which the trace's time is cut for the course of misses."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One replay, measured.

    Evicted blocks and CPU times are of the whole replay, the warm-up included. All are None for the optimum,
    which evicts nothing that exists; the times also where causes were asked for. `of_gap`: the share of the
    way from LRU's to the optimum's block ratio, where both were run. `misses`: missing blocks after the
    warm-up by cause, without those by which a prompt exceeds the capacity; `course`: the same for the whole
    replay, in each of `NUM_MOMENTS` stretches.
    """

    case: ReplayCase
    measures: HitMeasures
    num_evicted: int | None = None
    cpu_s: float | None = None
    evict_s: float | None = None
    accesses: int = 0
    of_gap: float | None = None
    misses: MissCounts | None = None
    course: tuple[MissCounts, ...] = ()

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
        """Seconds of prefill that hits saved, of those that all prompts would take."""
        return _ratio(self.measures.saved_s, self.measures.prefill_s)

    @property
    def us_per_evicted(self) -> float | None:
        """Microseconds of CPU time of the whole replay per evicted block, look-ups and insertions too."""
        return 1e6 * self.cpu_s / self.num_evicted if self.cpu_s is not None and self.num_evicted else None

    @property
    def us_in_evict(self) -> float | None:
        """Microseconds of CPU time inside the index's `evict` per evicted block."""
        return (
            1e6 * self.evict_s / self.num_evicted if self.evict_s is not None and self.num_evicted else None
        )

    @property
    def accesses_per_s(self) -> float | None:
        """Prompt blocks per second of CPU time."""
        return self.accesses / self.cpu_s if self.cpu_s else None


def run_sweep(
    trace: BlockTrace, plan: ReplaySweepPlan, *, jobs: int = 1, on_done: Callable[[], None] = lambda: None
) -> list[ReplayResult]:
    """The results in the order of `plan.cases(trace)`; `on_done` is called after each. With more than one job
    replays run in processes of their own, each of which is given the trace once."""
    cases, bench = plan.cases(trace), _Bench(trace, plan)
    if min(jobs, len(cases)) <= 1:
        results = []
        for case in cases:
            results.append(bench.run(case))
            on_done()
        return with_gaps(results)
    with ProcessPoolExecutor(
        min(jobs, len(cases)), get_context("spawn"), initializer=_take, initargs=(bench,)
    ) as pool:
        futures = [pool.submit(_run, case) for case in cases]
        try:
            for done in as_completed(futures):
                done.result()
                on_done()
        except BrokenProcessPool as error:
            raise CapacityError("a process of the sweep died, maybe of memory: try fewer jobs") from error
        finally:
            _cancel(futures)
        return with_gaps([future.result() for future in futures])


def _cancel(futures: Sequence[Future[ReplayResult]]) -> None:
    for future in futures:
        future.cancel()


def with_gaps(results: Sequence[ReplayResult]) -> list[ReplayResult]:
    """The results, each with its place between LRU and the optimum of its capacity."""
    ends = {(one.case.policy, one.case.capacity): one.block_ratio for one in results}
    placed = []
    for one in results:
        low, high = (ends.get((name, one.case.capacity)) for name in ("lru", OPTIMUM))
        if low is not None and high is not None and high > low:
            one = replace(one, of_gap=(one.block_ratio - low) / (high - low))
        placed.append(one)
    return placed


class _Bench:
    """A trace and a plan; a process of a sweep has one."""

    def __init__(self, trace: BlockTrace, plan: ReplaySweepPlan) -> None:
        self.trace = trace
        self.plan = plan

    def run(self, case: ReplayCase) -> ReplayResult:
        capacity, trace = case.capacity.num_blocks, self.trace
        first = first_counted(trace, self.plan.warmup)
        if case.policy == OPTIMUM:
            hits = optimum(trace.requests, capacity)
            check_bound(hits, trace.bound_at(capacity))
            return ReplayResult(case, measure(trace, hits, first, self.plan.cost()))
        replayed = self._replay(case)
        check_bound(replayed.hits, trace.bound_at(capacity))
        result = ReplayResult(
            case, measure(trace, replayed.hits, first, self.plan.cost()), replayed.num_evicted
        )
        if self.plan.causes:
            self._check_causes(replayed, capacity)
            return replace(result, misses=total(replayed.misses[first:]), course=self._course(replayed))
        return replace(result, cpu_s=replayed.cpu_s, evict_s=replayed.evict_s, accesses=trace.num_blocks)

    def _replay(self, case: ReplayCase) -> Replayed:
        clock, events = ManualClock(self.trace.requests[0].time_s), EventBus()
        causes = None
        if self.plan.causes:
            causes = MissAttribution(
                events,
                clock,
                premature_s=self.plan.premature_s,
                max_ghosts=None,
                across_namespaces=self.trace.across_namespaces,
            )
        index: PrefixReuseIndex = registry("index").create(
            "radix",
            block_size=1,
            policy_factory=lambda: self._policy(case, clock),
            events=events,
            clock=clock,
        )
        return replay(self.trace.requests, index, clock, case.capacity.num_blocks, causes)

    def _policy(self, case: ReplayCase, clock: ManualClock) -> EvictionPolicy:
        options = dict(self.plan.options.get(case.policy, {}))
        if "model" in registry("policy").options(case.policy):
            options.setdefault("model", self.plan.cost(self.trace.block_tokens))
        return make_policy(
            case.policy, capacity=case.capacity.num_blocks, clock=clock, seed=case.seed or 0, **options
        )

    def _check_causes(self, replayed: Replayed, capacity: int) -> None:
        """What a cache that never evicts would have had is not cold, and every missing block has a cause."""
        bound = self.trace.bound_at(capacity)
        for number, (request, misses) in enumerate(zip(self.trace.requests, replayed.misses, strict=True)):
            hit = replayed.hits[number]
            missing, known = min(len(request.ids), capacity) - hit, bound[number] - hit
            if sum(misses) != missing or missing - misses.cold - misses.namespace != known:
                raise BookkeepingError(
                    f"request {number} misses {missing} blocks, {known} of which were computed before; "
                    f"their causes are {misses}"
                )

    def _course(self, replayed: Replayed) -> tuple[MissCounts, ...]:
        """The sums of each stretch of the trace's time."""
        times = [request.time_s for request in self.trace.requests]
        borders = array(
            "d", [times[0] + part * (times[-1] - times[0]) / NUM_MOMENTS for part in range(NUM_MOMENTS)]
        )
        stretches: list[list[MissCounts]] = [[] for _ in range(NUM_MOMENTS)]
        for time_s, misses in zip(times, replayed.misses, strict=True):
            stretches[bisect_right(borders, time_s) - 1].append(misses)
        return tuple(map(total, stretches))


def total(counts: Sequence[MissCounts]) -> MissCounts:
    """The sum of each cause."""
    return MissCounts(*map(sum, zip(*counts, strict=True))) if counts else MissCounts()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# A process of the pool is handed once what it works on, and what the pool calls then can only find it here.
_benches: list[_Bench] = []


def _take(bench: _Bench) -> None:
    _benches.append(bench)


def _run(case: ReplayCase) -> ReplayResult:
    return _benches[-1].run(case)
