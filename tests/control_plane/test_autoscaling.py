"""Decisions of the autoscaler on scripted loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sagellm.control_plane.autoscaling import (
    Autoscaler,
    GroupReport,
    ScalingAction,
    ScalingGroup,
    ScalingOptions,
)
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.router import ExecutionInstance, InstanceType

DECODE = ScalingGroup("decode", InstanceType.DECODING, 1, 8)
PREFILL = ScalingGroup("prefill", InstanceType.PREFILLING, 1, 8)


def decoders(rows: float, number: int) -> list[ExecutionInstance]:
    """Instances that share so many full batches of rows evenly."""
    each = rows / number if number else 0.0
    return [
        ExecutionInstance(
            f"decode-{i}", InstanceType.DECODING, num_running=round(1000 * each), max_num_seqs=1000
        )
        for i in range(number)
    ]


def prefillers(busy: float, queued_s: float, number: int) -> list[ExecutionInstance]:
    each = min(1.0, busy / number)
    return [
        ExecutionInstance(
            f"prefill-{i}", InstanceType.PREFILLING, utilization=each, prefill_token_s=1e-4,
            num_queued_tokens=round(queued_s / number * 1e4),
        )
        for i in range(number)
    ]  # fmt: skip


class ScriptedFleet:
    """A decode group whose load follows a script, and that does at once what it is told."""

    def __init__(
        self, load: Callable[[float], float], *, size: int = 1, options: ScalingOptions | None = None
    ) -> None:
        self.clock, self.load, self.size = ManualClock(), load, size
        self.scaler = Autoscaler([DECODE], self.clock, options)

    def run(self, seconds: float) -> Iterator[tuple[float, int]]:
        """Time and size after each change, asked every second."""
        until_s = self.clock.now() + seconds
        while self.clock.now() < until_s:
            rows = self.load(self.clock.now())
            report = GroupReport(decoders(min(rows, 2.0 * self.size), self.size), tokens_per_s=rows)
            [decision] = self.scaler.decide({"decode": report})
            if decision.action is ScalingAction.ADD:
                self.size += decision.count
            elif decision.action is ScalingAction.DRAIN:
                self.size -= 1
            if decision.action is not ScalingAction.KEEP:
                yield self.clock.now(), self.size
            self.clock.advance(1.0)


@pytest.mark.parametrize("load", [0.1 * step for step in range(1, 60)])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_constant_load_ends_in_one_size(load: float, size: int) -> None:
    """It may grow or shrink at first, but never first the one and then the other."""
    fleet = ScriptedFleet(lambda _: load, size=size)
    sizes = [size, *(after for _, after in fleet.run(3600))]
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))
    assert load / sizes[-1] <= 0.8 + 1e-3


def test_golden_numbers_of_a_step_up_and_down() -> None:
    fleet = ScriptedFleet(lambda now_s: 3.0 if 100 <= now_s < 1000 else 0.5)
    assert list(fleet.run(2000)) == [
        (105, 2), (135, 4),
        (1120, 3), (1241, 2), (1362, 1),
    ]  # fmt: skip


def test_a_step_is_answered_within_the_stated_time() -> None:
    options = ScalingOptions()
    fleet = ScriptedFleet(lambda now_s: 0.5 if now_s < 50 else 1.5)
    when_s, size = next(fleet.run(1000))
    assert size == 2
    assert when_s - 50 <= options.reaction_s + 1.0  # it is asked every second


def test_a_spike_changes_nothing() -> None:
    assert list(ScriptedFleet(lambda now_s: 5.0 if 10 <= now_s < 14 else 0.5).run(600)) == []


def test_a_queue_that_is_gone_after_growth_does_not_shrink_it_again() -> None:
    """One instance is overloaded, two are nearly idle: load alone would flap."""
    clock, size, changes = ManualClock(), 1, []
    scaler = Autoscaler([DECODE], clock)
    for _ in range(7200):
        rows = 3.0 if size == 1 else 0.4
        [decision] = scaler.decide({"decode": GroupReport(decoders(rows, size), tokens_per_s=500.0)})
        if decision.action is not ScalingAction.KEEP:
            size += decision.count if decision.action is ScalingAction.ADD else -1
            changes.append(size)
        clock.advance(1.0)
    assert changes == [2]
    for _ in range(300):
        [decision] = scaler.decide({"decode": GroupReport(decoders(0.4, 2), tokens_per_s=300.0)})
        if decision.action is ScalingAction.DRAIN:
            break
        clock.advance(1.0)
    assert decision.instance_id == "decode-1"  # the demand itself has fallen


def test_prefill_grows_by_its_queue_and_decode_does_not() -> None:
    clock = ManualClock()
    scaler = Autoscaler([PREFILL, DECODE], clock, ScalingOptions(up_after_s=0.0))
    prefill = GroupReport(prefillers(1.0, 2.5, 1))
    decode = GroupReport([ExecutionInstance("decode-0", InstanceType.DECODING, utilization=1.0)])
    first, second = scaler.decide({"prefill": prefill, "decode": decode})
    assert str(first) == "prefill: add 1: load 2.50 of 1 instances (queued prompts)"
    assert str(second) == "decode: keep: load 0.00 of 1 instances (batch rows)"


def test_missed_goals_add_an_instance_until_they_are_met() -> None:
    clock = ManualClock()
    scaler = Autoscaler([DECODE], clock, ScalingOptions(up_after_s=2.0, cooldown_s=10.0))
    size, attainment = 1, {1: 0.5, 2: 0.8, 3: 0.99}
    for _ in range(2000):
        report = GroupReport(decoders(0.3, size), attainment=attainment[size], tokens_per_s=50.0)
        [decision] = scaler.decide({"decode": report})
        size += decision.count
        assert decision.action is not ScalingAction.DRAIN  # it would miss them again
        clock.advance(1.0)
    assert size == 3


def test_bounds_starting_instances_and_the_least_busy_one() -> None:
    clock = ManualClock()
    scaler = Autoscaler([DECODE], clock, ScalingOptions(up_after_s=0.0, down_after_s=0.0))
    [decision] = scaler.decide({"decode": GroupReport(decoders(20.0, 8))})
    assert str(decision) == "decode: keep: load 25.00 of 8 instances (batch rows), at most 8"
    [decision] = scaler.decide({"decode": GroupReport(decoders(2.0, 2), num_starting=1)})
    assert decision.action is ScalingAction.KEEP
    busy = decoders(0.3, 3)
    busy[1] = ExecutionInstance("decode-1", InstanceType.DECODING, max_num_seqs=1000)
    [decision] = scaler.decide({"decode": GroupReport(busy, draining={"decode-0"})})
    assert str(decision) == "decode: drain decode-1: load 0.12 of 2 instances (batch rows)"


def test_fewer_instances_than_the_least_are_replaced_at_once() -> None:
    scaler = Autoscaler([ScalingGroup("decode", InstanceType.DECODING, 3, 8)], ManualClock())
    [decision] = scaler.decide({"decode": GroupReport(decoders(0.1, 1), num_starting=1)})
    assert str(decision) == "decode: add 1: 2 of at least 3 instances"


def test_a_dry_run_begins_no_cooldown() -> None:
    scaler = Autoscaler([DECODE], ManualClock(), ScalingOptions(up_after_s=0.0))
    reports = {"decode": GroupReport(decoders(2.0, 1))}
    planned = scaler.decide(reports, dry_run=True)
    assert planned == scaler.decide(reports, dry_run=True) == scaler.decide(reports)
    [after] = scaler.decide(reports)
    assert "cooldown for 30 s more" in after.reason


def test_the_last_instance_that_serves_stays() -> None:
    groups = [ScalingGroup("a", InstanceType.GENERAL, 0, 2), ScalingGroup("b", InstanceType.GENERAL, 0, 2)]
    scaler = Autoscaler(groups, ManualClock(), ScalingOptions(down_after_s=0.0, down_margin=1.0))
    alone = GroupReport([ExecutionInstance("a-0")])
    decision, _ = scaler.decide({"a": alone})
    assert "no other instance serves requests" in decision.reason
    first, second = scaler.decide({"a": alone, "b": GroupReport([ExecutionInstance("b-0")])})
    assert [first.action, second.action] == [ScalingAction.DRAIN, ScalingAction.KEEP]


@pytest.mark.parametrize("values", [{"rows": 0.0}, {"attainment": 1.5}, {"cooldown_s": -1.0}, {"max_growth": 1.0}])
def test_options_that_cannot_be(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="autoscaling"):
        ScalingOptions(**values)
