"""The engine loop over an exact fake: the same tokens whatever the batch, cache, chunking, memory and
preemption."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import CapacityError, ContextLengthError, RequestError
from sagellm.core.plan import Draft, ExecutionPlan, StepResult
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.core.types import FinishReason, RequestStatus
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import (
    TENANT_A,
    TENANT_B,
    PreemptAtRandom,
    check_books,
    expected_tokens,
    fake_engine,
    request,
    run_all,
)
from tests.effort import examples

prompts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 12), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


def _prompt(family: int, length: int) -> list[int]:
    """Prompts of one family share their beginning."""
    return [(family * 7 + i * (1 + (i > 9) * length)) % 97 for i in range(length)]


@settings(max_examples=examples(100))
@given(
    specs=prompts,
    num_blocks=st.integers(12, 64),
    budget=st.integers(4, 40),
    chunk=st.one_of(st.none(), st.integers(1, 9)),
    rows=st.integers(1, 4),
    prefix_caching=st.booleans(),
    preempt=st.sampled_from([0.0, 0.1, 0.4]),
    seed=st.integers(0, 1000),
    stagger=st.integers(0, 3),
)
def test_same_tokens_whatever_happens(
    specs: list[tuple[int, int, int, int]],
    num_blocks: int,
    budget: int,
    chunk: int | None,
    rows: int,
    prefix_caching: bool,
    preempt: float,
    seed: int,
    stagger: int,
) -> None:
    backend = TokenMemoryBackend(num_blocks=num_blocks, max_num_seqs=rows, max_model_len=48)
    passes: list[SchedulerPass] = [
        PrefixCacheAwarePass(),
        PriorityBasedPass(),
        PreemptAtRandom(seed, preempt),
    ]
    passes.append(ChunkedPrefillPass(chunk))
    engine = fake_engine(
        backend, prefix_caching=prefix_caching, max_batched_tokens=max(budget, rows), passes=passes
    )
    got: dict[str, list[int]] = {}
    for index, (family, length, max_tokens, priority) in enumerate(specs):
        engine.add(
            request(str(index), _prompt(family, length), max_tokens, priority=priority, arrival_s=index)
        )
        for _ in range(stagger):
            for output in engine.step():
                got.setdefault(output.request_id, []).extend(output.new_token_ids)
            check_books(engine)
    for request_id, tokens in run_all(engine).items():
        got.setdefault(request_id, []).extend(tokens)
    for index, (family, length, max_tokens, _) in enumerate(specs):
        assert got[str(index)] == expected_tokens(backend, _prompt(family, length), max_tokens)
    assert engine.kv.block_states().active == 0


def test_generated_tokens_are_reused() -> None:
    engine = fake_engine(TokenMemoryBackend(block_size=4))
    engine.add(request("first", range(10), 8))
    answer = run_all(engine)["first"]
    engine.add(request("second", [*range(10), *answer, 1, 2], 1))
    outputs = engine.step()
    assert outputs[0].num_cached_tokens == 16  # 17 tokens were computed: four whole blocks


def test_a_whole_prompt_in_cache_leaves_one_token_to_compute() -> None:
    engine = fake_engine()
    for name in ("first", "second"):
        engine.add(request(name, range(8), 1))
        cached = engine.step()[0].num_cached_tokens
    assert cached == 4


def test_tenants_do_not_share() -> None:
    engine = fake_engine()
    engine.add(request("a", range(12), 1, namespace=TENANT_A))
    run_all(engine)
    engine.add(request("b", range(12), 1, namespace=TENANT_B))
    assert engine.step()[0].num_cached_tokens == 0


def test_a_group_computes_its_prompt_once() -> None:
    engine = fake_engine(TokenMemoryBackend(block_size=4, num_blocks=64))
    for index in range(4):
        engine.add(request(f"r#{index}", range(21), 2, group="r"))
    computed = 0
    while engine.has_work():
        engine.step()
        plan = engine.last_plan
        assert plan is not None
        computed += plan.num_prefill_tokens
    assert computed == 21 + 3 * 1


def test_a_request_waits_where_the_one_whose_last_block_it_would_copy_is_rejected() -> None:
    def reject_first(draft: Draft, view: SchedulingView) -> None:
        if draft.waiting and draft.running:
            draft.reject(draft.running[0], "for the test")

    reject_first.name = "reject_first"  # type: ignore[attr-defined]
    backend = TokenMemoryBackend(block_size=4, num_blocks=64)
    engine = fake_engine(backend, passes=[PrefixCacheAwarePass(), ChunkedPrefillPass(), reject_first])  # type: ignore[list-item]
    engine.add(request("first", range(23), 4, group="r"))
    engine.step()
    engine.add(request("second", range(23), 4, group="r"))
    [rejected] = engine.step()
    assert (rejected.request_id, rejected.error) == ("first", "for the test")
    assert engine.last_plan is not None
    waits = [one.reason for one in engine.last_plan.decisions if one.pass_name == "bind"]
    assert waits == ["the request whose last block it would copy has left"]
    assert run_all(engine) == {"second": expected_tokens(backend, range(23), 4)}


def test_nothing_leaks_after_a_thousand_aborts() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=40, max_num_seqs=6))
    chance = random.Random(0)
    alive: list[str] = []
    for index in range(1000):
        name = str(index)
        engine.add(request(name, [chance.randrange(97) for _ in range(chance.randrange(1, 40))], 30))
        alive.append(name)
        if chance.random() < 0.7:
            engine.step()
        while len(alive) > chance.randrange(1, 9):
            engine.abort(alive.pop(chance.randrange(len(alive))))
            check_books(engine)
    for name in alive:
        engine.abort(name)
    assert not engine.has_work() or engine.step() is not None
    check_books(engine)
    assert engine.kv.block_states().active == 0
    assert engine.kv.clear_cache() >= 0
    assert engine.kv.block_states().free == 40


def test_abort_frees_at_once_and_unknown_ids_are_told() -> None:
    engine = fake_engine()
    engine.add(request("r", range(20), 20))
    engine.step()
    assert engine.kv.block_states().active > 0
    assert engine.abort("r")
    assert engine.kv.block_states().active == 0
    assert not engine.abort("r")
    assert not engine.abort("never seen")


def test_preemption_happens_and_the_oldest_goes_on() -> None:
    backend = TokenMemoryBackend(num_blocks=8, block_size=4, max_num_seqs=4, max_model_len=32)
    engine = fake_engine(backend)
    for index in range(3):
        engine.add(request(str(index), [index] * 6, 20, arrival_s=index))
    got = run_all(engine)
    assert engine.stats().num_preemptions > 0
    for index in range(3):
        assert got[str(index)] == expected_tokens(backend, [index] * 6, 20)


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"tokens": range(128)}, ContextLengthError, "maximum context length is 128"),
        ({"tokens": [5, 97]}, RequestError, "token id 97 .*tokenizer of another model"),
        ({"tokens": [-1]}, RequestError, "token id -1"),
        ({"tokens": [1], "logit_bias": {400: 1.0}}, RequestError, "logit_bias"),
        ({"tokens": [1], "stop_token_ids": (400,)}, RequestError, "stop_token_ids"),
        ({"tokens": [1], "n": 2}, RequestError, "n > 1"),
    ],
)
def test_what_can_never_be_served_is_refused_at_the_door(
    change: dict[str, object], kind: type[Exception], text: str
) -> None:
    engine = fake_engine(TokenMemoryBackend(max_model_len=128))
    with pytest.raises(kind, match=text):
        engine.add(request("r", **change))  # type: ignore[arg-type]
    assert not engine.has_work()


def test_an_id_in_use_is_refused() -> None:
    engine = fake_engine()
    engine.add(request("r", [1]))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("r", [2]))


def test_the_context_is_the_pool_where_the_pool_is_smaller() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=5, block_size=4, max_model_len=128))
    engine.add(request("r", range(10), 100))
    assert len(run_all(engine)["r"]) == 10


def test_stop_ids_eos_and_min_tokens() -> None:
    backend = TokenMemoryBackend()
    answer = expected_tokens(backend, [1, 2, 3], 6)
    engine = fake_engine(backend)
    engine.add(request("stop", [1, 2, 3], 6, stop_token_ids=(answer[2],)))
    engine.add(request("eos", [1, 2, 3], 6, eos_token_ids=frozenset({answer[1]})))
    engine.add(request("ignored", [1, 2, 3], 6, eos_token_ids=frozenset({answer[1]}), ignore_eos=True))
    got = run_all(engine)
    assert got["stop"] == answer[:3]
    assert got["eos"] == answer[:2]
    assert got["ignored"] == answer


class FailingBackend(TokenMemoryBackend):
    """Fails in chosen steps after having applied half of the plan."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__(num_blocks=32, max_num_seqs=4)
        self.failures, self.calls = failures, 0

    def execute(self, plan: ExecutionPlan) -> StepResult:
        self.calls += 1
        failure = self.failures.get(self.calls)
        if failure is None:
            return super().execute(plan)
        super().execute(ExecutionPlan(plan.step, plan.joined, plan.left, plan.table_deltas))
        raise failure


