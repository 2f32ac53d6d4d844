"""Reuses and LRU's stack, beside a block by block search and the real index."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.benchmarks.replay.replayer import replay
from sagellm.benchmarks.replay.reuse import LRUStack, Reuse, find_reuses
from sagellm.benchmarks.traces import TraceRequest
from sagellm.core.clock import ManualClock
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.build_kv import make_policy
from tests.effort import examples


def some_requests(seed: int) -> list[TraceRequest]:
    """Prompts of a few documents in two namespaces; equal ids are equal prefixes."""
    draw, numbers = random.Random(seed), dict[tuple[object, ...], int]()
    requests = []
    for turn in range(draw.randrange(1, 50)):
        letters = [draw.randrange(3)] + [draw.randrange(2) for _ in range(draw.randrange(6))]
        path = [numbers.setdefault(tuple(letters[: end + 1]), len(numbers)) for end in range(len(letters))]
        space = Namespace(draw.choice(["", "other"]))
        requests.append(TraceRequest(float(turn), Tokens(path), space, len(path), 1))
    return requests


def slow_reuses(requests: Sequence[TraceRequest], number: int) -> list[Reuse]:
    """Block by block, by looking through all requests before."""
    reuses: list[Reuse] = []
    for position, block in enumerate(requests[number].ids):
        users = [
            earlier
            for earlier, request in enumerate(requests[:number])
            if request.namespace == requests[number].namespace and block in request.ids.tolist()
        ]
        if not users:
            return reuses
        if reuses and reuses[-1].last == users[-1]:
            reuses[-1] = reuses[-1]._replace(stop=position + 1)
        else:
            reuses.append(Reuse(position, position + 1, users[-1]))
    return reuses


@given(seed=st.integers(0, 2**20))
@settings(max_examples=examples(50), deadline=None)
def test_reuses_are_those_that_a_search_finds(seed: int) -> None:
    requests = some_requests(seed)
    assert find_reuses(requests) == [slow_reuses(requests, number) for number in range(len(requests))]


@given(seed=st.integers(0, 2**20), capacities=st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(max_examples=examples(50), deadline=None)
def test_the_stack_has_the_hits_of_lru_at_all_capacities(seed: int, capacities: list[int]) -> None:
    requests = some_requests(seed)
    stack = LRUStack(find_reuses(requests), [len(request.ids) for request in requests])
    for capacity in capacities:
        clock = ManualClock(0.0)
        policy = make_policy("lru", capacity=capacity, clock=clock)
        index = registry("index").create("radix", block_size=1, policy=policy, clock=clock)
        assert stack.hits(capacity) == list(replay(requests, index, clock, capacity).hits)


def test_without_requests_there_are_no_hits() -> None:
    assert LRUStack([], []).hits(5) == []
