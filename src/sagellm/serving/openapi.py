"""/openapi.json: every route with its request, its answers and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import sagellm
from sagellm.serving import answers
from sagellm.serving.access_log import REQUEST_ID_HEADER
from sagellm.serving.admin import PinRequest, PolicyRequest, StrategyRequest
from sagellm.serving.parameters import IGNORED_HEADER
from sagellm.serving.request_schemas import Limits, Schema, request_schema
from sagellm.serving.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    HintRequest,
    TokenizeRequest,
)

JSON = "application/json"
REFERENCE = "#/components/schemas/{model}"
RUNNING = (429, 500, 503)
"""Statuses of requests that the engine serves."""

MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


@dataclass(frozen=True, slots=True)
class Operation:
    """A route: its `answer` (none: plain text) and, where it streams, the data of an event. `examples` are
    bodies that are accepted; an `is_open` route wants no key.
    """

    summary: str
    answer: type[BaseModel] | None
    request: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    statuses: tuple[int, ...] = ()
    is_open: bool = False
    is_admin: bool = False


def admin(
    summary: str,
    answer: type[BaseModel],
    request: type[BaseModel] | None = None,
    examples: Mapping[str, Mapping[str, Any]] | None = None,
    statuses: tuple[int, ...] = (),
) -> Operation:
    """A route that wants the admin key."""
    errors = (403, 429, 500, 503, *statuses)
    return Operation(summary, answer, request, examples=examples or {}, statuses=errors, is_admin=True)


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/health"): Operation(
        "Whether the engine works", answers.ServerStatus, statuses=(503,), is_open=True
    ),
    ("GET", "/ready"): Operation(
        "Whether requests are served", answers.ServerStatus, statuses=(503,), is_open=True
    ),
    ("GET", "/version"): Operation("The version of sageLLM", answers.ServerVersion, is_open=True),
    ("GET", "/metrics"): Operation("Metrics in Prometheus' text format", None, is_open=True),
    ("GET", "/v1/models"): Operation("The models that are served", answers.ModelList),
    ("GET", "/v1/models/{model}"): Operation("One model", answers.ModelCard, statuses=(404,)),
    ("POST", "/v1/chat/completions"): Operation(
        "The next message of a conversation",
        answers.ChatCompletion,
        ChatRequest,
        answers.ChatCompletionChunk,
        {
            "question": {"messages": MESSAGES, "temperature": 0},
            "stream": {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}},
            "sampled": {"messages": MESSAGES, "n": 2, "seed": 7, "top_p": 0.9, "max_completion_tokens": 8},
            "logprobs": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 4},
            "thinking": {"messages": MESSAGES, "enable_thinking": False, "max_tokens": 4},
        },
        RUNNING,
    ),
    ("POST", "/v1/completions"): Operation(
        "The text that follows a prompt",
        answers.TextCompletion,
        CompletionRequest,
        answers.TextCompletionChunk,
        {
            "text": {"prompt": "1 + 1 ="},
            "batch": {"prompt": ["1 +", [1, 2, 3]], "max_tokens": 4},
            "stream": {"prompt": "1 + 1 =", "stream": True},
            "score": {"prompt": "1 + 1 = 2", "max_tokens": 0, "echo": True, "logprobs": 1},
        },
        RUNNING,
    ),
    ("POST", "/v1/kv/hints"): Operation(
        "Say what a session's KV will be needed for",
        answers.HintAnswers,
        HintRequest,
        examples={
            "end": {
                "kv_hints": {
                    "protocol_version": "0.1",
                    "actions": [{"action_type": "session.end", "payload": {"session_id": "mine"}}],
                }
            }
        },
        statuses=RUNNING,
    ),
    ("POST", "/tokenize"): Operation(
        "The tokens of a text or a conversation",
        answers.Tokenized,
        TokenizeRequest,
        examples={"text": {"prompt": "1 + 1"}, "chat": {"messages": MESSAGES, "return_token_strs": True}},
        statuses=(500,),
    ),
    ("POST", "/detokenize"): Operation(
        "The text of tokens",
        answers.Detokenized,
        DetokenizeRequest,
        examples={"tokens": {"tokens": [1, 2, 3]}},
        statuses=(500,),
    ),
    ("POST", "/v1/admin/pins"): admin(
        "Compute a prompt and keep its KV",
        answers.Pin,
        PinRequest,
        {
            "text": {"prompt": "A text of several blocks of 16 tokens, such as the rules of an assistant."},
            "chat": {"messages": [{"role": "user", "content": "1 + 1 = 2, " * 4}], "cache_salt": "a"},
        },
        (409,),
    ),
    ("GET", "/v1/admin/pins"): admin("The pinned prompts", answers.PinList),
    ("DELETE", "/v1/admin/pins/{pin_id}"): admin("Unpin a prompt", answers.PinDeleted, statuses=(404,)),
    ("GET", "/v1/admin/eviction_policy"): admin("The eviction policy in use", answers.CurrentPolicy),
    ("GET", "/v1/admin/scheduling_strategy"): admin(
        "The scheduling strategy in use", answers.CurrentStrategy
    ),
    ("PUT", "/v1/admin/eviction_policy"): admin(
        "Replace the eviction policy",
        PolicyRequest,
        PolicyRequest,
        {"adaptive": {"policy": "adaptive", "options": {"max_regret": 0.001}}},
    ),
    ("PUT", "/v1/admin/scheduling_strategy"): admin(
        "Replace the scheduling strategy",
        StrategyRequest,
        StrategyRequest,
        {"fair": {"strategy": "fair", "options": {"fairness": {"weights": {"a": 2}}}}},
    ),
    ("POST", "/reset_prefix_cache"): admin("Clear the prefix cache", answers.CacheCleared),
    ("POST", "/flush_cache"): admin("The same, by SGLang's name", answers.CacheCleared),
}


def document(limits: Limits, *, wants_key: bool) -> Schema:
    """The OpenAPI document of a server."""
    paths: Schema = {}
    for (method, path), operation in OPERATIONS.items():
        described = _operation(path, operation, limits, wants_key=wants_key)
        if operation.is_admin:
            described["operationId"] = f"{method.lower()}_{described['operationId']}"
        paths.setdefault(path, {})[method.lower()] = described
    text = (
        "1 to 128 letters, digits and ._~:/+=@-; anything else is replaced. It is in the answer and the log."
    )
    given = {"in": "header", "name": REQUEST_ID_HEADER, "schema": {"type": "string"}, "description": text}
    components: Schema = {"schemas": _schemas(limits), "parameters": {"request_id": given}}
    keys = ("key", "admin_key") if wants_key else ("admin_key",)
    components["securitySchemes"] = {key: {"type": "http", "scheme": "bearer"} for key in keys}
    return {
        "openapi": "3.1.0",
        "info": {"title": "sageLLM", "version": sagellm.__version__},
        "paths": paths,
        "components": components,
    }


def _schemas(limits: Limits) -> Schema:
    """Those of requests by what is checked, those of answers by their models."""
    shown: list[type[BaseModel] | None] = [answers.ErrorAnswer]
    for operation in OPERATIONS.values():
        shown += (operation.answer, operation.chunk)
    models = dict.fromkeys(one for one in shown if one is not None)
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    schemas: Schema = dict(found["$defs"])
    for operation in OPERATIONS.values():
        if operation.request is not None:
            schemas[operation.request.__name__] = request_schema(operation.request, limits)
    return schemas


def _operation(path: str, operation: Operation, limits: Limits, *, wants_key: bool) -> Schema:
    found: Schema = {
        "operationId": path.strip("/").translate(str.maketrans("/{}", "___")).replace("__", "_"),
        "summary": operation.summary,
        "responses": _responses(operation, wants_key=wants_key),
    }
    if operation.is_admin:
        found["security"] = [{"admin_key": []}]
    elif wants_key and not operation.is_open:
        found["security"] = [{"key": []}]
    found["parameters"] = [{"$ref": "#/components/parameters/request_id"}]
    if "{pin_id}" in path:
        one = {"in": "path", "name": "pin_id", "required": True, "schema": {"type": "string"}}
        found["parameters"].append(one)
    if "{model}" in path:
        name = {"type": "string", "minLength": 1}
        one = {"in": "path", "name": "model", "required": True, "schema": name, "example": limits.model_name}
        found["parameters"].append(one)
    if operation.request is not None:
        shown = {name: {"value": dict(body)} for name, body in operation.examples.items()}
        content = {"schema": _reference(operation.request), "examples": shown}
        found["requestBody"] = {"required": True, "content": {JSON: content}}
    return found


def _responses(operation: Operation, *, wants_key: bool) -> Schema:
    statuses = {*operation.statuses}
    if operation.request is not None:
        statuses |= {400, 404, 408, 413}
    if operation.is_admin or (wants_key and not operation.is_open):
        statuses.add(401)
    found: Schema = {"200": _success(operation)}
    for status in sorted(statuses):
        found[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {JSON: {"schema": _reference(answers.ErrorAnswer)}},
            "headers": {},
        }
        if status in (429, 503):
            found[str(status)]["headers"]["Retry-After"] = {"schema": {"type": "integer"}}
        if status == 401:
            found[str(status)]["headers"]["WWW-Authenticate"] = {"schema": {"type": "string"}}
    for response in found.values():
        response.setdefault("headers", {})[REQUEST_ID_HEADER] = {"schema": {"type": "string"}}
    return found


def _success(operation: Operation) -> Schema:
    if operation.answer is None:
        return {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content: Schema = {JSON: {"schema": _reference(operation.answer)}}
    found: Schema = {"description": "OK", "content": content}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _events(operation.chunk)}
        text = "Fields of other servers that the request held and that were ignored."
        found["headers"] = {IGNORED_HEADER: {"schema": {"type": "string"}, "description": text}}
    return found


def _events(chunk: type[BaseModel]) -> Schema:
    """One server-sent event."""
    content = {"anyOf": [_reference(chunk), _reference(answers.ErrorAnswer)]}
    chunks = {"type": "string", "contentMediaType": JSON, "contentSchema": content}
    data = {"anyOf": [{"const": "[DONE]"}, chunks]}
    return {
        "type": "object",
        "description": "A server-sent event. The data of the last one is [DONE], or an error.",
        "properties": {"data": data},
        "required": ["data"],
    }


def _reference(model: type[BaseModel]) -> Schema:
    return {"$ref": REFERENCE.format(model=model.__name__)}
