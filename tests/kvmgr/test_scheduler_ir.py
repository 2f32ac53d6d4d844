"""Passes and the verifier on small scenarios."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sagellm.compat import BaseSchedulerIR, ScheduleRequest
from sagellm.core.errors import PlanError
from sagellm.core.plan import Chunk, Draft
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.types import Tokens
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.prefix_cache import RadixIndex
from sagellm.kvmgr.scheduler_ir import verify
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import MemoryAwarePreemptionPass
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import fake_engine, request


def ask(
    name: str, length: int, *, priority: int = 0, arrived: float = 0.0, first: int = 0
) -> ScheduleRequest:
    return ScheduleRequest(name, list(range(first, first + length)), 16, priority, arrived)


def test_more_cached_tokens_go_first_until_someone_waits_too_long() -> None:
    index = RadixIndex(block_size=16)
    index.insert(Tokens(range(100, 164)), list(range(4)))
    pending = [ask("cold", 64), ask("warm", 64, first=100)]
    scheduler = BaseSchedulerIR([PrefixCacheAwarePass(index), PriorityBasedPass()])
    names = [r.request_id for r in scheduler.schedule(pending, [], 100).scheduled_requests]
    assert names == ["warm", "cold"]
    scheduler = BaseSchedulerIR([PrefixCacheAwarePass(index, max_wait_s=0.0)])
    names = [r.request_id for r in scheduler.schedule(pending, [], 100).scheduled_requests]
    assert names == ["cold", "warm"]


def test_priority_comes_before_cached_tokens() -> None:
    index = RadixIndex(block_size=16)
    index.insert(Tokens(range(100, 164)), list(range(4)))
    pending = [ask("warm", 64, first=100), ask("urgent", 64, priority=1)]
    cache_aware, by_priority = PrefixCacheAwarePass(index), PriorityBasedPass()
    orders: list[list[SchedulerPass]] = [
        [cache_aware, by_priority],
        [by_priority, cache_aware],
        [cache_aware],
    ]
    for order in orders:
        result = BaseSchedulerIR(order).schedule(pending, [], 100)
        assert [r.request_id for r in result.scheduled_requests] == ["urgent", "warm"]


def test_decodes_come_before_prefills_under_one_budget() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=64), max_batched_tokens=8)
    engine.add(request("a", range(4), 5))
    engine.step()
    engine.add(request("b", range(20, 40), 5))
    engine.step()
    plan = engine.last_plan
    assert plan is not None
    assert (len(plan.decode_rows), plan.num_prefill_tokens) == (1, 7)


def test_a_chunk_size_bounds_one_request() -> None:
    engine = fake_engine(passes=[ChunkedPrefillPass(5)], max_batched_tokens=32)
    engine.add(request("a", range(12), 1))
    engine.add(request("b", range(50, 58), 1))
    engine.step()
    plan = engine.last_plan
    assert plan is not None
    assert [op.num_tokens for op in plan.prefills] == [5, 5]
    with pytest.raises(ValueError, match="chunk_size"):
        ChunkedPrefillPass(0)


def test_each_pass_is_timed() -> None:
    engine = fake_engine()
    engine.add(request("a", range(12), 1))
    engine.step()
    assert set(engine.scheduler.pass_time_s) == {
        "prefix_cache_aware",
        "priority_based",
        "chunked_prefill",
        "memory_aware_preemption",
    }
    assert isinstance(engine.scheduler.order[-1], MemoryAwarePreemptionPass)


def _too_many_tokens(draft: Draft) -> None:
    draft.token_budget = 1


def _not_where_it_stands(draft: Draft) -> None:
    chunk = next(iter(draft.chunks.values()))
    chunk.start, chunk.num_tokens = 1, chunk.num_tokens - 1


def _beyond_the_end(draft: Draft) -> None:
    next(iter(draft.chunks.values())).num_tokens = 99


def _nothing(draft: Draft) -> None:
    next(iter(draft.chunks.values())).num_tokens = 0


def _wrong_name(draft: Draft) -> None:
    draft.chunks["somebody"] = draft.chunks.pop("a")


def _twice(draft: Draft) -> None:
    draft.rejected["a"] = "no"


def _waiting_preempted(draft: Draft) -> None:
    draft.preempt(draft.chunks["a"].state)


def _admitted_without_hit(draft: Draft) -> None:
    chunk = draft.chunks["a"]
    draft.chunks["a"] = Chunk(chunk.state, chunk.start, chunk.num_tokens)


def _too_much_memory(draft: Draft) -> None:
    state = draft.chunks["a"].state
    state.tokens.extend([1] * 100)
    draft.token_budget = 1000
    draft.chunks["a"].num_tokens = len(state.tokens)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_too_many_tokens, "the budget is 1"),
        (_not_where_it_stands, "a: chunk starts at 1"),
        (_beyond_the_end, "a: chunk ends at 99"),
        (_nothing, "a: a chunk of 0 tokens"),
        (_wrong_name, "chunk of a stands under the name of somebody"),
        (_twice, "a is both scheduled and rejected"),
        (_waiting_preempted, "preempt a: it is waiting"),
        (_admitted_without_hit, "a: chunk of a request that is waiting, expected running"),
        (_too_much_memory, "the step needs 28 blocks, 8 are available"),
    ],
)
def test_the_verifier_names_what_is_wrong(spoil: Callable[[Draft], None], text: str) -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=8, max_model_len=256), max_batched_tokens=64)
    engine.add(request("a", range(10), 4))
    draft = engine.draft()
    spoil(draft)
    with pytest.raises(PlanError, match=text):
        verify(draft, engine.view)
