"""The offline optimum beside exhaustive search, and what the replayer promises of any policy."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence
from functools import cache

import pytest

from sagellm.benchmarks.replay.optimum import optimum
from sagellm.benchmarks.replay.replayer import replay
from sagellm.benchmarks.traces import TraceRequest
from sagellm.benchmarks.traces.record import infinite_cache_hits
from sagellm.core.clock import ManualClock
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.build_kv import make_policy

NUM_TINY_TRACES = 400


def requests(paths: Sequence[Sequence[int]], spaces: Sequence[str] = ()) -> list[TraceRequest]:
    tenants = spaces or [""] * len(paths)
    return [
        TraceRequest(float(number), Tokens(path), Namespace(tenant), len(path), 1)
        for number, (path, tenant) in enumerate(zip(paths, tenants, strict=True))
    ]


def random_paths(chance: random.Random) -> list[tuple[int, ...]]:
    """Prompts whose ids name the whole path in front of them, as equal ids mean equal prefixes."""
    numbers: dict[tuple[int, ...], int] = {}
    paths = []
    for _ in range(chance.randint(4, 9)):
        letters = tuple(chance.randrange(3) for _ in range(chance.randint(1, 3)))
        prefixes = [letters[: end + 1] for end in range(len(letters))]
        paths.append(tuple(numbers.setdefault(prefix, len(numbers)) for prefix in prefixes))
    return paths


def exhaustive(paths: Sequence[tuple[int, ...]], capacity: int) -> int:
    """The most hits that any choice of evictions gives: every missing block is inserted, a request's own
    blocks stay, any other may go."""

    @cache
    def best(number: int, resident: frozenset[int]) -> int:
        if number == len(paths):
            return 0
        path = paths[number][:capacity]
        hits = next((n for n, block in enumerate(path) if block not in resident), len(path))
        others = resident - set(path)
        excess = max(0, len(resident | set(path)) - capacity)
        outcomes = (
            best(number + 1, (others - set(gone)) | set(path))
            for gone in itertools.combinations(others, excess)
        )
        return hits + max(outcomes)

    return best(0, frozenset())


def test_the_optimum_is_what_exhaustive_search_finds() -> None:
    chance, better_than_lru = random.Random(0), 0
    for number in range(NUM_TINY_TRACES):
        paths, capacity = random_paths(chance), chance.randint(2, 6)
        trace = requests(paths)
        found = optimum(trace, capacity)
        assert sum(found) == exhaustive(paths, capacity), (number, paths, capacity)
        better_than_lru += sum(found) > sum(lru(trace, capacity))
    assert better_than_lru > NUM_TINY_TRACES // 20, "the traces are too easy to tell anything"


def lru(trace: list[TraceRequest], capacity: int) -> array[int]:
    clock = ManualClock(trace[0].time_s)
    index = registry("index").create(
        "radix",
        block_size=1,
        clock=clock,
        policy_factory=lambda: make_policy("lru", capacity=capacity, clock=clock),
    )
    hits = replay(trace, index, clock, capacity).hits
    assert index.num_cached == index.num_evictable <= capacity
    return hits


@pytest.mark.parametrize("capacity", [1, 3, 6, 20])
def test_no_policy_exceeds_the_optimum_nor_the_optimum_a_cache_that_never_evicts(capacity: int) -> None:
    chance = random.Random(capacity)
    for _ in range(50):
        trace = requests(random_paths(chance))
        best, bound = optimum(trace, capacity), infinite_cache_hits(trace, capacity)
        assert sum(lru(trace, capacity)) <= sum(best)
        assert all(hit <= most for hit, most in zip(best, bound, strict=True))


def test_namespaces_share_nothing() -> None:
    trace = requests([[1, 2], [1, 2], [1, 2]], ["a", "b", "a"])
    assert optimum(trace, 10) == [0, 0, 2]
    assert list(infinite_cache_hits(trace)) == [0, 0, 2]
    assert list(lru(trace, 10)) == [0, 0, 2]


def test_a_request_longer_than_the_capacity_is_cut_to_it() -> None:
    trace = requests([[1, 2, 3, 4], [1, 2, 3, 4]])
    assert optimum(trace, 3) == list(infinite_cache_hits(trace, 3)) == list(lru(trace, 3)) == [0, 3]
