"""Whom each simple router chooses."""

from __future__ import annotations

import pytest

from sagellm.control_plane.router import make_router
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.router import CachedPrefix, ExecutionInstance, InstanceType, RequestMetadata
from sagellm.core.types import Tokens

ONE = RequestMetadata("1", Tokens(range(1000)))
A = ExecutionInstance("a", num_waiting=1, num_running=3, num_free_blocks=10)
B = ExecutionInstance("b", num_running=2, num_free_blocks=5)
C = ExecutionInstance("c", num_waiting=2, num_free_blocks=9)
EMBEDS = ExecutionInstance("e", InstanceType.EMBEDDING)
CACHED = {"b": CachedPrefix(100, 100), "c": CachedPrefix(40, 40)}


def chosen(name: str, *instances: ExecutionInstance, times: int = 1) -> list[str]:
    router = make_router(name)
    cached = [CACHED.get(one.instance_id, CachedPrefix()) for one in instances]
    return [router.place(ONE, instances, cached).prefill for _ in range(times)]


def test_round_robin_goes_round() -> None:
    assert chosen("round_robin", A, EMBEDS, B, C, times=4) == ["a", "b", "c", "a"]


def test_random_takes_all() -> None:
    assert set(chosen("random", A, B, C, times=50)) == {"a", "b", "c"}


def test_least_loaded_counts_requests_then_room() -> None:
    assert chosen("least_loaded", EMBEDS, A, B, C) == ["c"], "two requests each, c has more free blocks"
    assert chosen("least_loaded", A, B) == ["b"]


def test_prefix_aware_weighs_what_is_cached_against_the_load() -> None:
    assert chosen("prefix_aware", A, B, C) == ["b"]
    crowded, cached = ExecutionInstance("d", num_running=10), [CachedPrefix(4000), CachedPrefix(100)]
    for tokens, name in ((1000.0, "b"), (10.0, "d")):
        router = make_router({"name": "prefix_aware", "tokens_per_request": tokens})
        placement = router.place(ONE, [crowded, B], cached)
        assert placement.prefill == name
    assert placement.reason == "4000 tokens cached, 10 requests"


def queued(name: str, tokens: int) -> ExecutionInstance:
    return ExecutionInstance(name, num_queued_tokens=tokens)


def test_llm_d_stays_with_the_prefix_until_it_is_saturated() -> None:
    options = {"name": "llm_d", "max_ttft_penalty_s": 2.0, "peak_prefill_tokens_per_s": 1000.0}
    warm = [CachedPrefix(), CachedPrefix(900, 900)]
    for ahead, expected in ((2000, "w"), (2001, "c")):
        placement = make_router(options).place(ONE, [queued("c", 0), queued("w", ahead)], warm)
        assert placement.prefill == expected
    assert placement.reason.startswith("saturated")
    always = make_router(options | {"max_ttft_penalty_s": 0.0})
    assert always.place(ONE, [queued("c", 0), queued("w", 10**6)], warm).prefill == "w"


def test_llm_d_goes_by_uncached_tokens_where_no_prefix_is_long_enough() -> None:
    half = [CachedPrefix(500), CachedPrefix()]
    for ahead, expected in ((499, "a"), (501, "b")):
        router = make_router("llm_d", ManualClock())
        assert router.place(ONE, [queued("a", ahead), queued("b", 0)], half).prefill == expected


def test_llm_d_counts_what_it_has_placed_itself() -> None:
    router = make_router("llm_d", ManualClock(5.0))
    fleet, cached = [queued("a", 0), queued("b", 0)], [CachedPrefix()] * 2
    assert [router.place(ONE, fleet, cached).prefill for _ in range(4)] == ["a", "b", "a", "b"]


def test_llm_d_needs_a_speed() -> None:
    with pytest.raises(ConfigError, match="a number above 0"):
        make_router({"name": "llm_d", "peak_prefill_tokens_per_s": 0.0})
