"""What is invalid, unknown, unsupported or too much is answered in OpenAI's form, and never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from sagellm.serving.schema import MESSAGE_NEUTRAL, NEUTRAL, WITHOUT_EFFECT, ChatRequest, CompletionRequest
from tests.scripted_engine import ScriptedEngine, scripted_llm
from tests.serving.live import Live, serving

MESSAGES = [{"role": "user", "content": "hi"}]
HALF = b'{"prompt": "\\ud83d"}'
DEEP = b'{"prompt": ' + b"[" * 100_000
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(scripted_llm("an answer", max_model_len=64), model_name="toy/model") as running:
        yield running


def refused(live: Live, path: str, status: int, **fields: Any) -> dict[str, Any]:
    """The error object of a request that must be refused."""
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    response = live.http.post(path, json=body | fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


INVALID: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"temperature": True}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 1.5}, "max_tokens"),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (CHAT, {"max_tokens": 1000}, "max_tokens"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"stop": [1]}, "stop"),
    (CHAT, {"stop": ["x"] * 17}, "stop"),
    (CHAT, {"stop": ""}, "stop"),
    (CHAT, {"logit_bias": {"a": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"9999999": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"٣": 1}}, "logit_bias"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"stop": ["x", None]}, "stop"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"include_use": True}}, "stream_options"),
    (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"seed": -1}, "seed"),
    (CHAT, {"seed": 2**70}, "seed"),
    (COMPLETIONS, {"prompt": 3}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**7]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"logprobs": 99}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize(("path", "fields", "param"), INVALID)
def test_invalid_values_name_the_field(live: Live, path: str, fields: dict[str, Any], param: str) -> None:
    error = refused(live, path, 400, **fields)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split("[")[0] in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_the_engine_refuses_has_its_status_in_a_stream_too(live: Live, path: str) -> None:
    assert refused(live, path, 400, seed=-1, stream=True)["param"] == "seed"
    assert refused(live, path, 400, seed=-2, n=2, stream=True)["param"] == "seed"


def test_a_missing_field_is_named(live: Live) -> None:
    error = live.http.post(CHAT, json={}).json()["error"]
    assert (error["param"], error["message"]) == ("messages", "messages: Field required")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"messages": NaN,}', b"3", HALF, DEEP])
def test_a_body_that_is_no_json_object(live: Live, content: bytes) -> None:
    response = live.http.post(CHAT, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


UNSUPPORTED: dict[str, Any] = {
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{}],
    "response_format": {"type": "json_object"},
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "prediction": {"type": "content"},
    "web_search_options": {},
    "best_of": 2,
    "suffix": "x",
    "guided_regex": "a+",
    "use_beam_search": True,
    "skip_special_tokens": False,
    "length_penalty": 2,
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused(live: Live, path: str, name: str) -> None:
    error = refused(live, path, 400, **{name: UNSUPPORTED[name]})
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
    ],
)
def test_message_parts_that_are_not_supported(live: Live, message: dict[str, Any]) -> None:
    error = refused(live, CHAT, 400, messages=[message])
    assert error["code"] == "unsupported_parameter"
    assert error["param"].startswith("messages[0].")


def test_padded_chunks_are_not_supported(live: Live) -> None:
    error = refused(live, CHAT, 400, stream=True, stream_options={"include_obfuscation": True})
    assert (error["code"], error["param"]) == ("unsupported_parameter", "stream_options.include_obfuscation")


def test_nothing_to_generate_needs_echo(live: Live) -> None:
    assert "echo" in refused(live, COMPLETIONS, 400, max_tokens=0)["message"]
    assert refused(live, COMPLETIONS, 400, max_tokens=-1, echo=True)["param"] == "max_tokens"


def test_neutral_values_and_descriptions_of_the_caller_are_accepted(live: Live) -> None:
    neutral: dict[str, Any] = {name: None for name, values in NEUTRAL.items() if not values}
    neutral |= {name: values[0] for name, values in NEUTRAL.items() if values}
    neutral |= dict.fromkeys(WITHOUT_EFFECT, "x")
    served = ChatRequest.model_fields.keys()
    nulls = dict.fromkeys(served - {"messages"})
    for path, model in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)):
        body = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
        known = {name: None for name in nulls if name in model.model_fields}
        response = live.http.post(path, json=body | neutral | known)
        assert response.status_code == 200, response.text


def test_an_unknown_field_names_the_nearest(live: Live) -> None:
    error = refused(live, CHAT, 400, temprature=1)
    assert (error["code"], error["param"]) == ("unknown_parameter", "temprature")
    assert "'temperature'" in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0.0; for the likeliest token alone, "),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
    ],
)
def test_ranges_read_well(live: Live, fields: dict[str, Any], message: str) -> None:
    assert refused(live, CHAT, 400, **fields)["message"].startswith(message)


def test_an_unknown_field_of_a_message_names_the_nearest(live: Live) -> None:
    error = refused(live, CHAT, 400, messages=[*MESSAGES, {"role": "user", "content": "x", "nane": "y"}])
    assert (error["code"], error["param"]) == ("unknown_parameter", "messages[1].nane")
    assert "Did you mean 'name'?" in error["message"]


@pytest.mark.parametrize("name", MESSAGE_NEUTRAL)
def test_fields_of_messages_that_are_not_supported(live: Live, name: str) -> None:
    message = {"role": "assistant", "content": "x"}
    error = refused(live, CHAT, 400, messages=[message | {name: "something"}])
    assert (error["code"], error["param"]) == ("unsupported_parameter", f"messages[0].{name}")
    for value in (None, *MESSAGE_NEUTRAL[name]):
        body = {"messages": [*MESSAGES, message | {name: value}, *MESSAGES]}
        assert live.http.post(CHAT, json=body).status_code == 200


def test_what_is_echoed_is_cut_short(live: Live) -> None:
    long = "y" * 50_000
    for path, fields in (
        (CHAT, {long: 1}),
        (CHAT, {"model": long}),
        (CHAT, {"messages": [{"role": long, "content": "x"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": long}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x", long: 1}]}),
        (CHAT, {"chat_template_kwargs": {"messages": long}}),
        (COMPLETIONS, {"prompt": [int("9" * 4000)]}),
        (COMPLETIONS, {"top_k": int("9" * 4000), "n": int("9" * 4000)}),
    ):
        body = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
        response = live.http.post(path, json=body | fields)
        assert 400 <= response.status_code < 500
        assert len(response.text) < 3000, fields.keys()
    assert len(live.http.get(f"/v1/models/{long}").text) < 1000
    assert len(live.http.get(f"/{long}").text) < 1000


@pytest.mark.parametrize("options", [{"self": 1}, {"": 1}, {"a b": 2}, {"context": 3}, {"args": 4}])
def test_template_options_may_have_any_name(live: Live, options: dict[str, Any]) -> None:
    response = live.http.post(CHAT, json={"messages": MESSAGES, "chat_template_kwargs": options})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/toy/model"]
)
def test_head_is_get_without_the_body(live: Live, path: str) -> None:
    head, get = live.http.head(path), live.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_a_slash_after_models_changes_nothing(live: Live) -> None:
    assert live.http.get("/v1/models/").json() == live.http.get("/v1/models").json()
    assert live.http.get("/openapi.json").status_code == 200


def test_after_a_bug_the_connection_lives(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(live.gateway, "check_room", broken)
            response = live.http.post(COMPLETIONS, json={"prompt": "hi"})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert "ZeroDivisionError" in response.json()["error"]["message"]
        assert live.http.post(COMPLETIONS, json={"prompt": "hi"}).status_code == 200


def test_unknown_models_routes_and_methods(live: Live) -> None:
    error = refused(live, CHAT, 404, model="gpt-9")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert live.http.get("/v1/models/toy/model").status_code == 200
    for method, path, status in (
        ("GET", "/v1/models/gpt-9", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
    ):
        response = live.http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    for path, methods in (
        (CHAT, "POST"),
        ("/health", "GET, HEAD"),
        ("/v1/admin/eviction_policy", "GET, PUT"),
    ):
        assert live.http.delete(path).headers["Allow"] == methods
    for method, path in (("GET", "/v1/nothing"), ("GET", CHAT)):
        assert "GET /openapi.json lists" in live.http.request(method, path).json()["error"]["message"]


def test_an_unknown_field_within_a_field_is_named(live: Live) -> None:
    error = refused(live, COMPLETIONS, 400, prompt="hi", slo={"ttft": 1})
    assert error["param"] == "slo"
    assert "slo: unknown field 'ttft'" in error["message"]


def test_a_prompt_that_is_too_long(live: Live) -> None:
    """Status, code and words as OpenAI's, which `openai`, `langchain-openai` and `litellm` look for."""
    for asked, reason in (
        ({"prompt": [20] * 64}, "the prompt is too long"),
        ({"prompt": [20], "max_tokens": 64}, "max_tokens is too large"),
    ):
        for stream in (False, True):
            error = refused(live, COMPLETIONS, 400, **asked, stream=stream)
            assert error["code"] == "context_length_exceeded"
            assert f"{reason}: this model's maximum context length is 64 tokens" in error["message"]
            assert error["type"] == "invalid_request_error"
    error = refused(live, CHAT, 400, messages=[{"role": "user", "content": "word " * 100}])
    assert error["code"] == "context_length_exceeded"
    assert "the prompt is too long: this model's maximum context length is 64 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"text": "x"}, "text"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "x"}, "model"),
    ],
)
def test_tokenize_and_detokenize_refuse(live: Live, path: str, body: dict[str, Any], param: str) -> None:
    response = live.http.post(path, json=body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


def test_the_client_library_sees_typed_errors(live: Live) -> None:
    with live.openai() as client:
        options: dict[str, Any] = {"model": "toy/model", "messages": MESSAGES}
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**options, temperature=-1)
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            client.chat.completions.create(**(options | {"model": "gpt-9"}))


