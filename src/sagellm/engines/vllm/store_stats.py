"""Counts of the store's tiers on the `/metrics` and in the log of vLLM."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from sagellm.core.protocols.kv_tiers import TierState
from sagellm.engines.vllm.stats import unregister_former

COUNTERS = {
    "stored": "Blocks written to a tier.",
    "loaded": "Blocks brought back from a tier.",
    "evicted": "Blocks that a tier gave up.",
    "dropped": "Blocks that were not written, since saves held too many already.",
}
GAUGES = {
    "total_blocks": "Blocks that a tier has room for.",
    "cached_blocks": "Blocks in a tier.",
    "fault": "1 for a tier that has failed.",
}
MISSES = "misses"
PREFIX = "sagellm_kv_tier_"


@dataclass
class StoreStats(KVConnectorStats):  # type: ignore[misc]
    """What tiers did in some steps.

    `data`: by tier the counts of `COUNTERS`, misses by cause, and the last `GAUGES`.
    """

    def reset(self) -> None:
        """Forget the counts."""
        self.data.clear()

    def aggregate(self, other: StoreStats) -> StoreStats:
        """Add the counts of later steps."""
        for tier, later in other.data.items():
            mine = self.data.setdefault(tier, {})
            for name in COUNTERS:
                mine[name] = mine.get(name, 0) + later[name]
            mine[MISSES] = dict(Counts(mine.get(MISSES, {})) + Counts(later[MISSES]))
            mine.update({name: later[name] for name in GAUGES})
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {
            f"{tier} {name}": found[name]
            for tier, found in self.data.items()
            for name in (*COUNTERS, "cached_blocks")
        }

    def is_empty(self) -> bool:
        """Whether nothing has changed."""
        return not self.data


class StoreTally:
    """Splits the growing totals of tiers into the counts of each step."""

    def __init__(self) -> None:
        self._given: dict[str, TierState] = {}

    def take(self, states: Sequence[TierState]) -> StoreStats | None:
        """The counts since the last call; None if nothing has changed."""
        data = {}
        for state in states:
            given = self._given.get(state.tier.value)
            if state != given:
                data[state.tier.value] = _since(state, given)
                self._given[state.tier.value] = state
        return StoreStats(data) if data else None


def _since(state: TierState, given: TierState | None) -> dict[str, Any]:
    before = given or TierState(state.tier, 0, 0, 0, 0, 0, 0, {})
    counts = {name: getattr(state, name) - getattr(before, name) for name in COUNTERS}
    misses = dict(Counts(state.misses) - Counts(before.misses))
    gauges = {"total_blocks": state.total, "cached_blocks": state.cached, "fault": int(bool(state.fault))}
    return {**counts, MISSES: misses, **gauges}


class StoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counts on vLLM's `/metrics`, with its own labels and the tier."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        unregister_former(PREFIX)
        labels = [*labelnames, "tier"]
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        self._counters = {
            name: counter(name=f"{PREFIX}{name}_blocks", documentation=text, labelnames=labels)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: gauge(name=PREFIX + name, documentation=text, labelnames=labels)
            for name, text in GAUGES.items()
        }
        self._misses = counter(
            name=PREFIX + MISSES,
            documentation="Blocks that were there and did not verify, by cause.",
            labelnames=[*labels, "cause"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of a step."""
        for tier, found in transfer_stats_data.items():
            labels = [*self.per_engine_labelvalues[engine_idx], tier]
            for name, counter in self._counters.items():
                counter.labels(*labels).inc(found[name])
            for name, gauge in self._gauges.items():
                gauge.labels(*labels).set(found[name])
            for cause, count in found[MISSES].items():
                self._misses.labels(*labels, cause).inc(count)
