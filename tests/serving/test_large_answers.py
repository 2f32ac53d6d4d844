"""Answers with many parts: what they cost, and what is refused since it would take too much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import RequestError
from sagellm.core.protocols.prefix_cache import MissCounts
from sagellm.core.types import SamplingParams, Tokens
from sagellm.engines.llm import TextDelta, Usage
from sagellm.serving.answers import AnswerHead, CompletionReply
from sagellm.serving.gateway import Generation
from sagellm.serving.generate import MAX_LOGPROB_ENTRIES, _written, check_logprobs
from sagellm.serving.schema import StreamOptions
from sagellm.serving.sse import sse_events

CONTEXT = 2048


def reply_to(num_prompts: int) -> CompletionReply:
    return CompletionReply(
        AnswerHead("id", "model", 0, num_prompts, 1), logprobs=None, echoes=[""] * num_prompts
    )


def usages_of_a_stream(items: list[tuple[int, TextDelta]], num_prompts: int) -> list[dict[str, Any]]:
    """The usage of each chunk of a stream with one delta a batch."""

    async def generation() -> AsyncIterator[list[tuple[int, TextDelta]]]:
        for item in items:
            yield [item]

    async def chunks() -> list[bytes]:
        options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        stream = sse_events(cast(Generation, generation()), reply_to(num_prompts), options)
        return [chunk async for chunk in stream]

    texts = [chunk.removeprefix(b"data: ") for chunk in asyncio.run(chunks())[:-1]]
    return [json.loads(text)["usage"] for text in texts]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=20), st.booleans())
def test_usage_in_a_stream_is_that_of_all_prompts_so_far(parts: list[tuple[int, int]], misses: bool) -> None:
    latest, items, expected = [Usage()] * 4, [], []
    usage_json = reply_to(4).usage
    for position, count in parts:
        before = latest[position].completion_tokens
        latest[position] = Usage(5, before + count, 2, MissCounts(cold=1) if misses else None)
        items.append((position, TextDelta("r", 0, token_ids=(), text="x", usage=latest[position])))
        expected.append(usage_json(sum(latest, Usage())))
    assert usages_of_a_stream(items, 4) == [*expected, usage_json(sum(latest, Usage()))]


def test_usage_in_a_stream_costs_as_much_per_chunk_for_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = SimpleNamespace(num=0)
    add = Usage.__add__

    def counted(mine: Usage, other: Usage) -> Usage:
        calls.num += 1
        return add(mine, other)

    monkeypatch.setattr(Usage, "__add__", counted)
    usages_of_a_stream(
        [(i, TextDelta("r", 0, token_ids=(), text="x", usage=Usage(1, 1))) for i in range(500)], 500
    )
    assert calls.num <= 1000


def test_an_answer_written_by_choice_is_the_answer() -> None:
    for num_choices in (0, 1, 3):
        choices = [{"index": i, "text": 'é\u2028"}', "logprobs": None} for i in range(num_choices)]
        answer = {"id": "x", "choices": choices, "usage": {"total_tokens": 1}}
        assert json.loads(bytes(_written(answer).body)) == answer


@pytest.mark.parametrize("stream", [False, True])
def test_more_log_probabilities_than_fit_are_refused(*, stream: bool) -> None:
    prompts = [Tokens(range(1400))] * 700
    with pytest.raises(RequestError, match="log-probabilities"):
        check_logprobs(
            prompts, SamplingParams(max_tokens=1, prompt_logprobs=20, logprobs=20), CONTEXT, stream=stream
        )
    check_logprobs(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), CONTEXT, stream=stream)


def test_one_choice_may_always_have_its_log_probabilities() -> None:
    context = MAX_LOGPROB_ENTRIES
    most = SamplingParams(max_tokens=None, logprobs=20, prompt_logprobs=20)
    check_logprobs([Tokens(range(100))], most, context, stream=False)
    two = SamplingParams(max_tokens=None, logprobs=20, n=2)
    with pytest.raises(RequestError, match="smaller n"):
        check_logprobs([Tokens(range(100))], two, context, stream=False)
    check_logprobs([Tokens(range(100))], two, context, stream=True)
