"""Runs one simulation: a workload and a preset on hardware and instances."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sagellm.benchmarks.simulate.cluster import Cluster, ServedRequest
from sagellm.benchmarks.simulate.control import ControlSetting
from sagellm.benchmarks.simulate.hardware import Hardware
from sagellm.benchmarks.simulate.instance import Instance, Role, StepLog
from sagellm.benchmarks.simulate.metrics import SLOPair, figures
from sagellm.benchmarks.simulate.network import Links
from sagellm.benchmarks.simulate.workload import RequestMaker, SimulatedWorkload
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError
from sagellm.core.types import SLO


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """The number of instances, their control plane, and the network between them. `disaggregate`: (prefill,
    decode) instances, instead of `instances` that do both; `hybrid`: these may do either, as the router
    separates requests. `network_bytes_per_s`: None takes the device's. `replication`: options by which hot
    prefixes are copied to cold instances; None: none are."""

    instances: int = 1
    disaggregate: tuple[int, int] | None = None
    router: str | Mapping[str, Any] = "prefix_aware"
    admission: str | Mapping[str, Any] | None = None
    hybrid: bool = False
    report_s: float = 0.0
    event_delay_s: float = 0.0
    network_bytes_per_s: float | None = None
    network_latency_s: float = 1e-3
    replication: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigError(f"at least one instance, got {self.instances}")
        if self.disaggregate is not None and min(self.disaggregate) < 1:
            raise ConfigError(
                "disaggregation needs at least one instance on each side, as in 1:1, got "
                f"{self.disaggregate[0]}:{self.disaggregate[1]}"
            )
        if self.hybrid and self.disaggregate is not None:
            raise ConfigError("hybrid instances have no fixed part: leave out disaggregate, or hybrid")
        _ = self.control, self.links(1.0)  # raises for a value out of range

    @property
    def control(self) -> ControlSetting:
        return ControlSetting(
            self.router, self.admission, self.report_s, self.event_delay_s, self.replication
        )

    def links(self, bytes_per_s: float) -> Links:
        """New links between the instances; `bytes_per_s` is the device's."""
        given = self.network_bytes_per_s
        return Links(bytes_per_s if given is None else given, self.network_latency_s)

    @property
    def roles(self) -> dict[str, Role]:
        """Every instance's role, by name."""
        if self.disaggregate is None:
            role: Role = "hybrid" if self.hybrid else "both"
            return {f"instance-{number + 1}": role for number in range(self.instances)}
        prefill, decode = self.disaggregate
        made: dict[str, Role] = {f"prefill-{number + 1}": "prefill" for number in range(prefill)}
        return made | {f"decode-{number + 1}": "decode" for number in range(decode)}


def parse_disaggregate(text: str) -> tuple[int, int]:
    """Parses `1:2`: one instance for prefill, two for decode. Raises `ConfigError` for other texts."""
    prefill, colon, decode = text.partition(":")
    if not (colon and prefill.isascii() and prefill.isdigit() and decode.isascii() and decode.isdigit()):
        raise ConfigError(f"disaggregate {text!r}: write PREFILL:DECODE instances, as in 1:1")
    return int(prefill), int(decode)


@dataclass(frozen=True, slots=True)
class ServiceGoals:
    """SLO pairs and a price by which results are measured. Requests carry the first pair."""

    slos: tuple[SLOPair, ...] = (SLOPair(1, 100), SLOPair(10, 30))
    price_per_hour: float | None = None
    until_s: float = math.inf

    def __post_init__(self) -> None:
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < math.inf:
            raise ConfigError(f"a price per device hour is 0 or more, got {self.price_per_hour}")
        if not self.until_s > 0:
            raise ConfigError(f"a simulation lasts more than 0 seconds, got {self.until_s}")

    @property
    def request_slo(self) -> SLO:
        if not self.slos:
            return SLO()
        return SLO(self.slos[0].ttft_s, self.slos[0].tpot_ms / 1000)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The outcome of one simulation. `wall_s` and `cpu_s` are the cost of the simulation itself; only they
    differ from run to run."""

    preset: str
    config: Config
    workload: SimulatedWorkload
    served: Sequence[ServedRequest]
    step_logs: Mapping[str, StepLog]
    figures: dict[str, Any]
    wall_s: float
    cpu_s: float
    load: float | None = None

    @property
    def requests_per_wall_s(self) -> float:
        return len(self.served) / self.wall_s if self.wall_s else math.inf


def build_cluster(config: Config, machine: Hardware, layout: ClusterLayout) -> Cluster:
    """Returns new instances with empty caches, and a new control plane."""
    instances = [Instance(name, config, machine.backend, role) for name, role in layout.roles.items()]
    return Cluster(instances, layout.control, layout.links(machine.cost_model.device.network))


def simulate(
    preset: str,
    config: Config,
    workload: SimulatedWorkload,
    machine: Hardware,
    layout: ClusterLayout | None = None,
    goals: ServiceGoals | None = None,
) -> SimulationResult:
    """Serves the workload once. The same arguments give the same result, bit for bit, except for the times
    that the simulation itself took."""
    layout, goals = layout or ClusterLayout(), goals or ServiceGoals()
    cluster = build_cluster(config, machine, layout)
    maker = RequestMaker(workload, machine.cost_model.model.vocab_size, goals.request_slo)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    served = cluster.run(workload, maker, goals.until_s)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    price = None
    if goals.price_per_hour is not None:
        price = goals.price_per_hour * machine.cost_model.num_devices
    made = figures(workload, served, cluster.instances, goals.slos, price)
    step_logs = {instance.name: instance.step_log for instance in cluster.instances}
    return SimulationResult(preset, config, workload, served, step_logs, made, wall_s, cpu_s)
