"""One evaluation: which workloads and predictors, and on which part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from sagellm.benchmarks._results import Environment
from sagellm.benchmarks.lifetime.lengths import evaluate_lengths
from sagellm.benchmarks.lifetime.report import LifetimeReport
from sagellm.benchmarks.lifetime.reuse import evaluate_reuse
from sagellm.benchmarks.lifetime.samples import PARTS, Part
from sagellm.benchmarks.lifetime.workloads import LENGTH_WORKLOADS, REUSE_WORKLOADS, load_lengths, load_reuse
from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.protocols.lifetime import LifetimePredictor
from sagellm.core.registry import registry
from sagellm.kvmgr.lifetime.reuse_table import ReuseTable

REUSE = "reuse_"
NAMES = (*LENGTH_WORKLOADS, *(REUSE + name for name in REUSE_WORKLOADS))
"""Every workload: those of lengths, and those of block reuse with a prefix."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`workloads` of `NAMES`; `predictors` by registered name; `after`: tokens generated when they are
    asked."""

    workloads: tuple[str, ...] = NAMES
    predictors: tuple[str, ...] = ("statistical",)
    part: Part = "test"
    after: int = 0

    def check(self) -> None:
        """Raises now, rather than after a long evaluation, for a name that is none."""
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
    plan: Plan,
    folder: Path | None,
    environment: Environment,
    on_row: Callable[[str], None] = lambda name: None,
) -> LifetimeReport:
    """Each workload in turn, `folder` holding the traces; raises `ConfigError` for a file that is not
    there."""
    plan.check()
    report = LifetimeReport(environment, asdict(plan))
    for name in plan.workloads:
        on_row(f"{name}: reading")
        if name.startswith(REUSE):
            trace = load_reuse(name.removeprefix(REUSE), folder)
            report.splits[name] = "by time"
            report.reuse += evaluate_reuse(trace, {"reuse_table": ReuseTable}, plan.part, on_row)
        else:
            workload = load_lengths(name, folder)
            report.splits[name] = workload.split
            report.lengths += evaluate_lengths(
                workload, _makers(plan.predictors), plan.part, plan.after, on_row
            )
    return report


def _makers(names: Sequence[str]) -> dict[str, Callable[[], LifetimePredictor]]:
    known = registry("predictor")
    return {name: partial(known.create, name) for name in names}
