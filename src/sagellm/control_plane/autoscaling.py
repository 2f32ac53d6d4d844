"""`Autoscaler`: how many instances each group of a fleet should have.

Load is measured in instances: how many of them, each at its target, the work would keep busy. It is the
rule of Kubernetes' HorizontalPodAutoscaler, desired = ceil(instances x metric / target), with figures of the
role: a prompt's wait for prefill, batch rows and KV for decode.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sagellm.control_plane.instance_types import may_leave, serves_answers
from sagellm.core.clock import Clock
from sagellm.core.protocols.router import ExecutionInstance, InstanceType


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """Targets and times. `fleet.autoscaling_options` sets them by name.

    `utilization`, `kv_cache_usage`, `rows`: shares that an instance is at when it is well used (`rows` of
    `max_num_seqs`). `queue_s`: seconds of prompts that wait per instance. `attainment`: share of requests
    that should meet their SLO. A group grows when load has been above its size for `up_after_s`, and
    shrinks when one instance fewer would have been below `down_margin` for `down_after_s`. `cooldown_s`:
    between two changes of a group; new instances need time to show. `max_growth`: factor at once.
    """

    utilization: float = 0.8
    kv_cache_usage: float = 0.8
    rows: float = 0.8
    queue_s: float = 1.0
    attainment: float = 0.95
    up_after_s: float = 5.0
    down_after_s: float = 120.0
    down_margin: float = 0.8
    cooldown_s: float = 30.0
    max_growth: float = 2.0

    def __post_init__(self) -> None:
        shares = (self.utilization, self.kv_cache_usage, self.rows, self.attainment, self.down_margin)
        if not 0 < min(shares) <= max(shares) <= 1 or self.queue_s <= 0:
            raise ValueError("autoscaling: shares lie between 0 and 1, and queue_s is positive")
        if min(self.up_after_s, self.down_after_s, self.cooldown_s) < 0 or self.max_growth <= 1:
            raise ValueError("autoscaling: times are not negative, and max_growth is above 1")

    @property
    def reaction_s(self) -> float:
        """A lasting step of load is answered within this, unless a cooldown runs."""
        return self.up_after_s


@dataclass(frozen=True, slots=True)
class ScalingGroup:
    """A group that may be scaled; `fewest` and `most` instances of it."""

    name: str
    type: InstanceType
    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group now, by the load reports of its instances.

    `attainment`: the share of its recent requests that met their SLO; None: no request had one.
    `tokens_per_s`: the demand, as tokens of the prompts that arrive."""

    instances: Sequence[ExecutionInstance]
    num_starting: int = 0
    draining: Collection[str] = ()
    attainment: float | None = None
    tokens_per_s: float = 0.0


