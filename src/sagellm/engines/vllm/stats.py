"""Reused blocks and causes of misses on the `/metrics` of vLLM.

`SageConnector` counts in the scheduler's process; vLLM sends the counts of each step to its server. There
they become three Prometheus counters beside vLLM's own, and a part of its periodic log line.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from sagellm.engines.guests.comparison import Comparison

BLOCKS, REUSED, MISSED = "blocks", "reused", "missed"
"""The keys of the data: blocks of prompts, reused ones by cache, computed ones by cause."""
NAMES = {BLOCKS: "sagellm_prompt_blocks", REUSED: "sagellm_reused_blocks", MISSED: "sagellm_kv_misses"}


@dataclass
class SageStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of some steps, as `data`: `{blocks: n, reused: {cache: n}, missed: {cause: n}}`."""

    def reset(self) -> None:
        """Forget the counts."""
        self.data.clear()

    def aggregate(self, other: SageStats) -> SageStats:
        """Add the counts of another one."""
        mine, theirs = self.data, other.data
        mine[BLOCKS] = mine.get(BLOCKS, 0) + theirs.get(BLOCKS, 0)
        for key in (REUSED, MISSED):
            mine[key] = dict(Counts(mine.get(key, {})) + Counts(theirs.get(key, {})))
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: blocks of prompts, and shares of them in percent."""
        num_blocks = self.data.get(BLOCKS, 0)
        shares = {
            f"{key} {name} %": round(100 * count / num_blocks, 2)
            for key in (REUSED, MISSED)
            for name, count in self.data.get(key, {}).items()
        }
        return {"blocks of prompts": num_blocks, **shares}

    def is_empty(self) -> bool:
        """Whether no prompt came."""
        return not self.data.get(BLOCKS)


class Tally:
    """Splits the growing totals of a comparison into the counts of each step."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._given: Mapping[str, Mapping[str, int]] = self._totals()

    def _totals(self) -> dict[str, dict[str, int]]:
        found = self._comparison
        reused = {name: shadow.reuse.num_hits for name, shadow in found.shadows.items()}
        causes = ("cold", "capacity", "premature")
        return {
            BLOCKS: {BLOCKS: found.reuse.num_blocks},
            REUSED: {"vllm": found.reuse.num_hits, **reused},
            MISSED: {cause: getattr(found.misses, cause) for cause in causes},
        }

    def take(self) -> SageStats | None:
        """The counts since the last call; None if no prompt came."""
        if self._comparison.reuse.num_blocks == self._given[BLOCKS][BLOCKS]:
            return None
        totals, given = self._totals(), self._given
        self._given = totals
        new = {key: {name: count - given[key][name] for name, count in totals[key].items()} for key in totals}
        return SageStats({BLOCKS: new[BLOCKS][BLOCKS], REUSED: new[REUSED], MISSED: new[MISSED]})


class SageMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters on vLLM's `/metrics`, with its own labels and one of ours."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        unregister_former(*NAMES.values())
        made = metric_types[Counter]
        self._blocks = made(
            name=NAMES[BLOCKS], documentation="Whole KV blocks of prompts.", labelnames=labelnames
        )
        self._reused = made(
            name=NAMES[REUSED],
            documentation="Blocks of prompts that vLLM reused, or that a cache of its size would have.",
            labelnames=[*labelnames, "cache"],
        )
        self._missed = made(
            name=NAMES[MISSED],
            documentation="Blocks of prompts that were computed, by cause, in the order in force.",
            labelnames=[*labelnames, "cause"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of a step."""
        labels = self.per_engine_labelvalues[engine_idx]
        self._blocks.labels(*labels).inc(transfer_stats_data.get(BLOCKS, 0))
        for counter, key in ((self._reused, REUSED), (self._missed, MISSED)):
            for name, count in transfer_stats_data.get(key, {}).items():
                counter.labels(*labels, name).inc(count)


def unregister_former(*prefixes: str) -> None:
    """Remove metrics of a former engine of this process, by their prefixes.

    vLLM does the same with its own counters, since Prometheus refuses a name that is registered already.
    """
    for collector in list(getattr(REGISTRY, "_collector_to_names", ())):
        if getattr(collector, "_name", "").startswith(prefixes):
            REGISTRY.unregister(collector)
