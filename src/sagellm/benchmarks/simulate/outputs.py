"""The results of simulations: tables, JSON with a manifest, and a CSV of every request."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sagellm.benchmarks.reporting import Environment, Table, format_number, write_json
from sagellm.benchmarks.simulate.capacity import SustainedRate
from sagellm.benchmarks.simulate.cluster import ServedRequest
from sagellm.benchmarks.simulate.experiment import ExperimentSetting, SimulationSetup
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.simulation import SimulationResult
from sagellm.benchmarks.simulate.workload import SimulatedWorkload
from sagellm.core.errors import ConfigError

FORMAT = "sagellm-simulate/1"
RESULTS, REQUESTS = "results.json", "requests.csv"


def as_row(result: SimulationResult) -> dict[str, Any]:
    """One result flat: what was run, then every figure of `metrics.figures`. The last three, what the
    simulation itself took, differ from run to run."""
    work = result.workload
    return {
        "trace": work.trace.name,
        "preset": result.preset,
        "load": result.load,
        "rate": work.described()["rate"],
        "rate_scale": work.described()["rate_scale"],
        "requests": len(result.served),
        **result.figures,
        "wall_s": result.wall_s,
        "cpu_s": result.cpu_s,
        "requests_per_wall_s": result.requests_per_wall_s,
    }


def manifest(
    bench: SimulationSetup,
    results: Sequence[SimulationResult],
    environment: Environment,
    setting: ExperimentSetting | None = None,
    capacities: Mapping[str, SustainedRate] | None = None,
) -> dict[str, Any]:
    """What was simulated, on what, by which code and where: enough to run it again."""
    goals = bench.goals
    return {
        "workloads": [one.described() for one in _workloads(results)],
        "hardware": bench.machine.described(),
        "layout": {**dataclasses.asdict(bench.layout), "roles": bench.layout.roles},
        "kv_blocks": {one.preset: bench.machine.num_blocks(one.config) for one in results},
        "presets": {one.preset: one.config.model_dump(mode="json", exclude={"server"}) for one in results},
        "slos": [dataclasses.asdict(one) for one in goals.slos],
        "price_per_hour": goals.price_per_hour,
        "until_s": goals.until_s if goals.until_s < float("inf") else None,
        "setting": None if setting is None else setting.model_dump(mode="json"),
        "capacities": {name: dataclasses.asdict(one) for name, one in (capacities or {}).items()},
        "environment": dataclasses.asdict(environment),
    }


def _workloads(results: Sequence[SimulationResult]) -> list[SimulatedWorkload]:
    """Those that differ."""
    return list({json.dumps(one.workload.described()): one.workload for one in results}.values())


# -- files


def check_folder(folder: Path) -> None:
    """Raise now, not after the simulation, the `ConfigError` of `write`."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cannot write into {folder}: it is a file, name a folder")
    if not folder.parent.is_dir():
        raise ConfigError(f"cannot write into {folder}: there is no folder {folder.parent}")
    try:
        folder.mkdir(exist_ok=True)
        (folder / RESULTS).open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error}") from error


def write(folder: Path, made_by: Mapping[str, Any], results: Sequence[SimulationResult]) -> list[Path]:
    """`results.json`: a row per simulation, with its manifest; `requests.csv`: a row per request of each."""
    results_file, requests_file = folder / RESULTS, folder / REQUESTS
    try:
        folder.mkdir(exist_ok=True)
        with requests_file.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, list(request_columns()))
            writer.writeheader()
            for one in results:
                writer.writerows(request_rows(one))
    except OSError as error:
        raise ConfigError(f"cannot write into {folder}: {error.strerror}") from error
    write_json(
        results_file, {"format": FORMAT, "manifest": made_by, "rows": [as_row(one) for one in results]}
    )
    return [results_file, requests_file]


def request_columns() -> tuple[str, ...]:
    """Columns of the CSV."""
    ran = ("trace", "preset", "rate", "request", "session", "tenant", "priority", "prompt_tokens")
    fields = tuple(one.name for one in dataclasses.fields(ServedRequest) if one.name != "number")
    return (*ran, *fields, "ttft_s", "tpot_s", "e2e_s")


