"""The figures of one simulation: latencies, goodput, throughput, reuse, utilisation, cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.benchmarks.simulate.cluster import RequestOutcome, ServedRequest
from sagellm.benchmarks.simulate.course import gaps
from sagellm.benchmarks.simulate.instance import Instance
from sagellm.benchmarks.simulate.workload import SimulatedWorkload
from sagellm.core.errors import ConfigError

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


def parse_slo(text: str) -> SLOPair:
    """`1,100`: one second and 100 ms. Raises `ConfigError` for anything else."""
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


@dataclass(frozen=True, slots=True)
class LatencyColumns:
    """Requests that finished, as columns of equal length. `tpot_s` is NaN for an answer of one token."""

    number: NDArray[np.int64]
    arrival_s: Floats
    wait_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    high: NDArray[np.bool_]

    @classmethod
    def of(cls, served: Sequence[ServedRequest], workload: SimulatedWorkload) -> LatencyColumns:
        done = [one for one in served if one.outcome is RequestOutcome.FINISHED]
        number = np.array([one.number for one in done], dtype=np.int64)
        arrival, scheduled, first, finished = (
            np.array([getattr(one, name) for one in done], dtype=np.float64)
            for name in ("arrival_s", "scheduled_s", "first_token_s", "finished_s")
        )
        later = np.array([one.num_output_tokens - 1 for one in done], dtype=np.float64)
        tpot = np.full(len(done), np.nan)
        np.divide(finished - first, later, out=tpot, where=later > 0)
        priorities = np.array(workload.priorities, dtype=np.int64)
        high = priorities[number] > 0
        return cls(number, arrival, scheduled - arrival, first - arrival, tpot, finished - arrival, high)

    def meets(self, slo: SLOPair) -> NDArray[np.bool_]:
        """Who kept both goals; an answer of one token has no second one to keep."""
        quick = np.isnan(self.tpot_s) | (self.tpot_s * 1000 <= slo.tpot_ms)
        return (self.ttft_s <= slo.ttft_s) & quick


def latency_figures(name: str, values: Floats) -> dict[str, float | None]:
    """Mean and percentiles (linear between ranks), None where there is nothing to count."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {f"{name}_{kind}": None for kind in ("mean", *(f"p{one}" for one in PERCENTILES))}
    ranked = np.percentile(known, PERCENTILES)
    percentiles = {f"{name}_p{one}": float(value) for one, value in zip(PERCENTILES, ranked, strict=True)}
    return {f"{name}_mean": float(known.mean()), **percentiles}


def token_gaps(instances: Sequence[Instance], served: Sequence[ServedRequest]) -> Floats:
    """Seconds between the tokens of finished requests, all together."""
    ends = {one.name: np.frombuffer(one.course.ends_s, dtype=np.float64) for one in instances}
    by_name = {one.name: one for one in instances}
    moments, expected = {}, {}
    for one in served:
        if one.outcome is not RequestOutcome.FINISHED:
            continue
        name = str(one.number)
        parts = [
            by_name[at].token_times.of(name, ends[at]) for at in dict.fromkeys((one.prefill, one.decode))
        ]
        moments[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        expected[name] = one.num_output_tokens
    return gaps(moments, expected)


def figures(
    workload: SimulatedWorkload,
    served: Sequence[ServedRequest],
    instances: Sequence[Instance],
    slos: Sequence[SLOPair] = (),
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """Every figure by name, in order; None where there is none. Seconds, tokens, ratios from 0 to 1.
    `price_per_hour` is that of one instance.

    Time runs from the first arrival to the end of the last step, on all instances.
    """
    columns = LatencyColumns.of(served, workload)
    span_s = _span(served, instances)
    made: dict[str, Any] = {f"requests_{one.value.replace(' ', '_')}": 0 for one in RequestOutcome}
    for one in served:
        made[f"requests_{one.outcome.value.replace(' ', '_')}"] += 1
    made["duration_s"] = span_s
    for name in ("ttft_s", "tpot_s", "e2e_s", "wait_s"):
        made |= latency_figures(name, getattr(columns, name))
    made |= latency_figures("itl_s", token_gaps(instances, served))
    made |= latency_figures("ttft_s_high", columns.ttft_s[columns.high])
    for slo in slos:
        met = int(columns.meets(slo).sum())
        made[f"goodput_{slo.name}"] = _per(met, span_s)
        made[f"attained_{slo.name}"] = _per(met, len(served))
    made |= _throughput(workload, served, span_s)
    made |= _work(workload, served, instances, span_s)
    hours = len(instances) * span_s / 3600
    made |= _cost(price_per_hour, hours, made["output_tokens"], made["prompt_tokens"])
    return made


def _span(served: Sequence[ServedRequest], instances: Sequence[Instance]) -> float:
    began = min((one.arrival_s for one in served if one.arrival_s is not None), default=0.0)
    ends = [one.course.ends_s[-1] for one in instances if len(one.course)]
    return max(0.0, max(ends, default=began) - began)


def _throughput(
    workload: SimulatedWorkload, served: Sequence[ServedRequest], span_s: float
) -> dict[str, Any]:
    done = [one for one in served if one.outcome is RequestOutcome.FINISHED]
    prompt = sum(workload.requests[one.number].num_input_tokens for one in done)
    output = sum(one.num_output_tokens for one in done)
    return {
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": _per(len(done), span_s),
        "output_tokens_per_s": _per(output, span_s),
        "total_tokens_per_s": _per(prompt + output, span_s),
    }


def _work(
    workload: SimulatedWorkload, served: Sequence[ServedRequest], instances: Sequence[Instance], span_s: float
) -> dict[str, Any]:
    courses = [one.course for one in instances]
    prefilled = sum(sum(one.prefill_tokens) for one in courses)
    again = sum(one.num_recomputed for one in courses)
    started = [one for one in served if one.scheduled_s is not None]
    asked = sum(workload.requests[one.number].num_input_tokens for one in started)
    computing_s = sum(sum(one.durations_s) for one in courses)
    return {
        "hit_ratio": _per(sum(one.num_cached for one in started), asked),
        "preemptions": sum(sum(one.preemptions.values()) for one in courses),
        "prefill_tokens": prefilled,
        "recomputed_tokens": again,
        "reprefill_ratio": _per(again, prefilled),
        "steps": sum(map(len, courses)),
        "utilisation": _per(computing_s, len(instances) * span_s),
        "batch_efficiency": _efficiency(instances, loaded=False),
        "batch_efficiency_loaded": _efficiency(instances, loaded=True),
    }


def _efficiency(instances: Sequence[Instance], *, loaded: bool) -> float | None:
    """Tokens computed over the budget that the steps had; `loaded`: only steps that left somebody waiting."""
    computed = offered = 0
    for one in instances:
        course = one.course
        tokens = np.frombuffer(course.prefill_tokens, np.int64) + np.frombuffer(
            course.decode_tokens, np.int64
        )
        counted = np.frombuffer(course.waiting, np.int64) > 0 if loaded else np.ones(len(tokens), np.bool_)
        computed += int(tokens[counted].sum())
        offered += int(counted.sum()) * one.engine.max_batched_tokens
    return _per(computed, offered)


def _cost(price: float | None, hours: float, output: int, prompt: int) -> dict[str, float | None]:
    """Price of all device hours per million tokens."""
    total = None if price is None else price * hours
    names = {"cost_per_million_output_tokens": output, "cost_per_million_tokens": output + prompt}
    return {name: None if total is None else _per(total * 1e6, tokens) for name, tokens in names.items()}


def _per(amount: float, of: float) -> float | None:
    return amount / of if of else None
