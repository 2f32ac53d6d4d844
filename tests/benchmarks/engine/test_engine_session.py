"""A session over the exact fake: arrival times, reuse, and the share of a step that is not `execute`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sagellm.benchmarks.engine.session import PromptJob, Session, StepTime
from sagellm.benchmarks.process import CpuTimes, others_share, peak_resident_bytes, resident_bytes
from sagellm.core.clock import ManualClock
from sagellm.core.errors import SageError
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.engines.simulator import TokenMemoryBackend
from tests.builders import expected_tokens, fake_engine

EXECUTE_S, PLAN_S = 0.3, 0.1


class TimedBackend(TokenMemoryBackend):
    """Each step takes `EXECUTE_S` of a clock."""

    clock: ManualClock
    broken = False

    def execute(self, plan: ExecutionPlan) -> StepResult:
        if self.broken:
            raise RuntimeError("out of order")
        self.clock.advance(EXECUTE_S)
        return super().execute(plan)


def timed_session() -> tuple[Session, TimedBackend]:
    """Planning a step takes `PLAN_S`."""
    backend = TimedBackend()
    engine = fake_engine(backend)
    assert isinstance(engine.clock, ManualClock)
    backend.clock = clock = engine.clock
    plan = engine.scheduler.run

    def slow_plan(*given: object) -> object:
        clock.advance(PLAN_S)
        return plan(*given)  # type: ignore[arg-type]

    engine.scheduler.run = slow_plan  # type: ignore[assignment, method-assign]
    return Session(engine, clock), backend


def test_tokens_and_their_times() -> None:
    session, backend = timed_session()
    first, second = session.run([PromptJob([5, 6, 7], 3), PromptJob([8, 9], 2)])
    assert first.token_ids == expected_tokens(backend, [5, 6, 7], 3)
    assert second.token_ids == expected_tokens(backend, [8, 9], 2)
    assert first.times_s == pytest.approx([0.4, 0.8, 1.2])
    assert (second.first_s, second.last_s) == pytest.approx((0.4, 0.8))


def test_overhead_is_what_was_not_execute() -> None:
    session, _ = timed_session()
    session.run([PromptJob([5, 6, 7], 3)])
    assert session.steps.num_steps == 3
    assert session.steps.execute_s == pytest.approx(3 * EXECUTE_S)
    assert session.steps.overhead == pytest.approx(PLAN_S / (PLAN_S + EXECUTE_S))
    session.begin()
    assert session.steps == StepTime()
    assert session.steps.overhead == 0.0


def test_a_prefix_is_reused_until_the_next_beginning() -> None:
    session, _ = timed_session()
    prompt = list(range(9))
    cached = [session.run([PromptJob(prompt, 1)])[0].num_cached for _ in range(2)]
    session.begin()
    assert [*cached, session.run([PromptJob(prompt, 1)])[0].num_cached] == [0, 8, 0]


def test_an_engine_that_fails() -> None:
    session, backend = timed_session()
    backend.broken = True
    with pytest.raises(SageError, match=r"gave up a request: the backend failed: out of order"):
        session.run([PromptJob([1, 2], 2)])


def test_what_others_take_of_the_machine() -> None:
    before = CpuTimes(total_s=100.0, busy_s=50.0, own_s=10.0)
    assert others_share(before, CpuTimes(110.0, 57.0, 13.0)) == pytest.approx(0.4)
    assert others_share(before, CpuTimes(110.0, 51.0, 13.0)) == 0.0
    assert others_share(before, before) is None
    assert others_share(None, before) is None


def test_memory_of_this_process() -> None:
    now = resident_bytes()
    if now is not None:
        held = bytearray(b"x" * (64 << 20))
        assert (resident_bytes() or 0) - now > 50 << 20
        assert peak_resident_bytes() >= len(held)
    assert peak_resident_bytes() > 1 << 20


def test_roofline_is_weights_once_a_step_and_the_kv_of_all_contexts() -> None:
    session, backend = timed_session()
    capability = replace(backend.capability(), weight_bytes=1000)
    assert StepTime().roofline(capability, 1.0) is None
    session.run([PromptJob([5, 6, 7], 3)])
    assert session.steps.tokens_read == 3 + 4 + 5  # a prompt, then each token and all before it
    assert capability.kv_schema is not None
    read = 3 * 1000 + 12 * capability.kv_schema.bytes_per_token
    assert session.steps.roofline(capability, 1e4) == pytest.approx(read / 1e4 / session.steps.total_s)
    assert session.steps.roofline(backend.capability(), 1e4) is None
