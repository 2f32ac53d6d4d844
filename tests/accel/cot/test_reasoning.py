"""Which tokens count as reasoning, and where a budget ends it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.types import SamplingParams

THINK, END, EOS, TEXT = 10, 11, 2, 5
MARKERS = (THINK, END)


def behind(prompt: Sequence[int], budget: int | None = None) -> ReasoningTracker:
    return ReasoningTracker.behind(prompt, MARKERS, {EOS}, budget)


@pytest.mark.parametrize(
    ("prompt", "is_inside"),
    [
        ([TEXT], False),
        ([TEXT, THINK], True),
        ([TEXT, THINK, TEXT, TEXT], True),
        ([THINK, TEXT, END, TEXT], False),
        ([THINK, TEXT, END, THINK], True),
        ([THINK, TEXT, EOS, TEXT], False),  # a marker that an earlier turn spells does not open this one
        ([EOS, THINK, TEXT], True),
    ],
)
def test_a_prompt_may_open_reasoning_in_its_last_turn(prompt: list[int], is_inside: bool) -> None:
    assert behind(prompt).is_inside is is_inside


def test_only_tokens_between_markers_count() -> None:
    tracker, counts = behind([TEXT]), []
    for token_id in (TEXT, THINK, TEXT, THINK, END, TEXT, END, THINK, TEXT, END):
        tracker.push(token_id)
        counts.append(tracker.num_tokens)
    assert counts == [0, 0, 1, 2, 2, 2, 2, 2, 3, 3]
    assert tracker.forced_id is None


@given(
    prompt=st.lists(st.sampled_from([TEXT, THINK, END, EOS]), max_size=6),
    outputs=st.lists(st.sampled_from([TEXT, TEXT, THINK, END, EOS]), max_size=20),
    as_array=st.booleans(),
)
def test_many_tokens_at_once_are_as_many_single_ones(
    prompt: list[int], outputs: list[int], as_array: bool
) -> None:
    """The slow twin looks at each token."""
    plain = behind(prompt)
    marks = [token for token in prompt if token != TEXT]
    assert plain.is_inside == (marks[-1:] == [THINK])
    fast = replace(plain)
    fast.extend(array("i", outputs) if as_array else outputs)
    for token_id in outputs:
        plain.push(token_id)
    assert fast == plain
    assert isinstance(fast.num_tokens, int)
    assert isinstance(fast.is_inside, bool)


def test_reasoning_of_the_prompt_does_not_count() -> None:
    tracker = behind([THINK, TEXT, TEXT, TEXT], budget=1)
    assert (tracker.num_tokens, tracker.forced_id) == (0, None)
    tracker.push(TEXT)
    assert (tracker.num_tokens, tracker.forced_id) == (1, END)


def test_all_reasoning_of_an_answer_has_one_budget() -> None:
    tracker, forced = behind([TEXT], budget=3), []
    for token_id in (THINK, TEXT, TEXT, END, THINK, TEXT, END, THINK):
        tracker.push(token_id)
        forced.append(tracker.forced_id)
    assert forced == [None] * 5 + [END, None, END]


def test_no_budget_closes_reasoning_that_the_prompt_opens_at_once() -> None:
    assert behind([THINK], budget=0).forced_id == END
    assert behind([TEXT], budget=0).forced_id is None


def test_a_request_that_goes_on_has_counted_its_outputs() -> None:
    params = SamplingParams(max_reasoning_tokens=2, reasoning_token_ids=MARKERS)
    tracker = ReasoningTracker.of(params, [TEXT, THINK], [TEXT, TEXT], frozenset())
    assert tracker is not None
    assert tracker.forced_id == END
    assert ReasoningTracker.of(SamplingParams(), [TEXT, THINK], [TEXT], frozenset()) is None


def test_a_soft_budget_grows_by_its_slope_with_each_token_of_reasoning() -> None:
    params = SamplingParams(
        soft_reasoning_tokens=2, soft_reasoning_slope=0.5, max_reasoning_tokens=4, reasoning_token_ids=MARKERS
    )
    tracker, found = ReasoningTracker.of(params, [TEXT], [THINK], {EOS}), []
    assert tracker is not None
    for token_id in (TEXT, TEXT, TEXT, TEXT, END, TEXT, THINK):
        tracker.push(token_id)
        found.append((tracker.end_bias, tracker.forced_id))
    assert found == [(0, None), (0.5, None), (1.0, None), (1.5, END), (0, None), (0, None), (1.5, END)]


def test_a_soft_budget_of_nothing_begins_at_once() -> None:
    params = SamplingParams(soft_reasoning_tokens=0, soft_reasoning_slope=2.0, reasoning_token_ids=MARKERS)
    tracker = ReasoningTracker.of(params, [THINK], [], {EOS})
    assert tracker is not None
    assert (tracker.end_bias, tracker.forced_id) == (2.0, None)


def test_a_soft_budget_without_a_slope_has_a_tenth() -> None:
    params = SamplingParams(soft_reasoning_tokens=0, reasoning_token_ids=MARKERS)
    tracker = ReasoningTracker.of(params, [THINK], [], {EOS})
    assert tracker is not None
    assert tracker.end_bias == 0.1
