"""Whom each router chooses."""

from __future__ import annotations

import pytest
from sagellm.benchmarks.simulate.routers import ROUTERS, PrefixAwareRouter, make_router

from sagellm.benchmarks.simulate.simulation import ClusterLayout
from sagellm.core.errors import CapacityError, UnknownNameError
from sagellm.core.protocols.router import InstanceLoad
from sagellm.core.types import Request, Tokens
from tests.benchmarks.simulate.stand_in import request, served, trace

ONE = Request("1", Tokens([1]))
A = InstanceLoad("a", 1, 3, 10)
B = InstanceLoad("b", 0, 2, 5, 100)
C = InstanceLoad("c", 2, 0, 9, 40)


def chosen(name: str, *loads: InstanceLoad, times: int = 1) -> list[str]:
    router = make_router(name)
    return [router.place(ONE, loads).prefill for _ in range(times)]


def test_round_robin_goes_round() -> None:
    assert chosen("round-robin", A, B, C, times=4) == ["a", "b", "c", "a"]


def test_least_loaded_counts_requests_then_room() -> None:
    assert chosen("least-loaded", A, B, C) == ["c"], "two requests each, c has more free blocks"
    assert chosen("least-loaded", A, B) == ["b"]


def test_prefix_aware_weighs_what_is_cached_against_the_load() -> None:
    assert chosen("prefix-aware", A, B, C) == ["b"]
    light = PrefixAwareRouter(blocks_per_request=1000)
    crowded = InstanceLoad("d", 5, 5, 10, 4000)
    assert light.place(ONE, [crowded, B]).prefill == "b"
    assert PrefixAwareRouter(10).place(ONE, [crowded, B]).prefill == "d"
    assert "100 blocks cached" in PrefixAwareRouter().place(ONE, [B]).reason


@pytest.mark.parametrize("name", ROUTERS)
def test_contract(name: str) -> None:
    router = make_router(name)
    placed = router.place(ONE, [A, B, C])
    assert placed.prefill == placed.decode
    assert placed.prefill in "abc"
    router.observe("a", {"ttft": 1.0})
    with pytest.raises(CapacityError, match="no instance"):
        router.place(ONE, [])


def test_an_unknown_router_is_explained() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'round-robin'"):
        ClusterLayout(router="roundrobin")


def test_a_conversation_stays_where_its_prefix_is() -> None:
    made = trace(*(request(1.0 * at, 400, 1, list(range(50))) for at in range(4)))
    result = served(made, layout=ClusterLayout(2))
    assert {one.prefill for one in result.served} == {"instance-1"}
    apart = served(made, layout=ClusterLayout(2, router="round-robin"))
    assert [one.prefill[-1] for one in apart.served] == ["1", "2", "1", "2"]
    assert apart.figures["hit_ratio"] < result.figures["hit_ratio"]
