"""`SageScheduler`: our passes order the requests of vLLM's real scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from sagellm.core.errors import UnknownNameError
from sagellm.engines.vllm.scheduler import SageScheduler
from tests.engines.vllm.test_connector import SIZE, model, scheduler, serve, step, transfer

__all__ = ["model"]
pytestmark = pytest.mark.peer


def sage(model: str, strategy: str, config: dict[str, Any] | None = None, **options: Any) -> Scheduler:
    settings = {"sagellm": {"strategy": strategy, "options": options}}
    return scheduler(model, config, kind=SageScheduler, additional=settings)


def add(
    engine: Scheduler, name: str, prompt: list[int], *, num_tokens: int = 3, priority: int = 0, **extra: Any
) -> None:
    init_none_hash(sha256)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, extra_args=extra or None)
    hasher = get_request_block_hasher(SIZE, sha256)
    engine.add_request(Request(name, prompt, params, None, block_hasher=hasher, priority=priority))


def admissions(engine: Scheduler) -> list[str]:
    """The requests in the order in which they first compute something."""
    seen: dict[str, None] = {}
    while engine.requests:
        seen |= dict.fromkeys(name for name, _ in step(engine))
    return list(seen)


def test_with_fifo_every_step_is_that_of_vllm(model: str) -> None:
    assert serve(sage(model, "fifo")) == serve(scheduler(model, None))


@pytest.mark.parametrize("strategy", ["priority", "slo", "adaptive", "throughput", "fair"])
def test_every_strategy_serves_all(model: str, strategy: str) -> None:
    engine = sage(model, strategy, transfer("on"))
    serve(engine)
    assert not engine.requests
    assert not engine._passes.states
    engine.kv_cache_manager.block_pool.free_block_queue.check()


def test_a_flood_of_one_tenant_does_not_delay_another(model: str) -> None:
    def run(engine: Scheduler) -> int:
        for i in range(12):
            add(engine, f"a{i}", [i] * 40, sage_tenant="a")
        add(engine, "b", [99] * 40, sage_tenant="b")
        return admissions(engine).index("b")

    assert run(scheduler(model, None)) == 12
    assert run(sage(model, "fair", fairness={"quantum": 0})) <= 2


def test_priorities_and_deadlines(model: str) -> None:
    """In vLLM a lower number is a higher priority."""
    engine = sage(model, "priority")
    for i in range(6):
        add(engine, f"r{i}", [i] * 40, priority=-i)
    assert admissions(engine) == ["r5", "r4", "r3", "r2", "r1", "r0"]
    engine = sage(model, "slo")
    for i in range(6):
        add(engine, f"r{i}", [i] * 40, sage_ttft_s=100.0 - 10.0 * i)
    assert admissions(engine)[0] == "r5"


def test_a_prompt_that_another_computes_is_not_computed_twice(model: str) -> None:
    """Stock vLLM shares blocks within a step; no pass holds a request back for that."""

    def computed(engine: Scheduler) -> int:
        for name in "ab":
            add(engine, name, [7] * 60)
        total = 0
        while engine.requests:
            total += sum(count for _, count in step(engine))
        return total

    assert computed(sage(model, "fair")) == computed(scheduler(model, None)) == 68


def test_it_is_asynchronous_where_vllm_is(model: str) -> None:
    assert not isinstance(sage(model, "fair"), AsyncScheduler)
    settings = {"sagellm": {"strategy": "fair"}}
    engine = scheduler(model, None, kind=SageScheduler, additional=settings, asynchronous=True)
    is_asynchronous = engine.vllm_config.scheduler_config.async_scheduling  # vLLM switches it off on a CPU
    assert isinstance(engine, AsyncScheduler) == is_asynchronous != current_platform.is_cpu()


def test_beside_priorities_of_vllm_it_stays_out(model: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"sagellm": {"strategy": "fair"}}
    engine = scheduler(model, None, kind=SageScheduler, additional=settings, policy="priority")
    assert "leave out --scheduling-policy" in caplog.text
    serve(engine, num_requests=10)


def test_a_pass_that_fails_leaves_vllm_in_order(
    model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sage(model, "fair")

    def broken(draft: Any, view: Any) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(engine._passes, "passes", [broken])
    assert serve(engine) == serve(scheduler(model, None))
    assert caplog.text.count("no idea") == 1


def test_a_goal_that_makes_no_sense_keeps_the_place(model: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = sage(model, "slo")
    add(engine, "a", [1] * 20, sage_ttft_s=-5)
    assert "ttft_s is a number of seconds" in caplog.text
    assert admissions(engine) == ["a"]


def test_fields_of_hostile_shapes_keep_the_place(model: str) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    engine = sage(model, "slo")
    for number, goal in enumerate((float("inf"), float("nan"), "soon", [1])):
        add(engine, f"r{number}", [1] * 20, sage_ttft_s=goal)
    params = SamplingParams(max_tokens=3, ignore_eos=True, extra_args={})
    params.extra_args = {"sage_tenant": nested, "sage_ttft_s": 10**400}  # vLLM's own checks refuse these
    hasher = get_request_block_hasher(SIZE, sha256)
    engine.add_request(Request("r4", [1] * 20, params, None, block_hasher=hasher))
    assert admissions(engine) == ["r0", "r1", "r2", "r3", "r4"]
    assert engine._passes is not None


def test_a_request_that_no_pass_knows_does_not_starve(model: str) -> None:
    engine = sage(model, "fifo")
    for number in range(4):
        add(engine, f"w{number}", [number] * 30, num_tokens=6)
    add(engine, "wrong", [77] * 30, sage_ttft_s=-5)
    served = 0
    while "wrong" in engine.requests:
        while len(engine.waiting) < 6:
            served += 1
            add(engine, f"n{served}", [served] * 30, num_tokens=6)
        step(engine)
        assert served < 20


def test_an_unknown_strategy_stops_the_start(model: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="adaptive, fair"):
        sage(model, "best")
