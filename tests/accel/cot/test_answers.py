"""The answer of a text, by the rule that `answer_of` states."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.cot.answers import answer_of


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # the last box
        (r"so 7 and \boxed{42} of 100", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} is 0.5", r"\frac{1}{2}"),
        (r"\boxed{ 1,000 }", "1000"),
        (r"\boxed{$-3.0$}", "-3"),
        (r"\boxed{Paris}.", "paris"),
        (r"\boxed{\boxed{9}}", "9"),
        (r"\boxed{a} and \boxed{", "a"),  # that is not closed
        (r"\boxed{} 7", "7"),
        ("7 \\boxed{\n}", "7"),  # a line break is no answer either
        ("\\boxed{\n1,000\n}", "1000"),
        (r"\boxed{$.50}", "0.5"),  # not 50
        (r"\boxed{-.5.}", "-0.5"),
        (r"} \boxed{a} }", "a"),
        # the last number
        ("5-3=2", "2"),
        ("x = -7", "-7"),
        ("10-3", "3"),
        ("about \u22125 degrees", "-5"),
        ("It costs $1,234.50.", "1234.5"),
        ("007", "7"),
        ("-0", "0"),
        ("3/4 of it", "3/4"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("50.", "50"),
        ("100%", "100"),
        ("1, 2, 3", "3"),
        ("9" * 60, "9" * 60),
        # the last line
        ("First\n\n**It is Paris.**\n\n", "it is paris"),
        ("  Yes \t indeed! ", "yes indeed"),
        ("version v1.2.3", "version v1.2.3"),
        ("", None),
        (" \n\t\n", None),
    ],
)
def test_the_rule(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>1+1=2</think>3", "3"),
        ("<think>1</think>a<think>2</think>b", "b"),
        ("<think>1</think>", None),
        ("no reasoning: 4", "4"),
    ],
)
def test_reasoning_is_no_answer(text: str, answer: str | None) -> None:
    assert answer_of(text, "</think>") == answer


@given(st.text(alphabet="\\boxed{}0123-,./ \nab"))
def test_an_answer_is_its_own_answer(text: str) -> None:
    answer = answer_of(text)
    assert answer is None or answer
    if answer is not None and "\\" not in answer:
        assert answer_of(answer) == answer


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "1,111", "1/", "-1", " \n", "}", "\\boxed{}"])
def test_a_long_text_takes_no_longer_for_what_it_holds(piece: str) -> None:
    began_s = time.process_time()
    answer_of(piece * (400_000 // len(piece)))
    assert time.process_time() - began_s < 5
