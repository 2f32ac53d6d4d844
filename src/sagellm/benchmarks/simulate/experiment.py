"""Runs several simulations: presets at some rates, or what a setting file asks for.

A setting file fixes an experiment before anything in it is tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sagellm.benchmarks.simulate.capacity import SustainedRate, find_capacity
from sagellm.benchmarks.simulate.cluster import ServedRequest
from sagellm.benchmarks.simulate.hardware import Hardware, hardware
from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.simulation import (
    ClusterLayout,
    ServiceGoals,
    SimulationResult,
    parse_disaggregate,
    simulate,
)
from sagellm.benchmarks.simulate.workload import SimulatedWorkload, WorkloadSpec, workload
from sagellm.benchmarks.traces import Trace, read_trace
from sagellm.core.config import PRESETS, Config
from sagellm.core.config_layers import Layer, given_layer, preset_layer, resolve
from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.engines.build import build_passes
from sagellm.engines.config_file import read_config_file

SIZES: Mapping[str, Any] = {"scheduler.max_num_seqs": 1024, "scheduler.max_batched_tokens": 8192}
"""Defaults below every preset, so that presets without sizes are compared at the same ones."""
NO_FOLDER = "nothing is written"
"""In place of `kv.dir`, which a disk tier needs elsewhere."""
Say = Callable[[str], None]
"""Called with a description before each simulation."""


def preset_config(name: str, settings: Mapping[str, Any] | None = None) -> Config:
    """Returns the configuration of a preset: `SIZES` below it, `settings` (dotted keys) above it. The
    environment and configuration files do not count: the manifest describes all of a simulation. Raises
    `UnknownNameError` with the known names, `ConfigError` for an unknown setting."""
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise UnknownNameError(f"unknown preset {name!r}.{nearest(name, PRESETS)} There are: {known}.")
    layers = [
        Layer("simulation", {**SIZES, "kv.dir": NO_FOLDER}),
        preset_layer(name),
        given_layer(settings or {}, "settings"),
    ]
    return resolve(layers).config


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TraceSetting(_Part):
    """One trace: its file in the collection, and which part of it is used. `sha256` is of its decompressed
    bytes."""

    file: str = Field(min_length=1)
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    format: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    max_requests: int | None = Field(default=None, ge=1)
    closed_loop: bool = False
    think_s: float | None = Field(default=None, ge=0)

    def read(self, folder: Path) -> Trace:
        """Raises `ConfigError` if the file is missing, or has another SHA-256 than the setting."""
        trace = read_trace(folder / self.file, self.format, **self.options)
        if self.sha256 is not None and trace.sha256 != self.sha256:
            raise ConfigError(
                f"{self.file} has the SHA-256 {trace.sha256}, the setting was made for {self.sha256}: take "
                "that file, or leave sha256 out of the setting"
            )
        return trace


class HighPrioritySetting(_Part):
    """Which requests have high priority."""

    share: float = Field(default=0.0, ge=0, le=1)
    uncached_below: int = Field(default=2000, ge=0)


class PresetVariant(_Part):
    """A preset with keys (dotted) of its own, above those of the setting."""

    preset: str = Field(min_length=1)
    config: dict[str, Any] = Field(min_length=1)


class ExperimentSetting(_Part):
    """An experiment: each preset and variant on each trace, at each load. A load is a share of the
    capacity that the `baseline` has on that trace."""

    name: str = Field(min_length=1)
    about: str = ""
    device: str = "h100-80g"
    model: str = "llama-3.1-8b"
    tensor_parallel: int = Field(default=1, ge=1)
    instances: int = Field(default=1, ge=1)
    disaggregate: str | None = None
    router: str | dict[str, Any] = "prefix_aware"
    report_s: float = Field(default=0.0, ge=0)
    event_delay_s: float = Field(default=0.0, ge=0)
    hybrid: bool = False
    baseline: str
    presets: tuple[str, ...] = Field(min_length=1)
    variants: dict[str, PresetVariant] = Field(default_factory=dict)
    loads: tuple[float, ...] = Field(min_length=1)
    slos: tuple[tuple[float, float], ...] = Field(min_length=1)
    high_priority: HighPrioritySetting = HighPrioritySetting()
    seed: int = Field(default=0, ge=0)
    config: dict[str, Any] = Field(default_factory=dict)
    traces: tuple[TraceSetting, ...] = Field(min_length=1)

    @property
    def slo_pairs(self) -> tuple[SLOPair, ...]:
        return tuple(SLOPair(*pair) for pair in self.slos)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the presets and variants to run."""
        return (*self.presets, *(name for name in self.variants if name not in self.presets))

    def spec(self, trace: TraceSetting) -> WorkloadSpec:
        """Returns the workload of one of its traces, at the trace's own rate."""
        return WorkloadSpec(
            closed_loop=trace.closed_loop,
            think_s=trace.think_s,
            high_priority_share=self.high_priority.share,
            high_priority_below=self.high_priority.uncached_below,
            max_requests=trace.max_requests,
            seed=self.seed,
        )


