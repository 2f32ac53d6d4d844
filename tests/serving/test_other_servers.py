"""Fields that vLLM, SGLang, llama.cpp's server, Ollama and others take: served, ignored with a header, or
refused with the name to send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sagellm.serving.other_names import ENDPOINT_OF, OF_OTHER_SERVERS, RENAMED
from sagellm.serving.schema import (
    IGNORED_HEADER,
    MESSAGE_NEUTRAL,
    NEUTRAL,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    TemplateFields,
)
from tests.scripted_engine import scripted_llm
from tests.serving.live import Live, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "hi"}}
SHOWS_VARIABLES = (
    "{{ enable_thinking is defined and enable_thinking }}|{{ thinking is defined and thinking }}|"
    "{{ reasoning_effort if reasoning_effort is defined else '-' }}|"
    "{% for d in documents or [] %}{{ d.text }}{% endfor %}|{{ style if style is defined else '-' }}"
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(scripted_llm("an answer", chat_template=SHOWS_VARIABLES)) as running:
        yield running


def rendered(live: Live, **fields: Any) -> str:
    """What the template makes of the variables, which a chat and /tokenize must see alike."""
    tokens = live.http.post("/tokenize", json={"messages": MESSAGES} | fields).json()["tokens"]
    answer = live.http.post(CHAT, json={"messages": MESSAGES} | fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
    return str(live.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "False|False|-||-"),
        ({"enable_thinking": True}, "True|False|-||-"),
        ({"chat_template_kwargs": {"enable_thinking": True, "style": "dry"}}, "True|False|-||dry"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": True}}, "True|False|-||-"),
        ({"thinking": True}, "False|True|-||-"),
        ({"reasoning_effort": "none"}, "False|False|none||-"),
        ({"reasoning_effort": "high"}, "True|True|high||-"),
        ({"reasoning_effort": "high", "enable_thinking": False}, "False|True|high||-"),
        ({"documents": [{"title": "t", "text": "some text"}]}, "False|False|-|some text|-"),
        ({"enable_thinking": None, "reasoning_effort": None, "documents": None}, "False|False|-||-"),
    ],
)
def test_variables_of_the_template_may_stand_beside_the_messages(
    live: Live, fields: dict[str, Any], prompt: str
) -> None:
    assert rendered(live, **fields) == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"documents": ["text"]}, "documents[0]"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_variables_that_contradict_or_are_none_are_refused(
    live: Live, fields: dict[str, Any], param: str
) -> None:
    response = live.http.post(CHAT, json=BODIES[CHAT] | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_fields_that_tune_other_servers_are_ignored_and_named(live: Live, path: str, stream: bool) -> None:
    asked = {"num_ctx": 8192, "keep_alive": "5m", "cache_prompt": True, "typical_p": 0.9, "stream": stream}
    response = live.http.post(path, json=BODIES[path] | asked)
    assert response.status_code == 200
    assert response.headers[IGNORED_HEADER] == "cache_prompt, keep_alive, num_ctx, typical_p"
    everything = {name: {"any": ["value"]} for name in OF_OTHER_SERVERS}
    response = live.http.post(path, json=BODIES[path] | everything | {"stream": stream})
    assert response.status_code == 200
    assert response.headers[IGNORED_HEADER].split(", ") == sorted(OF_OTHER_SERVERS)
    assert IGNORED_HEADER not in live.http.post(path, json=BODIES[path] | {"stream": stream}).headers


def test_vllms_extra_arguments(live: Live) -> None:
    asked = {"vllm_xargs": {"kv_cache_report_mode": "full", "other": 1, "no name": 2}}
    response = live.http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | asked)
    assert response.status_code == 200
    assert response.headers[IGNORED_HEADER] == "vllm_xargs.other"
    for mode in ("half", 1, None, ["full"]):
        asked = {"vllm_xargs": {"kv_cache_report_mode": mode}}
        error = live.http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | asked).json()["error"]
        assert error["param"] == "vllm_xargs.kv_cache_report_mode"
        assert "'full' or 'incremental'" in error["message"]
    many = {"vllm_xargs": dict.fromkeys(map(str, range(65)), 1)}
    assert live.http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | many).status_code == 400


def test_unknown_fields_and_those_of_other_requests_stay_refused(live: Live) -> None:
    for path, body in BODIES.items():
        error = live.http.post(path, json=body | {"num_ctx": 1, "num_ctxx": 1}).json()["error"]
        assert (error["code"], error["param"]) == ("unknown_parameter", "num_ctxx")
    error = live.http.post("/tokenize", json={"prompt": "x", "num_ctx": 1}).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_parameter", "num_ctx")
    for field in ("grammar", "json_schema", "regex"):  # what a text may be is not ignored
        error = live.http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | {field: "a+"}).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", field)


def test_a_prompt_in_the_form_of_another_endpoint_is_sent_there(live: Live) -> None:
    for path, name in ((CHAT, "prompt"), (COMPLETIONS, "messages")):
        error = live.http.post(path, json=BODIES[path] | {name: "x"}).json()["error"]
        assert error["message"] == f"unknown field {name!r}. It belongs to POST {ENDPOINT_OF[name]}."


@pytest.mark.parametrize("name", RENAMED)
def test_other_names_are_answered_with_ours(live: Live, name: str) -> None:
    response = live.http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | {name: 1})
    assert response.status_code == 400
    assert f"Send {RENAMED[name]!r} instead" in response.json()["error"]["message"]


def test_a_field_has_one_answer() -> None:
    served = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert not OF_OTHER_SERVERS & (served | NEUTRAL.keys() | WITHOUT_EFFECT | RENAMED.keys())
    assert not RENAMED.keys() & (served | NEUTRAL.keys() | WITHOUT_EFFECT)
    assert WITHOUT_EFFECT & (served | NEUTRAL.keys()) == {  # requests that do not generate ignore them
        "user",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
    assert set(RENAMED.values()) <= served
    both = GenerationFields.model_fields.keys() | TemplateFields.model_fields.keys()
    assert not MESSAGE_NEUTRAL.keys() & both
