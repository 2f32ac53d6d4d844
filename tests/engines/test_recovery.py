"""After a failure: nobody is suspected for another's name, and nothing is kept of who has gone."""

from __future__ import annotations

import pytest

from sagellm.core.errors import ConfigError, RequestError
from sagellm.core.plan import ExecutionPlan, RequestState, StepResult
from sagellm.core.types import SLO, FinishReason
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import PassPipeline, strategies
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.vllm_like import VllmLikePass
from tests.builders import fake_engine, request


class Poisoned(TokenMemoryBackend):
    """Fails whenever `x` computes its prompt, while it is told to."""

    on = True

    def execute(self, plan: ExecutionPlan) -> StepResult:
        if self.on and any(op.request_id == "x" for op in plan.prefills):
            raise RuntimeError("poison")
        return super().execute(plan)


@pytest.mark.parametrize("strategy", strategies.STRATEGIES)
def test_a_retry_under_the_same_name_is_another_request(strategy: str) -> None:
    backend = Poisoned(num_blocks=200)
    engine = fake_engine(backend, passes=strategies.make(strategy))
    engine.add(request("a", range(1, 9), 50))
    engine.add(request("x", range(20, 28), 4))
    ended = {}
    for _ in range(300):
        for output in engine.step():
            if output.finish_reason is FinishReason.ERROR and backend.on:
                backend.on = False
                engine.add(request("x", range(20, 28), 4))
            elif output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
        engine.clock.advance(0.01)  # type: ignore[attr-defined]
    assert ended == {"a": FinishReason.LENGTH, "x": FinishReason.LENGTH}


@pytest.mark.parametrize("strategy", strategies.STRATEGIES)
def test_strategies_forget_who_has_ended(strategy: str) -> None:
    """750 short requests with mixed goals, some aborted, beside one that runs all the time."""
    passes = strategies.make(strategy)
    engine = fake_engine(TokenMemoryBackend(num_blocks=400, max_model_len=800), passes=passes)
    engine.add(request("long", range(4), 750, slo=SLO(None, 0.02)))
    for number in range(750):
        slo = SLO(5.0, 0.5 if number % 2 else 0.02)
        engine.add(request(str(number), [number % 7, 1, 2], 1, slo=slo))
        engine.step()
        engine.step()
        if number % 10 == 0:
            engine.abort(str(number))
        engine.clock.advance(0.01)  # type: ignore[attr-defined]
    held = {id(state) for one in passes for state in _states(vars(one), 6)}
    assert len(held) < 350


def _states(value: object, depth: int) -> list[RequestState]:
    """Every request state that can be reached through containers and objects of our own."""
    if isinstance(value, RequestState):
        return [value]
    if not depth:
        return []
    inside: list[object] = []
    if isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    elif type(value).__module__.startswith("sagellm.kvmgr.scheduler_ir"):
        inside = list(getattr(value, "__dict__", {}).values())
    return [state for one in inside for state in _states(one, depth - 1)]


@pytest.mark.parametrize("goal_s", [float("inf"), float("nan"), -1.0])
def test_a_goal_is_a_number_of_seconds(goal_s: float) -> None:
    with pytest.raises(RequestError, match="seconds"):
        SLO(tpot_s=goal_s)
    with pytest.raises(RequestError, match="seconds"):
        SLO(ttft_s=goal_s)


def test_nothing_stands_behind_a_pass_that_closes() -> None:
    scheduler = PassPipeline([VllmLikePass()])
    with pytest.raises(ConfigError, match="chunked_prefill cannot stand behind it"):
        scheduler.add_optimization_pass(ChunkedPrefillPass())
    assert [one.name for one in scheduler.order] == ["vllm_like"]
