"""`sagellm simulate`: presets on a trace, with a cost model in place of hardware."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sagellm.benchmarks.reporting import environment, print_tables
from sagellm.cli._options import OptionGroup, command, flag, with_value
from sagellm.cli.trace import Reading, assignments
from sagellm.core.errors import ConfigError

if TYPE_CHECKING:
    from sagellm.benchmarks.simulate.capacity import SustainedRate
    from sagellm.benchmarks.simulate.experiment import ExperimentSetting, SimulationSetup
    from sagellm.benchmarks.simulate.simulation import ServiceGoals, SimulationResult
    from sagellm.benchmarks.simulate.workload import WorkloadSpec

TRACES = "SAGELLM_TRACES"
_BELOW_HELP = "Uncached tokens below which a request is small; default: 2000."
_ROUTER_HELP = (
    "cost, prefix_aware, llm_d, least_loaded, round_robin, random or one of yours; default: prefix_aware."
)
_SLO_HELP = "Goodput under seconds, milliseconds; repeatable; default: 1,100 and 10,30."


@dataclass(frozen=True, slots=True)
class MachineOptions(OptionGroup):
    """What requests run on."""

    device: str | None = flag("NAME", "Device; default: h100-80g.")
    model: str | None = flag("--model -m NAME", "Model, or a config.json; default: llama-3.1-8b.")
    tensor_parallel: int | None = flag("N", "Devices per instance; default: 1.")
    data_parallel: int | None = flag("N", "Groups of them that share experts; default: 1.")
    cost: Path | None = flag("FILE", "Coefficients that `calibrate` wrote.")
    assignments: tuple[str, ...] = flag("--set -s KEY=VALUE", "Set a key of every preset; repeatable.", ())
    instances: int | None = flag("N", "Instances that do both phases; default: 1.")
    disaggregate: str | None = flag("P:D", "P instances for prefill, D for decode.")
    hybrid: bool | None = flag("--hybrid", "Instances may do either phase, as the router separates.")
    router: str | None = flag("NAME", _ROUTER_HELP)
    admission: str | None = flag("NAME", "fifo, priority, slo, cost or adaptive; default: all are accepted.")
    report_s: float | None = flag(
        "--report SECONDS", "Between reports of load; default: 0, the present state."
    )
    event_delay_s: float | None = flag("--event-delay SECONDS", "Until a router knows of KV; default: 0.")
    replicate: bool | None = flag("--replicate", "Copy hot prefixes to instances with little to do.")
    network: float | None = flag("GB/S", "Of one instance; default: the device's.")

    def setup(self, goal_options: GoalOptions) -> SimulationSetup:
        from sagellm.benchmarks.simulate.experiment import SimulationSetup
        from sagellm.benchmarks.simulate.hardware import hardware
        from sagellm.benchmarks.simulate.simulation import ClusterLayout, parse_disaggregate

        if self.disaggregate is not None and self.instances is not None:
            raise ConfigError("--instances and --disaggregate exclude each other: 1:1 are two instances")
        device = "h100-80g" if self.device is None else self.device
        model = "llama-3.1-8b" if self.model is None else self.model
        ranks = with_value(tensor_parallel=self.tensor_parallel, data_parallel=self.data_parallel)
        machine = hardware(device, model, cost_file=self.cost, **ranks)
        layout = with_value(
            disaggregate=None if self.disaggregate is None else parse_disaggregate(self.disaggregate),
            network_bytes_per_s=None if self.network is None else self.network * 1e9,
            instances=self.instances,
            hybrid=self.hybrid,
            replication={} if self.replicate else None,
            router=self.router,
            admission=self.admission,
            report_s=self.report_s,
            event_delay_s=self.event_delay_s,
        )
        settings = assignments("--set", self.assignments)
        return SimulationSetup(machine, ClusterLayout(**layout), goal_options.goals(), settings)


@dataclass(frozen=True, slots=True)
class LoadOptions(OptionGroup):
    """Which requests arrive, and when: fields of `Arrivals` and `WorkloadSpec`."""

    rate_scale: tuple[str, ...] = flag("X", "Times the trace's rate; repeatable; default: 1.", ())
    rate: float | None = flag("X", "Mean requests per second, in place of a scale.")
    process: str | None = flag("--arrivals NAME", "trace, poisson or bursty; default: trace.")
    cv: float | None = flag("X", "Variation of bursty gaps; default: 3.")
    closed_loop: bool | None = flag("--closed-loop", "A turn waits for the answer before it.")
    agents: int | None = flag("--agents N", "So many sessions at once, in a closed loop.")
    think_s: float | None = flag("--think SECONDS", "Mean pause between turns; default: the trace's.")
    max_requests: int | None = flag("--requests N", "Only the first of the trace.")
    high_priority_share: float | None = flag("X", "Share of small ones that go first.")
    high_priority_below: int | None = flag("N", _BELOW_HELP)
    seed: int | None = flag("N", "Of everything that is drawn; default: 0.")

    @property
    def scales(self) -> tuple[float, ...]:
        scales = tuple(map(_scale, self.rate_scale or ("1",)))
        if self.rate is not None and self.rate_scale:
            raise ConfigError("--rate and --rate-scale exclude each other: a scale is relative to the trace")
        return scales

    def spec(self) -> WorkloadSpec:
        from sagellm.benchmarks.simulate.workload import Arrivals, WorkloadSpec

        if self.think_s is not None and not self.closed_loop:
            raise ConfigError("--think is the pause of a closed loop: give --closed-loop too")
        given = self.given()
        given.pop("rate_scale", None)
        arrivals = {name: given.pop(name) for name in ("process", "rate", "cv") if name in given}
        return WorkloadSpec(arrivals=Arrivals(**arrivals), **given)


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise ConfigError(f"--rate-scale {text!r}: write a number above 0, as in 1.5")
    return scale


@dataclass(frozen=True, slots=True)
class GoalOptions(OptionGroup):
    """The goals that results are measured by."""

    slo: tuple[str, ...] = flag("--slo TTFT,TPOT", _SLO_HELP, ())
    price: float | None = flag("X", "Per device hour, for the cost of tokens.")
    until: float | None = flag("SECONDS", "Stop there; default: when all have ended.")

    def goals(self) -> ServiceGoals:
        from sagellm.benchmarks.simulate.metrics import parse_slo
        from sagellm.benchmarks.simulate.simulation import ServiceGoals

        slos = tuple(dict.fromkeys(map(parse_slo, self.slo)))
        return ServiceGoals(**with_value(slos=slos, price_per_hour=self.price, until_s=self.until))


@command
def simulate(
    preset: list[str] | None = flag("--preset NAME", "A preset; repeatable; default: default."),
    trace: Path | None = flag("FILE", "The trace; .xz, .gz and .zst are read as they are."),
    setting: Path | None = flag("FILE", "An experiment, in place of everything else."),
    traces: Path | None = flag("FOLDER", f"Where a setting's traces are; default: {TRACES}."),
    capacity: bool = flag("--capacity", "First find the highest rate that each preset keeps up with.", False),
    out_folder: Path | None = flag("--out -o FOLDER", "Write results.json and requests.csv there."),
    plots: bool = flag("--plots", "Draw into the folder of --out; needs the extra plots.", False),
    *,
    load_options: LoadOptions,
    machine_options: MachineOptions,
    goal_options: GoalOptions,
    reading: Reading,
) -> None:
    """Simulate the engine with presets on a trace: latency, goodput, throughput, cost.

    Scheduler, KV cache and policies are the real ones; only the device is a cost model.
    """
    from sagellm.benchmarks.simulate import experiment
    from sagellm.benchmarks.simulate.outputs import check_writable_folder
    from sagellm.benchmarks.simulate.plots import check_plots

    if plots and out_folder is None:
        raise ConfigError("--plots draws into the folder of --out: name one")
    if out_folder is not None:
        (check_plots if plots else check_writable_folder)(out_folder)
    if setting is not None:
        if trace is not None or load_options.given() or goal_options.given():
            raise ConfigError(
                "--setting fixes traces, rates and goals: beside it --preset, --cost, --out, ..."
            )
        setup, results, capacities, fixed = _run_setting(setting, traces, preset or (), machine_options)
    elif trace is not None:
        presets = tuple(dict.fromkeys(preset or ("default",)))
        scales, spec, setup = load_options.scales, load_options.spec(), machine_options.setup(goal_options)
        for name in presets:
            setup.config(name)
        requests = reading.read(trace)
        capacities = {
            name: experiment.capacity(setup, requests, spec, name, presets, _say)
            for name in (presets if capacity else ())
        }
        results, fixed = experiment.run_rates(setup, requests, spec, presets, scales, _say), None
    else:
        raise ConfigError("name what to simulate: --trace FILE, or --setting FILE")
    _report(setup, results, capacities, fixed, out_folder, plots=plots)


def _run_setting(
    file: Path, folder: Path | None, presets: Sequence[str], machine_options: MachineOptions
) -> tuple[SimulationSetup, list[SimulationResult], dict[str, SustainedRate], ExperimentSetting | None]:
    from sagellm.benchmarks.simulate.experiment import read_setting, run_setting

    others = sorted(machine_options.given().keys() - {"cost"})
    if others:
        raise ConfigError(f"--setting fixes the machine: leave out {', '.join(others)}, or change the file")
    where = folder or (Path(os.environ[TRACES]) if os.environ.get(TRACES) else None)
    if where is None:
        raise ConfigError(
            f"a setting names files of a collection of traces: say where with --traces or {TRACES}"
        )
    setting, cost = read_setting(file), machine_options.cost
    made = run_setting(setting, where, presets=presets, cost_file=cost, say=_say)
    return made.setup, made.results, made.capacities, setting


def _say(text: str) -> None:
    """Print a line on stderr, if it is a terminal."""
    terminal = Console(stderr=True)
    if terminal.is_terminal:
        terminal.print(text, style="dim", highlight=False)


def _report(
    setup: SimulationSetup,
    results: Sequence[SimulationResult],
    capacities: Mapping[str, SustainedRate],
    setting: ExperimentSetting | None,
    out_folder: Path | None,
    *,
    plots: bool,
) -> None:
    from sagellm.benchmarks.simulate.outputs import headlines, manifest, tables, write
    from sagellm.benchmarks.simulate.plots import draw

    for line in headlines(setup, results):
        print(line)
    for name, found in capacities.items():
        print(f"capacity, {name}: {found.rate:.3g} requests/s")
    slos = setup.goals.slos
    print_tables(tables(results, slos))
    if out_folder is None:
        return
    made_by = manifest(setup, results, environment(), setting, capacities)
    drawn = draw(out_folder, results, slos) if plots else ()
    for path in (*write(out_folder, made_by, results), *drawn):
        print(path)
