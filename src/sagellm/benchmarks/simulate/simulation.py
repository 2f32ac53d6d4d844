"""One simulation from its parts: a workload, a preset, hardware, instances; and what came out of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sagellm.benchmarks.simulate.cluster import Cluster, ServedRequest
from sagellm.benchmarks.simulate.course import Course
from sagellm.benchmarks.simulate.instance import Instance, InstanceClock, Role
from sagellm.benchmarks.simulate.metrics import SLOPair, figures
from sagellm.benchmarks.simulate.network import Network
from sagellm.benchmarks.simulate.routers import make_router
from sagellm.benchmarks.simulate.workload import RequestMaker, SimulatedWorkload
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.types import SLO


class Machine(Protocol):
    """Hardware as a simulation needs it: `hardware.Hardware`, or a stand-in."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_devices(self) -> int:
        """Of one instance."""
        ...

    @property
    def network_bytes_per_s(self) -> float: ...

    def max_model_len(self, config: Config) -> int: ...

    def num_blocks(self, config: Config) -> int: ...

    def backend(self, clock: InstanceClock, config: Config) -> InferenceBackend: ...

    def described(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """How many instances, and what joins them.

    `disaggregate`: (prefill, decode) instances, instead of `instances` that do both. `network_bytes_per_s`:
    None is what the device has.
    """

    instances: int = 1
    disaggregate: tuple[int, int] | None = None
    router: str = "prefix-aware"
    network_bytes_per_s: float | None = None
    network_latency_s: float = 1e-3

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigError(f"at least one instance, got {self.instances}")
        if self.disaggregate is not None and min(self.disaggregate) < 1:
            raise ConfigError(
                "disaggregation needs at least one instance on each side, as in 1:1, got "
                f"{self.disaggregate[0]}:{self.disaggregate[1]}"
            )
        make_router(self.router)
        self.network(1.0)

    def network(self, bytes_per_s: float) -> Network:
        """Between the instances; `bytes_per_s`: what the device has."""
        given = self.network_bytes_per_s
        return Network(bytes_per_s if given is None else given, self.network_latency_s)

    @property
    def roles(self) -> dict[str, Role]:
        """Every instance's role, by name."""
        if self.disaggregate is None:
            return {f"instance-{number + 1}": "both" for number in range(self.instances)}
        prefill, decode = self.disaggregate
        made: dict[str, Role] = {f"prefill-{number + 1}": "prefill" for number in range(prefill)}
        return made | {f"decode-{number + 1}": "decode" for number in range(decode)}


def parse_disaggregate(text: str) -> tuple[int, int]:
    """`1:2`: one instance for prefill, two for decode. Raises `ConfigError` for anything else."""
    prefill, colon, decode = text.partition(":")
    if not (colon and prefill.isascii() and prefill.isdigit() and decode.isascii() and decode.isdigit()):
        raise ConfigError(f"disaggregate {text!r}: write PREFILL:DECODE instances, as in 1:1")
    return int(prefill), int(decode)


@dataclass(frozen=True, slots=True)
class ServiceGoals:
    """What results are measured by: SLO pairs (requests carry the first as theirs), and a price."""

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
    """One simulation's outcome. `wall_s`, `cpu_s`: what it took; they alone differ from run to run."""

    preset: str
    config: Config
    workload: SimulatedWorkload
    served: Sequence[ServedRequest]
    courses: Mapping[str, Course]
    figures: dict[str, Any]
    wall_s: float
    cpu_s: float
    load: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def requests_per_wall_s(self) -> float:
        return len(self.served) / self.wall_s if self.wall_s else math.inf


def build_cluster(config: Config, machine: Machine, layout: ClusterLayout) -> Cluster:
    """Fresh instances with empty caches, and fresh routers."""
    instances = [Instance(name, config, machine.backend, role) for name, role in layout.roles.items()]
    network = layout.network(machine.network_bytes_per_s)
    return Cluster(instances, make_router(layout.router), make_router(layout.router), network)


def simulate(
    preset: str,
    config: Config,
    workload: SimulatedWorkload,
    machine: Machine,
    layout: ClusterLayout | None = None,
    goals: ServiceGoals | None = None,
) -> SimulationResult:
    """Serve the workload once; the same arguments give the same result, bit for bit, but for the time that
    it took."""
    layout, goals = layout or ClusterLayout(), goals or ServiceGoals()
    cluster = build_cluster(config, machine, layout)
    maker = RequestMaker(workload, machine.vocab_size, goals.request_slo)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    served = cluster.run(workload, maker, goals.until_s)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    price = None if goals.price_per_hour is None else goals.price_per_hour * machine.num_devices
    made = figures(workload, served, cluster.instances, goals.slos, price)
    courses = {one.name: one.course for one in cluster.instances}
    for course in courses.values():
        course.detach()
    return SimulationResult(preset, config, workload, served, courses, made, wall_s, cpu_s)
