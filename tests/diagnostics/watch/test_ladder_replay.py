"""Replays of the ladder, beside a slow LRU cache of single blocks."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import active_children

from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.types import Tokens
from sagellm.diagnostics.watch.accesses import CacheAccess
from sagellm.diagnostics.watch.replays import WatchedRequests, WatchReplay, run_cases
from tests.effort import examples
from tests.serving.live import wait_until

SEEDS = st.integers(0, 2**20)


def some_requests(seed: int, num_instances: int = 1) -> list[CacheAccess]:
    """Prompts of six documents; some answers come again word for word, and some are never seen again."""
    draw, numbers = random.Random(seed), dict[tuple[object, ...], int]()
    accesses = []
    for turn in range(draw.randrange(3, 60)):
        document = draw.randrange(6)
        prompt: list[object] = [(document, index) for index in range(draw.randrange(1, 5))]
        answer: list[object] = [draw.choice(["again", turn]) for _ in range(draw.randrange(4))]
        path = [*prompt, *answer]
        blocks = [numbers.setdefault(tuple(path[: end + 1]), len(numbers)) for end in range(len(path))]
        accesses.append(CacheAccess(float(turn), draw.randrange(num_instances), Tokens(blocks), len(prompt)))
    return accesses


def slow_lru_hits(accesses: Sequence[CacheAccess], capacity: int) -> int:
    """Hit prompt blocks; of one request the tail is evicted first."""
    cached, hits = OrderedDict[int, None](), 0
    for access in accesses:
        blocks = access.blocks.tolist()[:capacity]
        leading = next((n for n, block in enumerate(blocks) if block not in cached), len(blocks))
        hits += min(leading, access.num_queried)
        others = [block for block in cached if block not in blocks]
        for block in others[: max(0, len(others) + len(blocks) - capacity)]:
            del cached[block]
        for block in reversed(blocks):
            cached[block] = None
            cached.move_to_end(block)
    return hits


@given(seed=SEEDS, capacity=st.integers(1, 40))
@settings(max_examples=examples(60), deadline=None)
def test_lru_hits_what_a_slow_cache_hits(seed: int, capacity: int) -> None:
    accesses = some_requests(seed)
    requests = WatchedRequests(accesses)
    assert sum(requests.hits("lru", capacity)) == slow_lru_hits(accesses, capacity)
    assert sum(requests.hits_of_index("lru", capacity)) == slow_lru_hits(accesses, capacity)


@given(seed=SEEDS, capacity=st.integers(1, 40))
@settings(max_examples=examples(60), deadline=None)
def test_no_policy_hits_more_than_the_offline_optimum(seed: int, capacity: int) -> None:
    accesses = some_requests(seed)
    lru, adaptive, best = (
        sum(WatchedRequests(accesses).hits(policy, capacity)) for policy in ("lru", "adaptive", "optimum")
    )
    assert max(lru, adaptive) <= best
    assert best <= slow_lru_hits(accesses, 10_000)


def test_replays_in_processes_are_those_of_one_process() -> None:
    accesses = some_requests(3, num_instances=2)
    cases = [
        WatchReplay(instance, policy, 8)
        for instance in (0, 1, None)
        for policy in ("lru", "adaptive", "optimum")
    ]
    alone = run_cases(accesses, cases)
    assert run_cases(accesses, cases, jobs=2) == alone
    assert alone[WatchReplay(None, "lru", 8)] == slow_lru_hits(accesses, 8)
    assert run_cases([], cases) == dict.fromkeys(cases, 0)


def test_a_cache_that_never_evicts_is_not_replayed() -> None:
    accesses = some_requests(5)
    requests = WatchedRequests(accesses)
    enough = len(set[int]().union(*(access.blocks for access in accesses)))
    for capacity in (enough, 2 * enough):
        assert requests.hits("adaptive", capacity) == requests.hits_of_index("adaptive", capacity)


def test_blocks_that_were_hit_at_first_sight_are_in_the_cache_at_the_start() -> None:
    """A cache has served the first half; the watch sees the second one."""
    for seed in range(20):
        accesses = some_requests(seed)
        half, capacity = len(accesses) // 2, 12
        served = WatchedRequests(accesses).hits("lru", capacity)
        seen = [replace(a, num_hit=hit) for a, hit in zip(accesses, served, strict=True)][half:]
        assert WatchedRequests(seen).hits("lru", capacity) == served[half:]
        smaller = sum(WatchedRequests(seen, num_initial=capacity).hits("lru", capacity // 2))
        assert smaller <= sum(served[half:])


def test_blocks_that_are_never_asked_for_fill_the_cache_at_the_start() -> None:
    first = [CacheAccess(float(n), 0, Tokens([10 * n, 10 * n + 1]), 2, num_hit=2) for n in range(4)]
    assert sum(WatchedRequests(first).hits("lru", 8)) == 8
    assert sum(WatchedRequests(first).hits("lru", 4)) == 4, "the first two are the youngest"
    assert sum(WatchedRequests(first, num_initial=16).hits("lru", 8)) == 4


def test_ctrl_c_ends_the_replays_and_keeps_what_is_there() -> None:
    accesses = some_requests(3)
    cases = [WatchReplay(0, "adaptive", size) for size in range(2, 8)]

    def interrupt(case: WatchReplay, num_done: int, num_all: int) -> None:
        assert num_all == len(cases)
        if num_done == 2:
            raise KeyboardInterrupt

    alone = run_cases(accesses, cases)
    assert run_cases(accesses, cases, on_replay=interrupt) == {case: alone[case] for case in cases[:2]}
    before = active_children()
    some = run_cases(accesses, cases, jobs=2, on_replay=interrupt)
    assert len(some) == 2
    assert some.items() <= alone.items()
    wait_until(lambda: set(active_children()) <= set(before))  # a thread of the pool reaps them too
