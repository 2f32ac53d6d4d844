"""Runs the workloads on one engine and reports them as JSON and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

import numpy as np

from sagellm.benchmarks.engine.cold_start import cold_start
from sagellm.benchmarks.engine.peer_rows import EngineFigure, EnginePeerComparison, HarnessRow, compare
from sagellm.benchmarks.engine.session import PromptJob, Session
from sagellm.benchmarks.engine.workloads import (
    COLD_CODE,
    COLD_START,
    SECONDS,
    WORKLOADS,
    EngineWorkload,
    Metric,
    TokenDraws,
)
from sagellm.benchmarks.process import CpuTimes, others_share, peak_resident_bytes, resident_bytes
from sagellm.benchmarks.reporting import Environment, Table, format_number
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError
from sagellm.engines.build import build_backend, build_engine
from sagellm.engines.native.measure import read_bandwidth

FORMAT = "sagellm.bench.engine/1"
COLUMNS = (
    "workload", "median", "", "least", "most", "TTFT s", "overhead", "roofline", "resident MB", "others",
    "runs",
)  # fmt: skip
LOGIT_DISTANCE = Metric("rel_l2", "rel. L2", higher_is_better=False)
WARM_UP = PromptJob([1, 2, 3] * 21, 8)
MB = 1e6

SETTINGS = ("model.", "kv.", "scheduler.", "engine.")
RESIDENT = ("resident memory after decode-8", "b8")
NUM_PROMPTS, NUM_TOKENS = 64, 32
LOGIT_ERROR, LOGIT_ERROR_CODE = "logit-error", "q"


@dataclass(frozen=True, slots=True)
class EngineBenchPlan:
    """Which workloads to measure, on which configured model; `label` names the model in rows."""

    config: Config
    label: str
    names: Sequence[str]
    repeats: int = 3
    workloads: Sequence[EngineWorkload] = WORKLOADS

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"--repeats {self.repeats}: measure at least once")
        if not self.names:
            raise ConfigError(f"no workload is left to measure: {', '.join(w.name for w in self.workloads)}")

    @property
    def is_quantized(self) -> bool:
        return self.config.model.quantization != "none"

    @property
    def threads(self) -> int:
        assert self.config.engine.threads is not None
        return self.config.engine.threads


@dataclass(frozen=True, slots=True)
class EngineMeasurement:
    """One repeat of one workload. Shares are 0 to 1, None if the system does not tell."""

    name: str
    code: str
    metric: Metric
    repeat: int
    values: Mapping[str, float]
    resident_bytes: int | None
    others: float | None
    overhead: float | None = None
    num_steps: int | None = None
    roofline: float | None = None

    @property
    def value(self) -> float:
        return self.values[self.metric.key]


@dataclass(slots=True)
class EngineBenchReport:
    """All measurements so far, and the peers' rows to compare them with."""

    plan: EngineBenchPlan
    environment: Environment
    peer_rows: Sequence[HarnessRow] = ()
    measured: list[EngineMeasurement] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    capability: dict[str, Any] = field(default_factory=dict)

    def by_workload(self) -> dict[str, list[EngineMeasurement]]:
        groups: dict[str, list[EngineMeasurement]] = {}
        for measurement in self.measured:
            groups.setdefault(measurement.name, []).append(measurement)
        return groups

    def figures(self) -> list[EngineFigure]:
        """The median of each workload's metric, and the memory after a batch of eight."""
        figures = []
        for name, runs in self.by_workload().items():
            metric, value = runs[0].metric, median(run.value for run in runs)
            better = metric.higher_is_better
            figures.append(EngineFigure(name, runs[0].code, metric.key, metric.unit, value, better))
        title, code = RESIDENT
        resident = _resident_mb([run for run in self.measured if run.code == code])
        if resident is not None:
            figures.append(EngineFigure(title, code, "rss_mb", "MB", resident, higher_is_better=False))
        return figures

    def comparisons(self) -> list[EnginePeerComparison]:
        return compare(self.figures(), self.peer_rows)

    def rows(self) -> list[dict[str, Any]]:
        """One row per repeat in the harness's form, for comparison with a later run."""
        quantization = f"-{self.plan.config.model.quantization}" if self.plan.is_quantized else ""
        rows = []
        for measurement in self.measured:
            row: dict[str, Any] = {
                "engine": f"sagellm{quantization}",
                "model": self.plan.label,
                "threads": self.plan.threads,
                "workload": measurement.code,
                "rep": measurement.repeat,
                **{key: round(value, 5) for key, value in measurement.values.items()},
            }
            if measurement.resident_bytes is not None:
                row["rss_mb"] = round(measurement.resident_bytes / MB)
            for key in ("others", "overhead", "roofline", "num_steps"):
                value = getattr(measurement, key)
                if value is not None:
                    row[key] = round(value, 4)
            rows.append(row)
        return rows

    def as_json(self) -> dict[str, Any]:
        """Returns the report as JSON values of form `FORMAT`. `settings` are those of the engine that differ
        from the defaults, without the model's path."""
        default, given = Config().flat(), self.plan.config.flat()
        keys = [key for key in given if key.startswith(SETTINGS) and key != "model.name"]
        return {
            "format": FORMAT,
            "environment": dataclasses.asdict(self.environment),
            "model": self.plan.label,
            "threads": self.plan.threads,
            "settings": {key: given[key] for key in keys if given[key] != default[key]},
            "capability": self.capability,
            "figures": [dataclasses.asdict(figure) for figure in self.figures()],
            "comparisons": [dataclasses.asdict(comparison) for comparison in self.comparisons()],
            "left_out": self.left_out,
            "peak_resident_mb": round(peak_resident_bytes() / MB, 1),
            "rows": self.rows(),
        }


