"""Budgets of reasoning in the engine: what they force does not depend on how a request is computed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import RequestError, UnsupportedParameterError
from sagellm.core.types import CapabilityDescriptor, FinishReason, Request, RequestOutput, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from tests.builders import PreemptAtRandom, RandomProposer, check_books, fake_engine, request
from tests.effort import examples

THINK, END, EOS = 95, 96, 94
BUDGETED: dict[str, Any] = {"reasoning_token_ids": (THINK, END), "eos_token_ids": frozenset({EOS})}


def plain_answer(prompt: Sequence[int], budget: int, num_tokens: int) -> list[int]:
    """The slow twin: the rule over the whole text, at each token."""
    backend, tokens = TokenMemoryBackend(), Tokens(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        token_id = backend.answer(tokens)
        inside, count = False, 0
        for place, earlier in enumerate(tokens):
            if earlier == THINK and not inside:
                inside = True
            elif earlier == END or (earlier == EOS and place < len(prompt)):
                inside = False
            elif inside and place >= len(prompt):
                count += 1
        tokens.append(END if inside and count >= budget else token_id)
        if tokens[-1] == EOS:
            break
    return tokens.tolist()[len(prompt) :]


def answer_of(engine: Engine, asked: Request) -> list[RequestOutput]:
    engine.add(asked)
    outputs: list[RequestOutput] = []
    while engine.has_work():
        outputs += engine.step()
        check_books(engine)
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


@settings(max_examples=examples(100))
@given(
    length=st.integers(1, 20),
    budget=st.integers(0, 6),
    overlap=st.booleans(),
    proposes=st.booleans(),
    preempt=st.sampled_from([0.0, 0.3]),
    num_given=st.integers(0, 8),
    again=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_same_tokens_however_a_request_is_computed(
    length: int,
    budget: int,
    overlap: bool,
    proposes: bool,
    preempt: float,
    num_given: int,
    again: bool,
    seed: int,
) -> None:
    draw = random.Random(seed)
    prompt = [draw.choice([THINK, THINK, END, EOS, *range(20)]) for _ in range(length)]
    expected = plain_answer(prompt, budget, 12)
    asked = request("a", prompt, 12, max_reasoning_tokens=budget, logprobs=0, **BUDGETED)
    backend = TokenMemoryBackend(max_model_len=64)
    engine = fake_engine(
        backend,
        passes=[PreemptAtRandom(seed, preempt, 4)] if preempt else None,
        overlap=overlap,
        speculation=Speculation(RandomProposer(backend, seed, trees=bool(seed % 2)), 4) if proposes else None,
    )
    if again:  # the prompt and some of the answer are cached
        answer_of(engine, replace(asked, request_id="before"))
    given_tokens = tuple(expected[: min(num_given, len(expected) - 1)])
    outputs = answer_of(engine, replace(asked, generated=given_tokens))
    engine.close()
    assert [*given_tokens, *tokens_of(outputs)] == expected
    logged = [entry.token_id for output in outputs for entry in output.logprobs]
    assert logged == tokens_of(outputs)


def test_requests_of_one_batch_have_their_own_budgets() -> None:
    engine = fake_engine()
    prompt = [1, 2, THINK]
    for budget in (0, 1, 5):
        engine.add(request(f"b{budget}", prompt, 9, max_reasoning_tokens=budget, **BUDGETED))
    engine.add(request("free", prompt, 9, **BUDGETED))
    found: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    for budget in (0, 1, 5):
        assert found[f"b{budget}"] == plain_answer(prompt, budget, 9)
        assert found[f"b{budget}"].index(END) == budget
    assert found["free"] == plain_answer(prompt, 99, 9)


def test_a_forced_token_ends_a_request_as_a_drawn_one_does() -> None:
    [*_, last] = answer_of(
        fake_engine(),
        request("a", [1, THINK], 9, max_reasoning_tokens=2, stop_token_ids=(END,), min_tokens=1, **BUDGETED),
    )
    assert (last.new_token_ids, last.num_output_tokens, last.finish_reason) == ((END,), 3, FinishReason.STOP)
    [*_, last] = answer_of(fake_engine(), request("a", [1, THINK], 3, max_reasoning_tokens=2, **BUDGETED))
    assert (last.new_token_ids, last.finish_reason) == ((END,), FinishReason.LENGTH)


class _Endless(TokenMemoryBackend):
    """A backend that does not know budgets."""

    def capability(self) -> CapabilityDescriptor:
        return replace(super().capability(), features=frozenset())


def test_what_cannot_be_kept_is_refused() -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match="max_reasoning_tokens needs reasoning_token_ids") as caught:
        engine.add(request("a", [1], max_reasoning_tokens=3))
    assert caught.value.param == "max_reasoning_tokens"
    with pytest.raises(RequestError, match="soft_reasoning_tokens needs reasoning_token_ids"):
        engine.add(request("a", [1], soft_reasoning_tokens=3))
    with pytest.raises(RequestError, match="token id 97 is not in the vocabulary of 97 tokens"):
        engine.add(request("a", [1], max_reasoning_tokens=3, reasoning_token_ids=(1, 97)))
    with pytest.raises(UnsupportedParameterError, match=r"max_reasoning_tokens: .* leave it out"):
        fake_engine(_Endless()).add(request("a", [1], max_reasoning_tokens=3, **BUDGETED))
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens must be at least 0, got -1"),
        ({"max_reasoning_tokens": 1.5}, "max_reasoning_tokens must be an integer or None"),
        ({"soft_reasoning_tokens": -1}, "soft_reasoning_tokens must be at least 0, got -1"),
        ({"soft_reasoning_tokens": 1.5}, "soft_reasoning_tokens must be an integer or None"),
        ({"soft_reasoning_slope": -0.1}, "soft_reasoning_slope must be in"),
        ({"soft_reasoning_slope": "steep"}, "soft_reasoning_slope must be a number or None"),
        ({"soft_reasoning_slope": 0.1}, "soft_reasoning_slope has no effect without soft_reasoning_tokens"),
        ({"reasoning_token_ids": (1,)}, "must be two different ids"),
        ({"reasoning_token_ids": (1, 1)}, "must be two different ids"),
        ({"reasoning_token_ids": (1, 1, 2)}, "must be two different ids"),
        ({"reasoning_token_ids": ("a", 2)}, "reasoning_token_ids must be several token ids"),
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request("a", [1], **wrong)