def test_an_api_key_guards_the_api_and_not_the_probes() -> None:
    with serving(scripted_llm(), api_key="secret") as live:
        with live.openai("secret") as client:
            assert client.models.list().data
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            response = live.http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert live.http.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert {live.http.get(path).status_code for path in ("/health", "/ready", "/metrics")} == {200}


def test_cors_is_off_unless_asked_for() -> None:
    headers = {"Origin": "http://page"}
    with serving(scripted_llm()) as live:
        assert "access-control-allow-origin" not in live.http.get("/health", headers=headers).headers
    with serving(scripted_llm(), cors_origins=["http://page"]) as live:
        allowed = live.http.get("/health", headers=headers).headers["access-control-allow-origin"]
        assert allowed == "http://page"


def test_too_many_waiting_requests_are_told_to_come_back() -> None:
    with serving(scripted_llm(), max_waiting=3) as live:
        live.gateway.load.num_waiting = 2
        response = live.http.post(COMPLETIONS, json={"prompt": "a", "n": 2})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        live.gateway.load.num_waiting = 0
        assert live.http.post(COMPLETIONS, json={"prompt": "a", "n": 3}).status_code == 200


def test_an_error_of_one_request_is_its_own() -> None:
    llm = scripted_llm("abc", error_for="http-0")
    with serving(llm) as live:
        response = live.http.post(COMPLETIONS, json={"prompt": "x"})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")
        assert live.http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
        assert live.metric("sagellm_requests_total", finish_reason="error") == 1


def test_a_chat_without_template() -> None:
    llm = scripted_llm(chat_template=None)
    assert isinstance(llm._engine, ScriptedEngine)
    with serving(llm) as live:
        error = refused(live, CHAT, 400)
        assert error["code"] == "no_chat_template"
        assert "/v1/completions" in error["message"]