def run(
    report: EngineBenchReport,
    *,
    clock: Clock | None = None,
    on_run: Callable[[str], None] = lambda what: None,
) -> None:
    """Measures into `report`, the cold start first; measurements before an error are kept."""
    clock, plan = clock or MonotonicClock(), report.plan
    if COLD_START in plan.names:
        for repeat in range(plan.repeats):
            on_run(f"{COLD_START}, {repeat + 1} of {plan.repeats}")
            before = CpuTimes.now()
            values = cold_start(plan.config, clock)
            others, resident = others_share(before, CpuTimes.now()), int(values.pop("resident_bytes"))
            report.measured.append(
                EngineMeasurement(COLD_START, COLD_CODE, SECONDS, repeat, values, resident or None, others)
            )
    if plan.is_quantized:
        on_run(LOGIT_ERROR)
        values = {LOGIT_DISTANCE.key: logit_error(plan.config)}
        distance = EngineMeasurement(LOGIT_ERROR, LOGIT_ERROR_CODE, LOGIT_DISTANCE, 0, values, None, None)
        report.measured.append(distance)
    chosen = [workload for workload in plan.workloads if workload.name in plan.names]
    if chosen:
        _run_loaded(report, chosen, clock, on_run)


def _run_loaded(
    report: EngineBenchReport,
    workloads: Sequence[EngineWorkload],
    clock: Clock,
    on_run: Callable[[str], None],
) -> None:
    """Measures workloads on one engine. Those that do not fit are left out."""
    plan = report.plan
    on_run("loading the model")
    engine = build_engine(plan.config)
    capability = engine.capability()
    schema = capability.kv_schema
    sizes = ("block_size", "num_blocks", "max_num_seqs", "max_model_len", "weight_bytes")
    report.capability = {
        "device": capability.device,
        "dtype": capability.dtype,
        "kv_dtype": None if schema is None else schema.dtype,
        **{name: getattr(capability, name) for name in sizes},
    }
    try:
        bandwidth = read_bandwidth(capability.device)
        report.capability["read_GBs"] = round(bandwidth / 1e9, 1)
        session = Session(engine, clock)
        session.run([WARM_UP] * 4)
        for workload in workloads:
            if workload.longest > session.max_model_len:
                room = f"needs a context of {workload.longest} tokens; here are {session.max_model_len}"
                report.left_out[workload.name] = f"{room} (model, --max-model-len, KV memory)"
                continue
            for repeat in range(plan.repeats):
                on_run(f"{workload.name}, {repeat + 1} of {plan.repeats}")
                before = CpuTimes.now()
                values = workload.run(session, repeat)
                others, steps = others_share(before, CpuTimes.now()), session.steps
                measured = EngineMeasurement(
                    workload.name, workload.code, workload.metric, repeat, values, resident_bytes(), others,
                    steps.overhead, steps.num_steps, steps.roofline(capability, bandwidth),
                )  # fmt: skip
                report.measured.append(measured)
    finally:
        engine.close()


