"""What KV events tell, beside a plain LRU cache that is run again with more memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sagellm.control_plane.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ReceivedBatch,
)
from sagellm.control_plane.kv_events.sequence import Gap, Malformed, Restart
from sagellm.core.errors import ConfigError
from sagellm.diagnostics.watch import cache_view
from sagellm.diagnostics.watch.accesses import CacheAccess
from sagellm.diagnostics.watch.block_contents import BlockContent
from sagellm.diagnostics.watch.cache_view import CacheView
from sagellm.diagnostics.watch.ghosts import CHUNK, GhostStack
from sagellm.diagnostics.watch.report import UNLIMITED
from tests.diagnostics.watch.reference_cache import BLOCK, ReferenceCache
from tests.effort import examples


def workload(seed: int, num_requests: int = 120) -> list[list[int]]:
    """Prompts of whole blocks that share prefixes: documents with questions, and conversations that grow."""
    draw = random.Random(seed)
    texts: list[list[int]] = [
        [draw.randrange(50) for _ in range(BLOCK * draw.randrange(1, 9))] for _ in range(12)
    ]
    prompts = []
    for _ in range(num_requests):
        number = min(int(draw.expovariate(0.25)), len(texts) - 1)
        extra = [draw.randrange(50) for _ in range(BLOCK * draw.randrange(3))]
        prompts.append(texts[number] + extra)
        if draw.random() < 0.3 and len(prompts[-1]) < 20 * BLOCK:
            texts[number] = prompts[-1]
    return prompts


def view_of(cache: ReferenceCache, **options: object) -> CacheView:
    view = CacheView(**options)  # type: ignore[arg-type]
    for item in cache.items:
        view.feed(0, item)
    view.check()
    return view


def serve(prompts: Sequence[Sequence[int]], num_blocks: int, *, reports_hits: bool = False) -> ReferenceCache:
    cache = ReferenceCache(num_blocks, reports_hits=reports_hits)
    for number, prompt in enumerate(prompts):
        cache.serve(prompt, time_s=float(number))
    return cache


@pytest.mark.parametrize("reports_hits", [False, True])
@given(seed=st.integers(0, 2**20), more=st.integers(0, 80))
@settings(max_examples=examples(40), deadline=None)
def test_lru_with_more_memory_is_known_exactly(reports_hits: bool, seed: int, more: int) -> None:
    prompts = workload(seed)
    small, large = serve(prompts, 40, reports_hits=reports_hits), serve(prompts, 40 + more)
    view = view_of(small)
    # Each request's blocks come in one event. One that hits a prefix and misses one block is no answer here.
    gain = view.depth_curve(0, 1.0, had_past=False).within(more)
    assert small.num_hit * BLOCK + gain == large.num_hit * BLOCK


def test_unlimited_memory_hits_whatever_was_seen() -> None:
    prompts = workload(3)
    small, endless = serve(prompts, 40), serve(prompts, 100_000)
    view = view_of(small)
    assert (small.num_hit - endless.num_hit) * BLOCK + view.depth_curve(0, 1.0, had_past=False).within(
        UNLIMITED
    ) == 0
    stored, singles = view.stored_tokens(0)
    assert stored + singles == (small.num_queried - small.num_hit) * BLOCK


def test_requests_are_reconstructed_where_hits_are_reported() -> None:
    prompts = workload(5)
    cache, found = ReferenceCache(60, reports_hits=True), list[CacheAccess]()
    for number, prompt in enumerate(prompts):
        cache.serve(prompt, time_s=float(number))
        cache.idle()  # else a hit of a whole prompt could be that of a request that waits
    view = view_of(cache, on_access=found.append)
    view.finish()
    assert view.sees_hits
    assert [access.num_queried for access in sorted(found, key=lambda access: access.time_s)] == [
        len(prompt) // BLOCK for prompt in prompts[: len(found)]
    ]
    paths: dict[tuple[int, ...], int] = {}
    for access, prompt in zip(sorted(found, key=lambda access: access.time_s), prompts, strict=True):
        for n in range(len(prompt) // BLOCK):  # equal numbers are equal prefixes
            assert paths.setdefault(tuple(prompt[: (n + 1) * BLOCK]), access.blocks[n]) == access.blocks[n]
    assert len(set(paths.values())) == len(paths)


def test_answers_are_not_prompts() -> None:
    cache, found = ReferenceCache(100, reports_hits=True), list[CacheAccess]()
    first, answer = list(range(12)), list(range(100, 109))
    cache.serve(first, answer, time_s=1.0)
    cache.serve([*first, *answer[:8], 1, 2, 3, 4], time_s=2.0)
    view = view_of(cache, on_access=found.append)
    view.finish()
    counted = [(access.num_queried, len(access.blocks)) for access in sorted(found, key=lambda a: a.time_s)]
    assert counted == [(3, 5), (6, 6)]
    assert view.stored_tokens(0) == ((3 + 1) * BLOCK, 2 * BLOCK)


def test_a_prompt_that_is_stored_anew_after_its_eviction_is_another_request() -> None:
    cache, found = ReferenceCache(6, reports_hits=True), list[CacheAccess]()
    for turn in range(4):
        cache.serve([*range(16)], time_s=float(turn))
        cache.serve([*range(40, 64)], time_s=turn + 0.5)
    view = view_of(cache, on_access=found.append)
    view.finish()
    assert len(found) == 8


def test_a_request_that_waits_is_looked_up_in_each_step_and_counts_once() -> None:
    cache, found = ReferenceCache(100, reports_hits=True), list[CacheAccess]()
    cache.serve(list(range(8)))
    for _ in range(3):
        cache.serve(list(range(8)))  # a hit of all blocks in three steps
    view = view_of(cache, on_access=found.append)
    view.finish()
    assert [(access.num_queried, access.num_repeated) for access in found] == [(2, 0), (2, 2)]


@pytest.mark.parametrize("seed", range(5))
def test_hits_of_blocks_from_before_the_watch_are_told_from_stores(seed: int) -> None:
    """The watch begins after 60 of 160 requests, with a full cache."""
    prompts, found = workload(seed, 160), list[CacheAccess]()
    cache = serve(prompts[:60], 40, reports_hits=True)
    num_before, queried, hit = len(cache.items), cache.num_queried, cache.num_hit
    for number, prompt in enumerate(prompts[60:], 60):
        cache.serve(prompt, time_s=float(number))
    view = CacheView(on_access=found.append)
    for item in cache.items[num_before:]:
        view.feed(0, item)
        view.check()
    view.finish()
    queried, hit = cache.num_queried - queried, cache.num_hit - hit
    num_known = sum(access.num_queried + access.num_repeated * access.num_hit for access in found)
    assert num_known == pytest.approx(queried, rel=0.02)
    num_hit = sum((1 + access.num_repeated) * access.num_hit for access in found)
    assert num_hit == pytest.approx(hit, abs=0.03 * queried)
    stored, singles = view.stored_tokens(0)
    assert stored + singles == pytest.approx((queried - hit) * BLOCK, abs=0.03 * queried * BLOCK)
    assert view.num_free_at_first(0) == pytest.approx(0, abs=4)


@pytest.mark.parametrize("seed", range(5))
def test_without_reported_hits_no_store_is_taken_for_a_hit(seed: int) -> None:
    prompts = workload(seed, 160)
    cache = serve(prompts[:60], 40)
    num_before, missed = len(cache.items), cache.num_queried - cache.num_hit
    for number, prompt in enumerate(prompts[60:], 60):
        cache.serve(prompt, time_s=float(number))
    view = CacheView()
    for item in cache.items[num_before:]:
        view.feed(0, item)
    assert not view.sees_hits
    stored, singles = view.stored_tokens(0)
    assert stored + singles == (cache.num_queried - cache.num_hit - missed) * BLOCK


def test_causes() -> None:
    cache = ReferenceCache(6)
    cache.serve([*range(8)])  # 2 blocks never seen
    cache.serve([*range(6), 90, 91])  # the second block differs after two tokens
    cache.serve([*range(8)], salt="b")  # equal text under another salt
    cache.serve([*range(40, 64)])  # 6 blocks: all others are evicted
    cache.serve([*range(8)])  # evicted
    missed = view_of(cache).missed([1.0])
    assert missed.not_aligned == 2
    assert missed.other_namespace == 8
    assert missed.evicted == 8
    assert missed.never_seen == 8 + 2 + 24
    assert missed.unknown == 0


def test_evicted_prefixes_and_gaps() -> None:
    cache = ReferenceCache(6)
    for turn in range(3):
        cache.serve([*range(16)], time_s=100.0 * turn)
        cache.serve([*range(40, 64)], time_s=100.0 * turn + 20)
    view = view_of(cache)
    [first, second] = view.prefixes()
    assert (first.num_tokens, first.num_evictions, first.num_recomputed_tokens) == (16, 2, 32)
    assert (second.num_tokens, second.num_evictions, second.num_recomputed_tokens) == (24, 2, 32)
    assert first.text is None
    [_, told] = view.prefixes(decode=lambda tokens: " ".join(map(str, tokens)), text_tokens=3)
    assert told.text == "40 41 42"
    assert told.digest == second.digest
    gaps = view.gaps()
    assert gaps.counts[gaps.ends_s.index(120.0)] == sum(gaps.counts) == 16


def test_what_another_instance_holds() -> None:
    one, two = ReferenceCache(10), ReferenceCache(10)
    one.serve([*range(16)])
    two.serve([*range(8), 70, 71, 72, 73])
    view = CacheView(2)
    view.feed(0, one.items[0])
    view.feed(1, two.items[0])
    view.check()
    assert (view.held_elsewhere(0), view.held_elsewhere(1)) == (0, 8)


def stored(hashes: list[bytes | int], tokens: int, size: int = BLOCK, **fields: object) -> BlockStored:
    parent = fields.pop("parent", None)
    return BlockStored(hashes, parent, list(range(tokens)), size, **fields)  # type: ignore[arg-type]


def batch(*events: object, seq: int = 0) -> ReceivedBatch:
    return ReceivedBatch(seq, KVEventBatch(0.0, list(events)))  # type: ignore[arg-type]


def test_events_that_make_no_sense_are_counted_and_passed_over() -> None:
    view = CacheView()
    view.feed(0, batch(stored([b"a", b"b"], 7), stored([b"a"], 4, size=0), stored([], 0)))
    view.feed(0, batch(BlockRemoved([b"x", b"x"], None)))
    view.feed(0, Malformed(3, "no msgpack"))
    view.feed(0, Gap(4, 6))
    view.check()
    counts = view.instance(0)
    assert (counts.num_malformed, counts.num_lost, counts.num_cached) == (3, 3, 0)


def test_other_groups_and_media_are_left_out() -> None:
    view = CacheView()
    view.feed(
        0, batch(stored([b"a"], 4, medium="GPU", group_idx=0), stored([b"a"], 4, medium="GPU", group_idx=1))
    )
    view.feed(0, batch(stored([b"a"], 4, medium="CPU", group_idx=0), BlockRemoved([b"a"], "CPU", 0)))
    assert (view.instance(0).num_cached, view.instance(0).num_other_group) == (1, 3)


def test_blocks_behind_an_unknown_one_give_no_request() -> None:
    found: list[CacheAccess] = []
    view = CacheView(on_access=found.append)
    view.feed(0, batch(stored([b"b", b"c"], 8, parent=b"a")))
    view.feed(0, batch(stored([7], 4)))
    view.feed(0, batch(stored([7], 4)))
    view.finish()
    view.check()
    assert [len(access.blocks) for access in found] == [1, 1]
    assert view.instance(0).num_cached == 3


@pytest.mark.parametrize("end", [batch(AllBlocksCleared()), Restart(5)])
def test_a_cleared_cache_has_no_ghosts(end: ReceivedBatch | Restart) -> None:
    view = CacheView()
    view.feed(0, batch(stored([b"a", b"b"], 8), BlockRemoved([b"b"], None)))
    view.feed(0, end)
    view.feed(0, batch(stored([b"a", b"b"], 8)))
    view.check()
    assert view.depth_curve(0, had_past=False).within(UNLIMITED) == 0


def test_memory_is_bounded() -> None:
    cache = ReferenceCache(20)
    draw = random.Random(1)
    for _ in range(400):
        cache.serve([draw.randrange(9) for _ in range(24)], salt=str(draw.randrange(300)))
    view = view_of(cache, max_blocks=64)
    assert len(view._contents) <= 64
    assert len(view._instances[0].ghosts) <= 64
    assert len(view._instances[0].evicted) <= 64


def test_bounds_are_checked() -> None:
    for num_instances, max_blocks in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            CacheView(num_instances, max_blocks=max_blocks)
    with pytest.raises(ConfigError, match="at least 1"):
        GhostStack(0)


@pytest.mark.parametrize(
    ("event", "num_malformed"),
    [
        (stored([1], BLOCK, parent=1), 0),
        (stored([1, 1, 1], 3 * BLOCK), 0),
        (stored([1, 2], 2 * BLOCK, parent=2), 0),
        (stored([1], 7, 7), 0),
        (stored([], 0), 0),
        (stored([1], 1), 1),
        (stored([1], 0, 0), 1),
        (BlockStored([1], None, [2**31] * BLOCK, BLOCK), 1),
        (BlockStored([1], None, [-(2**31) - 1] * BLOCK, BLOCK), 1),
    ],
)
@pytest.mark.parametrize("time_s", [0.0, -1e300, float("inf"), float("nan")])
def test_no_event_ends_the_view(event: BlockStored, num_malformed: int, time_s: float) -> None:
    view = CacheView(max_blocks=4)
    events = (event, stored([1, 2, 3], 3 * BLOCK), event, stored([4], BLOCK, parent=3), event)
    for seq, each in enumerate(events):
        view.feed(0, ReceivedBatch(seq, KVEventBatch(time_s, [each])))
        view.check()
    view.finish()
    assert view.instance(0).num_malformed == 3 * num_malformed
    assert sum(view.gaps().counts) <= 12


class GhostMachine(RuleBasedStateMachine):
    """`GhostStack` beside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: GhostStack[int] = GhostStack(3000)
        self.plain: list[int] = []
        self.next_key = 0

    @rule(number=st.integers(1, 2 * CHUNK))
    def push(self, number: int) -> None:
        for _ in range(number):
            forgotten = self.stack.push(self.next_key)
            self.plain.append(self.next_key)
            self.next_key += 1
            assert forgotten == (self.plain.pop(0) if len(self.plain) > 3000 else None)

    @rule(data=st.data(), number=st.integers(1, 200))
    def pop(self, data: st.DataObject, number: int) -> None:
        draw = random.Random(data.draw(st.integers(0, 2**30)))
        for _ in range(min(number, len(self.plain))):
            key = draw.choice(self.plain)
            assert self.stack.depth(key) == len(self.plain) - 1 - self.plain.index(key)
            assert self.stack.pop(key)
            self.plain.remove(key)

    @rule()
    def clear(self) -> None:
        self.stack.clear()
        self.plain.clear()

    @invariant()
    def agrees(self) -> None:
        self.stack.check()
        assert len(self.stack) == len(self.plain)
        assert self.stack.depth(-1) is None
        assert not self.stack.pop(-1)


