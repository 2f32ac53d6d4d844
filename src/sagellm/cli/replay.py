"""`sagellm replay`: eviction policies on a trace, by capacity, beside the offline optimum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress

from sagellm.benchmarks.reporting import environment, print_tables
from sagellm.cli._options import OptionGroup, command, flag
from sagellm.cli.trace import BLOCK_TOKENS, TRACE_FILE, Reading
from sagellm.core.cores import usable_cores
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry

if TYPE_CHECKING:
    from sagellm.benchmarks.checkpoints.replayer import CheckpointPlan
    from sagellm.benchmarks.replay.sweep import ReplaySweepPlan

PREFERRED = ("lru", "adaptive")
_POLICY_HELP = "A policy, or optimum, the offline bound; may be repeated; default: lru, adaptive, optimum."
_CAPACITY_HELP = "Blocks, or a share of the unique ones as 1%; may be repeated; default: 0.5 1 2 5 10 25 %."
_OPTION_HELP = "Set an option of a policy, such as s3fifo.small_share=0.2, or of the format (no dot)."
_OUT_HELP = "Write a row per replay to this file: .json (with a manifest), .csv or .parquet."
_PREMATURE_HELP = (
    "With --causes: an eviction is premature if the block is missed within this time; default: 60."
)
_GROUPS_HELP = (
    "Replay a hybrid model's cache: qwen3-next, nemotron-h, or attention_bytes=24576,state_bytes=77266944; "
    "also window_tokens, window_bytes."
)
_CHECKPOINTS_HELP = (
    "With --groups: value, vllm-sparse, three-per-path, junctions, prompt-end, every-4096, dense, or bound, "
    "the upper one; may be repeated; default: vllm-sparse, three-per-path, value, bound."
)
_PER_TOKEN_HELP = "Seconds of prefill per token, for saved seconds; default: 5e-5."


@dataclass(frozen=True, slots=True)
class ReplayOptions(OptionGroup):
    """What is replayed, and how it is counted: fields of `ReplaySweepPlan`."""

    policies: tuple[str, ...] = flag("--policy NAME", _POLICY_HELP, ())
    capacities: tuple[str, ...] = flag("--capacity SIZE", _CAPACITY_HELP, ())
    seeds: tuple[str, ...] = flag("--seed N", "For policies that take one; may be repeated; default: 0.", ())
    warmup: str | None = flag("SPAN", "Requests that do not count: 10% of them, or those of the first 600s.")
    causes: bool | None = flag("--causes", "Also say why blocks were missing; no speed is measured then.")
    premature_s: float | None = flag("SECONDS", _PREMATURE_HELP)
    seconds_per_token: float | None = flag("X", _PER_TOKEN_HELP)
    seconds_per_token_squared: float | None = flag("X", "The same per token and position; default: 1.6e-9.")

    def plan(self, options: Mapping[str, Mapping[str, Any]]) -> ReplaySweepPlan:
        """What is to be replayed; `options` are those of policies, by name."""
        from sagellm.benchmarks.replay.sweep import OPTIMUM, ReplaySweepPlan

        known = registry("policy").names()
        default = (*(name for name in PREFERRED if name in known), OPTIMUM)
        given = self.given()
        if self.seeds:
            given["seeds"] = tuple(map(_seed, self.seeds))
        return ReplaySweepPlan(**{"policies": default, "options": options, **given})


@dataclass(frozen=True, slots=True)
class CheckpointOptions(OptionGroup):
    """For hybrid models: what is kept of a prefix, and where checkpoints are."""

    groups: str | None = flag("--groups SPEC", _GROUPS_HELP)
    checkpoints: tuple[str, ...] = flag("--checkpoints NAME", _CHECKPOINTS_HELP, ())

    def plan(self, replaying: ReplayOptions) -> CheckpointPlan:
        """What is to be replayed; capacities and warm-up are those of other replays."""
        from sagellm.benchmarks.checkpoints.groups import parse_groups
        from sagellm.benchmarks.checkpoints.replayer import CheckpointPlan

        given = replaying.given()
        for name in given:
            if name not in ("capacities", "warmup"):
                raise ConfigError(f"--groups replays checkpoints: leave out the option for {name}")
        assert self.groups is not None
        if self.checkpoints:
            given["policies"] = self.checkpoints
        return CheckpointPlan(parse_groups(self.groups), **given)


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--seed {text!r}: write a whole number") from error


@dataclass(frozen=True, slots=True)
class ReplayReading(Reading):
    """How the trace of a replay is read; `--option` also takes `policy.name=value`."""

    option: tuple[str, ...] = flag("--option KEY=VALUE", _OPTION_HELP, ())

    def format_options(self) -> dict[str, Any]:
        return {key: value for key, value in Reading.format_options(self).items() if "." not in key}

    def policy_options(self) -> dict[str, dict[str, Any]]:
        """The options of policies, by name."""
        found: dict[str, dict[str, Any]] = {}
        for key, value in Reading.format_options(self).items():
            policy, dot, name = key.rpartition(".")
            if dot:
                found.setdefault(policy, {})[name] = value
        return found


@command
def replay(
    file: Path = TRACE_FILE,
    jobs: int | None = flag("--jobs -j N", "Processes; default: one per core."),
    block_tokens: int | None = BLOCK_TOKENS,
    out_file: Path | None = flag("--out -o FILE", _OUT_HELP),
    plots: Path | None = flag("FOLDER", "Draw there as PNG; needs the extra plots."),
    *,
    replaying: ReplayOptions,
    hybrid: CheckpointOptions,
    reading: ReplayReading,
) -> None:
    """Replay a trace with eviction policies, beside the offline optimum.

    "of gap" is the share of the way from LRU to the optimum, "saved s" the share of prefill seconds. With
    --groups: where a hybrid model keeps checkpoints of its recurrent state.
    """
    if hybrid.groups is not None:
        if plots is not None:
            raise ConfigError("--groups draws nothing: leave out --plots")
        _replay_checkpoints(file, block_tokens, out_file, hybrid.plan(replaying), reading)
        return
    if hybrid.checkpoints:
        raise ConfigError("--checkpoints needs --groups: --groups qwen3-next")
    from sagellm.benchmarks.replay.block_trace import block_trace
    from sagellm.benchmarks.replay.outputs import check_out, headline, manifest, tables, write
    from sagellm.benchmarks.replay.plots import check_plots, draw
    from sagellm.benchmarks.replay.sweep import run_sweep

    jobs = usable_cores() if jobs is None else jobs
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: at least one")
    if out_file is not None:
        check_out(out_file)
    if plots is not None:
        check_plots(plots)
    plan = replaying.plan(reading.policy_options())
    trace = block_trace(reading.read(file), block_tokens)
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("replays", total=len(plan.cases(trace)))
        results = run_sweep(trace, plan, jobs=jobs, on_done=lambda: progress.advance(task))
    print(headline(trace))
    print_tables(tables(results))
    if out_file is not None:
        write(out_file, manifest(trace, plan, environment()), results)
    for path in draw(plots, trace, results) if plots is not None else ():
        print(path)


def _replay_checkpoints(
    file: Path, block_tokens: int | None, out_file: Path | None, plan: CheckpointPlan, reading: ReplayReading
) -> None:
    from sagellm.benchmarks.checkpoints.outputs import check_out, table, write
    from sagellm.benchmarks.checkpoints.replayer import run_checkpoints
    from sagellm.benchmarks.replay.block_trace import block_trace
    from sagellm.benchmarks.replay.outputs import headline, manifest

    if out_file is not None:
        check_out(out_file)
    trace = block_trace(reading.read(file), block_tokens)
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("replays", total=len(plan.policies) * len(plan.capacities))
        results = run_checkpoints(trace, plan, lambda: progress.advance(task))
    print(headline(trace))
    print_tables([table(results)])
    if out_file is not None:
        write(out_file, manifest(trace, plan, environment()), results)
