"""Preempted requests and host memory: saved when they leave, brought back when they come again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.plan import BlockCopy, Draft, ExecutionPlan, StepResult
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.core.types import FinishReason, Namespace, Tokens
from sagellm.engines.build import build_kv, build_swap
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.manager import SwapSpace
from sagellm.kvmgr.scheduler_ir import PassPipeline, strategies
from tests.builders import check_books, expected_tokens, fake_engine, request
from tests.effort import examples
from tests.engines.kv_scenes import Preempt

LONG, OTHER = list(range(10)), [50 + i for i in range(9)]


class PreemptOnce:
    """A pass that preempts "a" when it has 13 tokens, also where the step is planned a second time."""

    name = "preempt_once"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        for state in list(draft.running):
            if state.request_id == "a" and len(state.tokens) >= 13 and not state.num_preemptions:
                draft.preempt(state)


class Flood:
    """A pass that has so much evicted after a preemption that nothing of it stays in the index."""

    name = "flood"

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        if self.engine is not None and not draft.preempted and draft.waiting:
            self.engine.kv.clear_cache()


def passes(*first: SchedulerPass, **options: object) -> list[SchedulerPass]:
    return [
        *first,
        strategies.make_pass("chunked_prefill", {}),
        strategies.make_pass("memory_aware_preemption", options),
    ]


def overlapped(backend: TokenMemoryBackend, chosen: Sequence[SchedulerPass], *, overlap: bool) -> Engine:
    config, capability = KVConfig(block_size=4), backend.capability()
    kv = build_kv(config, capability.num_blocks, swap=build_swap(capability), clock=ManualClock())
    scheduler = PassPipeline(chosen)
    return Engine(backend, kv, scheduler, max_batched_tokens=32, overlap=overlap, clock=ManualClock())


def serve(engine: Engine) -> tuple[dict[str, list[int]], list[ExecutionPlan]]:
    """Until all have ended: tokens by request, and the plans."""
    got: dict[str, list[int]] = {}
    plans = []
    while engine.has_work():
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        assert engine.last_plan is not None
        plans.append(engine.last_plan)
        check_books(engine)
        assert len(plans) < 1000
    return got, plans


def swapping(num_host_blocks: int, **options: object) -> tuple[Engine, TokenMemoryBackend]:
    """An engine that preempts "a" when it has 13 tokens, and whose cache is then lost."""
    backend = TokenMemoryBackend(num_blocks=32, num_host_blocks=num_host_blocks)
    flood = Flood()
    engine = fake_engine(backend, passes=passes(Preempt("a", 13), flood, **options))
    flood.engine = engine
    engine.add(request("a", LONG, 8))
    engine.add(request("b", OTHER, 8))
    return engine, backend


def tiers(plan: ExecutionPlan) -> list[tuple[str, str]]:
    return [(copy.source_tier, copy.target_tier) for copy in plan.copies]


def test_a_preempted_request_goes_on_from_host_memory() -> None:
    engine, backend = swapping(8)
    got, plans = serve(engine)
    assert got == {"a": expected_tokens(backend, LONG, 8), "b": expected_tokens(backend, OTHER, 8)}
    [left] = [plan for plan in plans if plan.preempted]
    assert tiers(left) == [("hbm", "dram")] * 3, "12 of 13 tokens are computed, in blocks of 4"
    [back] = [plan for plan in plans if ("dram", "hbm") in tiers(plan)]
    assert tiers(back) == [("dram", "hbm")] * 3
    [join] = back.joined
    assert (join.request_id, join.num_computed, len(join.tokens) // 4) == ("a", 12, 13)
    assert engine.stats().host_blocks_used == 0


def test_what_is_still_cached_is_not_copied_back() -> None:
    backend = TokenMemoryBackend(num_blocks=32, num_host_blocks=8)
    engine = fake_engine(backend, passes=passes(Preempt("a", 14)))
    engine.add(request("a", LONG, 8))
    got, plans = serve(engine)
    assert got["a"] == expected_tokens(backend, LONG, 8)
    [back] = [plan for plan in plans if ("dram", "hbm") in tiers(plan)]
    assert len(back.copies) == 1, "the whole blocks are in the index, the last one is not"
    assert back.joined[0].num_computed == 13


@pytest.mark.parametrize(("num_host_blocks", "options"), [(2, {}), (0, {}), (8, {"swap": "never"})])
def test_without_room_it_is_computed_again(num_host_blocks: int, options: dict[str, object]) -> None:
    engine, backend = swapping(num_host_blocks, **options)
    got, plans = serve(engine)
    assert got == {"a": expected_tokens(backend, LONG, 8), "b": expected_tokens(backend, OTHER, 8)}
    assert not any(plan.copies for plan in plans)
    assert [join.num_computed for plan in plans for join in plan.joined if join.request_id == "a"] == [0, 0]


def test_a_step_that_fails_has_saved_nothing() -> None:
    class Fails(TokenMemoryBackend):
        def execute(self, plan: ExecutionPlan) -> StepResult:
            if ("hbm", "dram") in tiers(plan):
                raise RuntimeError("for once")
            return super().execute(plan)

    backend = Fails(num_blocks=32, num_host_blocks=8)
    engine = fake_engine(backend, passes=passes(Preempt("a", 13)))
    engine.add(request("a", LONG, 8))
    engine.add(request("b", OTHER, 8))
    seen = 0
    got: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        seen = max(seen, engine.stats().host_blocks_used)
        check_books(engine)
    assert seen == 0
    assert got == {"a": expected_tokens(backend, LONG, 8), "b": expected_tokens(backend, OTHER, 8)}


def test_without_a_prefix_cache_it_is_swapped_too() -> None:
    backend = TokenMemoryBackend(num_blocks=32, num_host_blocks=8)
    engine = fake_engine(backend, passes=passes(Preempt("a", 13)), prefix_caching=False)
    engine.add(request("a", LONG, 8))
    got, plans = serve(engine)
    assert got["a"] == expected_tokens(backend, LONG, 8)
    assert [len(plan.copies) for plan in plans if plan.copies] == [3, 3]


@pytest.mark.parametrize("error", [RuntimeError("for once"), CapacityError("for once")])
@pytest.mark.parametrize("way", [("hbm", "dram"), ("dram", "hbm")])
@pytest.mark.parametrize("overlap", [False, True])
def test_copies_that_always_fail_cost_no_request_anything(
    error: Exception, way: tuple[str, str], *, overlap: bool
) -> None:
    class Fails(TokenMemoryBackend):
        def execute(self, plan: ExecutionPlan) -> StepResult:
            if way in tiers(plan):
                raise error
            return super().execute(plan)

    backend, flood = Fails(num_blocks=32, num_host_blocks=8), Flood()
    engine = overlapped(backend, passes(PreemptOnce(), flood), overlap=overlap)
    flood.engine = engine
    engine.add(request("a", LONG, 8))
    engine.add(request("b", OTHER, 8))
    got, _ = serve(engine)
    assert got == {"a": expected_tokens(backend, LONG, 8), "b": expected_tokens(backend, OTHER, 8)}
    assert engine.stats().host_blocks_used == 0
    assert not engine.kv.is_published("a")


def test_an_id_used_again_gets_nothing_of_the_request_before() -> None:
    """It was aborted while the step was in flight that brings it back."""
    backend, flood = TokenMemoryBackend(num_blocks=32, num_host_blocks=8), Flood()
    engine = overlapped(backend, passes(PreemptOnce(), flood), overlap=True)
    flood.engine = engine
    engine.add(request("a", LONG, 12))
    engine.add(request("b", OTHER, 20))
    for _ in range(30):
        engine.step()
        flight = engine._in_flight
        if flight is not None and ("dram", "hbm") in tiers(flight.plan):
            break
    else:
        raise AssertionError("nothing was brought back")
    engine.abort("a")
    assert engine.stats().host_blocks_used == 0
    other = [1, 1, 1, *range(40, 57)]
    engine.add(request("a", other, 6))
    got, _ = serve(engine)
    assert got["a"] == expected_tokens(backend, other, 6)


def test_an_aborted_request_leaves_host_memory() -> None:
    engine, _ = swapping(8)
    while not engine.stats().host_blocks_used:
        engine.step()
    assert engine.stats().host_blocks_used == 3
    engine.abort("a")
    assert engine.stats().host_blocks_used == 0
    check_books(engine)
    serve(engine)


def test_what_others_use_is_not_saved() -> None:
    backend = TokenMemoryBackend(num_blocks=32, num_host_blocks=8)
    engine = fake_engine(backend, passes=passes(Preempt("a", 14)))
    engine.add(request("a", LONG, 8))
    engine.step()
    engine.add(request("b", [*LONG[:8], 60], 9))
    got, plans = serve(engine)
    [left] = [plan for plan in plans if plan.preempted]
    assert len(left.copies) == 2, "of four blocks two are in use by another"
    assert got["a"] == expected_tokens(backend, LONG, 8)[1:]
    assert engine.stats().host_blocks_used == 0


def test_saved_blocks_continue_what_the_index_has() -> None:
    space, tokens = SwapSpace(FreeListPool(8, 4)), Tokens(range(20))
    copies = space.save("a", tokens, [7, 8, 9, 6], 2, 13)
    assert copies == [BlockCopy("hbm", 9, "dram", 0), BlockCopy("hbm", 6, "dram", 1)]
    hits = [PrefixHit(4 * count, count, tokens, Namespace()) for count in range(5)]
    longer = [space.extend_hit(hit, "a") for hit in hits]
    assert [hit.num_tokens for hit in longer] == [0, 4, 13, 13, 16], "a gap cannot be bridged"
    assert space.copies_back(longer[3], "a", [1, 2, 3, 4]) == [BlockCopy("dram", 1, "hbm", 4)]
    assert space.extend_hit(hits[2], "b") == hits[2]
    again = replace(hits[2], tokens=Tokens(range(20)))
    assert space.extend_hit(again, "a") == again, "another request of that name"
    with pytest.raises(BookkeepingError, match="b counts on 5 tokens that are not saved"):
        space.copies_back(longer[2], "b", [1, 2, 3, 4])
    with pytest.raises(CapacityError, match="b: 7 host blocks asked for, 6 are free"):
        space.save("b", tokens, range(7), 0, 28)
    space.check()
    space.drop_uncopied(["a"])
    assert space.num_used == 0


def test_only_the_preempted_are_swapped() -> None:
    class Wrong:
        name = "wrong"

        def __call__(self, draft: Draft, view: SchedulingView) -> None:
            draft.preempted[draft.waiting[0]] = True

    engine = fake_engine(passes=[*passes(), Wrong()])
    engine.add(request("a", LONG, 2))
    with pytest.raises(Exception, match="a is both scheduled and preempted"):
        engine.step()


@settings(max_examples=examples(120), deadline=None)
@given(
    seed=st.integers(0, 100_000),
    num_host_blocks=st.sampled_from([2, 6, 30]),
    victims=st.sampled_from(["last", "newest", "most_blocks", "cheapest"]),
    caching=st.sampled_from(["", "index_as_computed", "no prefix_caching"]),
    fails=st.sampled_from([0.0, 0.05]),
)
def test_the_same_tokens_under_pressure(
    seed: int, num_host_blocks: int, victims: str, caching: str, fails: float
) -> None:
    """Small memory, many preemptions, aborts and failing steps: every request gets its own tokens."""
    draw = random.Random(seed)

    class Failing(TokenMemoryBackend):
        def execute(self, plan: ExecutionPlan) -> StepResult:
            if plan.sample_rows and draw.random() < fails:
                raise RuntimeError("for once")
            return super().execute(plan)

    backend = Failing(num_blocks=draw.randrange(12, 24), num_host_blocks=num_host_blocks, max_model_len=40)
    every: Sequence[SchedulerPass] = passes(
        strategies.make_pass("priority_based", {"preempt": True}), victims=victims
    )
    engine = fake_engine(
        backend,
        passes=every,
        prefix_caching=caching != "no prefix_caching",
        index_as_computed=caching == "index_as_computed",
    )
    expected: dict[str, list[int]] = {}
    gone: set[str] = set()
    got: dict[str, list[int]] = {}

    def take() -> None:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is FinishReason.ERROR:
                gone.add(output.request_id)
        check_books(engine)

    for number in range(10):
        name, prompt = str(number), [draw.randrange(3) for _ in range(draw.randrange(1, 20))]
        expected[name] = expected_tokens(backend, prompt, 14)
        engine.add(request(name, prompt, 14, priority=draw.randrange(2)))
        for _ in range(draw.randrange(6)):
            take()
            victim = str(draw.randrange(number + 1))
            if draw.random() < 0.05 and engine.abort(victim):
                gone.add(victim)
    while engine.has_work():
        take()
    for name, tokens in expected.items():
        mine = got.get(name, [])
        assert mine == tokens[: len(mine)], name
        assert len(mine) == 14 or name in gone
    assert engine.stats().host_blocks_used == 0
    assert engine.kv.block_states().active == 0


def test_host_blocks_that_are_not_there_are_asked_for_in_numbers() -> None:
    space = SwapSpace(FreeListPool(total_blocks=2, block_size=4))
    space.save("a", Tokens(range(4)), [7], 0, 4)
    with pytest.raises(CapacityError, match="b: 2 host blocks asked for, 1 are free"):
        space.save("b", Tokens(range(12)), [4, 5, 6], 1, 12)
    space.check()
    assert (space.num_used, space.num_free) == (1, 1)


def test_what_has_been_copied_outlives_a_later_failure() -> None:
    space = SwapSpace(FreeListPool(total_blocks=2, block_size=4))
    for name in "ab":
        space.save(name, Tokens(range(4)), [7], 0, 4)
    space.copied(["a"])
    space.drop_uncopied(["a", "b"])
    assert space.num_used == 1
    space.drop("a")
    assert space.num_used == 0