TestGhosts = GhostMachine.TestCase
TestGhosts.settings = settings(max_examples=examples(15), stateful_step_count=20, deadline=None)


def test_a_replay_of_the_past_is_not_counted() -> None:
    cache = serve(workload(1), 40)
    view = view_of(cache)
    before = view.instance(0)
    view.begin(0)
    after = view.instance(0)
    assert before.num_block_events > 0
    assert (after.num_block_events, after.num_repaired) == (0, 0)
    assert after.num_cached == before.num_cached


def num_contents() -> int:
    gc.collect()
    return sum(type(each) is BlockContent for each in gc.get_objects())


def test_an_endless_request_keeps_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_view, "MAX_REQUEST_BLOCKS", 500)
    accesses = list[CacheAccess]()
    view = CacheView(max_blocks=1000, on_access=accesses.append)
    num_alive = []
    others = num_contents()
    for number in range(400):
        hashes: list[bytes | int] = [20 * number + i for i in range(20)]
        parent = 20 * number - 1 if number else None
        stored = BlockStored(hashes, parent, [*range(20 * number, 20 * number + 20)], 1, None, "GPU", None)
        removed = BlockRemoved(list(range(20 * number - 2000, 20 * number - 1980)), "GPU")
        view.feed(0, ReceivedBatch(number, KVEventBatch(float(number), [removed, stored])))
        if number % 50 == 49:
            num_alive.append(num_contents() - others)
    assert max(num_alive) < 5000, num_alive
    view.check()
    view.finish()
    assert accesses == []


def stored_with(number: int, tokens: list[int], parent: int | None, *keys: object) -> ReceivedBatch:
    event = BlockStored([number], parent, tokens, 4, extra_keys=[keys] if keys else None)
    return ReceivedBatch(number, KVEventBatch(float(number), [event]))


def test_other_images_are_other_blocks_and_no_other_namespace() -> None:
    """The tokens of two images are the same placeholders."""
    view, text, image = CacheView(), [1, 2, 3, 4], [9] * 4
    view.feed(0, stored_with(1, image, None, ["hash-a", 0]))
    view.feed(0, stored_with(2, image, None, ["hash-b", 0]))
    view.feed(0, stored_with(3, text, 2))
    view.feed(0, stored_with(4, image, 3, ["hash-a", 8]))
    view.feed(0, stored_with(5, image, 3, ["hash-c", 8]))
    view.feed(0, stored_with(6, image, None, "salt", ["hash-a", 0]))
    missed = view.missed([1.0])
    assert (missed.other_namespace, missed.never_seen) == (4, 20)
    view.check()
