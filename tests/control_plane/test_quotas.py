"""Requests and tokens of tenants, against limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sagellm.control_plane.quotas import TenantQuotas
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.fleet_config import TenantQuota
from sagellm.core.protocols.router import RequestMetadata
from sagellm.core.types import Namespace, Tokens
from tests.effort import examples

ONE = RequestMetadata("r", Tokens(range(100)), Namespace("t"))


def test_tokens_come_back_with_time() -> None:
    clock = ManualClock()
    quotas = TenantQuotas({"t": TenantQuota(tokens_per_s=10.0, burst_tokens=150)}, clock=clock)
    assert quotas.limit(ONE) is None
    quotas.start(ONE)
    limit = quotas.limit(replace(ONE, request_id="s"))
    assert limit is not None
    assert (limit.never, limit.until_s) == (False, 5.0)
    clock.advance(5.0)
    assert quotas.limit(replace(ONE, request_id="s")) is None
    quotas.finish("r")
    clock.advance(5.0)
    quotas.limit(ONE)
    assert not quotas._usage, "a tenant that uses nothing is forgotten"


def test_what_was_not_used_comes_back_and_what_was_used_beyond_is_owed() -> None:
    clock = ManualClock()
    quotas = TenantQuotas({"t": TenantQuota(tokens_per_s=10.0, burst_tokens=150)}, clock=clock)
    quotas.start(ONE)
    assert quotas.finish("r", 60) == "t"
    assert quotas.limit(RequestMetadata("s", Tokens(range(90)), Namespace("t"))) is None
    quotas.start(replace(ONE, request_id="u"))
    assert quotas.finish("u", 250) == "t"  # 60 + 250 of 150 are spent
    limit = quotas.limit(replace(ONE, request_id="v"))
    assert limit is not None
    assert limit.until_s == 26.0
    assert quotas.finish("u", 250) is None
    quotas.check()


def test_tenants_without_end_are_forgotten() -> None:
    clock = ManualClock()
    quotas = TenantQuotas({"*": TenantQuota(tokens_per_s=100.0)}, clock)
    for number in range(1000):
        request = replace(ONE, request_id=str(number), namespace=Namespace(str(number)))
        quotas.start(request)
        quotas.finish(request.request_id)
        clock.advance(0.1)
    assert len(quotas._usage) < 25
    quotas.check()


def test_others_are_not_concerned() -> None:
    quotas = TenantQuotas({"t": TenantQuota(max_requests=1)}, clock=ManualClock())
    quotas.start(ONE)
    assert quotas.limit(replace(ONE, namespace=Namespace("u"))) is None


def test_a_request_is_counted_once() -> None:
    quotas = TenantQuotas({}, clock=ManualClock())
    quotas.start(ONE)
    with pytest.raises(BookkeepingError, match="counted already"):
        quotas.start(ONE)


@pytest.mark.parametrize(
    "options",
    [
        {"max_requests": 0},
        {"tokens_per_s": 0.0},
        {"burst_tokens": 5},
        {"tokens_per_s": 1.0, "burst_tokens": 0},
    ],
)
def test_limits_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TenantQuota(**options)


@given(
    st.lists(
        st.tuples(st.sampled_from("tu"), st.integers(1, 60), st.booleans(), st.floats(0, 3)), max_size=40
    )
)
@settings(max_examples=examples(200), deadline=None)
def test_no_tenant_exceeds_its_quota(steps: list[tuple[str, int, bool, float]]) -> None:
    clock = ManualClock()
    quotas = TenantQuotas(
        {
            "t": TenantQuota(max_requests=2, tokens_per_s=20.0, burst_tokens=50),
            "*": TenantQuota(max_requests=1),
        },
        clock,
    )
    running: dict[str, str] = {}
    spent: list[tuple[float, int]] = []
    for number, (tenant, tokens, ends, seconds) in enumerate(steps):
        clock.advance(seconds)
        if ends and running:
            name, _ = running.popitem()
            quotas.finish(name)
        request = RequestMetadata(str(number), Tokens(range(tokens)), Namespace(tenant))
        if quotas.limit(request) is None:
            quotas.start(request)
            running[str(number)] = tenant
            if tenant == "t":
                spent.append((clock.now(), tokens))
        quotas.check()
        counts = list(running.values())
        assert counts.count("t") <= 2
        assert counts.count("u") <= 1
        for begin_s, _ in spent:
            assert sum(n for at_s, n in spent if at_s >= begin_s) <= 50 + 20 * (clock.now() - begin_s) + 1e-6
