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


def state_of(role: InstanceRole) -> str:
    return role.state.value


def test_drain_switch_serve() -> None:
    role, _ = new_role()
    role.change(InstanceType.DECODING)
    assert state_of(role) == "draining"
    assert not role.takes_requests
    assert role.poll({"a": Service.PREFILL}) == []
    assert state_of(role) == "draining"
    assert role.poll({}) == []
    assert state_of(role) == "switching"
    with pytest.raises(ConfigError, match="wait until it serves"):
        role.change(InstanceType.HYBRID)
    role.switched()
    assert state_of(role) == "serving"
    assert role.kind is InstanceType.DECODING


def test_what_the_new_type_serves_too_stays() -> None:
    role, _ = new_role()
    role.change(InstanceType.HYBRID)
    assert role.poll({"a": Service.PREFILL, "b": Service.GENERATE}) == []
    assert state_of(role) == "switching"
    role, _ = new_role(InstanceType.DECODING)
    role.change(InstanceType.PREFILLING)
    role.poll({"whole": Service.GENERATE, "answer": Service.DECODE})
    assert state_of(role) == "draining"
    role.poll({"whole": Service.GENERATE})
    assert state_of(role) == "switching"


def test_requests_that_do_not_end_are_moved() -> None:
    role, clock = new_role()
    here = {"a": Service.PREFILL, "b": Service.PREFILL, "c": Service.GENERATE}
    role.change(InstanceType.DECODING)
    clock.advance(DRAIN_S - 1)
    assert role.poll(here) == []
    role.change(InstanceType.GENERAL)  # another target gives no more time
    clock.advance(1)
    assert role.poll(here) == ["a", "b"]
    assert role.poll({"b": Service.PREFILL}) == ["b"]
    assert role.poll({"c": Service.GENERATE}) == []
    assert state_of(role) == "switching"


def test_a_change_that_is_cancelled() -> None:
    role, _ = new_role()
    assert not role.cancel()
    role.change(InstanceType.DECODING)
    assert role.cancel()
    assert role.takes_requests
    assert role.kind is InstanceType.PREFILLING
    role.change(InstanceType.DECODING)
    role.poll({})
    assert not role.cancel()


def test_a_switch_that_was_not_asked_for_is_an_error() -> None:
    role, _ = new_role()
    with pytest.raises(BookkeepingError, match="did not switch"):
        role.switched()


class RoleMachine(RuleBasedStateMachine):
    """An owner that follows the rules, with requests that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.role, self.clock = new_role(InstanceType.HYBRID)
        self.number, self.elsewhere, self.done = 0, set[str](), set[str]()
        self.here: dict[str, Service] = {}

    @rule(service=st.sampled_from(Service))
    def submit(self, service: Service) -> None:
        self.number += 1
        name = str(self.number)
        if self.role.takes_requests and service in services_of([self.role.kind]):
            self.here[name] = service
        else:
            self.elsewhere.add(name)

    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        if self.here:
            name = sorted(self.here)[which % len(self.here)]
            del self.here[name]
            self.done.add(name)

    @rule(kind=st.sampled_from(InstanceType))
    def change(self, kind: InstanceType) -> None:
        if self.role.state is not RoleState.SWITCHING:
            self.role.change(kind)

    @rule(seconds=st.sampled_from([0.0, 1.0, DRAIN_S]))
    def poll(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for name in self.role.poll(self.here):
            del self.here[name]
            self.elsewhere.add(name)

    @rule()
    def finish_switch(self) -> None:
        if self.role.state is RoleState.SWITCHING:
            self.role.switched()

    @rule()
    def cancel(self) -> None:
        was_draining = self.role.state is RoleState.DRAINING
        assert self.role.cancel() == was_draining

    @invariant()
    def every_request_is_where_it_is_served(self) -> None:
        self.role.check()
        assert len(self.here) + len(self.elsewhere) + len(self.done) == self.number
        if self.role.state is RoleState.SERVING:
            assert set(self.here.values()) <= services_of([self.role.kind])


RoleMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestRole = RoleMachine.TestCase
