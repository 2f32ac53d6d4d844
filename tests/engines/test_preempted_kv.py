"""Preempted requests and tiers: KV is saved when they leave, held, and brought back when they return."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.plan import Draft, ExecutionPlan, StepResult
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.core.types import FinishReason
from sagellm.engines.engine import Engine
from sagellm.engines.kv_waits import MAX_LOADS
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.scheduler_ir import strategies
from tests.builders import check_books, expected_tokens, fake_engine, request
from tests.effort import examples

LONG, OTHER = list(range(10)), [50 + i for i in range(9)]


class PreemptOnce:
    """A pass that preempts "a" when it has 13 tokens, also where the step is planned a second time."""

    name = "preempt_once"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        for state in list(draft.running):
            if state.request_id == "a" and len(state.tokens) >= 13 and not state.num_preemptions:
                draft.preempt(state)


class Flood:
    """A pass that has so much evicted after a preemption that nothing of it stays on the device.

    `times`: in so many steps.
    """

    name = "flood"

    def __init__(self, times: int = 1) -> None:
        self.engine: Engine | None = None
        self.times = times

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        if self.engine is not None and not draft.preempted and draft.waiting and self.times:
            self.times -= 1
            self.engine.kv.clear_cache()


def passes(*first: SchedulerPass, **options: object) -> list[SchedulerPass]:
    return [
        *first,
        strategies.make_pass("chunked_prefill", {}),
        strategies.make_pass("memory_aware_preemption", options),
    ]


def serve(engine: Engine) -> tuple[dict[str, list[int]], list[ExecutionPlan]]:
    """Until all have ended: tokens by request, and the plans."""
    got: dict[str, list[int]] = {}
    plans = []
    while engine.has_work():
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        if engine.last_plan is not None:
            plans.append(engine.last_plan)
        check_books(engine)
        assert len(plans) < 5000
    return got, plans


def tiers_of(engine: Engine) -> HierarchyManager:
    assert isinstance(engine.kv.tiers, HierarchyManager)
    return engine.kv.tiers


def num_held(engine: Engine) -> int:
    return tiers_of(engine).states()[0].held


def preempting(
    host_blocks: int, floods: int = 1, *, overlap: bool = False
) -> tuple[Engine, TokenMemoryBackend]:
    """An engine that preempts "a" when it has 13 tokens, and whose device cache is then lost."""
    backend, flood = TokenMemoryBackend(num_blocks=32), Flood(floods)
    engine = fake_engine(
        backend, passes=passes(PreemptOnce(), flood), host_blocks=host_blocks, overlap=overlap
    )
    flood.engine = engine
    engine.add(request("a", LONG, 8))
    engine.add(request("b", OTHER, 8))
    return engine, backend


def joins(plans: Sequence[ExecutionPlan], name: str) -> list[int]:
    """Tokens that the request had each time it entered the batch."""
    seen = {id(plan): plan for plan in plans}.values()
    return [join.num_computed for plan in seen for join in plan.joined if join.request_id == name]


def test_a_preempted_request_goes_on_from_host_memory() -> None:
    engine, backend = preempting(8)
    got, plans = serve(engine)
    assert got == {"a": expected_tokens(backend, LONG, 8), "b": expected_tokens(backend, OTHER, 8)}
    assert joins(plans, "a") == [0, 12], "13 tokens, of which three blocks of 4 are saved"
    assert num_held(engine) == 0
    engine.close()


def test_what_is_evicted_each_time_it_comes_is_computed() -> None:
    engine, backend = preempting(8, floods=1000)
    got, plans = serve(engine)
    assert got == {"a": expected_tokens(backend, LONG, 8), "b": expected_tokens(backend, OTHER, 8)}
    assert joins(plans, "a") == [0, 0]
    assert tiers_of(engine).states()[0].loaded == 3 * MAX_LOADS
    engine.close()


def test_more_than_half_of_the_tier_is_not_held() -> None:
    """Three blocks are lost. A tier of five may hold two; it keeps what it cached of them, or not."""
    engine, backend = preempting(5)
    got, _ = serve(engine)
    assert got == {"a": expected_tokens(backend, LONG, 8), "b": expected_tokens(backend, OTHER, 8)}
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_request_holds_nothing(overlap: bool) -> None:
    engine, backend = preempting(8, floods=1000, overlap=overlap)
    while not num_held(engine):
        assert engine.has_work()
        engine.step()
    engine.abort("a")
    assert num_held(engine) == 0
    other = [1, 1, 1, *range(40, 57)]
    engine.add(request("a", other, 6))
    got, _ = serve(engine)
    assert got["a"] == expected_tokens(backend, other, 6)
    engine.close()


def test_only_what_runs_can_be_preempted() -> None:
    class Wrong:
        name = "wrong"

        def __call__(self, draft: Draft, view: SchedulingView) -> None:
            draft.preempted[draft.waiting[0]] = None

    engine = fake_engine(passes=[*passes(), Wrong()])
    engine.add(request("a", LONG, 2))
    with pytest.raises(Exception, match="a is both scheduled and preempted"):
        engine.step()


@settings(max_examples=examples(120), deadline=None)
@given(
    seed=st.integers(0, 100_000),
    host_blocks=st.sampled_from([2, 12, 60]),
    victims=st.sampled_from(["last", "newest", "most_blocks", "cheapest"]),
    index_as_computed=st.booleans(),
    overlap=st.booleans(),
    fails=st.sampled_from([0.0, 0.05]),
)
def test_the_same_tokens_under_pressure(
    seed: int, host_blocks: int, victims: str, index_as_computed: bool, overlap: bool, fails: float
) -> None:
    """Small memory, many preemptions, aborts and failing steps: every request gets its own tokens."""
    draw = random.Random(seed)

    class Failing(TokenMemoryBackend):
        def execute(self, plan: ExecutionPlan) -> StepResult:
            if plan.sample_rows and draw.random() < fails:
                raise RuntimeError("for once")
            return super().execute(plan)

    backend = Failing(num_blocks=draw.randrange(12, 24), max_model_len=40)
    every: Sequence[SchedulerPass] = passes(
        strategies.make_pass("priority_based", {"preempt": True}), victims=victims
    )
    engine = fake_engine(
        backend, passes=every, host_blocks=host_blocks, index_as_computed=index_as_computed, overlap=overlap
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
    assert num_held(engine) == 0
    assert engine.kv.block_states().active == 0
    engine.close()


def test_two_sessions_and_memory_for_one() -> None:
    """While KV of one comes up, the other does not fit beside it: it waits, and stops no load."""
    backend = TokenMemoryBackend(num_blocks=6)
    engine = fake_engine(backend, passes=passes(), host_blocks=40)
    prompts = [[token + 40 * name for token in range(17)] for name in range(2)]
    answers = [expected_tokens(backend, prompt, 3) for prompt in prompts]
    for turn in range(6):
        for name, prompt in enumerate(prompts):
            engine.add(request(f"{turn} {name}", prompt, 3))
        got, _ = serve(engine)
        assert got == {f"{turn} {name}": answers[name] for name in range(2)}
    assert tiers_of(engine).states()[0].loaded >= 30, "four blocks in each later turn but what is cached"
    engine.close()
