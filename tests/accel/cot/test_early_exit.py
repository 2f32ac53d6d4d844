"""When probes are enough, where they stand, and when their answers are complete."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.accel.cot.early_exit import (
    ProbeExit,
    ProbePoints,
    answer_behind,
    completes_answer,
    confidence_of,
)
from sagellm.core.errors import RequestError
from sagellm.core.protocols.cot import FINAL_ANSWER, EarlyExit, ReasoningStep, StepAction

CONTINUE, CONCLUDE = StepAction.CONTINUE, StepAction.CONCLUDE


def steps_of(*answers: tuple[str | None, float | None]) -> list[ReasoningStep]:
    return [ReasoningStep(i, True, answer, confidence) for i, (answer, confidence) in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "action", "reason"),
    [
        ([], CONTINUE, "no probe"),
        ([(None, None)], CONTINUE, "the last probe has no answer"),
        ([("7", 0.94)], CONTINUE, "a probe has confidence 0.9400"),
        ([("7", 0.95)], CONCLUDE, "a probe has confidence 0.9500"),
        ([("7", 0.99), ("8", 0.5)], CONTINUE, "a probe has confidence 0.5000"),
        ([("7", None)], CONTINUE, "a probe has confidence 0.0000"),
    ],
)
def test_a_confident_probe_is_enough(answers: list[Any], action: StepAction, reason: str) -> None:
    plan = ProbeExit(EarlyExit(0.95)).accelerate_cot(steps_of(*answers))
    assert (plan.action, plan.reason) == (action, reason)


@pytest.mark.parametrize(
    ("answers", "action", "votes"),
    [
        ("", CONTINUE, 0),
        ("7", CONTINUE, 1),
        ("77", CONTINUE, 2),
        ("777", CONCLUDE, 3),
        ("7787", CONTINUE, 1),
        ("778777", CONCLUDE, 3),
        ("77-7", CONTINUE, 1),
        ("777-", CONTINUE, 0),
    ],
)
def test_probes_that_agree_in_a_row_are_enough(answers: str, action: StepAction, votes: int) -> None:
    steps = steps_of(*((None if each == "-" else each, None) for each in answers))
    plan = ProbeExit(EarlyExit(None, 3)).accelerate_cot(steps)
    assert (plan.action, plan.num_votes) == (action, votes)
    assert plan.chosen == (len(answers) - 1 if votes else None)


def points(rule: EarlyExit, text: str) -> list[int]:
    """Where probes stand in a text of one-character tokens; `.` is no reasoning, `|` ends a line."""
    found = ProbePoints(rule)
    return [
        i for i, token in enumerate(text) if found.push(is_reasoning=token != ".", ends_line=token == "|")
    ]


def test_probes_stand_behind_lines_or_tokens_and_not_too_close() -> None:
    assert points(EarlyExit(every=1), "..ab|c|d..") == [4, 6]
    assert points(EarlyExit(every=3), "ab|c|d|") == [2, 6]
    assert points(EarlyExit(every=3, at="token"), "..abcdefg..abc") == [4, 7, 13]
    assert points(EarlyExit(every=1, at="token"), "ab.c") == [0, 1, 3]


@pytest.mark.parametrize(
    ("probe", "text", "has_ended", "is_complete"),
    [
        (FINAL_ANSWER, "42", False, False),
        (FINAL_ANSWER, "42}", False, True),
        (FINAL_ANSWER, "\\frac{1}{2", False, False),
        (FINAL_ANSWER, "\\frac{1}{2}}", False, True),
        (FINAL_ANSWER, "4\n2", False, False),
        (FINAL_ANSWER, "42", True, False),  # the model ended within the box
        ("", "42", False, False),
        ("", "\n\n42", False, False),
        ("", "\n42\n", False, True),
        ("", "42", True, True),
        ("So {x} is ", "4}\n", False, True),
    ],
)
def test_an_answer_ends_with_its_box_or_its_line(
    probe: str, text: str, has_ended: bool, is_complete: bool
) -> None:
    assert completes_answer(probe, text, has_ended=has_ended) is is_complete


@pytest.mark.parametrize(
    ("probe", "text", "answer"),
    [
        (FINAL_ANSWER, "42} of 7", "42"),
        (FINAL_ANSWER, "\\frac{1}{2}}", "\\frac{1}{2}"),
        (FINAL_ANSWER, "}", None),
        (FINAL_ANSWER, "\n}", None),
        ("\nThe answer is", "", None),  # the model has ended its turn
        ("\nAnswer of step 2:", " Paris\n", "paris"),
        ("", "**\n", None),
        ("", "42\n", "42"),
    ],
)
def test_what_the_probe_says_is_no_answer(probe: str, text: str, answer: str | None) -> None:
    assert answer_behind(probe, text) == answer


def test_confidence_is_the_geometric_mean() -> None:
    assert confidence_of([]) == 0.0
    assert confidence_of([0.0, 0.0]) == 1.0
    assert confidence_of([-1.0, -3.0]) == pytest.approx(0.1353, abs=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threshold": None}, "needs either a threshold or a window"),
        ({"window": 2}, "needs either a threshold or a window"),
        ({"threshold": 0.0}, "threshold must be above 0"),
        ({"threshold": 1.1}, "threshold must be above 0"),
        ({"threshold": None, "window": 1}, r"window must be in \[2, 128\]"),
        ({"every": 0}, "every must be at least 1"),
        ({"every": 1.5}, "every must be an integer"),
        ({"threshold": None, "window": 2.5}, "window must be an integer"),
        ({"threshold": "high"}, "threshold must be a number"),
        ({"max_probe_tokens": True}, "max_probe_tokens must be an integer"),
        ({"probe": None}, "probe must be a text"),
        ({"at": "word"}, "at must be one of line, token"),
        ({"probe": "x" * 257}, "at most 256 characters"),
        ({"max_probe_tokens": 0}, "max_probe_tokens must be in"),
        ({"max_probe_tokens": 65}, "max_probe_tokens must be in"),
    ],
)
def test_wrong_rules_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        EarlyExit(**wrong)
    assert caught.value.param == "early_exit"
