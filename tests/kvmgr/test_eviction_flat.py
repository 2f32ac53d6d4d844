"""Flat streams of blocks: hit counts equal to libCacheSim's, golden ones for every policy, and fairness."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from flat_oracle import (
    CAPACITIES,
    GOLDEN,
    FlatCache,
    count_hits,
    digest,
    make,
    streams,
    tenant_stream,
    variants,
)
from sagellm.core.registry import registry
from sagellm.kvmgr.eviction.qos import jain_index

SAME_AS_PEER = {
    "lru": "lru",
    "fifo": "fifo",
    "lfu": "lfu without ageing",
    "arc": "arc announced",
    "sieve": "sieve",
    "two_q": "two_q",
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return numbers


@pytest.fixture(scope="module")
def keys() -> Mapping[str, list[int]]:
    return streams()


def test_the_streams_are_those_of_the_golden_numbers(golden: dict[str, Any]) -> None:
    assert golden["streams"] == {name: digest(keys) for name, keys in streams().items()}


def test_golden_numbers_exist_for_every_policy(golden: dict[str, Any]) -> None:
    """Write those of a new policy with `python tools/flat_oracle.py --ours --write`."""
    counted = {label for by_capacity in golden["ours"].values() for label in by_capacity[str(CAPACITIES[0])]}
    assert set(registry("policy").names()) <= counted


@pytest.mark.parametrize("stream", ["zipf", "scan", "drift"])
@pytest.mark.parametrize(("peer", "label"), SAME_AS_PEER.items())
def test_as_many_hits_as_libcachesim(
    peer: str, label: str, stream: str, golden: dict[str, Any], keys: Mapping[str, list[int]]
) -> None:
    assert count_hits(label, keys[stream], 200) == golden["peer"][stream]["200"][peer]


def test_golden_numbers_equal_libcachesims_everywhere(golden: dict[str, Any]) -> None:
    for stream, by_capacity in golden["peer"].items():
        for capacity, hits in by_capacity.items():
            ours = golden["ours"][stream][capacity]
            assert {peer: ours[label] for peer, label in SAME_AS_PEER.items()} == {
                peer: hits[peer] for peer in SAME_AS_PEER
            }


def test_arc_that_hears_of_a_block_late_stays_close_to_the_paper(golden: dict[str, Any]) -> None:
    for stream, by_capacity in golden["ours"].items():
        for capacity, hits in by_capacity.items():
            assert hits["arc"] == pytest.approx(golden["peer"][stream][capacity]["arc"], rel=0.002)


@pytest.mark.parametrize("name", registry("policy").names())
def test_golden_hits(name: str, golden: dict[str, Any], keys: Mapping[str, list[int]]) -> None:
    assert count_hits(name, keys["scan"], 200) == golden["ours"]["scan"]["200"][name]


@pytest.mark.slow
@pytest.mark.parametrize("label", variants())
def test_all_golden_hits(label: str, golden: dict[str, Any], keys: Mapping[str, list[int]]) -> None:
    for stream, by_capacity in golden["ours"].items():
        for capacity, hits in by_capacity.items():
            assert count_hits(label, keys[stream], int(capacity)) == hits[label]


# -- fairness


def served(name: str, capacity: int, stream: list[tuple[str, int]]) -> tuple[float, float]:
    """Jain's index over tenants' hits / hits of an infinite cache, and the hit ratio of all."""
    cache, seen = FlatCache(make(name, capacity), capacity), set[int]()
    hits: dict[str, int] = {}
    reuses: dict[str, int] = {}
    for tenant, key in stream:
        reuses[tenant] = reuses.get(tenant, 0) + (key in seen)
        seen.add(key)
        hits[tenant] = hits.get(tenant, 0) + cache.access(key, tenant)
    return jain_index([hits[name] / reuses[name] for name in hits]), sum(hits.values()) / len(stream)


def test_fairness_costs_little() -> None:
    """The target of the issue: 0.9 where LRU gives under 0.7, for at most 3 points of hits."""
    stream = tenant_stream(4)
    lru_jain, lru_ratio = served("lru", 335, stream)
    qos_jain, qos_ratio = served("qos", 335, stream)
    assert lru_jain < 0.7
    assert qos_jain >= 0.9
    assert qos_ratio >= lru_ratio - 0.03


def test_one_tenant_alone_gets_lru(keys: Mapping[str, list[int]]) -> None:
    assert count_hits("qos", keys["drift"], 200) == count_hits("lru", keys["drift"], 200)
