"""Length predictors: what every registered one must do, and that each learns what is regular."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from sagellm.core.protocols.lifetime import LifetimePredictor, PredictionRequest
from sagellm.core.registry import registry

PREDICTORS = registry("predictor").names()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Networks this small wait for a second thread more than it helps them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(name: str) -> LifetimePredictor:
    predictor: LifetimePredictor = registry("predictor").create(name)
    return predictor


def teach(predictor: LifetimePredictor, count: int) -> None:
    """Prompts of 10 tokens get about 20 tokens of output, prompts of 200 about 100."""
    chance = random.Random(1)
    for index in range(count):
        prompt, output = chance.choice([(10, 20), (200, 100)])
        predictor.predict(PredictionRequest(str(index), [prompt] * 8, prompt, 4096, prompt))
        predictor.update(str(index), prompt + output + chance.randrange(-2, 3), output * 0.05)


@pytest.mark.parametrize("name", PREDICTORS)
def test_knowing_nothing_it_abstains(name: str) -> None:
    prediction = make(name).predict(PredictionRequest("a", [1, 2], 10, 110))
    assert prediction.abstained
    assert prediction.confidence == 0.0
    assert 0 <= prediction.remaining_tokens <= 100


@pytest.mark.parametrize("name", PREDICTORS)
def test_it_learns_what_is_regular(name: str) -> None:
    predictor = make(name)
    teach(predictor, 250)
    for prompt, output in ((10, 20), (200, 100)):
        prediction = predictor.predict(PredictionRequest("new", [prompt] * 8, prompt, 4096, prompt))
        assert not prediction.abstained
        assert prediction.remaining_tokens == pytest.approx(output, rel=0.35)
        assert prediction.quantiles[0.1] <= prediction.quantiles[0.5] <= prediction.quantiles[0.9]
        assert prediction.estimated_time == pytest.approx(output * 0.05, rel=0.6)


@pytest.mark.parametrize("name", PREDICTORS)
def test_it_predicts_no_more_than_there_is_room_for(name: str) -> None:
    predictor = make(name)
    teach(predictor, 100)
    assert predictor.predict(PredictionRequest("new", [200] * 8, 200, 205, 200)).remaining_tokens <= 5


@pytest.mark.parametrize("name", PREDICTORS)
def test_same_history_same_answer_and_unknown_ends_are_ignored(name: str) -> None:
    answers = []
    for _ in range(2):
        predictor = make(name)
        teach(predictor, 60)
        predictor.update("never predicted", 10, 1.0)
        answers.append(predictor.predict(PredictionRequest("new", [3], 10, 500, 10)))
    assert answers[0] == answers[1]
