"""The simulated backend keeps the contract of `InferenceBackend`, and time is the cost model's."""

from __future__ import annotations

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.events import EventBus
from sagellm.core.plan import BlockCopy, Chain, ExecutionPlan, Join, Prefill, Transfer
from sagellm.core.types import FinishReason, Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.simulator.backend import SimulatedBackend
from sagellm.engines.simulator.cost_model import CostModel, StepShape
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.models import MODELS
from tests.engines.simulator.worlds import config

COST = CostModel(device("h100"), MODELS["llama-3.1-8b"])


def backend(clock: ManualClock | None = None, **options: int) -> SimulatedBackend:
    sizes = {"num_blocks": 100, "block_size": 16, "max_num_seqs": 8, "max_model_len": 512} | options
    return SimulatedBackend(COST, clock or ManualClock(), **sizes)  # type: ignore[arg-type]


def join(row: int, name: str, **options: object) -> Join:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    return Join(row, name, Tokens([1, 2]).tobytes(), 2, 0, (0,), params, frozenset())


def test_it_says_what_it_is() -> None:
    made = backend()
    able = made.capability()
    assert (able.device, able.dtype, able.vocab_size) == ("h100-80g", "bfloat16", 128256)
    assert (able.num_blocks, able.block_size, able.max_num_seqs, able.max_model_len) == (100, 16, 8, 512)
    assert made.get_kv_schema().bytes_per_token == 128 * 1024
    assert backend(vocab_size=50).capability().vocab_size == 50


def test_a_step_takes_what_it_costs() -> None:
    clock, plan = (
        ManualClock(5.0),
        ExecutionPlan(
            0,
            joined=(join(0, "a"), join(1, "b"), join(2, "c")),
            decode_rows=(0, 1),
            decode_positions=(9, 20),
            prefills=(Prefill(2, "c", 16, 30, samples=True),),
            copies=(BlockCopy(1, 2), BlockCopy(3, 4)),
            transfers=(Transfer("a", (1, 2, 3), "other"),),
        ),
    )
    made = backend(clock)
    block = 16 * 128 * 1024
    shape = StepShape(2, 10 + 21, ((16, 30),), 2 * block, 3 * block)
    assert made.shape_of(plan) == shape
    result = made.execute(plan)
    assert clock.now() == 5.0 + COST.step_s(shape)
    assert result.token_ids == tuple(made.token_of(name) for name in "abc")


def test_a_chain_takes_what_a_chunk_costs() -> None:
    clock = ManualClock()
    made = backend(clock)
    tokens = {name: made.token_of(name) for name in "abc"}
    wrong = (tokens["a"] + 1) % 128256
    plan = ExecutionPlan(
        0,
        joined=(join(0, "a", logprobs=0), join(1, "b"), join(2, "c")),
        decode_rows=(0, 1, 2),
        decode_positions=(9, 20, 30),
        chains=(Chain(0, (tokens["a"], wrong, tokens["a"])), Chain(2, (wrong,))),
    )
    assert made.shape_of(plan) == StepShape(1, 21, ((9, 4), (30, 2)))
    result = made.execute(plan)
    assert clock.now() == COST.step_s(made.shape_of(plan))
    assert result.token_ids == (tokens["a"], tokens["a"], tokens["b"], tokens["c"])
    assert result.num_accepted == (1, 0)
    assert [entry.token_id for entry in result.logprobs[0]] == [tokens["a"]] * 2


def test_tokens_of_requests_differ_and_end_nobody() -> None:
    made = backend()
    drawn = {made.token_of(f"request-{i}") for i in range(200)}
    assert len(drawn) > 195
    token = made.token_of("a")
    assert made.token_of("a", frozenset({token})) == token + 1
    first, other = join(0, "a", stop_token_ids=(token,)), join(1, "b", logprobs=2)
    result = made.execute(
        ExecutionPlan(0, joined=(first, other), decode_rows=(0, 1), decode_positions=(1, 1))
    )
    assert result.token_ids[0] == token + 1
    assert set(result.logprobs) == {1}
    again = join(1, "c")
    after = made.execute(
        ExecutionPlan(1, joined=(again,), left=(1,), decode_rows=(1,), decode_positions=(1,))
    )
    assert not after.logprobs


def test_steps_priced_together_are_those_taken_one_by_one() -> None:
    seen: list[tuple[StepShape, float]] = []
    single_clock, other_clock = ManualClock(), ManualClock()
    single = backend(single_clock)
    together = SimulatedBackend(COST, other_clock, num_blocks=9, on_step=lambda *step: seen.append(step))
    start = ExecutionPlan(0, joined=(join(0, "a"), join(1, "b")), decode_rows=(0, 1), decode_positions=(3, 8))
    single.execute(start)
    together.execute(start)
    prices = together.price_decodes((4, 9), 3)
    together.pass_decodes(prices[:1])
    together.pass_decodes(prices[1:])
    for i in range(3):
        plan = ExecutionPlan(1 + i, decode_rows=(0, 1), decode_positions=(4 + i, 9 + i))
        assert tuple(together.repeated_tokens((0, 1))) == single.execute(plan).token_ids
    assert single_clock.now() == other_clock.now()
    assert [shape.decode_context for shape, _ in seen] == [13, 15, 17, 19]
    assert [seconds for _, seconds in seen[1:]] == prices


@pytest.mark.parametrize("preset", ["default", "vllm-like"])
def test_an_engine_on_it_serves_what_it_is_given(preset: str) -> None:
    clock, events = ManualClock(), EventBus()
    made = backend(clock, num_blocks=20)
    chosen = config(preset, scheduler__max_num_seqs=8, scheduler__max_batched_tokens=64)
    engine = build_engine(chosen, made, clock=clock, events=events)
    for index in range(12):
        params = SamplingParams(max_tokens=40)
        engine.add(Request(f"r{index}", Tokens([index + 1] * 50), params, eos_token_ids=frozenset({7})))
    counts: dict[str, int] = {}
    ends = []
    while engine.has_work():
        before_s = clock.now()
        for output in engine.step():
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.new_token_ids)
            ends.append(output.finish_reason)
        assert clock.now() > before_s or not engine.has_work()
    assert counts == {f"r{index}": 40 for index in range(12)}
    assert ends.count(FinishReason.LENGTH) == 12
    assert engine.stats().num_preemptions > 0, "memory was meant to be short"
