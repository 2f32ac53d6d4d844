"""The figures of one simulation: latencies, goodput, throughput, reuse, utilisation, cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.benchmarks.simulate.cluster import RequestOutcome, ServedRequest
from sagellm.benchmarks.simulate.instance import Instance
from sagellm.benchmarks.simulate.workload import SimulatedWorkload
from sagellm.core.blocks import Tier
from sagellm.core.errors import BookkeepingError, ConfigError

Floats = NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class SLOPair:
    """Seconds to the first token, and milliseconds per token after it."""

    ttft_s: float
    tpot_ms: float

    @property
    def name(self) -> str:
        return f"{self.ttft_s:g}s_{self.tpot_ms:g}ms"

    def is_met_by(self, request: ServedRequest) -> bool:
        """Whether a finished request met both. The second does not apply to an answer of one token."""
        assert request.ttft_s is not None
        return request.ttft_s <= self.ttft_s and (request.tpot_s or 0.0) * 1000 <= self.tpot_ms


def parse_slo(text: str) -> SLOPair:
    """Parses `1,100`: one second and 100 ms. Raises `ConfigError` for another text."""
    parts = text.split(",")
    try:
        ttft_s, tpot_ms = map(float, parts)
    except ValueError:
        ttft_s = tpot_ms = float("nan")
    if not (0 < ttft_s < float("inf") and 0 < tpot_ms < float("inf")):
        raise ConfigError(
            f"SLO {text!r}: write seconds to the first token and milliseconds per token after it, "
            "both above 0, as in 1,100"
        )
    return SLOPair(ttft_s, tpot_ms)


def finished(served: Sequence[ServedRequest]) -> list[ServedRequest]:
    """The requests that got all their tokens."""
    return [request for request in served if request.outcome is RequestOutcome.FINISHED]


def latencies(requests: Sequence[ServedRequest], name: str) -> Floats:
    """One latency of each request; NaN where it has none."""
    return np.array([getattr(request, name) for request in requests], dtype=np.float64)


def latency_figures(name: str, values: Floats) -> dict[str, float | None]:
    """Mean and percentiles (linear between ranks), None if there are no values."""
    names = (f"{name}_mean", *(f"{name}_p{percentile}" for percentile in PERCENTILES))
    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys(names)
    found = (known.mean(), *np.percentile(known, PERCENTILES))
    return dict(zip(names, map(float, found), strict=True))


def token_gaps(instances: Sequence[Instance], served: Sequence[ServedRequest]) -> Floats:
    """Seconds from each token of a finished request to its next, of all requests. Raises
    `BookkeepingError` if the steps of a request have another number of tokens than it drew."""
    ends = {instance.name: np.asarray(instance.step_log.ends_s) for instance in instances}
    token_times = {instance.name: instance.token_times for instance in instances}
    gaps = [np.empty(0)]
    for request in finished(served):
        places = dict.fromkeys((request.prefill, request.decode))
        parts = [token_times[place].of(str(request.number), ends[place]) for place in places]
        times = np.concatenate(parts)
        if len(times) != request.num_output_tokens:
            raise BookkeepingError(
                f"request {request.number} drew {request.num_output_tokens} tokens, the steps' plans have "
                f"{len(times)} of them"
            )
        gaps.append(np.diff(times))
    return np.concatenate(gaps)


def figures(
    workload: SimulatedWorkload,
    served: Sequence[ServedRequest],
    instances: Sequence[Instance],
    slos: Sequence[SLOPair] = (),
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """Returns every figure by name, in order; None for a missing figure. Units are seconds, tokens, and
    ratios from 0 to 1. `price_per_hour` is that of one instance. Time runs from the first arrival to the
    end of the last step, on all instances."""
    done = finished(served)
    began_s = min((request.arrival_s for request in served if request.arrival_s is not None), default=0.0)
    ends_s = [instance.step_log.ends_s[-1] for instance in instances if len(instance.step_log)]
    span_s = max(0.0, max(ends_s, default=began_s) - began_s)
    outcomes = Counter(request.outcome for request in served)
    made: dict[str, Any] = {
        f"requests_{outcome.value.replace(' ', '_')}": outcomes[outcome] for outcome in RequestOutcome
    }
    made["duration_s"] = span_s
    for name in ("ttft_s", "tpot_s", "e2e_s", "wait_s"):
        made |= latency_figures(name, latencies(done, name))
    made |= latency_figures("itl_s", token_gaps(instances, served))
    high = [request for request in done if workload.priorities[request.number] > 0]
    made |= latency_figures("ttft_s_high", latencies(high, "ttft_s"))
    for slo in slos:
        met = sum(map(slo.is_met_by, done))
        made[f"goodput_{slo.name}"] = _per(met, span_s)
        made[f"attained_{slo.name}"] = _per(met, len(served))
    prompt = sum(workload.requests[request.number].num_input_tokens for request in done)
    output = sum(request.num_output_tokens for request in done)
    made |= {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": _per(len(done), span_s),
        "output_tokens_per_s": _per(output, span_s),
        "total_tokens_per_s": _per(prompt + output, span_s),
    }
    made |= _work(workload, served, instances, span_s)
    cost = None if price_per_hour is None else price_per_hour * len(instances) * span_s / 3600
    for name, tokens in (("output_tokens", output), ("tokens", output + prompt)):
        made[f"cost_per_million_{name}"] = None if cost is None else _per(cost * 1e6, tokens)
    return made


def _work(
    workload: SimulatedWorkload, served: Sequence[ServedRequest], instances: Sequence[Instance], span_s: float
) -> dict[str, Any]:
    step_logs = [instance.step_log for instance in instances]
    prefilled = sum(sum(log.prefill_tokens) for log in step_logs)
    again = sum(log.num_recomputed for log in step_logs)
    started = [request for request in served if request.scheduled_s is not None]
    asked = sum(workload.requests[request.number].num_input_tokens for request in started)
    computing_s = [sum(log.durations_s) for log in step_logs]
    return {
        "hit_ratio": _per(sum(request.num_cached for request in started), asked),
        "preemptions": sum(sum(log.preemptions.values()) for log in step_logs),
        "prefill_tokens": prefilled,
        "recomputed_tokens": again,
        "reprefill_ratio": _per(again, prefilled),
        "steps": sum(map(len, step_logs)),
        "utilisation": _per(sum(computing_s), len(instances) * span_s),
        "utilisation_min": _per(min(computing_s), span_s),
        "utilisation_max": _per(max(computing_s), span_s),
        "batch_efficiency": _efficiency(instances, loaded=False),
        "batch_efficiency_loaded": _efficiency(instances, loaded=True),
        **_tier_figures(instances),
    }


def _tier_figures(instances: Sequence[Instance]) -> dict[str, int]:
    """Waits of requests for KV, and blocks written to and loaded from each tier."""
    all_found = [instance.engine.diagnostics() for instance in instances]
    made = {"kv_waits": sum(found.num_kv_waits for found in all_found)}
    for tier in (Tier.DRAM, Tier.NVME):
        states = [state for found in all_found for state in found.tiers if state.tier is tier]
        made[f"stored_blocks_{tier}"] = sum(state.stored for state in states)
        made[f"loaded_blocks_{tier}"] = sum(state.loaded for state in states)
    return made


def _efficiency(instances: Sequence[Instance], *, loaded: bool) -> float | None:
    """Tokens computed over the budget of the steps. `loaded`: only steps after which a request was
    waiting."""
    computed = offered = 0
    for instance in instances:
        step_log = instance.step_log
        tokens = step_log.num_tokens()
        counted = np.asarray(step_log.waiting) > 0 if loaded else np.ones(len(tokens), np.bool_)
        computed += int(tokens[counted].sum())
        offered += int(counted.sum()) * instance.engine.max_batched_tokens
    return _per(computed, offered)


def _per(amount: float, of: float) -> float | None:
    return amount / of if of else None
