"""The real engine and the simulator take the same scheduling decisions, step by step, when one clock's script
is the other's: the demo model computes, and time passes as the cost model says."""

from __future__ import annotations

import random

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.types import (
    CapabilityDescriptor,
    FinishReason,
    KVCacheSchema,
    Request,
    SamplingParams,
    Tokens,
)
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.simulator.backend import SimulatedBackend
from sagellm.engines.simulator.cost_model import CostModel
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.models import MODELS
from sagellm.kvmgr.scheduler_ir import print_plan

COST = CostModel(device("h100"), MODELS["qwen3-0.6b"])
BLOCKS, BLOCK, ROWS, LONGEST = 40, 8, 6, 256


class OnScript:
    """A real backend whose steps take what the cost model says."""

    def __init__(self, inner: InferenceBackend, shadow: SimulatedBackend, clock: ManualClock) -> None:
        self.inner, self.shadow, self.clock = inner, shadow, clock

    def capability(self) -> CapabilityDescriptor:
        return self.inner.capability()

    def get_kv_schema(self) -> KVCacheSchema:
        return self.inner.get_kv_schema()

    def execute(self, plan: ExecutionPlan) -> StepResult:
        result = self.inner.execute(plan)
        self.clock.advance(COST.step_s(self.shadow.shape_of(plan)))
        return result

    def close(self) -> None:
        self.inner.close()


def arrivals(vocab_size: int) -> list[tuple[float, Request]]:
    """Four conversations that grow, in a pool that holds about two of them; some are urgent."""
    draw = random.Random(7)
    histories = [[draw.randrange(vocab_size) for _ in range(12)] for _ in range(4)]
    made, now_s = [], 0.0
    for number in range(24):
        history = histories[number % 4]
        history += [draw.randrange(vocab_size) for _ in range(draw.randrange(3, 22))]
        now_s += draw.expovariate(1 / 0.004)
        params = SamplingParams(temperature=0.0, max_tokens=draw.randrange(2, 30), ignore_eos=True)
        made.append(
            (now_s, Request(str(number), Tokens(history), params, arrival_s=now_s, priority=number % 5 == 4))
        )
    return made


def simulated(clock: ManualClock, vocab_size: int) -> SimulatedBackend:
    return SimulatedBackend(
        COST, clock, num_blocks=BLOCKS, block_size=BLOCK, max_num_seqs=ROWS, max_model_len=LONGEST,
        vocab_size=vocab_size,
    )  # fmt: skip


def plans(engine: Engine, clock: ManualClock, requests: list[tuple[float, Request]]) -> list[str]:
    """The text of each step's plan, the time and the state of the pool; tokens left out."""
    coming, story = list(requests), []
    while coming or engine.has_work():
        if not engine.has_work():
            clock.advance(max(0.0, coming[0][0] - clock.now()))
        while coming and coming[0][0] <= clock.now():
            engine.add(coming.pop(0)[1])
        for output in engine.step():
            assert output.finish_reason is not FinishReason.ERROR, output.error
        assert engine.last_plan is not None
        plan = print_plan(engine.last_plan, tokens=False)
        story.append(f"{plan}\n{clock.now()} {engine.kv.block_states()}")
    return story


@pytest.mark.parametrize("preset", ["vllm-like", "priority", "adaptive", "fifo"])
def test_the_same_decisions_step_by_step(preset: str) -> None:
    settings = {
        "kv.block_size": BLOCK,
        "kv.num_blocks": BLOCKS,
        "scheduler.max_num_seqs": ROWS,
        "scheduler.max_batched_tokens": 32,
        "engine.threads": 1,
    }
    config = load_config(preset=preset, cli=settings, environ={}).config
    real_clock, clock = ManualClock(), ManualClock()
    native = NativeBackend(
        DEMO_MODEL, device="cpu", dtype="float32", block_size=BLOCK, num_blocks=BLOCKS, max_num_seqs=ROWS,
        max_model_len=LONGEST, threads=1,
    )  # fmt: skip
    vocab_size = native.capability().vocab_size
    scripted = OnScript(native, simulated(ManualClock(), vocab_size), real_clock)
    requests = arrivals(vocab_size)
    real = plans(build_engine(config, scripted, clock=real_clock), real_clock, requests)
    foreseen = plans(build_engine(config, simulated(clock, vocab_size), clock=clock), clock, requests)
    assert len(real) > 60
    assert any("preempt" in step for step in real), "the scene should press"
    for number, (one, other) in enumerate(zip(real, foreseen, strict=False)):
        assert one == other, f"step {number}"
    assert len(real) == len(foreseen)
