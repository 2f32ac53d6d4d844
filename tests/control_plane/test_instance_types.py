"""What instances serve, and that a change of role loses no request."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.control_plane.instance_types import (
    ALSO_SERVES,
    SERVES,
    InstanceRole,
    RoleState,
    Service,
    candidates,
    may_leave,
    services_of,
)
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.router import ExecutionInstance, InstanceType

DRAIN_S = 10.0


def fleet(*kinds: InstanceType) -> list[ExecutionInstance]:
    return [ExecutionInstance(f"{kind.value}-{number}", kind) for number, kind in enumerate(kinds)]


def test_every_type_serves_something() -> None:
    assert set(SERVES) == set(InstanceType)
    assert all(SERVES.values())
    assert all(not extra & SERVES[kind] for kind, extra in ALSO_SERVES.items())


def test_whole_requests_go_to_prefill_instances_only_without_better_ones() -> None:
    general, prefill, decode = fleet(InstanceType.GENERAL, InstanceType.PREFILLING, InstanceType.DECODING)
    assert candidates([general, prefill, decode], Service.GENERATE) == [general]
    assert candidates([prefill, decode], Service.GENERATE) == [prefill, decode]
    assert candidates([general, prefill, decode], Service.PREFILL) == [prefill]
    assert candidates([general], Service.PREFILL) == []
    assert candidates([general, prefill], Service.EMBED) == []


def test_hybrids_and_embedders() -> None:
    hybrid, both = fleet(InstanceType.HYBRID, InstanceType.LLM_EMBEDDING)
    assert all(candidates([hybrid], each) for each in Service if each is not Service.EMBED)
    assert candidates([hybrid, both], Service.EMBED) == [both]
    assert candidates([hybrid, both], Service.GENERATE) == [hybrid, both]
    assert services_of([InstanceType.EMBEDDING]) == {Service.EMBED}


def test_the_last_instance_that_serves_may_not_leave() -> None:
    prefill, decode = fleet(InstanceType.PREFILLING, InstanceType.DECODING)
    assert may_leave([prefill, decode], prefill.instance_id)
    assert not may_leave([prefill], prefill.instance_id)
    general, embedding = fleet(InstanceType.GENERAL, InstanceType.EMBEDDING)
    assert not may_leave([general, embedding], embedding.instance_id)
    assert not may_leave([general, embedding], general.instance_id)


def new_role(kind: InstanceType = InstanceType.PREFILLING) -> tuple[InstanceRole, ManualClock]:
    clock = ManualClock()
    return InstanceRole("i", kind, clock, drain_timeout_s=DRAIN_S), clock


def test_drain_switch_serve() -> None:
    role, _ = new_role()
    role.began("a", Service.PREFILL)
    role.change(InstanceType.DECODING)
    assert role.state is RoleState.DRAINING
    assert not role.accepts(Service.PREFILL) and not role.accepts(Service.DECODE)
    assert role.poll() == []
    role.ended("a")
    assert role.poll() == []
    assert role.state is RoleState.SWITCHING
    with pytest.raises(ConfigError, match="wait until it serves"):
        role.change(InstanceType.HYBRID)
    role.switched()
    assert role.state is RoleState.SERVING and role.accepts(Service.DECODE)


def test_requests_that_do_not_end_are_moved() -> None:
    role, clock = new_role()
    role.began("a", Service.PREFILL)
    role.began("b", Service.GENERATE)
    role.change(None)
    clock.advance(DRAIN_S - 1)
    assert role.poll() == []
    role.change(InstanceType.HYBRID)  # another target gives no more time
    clock.advance(1)
    assert role.poll() == ["a", "b"]
    role.ended("a")
    assert role.poll() == ["b"]
    role.ended("b")
    role.poll()
    assert role.state is RoleState.SWITCHING


def test_a_drain_that_is_cancelled_and_a_switch_that_fails() -> None:
    role, _ = new_role()
    assert not role.cancel()
    role.change(None)
    assert role.cancel()
    assert role.accepts(Service.PREFILL)
    role.change(InstanceType.DECODING)
    role.poll()
    assert not role.cancel()
    role.not_switched()
    assert role.kind is InstanceType.PREFILLING and role.accepts(Service.PREFILL)


def test_what_cannot_be_is_an_error() -> None:
    role, _ = new_role()
    with pytest.raises(BookkeepingError, match="takes no decode"):
        role.began("a", Service.DECODE)
    role.began("a", Service.PREFILL)
    with pytest.raises(BookkeepingError, match="has request a"):
        role.began("a", Service.PREFILL)
    with pytest.raises(BookkeepingError, match="did not switch"):
        role.switched()


class RoleMachine(RuleBasedStateMachine):
    """An owner that follows the rules, with requests that it counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.role, self.clock = new_role(InstanceType.HYBRID)
        self.number, self.here, self.elsewhere, self.done = 0, set[str](), set[str](), set[str]()

    @rule(service=st.sampled_from(Service))
    def submit(self, service: Service) -> None:
        self.number += 1
        name = str(self.number)
        if self.role.accepts(service):
            self.role.began(name, service)
            self.here.add(name)
        else:
            self.elsewhere.add(name)

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        if self.here:
            name = sorted(self.here)[which % len(self.here)]
            assert self.role.ended(name)
            assert not self.role.ended(name)
            self.here.remove(name)
            self.done.add(name)

    @rule(target=st.sampled_from([*InstanceType, None]))
    def change(self, target: InstanceType | None) -> None:
        if self.role.state in (RoleState.SERVING, RoleState.DRAINING):
            self.role.change(target)

    @rule(seconds=st.sampled_from([0.0, 1.0, DRAIN_S]))
    def poll(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for name in self.role.poll():
            assert self.role.ended(name)
            self.here.remove(name)
            self.elsewhere.add(name)

    @rule(works=st.booleans())
    def finish_switch(self, *, works: bool) -> None:
        if self.role.state is RoleState.SWITCHING:
            assert not self.here
            self.role.switched() if works else self.role.not_switched()

    @rule()
    def cancel(self) -> None:
        was_draining = self.role.state is RoleState.DRAINING
        assert self.role.cancel() == was_draining

    @rule()
    def die(self) -> None:
        lost = set(self.role.died())
        assert lost == self.here
        self.elsewhere |= lost
        self.here.clear()

    @invariant()
    def no_request_is_lost(self) -> None:
        self.role.check()
        assert set(self.role.requests) == self.here
        assert len(self.here) + len(self.elsewhere) + len(self.done) == self.number
        if self.role.state is RoleState.STOPPED:
            assert not any(self.role.accepts(service) for service in Service)


RoleMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestRole = RoleMachine.TestCase
