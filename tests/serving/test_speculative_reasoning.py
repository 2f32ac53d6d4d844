"""`speculative_reasoning` over HTTP: whole, streamed, counted, refused; clients that leave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sagellm.engines.build import load
from sagellm.engines.engine import Engine
from sagellm.engines.native import DEMO_MODEL
from tests.builders import check_books
from tests.scripted_engine import scripted_llm
from tests.serving.live import Live, serving, wait_until
from tests.serving.test_early_exit import BODIES, CHAT, COMPLETIONS, text_of

SETTINGS = {"kv.num_blocks": 96, "speculative.reasoning_model": str(DEMO_MODEL)}
RULE = {"threshold": 0, "max_step_tokens": 8, "judge": ""}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(load(None, SETTINGS)) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_the_answer_says_what_the_small_model_wrote_and_what_judging_cost(live: Live, path: str) -> None:
    live.http.post(path, json=BODIES[path] | {"speculative_reasoning": RULE})
    before = live.metric("sagellm_reasoning_steps_total", outcome="accepted")
    free = live.http.post(path, json=BODIES[path]).json()
    answer = live.http.post(path, json=BODIES[path] | {"n": 2, "speculative_reasoning": RULE}).json()
    found = answer["speculative_reasoning"]
    assert "speculative_reasoning" not in free
    assert [each["index"] for each in found] == [0, 1]
    for each, choice in zip(found, answer["choices"], strict=True):
        assert text_of(choice) == text_of(free["choices"][0])
        assert each["accepted_steps"] == each["steps"] > 2
        assert each["draft_tokens"] >= each["accepted_tokens"] > 10
        assert each["judge_tokens"] > each["accepted_tokens"]
        assert each["reason"].startswith("a step has score")
    accepted = live.metric("sagellm_reasoning_steps_total", outcome="accepted") - before
    assert accepted == sum(each["accepted_steps"] for each in found)
    unit = {"acceleration": "speculative_reasoning", "unit": "judge tokens"}
    assert live.metric("sagellm_acceleration_spent", **unit) >= sum(each["judge_tokens"] for each in found)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_says_the_same(live: Live, path: str) -> None:
    asked = BODIES[path] | {"speculative_reasoning": RULE}
    whole = live.http.post(path, json=asked).json()
    lines = live.http.post(path, json=asked | {"stream": True}).text.splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text, outcomes = "", []
    for part in parts:
        [choice] = part["choices"]
        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        outcomes += part.get("speculative_reasoning", [])
        assert ("speculative_reasoning" in part) == (choice["finish_reason"] is not None)
    assert text == text_of(whole["choices"][0])
    [streamed], [said] = outcomes, whole["speculative_reasoning"]
    assert streamed | {"judge_tokens": 0} == said | {"judge_tokens": 0}  # more of the prompt may be cached


@pytest.mark.parametrize("value", [True, {}])
def test_the_defaults_are_taken(live: Live, value: object) -> None:
    answer = live.http.post(CHAT, json=BODIES[CHAT] | {"speculative_reasoning": value}).json()
    [found] = answer["speculative_reasoning"]
    assert found["steps"] >= 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "value",
    [
        7,
        "yes",
        {"threshold": 10},
        {"threshold": -1},
        {"max_step_tokens": 1},
        {"max_step_tokens": 4096},
        {"max_rejected": 0},
        {"judge": "x" * 1025},
        {"judges": "x"},
    ],
)
def test_what_makes_no_sense_is_refused(live: Live, path: str, value: object) -> None:
    response = live.http.post(path, json=BODIES[path] | {"speculative_reasoning": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "speculative_reasoning"


@pytest.mark.parametrize(
    "beside", [{"early_exit": True}, {"logprobs": True}, {"kv_hints": {"version": 1, "actions": []}}]
)
def test_what_does_not_go_together_is_refused(live: Live, beside: dict[str, Any]) -> None:
    response = live.http.post(CHAT, json=BODIES[CHAT] | {"speculative_reasoning": True} | beside)
    assert response.status_code == 400
    assert "leave out either" in response.json()["error"]["message"]


def test_servers_without_a_small_model_say_so() -> None:
    with serving(scripted_llm("<think>1</think>2")) as live:
        response = live.http.post(CHAT, json=BODIES[CHAT] | {"speculative_reasoning": True})
        assert response.status_code == 400
        assert "set speculative.reasoning_model" in response.json()["error"]["message"]
        assert live.http.post(CHAT, json=BODIES[CHAT] | {"speculative_reasoning": False}).status_code == 200


def test_a_client_that_leaves_ends_its_draft() -> None:
    llm = load(None, SETTINGS)
    engine = llm.engine
    assert isinstance(engine, Engine)
    with serving(llm) as live:
        asked = BODIES[COMPLETIONS] | {
            "speculative_reasoning": RULE,
            "n": 4,
            "stream": True,
            "temperature": 1.3,
        }
        with live.http.stream("POST", COMPLETIONS, json=asked | {"max_tokens": 1200}) as response:
            next(response.iter_lines())
        wait_until(lambda: not llm.has_work())
        assert live.gateway.num_open == 0
        assert engine.stats().blocks_active == 0
    check_books(engine)
