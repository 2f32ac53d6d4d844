"""Summarizes a trace in figures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from statistics import median

from sagellm.benchmarks.reporting import Table
from sagellm.benchmarks.traces.record import Trace, block_ids, block_size

SHOWN_TENANTS = 8


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Counts of one trace.

    `blocks` are those of all prompts, partial last ones included, of `block_tokens` tokens each.
    `infinite_cache_ratio` is the share of them that a cache which never evicts would find: the leading run of
    a prompt's blocks that earlier prompts had. Both, and `unique_blocks`, are None if the trace has lengths
    only. `tenants`: number of requests of each named tenant.
    """

    name: str
    format: str
    sha256: str
    requests: int
    skipped: int
    span_s: float
    sessions: int
    namespaces: int
    tenants: dict[str, int]
    input_tokens: int
    output_tokens: int
    median_input_tokens: float
    median_output_tokens: float
    longest_input_tokens: int
    block_tokens: int
    blocks: int | None
    unique_blocks: int | None
    infinite_cache_ratio: float | None


@dataclass(frozen=True, slots=True)
class TraceReuse:
    """Blocks of all prompts: all, different ones, and hits of an infinite cache."""

    blocks: int
    unique: int
    found: int


def reuse(trace: Trace, block_tokens: int | None = None) -> TraceReuse:
    """Counts blocks and hits; `block_tokens` as for `block_size`. A request finds none of its own."""
    blocks = unique = found = 0
    for ids in block_ids(trace, block_tokens):
        blocks += len(ids)
        # Numbers are given in order of appearance: those below `unique` were in earlier prompts.
        found += next((count for count, number in enumerate(ids) if number >= unique), len(ids))
        unique = max(unique, max(ids, default=-1) + 1)
    return TraceReuse(blocks, unique, found)


def summarize(trace: Trace, block_tokens: int | None = None) -> TraceSummary:
    """Returns the counts. `block_tokens` is the block size for a trace of tokens, by default 16."""
    requests = trace.requests
    counts = reuse(trace, block_tokens)
    inputs = [request.num_input_tokens for request in requests]
    outputs = [request.num_output_tokens for request in requests]
    return TraceSummary(
        name=trace.name,
        format=trace.format,
        sha256=trace.sha256,
        requests=len(requests),
        skipped=len(trace.skipped),
        span_s=requests[-1].time_s - requests[0].time_s if requests else 0.0,
        sessions=len({request.session for request in requests} - {None}),
        namespaces=len({request.namespace for request in requests}),
        tenants=dict(Counter(request.tenant for request in requests if request.tenant)),
        input_tokens=sum(inputs),
        output_tokens=sum(outputs),
        median_input_tokens=median(inputs) if inputs else 0.0,
        median_output_tokens=median(outputs) if outputs else 0.0,
        longest_input_tokens=max(inputs, default=0),
        block_tokens=block_size(trace, block_tokens),
        blocks=counts.blocks or None,
        unique_blocks=counts.unique or None,
        infinite_cache_ratio=counts.found / counts.blocks if counts.blocks else None,
    )


def as_table(summary: TraceSummary) -> Table:
    """Returns one line per figure that the trace has."""
    figures = dataclasses.asdict(summary).items()
    lines = [
        (name.replace("_", " "), _shown(name, value))
        for name, value in figures
        if name != "name" and value not in (None, {}, "")
    ]
    return Table(f"trace {summary.name}", ("figure", "value"), lines, num_names=2)


def _shown(name: str, value: object) -> str:
    if name == "infinite_cache_ratio":
        return f"{value:.2%}"
    if isinstance(value, dict):
        most = sorted(value.items(), key=lambda item: (-item[1], item[0]))
        shown = [f"{key} {count:,}" for key, count in most[:SHOWN_TENANTS]]
        return ", ".join([*shown, f"{len(most) - len(shown):,} others"] if len(most) > len(shown) else shown)
    if isinstance(value, int | float):
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    return str(value)