def test_out_of_device_memory_halves_the_step_and_loses_nothing() -> None:
    backend = FailingBackend(
        {1: CapacityError("no memory"), 3: CapacityError("no memory"), 6: CapacityError("x")}
    )
    engine = fake_engine(backend)
    engine.add(request("a", range(25), 6))
    engine.add(request("b", range(3, 20), 6))
    got = run_all(engine)
    assert got["a"] == expected_tokens(backend, range(25), 6)
    assert got["b"] == expected_tokens(backend, range(3, 20), 6)


def test_a_request_that_never_fits_the_device_ends_with_an_error() -> None:
    backend = FailingBackend(dict.fromkeys(range(1, 100), CapacityError("no memory")))
    engine = fake_engine(backend)
    engine.add(request("a", range(25), 6))
    outputs = [output for _ in range(20) for output in engine.step()]
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR]
    check_books(engine)
    assert not engine.has_work()


def test_a_failing_step_costs_its_requests_and_the_loop_goes_on() -> None:
    backend = FailingBackend({2: RuntimeError("broken")})
    engine = fake_engine(backend)
    engine.add(request("a", range(5), 6))
    engine.step()
    failed = engine.step()
    assert [(output.request_id, output.finish_reason) for output in failed] == [("a", FinishReason.ERROR)]
    assert "broken" in (failed[0].error or "")
    check_books(engine)
    engine.add(request("b", range(5), 6))
    assert run_all(engine)["b"] == expected_tokens(backend, range(5), 6)


