"""When samples are enough: exact plans for both published rules, and what they never do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.cot.self_consistency import SelfConsistency, leads
from sagellm.core.errors import RequestError
from sagellm.core.protocols.cot import CoTPlan, EarlyStop, ReasoningStep, StepAction

CONTINUE, CONCLUDE = StepAction.CONTINUE, StepAction.CONCLUDE


def steps_of(states: str) -> list[ReasoningStep]:
    """A letter is an answer, `.` runs, `-` has ended without an answer."""
    return [
        ReasoningStep(index, has_ended=state != ".", answer=state if state.isalpha() else None)
        for index, state in enumerate(states)
    ]


def plan_of(states: str, num_samples: int, window: int = 4, confidence: float | None = None) -> CoTPlan:
    return SelfConsistency(num_samples, EarlyStop(window, confidence)).accelerate_cot(steps_of(states))


@pytest.mark.parametrize(
    ("states", "action", "num_to_start", "chosen", "num_votes"),
    [
        ("", CONTINUE, 4, None, 0),
        ("....", CONTINUE, 0, None, 0),
        ("a.a.", CONTINUE, 0, 0, 2),
        ("aaaa", CONCLUDE, 0, 0, 4),
        ("a.b.", CONTINUE, 4, 0, 1),  # this window cannot agree any more, so the next one starts
        ("-...", CONTINUE, 4, None, 0),
        ("a.b.....", CONTINUE, 0, 0, 1),
        ("a.b.cccc", CONCLUDE, 0, 4, 4),
        ("abbbbbbb", CONCLUDE, 0, 1, 7),
        ("aabb....", CONTINUE, 0, 0, 2),
        ("----....", CONTINUE, 0, None, 0),
        ("----", CONTINUE, 4, None, 0),
    ],
)
def test_a_window_that_agrees_is_enough(
    states: str, action: StepAction, num_to_start: int, chosen: int | None, num_votes: int
) -> None:
    plan = plan_of(states, 40)
    assert (plan.action, plan.num_to_start) == (action, num_to_start)
    assert (plan.chosen, plan.num_votes) == (chosen, num_votes)


@pytest.mark.parametrize(
    ("states", "num_samples", "action", "num_to_start"),
    [
        ("ab..", 6, CONTINUE, 2),  # the last window has two samples
        ("abcdaa", 6, CONCLUDE, 0),
        ("abaa.", 6, CONTINUE, 0),
        ("abaaa.", 6, CONCLUDE, 0),  # four votes of six
        ("abab.", 5, CONTINUE, 0),
        ("ababa", 5, CONCLUDE, 0),
        ("--.", 3, CONTINUE, 0),
        ("---", 3, CONCLUDE, 0),
    ],
)
def test_the_number_asked_for_is_never_exceeded(
    states: str, num_samples: int, action: StepAction, num_to_start: int
) -> None:
    plan = plan_of(states, num_samples)
    assert (plan.action, plan.num_to_start) == (action, num_to_start)


@pytest.mark.parametrize(
    ("states", "action", "num_to_start"),
    [
        ("", CONTINUE, 2),
        ("a.", CONTINUE, 1),  # so many run at a time
        ("aaa.", CONTINUE, 1),
        ("aaaa.", CONCLUDE, 0),  # 1 - 1/32 is above 0.95
        ("aaab..", CONTINUE, 0),
        ("baaaaa", CONTINUE, 2),
        ("baaaaaa", CONCLUDE, 0),
    ],
)
def test_a_leading_answer_that_is_confirmed_is_enough(
    states: str, action: StepAction, num_to_start: int
) -> None:
    plan = plan_of(states, 40, window=2, confidence=0.95)
    assert (plan.action, plan.num_to_start) == (action, num_to_start)


def test_the_probability_of_a_lead_is_that_of_a_beta_distribution() -> None:
    assert [leads(votes, 0) for votes in (1, 2, 3, 4)] == [0.75, 0.875, 0.9375, 0.96875]
    assert leads(3, 3) == 0.5
    draw = random.Random(0)
    shares = [draw.betavariate(8, 4) > 0.5 for _ in range(40_000)]
    assert leads(7, 3) == pytest.approx(sum(shares) / len(shares), abs=0.01)


def run(answers: Sequence[str], rule: EarlyStop, draw: random.Random) -> tuple[CoTPlan, str]:
    """Samples end in any order. Returns the plan that concludes, and the states then."""
    policy, states = SelfConsistency(len(answers), rule), ""
    plan = policy.accelerate_cot([])
    for _ in range(2 * len(answers)):
        states += "." * plan.num_to_start
        running = [index for index, state in enumerate(states) if state == "."]
        assert running, "a plan to continue with nothing that runs"
        ended = draw.choice(running)
        states = states[:ended] + answers[ended] + states[ended + 1 :]
        plan = policy.accelerate_cot(steps_of(states))
        if plan.action is CONCLUDE:
            return plan, states
    raise AssertionError("it never concludes")


@given(
    answers=st.text(alphabet="aab-", min_size=2, max_size=24),
    window=st.integers(2, 8),
    confidence=st.sampled_from([None, 0.9, 0.999]),
    seed=st.integers(0, 99),
)
def test_it_concludes_for_a_reason_that_holds(
    answers: str, window: int, confidence: float | None, seed: int
) -> None:
    plan, states = run(answers, EarlyStop(window, confidence), random.Random(seed))
    assert plan.reason
    assert len(states) <= len(answers)
    votes = Counter(state for state in states if state.isalpha())
    if plan.chosen is None:
        assert not votes
        assert len(states) == len(answers)
        return
    assert votes[states[plan.chosen]] == plan.num_votes == max(votes.values())
    if "can reach" in plan.reason:  # the full number would give the same answer
        full = Counter(answer for answer in answers if answer != "-").most_common()
        assert full[0][0] == states[plan.chosen]
        assert len(full) == 1 or full[0][1] > full[1][1]


def test_equal_answers_cost_one_window_of_many() -> None:
    plan, states = run("a" * 40, EarlyStop(5), random.Random(0))
    assert (plan.action, states) == (CONCLUDE, "aaaaa")


@pytest.mark.parametrize(
    ("window", "confidence", "message"),
    [
        (1, None, "window must be an integer in"),
        (129, None, "window must be an integer in"),
        (2.5, None, "window must be an integer"),
        (4, 0.5, "above 0.5"),
        (4, 1.0, "below 1"),
    ],
)
def test_rules_that_make_no_sense_are_refused(window: Any, confidence: float | None, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        EarlyStop(window, confidence)
    assert caught.value.param == "early_stop"


def test_values_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="has not ended"):
        ReasoningStep(0, has_ended=False, answer="a")
    with pytest.raises(ValueError, match="cannot start 2 steps"):
        CoTPlan(CONCLUDE, "why", 2)
    with pytest.raises(ValueError, match="cannot start -1 steps"):
        CoTPlan(CONTINUE, "why", -1)


@pytest.mark.parametrize(
    ("states", "growth", "num_to_start"),
    [
        ("", 4, 4),
        ("a.b.", 2, 4),
        ("a.b.", 4, 12),
        ("a.b.c.d.", 2, 8),
        ("a.b.c.d.", 4, 24),
        ("a.b.....", 4, 0),
        ("a.b.c.d." + "." * 8, 2, 0),
        ("a.b.c.d." * 4, 2, 8),  # there are no more
        ("a.b.c.d." * 5, 2, 0),
        ("a.b.c.d." + "a.b." + "....", 2, 0),
    ],
)
def test_where_no_window_can_agree_more_are_started_at_once(
    states: str, growth: int, num_to_start: int
) -> None:
    plan = SelfConsistency(40, EarlyStop(4, growth=growth)).accelerate_cot(steps_of(states))
    assert (plan.action, plan.num_to_start) == (CONTINUE, num_to_start)


def test_samples_double_by_default() -> None:
    for states, num_to_start in (("", 4), ("a.b.", 4), ("a.b." * 2, 8), ("a.b." * 4, 16)):
        plan = SelfConsistency(40, EarlyStop()).accelerate_cot(steps_of(states))
        assert plan.num_to_start == num_to_start


@pytest.mark.parametrize("growth", [0, -1, 129, 1.5, "2"])
def test_growth_is_a_small_integer(growth: Any) -> None:
    with pytest.raises(RequestError, match="growth"):
        EarlyStop(growth=growth)
