"""The reasons of OpenAI and Anthropic for a prompt that could not be reused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses.response import PromptCacheDiagnostics
from pydantic import TypeAdapter

from sagellm.core.types import Tokens
from sagellm.serving.cache_diagnostics import (
    OPENAI_SETTINGS,
    ComparedRequest,
    ComparedRequests,
    anthropic_diagnostics,
    digest,
    openai_diagnostics,
    with_eviction,
)
from sagellm.serving.cache_facts import CacheEviction

OPENAI: TypeAdapter[Any] = TypeAdapter(PromptCacheDiagnostics)
FIRST = ComparedRequest(Tokens(range(10)), "m", digest("be short"), digest([{"name": "add"}]))


@pytest.mark.parametrize("name", OPENAI_SETTINGS)
def test_each_setting_has_its_reason(name: str) -> None:
    later = replace(FIRST, settings={name: digest("other")})
    answer = openai_diagnostics(FIRST, later)
    assert OPENAI.validate_python(answer, strict=True).reason == f"{name}_changed"
    assert anthropic_diagnostics(FIRST, later) == {"type": "unavailable"}


@pytest.mark.parametrize(
    ("later", "openai", "anthropic"),
    [
        (replace(FIRST, model="n"), "model_changed", "model_changed"),
        (replace(FIRST, tools=digest([])), "tools_changed", "tools_changed"),
        (replace(FIRST, system=digest("?"), tokens=Tokens([0, 1, 9])), "input_changed", "system_changed"),
        (replace(FIRST, tokens=Tokens([0, 1, 9])), "input_changed", "messages_changed"),
        (replace(FIRST, tokens=Tokens(range(9))), "input_changed", "messages_changed"),
    ],
)
def test_what_changed(later: ComparedRequest, openai: str, anthropic: str) -> None:
    answer = openai_diagnostics(FIRST, later)
    parsed = OPENAI.validate_python(answer, strict=True)
    assert parsed.reason == openai
    assert parsed.cache_missed_tokens + parsed.comparison_reusable_tokens == 10
    reason = anthropic_diagnostics(FIRST, later)
    assert reason == {"type": anthropic, "cache_missed_input_tokens": parsed.cache_missed_tokens}


def test_a_prompt_that_goes_on_and_one_that_is_not_known() -> None:
    longer = replace(FIRST, tokens=Tokens(range(12)))
    assert openai_diagnostics(FIRST, longer) == {"type": "cache_hit"}
    assert anthropic_diagnostics(FIRST, longer) is None
    assert openai_diagnostics(None, longer) == {"type": "comparison_response_not_found"}
    assert anthropic_diagnostics(None, longer) == {"type": "previous_message_not_found"}
    OPENAI.validate_python(openai_diagnostics(None, longer), strict=True)
    assert digest({"a": 1, "b": "\ud800"}) == digest({"b": "\ud800", "a": 1}) != digest({"a": 1})


def test_the_cache_itself_is_asked_too() -> None:
    gone = CacheEviction(evicted_tokens=16, evicted_at=1.0, cause="capacity", gib_needed=0.5)
    longer, other = replace(FIRST, tokens=Tokens(range(12))), replace(FIRST, model="n")
    for later, kind in ((longer, "unavailable"), (other, "cache_miss")):
        parsed = OPENAI.validate_python(with_eviction(openai_diagnostics(FIRST, later), gone), strict=True)
        assert parsed.type == kind
        assert parsed.model_extra["sagellm"] == gone.model_dump()
    assert with_eviction(anthropic_diagnostics(FIRST, longer), gone) == {
        "type": "unavailable",
        "sagellm": gone.model_dump(),
    }
    held = CacheEviction()
    hit = with_eviction(openai_diagnostics(FIRST, longer), held)
    assert hit == {"type": "cache_hit", "sagellm": held.model_dump()}
    assert with_eviction(anthropic_diagnostics(FIRST, longer), held) is None
    assert with_eviction({"type": "cache_hit"}, None) == {"type": "cache_hit"}


def test_memory_is_bounded_and_tenants_are_apart() -> None:
    known, rng = ComparedRequests(max_requests=8, max_tokens=50), random.Random(0)
    for _ in range(300):
        request = replace(FIRST, tokens=Tokens(range(rng.randrange(60))))
        known.remember(rng.choice("ab"), str(rng.randrange(12)), request)
        known.check()
    known.remember("a", "mine", FIRST)
    assert known.get("a", "mine") is FIRST
    assert known.get("b", "mine") is None