class PoisonedBackend(TokenMemoryBackend):
    """Fails whenever one request is in the step, and draws nonsense for another."""

    def execute(self, plan: ExecutionPlan) -> StepResult:
        names = {join.row: join.request_id for join in plan.joined}
        self.names = {**getattr(self, "names", {}), **names}
        rows = [*plan.decode_rows, *(op.row for op in plan.prefills)]
        if any(self.names[row] == "poison" for row in rows):
            super().execute(ExecutionPlan(plan.step, plan.joined, plan.left, plan.table_deltas))
            raise RuntimeError("overflow")
        result = super().execute(plan)
        drawn = zip(plan.sample_rows, result.token_ids, strict=True)
        return StepResult(plan.step, tuple(97 if self.names[row] == "nan" else token for row, token in drawn))


def test_token_0_beside_a_request_that_draws_nothing_is_a_token() -> None:
    class Drawing(PoisonedBackend):
        def execute(self, plan: ExecutionPlan) -> StepResult:
            super().execute(plan)
            names = [self.names[row] for row in plan.sample_rows]
            return StepResult(plan.step, tuple(97 if name == "nan" and plan.step else 0 for name in names))

    engine = fake_engine(Drawing(num_blocks=64))
    for name in ("nan", "zero"):
        engine.add(request(name, [1, 2, 3], 4))
    outputs = [output for _ in range(4) for output in engine.step()]
    got = [(one.request_id, one.new_token_ids, one.finish_reason) for one in outputs]
    assert [one[1:] for one in got if one[0] == "zero"] == [*[((0,), None)] * 3, ((0,), FinishReason.LENGTH)]
    assert [one[1:] for one in got if one[0] == "nan"] == [((0,), None), ((), FinishReason.ERROR)]


def test_only_the_request_that_makes_a_step_fail_ends() -> None:
    backend = PoisonedBackend(num_blocks=64, max_num_seqs=6)
    engine = fake_engine(backend)
    engine.add(request("early", range(9), 8))
    engine.step()
    for name in ("a", "poison", "b", "nan"):
        engine.add(request(name, [ord(name[0]) % 97] * 5, 8))
    got: dict[str, list[int]] = {}
    errors = {}
    while engine.has_work():
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is FinishReason.ERROR:
                errors[output.request_id] = output.error or ""
        check_books(engine)
    assert set(errors) == {"poison", "nan"}
    assert "overflow" in errors["poison"]
    assert "not finite" in errors["nan"]
    assert got["nan"] == [], "a token that is not in the vocabulary is not reported"
    for name in ("a", "b"):
        assert got[name] == expected_tokens(backend, [ord(name) % 97] * 5, 8)
    assert got["early"] == expected_tokens(backend, range(9), 8)[1:]


