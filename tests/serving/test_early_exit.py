"""`early_exit` and soft budgets over HTTP: whole, streamed, counted, refused; clients that leave."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from sagellm.engines.build import load
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM
from sagellm.engines.native.tokenizer import Tokenizer
from tests.builders import check_books
from tests.scripted_engine import ScriptedEngine, says, scripted_llm
from tests.serving.live import Live, serving, wait_until
from tests.toy_tokenizers import word_level

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = "What is 123 + 456?"
TEMPLATED = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0},
    COMPLETIONS: {"prompt": TEMPLATED, "temperature": 0, "max_tokens": 60},
}
BY_TOKEN = {"every": 4, "at": "token", "probe": "", "max_probe_tokens": 8}
CONFIDENT = BY_TOKEN | {"threshold": 0.9}
NEVER = BY_TOKEN | {"method": "agreement", "window": 9}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(load(None, {"kv.num_blocks": 96})) as running:
        yield running


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", BODIES)
def test_the_answer_says_where_reasoning_was_closed_and_what_that_cost(live: Live, path: str) -> None:
    before = {name: live.metric(f"sagellm_{name}_total") for name in ("probe_tokens", "generation_tokens")}
    asked = BODIES[path] | {"n": 2, "early_exit": CONFIDENT}
    answer = live.http.post(path, json=asked).json()
    found, details = answer["early_exit"], answer["usage"]["completion_tokens_details"]
    assert [each["index"] for each in found] == [0, 1]
    for each, choice in zip(found, answer["choices"], strict=True):
        end = each["reasoning_tokens_at_exit"]
        assert each["reason"].startswith("a probe has confidence")
        cut = live.http.post(path, json=BODIES[path] | {"max_reasoning_tokens": end}).json()
        assert text_of(cut["choices"][0]) == text_of(choice)
        assert text_of(choice).endswith(f"</think>{each['answer']}")
    assert details["probe_tokens"] == sum(each["probe_tokens"] for each in found) > 0
    assert details["reasoning_tokens"] == sum(each["reasoning_tokens_at_exit"] for each in found)
    drawn = live.metric("sagellm_probe_tokens_total") - before["probe_tokens"]
    assert drawn == details["probe_tokens"]
    assert live.metric("sagellm_early_exits_total", outcome="closed") >= 2


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_the_same(live: Live, path: str) -> None:
    asked = BODIES[path] | {"n": 2, "early_exit": CONFIDENT}
    whole = live.http.post(path, json=asked).json()
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = live.http.post(path, json=asked).text.splitlines()
    *parts, usage = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {"))
    texts, exits = {0: "", 1: ""}, []
    for part in parts:
        [choice] = part["choices"]
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        assert ("early_exit" in part) == (choice["finish_reason"] is not None)
        exits += part.get("early_exit", [])
    assert list(texts.values()) == [text_of(choice) for choice in whole["choices"]]
    assert sorted(exits, key=lambda each: int(each["index"])) == whole["early_exit"]
    assert usage["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {
        "prompt_tokens_details": None
    }


@pytest.mark.parametrize("path", BODIES)
def test_probes_that_do_not_agree_change_nothing(live: Live, path: str) -> None:
    free = live.http.post(path, json=BODIES[path]).json()
    answer = live.http.post(path, json=BODIES[path] | {"early_exit": NEVER}).json()
    assert text_of(answer["choices"][0]) == text_of(free["choices"][0])
    [found] = answer["early_exit"]
    assert found["reasoning_tokens_at_exit"] is None
    assert found["probes"] > 2
    assert "early_exit" not in free
    assert "probe_tokens" not in free["usage"]["completion_tokens_details"]
    assert live.metric("sagellm_early_exits_total", outcome="none") >= 1


@pytest.mark.parametrize("value", [True, {}, {"method": "agreement"}])
def test_the_defaults_are_taken(live: Live, value: object) -> None:
    """Probes stand behind lines, which the demo model does not write."""
    answer = live.http.post(CHAT, json=BODIES[CHAT] | {"early_exit": value}).json()
    assert answer["early_exit"] == [
        {
            "index": 0, "probes": 0, "probe_tokens": 0, "reasoning_tokens_at_exit": None, "answer": None,
            "reason": "no probe",
        }
    ]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "value",
    [
        4,
        "yes",
        {"method": "luck"},
        {"threshold": 0},
        {"threshold": 1.5},
        {"window": 3},
        {"method": "agreement", "threshold": 0.9},
        {"method": "agreement", "window": 1},
        {"every": 0},
        {"at": "word"},
        {"probe": "x" * 257},
        {"max_probe_tokens": 65},
        {"treshold": 0.9},
    ],
)
def test_what_makes_no_sense_is_refused(live: Live, path: str, value: object) -> None:
    response = live.http.post(path, json=BODIES[path] | {"early_exit": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "early_exit"


def test_the_error_names_what_would_have_worked(live: Live) -> None:
    asked = BODIES[CHAT] | {"early_exit": {"method": "agreement", "threshold": 0.9}}
    message = live.http.post(CHAT, json=asked).json()["error"]["message"]
    assert "threshold is not for method 'agreement'" in message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"threshold": 2}, "early_exit: threshold should be less than or equal to 1"),
        ({"every": 0, "max_probe_tokens": 65}, "early_exit: every should be greater than or equal to 1"),
        ({"treshold": 0.9}, "early_exit: unknown field 'treshold'; GET /openapi.json lists the known ones"),
        (0.95, "early_exit: should be a valid boolean or should be an object"),
    ],
)
def test_the_error_names_the_field_within_the_object(live: Live, value: object, message: str) -> None:
    asked = BODIES[CHAT] | {"early_exit": value}
    assert live.http.post(CHAT, json=asked).json()["error"]["message"] == message


@pytest.mark.parametrize("stream", [False, True])
def test_engines_that_cannot_probe_say_so(stream: bool) -> None:
    with serving(scripted_llm("<think>1</think>2")) as live:
        response = live.http.post(CHAT, json=BODIES[CHAT] | {"early_exit": True, "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "early_exit"
        assert "a single server" in response.json()["error"]["message"]
        assert live.http.post(CHAT, json=BODIES[CHAT] | {"early_exit": False}).status_code == 200
    tokenizer = Tokenizer(word_level(), special_tokens={"eos_token": "</s>"})
    llm = LLM(ScriptedEngine(says(tokenizer, "hello")), tokenizer, model_name="toy", max_model_len=64)
    with serving(llm) as live:
        response = live.http.post(COMPLETIONS, json={"prompt": "hello", "early_exit": True, "stream": stream})
        assert response.status_code == 400
        assert "no tokens like <think>" in response.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_probes() -> None:
    llm = load(None, {"kv.num_blocks": 96})
    engine = llm.engine
    assert isinstance(engine, Engine)
    with serving(llm) as live:
        rule = BY_TOKEN | {"every": 1, "threshold": 1.0, "max_probe_tokens": 64}
        asked = BODIES[CHAT] | {"n": 4, "early_exit": rule, "stream": True, "temperature": 1.3}
        with live.http.stream("POST", CHAT, json=asked | {"min_tokens": 900}) as response:
            next(response.iter_lines())
        wait_until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        assert live.gateway.num_open == 0
        assert engine.stats().blocks_active == 0
    check_books(engine)


@pytest.mark.parametrize("path", BODIES)
def test_a_soft_budget_ends_reasoning_sooner_the_steeper_it_is(live: Live, path: str) -> None:
    counts = []
    for fields in ({}, {"soft_reasoning_slope": 0.5}, {"soft_reasoning_slope": 100}):
        soft = {"soft_reasoning_tokens": 4} | fields if fields else {}
        answer = live.http.post(path, json=BODIES[path] | soft).json()
        counts.append(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 4
    assert counts[0] > 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("soft_reasoning_tokens", -1),
        ("soft_reasoning_tokens", 1.5),
        ("soft_reasoning_slope", -1),
        ("soft_reasoning_slope", 101),
        ("soft_reasoning_slope", "steep"),
        ("soft_reasoning_slope", 0.5),
    ],
)
def test_what_is_no_soft_budget_is_refused(live: Live, name: str, value: object) -> None:
    response = live.http.post(CHAT, json=BODIES[CHAT] | {name: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
