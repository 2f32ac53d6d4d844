"""The control plane of a simulated cluster, on the simulation's clock.

Router, prefix index, admission and queues are those of `control_plane`. What they know may be old, as in a
fleet: instances report every `report_s` seconds, and KV events take `event_delay_s`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sagellm.benchmarks.simulate.instance import Instance
from sagellm.control_plane.admission import ADMIT, AdmissionController, Decision
from sagellm.control_plane.queues import PhaseQueue, QueuePhase
from sagellm.control_plane.rebalancing import RebalancingOptions
from sagellm.control_plane.replication import PrefixCopy, Replicator
from sagellm.control_plane.router import make_router
from sagellm.control_plane.router.prefix_index import KVEventItem, PrefixIndex
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.events import BlocksRemoved, BlocksStored, IndexCleared
from sagellm.core.protocols.router import (
    NOT_CACHED,
    CachedPrefix,
    ExecutionInstance,
    Placement,
    RequestMetadata,
)
from sagellm.core.types import Namespace, Request


@dataclass(frozen=True, slots=True)
class ControlSetting:
    """A router and an admission strategy, by name or with options.

    `admission` None accepts everything. `replication`: options by which hot prefixes are copied; None: none
    are. `report_s`: time between two reports of an instance; 0: the router
    sees the present state.
    """

    router: str | Mapping[str, Any] = "prefix_aware"
    admission: str | Mapping[str, Any] | None = None
    report_s: float = 0.0
    event_delay_s: float = 0.0
    replication: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, value in (("report_s", self.report_s), ("event_delay_s", self.event_delay_s)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is a number of seconds from 0 on, got {value}")
        make_router(self.router, ManualClock())
        if self.admission is not None:
            AdmissionController(self.admission)

    @property
    def router_name(self) -> str:
        name = self.router if isinstance(self.router, str) else str(self.router["name"])
        return name.replace("-", "_")


class SimulatedControlPlane:
    """What a front does for the instances of one cluster. `begin` must be called once, before requests."""

    def __init__(
        self, setting: ControlSetting, instances: Sequence[Instance], bytes_per_s: float = 1e9
    ) -> None:
        """`bytes_per_s`: of the network between the instances."""
        self.clock = ManualClock()
        self.router = make_router(setting.router, self.clock)
        self.admission = None
        if setting.admission is not None:
            self.admission = AdmissionController(setting.admission, clock=self.clock)
        self.prefill_queue = PhaseQueue(
            QueuePhase.PREFILL, self._order, max_waiting=1 << 30, clock=self.clock
        )
        self.index = PrefixIndex(self.clock)
        self.replicator = None
        if setting.replication is not None:
            size = instances[0].engine.backend.get_kv_schema().bytes_per_token
            link = {"bytes_per_token": size, "bytes_per_s": bytes_per_s}
            options = RebalancingOptions(**{**link, **setting.replication})
            self.replicator = Replicator(self.index, options, self.clock)
        self._setting = setting
        self._instances = list(instances)
        self._names = [instance.name for instance in instances]
        self._reports: dict[str, ExecutionInstance] = {}
        self._num_expected: Callable[[Instance], int] = lambda instance: 0
        self._coming: list[tuple[float, int, str, KVEventItem]] = []  # a heap: when, number, instance, event
        self._num_events = 0

    def begin(self, num_expected: Callable[[Instance], int]) -> None:
        """Lets the instances' events reach the index. `num_expected(instance)`: requests that the front knows
        to come to an instance."""
        self._num_expected = num_expected
        if not self.router.reads_cache or len(self._instances) == 1:
            return  # a publisher without readers does not even hash its blocks
        for instance in self._instances:
            self.index.join(instance.name)
            for kind in (BlocksStored, BlocksRemoved, IndexCleared):
                instance.events.subscribe(kind, partial(self._on_event, instance))

    def _on_event(self, instance: Instance, event: KVEventItem) -> None:
        """Events are on the way for `event_delay_s`. They are kept until a look-up needs them."""
        if not self._setting.event_delay_s:
            self.index.apply(instance.name, event)
        else:
            due_s = instance.clock.now() + self._setting.event_delay_s
            heapq.heappush(self._coming, (due_s, self._num_events, instance.name, event))
            self._num_events += 1

    def _order(self, request: RequestMetadata, arrived_s: float) -> float:
        if self.admission is None:
            return arrived_s
        rates = [report.prefill_token_s for report in self._reports.values()]
        return self.admission.strategy.order(
            request, arrived_s, len(request.tokens) * min(rates, default=0.0)
        )

    # -- decisions

    def reports(self, now_s: float) -> list[ExecutionInstance]:
        """The last report of each instance; those that are due are made now."""
        every_s, made = self._setting.report_s, self._reports
        for instance in self._instances:
            last = made.get(instance.name)
            if last is None or not every_s or now_s >= last.reported_s + every_s:
                # A report of the present state is later than what was placed at the same moment.
                at_s = now_s if every_s else math.nextafter(now_s, math.inf)
                made[instance.name] = instance.report(at_s, self._num_expected(instance))
        return list(made.values())

    def cached(self, request: Request, now_s: float) -> list[CachedPrefix]:
        """What each instance has of a prompt, by the events that came before `now_s`."""
        if not self.router.reads_cache or len(self._instances) == 1:
            return [NOT_CACHED] * len(self._instances)
        while self._coming and self._coming[0][0] < now_s:
            _, _, name, event = heapq.heappop(self._coming)
            self.index.apply(name, event)
        namespace = self._instances[0].engine.kv.namespace_of(request.namespace)
        return self.index.lookup(request.tokens, namespace, self._names)

    def decide(self, request: Request, now_s: float, num_waiting: int) -> Decision:
        """Whether a request may be placed."""
        if self.admission is None:
            return ADMIT
        reports = self.reports(now_s)
        most = max(prefix.num_device_tokens for prefix in self.cached(request, now_s))
        return self.admission.decide(metadata(request, now_s), reports, num_waiting, most)

    def place(self, request: Request, now_s: float) -> tuple[Placement, list[CachedPrefix]]:
        """A placement, and what the index knows each instance to have cached."""
        cached = self.cached(request, now_s)
        if len(self._instances) == 1:
            return Placement(self._names[0], self._names[0], "the only one"), cached
        placement = self.router.place(metadata(request, now_s), self.reports(now_s), cached)
        if self.replicator is not None:
            indexed = self._instances[0].engine.kv.namespace_of(request.namespace)
            self.replicator.count(request.tokens, request.namespace, indexed)
        return placement, cached

    def copies(self, now_s: float) -> list[PrefixCopy]:
        """Prefixes to copy to other instances now."""
        if self.replicator is None or not self.replicator.is_due():
            return []
        return self.replicator.decide(self.reports(now_s))

    def finished(self, instances: Iterable[str], latencies_s: Mapping[str, float | None]) -> None:
        """A request has ended. `instances`: where its prompt was computed, and its answer."""
        known = {name: value for name, value in latencies_s.items() if value is not None}
        prefill, *decode = dict.fromkeys(instances)
        if decode:
            self.router.observe(prefill, {name: value for name, value in known.items() if name == "ttft"})
            self.router.observe(decode[0], {name: value for name, value in known.items() if name != "ttft"})
        else:
            self.router.observe(prefill, known)


def metadata(request: Request, now_s: float) -> RequestMetadata:
    """A request as the control plane sees it. How long a simulated answer will be, it does not know."""
    goal_s = request.slo.ttft_s
    return RequestMetadata(
        request.request_id,
        request.tokens,
        Namespace(request.namespace.tenant, "", request.namespace.adapter),
        slo=request.slo,
        slo_slack_s=None if goal_s is None else goal_s - (now_s - request.arrival_s),
        priority=request.priority,
        session_id=request.session_id,
    )
