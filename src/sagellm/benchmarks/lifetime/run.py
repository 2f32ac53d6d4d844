"""Evaluates the chosen workloads and reports them as JSON and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sagellm.benchmarks.lifetime.lengths import LengthRow, evaluate_lengths
from sagellm.benchmarks.lifetime.reuse import ReuseRow, evaluate_reuse
from sagellm.benchmarks.lifetime.workloads import (
    LENGTH_WORKLOADS,
    PARTS,
    REUSE_WORKLOADS,
    Part,
    load_lengths,
    load_reuse,
)
from sagellm.benchmarks.reporting import Environment, Table, format_number
from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.registry import registry
from sagellm.kvmgr.lifetime.reuse.reuse_table import ReuseTable

REUSE = "reuse_"
NAMES = (*LENGTH_WORKLOADS, *(REUSE + name for name in REUSE_WORKLOADS))
"""Every workload: those of lengths, and those of block reuse with a prefix."""
FORMAT = "sagellm.bench.lifetime/1"
LENGTH_COLUMNS = (
    "workload", "predictor", "requests", "MAE", "to constant", "within 10 %", "rank corr.", "in 10-90 %",
    "answered", "MAE answered", "predict µs", "update µs",
)  # fmt: skip
REUSE_COLUMNS = (
    "workload", "asked", "predictor", "cases", "reused", "AUC", "Brier", "Brier of base rate", "skill",
    "calibration", "accuracy", "of 'never'", "predict µs", "mean", "update µs", "mean",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LifetimeBenchPlan:
    """`workloads` are of `NAMES`, `predictors` registered names. `after` is the number of generated tokens
    at which a predictor is asked."""

    workloads: tuple[str, ...] = NAMES
    predictors: tuple[str, ...] = ("statistical",)
    part: Part = "test"
    after: int = 0

    def check(self) -> None:
        """Raises `UnknownNameError` or `ConfigError` before a long evaluation for an invalid value."""
        for name in self.workloads:
            if name not in NAMES:
                raise UnknownNameError(f"unknown workload {name!r}.{nearest(name, NAMES)}")
        for predictor in self.predictors:
            registry("predictor").get(predictor)
        if self.part not in PARTS:
            raise ConfigError(f"there is no part {self.part!r}: one of {', '.join(PARTS)}")
        if self.after < 0:
            raise ConfigError(f"a request cannot have {self.after} tokens: 0 or more")


def run(
    plan: LifetimeBenchPlan,
    folder: Path | None,
    environment: Environment,
    on_row: Callable[[str], None] = lambda name: None,
) -> LifetimeBenchReport:
    """Evaluates each workload in turn; `folder` holds the traces. Raises `ConfigError` for a missing file."""
    plan.check()
    report = LifetimeBenchReport(environment, asdict(plan))
    for name in plan.workloads:
        on_row(f"{name}: reading")
        if name.startswith(REUSE):
            trace = load_reuse(name.removeprefix(REUSE), folder)
            report.splits[name] = "by time"
            report.reuse += evaluate_reuse(trace, {"reuse_table": ReuseTable}, plan.part, on_row)
        else:
            workload = load_lengths(name, folder)
            report.splits[name] = workload.split
            makers = {known: partial(registry("predictor").create, known) for known in plan.predictors}
            report.lengths += evaluate_lengths(workload, makers, plan.part, plan.after, on_row)
    return report


@dataclass(slots=True)
class LifetimeBenchReport:
    """All rows so far. `splits` says how each workload was split."""

    environment: Environment
    settings: Mapping[str, Any]
    splits: dict[str, str] = field(default_factory=dict)
    lengths: list[LengthRow] = field(default_factory=list)
    reuse: list[ReuseRow] = field(default_factory=list)

    def tables(self) -> list[Table]:
        part = self.settings["part"]
        made = []
        if self.lengths:
            title = f"output length, {part} part, asked after {self.settings['after']} tokens"
            made.append(Table(title, LENGTH_COLUMNS, [*map(_length_cells, self.lengths)], 2))
        if self.reuse:
            made.append(
                Table(f"block reuse, {part} part", REUSE_COLUMNS, [*map(_reuse_cells, self.reuse)], 3)
            )
        return made

    def as_json(self) -> dict[str, Any]:
        """Returns JSON values of form `FORMAT`; rows have figures that the tables leave out."""
        return {
            "format": FORMAT,
            "environment": asdict(self.environment),
            "settings": dict(self.settings),
            "splits": self.splits,
            "lengths": [asdict(row) for row in self.lengths],
            "reuse": [asdict(row) for row in self.reuse],
        }


def _length_cells(row: LengthRow) -> Sequence[str]:
    score = row.score
    return (
        row.workload,
        row.predictor,
        f"{score.num_samples:,}",
        format_number(score.mae),
        f"{100 * row.against_constant:+.1f} %",
        _percent(score.within_10_percent),
        f"{score.rank_correlation:+.2f}",
        _percent(score.inside_80),
        _percent(score.answered),
        format_number(score.mae_answered),
        format_number(row.predict_us),
        format_number(row.update_us),
    )


def _reuse_cells(row: ReuseRow) -> Sequence[str]:
    score = row.score
    return (
        row.workload,
        row.moment,
        row.predictor,
        f"{score.num_samples:,}",
        _percent(score.base_rate),
        f"{score.auc:.3f}",
        f"{score.brier:.4f}",
        f"{score.brier_of_base_rate:.4f}",
        f"{100 * score.skill:+.1f} %",
        f"{score.calibration_error:.3f}",
        _percent(score.accuracy),
        _percent(score.accuracy_of_never),
        format_number(row.predict_us),
        format_number(row.predict_mean_us),
        format_number(row.update_us),
        format_number(row.update_mean_us),
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
