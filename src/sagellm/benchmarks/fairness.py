"""The fairness experiment: tenants of unequal rates share one cache under a policy.

Jain's index (Jain, Chiu and Hawe 1984) is taken over each tenant's hit ratio divided by its ratio in a cache
that never evicts. A tenant whose prompts no cache could serve does not count as treated unfairly.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any

from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.replayer import check_bound, replay
from sagellm.benchmarks.replay.sweep import CacheCapacity, capacity
from sagellm.benchmarks.reporting import Environment, Table
from sagellm.benchmarks.traces.synth import synthesize
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry
from sagellm.engines.build_kv import make_policy
from sagellm.kvmgr.eviction import jain_index

FORMAT = "sagellm.bench.fairness/1"
KIND = "tenants"
BASELINE = "lru"
POLICIES = (BASELINE, "qos")
CAPACITIES = ("0.5%", "1%", "2%", "5%")
UNFAIR, FAIR, MOST_LOST = 0.7, 0.9, 0.03
"""The target: where the baseline's index is below `UNFAIR`, a policy reaches `FAIR` and loses at most
`MOST_LOST` of the hit ratio of all tenants together."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class TenantHits:
    """Sums over the requests of one tenant. `bound_blocks` are the hits in a cache that never evicts."""

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
        """Share of the possible hits that the tenant had, 0 to 1."""
        return self.hit_blocks / self.bound_blocks

    def as_json(self) -> dict[str, Any]:
        ratios = ("hit_ratio", "infinite_ratio", "normalised")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in ratios}


@dataclass(frozen=True, slots=True)
class FairnessOutcome:
    """One policy at one capacity. `lost` is the baseline's hit ratio minus this one's; `baseline_jain` is
    the baseline's index at this capacity."""

    policy: str
    capacity: CacheCapacity
    tenants: tuple[TenantHits, ...]
    lost: float
    baseline_jain: float

    @property
    def jain(self) -> float:
        return jain_index(tenant.normalised for tenant in self.tenants)

    @property
    def hit_ratio(self) -> float:
        """Hit ratio of all tenants together."""
        hits = sum(tenant.hit_blocks for tenant in self.tenants)
        return hits / sum(tenant.blocks for tenant in self.tenants)

    @property
    def meets_target(self) -> bool | None:
        """Whether the target is met. None for the baseline and where the baseline is fair enough."""
        if self.policy == BASELINE or self.baseline_jain >= UNFAIR:
            return None
        return self.jain >= FAIR and self.lost <= MOST_LOST + ROUNDING


def tenants_trace(seed: int) -> BlockTrace:
    """Generates an hour of three tenants with rates of 8:1:1."""
    return block_trace(synthesize(KIND, seed=seed))


def run(
    trace: BlockTrace,
    policies: Sequence[str] = POLICIES,
    capacities: Sequence[str] = CAPACITIES,
    *,
    on_case: Callable[[str], None] = lambda case: None,
) -> list[FairnessOutcome]:
    """Replays each policy at each capacity from a cold start. The baseline always runs, and first. Before
    anything runs, raises `UnknownNameError` for a policy and `ConfigError` for a capacity that is invalid,
    and `ConfigError` for a tenant that can hit nothing."""
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
            tenants = served(trace, _hits(trace, name, size.num_blocks))
            outcome = FairnessOutcome(name, size, tenants, lost=0.0, baseline_jain=1.0)
            baseline = baseline or outcome
            lost = baseline.hit_ratio - outcome.hit_ratio
            outcomes.append(replace(outcome, lost=lost, baseline_jain=baseline.jain))
    return outcomes


def served(trace: BlockTrace, hits: Sequence[int]) -> tuple[TenantHits, ...]:
    """Sums by tenant, sorted by name. Raises `ConfigError` for a tenant that can hit nothing."""
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for request, hit, bound in zip(trace.requests, hits, trace.bound, strict=True):
        counts = 1, len(request.ids), hit, bound
        sums[request.tenant] = list(map(add, sums[request.tenant], counts))
    tenants = tuple(TenantHits(name, *sums[name]) for name in sorted(sums))
    for tenant in tenants:
        if not tenant.bound_blocks:
            raise ConfigError(
                f"no prompt of {tenant.tenant!r} has a block that was there before: it has no ratio to "
                "divide by; a longer trace would give it one"
            )
    return tenants


def _hits(trace: BlockTrace, policy: str, num_blocks: int) -> Sequence[int]:
    """Returns the hits of each request in one shared cache without quotas."""
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
    """Returns the outcomes as JSON values of form `FORMAT`."""
    return {
        "format": FORMAT,
        "environment": dataclasses.asdict(environment),
        "settings": dict(settings),
        "trace": {"name": trace.name, **trace.counts()},
        "target": {
            "baseline": BASELINE,
            "baseline_jain_below": UNFAIR,
            "jain_from": FAIR,
            "most_lost": MOST_LOST,
        },
        "outcomes": [
            {
                "policy": outcome.policy,
                "capacity": outcome.capacity.text,
                "capacity_blocks": outcome.capacity.num_blocks,
                "jain": outcome.jain,
                "hit_ratio": outcome.hit_ratio,
                "lost": outcome.lost,
                "meets_target": outcome.meets_target,
                "tenants": [tenant.as_json() for tenant in outcome.tenants],
            }
            for outcome in outcomes
        ],
    }


def as_table(outcomes: Sequence[FairnessOutcome], title: str) -> Table:
    """Returns one line per capacity and policy. For each tenant it shows the hit ratio, and the normalised
    ratio in brackets."""
    rows = []
    for outcome in outcomes:
        verdict = {None: "-", True: "met", False: "missed"}[outcome.meets_target]
        tenants = [f"{tenant.hit_ratio:.2%} ({tenant.normalised:.3f})" for tenant in outcome.tenants]
        figures = (f"{outcome.jain:.3f}", f"{outcome.hit_ratio:.2%}", f"{100 * outcome.lost:.2f}", verdict)
        size = outcome.capacity
        rows.append([size.text, outcome.policy, f"{size.num_blocks:,}", *tenants, *figures])
    names = [tenant.tenant for tenant in outcomes[0].tenants]
    columns = ("capacity", "policy", "blocks", *names, "Jain", "hits", "points lost", "target")
    return Table(title, columns, rows, num_names=2)
