"""Budgets of reasoning over HTTP: what is cut, counted, refused, and set by `reasoning_effort`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sagellm.core.config import ServerConfig
from sagellm.engines.build import load
from sagellm.engines.llm import LLM
from sagellm.engines.native.tokenizer import Tokenizer
from sagellm.serving.schema import ChatRequest, checked
from tests.scripted_engine import ScriptedEngine, says, scripted_llm
from tests.serving.live import Live, serving
from tests.toy_tokenizers import word_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "hi"}}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(scripted_llm("<think>12345</think>6")) as running:
        yield running


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def reasoning_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])


@pytest.mark.parametrize("path", BODIES)
def test_reasoning_is_counted_and_cut(live: Live, path: str) -> None:
    before = live.metric("sagellm_reasoning_tokens_total")
    whole = live.http.post(path, json=BODIES[path] | {"n": 2, "max_tokens": 20}).json()
    assert [text_of(choice) for choice in whole["choices"]] == ["<think>12345</think>6"] * 2
    assert reasoning_of(whole) == 10
    cut = live.http.post(path, json=BODIES[path] | {"max_reasoning_tokens": 3, "max_tokens": 20}).json()
    assert text_of(cut["choices"][0]) == "<think>123</think>5</think>6"
    assert reasoning_of(cut) == 3
    assert live.metric("sagellm_reasoning_tokens_total") == before + 13


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_the_same(live: Live, path: str) -> None:
    asked: dict[str, Any] = {"max_reasoning_tokens": 1, "max_tokens": 20, "stream": True}
    asked["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    counts, text = [], ""
    for line in live.http.post(path, json=BODIES[path] | asked).text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            counts.append(reasoning_of(chunk))
            for choice in chunk["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    assert text == "<think>1</think>345</think>6"
    assert counts == sorted(counts)
    assert counts[-1] == 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [-1, 1.5, True, "3", [1]])
def test_what_is_no_budget_is_refused(live: Live, path: str, value: object) -> None:
    response = live.http.post(path, json=BODIES[path] | {"max_reasoning_tokens": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_reasoning_tokens"


def test_a_model_without_markers_says_so() -> None:
    tokenizer = Tokenizer(word_level(), special_tokens={"eos_token": "</s>"})
    llm = LLM(ScriptedEngine(says(tokenizer, "hello")), tokenizer, model_name="toy", max_model_len=64)
    with serving(llm, reasoning_budgets={"low": 1}) as live:
        response = live.http.post(COMPLETIONS, json={"prompt": "hello", "max_reasoning_tokens": 3})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_reasoning_tokens"
        assert "no tokens like <think>" in response.json()["error"]["message"]
        answer = live.http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 4}).json()
        assert "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, 2),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "high"}, None),
        ({"reasoning_effort": "low", "max_reasoning_tokens": 9}, 9),
    ],
)
def test_an_effort_may_have_a_budget(fields: dict[str, Any], budget: int | None) -> None:
    settings = ServerConfig(reasoning_budgets={"low": 2})
    options = checked(ChatRequest, BODIES[CHAT] | fields).options(scripted_llm(), settings, ())
    assert options.params.max_reasoning_tokens == budget
    assert options.params.soft_reasoning_tokens is None


@pytest.mark.parametrize(
    ("fields", "budgets"),
    [
        ({}, (None, None)),
        ({"reasoning_effort": "low"}, (8, 2)),
        ({"reasoning_effort": "high"}, (None, 5)),
        ({"reasoning_effort": "low", "soft_reasoning_tokens": 9}, (8, 9)),
        ({"reasoning_effort": "low", "max_reasoning_tokens": 3}, (3, 2)),
        ({"reasoning_effort": "high", "soft_reasoning_slope": 0.5}, (None, 5)),
    ],
)
def test_an_effort_may_have_a_soft_budget(
    fields: dict[str, Any], budgets: tuple[int | None, int | None]
) -> None:
    settings = ServerConfig(reasoning_budgets={"low": 8}, soft_reasoning_budgets={"low": 2, "high": 5})
    params = checked(ChatRequest, BODIES[CHAT] | fields).options(scripted_llm(), settings, ()).params
    assert (params.max_reasoning_tokens, params.soft_reasoning_tokens) == budgets
    assert params.soft_reasoning_slope == fields.get("soft_reasoning_slope")


def test_an_effort_is_one_of_openais() -> None:
    with pytest.raises(ValueError, match="reasoning_budgets"):
        ServerConfig.model_validate({"reasoning_budgets": {"huge": 2}})
    with pytest.raises(ValueError, match="reasoning_budgets"):
        ServerConfig.model_validate({"reasoning_budgets": {"low": -1}})


@pytest.mark.parametrize(
    "settings", [{}, {"speculative.method": "prompt_lookup", "speculative.adaptive": False}]
)
def test_the_demo_model_answers_within_its_budget(settings: dict[str, Any]) -> None:
    """Whole, in a batch, from the cache, with and without proposed tokens: one answer for each budget."""
    asked = {
        "messages": [{"role": "user", "content": "What is 123 + 456?"}],
        "temperature": 0,
        "max_tokens": 60,
    }
    with serving(load(None, {"kv.num_blocks": 96} | settings)) as live:
        free = live.http.post(CHAT, json=asked).json()
        [choice] = free["choices"]
        assert text_of(choice).endswith("</think>579")
        for budget in (0, 4):
            for _ in range(2):
                cut = live.http.post(CHAT, json=asked | {"max_reasoning_tokens": budget, "n": 2}).json()
                texts = {text_of(each) for each in cut["choices"]}
                assert len(texts) == 1
                assert reasoning_of(cut) == 2 * budget
                reasoning, end, _ = texts.pop().removeprefix("<think>").partition("</think>")
                assert end
                assert text_of(choice).removeprefix("<think>").startswith(reasoning)
        assert reasoning_of(free) > 4


def test_old_kv_of_reasoning_is_dropped_for_requests_that_ask() -> None:
    asked = {
        "messages": [{"role": "user", "content": "What is 12345 + 45678?"}],
        "temperature": 0,
        "max_tokens": 60,
    }
    limit = {"max_reasoning_kv_tokens": 16}
    with serving(
        load(None, {"kv.num_blocks": 96, "kv.block_size": 4, "kv.compress_reasoning": True})
    ) as live:
        whole = live.http.post(CHAT, json=asked).json()
        assert reasoning_of(whole) > 24
        assert live.metric("sagellm_kv_dropped_tokens_total") == 0
        assert live.http.post(CHAT, json=asked | limit).status_code == 200
        dropped = live.metric("sagellm_kv_dropped_tokens_total")
        assert dropped > 0
        assert live.http.post(CHAT, json=asked).json()["choices"] == whole["choices"]
        saved = live.metric("sagellm_acceleration_saved", acceleration="reasoning_kv", unit="kv_tokens")
        assert saved == dropped
        for wrong in ({"max_reasoning_kv_tokens": 15}, limit | {"early_exit": True}):
            assert live.http.post(CHAT, json=asked | wrong).status_code == 400
    with serving(load(None, {"kv.num_blocks": 96})) as live:
        refused = live.http.post(CHAT, json=asked | limit | {"max_reasoning_kv_tokens": 64})
        assert refused.status_code == 400
        assert "kv.compress_reasoning" in refused.json()["error"]["message"]
