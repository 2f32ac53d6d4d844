"""Requests that wait for their tenant's quota: order, limits, and that none is forgotten."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.control_plane.quota_waits import QuotaWaits
from sagellm.control_plane.quotas import TenantQuotas
from sagellm.core.clock import ManualClock
from sagellm.core.errors import RequestError
from sagellm.core.fleet_config import TenantQuota
from sagellm.core.protocols.engine import TenantUse
from sagellm.core.protocols.router import RequestMetadata
from sagellm.core.types import Namespace, Tokens

PATIENCE_S = 20.0
ONE = RequestMetadata("a", Tokens(range(100)), Namespace("t"))


def named(name: str, tenant: str = "t", num_tokens: int = 100) -> RequestMetadata:
    return RequestMetadata(name, Tokens(range(num_tokens)), Namespace(tenant))


def new(**quotas: TenantQuota) -> tuple[QuotaWaits, ManualClock]:
    clock = ManualClock()
    return QuotaWaits(TenantQuotas(quotas, clock), patience_s=PATIENCE_S, clock=clock), clock


def test_requests_start_in_order_as_others_end() -> None:
    waits, _ = new(t=TenantQuota(max_requests=1))
    assert [waits.enter(named(name)) for name in "abc"] == [True, False, False]
    assert waits.enter(named("other", "u"))
    assert waits.released() == []
    waits.leave("b")  # it waits, and its client has left
    assert waits.released() == []
    waits.leave("a")
    assert waits.released() == ["c"]
    waits.leave("c")
    waits.check()
    assert not len(waits)


def test_requests_start_as_tokens_come_back() -> None:
    waits, clock = new(t=TenantQuota(tokens_per_s=10.0, burst_tokens=150))
    assert [waits.enter(named(name)) for name in "abc"] == [True, False, False]
    assert waits.released() == []
    clock.advance(4.9)
    assert waits.released() == []
    clock.advance(0.2)
    assert waits.released() == ["b"]
    assert waits.released() == []
    clock.advance(10.0)
    assert waits.released() == ["c"]


def test_an_answer_that_was_shorter_lets_the_next_start_sooner() -> None:
    waits, _ = new(t=TenantQuota(tokens_per_s=10.0, burst_tokens=150))
    assert waits.enter(named("a"))
    assert not waits.enter(named("b"))
    waits.leave("a", 50)
    assert waits.released() == ["b"]


def test_what_would_wait_too_long_is_refused_and_hears_when() -> None:
    waits, _ = new(t=TenantQuota(tokens_per_s=10.0, burst_tokens=150))
    assert [waits.enter(named(name)) for name in "abc"] == [True, False, False]
    with pytest.raises(RequestError, match=r"would start in 25 s: try again then") as caught:
        waits.enter(named("d"))
    assert (caught.value.status, caught.value.retry_after_s) == (429, 25.0)
    assert waits.load()["t"] == TenantUse(1, 2, 1)
    waits.check()


def test_what_can_never_start_is_refused_and_hears_what_would() -> None:
    waits, _ = new(t=TenantQuota(tokens_per_s=10.0, burst_tokens=60))
    with pytest.raises(RequestError, match="shorten the prompt or max_tokens by 40") as caught:
        waits.enter(ONE)
    assert caught.value.retry_after_s == math.inf
    assert waits.enter(named("b", "u"))


def test_patience() -> None:
    waits, clock = new(t=TenantQuota(max_requests=1))
    assert [waits.enter(named(name)) for name in "ab"] == [True, False]
    clock.advance(PATIENCE_S - 1)
    assert not waits.enter(named("c"))
    assert waits.late() == []
    clock.advance(1)
    [(name, why)] = waits.late()
    assert name == "b"
    assert why == "its tenant has 1 requests at a time, and it has waited 20 s: try again later"
    waits.leave("b")
    assert waits.late() == []
    waits.check()


def test_without_quotas_nothing_waits_and_nobody_is_named() -> None:
    waits = QuotaWaits(clock=ManualClock())
    assert all(waits.enter(named(str(number), str(number))) for number in range(5))
    assert waits.load() == {}


def test_tenants_that_are_not_named_are_shown_together() -> None:
    waits, _ = new(t=TenantQuota(max_requests=1), **{"*": TenantQuota(max_requests=1)})
    for number, tenant in enumerate("tuvv"):
        waits.enter(named(str(number), tenant))
    assert waits.load() == {"t": TenantUse(1), "(other)": TenantUse(2, 1)}


class WaitsMachine(RuleBasedStateMachine):
    """A front: what enters is counted, waits or is refused, and leaves in whatever way."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.clock = new(
            t=TenantQuota(max_requests=2), **{"*": TenantQuota(max_requests=3, tokens_per_s=50.0)}
        )
        self.number = 0
        self.running: dict[str, str] = {}
        self.waiting: dict[str, str] = {}

    @rule(tenant=st.sampled_from("tuv"), num_tokens=st.integers(1, 600))
    def enter(self, tenant: str, num_tokens: int) -> None:
        self.number += 1
        request = named(str(self.number), tenant, num_tokens)
        try:
            starts = self.waits.enter(request)
        except RequestError:
            return
        (self.running if starts else self.waiting)[request.request_id] = tenant

    @rule(which=st.integers(0, 9), used=st.none() | st.integers(0, 900))
    def leave(self, which: int, used: int | None) -> None:
        names = [*self.running, *self.waiting]
        if names:
            name = names[which % len(names)]
            self.waits.leave(name, used)
            self.waits.leave(name, used)
            self.running.pop(name, None) or self.waiting.pop(name)

    @rule(seconds=st.sampled_from([0.0, 0.3, 5.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for name in self.waits.released():
            tenant = self.waiting.pop(name)
            earlier = [each for each, other in self.waiting.items() if other == tenant]
            assert all(int(name) < int(each) for each in earlier)
            self.running[name] = tenant
        for name, _ in self.waits.late():
            self.waits.leave(name)
            del self.waiting[name]

    @invariant()
    def books_match(self) -> None:
        self.waits.check()
        assert len(self.waits) == len(self.waiting)
        for tenant, most in zip("tuv", (2, 3, 3), strict=True):
            assert list(self.running.values()).count(tenant) <= most

    def teardown(self) -> None:
        """Nothing waits for ever."""
        for name in list(self.running):
            self.waits.leave(name, 0)
        self.running.clear()
        for _ in range(4 * len(self.waiting)):
            self.advance(15.0)
            for name in list(self.running):
                self.waits.leave(name, 0)
            self.running.clear()
        assert not self.waiting


WaitsMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestWaits = WaitsMachine.TestCase


def test_a_request_counts_with_its_answer_up_to_a_usual_one() -> None:
    waits, _ = new(t=TenantQuota(tokens_per_s=10.0, burst_tokens=356))
    with pytest.raises(RequestError, match="counts 110 tokens, its tenant has 100"):
        new(t=TenantQuota(tokens_per_s=10.0))[0].enter(replace(ONE, kv_cache_size_tokens=110))
    assert waits.enter(replace(ONE, kv_cache_size_tokens=100_000))
    with pytest.raises(RequestError, match="start in 36 s"):
        waits.enter(named("b", num_tokens=356))
