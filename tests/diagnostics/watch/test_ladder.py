"""The ladder and the advice, on streams of the reference cache."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from sagellm.core.errors import ConfigError
from sagellm.core.types import Tokens
from sagellm.diagnostics.watch.accesses import CacheAccess, KeptAccesses
from sagellm.diagnostics.watch.advice import advice
from sagellm.diagnostics.watch.cache_view import CacheView
from sagellm.diagnostics.watch.counters import ServerCounters
from sagellm.diagnostics.watch.ladder import (
    NEEDS_COUNTERS,
    NEEDS_HITS,
    NEEDS_SIZE,
    Ladder,
    Watched,
    share_of_singles,
    with_repeated,
)
from sagellm.diagnostics.watch.replays import WatchedRequests
from sagellm.diagnostics.watch.report import UNLIMITED, Basis
from tests.diagnostics.watch.reference_cache import BLOCK, ReferenceCache

Turn = tuple[list[int], list[int]]


def conversations(seed: int, num_turns: int = 300) -> list[Turn]:
    """Prompts that repeat all turns before them, with a partial last block, and their answers."""
    draw = random.Random(seed)
    texts = [[draw.randrange(500) for _ in range(draw.randrange(8, 60))] for _ in range(15)]
    turns = []
    for _ in range(num_turns):
        number = min(int(draw.expovariate(0.2)), len(texts) - 1)
        prompt = texts[number] + [draw.randrange(500) for _ in range(draw.randrange(2, 20))]
        answer = [draw.randrange(500) for _ in range(draw.randrange(2, 12))]
        turns.append((prompt, answer))
        texts[number] = [*prompt, *answer] if len(prompt) < 200 else texts[number][:20]
    return turns


class Served:
    """A cache that has served `turns`, what is seen of it, and its counters."""

    def __init__(
        self, turns: Sequence[Turn], num_blocks: int, *, reports_hits: bool, answers_at_once: bool = False
    ) -> None:
        self.cache = ReferenceCache(num_blocks, reports_hits=reports_hits, answers_at_once=answers_at_once)
        self.kept = KeptAccesses()
        self.view = CacheView(on_access=self.kept.add)
        if answers_at_once:
            self.view.set_answers_at_once(0)
        hit = sum(
            self.cache.serve(prompt, answer, time_s=float(n)) for n, (prompt, answer) in enumerate(turns)
        )
        for item in self.cache.items:
            self.view.feed(0, item)
        self.view.finish()
        queried = sum(len(prompt) for prompt, _ in turns)
        self.counters = ServerCounters("vLLM", "m", queried, hit * BLOCK, len(turns))
        self.ratio = hit * BLOCK / queried

    def ladder(self, **changes: object) -> Ladder:
        known = {"counters": self.counters, "num_blocks": self.cache.num_blocks, "block_size": BLOCK}
        return Ladder(self.view, [Watched(**known | changes)], list(self.kept))  # type: ignore[arg-type]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_double_memory_from_events_alone_is_within_two_points(seed: int, *, at_once: bool) -> None:
    turns = conversations(seed)
    small, large = (Served(turns, size, reports_hits=False, answers_at_once=at_once) for size in (150, 300))
    known = small.ladder().lru_from_events(2.0)
    assert known == pytest.approx(large.ratio, abs=0.02)
    assert small.ladder().lru_from_events(1.0) == pytest.approx(small.ratio)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_replayed_requests_agree_with_the_server(seed: int, *, at_once: bool) -> None:
    turns = conversations(seed)
    served = {
        size: Served(turns, size, reports_hits=True, answers_at_once=at_once) for size in (75, 150, 300)
    }
    ladder = served[150].ladder()
    for factor, size in ((0.5, 75), (1.0, 150), (2.0, 300)):
        assert ladder.replayed("lru", factor) == pytest.approx(served[size].ratio, abs=0.02)
    assert (ladder.coverage or 0) > 0.97
    lru, adaptive, best = (ladder.replayed(policy, 1.0) for policy in ("lru", "adaptive", "optimum"))
    assert lru is not None and adaptive is not None and best is not None  # noqa: PT018
    assert max(lru, adaptive) <= best <= (ladder.lru_from_events(UNLIMITED) or 0) + 0.02


def test_golden_ratios() -> None:
    ladder = Served(conversations(0), 150, reports_hits=True).ladder()
    found = {(r.policy, r.capacity): r.hit_ratio and round(r.hit_ratio, 4) for r in ladder.rungs()}
    assert found == GOLDEN


GOLDEN = {
    ("server", 1.0): 0.4405,
    ("lru", 1.0): 0.4381,
    ("adaptive", 1.0): 0.4366,
    ("optimum", 1.0): 0.6499,
    ("lru", 0.5): 0.2363,
    ("adaptive", 2.0): 0.7141,
    ("lru", 2.0): 0.7193,
    ("lru", UNLIMITED): 0.8849,
}


def test_without_hits_the_replayed_rungs_say_what_they_need() -> None:
    rungs = list(Served(conversations(1), 150, reports_hits=False).ladder().rungs())
    missing = {(rung.policy, rung.capacity) for rung in rungs if rung.hit_ratio is None}
    assert missing == {("lru", 1), ("adaptive", 1), ("optimum", 1), ("lru", 0.5), ("adaptive", 2)}
    assert {rung.missing for rung in rungs if rung.hit_ratio is None} == {NEEDS_HITS}
    assert all(not rung.missing for rung in rungs if rung.hit_ratio is not None)


def test_what_is_unknown_is_none_and_says_why() -> None:
    served = Served(conversations(1), 150, reports_hits=True)
    blind = {rung.policy: rung for rung in served.ladder(counters=None, num_blocks=None).rungs()}
    assert (blind["server"].hit_ratio, blind["server"].missing) == (None, NEEDS_COUNTERS)
    assert (blind["optimum"].hit_ratio, blind["optimum"].missing) == (None, NEEDS_SIZE)
    assert list(served.ladder(num_blocks=None).curves()) == []
    sizeless = served.ladder(num_blocks=None)
    assert sizeless.lru_from_events(2.0) is None
    assert sizeless.lru_from_events(UNLIMITED) is not None


def test_too_few_known_requests_are_not_replayed() -> None:
    served = Served(conversations(1), 150, reports_hits=True)
    queried, hit = served.counters.num_queried_tokens or 0, served.counters.num_hit_tokens
    ladder = served.ladder(counters=ServerCounters("vLLM", "m", 4 * queried, hit, 1200))
    assert ladder.replayed("lru", 1.0) is None
    assert any(rung.missing.startswith("only 25 %") for rung in ladder.rungs())
    assert [curve.basis for curve in ladder.curves()] == [Basis.EVENTS]


def test_singles_are_shared_out_by_the_counters() -> None:
    served = Served(conversations(2), 150, reports_hits=False)
    sure, single = served.view.stored_tokens(0)
    assert single > 0
    for share in (0.0, 0.25, 1.0):
        computed = round(sure + share * single)
        counters = ServerCounters("vLLM", "m", computed + 100, 100)
        assert share_of_singles(served.view, 0, counters) == pytest.approx(share, abs=0.001)
    many = ServerCounters("vLLM", "m", 10 * (sure + single), 0)
    assert share_of_singles(served.view, 0, many) == 1
    assert share_of_singles(served.view, 0, ServerCounters("vLLM", "m", sure, 0, 10_000)) == 0
    assert share_of_singles(served.view, 0, None) == 0


def test_the_log_keeps_the_last_requests_in_order() -> None:
    kept = KeptAccesses(10)
    for time_s in (3.0, 1.0, 2.0, 4.0):
        kept.add(CacheAccess(time_s, 0, Tokens(array("i", range(4))), 4))
    assert [access.time_s for access in kept] == [2.0, 4.0]
    assert (len(kept), kept.num_dropped) == (2, 2)
    with pytest.raises(ConfigError, match="at least 1"):
        KeptAccesses(0)


def test_answers_are_stored_and_not_counted() -> None:
    accesses = [CacheAccess(0.0, 0, Tokens([1, 2, 3, 4]), 2), CacheAccess(1.0, 0, Tokens([1, 2, 3, 5]), 3)]
    requests = WatchedRequests(accesses)
    assert sum(requests.hits("lru", 10)) == 3
    assert sum(requests.hits("optimum", 10)) == 3


def test_repeated_look_ups_are_requests_as_far_as_the_counters_have_more() -> None:
    accesses = [
        CacheAccess(0.0, 0, Tokens([1]), 1, 1, 2),
        CacheAccess(1.0, 0, Tokens([2]), 1),
        CacheAccess(2.0, 1, Tokens([1]), 1, 1, 5),
    ]
    for num_requests, found in ((None, 3), (2, 3), (3, 4), (4, 5), (9, 5)):
        counters = ServerCounters("vLLM", "m", 100, 50, num_requests)
        watched = [Watched(counters, 10, BLOCK), Watched(None, 10, BLOCK)]
        assert len(with_repeated(accesses, watched)) == found


def test_advice_names_memory_and_its_gain() -> None:
    served = Served(conversations(0), 60, reports_hits=True)
    ladder = served.ladder()
    missed = served.view.missed(ladder.shares_of_singles)
    [first, *rest] = advice(ladder, missed, kv_bytes=2**30)
    gain = 100 * ((ladder.lru_from_events(2.0) or 0) - served.ratio)
    assert first.gain_points > 5
    assert any("GiB of KV memory" in one.text for one in [first, *rest])
    assert first.gain_points >= max((one.gain_points for one in rest), default=0)
    assert any("% KV memory" in one.text for one in advice(ladder, missed, kv_bytes=None))
    assert gain > 1


def test_advice_where_nothing_helps() -> None:
    draw = random.Random(3)
    turns: list[Turn] = [([draw.randrange(10_000) for _ in range(40)], []) for _ in range(50)]
    served = Served(turns, 100, reports_hits=True)
    ladder = served.ladder()
    [only] = advice(ladder, served.view.missed(ladder.shares_of_singles), None)
    assert only.text.startswith("Nothing that was measured would add a point: 100 %")
    assert only.gain_points == 0


def test_one_cache_for_a_fleet_hits_what_one_server_with_all_memory_hits() -> None:
    """Turns of one conversation go to both servers in turn."""
    turns = conversations(4)
    caches = [ReferenceCache(150, reports_hits=True) for _ in range(2)]
    kept = KeptAccesses()
    view = CacheView(2, on_access=kept.add)
    for number, (prompt, answer) in enumerate(turns):
        cache = caches[number % 2]
        num_fed = len(cache.items)
        cache.serve(prompt, answer, time_s=float(number))
        for item in cache.items[num_fed:]:
            view.feed(number % 2, item)
    view.finish()
    requests = len(turns) // 2
    watched = [
        Watched(
            ServerCounters(
                "vLLM", "m", cache.num_queried * BLOCK + 2 * requests, cache.num_hit * BLOCK, requests
            ),
            cache.num_blocks,
            BLOCK,
        )
        for cache in caches
    ]
    ladder = Ladder(view, watched, list(kept))
    alone = Served(turns, 300, reports_hits=False).ratio
    assert ladder.pooled() == pytest.approx(alone, abs=0.02)
    assert (ladder.now or 0) + 0.05 < alone
    bases = [rung.basis for rung in ladder.rungs() if rung.policy == "routing"]
    assert bases == [Basis.EVENTS, Basis.REQUESTS]
    other_size = [watched[0], Watched(watched[1].counters, 150, 2 * BLOCK)]
    assert Ladder(view, other_size, list(kept)).pooled() is None


def test_a_server_that_hits_as_adaptive_does_is_not_told_to_use_it() -> None:
    served = Served(conversations(11), 100, reports_hits=True)
    adaptive = served.ladder().replayed("adaptive", 1.0) or 0.0
    lru = served.ladder().replayed("lru", 1.0) or 0.0
    assert adaptive > lru + 0.03
    queried = served.counters.num_queried_tokens or 0
    for now, gain in ((lru, 100 * (adaptive - lru)), (adaptive, 0.0), (0.5 * lru, 100 * (adaptive - lru))):
        counters = ServerCounters("vLLM", "m", queried, round(now * queried), served.counters.num_requests)
        ladder = served.ladder(counters=counters)
        told = [
            each.gain_points
            for each in advice(ladder, served.view.missed(ladder.shares_of_singles), None)
            if "`adaptive`" in each.text
        ]
        assert told == ([pytest.approx(gain, abs=0.05)] if gain >= 1 else [])
        assert ladder.replay_error == pytest.approx(lru - now, abs=1e-4)
