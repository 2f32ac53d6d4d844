"""A simulated cluster and a real fleet place the same requests on the same instances, by a scripted clock."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from sagellm.benchmarks.simulate.control import ControlSetting
from sagellm.benchmarks.simulate.simulation import ClusterLayout, build_cluster
from sagellm.benchmarks.simulate.workload import RequestMaker, WorkloadSpec, output_tokens, workload
from sagellm.benchmarks.traces import Trace
from sagellm.control_plane.fleet.client import Instances
from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.control_plane.fleet.instance_server import InstanceServer
from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.router import instance_parts, make_router
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.blocks import cdiv
from sagellm.core.clock import Clock, ManualClock
from sagellm.core.events import EventBus
from sagellm.core.protocols.router import (
    CachedPrefix,
    ExecutionInstance,
    InstanceType,
    Placement,
    RequestMetadata,
)
from sagellm.core.types import SLO
from sagellm.engines.build import build_engine
from tests.benchmarks.simulate.stand_in import VOCAB, StandIn, config, request, trace

APART_S = 100.0
NAMES = ("instance-1", "instance-2", "instance-3")
COST = f"{__name__}:CostOfEqualSpeeds"
ADAPTIVE = f"{__name__}:AdaptiveOfEqualSpeeds"
KEY = FleetKey("a key of sixteen or more")


class CostOfEqualSpeeds:
    """The router `cost`, with given speeds: a fleet measures, a simulator is told."""

    reads_cache = True

    def __init__(self, clock: Clock) -> None:
        self._router = make_router("cost", clock)

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        equal = [replace(each, prefill_token_s=0.001, step_s=0.01) for each in instances]
        return self._router.place(replace(request, kv_cache_size_tokens=0), equal, cached)

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        """That a request has ended, and not how fast."""
        self._router.observe(instance_id, {})


class AdaptiveOfEqualSpeeds(CostOfEqualSpeeds):
    """Hybrid instances, and a goal for each token. Answers count as tokens, not by how fast they were."""

    chosen: ClassVar[list[Placement]] = []

    def __init__(self, clock: Clock) -> None:
        adaptive = {"name": "adaptive", "window": 64, "chunk": 100, "tokens": 8}
        self._router = make_router({"name": "cost", "separation": adaptive}, clock)

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        hybrid = [replace(each, kind=InstanceType.HYBRID) for each in instances]
        placement = super().place(replace(request, slo=SLO(tpot_s=0.015)), hybrid, cached)
        self.chosen.append(placement)
        return placement

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        known = {"tpot": 0.01, "decode": 0.1} if "tpot" in latencies_s else {}
        self._router.observe(instance_id, known)


def bursts(seed: int, count: int = 8) -> Trace:
    """Bursts of requests, so far apart that each finds idle instances; many share prefixes."""
    draw, made = random.Random(seed), []
    for burst in range(count):
        for _ in range(draw.randint(1, 4)):
            length = draw.randint(8, 200)
            ids = [draw.randint(0, 2) * 1000 + place for place in range(cdiv(length, 8))]
            made.append(request(burst * APART_S, length, draw.randint(1, 20), ids))
    return trace(*made)


def simulated(router: str, made: Trace) -> list[str]:
    chosen, machine = config(), StandIn()
    control = ControlSetting(router, report_s=APART_S / 2)
    cluster = build_cluster(chosen, machine, ClusterLayout(3, router=router, report_s=control.report_s))
    work = workload(made, WorkloadSpec(), machine.max_model_len(chosen))
    return [each.prefill for each in cluster.run(work, RequestMaker(work, VOCAB))]


class RealFleet:
    """Three instances over sockets, whose engines and front have clocks that the test sets."""

    def __init__(self, folder: Path, router: str) -> None:
        self.clock, self.clocks = ManualClock(), {name: ManualClock() for name in NAMES}
        self.servers = {name: self._server(folder, name) for name in NAMES}
        self.instances = Instances(KEY, self.clock, lease_s=1e9)
        made = make_router(router, self.clock)
        prefixes = PrefixIndex(self.clock)
        self.front = FleetEngine(self.instances, made, prefixes, lambda *_: None, clock=self.clock)
        for name in NAMES:
            self.front.know(self.instances.add(name, f"ipc://{folder}/{name}"))
        self._turn_until_idle()

    def _server(self, folder: Path, name: str) -> InstanceServer:
        clock, events, chosen = self.clocks[name], EventBus(), config()
        engine = build_engine(chosen, StandIn().backend(clock, chosen), clock=clock, events=events)
        return InstanceServer(
            name, engine, f"ipc://{folder}/{name}", KEY, max_model_len=4000, events=events, report_s=0.0,
            clock=clock,
        )  # fmt: skip

    def place(self, made: Trace) -> list[str]:
        chosen, machine = config(), StandIn()
        work = workload(made, WorkloadSpec(), machine.max_model_len(chosen))
        maker, placed = RequestMaker(work, VOCAB), {}
        now_s = -1.0
        for time_s, number in sorted(work.first()):
            if time_s != now_s:
                now_s = time_s
                self._turn_until_idle()
                for clock in (self.clock, *self.clocks.values()):
                    clock.advance_to(now_s + 1e-6)
                self._turn_until_idle()
            self.front.add(maker.make(number, now_s, output_tokens(work.requests[number])))
            placement = self.front.requests.get(str(number))
            assert placement is not None
            assert placement.placement is not None
            placed[number] = placement.placement.prefill
        self._turn_until_idle()
        return [placed[number] for number in sorted(placed)]

    def _turn_until_idle(self) -> None:
        """All requests have ended, and every instance has reported that."""
        quiet = 0
        while quiet < 3:
            for server in self.servers.values():
                server.wake()
                server.turn()
            self.front.wake()
            moved = bool(self.front.step()) or bool(len(self.front.requests))
            loads = [member.load for member in self.front.members.values()]
            reported = all(load is not None and load.reported_s >= self.clock.now() for load in loads)
            quiet = quiet + 1 if reported and not moved else 0

    def close(self) -> None:
        self.front.close()
        for server in self.servers.values():
            server.close()


@pytest.mark.parametrize("router", [COST, "prefix_aware", "llm_d", "least_loaded", "round_robin"])
@pytest.mark.parametrize("seed", range(3))
def test_decisions_are_the_same(
    tmp_path: Path, router: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bursts(seed)
    fleet = RealFleet(tmp_path, router)
    try:
        found = fleet.place(made)
    finally:
        fleet.close()
    assert found == simulated(router, made)


def test_parts_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`adaptive` decides the same until it separates. Then the caches of this fleet differ from the
    simulated ones, since its instances exchange nothing."""
    monkeypatch.setattr(instance_parts, "MAX_AGE_S", 1e6)
    made, chosen = bursts(0, 60), AdaptiveOfEqualSpeeds.chosen
    fleet = RealFleet(tmp_path, ADAPTIVE)
    chosen.clear()
    try:
        fleet.place(made)
    finally:
        fleet.close()
    real = [(each.prefill, each.decode) for each in chosen]
    chosen.clear()
    simulated(ADAPTIVE, made)
    count = 1 + [prefill != decode for prefill, decode in real].index(True)
    assert count > 32
    assert real[:count] == [(each.prefill, each.decode) for each in chosen[:count]]
