"""vLLM's scheduling, case by case; `tests/peers` compares whole runs with the original."""

from __future__ import annotations

import pytest

from sagellm.core.plan import Draft
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.types import FinishReason
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir.passes.vllm_like import VllmLikePass
from tests.builders import PreemptAtRandom, expected_tokens, fake_engine, request, run_all


def engine_of(num_blocks: int = 64, budget: int = 32, rows: int = 8, **options: int) -> Engine:
    backend = TokenMemoryBackend(num_blocks=num_blocks, max_num_seqs=rows)
    return fake_engine(backend, max_batched_tokens=budget, passes=[VllmLikePass(**options)], eviction="lru")


def step(engine: Engine) -> dict[str, int]:
    """Tokens that each request computes in the next step."""
    draft = engine.draft()
    running = {one.request_id: 1 for one in draft.running if one.decoding and draft.computes(one)}
    engine.step()
    return running | {name: chunk.num_tokens for name, chunk in draft.chunks.items()}


def prompt(first: int, length: int) -> range:
    """Prompts of different beginnings share nothing."""
    return range(first, first + length)


def test_nothing_runs_behind_it() -> None:
    assert [one.name for one in engine_of().scheduler.order] == ["vllm_like"]


def test_budget_is_given_in_batch_order_also_to_decodes() -> None:
    engine = engine_of(budget=10, long_prefill_tokens=6)
    engine.add(request("long", prompt(0, 30)))
    engine.add(request("short", prompt(40, 2), 8))
    assert step(engine) == {"long": 6, "short": 2}
    assert step(engine) == {"long": 6, "short": 1}
    engine.add(request("next", prompt(60, 20)))
    assert step(engine) == {"long": 6, "short": 1, "next": 3}
    assert step(engine) == {"long": 6, "short": 1, "next": 3}


def test_a_decode_behind_a_long_prompt_is_left_out_when_tokens_are_spent() -> None:
    engine = engine_of(budget=6, long_prefill_tokens=4)
    engine.add(request("a", prompt(0, 20)))
    engine.add(request("b", prompt(30, 2), 9))
    assert step(engine) == {"a": 4, "b": 2}
    draft = engine.draft()
    draft.token_budget = 4  # as after a step for which the device had not enough memory
    VllmLikePass()(draft, engine.view)
    assert {name: chunk.num_tokens for name, chunk in draft.chunks.items()} == {"a": 4}
    assert (draft.num_decodes, list(draft.skipped_decodes)) == (0, ["b"])
    assert [(one.request_id, one.action) for one in draft.decisions] == [("b", "hold")]


def test_who_is_alone_fills_the_step() -> None:
    engine = engine_of(budget=20, long_prefill_tokens=6)
    engine.add(request("a", prompt(0, 30)))
    assert step(engine) == {"a": 20}
    engine.add(request("b", prompt(40, 30)))
    assert step(engine) == {"a": 6, "b": 6}


def test_the_last_that_cannot_grow_preempts_itself() -> None:
    engine = engine_of(num_blocks=8)
    for name, first in (("a", 0), ("b", 30)):
        engine.add(request(name, prompt(first, 12), 9))
    for _ in range(5):
        step(engine)
    draft = engine.draft()  # 13 + 4 tokens each: both need a fifth block
    assert [state.request_id for state in draft.preempted] == ["b"]
    assert "a comes first" in draft.decisions[0].reason
    engine = engine_of(num_blocks=8)
    engine.add(request("a", prompt(0, 13), 9))
    engine.add(request("b", prompt(30, 12), 9))
    for _ in range(4):
        step(engine)
    engine.add(request("c", prompt(60, 2), 2))
    draft = engine.draft()
    assert [state.request_id for state in draft.preempted] == ["b"]
    assert list(draft.admitted()) == []


