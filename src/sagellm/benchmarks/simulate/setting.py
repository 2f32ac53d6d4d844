"""Settings: files that fix an experiment before anything in it is tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sagellm.benchmarks.simulate.metrics import SLOPair
from sagellm.benchmarks.simulate.presets import preset_names
from sagellm.benchmarks.simulate.workload import HighPriority, Turns, WorkloadSpec
from sagellm.benchmarks.traces import Trace, read_trace
from sagellm.core.errors import ConfigError
from sagellm.engines.config_file import read_config_file


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TraceSetting(_Part):
    """One trace: its file in the collection, and which of it is used. `sha256`: of its decompressed bytes."""

    file: str = Field(min_length=1)
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    format: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    max_requests: int | None = Field(default=None, ge=1)
    closed_loop: bool = False
    think_s: float | None = Field(default=None, ge=0)

    def read(self, folder: Path) -> Trace:
        """Raises `ConfigError` if the file is missing, or is not the one that the setting means."""
        trace = read_trace(folder / self.file, self.format, **self.options)
        if self.sha256 is not None and trace.sha256 != self.sha256:
            raise ConfigError(
                f"{self.file} has the SHA-256 {trace.sha256}, the setting was made for {self.sha256}: take "
                "that file, or leave sha256 out of the setting"
            )
        return trace


class HighPrioritySetting(_Part):
    """Which requests are of high priority."""

    share: float = Field(default=0.0, ge=0, le=1)
    uncached_below: int = Field(default=2000, ge=0)


class Variant(_Part):
    """A preset with keys (dotted) of its own, as `scheduler.passes`; they go over those of the setting."""

    preset: str = Field(min_length=1)
    config: dict[str, Any] = Field(min_length=1)


class Setting(_Part):
    """An experiment: each preset, and each variant by its name, on each trace, at each share of the capacity
    that `baseline` has there."""

    name: str = Field(min_length=1)
    about: str = ""
    device: str = "h100-80g"
    model: str = "llama-3.1-8b"
    tensor_parallel: int = Field(default=1, ge=1)
    instances: int = Field(default=1, ge=1)
    disaggregate: str | None = None
    router: str = "prefix-aware"
    baseline: str
    presets: tuple[str, ...] = Field(min_length=1)
    variants: dict[str, Variant] = Field(default_factory=dict)
    loads: tuple[float, ...] = Field(min_length=1)
    slos: tuple[tuple[float, float], ...] = Field(min_length=1)
    high_priority: HighPrioritySetting = HighPrioritySetting()
    seed: int = Field(default=0, ge=0)
    config: dict[str, Any] = Field(default_factory=dict)
    traces: tuple[TraceSetting, ...] = Field(min_length=1)

    @property
    def slo_pairs(self) -> tuple[SLOPair, ...]:
        return tuple(SLOPair(*one) for one in self.slos)

    @property
    def names(self) -> tuple[str, ...]:
        """What is run."""
        return (*self.presets, *(name for name in self.variants if name not in self.presets))

    def spec(self, trace: TraceSetting) -> WorkloadSpec:
        """The workload of one of its traces, at the trace's own rate."""
        return WorkloadSpec(
            turns=Turns(trace.think_s) if trace.closed_loop else None,
            high=HighPriority(self.high_priority.share, self.high_priority.uncached_below),
            max_requests=trace.max_requests,
            seed=self.seed,
        )


def read_setting(path: Path) -> Setting:
    """A YAML or JSON file; raises `ConfigError` naming the file and the first key that is wrong."""
    values = read_config_file(path).values
    try:
        made = Setting.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        known = (
            f"; a setting has {', '.join(Setting.model_fields)}"
            if problem["type"] == "extra_forbidden"
            else ""
        )
        raise ConfigError(f"{path}: {key}: {problem['msg']}{known}") from error
    bad = [one for one in made.loads if not 0 < one < float("inf")]
    bad += [value for pair in made.slos for value in pair if not 0 < value < float("inf")]
    if bad:
        raise ConfigError(f"{path}: loads and SLOs are numbers above 0, got {bad[0]}")
    taken = sorted(made.variants.keys() & set(preset_names()))
    if taken:
        raise ConfigError(f"{path}: variants: {taken[0]} is a preset, give the variant another name")
    return made
