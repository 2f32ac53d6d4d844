"""Which steps of a small model stay, where steps end, and what their scores are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from sagellm.accel.cot.judged_steps import JudgedSteps, StepBounds, likelihood_score, score_of
from sagellm.core.errors import RequestError
from sagellm.core.protocols.cot import (
    MAX_JUDGE_CHARS,
    MAX_STEP_TOKENS,
    ReasoningStep,
    SpeculativeReasoning,
    StepAction,
)

CONTINUE, CONCLUDE = StepAction.CONTINUE, StepAction.CONCLUDE


@pytest.mark.parametrize(
    ("scores", "action", "starts", "accepts", "reason"),
    [
        ([], CONTINUE, 1, False, "no step"),
        ([7.0], CONTINUE, 1, True, "a step has score 7.00"),
        ([6.99], CONTINUE, 0, False, "a step has score 6.99"),
        ([None], CONTINUE, 0, False, "a step has no score"),
        ([3, 9], CONTINUE, 1, True, "a step has score 9.00"),
        ([3, 9, 4], CONTINUE, 0, False, "a step has score 4.00"),
        ([9, 3, None], CONCLUDE, 0, False, "2 steps in a row were rejected"),
    ],
)
def test_a_plan_follows_the_last_scores(
    scores: Sequence[float | None], action: StepAction, starts: int, accepts: bool, reason: str
) -> None:
    steps = [ReasoningStep(index, has_ended=True, score=score) for index, score in enumerate(scores)]
    plan = JudgedSteps(SpeculativeReasoning(7.0, max_rejected=2)).accelerate_cot(steps)
    assert (plan.action, plan.num_to_start, plan.reason) == (action, starts, reason)
    assert plan.chosen == (len(steps) - 1 if accepts else None)


@pytest.mark.parametrize(
    ("likeliest", "score"),
    [
        ([], None),
        ([(b"good", -0.1), (b"12", -0.2), ("\u00b2".encode(), -0.3)], None),
        ([(b"7", math.log(0.9))], 7.0),
        ([(b" 8", math.log(0.5)), (b"\n", math.log(0.4)), (b"0", math.log(0.1))], 8 * 0.5 / 0.6),
    ],
)
def test_a_score_is_the_mean_of_the_digits(
    likeliest: Sequence[tuple[bytes, float]], score: float | None
) -> None:
    assert score_of(likeliest) == (score if score is None else pytest.approx(score))


def test_the_score_by_probabilities_is_their_geometric_mean_of_nine() -> None:
    assert likelihood_score([math.log(0.5), math.log(0.125)]) == pytest.approx(9 * 0.25)
    assert likelihood_score([]) == 0.0


@pytest.mark.parametrize(
    ("text", "most", "length"),
    [("ab\ncd", 9, 3), ("\n\n\na\n", 9, 5), ("abcdef", 4, 4), ("\n \n", 3, 3), ("a\n", 1, 1)],
)
def test_a_step_ends_with_a_line_that_is_not_empty(text: str, most: int, length: int) -> None:
    bounds = StepBounds(most)
    assert [bounds.push(each.encode()) for each in text].index(True) + 1 == length


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": 9.1}, "threshold"),
        ({"threshold": math.nan}, "threshold"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"max_step_tokens": MAX_STEP_TOKENS + 1}, "max_step_tokens"),
        ({"max_rejected": 0}, "max_rejected"),
        ({"max_rejected": 1.5}, "max_rejected must be an integer"),
        ({"threshold": "7"}, "threshold must be a number"),
        ({"judge": 3}, "judge must be a text"),
        ({"judge": "x" * (MAX_JUDGE_CHARS + 1)}, "judge"),
    ],
)
def test_a_wrong_rule_says_what_would_work(fields: dict[str, float | str], said: str) -> None:
    with pytest.raises(RequestError, match=rf"speculative_reasoning: {said}") as caught:
        SpeculativeReasoning(**fields)  # type: ignore[arg-type]
    assert caught.value.param == "speculative_reasoning"
