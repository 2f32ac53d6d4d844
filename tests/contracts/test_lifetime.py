"""What every registered length predictor promises, whatever is asked and whatever ends in which order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sagellm.core.protocols.lifetime import LifetimePredictor, Prediction, PredictionRequest
from sagellm.core.registry import registry

PREDICTORS = registry("predictor").names()
SESSIONS = st.sampled_from([None, "one", "two"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small wait for a second thread more than it helps them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name: str, **options: Any) -> LifetimePredictor:
    predictor: LifetimePredictor = registry("predictor").create(name, **options)
    return predictor


def check(prediction: Prediction, room: int) -> None:
    values = [prediction.quantiles[level] for level in sorted(prediction.quantiles)]
    assert {0.1, 0.5, 0.9} <= set(prediction.quantiles)
    assert all(low <= high for low, high in pairwise(values))
    assert all(0 <= value <= room for value in values)
    assert prediction.remaining_tokens == prediction.quantiles[0.5]
    assert 0 <= prediction.confidence <= 1
    assert prediction.estimated_time >= 0


class PredictorMachine(RuleBasedStateMachine):
    """Two predictors are told the same: they say the same."""

    name = ""

    @initialize()
    def start(self) -> None:
        self.first, self.second = make(self.name, max_open=8), make(self.name, max_open=8)
        self.num_ended = 0
        self.open: dict[str, int] = {}

    @rule(
        sequence=st.sampled_from("abcdefghijkl"),
        prompt=st.integers(0, 3000),
        generated=st.integers(0, 400),
        room=st.integers(0, 5000),
        tokens=st.lists(st.integers(0, 2**31 - 1), max_size=5),
        session=SESSIONS,
        category=st.sampled_from(["", "job"]),
    )
    def predict(
        self, sequence: str, prompt: int, generated: int, room: int, tokens: list[int], session: str | None,
        category: str,
    ) -> None:  # fmt: skip
        length = prompt + generated
        request = PredictionRequest(
            sequence, tokens, length, length + room, prompt, session_id=session, category=category
        )
        prediction = self.first.predict(request)
        check(prediction, room)
        assert prediction == self.second.predict(request)
        self.open[sequence] = length
        if not self.num_ended:
            assert prediction.abstained
            assert prediction.confidence == 0

    @precondition(lambda self: self.open)
    @rule(data=st.data(), more=st.integers(0, 500), seconds=st.floats(0, 100))
    def end(self, data: st.DataObject, more: int, seconds: float) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.open)), label="sequence")
        length = self.open.pop(sequence) + more
        for predictor in (self.first, self.second):
            predictor.update(sequence, length, seconds)
        self.num_ended += 1

    @rule()
    def an_end_of_nobody(self) -> None:
        for predictor in (self.first, self.second):
            predictor.update("never seen", 10, 1.0)


@pytest.mark.parametrize("name", PREDICTORS)
def test_state_machine(name: str) -> None:
    machine: Any = type(f"Predictor_{name}", (PredictorMachine,), {"name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=10, stateful_step_count=25, deadline=None)
    )


def ask(predictor: LifetimePredictor, name: str, prompt: int, **more: Any) -> Prediction:
    return predictor.predict(PredictionRequest(name, [], prompt, prompt + 4096, prompt, **more))


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_session_that_repeats_itself_is_known_by_its_previous_turn(name: str) -> None:
    predictor = make(name)
    lengths = {"short": 20, "long": 200}
    for turn in range(60):
        for session, output in lengths.items():
            ask(predictor, f"{session}{turn}", 100, session_id=session)
            predictor.update(f"{session}{turn}", 100 + output, 1.0)
    for session, output in lengths.items():
        said = ask(predictor, "next", 100, session_id=session).remaining_tokens
        assert said == pytest.approx(output, rel=0.3)


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_category_is_told_apart(name: str) -> None:
    predictor = make(name)
    for number in range(60):
        for category, output in (("titles", 8), ("summaries", 300)):
            ask(predictor, f"{category}{number}", 50, category=category)
            predictor.update(f"{category}{number}", 50 + output, 1.0)
    assert ask(predictor, "a", 50, category="titles").remaining_tokens < 20
    assert ask(predictor, "b", 50, category="summaries").remaining_tokens > 200


@pytest.mark.parametrize("name", PREDICTORS)
def test_one_that_went_on_for_longer_than_most_is_expected_to_go_on(name: str) -> None:
    """Half of the outputs have 10 tokens, half 500: after 50 tokens it is one of the latter."""
    predictor = make(name)
    for number in range(100):
        predictor.predict(PredictionRequest(str(number), [], 30, 5000, 30))
        predictor.update(str(number), 30 + (10 if number % 2 else 500), 1.0)
    prediction = predictor.predict(PredictionRequest("new", [], 80, 5000, 30))
    assert prediction.remaining_tokens == pytest.approx(450, rel=0.3)


@pytest.mark.parametrize("name", PREDICTORS)
def test_below_its_threshold_it_abstains_with_the_base_rate_as_numbers(name: str) -> None:
    sure, unsure = make(name, min_confidence=0.0), make(name, min_confidence=0.99)
    for number in range(60):
        for predictor in (sure, unsure):
            ask(predictor, str(number), 40)
            predictor.update(str(number), 40 + 10 * (number % 30), 1.0)
    one, other = ask(sure, "new", 40), ask(unsure, "new", 40)
    assert (one.abstained, other.abstained) == (False, True)
    assert one.quantiles == other.quantiles
