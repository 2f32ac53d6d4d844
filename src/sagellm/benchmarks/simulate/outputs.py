"""Writes the results of simulations: tables, JSON with a manifest, a CSV of requests."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sagellm.benchmarks.reporting import Environment, Table, check_folder, format_number, write_json
from sagellm.benchmarks.simulate.capacity import SustainedRate
from sagellm.benchmarks.simulate.experiment import ExperimentSetting, SimulationSetup
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.simulation import SimulationResult
from sagellm.benchmarks.simulate.workload import SimulatedWorkload
from sagellm.core.errors import ConfigError

FORMAT = "sagellm-simulate/1"
RESULTS, REQUESTS = "results.json", "requests.csv"


def as_row(result: SimulationResult) -> dict[str, Any]:
    """Returns one result flat: what was run, then every figure of `metrics.figures`. The last three, the
    cost of the simulation itself, differ from run to run."""
    facts = result.workload.described()
    return {
        "trace": facts["name"],
        "preset": result.preset,
        "load": result.load,
        "rate": facts["rate"],
        "rate_scale": facts["rate_scale"],
        "requests": len(result.served),
        **result.figures,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "requests_per_wall_s": result.requests_per_wall_s,
    }


def manifest(
    setup: SimulationSetup,
    results: Sequence[SimulationResult],
    environment: Environment,
    setting: ExperimentSetting | None = None,
    capacities: Mapping[str, SustainedRate] | None = None,
) -> dict[str, Any]:
    """Describes what was simulated, by which code and where: enough to run it again."""
    goals = setup.goals
    return {
        "workloads": [workload.described() for workload in _workloads(results)],
        "hardware": setup.machine.described(),
        "layout": {**dataclasses.asdict(setup.layout), "roles": setup.layout.roles},
        "kv_blocks": {result.preset: setup.machine.num_blocks(result.config) for result in results},
        "presets": {
            result.preset: result.config.model_dump(
                mode="json", exclude={"server": True, "kv": {"remote_url"}}
            )
            for result in results
        },
        "slos": [dataclasses.asdict(slo) for slo in goals.slos],
        "price_per_hour": goals.price_per_hour,
        "until_s": goals.until_s if goals.until_s < float("inf") else None,
        "setting": None if setting is None else setting.model_dump(mode="json"),
        "capacities": {file: dataclasses.asdict(found) for file, found in (capacities or {}).items()},
        "environment": dataclasses.asdict(environment),
    }


def _workloads(results: Sequence[SimulationResult]) -> list[SimulatedWorkload]:
    """Returns the workloads that differ."""
    return list({json.dumps(result.workload.described()): result.workload for result in results}.values())


# -- files


def check_writable_folder(folder: Path) -> None:
    """Raises, before the simulation, the `ConfigError` of `write`."""
    check_folder(folder)
    try:
        folder.mkdir(exist_ok=True)
        (folder / RESULTS).open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error}") from error


def write(folder: Path, made_by: Mapping[str, Any], results: Sequence[SimulationResult]) -> list[Path]:
    """Writes `results.json` and `requests.csv`; returns their paths. The first has a row per simulation,
    with the manifest; the second a row per request of each simulation."""
    results_file, requests_file = folder / RESULTS, folder / REQUESTS
    try:
        folder.mkdir(exist_ok=True)
        with requests_file.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(next(request_rows(results[0]))))
            writer.writeheader()
            for result in results:
                writer.writerows(request_rows(result))
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror}") from error
    write_json(
        results_file, {"format": FORMAT, "manifest": made_by, "rows": [as_row(result) for result in results]}
    )
    return [results_file, requests_file]


def request_rows(result: SimulationResult) -> Iterator[dict[str, Any]]:
    """Yields requests by number; a value is empty if there is no such moment."""
    work, rate = result.workload, result.workload.described()["rate"]
    for served in result.served:
        request, history = work.requests[served.number], dataclasses.asdict(served)
        del history["number"]
        yield {
            "trace": work.trace.name, "preset": result.preset, "rate": rate, "request": served.number,
            "session": request.session, "tenant": request.tenant, "priority": work.priorities[served.number],
            "prompt_tokens": request.num_input_tokens,
            **history, "outcome": served.outcome.value,
            "ttft_s": served.ttft_s, "tpot_s": served.tpot_s, "e2e_s": served.e2e_s,
        }  # fmt: skip


# -- tables


def headlines(setup: SimulationSetup, results: Sequence[SimulationResult]) -> list[str]:
    """Describes the simulations: warnings, one line for the machine, one line per workload."""
    hardware, layout = setup.machine.described(), setup.layout
    parts = "prefill and decode apart" if layout.disaggregate else "prefill and decode together"
    blocks = sorted({setup.machine.num_blocks(result.config) for result in results})
    groups = setup.machine.cost_model.data_parallel
    shared = f", data parallel {groups}" if groups > 1 else ""
    devices = f"{hardware['device']} (tensor parallel {hardware['tensor_parallel']}{shared})"
    pool = " or ".join(f"{count:,}" for count in blocks)
    machine = f"{hardware['model']} on {devices}, {len(layout.roles)} x {pool} KV blocks"
    warnings = [f"warning: {warning}" for warning in setup.machine.warnings]
    return [
        *warnings,
        f"{machine}, {parts}, router {layout.control.router_name}",
        *map(_headline, _workloads(results)),
    ]


def _headline(work: SimulatedWorkload) -> str:
    facts = work.described()
    left = sum(facts["left_out"].values())
    rate, scale = format_number(facts["rate"], "-"), format_number(facts["rate_scale"], "-")
    return (
        f"{facts['name']}: {facts['requests']:,} requests ({left:,} left out), {facts['arrivals']} arrivals, "
        f"{rate} requests/s, rate scale {scale}, {facts['high_priority_requests']:,} of high priority, "
        f"seed {facts['seed']}, sha256 {facts['sha256'][:12] or 'none'}"
    )


def tables(results: Sequence[SimulationResult], slos: Sequence[SLOPair]) -> list[Table]:
    """Latencies; then goodput; then throughput, reuse and use of the machine."""
    traces = len({result.workload.trace.name for result in results}) > 1
    loads = any(result.load is not None for result in results)
    names = (*(("trace",) if traces else ()), *(("load",) if loads else ()), "rate", "preset")
    goodput: Mapping[str, _Column] = {
        f"{slo.ttft_s:g} s, {slo.tpot_ms:g} ms": (f"goodput_{slo.name}", 1) for slo in slos
    }
    work = {**_WORK, **_TIERS} if any(result.config.kv.has_tiers for result in results) else _WORK
    tables = []
    for title, columns in (("latency", _LATENCY), ("goodput, requests/s", goodput), ("work", work)):
        cells = [*((name, 1) for name in names), *columns.values()]
        rows = [[_cell(row[name], factor) for name, factor in cells] for row in map(as_row, results)]
        tables.append(Table(title, (*names, *columns), rows, len(names)))
    return tables


_Column = tuple[str, float]
"""A figure's name, and the factor by which it is multiplied in tables."""
_LATENCY: Mapping[str, _Column] = {
    "TTFT s": ("ttft_s_mean", 1), "TTFT p50": ("ttft_s_p50", 1), "TTFT p99": ("ttft_s_p99", 1),
    "TTFT high p99": ("ttft_s_high_p99", 1), "TPOT ms": ("tpot_s_mean", 1e3), "TPOT p50": ("tpot_s_p50", 1e3),
    "TPOT p99": ("tpot_s_p99", 1e3), "ITL p50 ms": ("itl_s_p50", 1e3), "ITL p99": ("itl_s_p99", 1e3),
    "E2E s": ("e2e_s_mean", 1), "E2E p99": ("e2e_s_p99", 1),
}  # fmt: skip
_WORK: Mapping[str, _Column] = {
    "finished": ("requests_finished", 1), "rejected": ("requests_rejected", 1),
    "requests/s": ("requests_per_s", 1), "output tok/s": ("output_tokens_per_s", 1),
    "total tok/s": ("total_tokens_per_s", 1), "hit %": ("hit_ratio", 100), "preempted": ("preemptions", 1),
    "re-prefill %": ("reprefill_ratio", 100), "busy %": ("utilisation", 100),
    "batch %": ("batch_efficiency", 100), "loaded %": ("batch_efficiency_loaded", 100),
    "per M out": ("cost_per_million_output_tokens", 1), "simulated/s": ("requests_per_wall_s", 1),
}  # fmt: skip

_TIERS: Mapping[str, _Column] = {
    "KV waits": ("kv_waits", 1), "from host": ("loaded_blocks_dram", 1),
    "from disk": ("loaded_blocks_nvme", 1),
}  # fmt: skip


def _cell(value: Any, factor: float) -> str:
    """Formats counts in full, figures with three digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and factor == 1:
        return f"{value:,}"
    return format_number(None if value is None else value * factor, "-")
