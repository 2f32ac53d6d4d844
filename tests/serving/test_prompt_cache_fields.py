"""OpenAI's fields of the prompt cache, sent by its client: what the engine gets, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError

from sagellm.core.types import Request
from tests.scripted_engine import ScriptedEngine, scripted_llm
from tests.serving.live import Live, serving

MARK = {"mode": "explicit"}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(scripted_llm("an answer")) as running:
        yield running


def messages(*marks: Any) -> list[Any]:
    """A message with a part per mark, which is its breakpoint."""
    parts = [
        {"type": "text", "text": f"part {i}"} | ({} if mark is None else {"prompt_cache_breakpoint": mark})
        for i, mark in enumerate(marks)
    ]
    return [{"role": "user", "content": parts}]


def added(live: Live, *marks: Any, **fields: Any) -> Request:
    """What the engine gets of a chat."""
    with live.openai() as client:
        client.chat.completions.create(model=live.llm.model_name, messages=messages(*marks), **fields)
    assert isinstance(live.llm.engine, ScriptedEngine)
    return live.llm.engine.added[-1]


@pytest.mark.parametrize(
    ("fields", "durations"),
    [
        ({}, []),
        ({"prompt_cache_options": {}}, [1800.0]),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, [1800.0]),
        ({"prompt_cache_options": {"mode": "explicit"}}, []),
        ({"prompt_cache_retention": "24h"}, [86_400.0]),
        ({"prompt_cache_retention": "in_memory"}, []),
    ],
)
def test_lifetimes_retain_the_prompt(live: Live, fields: dict[str, Any], durations: list[float]) -> None:
    retained = added(live, None, **fields).retention
    assert [each.duration_s for each in retained] == durations
    assert all((each.start, each.stop, each.priority) == (0, None, 100) for each in retained)


def test_the_key_names_the_session(live: Live) -> None:
    assert added(live, None, prompt_cache_key="mine").session_id == "mine"
    assert added(live, None, prompt_cache_key="").session_id is None
    both: dict[str, Any] = {"prompt_cache_key": "mine", "extra_body": {"session_id": "chat"}}
    assert added(live, None, **both).session_id == "chat"


def test_breakpoints_retain_what_is_before_them(live: Live) -> None:
    request = added(live, MARK, None, {"mode": "explicit", "ttl": "12h"}, None)
    first, second = request.retention
    assert (first.duration_s, second.duration_s) == (1800.0, 43_200.0)
    assert first.stop is not None
    assert second.stop is not None
    assert 0 < first.stop < second.stop < len(request.tokens)


def test_the_latest_breakpoints_count(live: Live) -> None:
    assert len(added(live, *[MARK] * 6).retention) == 3
    explicit = added(live, *[MARK] * 6, prompt_cache_options={"mode": "explicit"})
    assert len(explicit.retention) == 4


@pytest.mark.parametrize(
    ("mark", "fields", "says"),
    [
        ({"mode": "implicit"}, {}, "messages[0].content[0].prompt_cache_breakpoint"),
        ({"mode": "explicit", "ttl": "1y"}, {}, '"12h"'),
        ({"mode": "explicit", "ttl": []}, {}, '"12h"'),
        ("explicit", {}, "must be"),
        (None, {"prompt_cache_options": {"ttl": "1h"}}, "'30m'"),
        (None, {"prompt_cache_options": {"mode": "none"}}, "'explicit'"),
        (None, {"prompt_cache_options": {"comparison_response_id": "x"}}, "comparison_response_id"),
        (None, {"prompt_cache_retention": "1h"}, "'24h'"),
        (None, {"prompt_cache_key": "k" * 257}, "256"),
    ],
)
def test_other_values_are_refused(live: Live, mark: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        added(live, mark, **fields)
    assert says in str(caught.value)