def test_preempted_requests_come_back_first_and_in_order() -> None:
    engine = engine_of(num_blocks=12, rows=4)
    for name, first in (("a", 0), ("b", 20), ("c", 40), ("d", 60)):
        engine.add(request(name, prompt(first, 8), 12))
    order: list[list[str]] = []
    while engine.has_work():
        draft = engine.draft()
        order.append([state.request_id for state in draft.waiting])
        engine.step()
    assert ["c", "d"] in order
    assert ["d", "c"] not in order


def test_the_whole_prompt_must_fit_but_takes_blocks_of_its_chunk() -> None:
    engine = engine_of(num_blocks=10, budget=8)
    engine.add(request("a", prompt(0, 8), 9))
    assert step(engine) == {"a": 8}
    engine.add(request("b", prompt(30, 33)))
    engine.add(request("c", prompt(70, 4)))
    assert step(engine) == {"a": 1}  # three blocks are held, nine wanted; no request overtakes
    draft = engine.draft()
    assert [(one.request_id, one.action) for one in draft.decisions] == [("b", "wait")]


def test_a_watermark_is_left_while_others_run() -> None:
    for watermark, admitted in ((0, True), (5, True), (6, False)):
        engine = engine_of(num_blocks=10, watermark=watermark)
        engine.add(request("a", prompt(0, 8), 9))
        step(engine)
        engine.add(request("b", prompt(30, 8)))
        assert ("b" in step(engine)) == admitted, watermark
    alone = engine_of(num_blocks=10, watermark=9)
    alone.add(request("a", prompt(0, 8)))
    assert step(alone) == {"a": 8}


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = engine_of(num_blocks=8)
    unpin = engine.pin_prefix
    first = request("first", prompt(0, 8), 1)
    engine.add(first)
    run_all(engine)
    release = unpin(first.tokens, first.namespace)
    engine.add(request("big", prompt(30, 28)))
    [output] = engine.step()
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert "out of KV memory: its prompt needs 7 blocks, 6 are available" in output.error
    release()


def test_a_steady_step_touches_no_request() -> None:
    engine = engine_of(rows=8)
    for i in range(8):
        engine.add(request(str(i), prompt(10 * i, 3), 40))
    step(engine)
    draft = engine.draft()

    class Untouched(list[object]):
        def __iter__(self) -> object:  # type: ignore[override]
            raise AssertionError("a steady step walks over the batch")

    draft.running = Untouched(draft.running)  # type: ignore[assignment]
    VllmLikePass()(draft, engine.view)
    assert draft.num_decodes == 8


@pytest.mark.parametrize("options", [{"long_prefill_tokens": -1}, {"watermark": -1}])
def test_wrong_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        VllmLikePass(**options)


class HoldFirst:
    """Another pass, that leaves the first of the batch out a few times."""

    name = "hold_first"

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        for state in draft.running[: self.times > 0]:
            draft.hold(state)
            self.times -= 1


@pytest.mark.parametrize("before", [HoldFirst(5), PreemptAtRandom(3, 0.3)])
def test_what_passes_before_it_decided_stays(before: HoldFirst | PreemptAtRandom) -> None:
    backend = TokenMemoryBackend(num_blocks=20, max_num_seqs=4)
    engine = fake_engine(backend, passes=[before, VllmLikePass()], eviction="lru")
    for i in range(4):
        engine.add(request(str(i), prompt(20 * i, 10), 9))
    tokens = run_all(engine)
    for i in range(4):
        assert tokens[str(i)] == expected_tokens(backend, prompt(20 * i, 10), 9)
    assert before.times < 5 or isinstance(before, PreemptAtRandom)


def test_a_request_that_another_pass_holds_computes_nothing() -> None:
    engine = fake_engine(passes=[HoldFirst(2), VllmLikePass()])
    engine.add(request("a", prompt(0, 10), 9))
    engine.add(request("b", prompt(20, 10), 9))
    assert step(engine) == {"a": 10, "b": 10}
    assert step(engine) == {"b": 1}
