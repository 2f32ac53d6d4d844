"""`sagellm replay`: eviction policies on a trace, by capacity, beside the offline optimum."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console

from sagellm.cli._options import OptionGroup, command, option
from sagellm.cli.trace import BlockTokens, FileArgument, Reading
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry

if TYPE_CHECKING:
    from sagellm.benchmarks.replay.block_trace import BlockTrace
    from sagellm.benchmarks.replay.sweep import ReplayResult, ReplaySweepPlan

PREFERRED = ("lru", "adaptive")
_POLICY_HELP = "A policy, or optimum, the offline bound; may be repeated; default: lru, adaptive, optimum."
_CAPACITY_HELP = "Blocks, or a share of the unique ones as 1%; may be repeated; default: 0.5 1 2 5 10 25 %."
_OPTION_HELP = "Set an option of a policy, such as s3fifo.small_share=0.2, or of the format (no dot)."
_OUT_HELP = "Write a row per replay there; .json (with a manifest), .csv or .parquet."


@dataclass(frozen=True, slots=True)
class Replaying(OptionGroup):
    """What is replayed, and how it is counted; `values` are the given fields of `ReplaySweepPlan`."""

    policies: tuple[str, ...]
    values: Mapping[str, Any]

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        seeds = "For policies that take one; may be repeated; default: 0."
        warmup = "Requests that do not count: 10% of them, or those of the first 600s."
        causes = "Also say why blocks were missing; no speed is measured then."
        token = "Seconds of prefill per token, for saved seconds; default: 5e-5."
        squared = "The same per token and position; default: 1.6e-9."
        return [
            option("policy", list[str], typer.Option("--policy", metavar="NAME", help=_POLICY_HELP)),
            option("capacity", list[str], typer.Option("--capacity", metavar="SIZE", help=_CAPACITY_HELP)),
            option("seed", list[str], typer.Option("--seed", metavar="N", help=seeds)),
            option("warmup", str, typer.Option(metavar="SPAN", help=warmup)),
            option("causes", bool, typer.Option("--causes", help=causes)),
            option("premature_s", float, typer.Option(metavar="SECONDS", help=_PREMATURE_HELP)),
            option("seconds_per_token", float, typer.Option(metavar="X", help=token)),
            option("seconds_per_token_squared", float, typer.Option(metavar="X", help=squared)),
        ]

    @classmethod
    def take(cls, given: dict[str, Any]) -> Self:
        policies = tuple(given.pop("policy") or ())
        capacities, seeds = given.pop("capacity"), given.pop("seed")
        values: dict[str, Any] = {"capacities": tuple(capacities)} if capacities else {}
        if seeds:
            values["seeds"] = tuple(map(_seed, seeds))
        names = ("warmup", "causes", "premature_s", "seconds_per_token", "seconds_per_token_squared")
        for name in names:
            value = given.pop(name)
            if value is not None:
                values[name] = value
        return cls(policies, values)

    def plan(self, options: Mapping[str, Mapping[str, Any]]) -> ReplaySweepPlan:
        from sagellm.benchmarks.replay.sweep import OPTIMUM, ReplaySweepPlan

        known = registry("policy").names()
        default = (*(name for name in PREFERRED if name in known), OPTIMUM)
        return ReplaySweepPlan(self.policies or default, options=options, **self.values)


_PREMATURE_HELP = "With --causes: an eviction is premature if the block is missed so soon; default: 60."


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--seed {text!r}: write a whole number") from error


class ReplayReading(Reading):
    """As for other traces, but that `--option` also takes those of policies, under `policy.name`."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        declared = typer.Option("--option", metavar="KEY=VALUE", help=_OPTION_HELP)
        own = [one for one in super().parameters() if one.name != "options"]
        return [*own, option("options", list[str], declared)]

    def of_policies(self) -> dict[str, dict[str, Any]]:
        """The options of policies, by name."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in self.options.items():
            policy, dot, name = key.rpartition(".")
            if dot:
                found.setdefault(policy, {})[name] = value
        return found

    def of_format(self) -> Reading:
        """How to read, without them."""
        options = {key: value for key, value in self.options.items() if "." not in key}
        return Reading(self.format, self.on_error, options)


@command
def replay(
    file: FileArgument,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", metavar="N", help="Processes; default: one per core.")
    ] = None,
    block_tokens: BlockTokens = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help=_OUT_HELP)] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw there as PNG; needs the extra plots.")
    ] = None,
    *,
    replaying: Replaying,
    reading: ReplayReading,
) -> None:
    """Replay a trace with eviction policies at some capacities: what they hit, and what the offline optimum
    would.

    "of gap" is the share of the way from LRU to the optimum, "saved s" the share of prefill seconds.
    """
    from sagellm.benchmarks.replay.block_trace import block_trace
    from sagellm.benchmarks.replay.outputs import check_out, headline, manifest, tables, write
    from sagellm.benchmarks.replay.plots import check_plots, draw
    from sagellm.benchmarks.reporting import environment, print_tables
    from sagellm.core.cores import usable_cores

    jobs = usable_cores() if jobs is None else jobs
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: at least one")
    if out is not None:
        check_out(out)
    if plots is not None:
        check_plots(plots)
    plan = replaying.plan(reading.of_policies())
    trace = block_trace(reading.of_format().read(file), block_tokens)
    results = _sweep(trace, plan, jobs)
    print(headline(trace))
    print_tables(tables(results))
    if out is not None:
        write(out, manifest(trace, plan, environment(datetime.now(UTC))), results)
    for path in draw(plots, trace, results) if plots is not None else ():
        print(path)


def _sweep(trace: BlockTrace, plan: ReplaySweepPlan, jobs: int) -> list[ReplayResult]:
    """With a bar on stderr, where that is a terminal."""
    from rich.progress import Progress

    from sagellm.benchmarks.replay.sweep import run_sweep

    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("replays", total=len(plan.cases(trace)))
        return run_sweep(trace, plan, jobs=jobs, on_done=lambda: progress.advance(task))
