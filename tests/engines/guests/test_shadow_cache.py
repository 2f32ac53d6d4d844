"""`ShadowCache` reuses what `sagellm replay` says, and never holds more than its capacity."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.benchmarks.replay.replayer import replay
from sagellm.benchmarks.traces import TraceRequest
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.eviction import EvictionPolicy, Use
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.build_kv import make_policy
from sagellm.engines.guests import ShadowCache, path_of
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

CAPACITY = 40


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def policy(name: str, clock: ManualClock) -> EvictionPolicy:
    return make_policy(name, capacity=CAPACITY, clock=clock)


def requests(seed: int, count: int) -> list[TraceRequest]:
    """Conversations that go on, and prompts that come once."""
    rng, made, open_ones = random.Random(seed), [], [[1, 2, 3]]
    for number in range(count):
        if rng.random() < 0.7:
            path = open_ones[rng.randrange(len(open_ones))]
            path += [100 * number + i for i in range(10, 10 + rng.randrange(1, 5))]
        else:
            open_ones.append(path := [1, 2, 3, 100 * number])
            open_ones = open_ones[-6:]
        made.append(
            TraceRequest(
                time_s=float(number),
                num_input_tokens=len(path),
                num_output_tokens=3,
                ids=Tokens(path[:CAPACITY]),
                namespace=Namespace(),
            )
        )
    return made


@pytest.mark.parametrize("name", ["lru", "adaptive", "s3fifo"])
@pytest.mark.parametrize("seed", range(3))
def test_one_request_at_a_time_reuses_what_replay_says(name: str, seed: int) -> None:
    trace = requests(seed, 400)
    clock = ManualClock(0.0)
    index = RadixIndex(1, clock=clock, policy_factory=partial(policy, name, clock))
    expected = replay(trace, index, clock, CAPACITY).hits
    clock = ManualClock(0.0)
    shadow = ShadowCache(CAPACITY + 1, partial(policy, name, clock), clock, num_open=1)
    hits = []
    for number, request in enumerate(trace):
        clock.advance(request.time_s - clock.now())
        digests = [digest(block) for block in request.ids]
        hits.append(shadow.admit(str(number), digests, len(digests)))
        shadow.finish(str(number), digests, Use(3))
    assert hits == expected.tolist()
    assert shadow.reuse.num_hits == sum(hits)
    assert 0.1 < shadow.reuse.ratio < 0.9


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30), st.integers(0, 20)), max_size=60))
def test_requests_at_the_same_time(steps: list[tuple[int, int, int]]) -> None:
    """More may be held together than fits; the books balance all the same."""
    clock = ManualClock(0.0)
    shadow = ShadowCache(CAPACITY, partial(policy, "lru", clock), clock, num_open=2)
    running: dict[int, list[bytes]] = {}
    for family, length, num_more in steps:
        clock.advance(1.0)
        if family in running:
            digests = running.pop(family)
            shadow.finish(str(family), [*digests, *map(digest, range(10_000, 10_000 + num_more))])
        else:
            running[family] = [digest(i if i < 4 else 100 * (family + 1) + i) for i in range(length)]
            hits = shadow.admit(str(family), running[family], length - 1)
            assert 0 <= hits < length
        shadow.check()


def test_a_hit_leaves_the_last_token_to_be_computed() -> None:
    clock = ManualClock(0.0)
    shadow = ShadowCache(CAPACITY, partial(policy, "lru", clock), clock)
    digests = [digest(i) for i in range(4)]
    assert shadow.admit("a", digests, 3) == 0
    shadow.finish("a", digests)
    assert shadow.admit("b", digests, 3) == 3
    shadow.finish("b", digests)
    shadow.clear()
    assert shadow.admit("c", digests, 3) == 0


def test_what_was_never_admitted_may_finish() -> None:
    clock = ManualClock(0.0)
    shadow = ShadowCache(CAPACITY, partial(policy, "lru", clock), clock)
    shadow.finish("a", [digest(1)])
    shadow.check()
    assert shadow.admit("b", [digest(1)], 1) == 0


def test_short_hashes_are_refused() -> None:
    assert len(path_of([digest(1), digest(2)])) == 8
    with pytest.raises(ValueError, match="at least 16 bytes"):
        path_of([b"short"])