def test_memory_that_is_short_for_a_moment_costs_nobody() -> None:
    backend = FailingBackend(dict.fromkeys((2, 3, 5, 6, 9), CapacityError("no memory")))
    engine = fake_engine(backend)
    engine.add(request("a", range(5), 6))
    assert run_all(engine)["a"] == expected_tokens(backend, range(5), 6)


def test_equal_prompts_computed_together_do_not_hold_their_blocks_twice() -> None:
    backend = TokenMemoryBackend(num_blocks=20, block_size=4, max_num_seqs=4, max_model_len=80)
    engine = fake_engine(backend, max_batched_tokens=64)
    engine.add(request("a", range(1, 29), 1))
    engine.add(request("b", range(1, 29), 40))
    assert run_all(engine)["b"] == expected_tokens(backend, range(1, 29), 40)


def test_dropping_many_who_wait_costs_by_change() -> None:
    engine = fake_engine()
    for index in range(2000):
        engine.add(request(str(index), [1, 2], 4))
    compared = 0

    class Counted(OrderedDict[str, object]):
        def __getitem__(self, key: str) -> object:
            nonlocal compared
            compared += 1
            return super().__getitem__(key)

    engine._request_table.waiting = Counted(engine._request_table.waiting)  # type: ignore[assignment]
    for index in reversed(range(2000)):
        engine.abort(str(index))
    assert compared <= 2000
    assert not engine.has_work()


def test_priority_goes_first() -> None:
    engine = fake_engine(TokenMemoryBackend(max_num_seqs=1))
    engine.add(request("low", [1], 1, arrival_s=0))
    engine.add(request("high", [2], 1, priority=5, arrival_s=1))
    assert [output.request_id for output in (*engine.step(), *engine.step())] == ["high", "low"]


def test_a_pass_that_loses_requests_is_caught() -> None:
    def lose(draft: Draft, view: SchedulingView) -> None:
        draft.running.clear()
        draft.chunks.clear()

    lose.name = "lose"  # type: ignore[attr-defined]
    engine = fake_engine(passes=[])
    engine.add(request("r", [1, 2], 4))
    engine.step()
    engine.scheduler.add_optimization_pass(lose)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="lost running requests"):
        engine.step()


def test_a_pass_that_fails_with_a_request_twice_in_its_list_loses_none() -> None:
    broken = True

    def double(draft: Draft, view: SchedulingView) -> None:
        if broken and len(draft.running) == 2:
            draft.running[1] = draft.running[0]
            raise CapacityError("after a wrong change")

    double.name = "double"  # type: ignore[attr-defined]
    backend = TokenMemoryBackend()
    engine = fake_engine(backend, passes=[])
    engine.add(request("a", [1, 2], 4))
    engine.add(request("b", [3, 4], 4))
    first = engine.step()
    engine.scheduler.add_optimization_pass(double)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="after a wrong change"):
        engine.step()
    broken = False
    rest = run_all(engine)
    for one in first:
        prompt = [1, 2] if one.request_id == "a" else [3, 4]
        assert [*one.new_token_ids, *rest[one.request_id]] == expected_tokens(backend, prompt, 4)


def test_a_table_that_changed_is_told_once() -> None:
    """Two requests compute the same prompt: the second goes on with the blocks of the first."""
    engine = fake_engine(TokenMemoryBackend(block_size=4, num_blocks=64))
    for name in "ab":
        engine.add(request(name, range(9), 3))
    told = []
    while engine.has_work():
        engine.step()
        assert engine.last_plan is not None
        told.append([grown.first for grown in engine.last_plan.table_deltas])
    assert told == [[], [0], []]


def test_close_gives_everything_back() -> None:
    engine = fake_engine()
    engine.add(request("r", range(9), 4))
    engine.step()
    engine.close()
    assert engine.kv.block_states().active == 0
    assert all(state.status is RequestStatus.FINISHED for state in engine._request_table.states.values())
