"""Requests admitted in one step share what the first of them computes in it, and nothing is wrong when that
step fails."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import CapacityError, PlanError
from sagellm.core.plan import Draft, ExecutionPlan, StepResult
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.core.types import FinishReason
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir.passes.vllm_like import VllmLikePass
from tests.builders import check_books, expected_tokens, fake_engine, request, run_all
from tests.effort import examples


class Unreliable(TokenMemoryBackend):
    """Fails now and then, after it has done half of the step; `poison` names requests that never work."""

    def __init__(self, seed: int, share: float, num_blocks: int, *, poison: bool = False) -> None:
        super().__init__(num_blocks=num_blocks, max_num_seqs=6)
        self.chance, self.share, self.poison = random.Random(seed), share, poison
        self.names: dict[int, str] = {}

    def execute(self, plan: ExecutionPlan) -> StepResult:
        self.names |= {join.row: join.request_id for join in plan.joined}
        rows = [*plan.decode_rows, *(op.row for op in plan.prefills)]
        poisoned = self.poison and any(self.names[row].startswith("poison") for row in rows)
        if not poisoned and self.chance.random() >= self.share:
            return super().execute(plan)
        super().execute(ExecutionPlan(plan.step, plan.joined, plan.left, plan.table_deltas))
        raise (
            RuntimeError("overflow") if poisoned or self.chance.random() < 0.5 else CapacityError("no memory")
        )


def engine_of(backend: TokenMemoryBackend, *before: SchedulerPass, budget: int = 32) -> Engine:
    passes = [*before, VllmLikePass()]
    return fake_engine(backend, passes=passes, index_as_computed=True, max_batched_tokens=budget)


def prompt(family: int, length: int) -> list[int]:
    """Prompts of one family begin alike."""
    return [(family * 7 + i * (1 + (i > 13) * length)) % 97 for i in range(length)]


def test_one_step_computes_a_shared_prompt_once() -> None:
    engine = engine_of(TokenMemoryBackend())
    for name in "abc":
        engine.add(request(name, prompt(1, 18), 3))
    assert engine.draft().num_tokens == 32  # only looked at: nothing is bound
    check_books(engine)
    engine.step()
    assert engine.last_plan is not None
    assert [op.num_tokens for op in engine.last_plan.prefills] == [18, 2, 2]
    tokens = run_all(engine)
    assert tokens["c"] == expected_tokens(TokenMemoryBackend(), prompt(1, 18), 3)[1:]


@settings(max_examples=examples(120))
@given(
    specs=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=10
    ),
    num_blocks=st.integers(12, 40),
    budget=st.integers(6, 48),
    share=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
    stagger=st.integers(0, 2),
)
def test_same_tokens_though_steps_fail(
    specs: list[tuple[int, int, int]], num_blocks: int, budget: int, share: float, seed: int, stagger: int
) -> None:
    backend = Unreliable(seed, share, num_blocks)
    engine = engine_of(backend, budget=budget)
    got: dict[str, list[int]] = {}
    failed: set[str] = set()

    def advance() -> None:
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is FinishReason.ERROR:
                failed.add(output.request_id)
        check_books(engine)

    for index, (family, length, max_tokens) in enumerate(specs):
        engine.add(request(str(index), prompt(family, length), max_tokens))
        for _ in range(stagger):
            advance()
    while engine.has_work():
        advance()
    assert share or not failed
    for index, (family, length, max_tokens) in enumerate(specs):
        wanted = expected_tokens(backend, prompt(family, length), max_tokens)
        assert (
            got[str(index)] == wanted
            if str(index) not in failed
            else got[str(index)] == wanted[: len(got[str(index)])]
        )
    assert engine.kv.block_states().active == 0


@pytest.mark.parametrize("order", [("poison", "a", "b"), ("a", "poison", "b"), ("a", "b", "poison")])
def test_who_shares_with_a_request_that_makes_steps_fail_goes_on(order: tuple[str, ...]) -> None:
    backend = Unreliable(0, 0.0, 64, poison=True)
    engine = engine_of(backend, budget=20)
    for name in order:
        engine.add(request(name, prompt(1, 30), 4))
    got: dict[str, list[int]] = {}
    for _ in range(60):
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        check_books(engine)
    assert not engine.has_work()
    wanted = expected_tokens(backend, prompt(1, 30), 4)
    assert got == {"a": wanted, "b": wanted, "poison": []}


class TakesBack:
    """A pass that does what it may not: leaves out somebody whose blocks are bound."""

    name = "takes_back"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        assert view.bind_early(draft)
        name = next(iter(draft.chunks))
        draft.hold(draft.chunks[name].state)


def test_what_is_bound_cannot_be_taken_back() -> None:
    engine = fake_engine(passes=[VllmLikePass(), TakesBack()], index_as_computed=True)
    engine.add(request("a", prompt(1, 18)))
    with pytest.raises(PlanError, match="a has the blocks of its chunk: no pass can take the chunk back"):
        engine.step()
    check_books(engine)
    assert engine.kv.block_states().free == engine.kv.pool.total_blocks


class LosesRequests:
    """A pass that does what it may not: it takes running requests out of the draft, once blocks are bound."""

    name = "loses_requests"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        assert view.bind_early(draft)
        draft.running.clear()


def test_blocks_bound_early_are_given_back_when_a_pass_loses_requests() -> None:
    engine = fake_engine(passes=[VllmLikePass()], index_as_computed=True)
    tokens = prompt(1, 4 * engine.kv.block_size)
    engine.add(request("a", tokens, 3))
    engine.step()
    free = engine.kv.block_states().free
    engine.set_passes([VllmLikePass(), LosesRequests()])
    with pytest.raises(PlanError, match="a pass lost running requests: 0 of 1 are left"):
        engine.step()
    check_books(engine)
    assert engine.kv.block_states().free == free, "the decode had got its next block"
    engine.set_passes([VllmLikePass()])
    assert run_all(engine)["a"] == expected_tokens(TokenMemoryBackend(), tokens, 3)[1:]
