"""`n` choices with `early_stop` over HTTP: whole, streamed, several prompts, refused; clients that leave."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from sagellm.core.types import Request
from sagellm.engines.llm import LLM
from tests.scripted_engine import ScriptedEngine, toy_tokenizer
from tests.serving.live import Live, serving, wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 60},
}
TOKENIZER = toy_tokenizer()
LONG = " ".join("1" * 20)


def answers_of(request: Request) -> list[int]:
    """Sample 0 takes long, 1 and 2 differ, all others agree."""
    index = int(request.request_id.rpartition("#")[2]) if "#" in request.request_id else 0
    texts = [LONG, "it is 2", "it is 4"]
    text = texts[index] if index < len(texts) else "it is 3"
    return [*TOKENIZER.encode(text), *TOKENIZER.eos_token_ids]


@pytest.fixture
def live() -> Iterator[Live]:
    llm = LLM(ScriptedEngine(answers_of), TOKENIZER, model_name="toy", max_model_len=512)
    with serving(llm) as running:
        yield running


def engine_of(live: Live) -> ScriptedEngine:
    assert isinstance(live.llm.engine, ScriptedEngine)
    return live.llm.engine


def texts_of(choices: list[dict[str, Any]]) -> list[str]:
    return [each["text"] if "text" in each else each["message"]["content"] for each in choices]


@pytest.mark.parametrize("path", BODIES)
def test_the_answer_has_the_choices_that_ran_and_their_vote(live: Live, path: str) -> None:
    asked = BODIES[path] | {"n": 16, "early_stop": {"window": 3}}
    answer = live.http.post(path, json=asked).json()
    assert texts_of(answer["choices"][1:]) == ["it is 2", "it is 4", *["it is 3"] * 3]
    assert LONG.startswith(texts_of(answer["choices"])[0])
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", *["stop"] * 5]
    [found] = answer["early_stop"]
    assert found == {
        "samples_used": 5,
        "samples_saved": 11,
        "majority_index": 3,
        "answer": "3",
        "votes": 3,
        "reason": "3 samples in a row agree",
    }
    assert len(engine_of(live).added) == 6
    assert live.metric("sagellm_early_stop_samples_total", outcome="used") == 5
    assert live.metric("sagellm_early_stop_samples_total", outcome="saved") == 11
    assert live.metric("sagellm_requests_total", finish_reason="stop") == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_each_choice_when_it_starts_and_ends_with_the_vote(live: Live, path: str) -> None:
    asked = BODIES[path] | {"n": 16, "early_stop": {"window": 3}, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in live.http.post(path, json=asked).text.splitlines()
        if line.startswith("data: {")
    ]
    *parts, usage = chunks
    assert usage["choices"] == []
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for part in parts:
        [choice] = part["choices"]
        index = choice["index"]
        delta = choice.get("delta", {})
        if path == CHAT:
            assert ("role" in delta) == (index not in texts)
        texts[index] = texts.get(index, "") + (choice.get("text") or delta.get("content") or "")
        if choice["finish_reason"] is not None:
            assert index not in reasons
            reasons[index] = choice["finish_reason"]
    assert list(texts) == list(range(6))
    assert {index: text for index, text in texts.items() if index} == {
        1: "it is 2", 2: "it is 4", 3: "it is 3", 4: "it is 3", 5: "it is 3",
    }  # fmt: skip
    assert reasons == {0: "abort", **dict.fromkeys(range(1, 6), "stop")}
    assert ["early_stop" in part for part in chunks] == [part is parts[-1] for part in chunks]
    assert parts[-1]["early_stop"][0]["samples_saved"] == 11
    assert usage["usage"]["completion_tokens"] > 0


def test_each_prompt_has_its_vote_and_echo_begins_the_choices_that_ran(live: Live) -> None:
    body = {"prompt": ["a", "b"], "n": 8, "early_stop": {"window": 3}, "echo": True, "max_tokens": 60}
    answer = live.http.post(COMPLETIONS, json=body).json()
    assert [found["majority_index"] for found in answer["early_stop"]] == [3, 11]
    assert [choice["index"] for choice in answer["choices"]] == [*range(6), *range(8, 14)]
    assert texts_of(answer["choices"])[11] == "bit is 3"
    streamed = live.http.post(COMPLETIONS, json=body | {"stream": True}).text
    texts: dict[int, str] = {}
    for line in streamed.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts[3] == "ait is 3"
    assert texts[13] == "bit is 3"
    assert sorted(texts) == [*range(6), *range(8, 14)]


@pytest.mark.parametrize("value", [True, {}, {"window": 4}])
def test_the_default_window_is_four(live: Live, value: object) -> None:
    answer = live.http.post(CHAT, json=BODIES[CHAT] | {"n": 12, "early_stop": value}).json()
    assert answer["early_stop"][0]["samples_saved"] == 5
    assert len(answer["choices"]) == 8


@pytest.mark.parametrize("value", [False, None])
def test_without_it_all_choices_run(live: Live, value: object) -> None:
    answer = live.http.post(CHAT, json=BODIES[CHAT] | {"n": 5, "early_stop": value}).json()
    assert len(answer["choices"]) == 5
    assert "early_stop" not in answer


def test_fewer_choices_than_a_window_all_run(live: Live) -> None:
    answer = live.http.post(CHAT, json=BODIES[CHAT] | {"n": 3, "early_stop": True}).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 3
    assert answer["early_stop"][0] | {"answer": None, "reason": ""} == {
        "samples_used": 3, "samples_saved": 0, "majority_index": 0, "answer": None, "votes": 1, "reason": "",
    }  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "fields",
    [
        {"early_stop": True},
        {"n": 1, "early_stop": {}},
        {"n": 8, "early_stop": 4},
        {"n": 8, "early_stop": "yes"},
        {"n": 8, "early_stop": {"window": 1}},
        {"n": 8, "early_stop": {"window": 129}},
        {"n": 8, "early_stop": {"window": "4"}},
        {"n": 8, "early_stop": {"confidence": 0.5}},
        {"n": 8, "early_stop": {"confidence": 1}},
        {"n": 8, "early_stop": {"windows": 4}},
    ],
)
def test_what_makes_no_sense_is_refused(live: Live, path: str, fields: dict[str, Any]) -> None:
    response = live.http.post(path, json=BODIES[path] | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "early_stop"
    assert not engine_of(live).added


def test_a_client_that_leaves_ends_what_runs_and_what_would_start() -> None:
    engine = ScriptedEngine(lambda request: TOKENIZER.encode(LONG).tolist(), step_s=0.002)
    llm = LLM(engine, TOKENIZER, model_name="toy", max_model_len=512)
    with serving(llm) as live:
        asked = BODIES[CHAT] | {"n": 8, "early_stop": {"window": 2}, "stream": True}
        with live.http.stream("POST", CHAT, json=asked) as response:
            next(response.iter_lines())
        wait_until(lambda: not engine.running)
        assert len(engine.added) == 2
        assert live.gateway.num_open == 0
        assert live.metric("sagellm_requests_total", finish_reason="abort") == 1
