"""Figures of several instances as those of one engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any

from sagellm.core.kv_hints import HintOutcome, HintStatus
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats, SpeculationCounts
from sagellm.core.protocols.kv_tiers import TierState
from sagellm.core.protocols.prefix_cache import MissCounts, PrefixReuseSnapshot, TenantReuse

_BEST_FIRST = (HintStatus.APPLIED, HintStatus.NOT_FOUND, HintStatus.INVALID, HintStatus.UNSUPPORTED)


def summed_stats(
    known: Sequence[EngineStats], num_running: int, num_waiting: int, num_steps: int, faults: tuple[str, ...]
) -> EngineStats:
    """The sums; what runs and waits is given, since the front knows it better."""
    reuse = [each.reuse for each in known if each.reuse is not None]
    misses = [each.misses for each in known if each.misses is not None]
    return EngineStats(
        num_running,
        num_waiting,
        sum(each.blocks_active for each in known),
        sum(each.blocks_cached for each in known),
        sum(each.blocks_free for each in known),
        sum(each.num_preemptions for each in known),
        num_steps,
        _summed_reuse(reuse) if reuse else None,
        _summed_misses(misses) if misses else None,
        faults,
    )


def _summed_misses(misses: Sequence[MissCounts]) -> MissCounts:
    total = misses[0]
    for each in misses[1:]:
        total = total.plus(each)
    return total


def _summed_reuse(reuse: Sequence[PrefixReuseSnapshot]) -> PrefixReuseSnapshot:
    sums = {
        each.name: sum(getattr(snapshot, each.name) for snapshot in reuse)
        for each in fields(PrefixReuseSnapshot)
        if each.name != "match_buckets"
    }
    ends = reuse[0].match_buckets
    buckets = tuple(
        (end, sum(snapshot.match_buckets[i][1] for snapshot in reuse)) for i, (end, _) in enumerate(ends)
    )
    return PrefixReuseSnapshot(**sums, match_buckets=buckets)


def summed_diagnostics(
    present: Sequence[EngineDiagnostics], gone: Sequence[EngineDiagnostics] = ()
) -> EngineDiagnostics:
    """Counts are added, tiers by name.

    Fragmentation is the mean of instances that are `present`; of others only counters are known.
    """
    known, num_present = [*present, *gone], max(1, len(present))
    spent = [each.communication_s for each in known if each.communication_s is not None]
    return EngineDiagnostics(
        evicted_blocks=_added([each.evicted_blocks for each in known]),
        internal_fragmentation=sum(each.internal_fragmentation for each in present) / num_present,
        external_fragmentation=sum(each.external_fragmentation for each in present) / num_present,
        num_pinned_prefixes=sum(each.num_pinned_prefixes for each in known),
        num_pinned_blocks=sum(each.num_pinned_blocks for each in known),
        pass_time_s=_added([each.pass_time_s for each in known]),
        reuse_by_tenant=_by_tenant([each.reuse_by_tenant for each in known]),
        expert_rows=_rows([each.expert_rows for each in known]),
        speculation=_speculation([each.speculation for each in known]),
        checkpoints=_added([each.checkpoints for each in known]),
        tiers=_tiers([state for each in known for state in each.tiers]),
        num_kv_waits=sum(each.num_kv_waits for each in known),
        num_approximate_tokens=sum(each.num_approximate_tokens for each in known),
        num_dropped_tokens=sum(each.num_dropped_tokens for each in known),
        step_s=sum(each.step_s for each in known),
        communication_s=sum(spent) if spent else None,
    )


def _speculation(known: Sequence[SpeculationCounts]) -> SpeculationCounts:
    proposed = zip_longest(*(each.proposed for each in known), fillvalue=0)
    accepted = zip_longest(*(each.accepted for each in known), fillvalue=0)
    saved_s = sum(each.saved_s for each in known)
    return SpeculationCounts(tuple(map(sum, proposed)), tuple(map(sum, accepted)), saved_s)


def _added(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _by_tenant(known: Sequence[Mapping[str, TenantReuse]]) -> dict[str, TenantReuse]:
    total: dict[str, TenantReuse] = {}
    for each in known:
        for tenant, reuse in each.items():
            former = total.get(tenant)
            total[tenant] = (
                reuse if former is None else type(reuse)(*map(sum, zip(former, reuse, strict=True)))
            )
    return total


def _rows(known: Sequence[Mapping[int, Sequence[int]]]) -> dict[int, Sequence[int]]:
    total: dict[int, Sequence[int]] = {}
    for each in known:
        for layer, rows in each.items():
            former = total.get(layer, [0] * len(rows))
            total[layer] = [before + now for before, now in zip(former, rows, strict=True)]
    return total


def _tiers(states: Sequence[TierState]) -> list[TierState]:
    total: dict[str, TierState] = {}
    for state in states:
        former = total.get(state.tier.name)
        total[state.tier.name] = state if former is None else _tier_sum(former, state)
    return list(total.values())


def _tier_sum(first: TierState, other: TierState) -> TierState:
    sums = {name: getattr(first, name) + getattr(other, name) for name in _TIER_COUNTS}
    misses = _added([first.misses, other.misses])
    return first._replace(**sums, misses=misses, fault=first.fault or other.fault)


_TIER_COUNTS = ("total", "cached", "held", "stored", "loaded", "evicted", "dropped", "refused")


def summed_outcomes(each: Sequence[Sequence[HintOutcome]]) -> list[HintOutcome]:
    """Action by action, the best outcome of any instance, with the blocks of all."""
    merged: list[HintOutcome] = []
    for outcomes in zip(*each, strict=True):
        best = min(outcomes, key=lambda outcome: _BEST_FIRST.index(outcome.status))
        merged.append(replace(best, num_blocks=sum(outcome.num_blocks for outcome in outcomes)))
    return merged
