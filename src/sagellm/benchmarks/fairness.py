"""The fairness experiment: tenants of unequal rates share one cache, and a policy divides it.

Jain's index (Jain, Chiu and Hawe 1984) is taken over each tenant's hit ratio divided by its ratio in a cache
that never evicts, so that nobody is called ill served who asks for what no cache could have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.measures import check_bound
from sagellm.benchmarks.replay.replayer import replay
from sagellm.benchmarks.replay.sweep import CacheCapacity, capacity
from sagellm.benchmarks.reporting import Environment, Table
from sagellm.benchmarks.traces.synth import synthesize
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry
from sagellm.engines.build import make_policy
from sagellm.kvmgr.eviction import jain_index

FORMAT = "sagellm.bench.fairness/1"
KIND = "tenants"
BASELINE = "lru"
POLICIES = (BASELINE, "qos")
CAPACITIES = ("0.5%", "1%", "2%", "5%")
UNFAIR, FAIR, MOST_LOST = 0.7, 0.9, 0.03
"""The target: an index from `FAIR` where the baseline's is below `UNFAIR`, for at most that much less of the
hit ratio of all tenants together."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class TenantHits:
    """Sums over the requests of one tenant; `bound_blocks`: hits in a cache that never evicts."""

    tenant: str
    requests: int
    blocks: int
    hit_blocks: int
    bound_blocks: int

    @property
    def hit_ratio(self) -> float:
        return self.hit_blocks / self.blocks

    @property
    def infinite_ratio(self) -> float:
        return self.bound_blocks / self.blocks

    @property
    def normalised(self) -> float:
        """0 to 1: what it found of what could be found."""
        return self.hit_blocks / self.bound_blocks


@dataclass(frozen=True, slots=True)
class FairnessOutcome:
    """One policy at one capacity. `lost`: the baseline's hit ratio less its own; `baseline_jain`: the index
    that the baseline has there."""

    policy: str
    capacity: CacheCapacity
    tenants: tuple[TenantHits, ...]
    lost: float
    baseline_jain: float

    @property
    def jain(self) -> float:
        return jain_index(one.normalised for one in self.tenants)

    @property
    def hit_ratio(self) -> float:
        """Of all tenants together."""
        return sum(one.hit_blocks for one in self.tenants) / sum(one.blocks for one in self.tenants)

    @property
    def meets_target(self) -> bool | None:
        """None where the target says nothing: of the baseline, and where that is fair enough."""
        if self.policy == BASELINE or self.baseline_jain >= UNFAIR:
            return None
        return self.jain >= FAIR and self.lost <= MOST_LOST + ROUNDING


def tenants_trace(seed: int) -> BlockTrace:
    """An hour of three tenants at rates of 8:1:1, as the generator makes it without further words."""
    return block_trace(synthesize(KIND, seed=seed))


def run(
    trace: BlockTrace,
    policies: Sequence[str] = POLICIES,
    capacities: Sequence[str] = CAPACITIES,
    *,
    on_case: Callable[[str], None] = lambda case: None,
) -> list[FairnessOutcome]:
    """Each policy at each capacity, from a cold start; the baseline runs first, asked for or not.

    Raises, before anything runs, the error of whatever is unknown or out of range, and `ConfigError` for a
    tenant that has nothing to find.
    """
    names = dict.fromkeys((BASELINE, *policies))
    for name in names:
        registry("policy").get(name)
    sizes = [capacity(text, trace.num_unique) for text in dict.fromkeys(capacities)]
    if not sizes:
        raise ConfigError("name at least one capacity, in blocks or as a share of the unique ones as 1%")
    served(trace, trace.bound)
    outcomes = []
    for size in sizes:
        baseline: FairnessOutcome | None = None
        for name in names:
            on_case(f"{name} at {size.text}")
            one = FairnessOutcome(name, size, served(trace, _hits(trace, name, size.num_blocks)), 0.0, 1.0)
            baseline = baseline or one
            lost = baseline.hit_ratio - one.hit_ratio
            outcomes.append(replace(one, lost=lost, baseline_jain=baseline.jain))
    return outcomes


