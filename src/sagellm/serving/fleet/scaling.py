"""`FleetScaling`: carries out, or logs, what the autoscaler of a front decides."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from sagellm.control_plane.autoscaling import (
    Autoscaler,
    GroupReport,
    ScalingAction,
    ScalingDecision,
    ScalingGroup,
    ScalingOptions,
)
from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.control_plane.fleet_instances import group_of
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError, SageError
from sagellm.core.fleet_config import FleetConfig

log = logging.getLogger("sagellm.fleet")
INTERVAL_S = 1.0
WINDOW_S = 30.0
"""Demand and attainment are of so many seconds."""


@dataclass(frozen=True, slots=True)
class FleetCounts:
    """What a fleet has counted until now, and its groups."""

    groups: dict[str, GroupReport]
    num_prompt_tokens: int
    num_with_slo: int
    num_slo_met: int


class FleetOperations(Protocol):
    """What scaling needs of the front."""

    async def counts(self) -> FleetCounts: ...

    async def resize(self, group: str, count: int) -> None: ...

    async def remove(self, name: str) -> None:
        """Drain an instance and end it."""


class FleetScaling:
    """The autoscaler of a front. `turn` once, or `run` until it is cancelled.

    Raises `ConfigError` for `fleet.autoscaling_options` that cannot be.
    """

    def __init__(
        self, fleet: FleetConfig, operations: FleetOperations, clock: Clock, *, dry_run: bool
    ) -> None:
        groups = [
            ScalingGroup(name, group.type, group.fewest, group.max_count)
            for name, group in fleet.groups.items()
            if group.max_count is not None
        ]
        try:
            options = ScalingOptions(**fleet.autoscaling_options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"fleet.autoscaling_options: {error}") from None
        self._scaler = Autoscaler(groups, clock, options)
        self._operations, self._clock, self._dry_run = operations, clock, dry_run
        self._window: deque[tuple[float, FleetCounts]] = deque()
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """An operation that fails is logged, and decided anew a little later."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.turn()
            except SageError as error:
                log.warning("autoscaling: %s", error)

    async def turn(self) -> list[ScalingDecision]:
        """Decide once and carry it out. Returns when the instances are there, or drained."""
        counts = await self._operations.counts()
        reports = self._with_rates(counts)
        decisions = self._scaler.decide(reports, dry_run=self._dry_run)
        for decision in decisions:
            self._say(decision)
            if self._dry_run:
                continue
            if decision.action is ScalingAction.ADD:
                size = len(reports[decision.group].instances)
                await self._operations.resize(decision.group, size + decision.count)
            elif decision.action is ScalingAction.DRAIN:
                await self._operations.remove(decision.instance_id)
        return decisions

    def _with_rates(self, now: FleetCounts) -> dict[str, GroupReport]:
        """The reports with demand and attainment since the oldest counts of the window."""
        now_s = self._clock.now()
        while self._window and self._window[0][0] < now_s - WINDOW_S:
            self._window.popleft()
        began_s, before = self._window[0] if self._window else (now_s, now)
        self._window.append((now_s, now))
        spent_s = now_s - began_s
        demand = (now.num_prompt_tokens - before.num_prompt_tokens) / spent_s if spent_s else 0.0
        with_slo = now.num_with_slo - before.num_with_slo
        attainment = (now.num_slo_met - before.num_slo_met) / with_slo if with_slo else None
        return {
            name: GroupReport(report.instances, 0, report.draining, attainment, demand)
            for name, report in now.groups.items()
        }

    def _say(self, decision: ScalingDecision) -> None:
        """Log a decision that changes something; in a dry run, once."""
        is_news = self._said.get(decision.group) != decision.action.value
        self._said[decision.group] = decision.action.value
        if decision.action is not ScalingAction.KEEP and (is_news or not self._dry_run):
            log.info("autoscaling%s: %s", ", dry run" if self._dry_run else "", decision)


def fleet_counts(engine: FleetEngine, fleet: FleetConfig) -> FleetCounts:
    """The load of each group's instances that are there; for the engine's thread."""
    groups = {}
    for name in fleet.groups:
        own = {each: m for each, m in engine.members.items() if group_of(each, fleet) == name}
        loads = [member.load for member in own.values() if member.is_ready and member.load is not None]
        draining = frozenset(each for each, member in own.items() if member.draining)
        groups[name] = GroupReport(loads, draining=draining)
    return FleetCounts(groups, engine.num_prompt_tokens, engine.num_with_slo, engine.num_slo_met)