class ScalingAction(Enum):
    KEEP = "keep"
    ADD = "add"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What to do with a group.

    Start `count` instances, or drain the named one, which then ends."""

    group: str
    action: ScalingAction
    reason: str
    count: int = 0
    instance_id: str = ""

    def __str__(self) -> str:
        what = {ScalingAction.ADD: f"add {self.count}", ScalingAction.DRAIN: f"drain {self.instance_id}"}
        return f"{self.group}: {what.get(self.action, 'keep')}: {self.reason}"


@dataclass(slots=True)
class _History:
    """Since when a group has been too small or too large.

    `too_small`: by size, the least demand for which it was. Load does not tell demand: a queue that is gone
    after a group has grown would come back if it shrank again.
    """

    short_since_s: float | None = None
    spare_since_s: float | None = None
    changed_s: float = -math.inf
    too_small: dict[int, float] = field(default_factory=dict)

    def fits(self, size: int, demand: float) -> bool:
        """Whether so many instances have not been too few for as much, or nearly."""
        return all(demand < known for other, known in self.too_small.items() if other >= size)


class Autoscaler:
    """Decides for each group by its load over time; carries nothing out. Shrinks by one, by drain."""

    def __init__(
        self, groups: Sequence[ScalingGroup], clock: Clock, options: ScalingOptions | None = None
    ) -> None:
        self._groups, self._clock = {group.name: group for group in groups}, clock
        self.options = options or ScalingOptions()
        self._history = {name: _History() for name in self._groups}

    def decide(self, reports: Mapping[str, GroupReport], *, dry_run: bool = False) -> list[ScalingDecision]:
        """A decision for each group. A dry run does not count as a change, so cooldown does not begin."""
        everywhere = [each for report in reports.values() for each in _serving(report)]
        found = []
        for name, group in self._groups.items():
            decision = self._decide(group, reports.get(name, GroupReport(())), everywhere)
            if decision.action is not ScalingAction.KEEP and not dry_run:
                self._changed(name, decision, reports.get(name, GroupReport(())))
            everywhere = [each for each in everywhere if each.instance_id != decision.instance_id]
            found.append(decision)
        return found

    def _decide(
        self, group: ScalingGroup, report: GroupReport, everywhere: Sequence[ExecutionInstance]
    ) -> ScalingDecision:
        options, history, now_s = self.options, self._history[group.name], self._clock.now()
        serving = _serving(report)
        size = len(serving) + report.num_starting
        if size < group.fewest:
            reason = f"{size} of at least {group.fewest} instances"
            return ScalingDecision(group.name, ScalingAction.ADD, reason, group.fewest - size)
        load, why = self.load(group.type, serving)
        misses = report.attainment is not None and report.attainment < options.attainment
        wanted = math.ceil(load - 1e-9)
        if misses and report.num_starting == 0:
            wanted = max(wanted, size + 1)
            why = f"{report.attainment:.0%} of requests meet their SLO, {why}"
        is_spare = not misses and load <= options.down_margin * (size - 1)
        is_spare = is_spare and history.fits(size - 1, report.tokens_per_s / options.down_margin)
        history.short_since_s = _since(history.short_since_s, now_s, holds=wanted > size)
        history.spare_since_s = _since(history.spare_since_s, now_s, holds=is_spare)
        shown = f"load {load:.2f} of {size} instances ({why})"
        if wanted > size:
            return self._grow(group, size, wanted, shown)
        if is_spare:
            return self._shrink(group, size, serving, everywhere, shown)
        return ScalingDecision(group.name, ScalingAction.KEEP, shown)

    def _changed(self, name: str, decision: ScalingDecision, report: GroupReport) -> None:
        history = self._history[name]
        if decision.action is ScalingAction.ADD and report.tokens_per_s > 0:
            size = len(_serving(report)) + report.num_starting
            known = history.too_small.get(size, math.inf)
            history.too_small[size] = min(known, report.tokens_per_s)
        self._history[name] = _History(changed_s=self._clock.now(), too_small=history.too_small)

    def _grow(self, group: ScalingGroup, size: int, wanted: int, shown: str) -> ScalingDecision:
        history, options = self._history[group.name], self.options
        if size >= group.most:
            return ScalingDecision(group.name, ScalingAction.KEEP, f"{shown}, at most {group.most}")
        waiting = self._waiting(history, history.short_since_s, options.up_after_s)
        if waiting:
            return ScalingDecision(group.name, ScalingAction.KEEP, f"{shown}, {waiting}")
        target = min(wanted, group.most, max(size + 1, int(size * options.max_growth)))
        return ScalingDecision(group.name, ScalingAction.ADD, shown, target - size)

    def _shrink(
        self,
        group: ScalingGroup,
        size: int,
        serving: Sequence[ExecutionInstance],
        everywhere: Sequence[ExecutionInstance],
        shown: str,
    ) -> ScalingDecision:
        history, options = self._history[group.name], self.options
        if size <= group.fewest:
            return ScalingDecision(group.name, ScalingAction.KEEP, f"{shown}, at least {group.fewest}")
        waiting = self._waiting(history, history.spare_since_s, options.down_after_s)
        if waiting:
            return ScalingDecision(group.name, ScalingAction.KEEP, f"{shown}, {waiting}")
        # of equally idle ones the last, so that numbers stay small
        idle = min(reversed(serving), key=lambda each: (each.num_requests, each.kv_cache_usage), default=None)
        if idle is None or not may_leave(everywhere, idle.instance_id):
            return ScalingDecision(
                group.name, ScalingAction.KEEP, f"{shown}, no other instance serves requests"
            )
        return ScalingDecision(group.name, ScalingAction.DRAIN, shown, instance_id=idle.instance_id)

    def _waiting(self, history: _History, since_s: float | None, after_s: float) -> str:
        now_s = self._clock.now()
        lasted_s = now_s - since_s if since_s is not None else 0.0
        if lasted_s < after_s:
            return f"for {lasted_s:.0f} of {after_s:.0f} s"
        rest_s = history.changed_s + self.options.cooldown_s - now_s
        return f"cooldown for {rest_s:.0f} s more" if rest_s > 0 else ""

    def load(self, kind: InstanceType, instances: Sequence[ExecutionInstance]) -> tuple[float, str]:
        """How many instances the work would keep at their targets, and by which figure."""
        options = self.options
        busy = sum(each.utilization for each in instances) / options.utilization
        queue = sum(each.num_queued_tokens * each.prefill_token_s for each in instances) / options.queue_s
        rows = sum(_rows(each) for each in instances) / options.rows
        memory = sum(each.kv_cache_usage for each in instances) / options.kv_cache_usage
        prompts = {"queued prompts": queue}
        answers = {"batch rows": rows, "KV": memory}
        # a step that decodes one row counts as busy, so utilization says something of prefill alone
        if not serves_answers(kind):
            figures = {"utilization": busy, **prompts}
        else:
            figures = answers if kind is InstanceType.DECODING else prompts | answers
        name = max(figures, key=lambda each: figures[each])
        return figures[name], name


def _serving(report: GroupReport) -> list[ExecutionInstance]:
    return [each for each in report.instances if each.instance_id not in report.draining]


def _rows(instance: ExecutionInstance) -> float:
    """Requests, waiting ones too, as a share of those that can run together."""
    return instance.num_requests / instance.max_num_seqs if instance.max_num_seqs else 0.0


def _since(before_s: float | None, now_s: float, *, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s