def served(trace: BlockTrace, hits: Sequence[int]) -> tuple[TenantHits, ...]:
    """What each tenant found, by name; raises `ConfigError` for one who could find nothing at all."""
    sums: dict[str, TenantHits] = {}
    for request, hit, bound in zip(trace.requests, hits, trace.bound, strict=True):
        so_far = sums.get(request.tenant) or TenantHits(request.tenant, 0, 0, 0, 0)
        sums[request.tenant] = TenantHits(
            request.tenant,
            so_far.requests + 1,
            so_far.blocks + len(request.ids),
            so_far.hit_blocks + hit,
            so_far.bound_blocks + bound,
        )
    for one in sums.values():
        if not one.bound_blocks:
            raise ConfigError(
                f"no prompt of {one.tenant!r} has a block that was there before: it has no ratio to divide "
                "by; a longer trace would give it one"
            )
    return tuple(sums[name] for name in sorted(sums))


def _hits(trace: BlockTrace, policy: str, num_blocks: int) -> Sequence[int]:
    """Hits of each request in one cache that all tenants share; no one has a quota."""
    clock = ManualClock(trace.requests[0].time_s)
    index = registry("index").create(
        "radix",
        block_size=1,
        policy_factory=lambda: make_policy(policy, capacity=num_blocks, clock=clock),
        clock=clock,
    )
    hits = replay(trace.requests, index, clock, num_blocks).hits
    check_bound(hits, trace.bound_at(num_blocks))
    return hits


def as_json(
    outcomes: Sequence[FairnessOutcome],
    trace: BlockTrace,
    environment: Environment,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The outcomes as JSON values; `FORMAT` says which form."""
    return {
        "format": FORMAT,
        "environment": dataclasses.asdict(environment),
        "settings": dict(settings),
        "trace": {
            "name": trace.name,
            "requests": len(trace.requests),
            "blocks": trace.num_blocks,
            "unique_blocks": trace.num_unique,
            "infinite_cache_ratio": trace.infinite_ratio,
        },
        "target": {
            "baseline": BASELINE,
            "baseline_jain_below": UNFAIR,
            "jain_from": FAIR,
            "most_lost": MOST_LOST,
        },
        "outcomes": [_values(one) for one in outcomes],
    }


def _values(one: FairnessOutcome) -> dict[str, Any]:
    return {
        "policy": one.policy,
        "capacity": one.capacity.text,
        "capacity_blocks": one.capacity.num_blocks,
        "jain": one.jain,
        "hit_ratio": one.hit_ratio,
        "lost": one.lost,
        "meets_target": one.meets_target,
        "tenants": [
            dataclasses.asdict(tenant)
            | {
                "hit_ratio": tenant.hit_ratio,
                "infinite_ratio": tenant.infinite_ratio,
                "normalised": tenant.normalised,
            }
            for tenant in one.tenants
        ],
    }


def as_table(outcomes: Sequence[FairnessOutcome], title: str) -> Table:
    """One line per capacity and policy; of each tenant the hit ratio, and in brackets the normalised one."""
    tenants = [one.tenant for one in outcomes[0].tenants]
    columns = ("capacity", "policy", "blocks", *tenants, "Jain", "hits", "points lost", "target")
    return Table(title, columns, [*map(_line, outcomes)], num_names=2)


def _line(one: FairnessOutcome) -> list[str]:
    verdict = {None: "-", True: "met", False: "missed"}[one.meets_target]
    tenants = [f"{tenant.hit_ratio:.2%} ({tenant.normalised:.3f})" for tenant in one.tenants]
    figures = (f"{one.jain:.3f}", f"{one.hit_ratio:.2%}", f"{100 * one.lost:.2f}", verdict)
    return [one.capacity.text, one.policy, f"{one.capacity.num_blocks:,}", *tenants, *figures]
