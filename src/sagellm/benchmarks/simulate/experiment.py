"""Several simulations: presets at some rates of one trace, or all that a setting asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sagellm.benchmarks.simulate.capacity import Capacity, find_capacity
from sagellm.benchmarks.simulate.cluster import Served
from sagellm.benchmarks.simulate.hardware import hardware
from sagellm.benchmarks.simulate.presets import preset_config, preset_names
from sagellm.benchmarks.simulate.setting import Setting, TraceSetting, Variant
from sagellm.benchmarks.simulate.simulation import (
    Goals,
    Layout,
    Machine,
    Result,
    parse_disaggregate,
    simulate,
)
from sagellm.benchmarks.simulate.workload import Workload, WorkloadSpec, workload
from sagellm.benchmarks.traces import Trace
from sagellm.core.config import Config
from sagellm.core.errors import UnknownNameError, nearest
from sagellm.engines.build import build_passes

Say = Callable[[str], None]
"""Told before each simulation what it is."""


def _quiet(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where simulations run: hardware, instances, goals, and settings (dotted keys) above every preset.

    The name of one of `variants` stands wherever a preset's may.
    """

    machine: Machine
    layout: Layout = field(default_factory=Layout)
    goals: Goals = field(default_factory=Goals)
    settings: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Variant] = field(default_factory=dict)

    def config(self, preset: str) -> Config:
        """Raises `UnknownNameError` with the names that there are."""
        variant = self.variants.get(preset)
        if variant is not None:
            return preset_config(variant.preset, {**self.settings, **variant.config})
        if self.variants and preset not in preset_names():
            known = (*preset_names(), *self.variants)
            told = f"unknown preset or variant {preset!r}.{nearest(preset, known)}"
            raise UnknownNameError(f"{told} There are: {', '.join(known)}.")
        return preset_config(preset, self.settings)

    def workload(self, trace: Trace, spec: WorkloadSpec, presets: Sequence[str]) -> Workload:
        """One for all of them: requests that the least of their instances could not hold are left out."""
        longest = min(self.machine.max_model_len(self.config(preset)) for preset in presets)
        return workload(trace, spec, longest)

    def run(self, preset: str, work: Workload) -> Result:
        return simulate(preset, self.config(preset), work, self.machine, self.layout, self.goals)


def run_rates(
    bench: Bench,
    trace: Trace,
    spec: WorkloadSpec,
    presets: Sequence[str],
    rate_scales: Sequence[float],
    say: Say = _quiet,
) -> list[Result]:
    """Each preset at each multiple of the trace's own rate (or at the rate of `spec`, with one scale)."""
    works = [bench.workload(trace, _at(spec, rate_scale=one), presets) for one in dict.fromkeys(rate_scales)]
    results = []
    for work in works:
        for preset in dict.fromkeys(presets):
            say(f"{trace.name}: {preset} at {work.rate:.3g} requests/s")
            results.append(bench.run(preset, work))
    return results


def capacity(
    bench: Bench,
    trace: Trace,
    spec: WorkloadSpec,
    preset: str,
    presets: Sequence[str] = (),
    say: Say = _quiet,
) -> Capacity:
    """The highest rate at which the preset's queue does not grow (`find_capacity`), on the workload that it
    shares with `presets`."""
    together = tuple(dict.fromkeys((preset, *presets)))

    def run(rate: float) -> Sequence[Served]:
        say(f"{trace.name}: capacity of {preset}: {rate:.3g} requests/s")
        work = bench.workload(trace, _at(spec, rate=rate), together)
        return simulate(preset, bench.config(preset), work, bench.machine, bench.layout).served

    start = bench.workload(trace, spec, together).rate
    return find_capacity(run, start)


@dataclass(frozen=True, slots=True)
class Ablation:
    """What a setting gave: results, and the baseline's capacity on each trace by its file."""

    results: list[Result]
    capacities: dict[str, Capacity]


def run_setting(
    setting: Setting,
    folder: Path,
    *,
    presets: Sequence[str] = (),
    cost_file: Path | None = None,
    say: Say = _quiet,
) -> Ablation:
    """Run a setting on the traces in `folder`; `presets` (or variants) in place of all of its own, where
    there are some."""
    chosen = tuple(presets or setting.names)
    bench = bench_of(setting, cost_file)
    for preset in (setting.baseline, *setting.names, *chosen):
        build_passes(bench.config(preset).scheduler)  # what is wrong is said now, not after an hour
    traces = [(one, one.read(folder)) for one in setting.traces]
    results: list[Result] = []
    capacities: dict[str, Capacity] = {}
    for one, trace in traces:
        found = capacities[one.file] = capacity(
            bench, trace, setting.spec(one), setting.baseline, setting.names, say
        )
        results += _at_loads(bench, setting, one, trace, chosen, found.rate, say)
    return Ablation(results, capacities)


def bench_of(setting: Setting, cost_file: Path | None = None) -> Bench:
    """The hardware and instances of a setting."""
    pools = None if setting.disaggregate is None else parse_disaggregate(setting.disaggregate)
    machine = hardware(
        setting.device, setting.model, tensor_parallel=setting.tensor_parallel, cost_file=cost_file
    )
    layout = Layout(setting.instances, pools, setting.router)
    return Bench(machine, layout, Goals(setting.slo_pairs), setting.config, setting.variants)


def _at_loads(
    bench: Bench,
    setting: Setting,
    one: TraceSetting,
    trace: Trace,
    presets: Sequence[str],
    rate: float,
    say: Say,
) -> list[Result]:
    together = tuple(dict.fromkeys((setting.baseline, *setting.names, *presets)))
    results = []
    for load in setting.loads:
        work = bench.workload(trace, _at(setting.spec(one), rate=load * rate), together)
        for preset in presets:
            of = f"{load:g} of {setting.baseline}'s capacity"
            say(f"{trace.name}: {preset} at {of}, {work.rate:.3g} requests/s")
            results.append(replace(bench.run(preset, work), load=load))
    return results


def _at(spec: WorkloadSpec, **arrivals: Any) -> WorkloadSpec:
    """The same with other arrivals."""
    return replace(spec, arrivals=replace(spec.arrivals, **arrivals))
