"""Answers over HTTP with prompt lookup: those without, though a step brings several tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sagellm.engines.build import load
from tests.serving.live import Live, serving

PROMPT = "one two one two one two one two one"
BODY = {"prompt": PROMPT, "max_tokens": 32, "logprobs": 2, "temperature": 0.7, "seed": 4, "n": 2}
CHAT = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 24,
    "logprobs": True,
    "temperature": 0,
}


def answered(live: Live, path: str, body: dict[str, Any]) -> tuple[list[Any], Any]:
    """Choices and usage of an answer that comes whole."""
    response = live.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"], response.json()["usage"]


def streamed(live: Live, path: str, body: dict[str, Any]) -> tuple[dict[int, str], int, Any, int]:
    """Texts by choice, entries with log-probabilities, usage and chunks of a stream."""
    texts: dict[int, str] = {}
    num_entries, num_chunks, usage = 0, 0, None
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    with live.http.stream("POST", path, json=asked) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk["usage"] or usage
            num_chunks += 1
            for choice in chunk["choices"]:
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + text
                found = choice.get("logprobs") or {}
                num_entries += len(found.get("tokens") or found.get("content") or ())
    return texts, num_entries, usage, num_chunks


def without_values(choices: list[Any]) -> list[Any]:
    """The same without numbers, whose last digits depend on the batch."""
    return json.loads(json.dumps(choices), parse_float=lambda _: None)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_answers_streams_and_usage_are_the_same(path: str, body: dict[str, Any]) -> None:
    with serving(load(None, {"kv.num_blocks": 96})) as live:
        choices, usage = answered(live, path, body)
        texts, num_entries, streamed_usage, num_chunks = streamed(live, path, body)
        assert live.metric("sagellm_proposed_tokens_total", position="0") == 0
    proposes = {"speculative.method": "prompt_lookup", "speculative.adaptive": False}
    with serving(load(None, {"kv.num_blocks": 96} | proposes)) as live:
        faster, faster_usage = answered(live, path, body)
        assert without_values(faster) == without_values(choices)
        assert faster_usage["completion_tokens"] == usage["completion_tokens"]
        found = streamed(live, path, body)
        assert found[:2] == (texts, num_entries)
        assert found[2]["completion_tokens"] == streamed_usage["completion_tokens"]
        assert found[3] < num_chunks
        accepted = live.metric("sagellm_accepted_tokens_total", position="0")
        assert 0 < accepted <= live.metric("sagellm_proposed_tokens_total", position="0")


@pytest.fixture(scope="module")
def proposing() -> Iterator[Live]:
    proposes = {"speculative.method": "prompt_lookup", "speculative.adaptive": False}
    with serving(load(None, {"kv.num_blocks": 96} | proposes)) as live:
        yield live


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_a_request_may_go_without_proposed_tokens(path: str, body: dict[str, Any], proposing: Live) -> None:
    def proposed() -> float:
        return sum(
            proposing.metric("sagellm_proposed_tokens_total", position=str(place)) for place in range(4)
        )

    choices, _ = answered(proposing, path, body)
    before = proposed()
    assert before
    plain, _ = answered(proposing, path, body | {"num_speculative_tokens": 0})
    assert proposed() == before
    assert without_values(plain) == without_values(choices)
    behind = proposing.metric("sagellm_proposed_tokens_total", position="1")
    answered(proposing, path, body | {"num_speculative_tokens": 1})
    assert proposed() > before
    assert proposing.metric("sagellm_proposed_tokens_total", position="1") == behind


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("num_speculative_tokens", -1, "num_speculative_tokens must be in [0, 64], got -1"),
        ("num_speculative_tokens", 65, "num_speculative_tokens must be in [0, 64], got 65"),
        ("num_speculative_tokens", False, "num_speculative_tokens: should be a valid integer"),
        ("num_speculative_tokens", {"num_tokens": 4}, "num_speculative_tokens: should be a valid integer"),
        ("speculative", False, "unknown field 'speculative'. Send 'num_speculative_tokens' instead."),
        ("disable_spec_decode", True, "Send 'num_speculative_tokens' instead."),
    ],
)
def test_a_wrong_number_is_a_400_that_says_what_works(
    field: str, value: object, told: str, proposing: Live
) -> None:
    response = proposing.http.post("/v1/chat/completions", json=CHAT | {field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], told in error["message"]) == (field, True), error


def test_a_part_of_the_model_as_its_draft() -> None:
    draft = {"speculative.method": "self_draft", "speculative.method_options": {"layers": 4}}
    with serving(load(None, {"kv.num_blocks": 96})) as live:
        choices, _ = answered(live, "/v1/completions", BODY)
    with serving(load(None, {"kv.num_blocks": 96, "speculative.adaptive": False, **draft})) as live:
        found, _ = answered(live, "/v1/completions", BODY)
        assert live.metric("sagellm_proposed_tokens_total", position="1") > 0
    assert without_values(found) == without_values(choices)
