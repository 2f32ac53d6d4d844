"""What every registered router must do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.control_plane.router import make_router
from sagellm.core.clock import ManualClock
from sagellm.core.errors import CapacityError, ConfigError, UnknownNameError
from sagellm.core.protocols.router import CachedPrefix, ExecutionInstance, InstanceType, RequestMetadata
from sagellm.core.registry import registry
from sagellm.core.types import SLO, Namespace, Tokens
from tests.effort import examples

ROUTERS = registry("router").names()
instances = st.builds(
    ExecutionInstance,
    st.just(""),
    st.sampled_from([kind for kind in InstanceType if kind is not InstanceType.EMBEDDING]),
    num_waiting=st.integers(0, 5),
    num_running=st.integers(0, 40),
    num_queued_tokens=st.integers(0, 100_000),
    num_free_blocks=st.integers(0, 1000),
    block_size=st.sampled_from([0, 16]),
    prefill_token_s=st.sampled_from([0.0, 1e-4]),
    step_s=st.sampled_from([0.0, 0.02]),
    is_fresh=st.booleans(),
    reported_s=st.floats(0, 10),
)
requests = st.builds(
    RequestMetadata,
    st.just("r"),
    st.integers(1, 3000).map(lambda count: Tokens(range(count))),
    st.sampled_from([Namespace(), Namespace("tenant")]),
    slo=st.sampled_from([SLO(), SLO(1.0, 0.01)]),
    slo_slack_s=st.sampled_from([None, -1.0, 2.0]),
    session_id=st.sampled_from([None, "s", "t"]),
)


def named(*given_instances: ExecutionInstance) -> list[ExecutionInstance]:
    from dataclasses import replace

    return [replace(one, instance_id=f"i{number}") for number, one in enumerate(given_instances)]


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(instances, st.integers(0, 4000), st.integers(0, 500)), min_size=1, max_size=5),
    st.data(),
)
def test_a_request_goes_to_one_of_the_instances(name: str, fleet: list[Any], data: Any) -> None:
    router, known = make_router(name, ManualClock()), named(*(one for one, _, _ in fleet))
    cached = [CachedPrefix(device, device + lower) for _, device, lower in fleet]
    for _ in range(3):
        placement = router.place(data.draw(requests), known, cached)
        assert {placement.prefill, placement.decode} <= {one.instance_id for one in known}
        assert placement.reason
        assert placement.fetch_from != placement.prefill
        router.observe(placement.decode, {"ttft": 0.5, "tpot": 0.01, "e2e": 1.0})


@pytest.mark.parametrize("name", ROUTERS)
def test_without_an_instance_that_serves(name: str) -> None:
    router = make_router(name)
    one = RequestMetadata("r", Tokens([1]))
    with pytest.raises(CapacityError, match="none at all"):
        router.place(one, [], [])
    with pytest.raises(CapacityError, match="only embed"):
        router.place(one, [ExecutionInstance("e", InstanceType.EMBEDDING)], [CachedPrefix()])


@pytest.mark.parametrize("name", ROUTERS)
def test_the_same_calls_give_the_same_placements(name: str) -> None:
    def run() -> list[str]:
        router, clock = make_router(name, clock := ManualClock()), clock
        fleet = named(*(ExecutionInstance("", reported_s=1.0) for _ in range(5)))
        made = []
        for number in range(40):
            clock.advance(0.1)
            one = RequestMetadata(
                str(number), Tokens(range(1 + 37 * number % 900)), session_id=str(number % 3)
            )
            made.append(router.place(one, fleet, [CachedPrefix()] * 5).prefill)
        return made

    assert run() == run()


@pytest.mark.parametrize("name", ROUTERS)
def test_names_may_have_hyphens(name: str) -> None:
    assert type(make_router(name.replace("_", "-"))) is type(make_router(name))


def test_unknown_names_and_options_are_explained() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'round_robin'"):
        make_router("roundrobin")
    with pytest.raises(UnknownNameError, match="has no option 'weight'; it takes temperature"):
        make_router({"name": "cost", "weight": 1.0})
    with pytest.raises(ConfigError, match="temperature is a number from 0 on"):
        make_router({"name": "cost", "temperature": -1.0})
    with pytest.raises(ConfigError, match="give a name"):
        make_router({"temperature": 1.0})
