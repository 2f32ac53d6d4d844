"""`sagellm simulate`: presets on a trace, with a cost model in place of hardware."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from rich.console import Console

from sagellm.cli._options import OptionGroup, command, flag, option
from sagellm.cli.trace import Reading
from sagellm.core.errors import ConfigError

if TYPE_CHECKING:
    from sagellm.benchmarks.simulate.capacity import SustainedRate
    from sagellm.benchmarks.simulate.experiment import ExperimentSetting, SimulationSetup
    from sagellm.benchmarks.simulate.simulation import ServiceGoals, SimulationResult
    from sagellm.benchmarks.simulate.workload import WorkloadSpec

TRACES = "SAGELLM_TRACES"
DEFAULT_PRESETS = ("default",)


@dataclass(frozen=True, slots=True)
class GivenOptions(OptionGroup):
    """The options that were given, by name of their parameter. A subclass declares them."""

    values: Mapping[str, Any]

    @classmethod
    def declared(cls) -> Sequence[tuple[str, Any, str, str]]:
        """Parameter, type, flags (such as `--seed N`) and help of each option."""
        return ()

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        return [option(name, kind, flag(names, text)) for name, kind, names, text in cls.declared()]

    @classmethod
    def take(cls, given: dict[str, Any]) -> Self:
        taken = {name: given.pop(name) for name, *_ in cls.declared()}
        return cls({name: value for name, value in taken.items() if value is not None})

    def some(self, **names: str) -> dict[str, Any]:
        """Given options under other names, as `some(parameter="option")`."""
        return {to: self.values[name] for to, name in names.items() if name in self.values}


class MachineOptions(GivenOptions):
    """What requests run on."""

    @classmethod
    def declared(cls) -> Sequence[tuple[str, Any, str, str]]:
        return (
            ("device", str, "--device NAME", "Device; default: h100-80g."),
            ("model", str, "--model -m NAME", "Model, or a config.json; default: llama-3.1-8b."),
            ("tensor_parallel", int, "--tensor-parallel N", "Devices per instance; default: 1."),
            ("data_parallel", int, "--data-parallel N", "Groups of them that share experts; default: 1."),
            ("cost", Path, "--cost FILE", "Coefficients that `calibrate` wrote."),
            ("assignments", list[str], "--set -s KEY=VALUE", "Set a key of every preset; repeatable."),
            ("instances", int, "--instances N", "Instances that do both phases; default: 1."),
            ("disaggregate", str, "--disaggregate P:D", "P instances for prefill, D for decode."),
            ("router", str, "--router NAME", _ROUTER_HELP),
            ("network", float, "--network GB/S", "Of one instance; default: the device's."),
        )

    def setup(self, goal_options: GoalOptions) -> SimulationSetup:
        from sagellm.benchmarks.simulate.experiment import SimulationSetup
        from sagellm.benchmarks.simulate.hardware import hardware
        from sagellm.benchmarks.simulate.simulation import ClusterLayout, parse_disaggregate
        from sagellm.cli.trace import assignments

        given = self.values
        pools = self.some(disaggregate="disaggregate")
        if pools and "instances" in given:
            raise ConfigError("--instances and --disaggregate exclude each other: 1:1 are two instances")
        layout: dict[str, Any] = {name: parse_disaggregate(text) for name, text in pools.items()}
        if "network" in given:
            layout["network_bytes_per_s"] = given["network"] * 1e9
        machine = hardware(
            given.get("device", "h100-80g"),
            given.get("model", "llama-3.1-8b"),
            cost_file=given.get("cost"),
            **self.some(tensor_parallel="tensor_parallel", data_parallel="data_parallel"),
        )
        placed = ClusterLayout(**layout, **self.some(instances="instances", router="router"))
        return SimulationSetup(
            machine, placed, goal_options.goals(), assignments("--set", given.get("assignments", ()))
        )


_BELOW_HELP = "Uncached tokens below which a request is small; default: 2000."
_ROUTER_HELP = "round-robin, least-loaded or prefix-aware; default: prefix-aware."


class LoadOptions(GivenOptions):
    """Which requests arrive, and when."""

    @classmethod
    def declared(cls) -> Sequence[tuple[str, Any, str, str]]:
        return (
            ("rate_scale", list[str], "--rate-scale X", "Times the trace's rate; repeatable; default: 1."),
            ("rate", float, "--rate X", "Mean requests per second, in place of a scale."),
            ("arrivals", str, "--arrivals NAME", "trace, poisson or bursty; default: trace."),
            ("cv", float, "--cv X", "Variation of bursty gaps; default: 3."),
            ("closed_loop", bool, "--closed-loop", "A turn waits for the answer before it."),
            ("think", float, "--think SECONDS", "Mean pause between turns; default: the trace's."),
            ("requests", int, "--requests N", "Only the first of the trace."),
            ("high_priority_share", float, "--high-priority-share X", "Share of small ones that go first."),
            ("high_priority_below", int, "--high-priority-below N", _BELOW_HELP),
            ("seed", int, "--seed N", "Of everything that is drawn; default: 0."),
        )

    @property
    def scales(self) -> tuple[float, ...]:
        scales = tuple(map(_scale, self.values.get("rate_scale", ("1",))))
        if "rate" in self.values and "rate_scale" in self.values:
            raise ConfigError("--rate and --rate-scale exclude each other: a scale is relative to the trace")
        return scales

    def spec(self) -> WorkloadSpec:
        from sagellm.benchmarks.simulate.workload import Arrivals, ClosedLoop, HighPriority, WorkloadSpec

        if "think" in self.values and not self.values.get("closed_loop"):
            raise ConfigError("--think is the pause of a closed loop: give --closed-loop too")
        return WorkloadSpec(
            arrivals=Arrivals(**self.some(process="arrivals", rate="rate", cv="cv")),
            turns=ClosedLoop(self.values.get("think")) if self.values.get("closed_loop") else None,
            high=HighPriority(**self.some(share="high_priority_share", below="high_priority_below")),
            **self.some(max_requests="requests", seed="seed"),
        )


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise ConfigError(f"--rate-scale {text!r}: write a number above 0, as in 1.5")
    return scale


class GoalOptions(GivenOptions):
    """The goals that results are measured by."""

    @classmethod
    def declared(cls) -> Sequence[tuple[str, Any, str, str]]:
        return (
            ("slo", list[str], "--slo TTFT,TPOT", _SLO_HELP),
            ("price", float, "--price X", "Per device hour, for the cost of tokens."),
            ("until", float, "--until SECONDS", "Stop there; default: when all have ended."),
        )

    def goals(self) -> ServiceGoals:
        from sagellm.benchmarks.simulate.metrics import parse_slo
        from sagellm.benchmarks.simulate.simulation import ServiceGoals

        slos = self.values.get("slo")
        pairs: dict[str, Any] = {"slos": tuple(dict.fromkeys(map(parse_slo, slos)))} if slos else {}
        return ServiceGoals(**pairs, **self.some(price_per_hour="price", until_s="until"))


_SLO_HELP = "Goodput under seconds, milliseconds; repeatable; default: 1,100 and 10,30."


@command
def simulate(
    preset: Annotated[
        list[str] | None, flag("--preset NAME", "A preset; repeatable; default: default.")
    ] = None,
    trace: Annotated[Path | None, flag("FILE", "The trace; .xz, .gz and .zst are read as they are.")] = None,
    setting: Annotated[Path | None, flag("FILE", "An experiment, in place of everything else.")] = None,
    traces: Annotated[
        Path | None, flag("FOLDER", f"Where a setting's traces are; default: {TRACES}.")
    ] = None,
    capacity: Annotated[  # noqa: FBT002 - an option of the command line
        bool, flag("--capacity", "First find the highest rate that each preset keeps up with.")
    ] = False,
    out_folder: Annotated[
        Path | None, flag("--out -o FOLDER", "Write results.json and requests.csv there.")
    ] = None,
    plots: Annotated[  # noqa: FBT002 - an option of the command line
        bool, flag("--plots", "Draw into the folder of --out; needs the extra plots.")
    ] = False,
    *,
    load_options: LoadOptions,
    machine_options: MachineOptions,
    goal_options: GoalOptions,
    reading: Reading,
) -> None:
    """Simulate the engine with presets on a trace: latency, goodput, throughput, cost.

    Scheduler, KV cache and policies are the real ones; only the device is a cost model.
    """
    from sagellm.benchmarks.simulate.outputs import check_writable_folder
    from sagellm.benchmarks.simulate.plots import check_plots

    if plots and out_folder is None:
        raise ConfigError("--plots draws into the folder of --out: name one")
    if out_folder is not None:
        (check_plots if plots else check_writable_folder)(out_folder)
    if setting is not None:
        if trace is not None or load_options.values or goal_options.values:
            raise ConfigError(
                "--setting fixes traces, rates and goals: beside it --preset, --cost, --out, ..."
            )
        ran = _run_setting(setting, traces, preset or (), machine_options)
    elif trace is not None:
        groups = load_options, machine_options, goal_options, reading
        ran = _run_trace(tuple(dict.fromkeys(preset or DEFAULT_PRESETS)), trace, groups, capacity=capacity)
    else:
        raise ConfigError("name what to simulate: --trace FILE, or --setting FILE")
    _report(ran, out_folder, plots=plots)


@dataclass(frozen=True, slots=True)
class _Simulated:
    """What was simulated, and the results. `capacities`: sustained rates by preset."""

    setup: SimulationSetup
    results: Sequence[SimulationResult]
    capacities: Mapping[str, SustainedRate]
    setting: ExperimentSetting | None = None


def _run_trace(
    presets: Sequence[str],
    file: Path,
    groups: tuple[LoadOptions, MachineOptions, GoalOptions, Reading],
    *,
    capacity: bool,
) -> _Simulated:
    from sagellm.benchmarks.simulate import experiment

    load_options, machine_options, goal_options, reading = groups
    scales, spec, setup = load_options.scales, load_options.spec(), machine_options.setup(goal_options)
    for name in presets:
        setup.config(name)
    trace, capacities = reading.read(file), {}
    for name in presets if capacity else ():
        capacities[name] = experiment.capacity(setup, trace, spec, name, presets, _say)
    results = experiment.run_rates(setup, trace, spec, presets, scales, _say)
    return _Simulated(setup, results, capacities)


def _run_setting(
    file: Path, folder: Path | None, presets: Sequence[str], machine_options: MachineOptions
) -> _Simulated:
    from sagellm.benchmarks.simulate.experiment import build_setup, read_setting, run_setting

    others = sorted(machine_options.values.keys() - {"cost"})
    if others:
        raise ConfigError(f"--setting fixes the machine: leave out {', '.join(others)}, or change the file")
    where = folder or (Path(os.environ[TRACES]) if os.environ.get(TRACES) else None)
    if where is None:
        raise ConfigError(
            f"a setting names files of a collection of traces: say where with --traces or {TRACES}"
        )
    setting, cost = read_setting(file), machine_options.values.get("cost")
    made = run_setting(setting, where, presets=presets, cost_file=cost, say=_say)
    return _Simulated(build_setup(setting, cost), made.results, made.capacities, setting)


def _say(text: str) -> None:
    """Print a line on stderr, if it is a terminal."""
    terminal = Console(stderr=True)
    if terminal.is_terminal:
        terminal.print(text, style="dim", highlight=False)


def _report(ran: _Simulated, out_folder: Path | None, *, plots: bool) -> None:
    from sagellm.benchmarks.reporting import environment, print_tables
    from sagellm.benchmarks.simulate.outputs import headlines, manifest, tables, write
    from sagellm.benchmarks.simulate.plots import draw

    for line in headlines(ran.setup, ran.results):
        print(line)
    for name, found in ran.capacities.items():
        print(f"capacity, {name}: {found.rate:.3g} requests/s")
    slos = ran.setup.goals.slos
    print_tables(tables(ran.results, slos))
    if out_folder is None:
        return
    made_by = manifest(ran.setup, ran.results, environment(datetime.now(UTC)), ran.setting, ran.capacities)
    drawn = draw(out_folder, ran.results, slos) if plots else ()
    for path in (*write(out_folder, made_by, ran.results), *drawn):
        print(path)
