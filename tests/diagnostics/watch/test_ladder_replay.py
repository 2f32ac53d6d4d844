"""Replays of the ladder, beside a slow LRU cache of single blocks."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.types import Tokens
from sagellm.diagnostics.watch.accesses import CacheAccess
from sagellm.diagnostics.watch.replays import WatchReplay, hit_blocks, run_cases
from tests.effort import examples

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
    assert hit_blocks(accesses, "lru", capacity) == slow_lru_hits(accesses, capacity)


@given(seed=SEEDS, capacity=st.integers(1, 40))
@settings(max_examples=examples(60), deadline=None)
def test_no_policy_hits_more_than_the_offline_optimum(seed: int, capacity: int) -> None:
    accesses = some_requests(seed)
    lru, adaptive, best = (
        hit_blocks(accesses, policy, capacity) for policy in ("lru", "adaptive", "optimum")
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