def read_setting(path: Path) -> ExperimentSetting:
    """Reads a YAML or JSON file. Raises `ConfigError` naming the file and the first wrong key."""
    values = read_config_file(path).values
    try:
        made = ExperimentSetting.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        known = (
            f"; a setting has {', '.join(ExperimentSetting.model_fields)}"
            if problem["type"] == "extra_forbidden"
            else ""
        )
        raise ConfigError(f"{path}: {key}: {problem['msg']}{known}") from error
    bad = [load for load in made.loads if not 0 < load < float("inf")]
    bad += [value for pair in made.slos for value in pair if not 0 < value < float("inf")]
    if bad:
        raise ConfigError(f"{path}: loads and SLOs are numbers above 0, got {bad[0]}")
    taken = sorted(made.variants.keys() & PRESETS.keys())
    if taken:
        raise ConfigError(f"{path}: variants: {taken[0]} is a preset, give the variant another name")
    return made


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """Where simulations run: hardware, instances, goals, and settings above every preset. `settings` has
    dotted keys. The name of a variant may stand for a preset's name."""

    machine: Hardware
    layout: ClusterLayout = field(default_factory=ClusterLayout)
    goals: ServiceGoals = field(default_factory=ServiceGoals)
    settings: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, PresetVariant] = field(default_factory=dict)

    def config(self, preset: str) -> Config:
        """Raises `UnknownNameError` with the known names."""
        variant = self.variants.get(preset)
        if variant is not None:
            return preset_config(variant.preset, {**self.settings, **variant.config})
        if self.variants and preset not in PRESETS:
            known = (*PRESETS, *self.variants)
            problem = f"unknown preset or variant {preset!r}.{nearest(preset, known)}"
            raise UnknownNameError(f"{problem} There are: {', '.join(known)}.")
        return preset_config(preset, self.settings)

    def workload(self, trace: Trace, spec: WorkloadSpec, presets: Sequence[str]) -> SimulatedWorkload:
        """Returns a workload that all presets can serve. Requests that the smallest of their instances
        could not hold are left out."""
        longest = min(self.machine.max_model_len(self.config(preset)) for preset in presets)
        return workload(trace, spec, longest)

    def run(self, preset: str, work: SimulatedWorkload) -> SimulationResult:
        return simulate(preset, self.config(preset), work, self.machine, self.layout, self.goals)


def run_rates(
    setup: SimulationSetup,
    trace: Trace,
    spec: WorkloadSpec,
    presets: Sequence[str],
    rate_scales: Sequence[float],
    say: Say = lambda text: None,
) -> list[SimulationResult]:
    """Runs each preset at each multiple of the trace's own rate. If `spec` has a rate, use one scale."""
    works = [
        setup.workload(trace, _at(spec, rate_scale=rate_scale), presets)
        for rate_scale in dict.fromkeys(rate_scales)
    ]
    results = []
    for work in works:
        for preset in dict.fromkeys(presets):
            say(f"{trace.name}: {preset} at {work.rate:.3g} requests/s")
            results.append(setup.run(preset, work))
    return results


def capacity(
    setup: SimulationSetup,
    trace: Trace,
    spec: WorkloadSpec,
    preset: str,
    presets: Sequence[str] = (),
    say: Say = lambda text: None,
) -> SustainedRate:
    """Returns the highest rate at which the preset's queue does not grow (`find_capacity`). The workload
    is the one that it shares with `presets`."""
    together = tuple(dict.fromkeys((preset, *presets)))

    def run(rate: float) -> Sequence[ServedRequest]:
        say(f"{trace.name}: capacity of {preset}: {rate:.3g} requests/s")
        work = setup.workload(trace, _at(spec, rate=rate), together)
        return simulate(preset, setup.config(preset), work, setup.machine, setup.layout).served

    start = setup.workload(trace, spec, together).rate
    return find_capacity(run, start)


@dataclass(frozen=True, slots=True)
class Ablation:
    """The results of a setting, and the baseline's capacity by trace file."""

    setup: SimulationSetup
    results: list[SimulationResult]
    capacities: dict[str, SustainedRate]


def run_setting(
    setting: ExperimentSetting,
    folder: Path,
    *,
    presets: Sequence[str] = (),
    cost_file: Path | None = None,
    say: Say = lambda text: None,
) -> Ablation:
    """Runs a setting on the traces in `folder`. `presets` (or variants), if given, replace all of the
    setting's own."""
    chosen = tuple(presets or setting.names)
    together = tuple(dict.fromkeys((setting.baseline, *setting.names, *chosen)))
    setup = build_setup(setting, cost_file)
    for preset in together:
        build_passes(setup.config(preset).scheduler)  # raises now, not after an hour
    traces = [(trace_setting, trace_setting.read(folder)) for trace_setting in setting.traces]
    results: list[SimulationResult] = []
    capacities: dict[str, SustainedRate] = {}
    for trace_setting, trace in traces:
        spec = setting.spec(trace_setting)
        found = capacity(setup, trace, spec, setting.baseline, setting.names, say)
        capacities[trace_setting.file] = found
        for load in setting.loads:
            work = setup.workload(trace, _at(spec, rate=load * found.rate), together)
            for preset in chosen:
                of = f"{load:g} of {setting.baseline}'s capacity"
                say(f"{trace.name}: {preset} at {of}, {work.rate:.3g} requests/s")
                results.append(replace(setup.run(preset, work), load=load))
    return Ablation(setup, results, capacities)


def build_setup(setting: ExperimentSetting, cost_file: Path | None = None) -> SimulationSetup:
    """Returns the hardware and instances of a setting."""
    pools = None if setting.disaggregate is None else parse_disaggregate(setting.disaggregate)
    machine = hardware(
        setting.device, setting.model, tensor_parallel=setting.tensor_parallel, cost_file=cost_file
    )
    layout = ClusterLayout(
        setting.instances,
        pools,
        setting.router,
        hybrid=setting.hybrid,
        report_s=setting.report_s,
        event_delay_s=setting.event_delay_s,
    )
    return SimulationSetup(machine, layout, ServiceGoals(setting.slo_pairs), setting.config, setting.variants)


def _at(spec: WorkloadSpec, **arrivals: Any) -> WorkloadSpec:
    """Returns the same spec with changed arrivals."""
    return replace(spec, arrivals=replace(spec.arrivals, **arrivals))