def tables(report: EngineBenchReport) -> Iterator[Table]:
    """Returns our medians and, if there are any, each peer's medians with the ratio."""
    plan = report.plan
    held = f" in {plan.config.model.quantization}" if plan.is_quantized else ""
    title = (
        f"model {plan.label}{held}, {plan.threads} threads: medians; overhead is what of a step was not "
        "execute, roofline what reading weights and KV takes of it"
    )
    yield Table(title, COLUMNS, [_line(runs) for runs in report.by_workload().values()], num_names=1)
    comparisons = report.comparisons()
    if not comparisons:
        return
    peers = list(dict.fromkeys(comparison.peer for comparison in comparisons))
    rows: dict[str, list[str]] = {}
    for comparison in comparisons:
        ours, ratio = comparison.figure, comparison.ratio
        empty = [ours.title, ours.unit, format_number(ours.value), *("-" for _ in peers)]
        row = rows.setdefault(ours.title, empty)
        shown = "" if ratio is None else f" ({ratio:.2f})"
        row[3 + peers.index(comparison.peer)] = format_number(comparison.peer_value) + shown
    title = "beside peers: their median (how many times better ours is; below 1: worse)"
    yield Table(title, ("workload", "", "ours", *peers), [*rows.values()], num_names=2)


def _line(runs: Sequence[EngineMeasurement]) -> list[str]:
    values = [run.value for run in runs]
    middle, least, most = (format_number(value) for value in (median(values), min(values), max(values)))
    return [
        runs[0].name,
        middle,
        runs[0].metric.unit,
        least,
        most,
        _median_of((run.values.get("ttft") for run in runs), format_number),
        _median_of((run.overhead for run in runs), "{:.1%}".format),
        _median_of((run.roofline for run in runs), "{:.0%}".format),
        format_number(_resident_mb(runs)),
        _median_of((run.others for run in runs), "{:.0%}".format),
        str(len(runs)),
    ]


def _median_of(values: Iterable[float | None], form: Callable[[float], str]) -> str:
    """Returns the median of the values that are known, or nothing."""
    known = [value for value in values if value is not None]
    return form(median(known)) if known else ""


def _resident_mb(runs: Sequence[EngineMeasurement]) -> float | None:
    """Returns the largest resident memory after any of these runs."""
    return max((run.resident_bytes / MB for run in runs if run.resident_bytes), default=None)


def logit_error(config: Config) -> float:
    """Relative L2 distance between the logits of the quantized and the unquantized model. The distance is
    over all prompts together, those of `benchmarks/peers_quantized.py`. One model is in memory at a time."""
    from sagellm.engines.native.backend import NativeBackend

    logits = []
    for quantization in ("none", config.model.quantization):
        model = config.model.model_copy(update={"quantization": quantization})
        backend = build_backend(config.model_copy(update={"model": model}))
        assert isinstance(backend, NativeBackend)
        try:
            vocab_size = backend.capability().vocab_size
            draws = [TokenDraws(Random(f"{LOGIT_ERROR_CODE}/{i}"), vocab_size) for i in range(NUM_PROMPTS)]
            prompts = [draw.tokens(NUM_TOKENS) for draw in draws]
            logits.append(np.stack([backend.prompt_logits(prompt).numpy() for prompt in prompts]))
        finally:
            backend.close()
    expected, found = logits
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
