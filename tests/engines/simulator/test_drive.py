"""Requests by time of arrival, with and without a pipeline of steps: hand-checked on a stand-in cost."""

from __future__ import annotations

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.errors import CapacityError
from sagellm.core.events import EventBus, RequestFinished, RequestScheduled
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.simulator.backend import SimulatedBackend
from sagellm.engines.simulator.cost_model import Coefficients, CostModel
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.measured import RequestTiming, drive
from sagellm.engines.simulator.models import MODELS
from tests.engines.simulator.worlds import config

STEP_S = 1.0
SLOW = Coefficients(step_s=STEP_S, chunk_step_s=0.0, row_s=0.0)
"""A step takes a second and, on this device, under a millisecond more."""


def run(
    arrivals_s: list[float], *, pipelined: bool, num_blocks: int = 100, length: int = 8
) -> list[RequestTiming]:
    clock, events = ManualClock(), EventBus()
    cost = CostModel(device("h200"), MODELS["llama-3.2-1b"], SLOW)
    made = SimulatedBackend(cost, clock, num_blocks=num_blocks, max_num_seqs=8)
    engine = build_engine(config(scheduler__max_num_seqs=8), made, clock=clock, events=events)
    requests = [
        Request(
            f"r{i}", Tokens([i] * length), SamplingParams(max_tokens=4, ignore_eos=True), arrival_s=when_s
        )
        for i, when_s in enumerate(arrivals_s)
    ]
    found = drive(engine, clock, events, requests, pipelined=pipelined)
    assert not events.wants(RequestFinished)
    assert not events.wants(RequestScheduled)
    return found


def test_who_is_alone_waits_for_nobody() -> None:
    (timing,) = run([3.0], pipelined=True)
    assert (timing.queued_s, timing.scheduled_s) == (3.0, 3.0)
    assert timing.ttft_s == pytest.approx(STEP_S, rel=0.01)
    assert timing.tpot_s == pytest.approx(STEP_S, rel=0.01)
    assert timing.last_token_s == pytest.approx(3.0 + 4 * STEP_S, rel=0.01)
    assert timing.num_output_tokens == 4


def test_without_a_pipeline_the_next_step_takes_what_came() -> None:
    _, second = run([0.0, 0.5], pipelined=False)
    assert second.queued_s == pytest.approx(1.0, abs=0.02)
    assert second.first_token_s == pytest.approx(2.0, abs=0.02)


def test_a_planned_step_is_missed() -> None:
    _, second = run([0.0, 0.5], pipelined=True)
    assert second.queued_s == pytest.approx(1.0, abs=0.02)
    assert second.scheduled_s == second.queued_s
    assert second.first_token_s == pytest.approx(3.0, abs=0.02)


def test_time_passes_while_nobody_is_there() -> None:
    first, second = run([0.0, 50.0], pipelined=True)
    assert first.last_token_s < 5.0
    assert second.queued_s == 50.0


def test_the_order_of_the_list_does_not_matter() -> None:
    by_name = {one.request_id: one for one in run([2.2, 0.0, 1.1], pipelined=True)}
    assert by_name["r1"].queued_s < by_name["r2"].queued_s < by_name["r0"].queued_s


def test_who_cannot_be_served_is_an_error() -> None:
    with pytest.raises(CapacityError, match=r"request r0 ended .* give the engine more KV blocks"):
        run([0.0], pipelined=True, num_blocks=2, length=30)