def request_rows(result: SimulationResult) -> Iterator[dict[str, Any]]:
    """Requests by number; empty where there is no such moment."""
    work, rate = result.workload, result.workload.described()["rate"]
    for one in result.served:
        request = work.requests[one.number]
        yield {
            "trace": work.trace.name, "preset": result.preset, "rate": rate, "request": one.number,
            "session": request.session, "tenant": request.tenant, "priority": work.priorities[one.number],
            "prompt_tokens": request.num_input_tokens,
            **{name: getattr(one, name) for name in _FIELDS}, "outcome": one.outcome.value,
            **_latencies(one),
        }  # fmt: skip


_FIELDS = tuple(one.name for one in dataclasses.fields(ServedRequest) if one.name != "number")


def _latencies(one: ServedRequest) -> dict[str, float | None]:
    arrival, first, finished = one.arrival_s, one.first_token_s, one.finished_s
    later = one.num_output_tokens - 1
    return {
        "ttft_s": None if arrival is None or first is None else first - arrival,
        "tpot_s": None if first is None or finished is None or not later else (finished - first) / later,
        "e2e_s": None if arrival is None or finished is None else finished - arrival,
    }


# -- tables


def headlines(bench: SimulationSetup, results: Sequence[SimulationResult]) -> list[str]:
    """What is simulated, in a line for the machine, after what is doubtful about it, and one for each
    workload."""
    hardware, layout = bench.machine.described(), bench.layout
    parts = "prefill and decode apart" if layout.disaggregate else "prefill and decode together"
    blocks = sorted({bench.machine.num_blocks(one.config) for one in results})
    groups = hardware.get("data_parallel", 1)
    shared = f", data parallel {groups}" if groups > 1 else ""
    devices = f"{hardware['device']} (tensor parallel {hardware['tensor_parallel']}{shared})"
    pool = " or ".join(f"{one:,}" for one in blocks)
    machine = f"{hardware['model']} on {devices}, {len(layout.roles)} x {pool} KV blocks"
    warnings = [f"warning: {one}" for one in hardware.get("warnings", ())]
    return [*warnings, f"{machine}, {parts}, router {layout.router}", *map(_headline, _workloads(results))]


def _headline(work: SimulatedWorkload) -> str:
    told = work.described()
    left = sum(told["left_out"].values())
    rate, scale = _figure(told["rate"]), _figure(told["rate_scale"])
    return (
        f"{told['name']}: {told['requests']:,} requests ({left:,} left out), {told['arrivals']} arrivals, "
        f"{rate} requests/s, rate scale {scale}, {told['high_priority_requests']:,} of high priority, "
        f"seed {told['seed']}, sha256 {told['sha256'][:12] or 'none'}"
    )


def tables(results: Sequence[SimulationResult], slos: Sequence[SLOPair]) -> list[Table]:
    """Latencies; then goodput, throughput, reuse and use of the machine."""
    names, rows = _names(results), [as_row(one) for one in results]
    return [
        Table("latency", (*names, *_LATENCY), [_cells(row, names, _LATENCY) for row in rows], len(names)),
        Table("goodput, requests/s", (*names, *_goodput(slos)),
              [_cells(row, names, _goodput(slos)) for row in rows], len(names)),
        Table("work", (*names, *_WORK), [_cells(row, names, _WORK) for row in rows], len(names)),
    ]  # fmt: skip


_Column = tuple[str, float]
"""A figure's name, and by what it is multiplied for the eye."""
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


def _goodput(slos: Sequence[SLOPair]) -> dict[str, _Column]:
    return {f"{one.ttft_s:g} s, {one.tpot_ms:g} ms": (f"goodput_{one.name}", 1) for one in slos}


def _names(results: Sequence[SimulationResult]) -> tuple[str, ...]:
    """Columns that tell the rows apart."""
    traces = len({one.workload.trace.name for one in results}) > 1
    loads = any(one.load is not None for one in results)
    return (*(("trace",) if traces else ()), *(("load",) if loads else ()), "rate", "preset")


def _cells(row: Mapping[str, Any], names: Iterable[str], columns: Mapping[str, _Column]) -> list[str]:
    told = [row[one] if isinstance(row[one], str) else _figure(row[one]) for one in names]
    return [*told, *(_cell(row[name], factor) for name, factor in columns.values())]


def _cell(value: Any, factor: float) -> str:
    """Counts as they are, figures to three digits."""
    if isinstance(value, int) and factor == 1:
        return f"{value:,}"
    return _figure(None if value is None else value * factor)


def _figure(value: float | None) -> str:
    return "-" if value is None else format_number(value)
