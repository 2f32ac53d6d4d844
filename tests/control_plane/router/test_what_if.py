"""The fluid model of a fleet: numbers by hand, and a twin that goes step by step."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.control_plane.router._step_fit import StepLine
from sagellm.control_plane.router._what_if import FleetForm, PastRequest, Speeds, _Fleet, goes_apart, replay
from tests.effort import examples

SPEEDS = Speeds(token_s=0.001, line=StepLine(0.01), chunk=200)


def past(arrival_s: float, num_tokens: int = 100, num_output: int = 11, **goals: float) -> PastRequest:
    return PastRequest(arrival_s, num_tokens, num_tokens, num_output, **goals)


def share(made: list[PastRequest], num_instances: int, num_prefill: int, speeds: Speeds = SPEEDS) -> float:
    work = replay(made, speeds, num_instances, FleetForm(num_prefill, rescues=True))
    while True:
        try:
            next(work)
        except StopIteration as ended:
            return float(ended.value)


def times(
    requests: list[PastRequest], num_instances: int, num_prefill: int, chunk: int = 200
) -> list[tuple[float, float]]:
    """When each request has its first and its last token."""
    fleet = _Fleet(
        requests, SPEEDS._replace(chunk=chunk), num_instances, FleetForm(num_prefill, True), 0, 1.0
    )
    for number, request in enumerate(requests):
        fleet.advance(request.arrival_s)
        fleet.place(number)
    fleet.advance(math.inf)
    return [(round(first, 9), round(end, 9)) for first, end in zip(fleet.firsts_s, fleet.ends_s, strict=True)]


def test_one_request_takes_its_prompt_and_ten_steps() -> None:
    assert times([past(5.0)], 1, 0) == [(5.1, 5.2)]


def test_a_prompt_delays_the_answer_beside_it_and_gives_it_one_token() -> None:
    assert times([past(0.0), past(0.0)], 1, 0, 100) == [(0.1, 0.29), (0.2, 0.3)]


def test_prompts_that_fit_into_one_step_end_together() -> None:
    assert times([past(0.0), past(0.0)], 1, 0) == [(0.2, 0.3), (0.2, 0.3)]


def test_a_long_prompt_takes_several_steps() -> None:
    assert times([past(0.0, 10), past(0.01, 400)], 1, 0) == [(0.01, 0.49), (0.41, 0.51)]


def test_prompts_of_a_prefill_instance_delay_no_answer() -> None:
    assert times([past(0.0), past(0.0)], 2, 1, 100) == [(0.1, 0.21), (0.2, 0.305)], (
        "half a step for each that joins"
    )


def test_those_that_join_in_one_step_delay_it_once() -> None:
    delays = []
    for gap_s in (0.0, 0.05):
        requests = [past(0.0, 10, 31), past(gap_s, 10), past(gap_s, 10)]
        delays.append(times(requests, 4, 3)[0][1] - 0.31)
    assert delays[0] == pytest.approx(0.005), "all three"
    assert delays[1] == pytest.approx(0.01), "the first, and then both"


def test_which_form_meets_the_goals_depends_on_the_goals() -> None:
    one = SPEEDS._replace(chunk=100)
    tight_answers = [past(0.0, tpot_s=0.015) for _ in range(3)]
    assert [share(tight_answers, 2, number, one) for number in (0, 1)] == [pytest.approx(2 / 3), 1.0]
    tight_prompts = [past(0.0, ttft_s=0.15), past(0.0, ttft_s=0.15)]
    assert [share(tight_prompts, 2, number, one) for number in (0, 1)] == [1.0, 1.0], "one is served whole"


def test_answers_wait_for_memory() -> None:
    short = SPEEDS._replace(kv_tokens=150, chunk=100)
    goals = [past(0.0, ttft_s=0.11), past(0.0, ttft_s=0.25), past(0.0, ttft_s=0.25)]
    assert share(goals, 1, 0, short) == pytest.approx(1 / 3)
    assert share(goals, 1, 0, short._replace(kv_tokens=math.inf)) == pytest.approx(2 / 3)


def test_later_tokens_of_a_prompt_take_longer() -> None:
    speeds = Speeds(0.001, token_squared_s=1e-5)
    assert speeds.prompt_s(100, 100) == pytest.approx(0.1 + 50 * 100 * 1e-5)
    assert speeds.prompt_s(100, 20) == pytest.approx(0.02 + 90 * 20 * 1e-5), "80 are cached"


@pytest.mark.parametrize(
    ("num_uncached", "apart_s", "whole_s", "rescues", "expected"),
    [
        (127, 0.1, 0.1, True, False),  # too short
        (128, 0.9, 0.1, True, True),  # in time
        (128, 1.1, 0.9, True, False),  # late there alone
        (128, 1.1, 0.9, False, True),  # and yet it would delay others elsewhere
        (128, 1.1, 1.2, True, True),  # late in both places
    ],
)
def test_the_rule_for_one_request(
    num_uncached: int, apart_s: float, whole_s: float, *, rescues: bool, expected: bool
) -> None:
    assert goes_apart(num_uncached, apart_s, whole_s, 1.0, 128, rescues=rescues) is expected


def test_goals_that_are_met_by_a_hair_count_in_part() -> None:
    hair = [past(0.0, ttft_s=0.0999), past(10.0, ttft_s=0.104), past(20.0, ttft_s=0.12)]
    assert share(hair, 1, 0) == pytest.approx((1 / 3 + 2 / 3 + 1) / 3)


def step_by_step(requests: list[PastRequest]) -> list[tuple[float, float]]:
    """One whole instance, without fractions of tokens."""
    coming, prompts, rows = deque(enumerate(requests)), deque[int](), dict[int, int]()
    firsts, ends, now_s = [math.inf] * len(requests), [math.inf] * len(requests), 0.0
    while coming or prompts or rows:
        if not prompts and not rows:
            now_s = max(now_s, coming[0][1].arrival_s)
        while coming and coming[0][1].arrival_s <= now_s:
            prompts.append(coming.popleft()[0])
        begun: list[int] = []
        while prompts and sum(requests[number].num_tokens for number in [*begun, prompts[0]]) <= 200:
            begun.append(prompts.popleft())
        now_s += sum(requests[number].num_tokens for number in begun) * SPEEDS.token_s or SPEEDS.line.step_s
        for number in list(rows):
            rows[number] -= 1
            if not rows[number]:
                ends[number] = now_s
                del rows[number]
        for number in begun:
            firsts[number], rows[number] = now_s, requests[number].num_output - 1
    return list(zip(firsts, ends, strict=True))


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 200), st.integers(2, 30)), min_size=1, max_size=12)
)
def test_the_fluid_agrees_with_steps(gaps: list[tuple[float, int, int]]) -> None:
    now_s, made = 0.0, []
    for gap_s, num_tokens, num_output in gaps:
        now_s += gap_s
        made.append(past(now_s, num_tokens, num_output))
    longest_s = max(each.num_tokens for each in made) * SPEEDS.token_s
    room_s = (
        SPEEDS.line.step_s * (1 + len(made)) + longest_s
    )  # a prompt waits for a step; a row ends within one
    for fluid, exact in zip(times(made, 1, 0), step_by_step(made), strict=True):
        assert fluid[0] == pytest.approx(exact[0], abs=room_s)
        assert fluid[1] == pytest.approx(exact[1], abs=room_s)
