"""/openapi.json: every endpoint with its request, its answers and its errors.

FastAPI sees only that the handlers read the request themselves, so the document is written here. The schema
of a request is pydantic's, corrected by the checks that pydantic does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import sagellm
from sagellm.core.features import APPROXIMATE_REUSE
from sagellm.core.kv_hints import MAX_ACTIONS, PROTOCOL_VERSION
from sagellm.core.protocols.cot import MIN_WINDOW
from sagellm.core.registry import registry
from sagellm.core.types import MAX_RETENTIONS, MAX_STOP_LENGTH, MAX_STOP_STRINGS
from sagellm.engines.validation import LEAST_BLOCKS
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.serving import answers, cache_facts, schema
from sagellm.serving.access_log import REQUEST_ID_HEADER
from sagellm.serving.admin import (
    AccelerationList,
    PinRequest,
    PolicyRequest,
    StrategyRequest,
    SwitchAcceleration,
)
from sagellm.serving.branches import BranchFields
from sagellm.serving.explain import ExplainRequest
from sagellm.serving.fleet.routes import InstanceRequest, ScaleRequest, SwitchRequest
from sagellm.serving.fleet.status import FleetStatus, InstanceDetail
from sagellm.serving.gateway import Gateway
from sagellm.serving.other_names import OF_OTHER_SERVERS
from sagellm.serving.prompt_cache import BREAKPOINT
from sagellm.serving.reasoning import EarlyExitFields, EarlyStopFields, SpeculativeReasoningFields
from sagellm.serving.schema_parts import (
    NULL,
    Schema,
    given,
    in_range,
    integer,
    neutral,
    numbers_below,
    or_null,
    rule,
)

JSON = "application/json"
REFERENCE = "#/components/schemas/{model}"
RUNNING = (429, 500, 503)
"""Statuses of requests that the engine serves."""
FLEET = (404, 409, *RUNNING)
"""Statuses of what is done with the instances of a fleet."""

TEXT: Schema = {"type": "string", "minLength": 1}
BEYOND_SCHEMA = (
    " Beside what this schema says: the prompt and max_tokens must fit into the context together, min_tokens "
    "must not exceed max_tokens, and fields that say one thing twice must agree."
)
IGNORED: Schema = {"description": "Of another server; ignored, and named in a header of the answer."}
WITHOUT: Schema = {"description": "Accepted with any value, without effect."}
CLEARING = {"reset_external": "Also the tiers below the device: host memory and disk."}
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route with its `answer` (None: plain text).

    `chunk`: the data of an event, where the route streams. `examples`: bodies that are accepted. `statuses`:
    those of errors, beside the ones that follow from its key and its body. `flags`: what in the query may be
    true, and its meaning.
    """

    summary: str
    answer: type[BaseModel] | None
    request: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    statuses: tuple[int, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)


Endpoints = Mapping[tuple[str, str], Endpoint]
"""By method and path."""

FOR_ALL: Endpoints = {
    ("GET", "/health"): Endpoint("Whether the engine works", answers.ServerStatus, statuses=(503,)),
    ("GET", "/ready"): Endpoint("Whether requests are served", answers.ServerStatus, statuses=(503,)),
    ("GET", "/version"): Endpoint("The version of sageLLM", answers.ServerVersion),
    ("GET", "/metrics"): Endpoint("Metrics in Prometheus' text format", None),
}
"""These want no key."""

FOR_CLIENTS: Endpoints = {
    ("GET", "/v1/models"): Endpoint("The models that are served", answers.ModelList),
    ("GET", "/v1/models/{model}"): Endpoint("One model", answers.ModelCard, statuses=(404,)),
    ("POST", "/v1/chat/completions"): Endpoint(
        "The next message of a conversation",
        answers.ChatCompletion,
        schema.ChatRequest,
        answers.ChatCompletionChunk,
        {
            "question": {"messages": MESSAGES, "temperature": 0},
            "stream": {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}},
            "sampled": {"messages": MESSAGES, "n": 2, "seed": 7, "top_p": 0.9, "max_completion_tokens": 8},
            "logprobs": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 4},
            "thinking": {"messages": MESSAGES, "enable_thinking": False, "max_tokens": 4},
            "voted": {"messages": MESSAGES, "n": 4, "early_stop": {"window": 2}, "max_tokens": 32},
        },
        RUNNING,
    ),
    ("POST", "/v1/completions"): Endpoint(
        "The text that follows a prompt",
        answers.TextCompletion,
        schema.CompletionRequest,
        answers.TextCompletionChunk,
        {
            "text": {"prompt": "1 + 1 ="},
            "batch": {"prompt": ["1 +", [1, 2, 3]], "max_tokens": 4},
            "stream": {"prompt": "1 + 1 =", "stream": True},
            "voted": {"prompt": "1 + 1 =", "n": 4, "early_stop": True, "max_tokens": 4, "stream": True},
            "score": {"prompt": "1 + 1 = 2", "max_tokens": 0, "echo": True, "logprobs": 1},
        },
        RUNNING,
    ),
    ("POST", "/v1/kv/hints"): Endpoint(
        "Say what a session's KV will be needed for",
        answers.HintAnswers,
        schema.HintRequest,
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
    ("GET", "/v1/fleet"): Endpoint("The instances behind this server", FleetStatus, statuses=(404, *RUNNING)),
    ("POST", "/v1/kv/explain"): Endpoint(
        "What the KV cache knows of a prompt, span by span",
        cache_facts.Explanation,
        ExplainRequest,
        examples={
            "text": {"prompt": "1 + 1 ="},
            "chat": {"messages": MESSAGES, "session_id": "mine", "cache_salt": "a"},
        },
        statuses=RUNNING,
    ),
    ("POST", "/tokenize"): Endpoint(
        "The tokens of a text or a conversation",
        answers.Tokenized,
        schema.TokenizeRequest,
        examples={"text": {"prompt": "1 + 1"}, "chat": {"messages": MESSAGES, "return_token_strs": True}},
        statuses=(500,),
    ),
    ("POST", "/detokenize"): Endpoint(
        "The text of tokens",
        answers.Detokenized,
        schema.DetokenizeRequest,
        examples={"tokens": {"tokens": [1, 2, 3]}},
        statuses=(500,),
    ),
}
"""These want a client's key, if the server has any."""

FOR_OPERATORS: Endpoints = {
    ("POST", "/v1/admin/pins"): Endpoint(
        "Compute a prompt and keep its KV",
        answers.Pin,
        PinRequest,
        examples={
            "text": {"prompt": "A text of several blocks of 16 tokens, such as the rules of an assistant."},
            "chat": {"messages": [{"role": "user", "content": "1 + 1 = 2, " * 4}], "cache_salt": "a"},
        },
        statuses=(409,),
    ),
    ("GET", "/v1/admin/pins"): Endpoint("The pinned prompts", answers.PinList),
    ("DELETE", "/v1/admin/pins/{pin_id}"): Endpoint("Unpin a prompt", answers.PinDeleted, statuses=(404,)),
    ("GET", "/v1/admin/eviction_policy"): Endpoint("The eviction policy in use", answers.CurrentPolicy),
    ("GET", "/v1/admin/scheduling_strategy"): Endpoint(
        "The scheduling strategy in use", answers.CurrentStrategy
    ),
    ("PUT", "/v1/admin/eviction_policy"): Endpoint(
        "Replace the eviction policy",
        PolicyRequest,
        PolicyRequest,
        examples={"adaptive": {"policy": "adaptive", "options": {"max_regret": 0.001}}},
    ),
    ("PUT", "/v1/admin/scheduling_strategy"): Endpoint(
        "Replace the scheduling strategy",
        StrategyRequest,
        StrategyRequest,
        examples={"fair": {"strategy": "fair", "options": {"fairness": {"weights": {"a": 2}}}}},
    ),
    ("GET", "/v1/admin/accelerations"): Endpoint(
        "What is accelerated, and what that has saved", AccelerationList
    ),
    ("PUT", "/v1/admin/accelerations"): Endpoint(
        "Switch an acceleration on or off",
        AccelerationList,
        SwitchAcceleration,
        examples={"off": {"name": "early_stop", "on": False}},
    ),
    ("GET", "/v1/admin/fleet/instances/{name}"): Endpoint(
        "One instance in detail: its cache, its tiers, what it evicted",
        InstanceDetail,
        statuses=(404, *RUNNING),
    ),
    ("POST", "/v1/admin/fleet/drain"): Endpoint(
        "Give an instance no new requests, and wait until it has none",
        FleetStatus,
        InstanceRequest,
        examples={"one": {"name": "decode-0"}},
        statuses=FLEET,
    ),
    ("POST", "/v1/admin/fleet/resume"): Endpoint(
        "Give a drained instance requests again",
        FleetStatus,
        InstanceRequest,
        examples={"one": {"name": "decode-0"}},
        statuses=FLEET,
    ),
    ("POST", "/v1/admin/fleet/switch"): Endpoint(
        "Change the type of an instance",
        FleetStatus,
        SwitchRequest,
        examples={"one": {"name": "decode-0", "type": "hybrid"}},
        statuses=FLEET,
    ),
    ("POST", "/v1/admin/fleet/restart"): Endpoint(
        "Drain an instance and start it again; without a name, each in turn",
        FleetStatus,
        InstanceRequest,
        examples={"one": {"name": "decode-0"}, "each": {}},
        statuses=FLEET,
    ),
    ("POST", "/v1/admin/fleet/scale"): Endpoint(
        "Start or end instances of a group",
        FleetStatus,
        ScaleRequest,
        examples={"three": {"group": "decode", "count": 3}},
        statuses=FLEET,
    ),
    ("POST", "/reset_prefix_cache"): Endpoint(
        "Clear the prefix cache", answers.CacheCleared, statuses=(400,), flags=CLEARING
    ),
    ("POST", "/flush_cache"): Endpoint(
        "The same, by SGLang's name", answers.CacheCleared, statuses=(400,), flags=CLEARING
    ),
}
"""These want the admin key."""

ENDPOINTS: Endpoints = {**FOR_ALL, **FOR_CLIENTS, **FOR_OPERATORS}


def document(gateway: Gateway, model_name: str, *, wants_key: bool) -> Schema:
    """The OpenAPI document of a server."""
    paths: Schema = {}
    groups = ((FOR_ALL, ""), (FOR_CLIENTS, "key" if wants_key else ""), (FOR_OPERATORS, "admin_key"))
    for endpoints, key in groups:
        for (method, path), endpoint in endpoints.items():
            described = _endpoint(path, endpoint, key, model_name)
            if endpoints is FOR_OPERATORS:
                described["operationId"] = f"{method.lower()}_{described['operationId']}"
            paths.setdefault(path, {})[method.lower()] = described
    text = (
        "1 to 128 letters, digits and ._~:/+=@-; anything else is replaced. It is in the answer and the log."
    )
    given = {"in": "header", "name": REQUEST_ID_HEADER, "schema": {"type": "string"}, "description": text}
    components: Schema = {"schemas": _schemas(gateway, model_name), "parameters": {"request_id": given}}
    keys = ("key", "admin_key") if wants_key else ("admin_key",)
    components["securitySchemes"] = {key: {"type": "http", "scheme": "bearer"} for key in keys}
    return {
        "openapi": "3.1.0",
        "info": {"title": "sageLLM", "version": sagellm.__version__},
        "paths": paths,
        "components": components,
    }


def _schemas(gateway: Gateway, model_name: str) -> Schema:
    """The schemas of requests, from their checks, and of answers, from their models."""
    shown: list[type[BaseModel] | None] = [answers.ErrorAnswer]
    for endpoint in ENDPOINTS.values():
        shown += (endpoint.answer, endpoint.chunk)
    models = dict.fromkeys(model for model in shown if model is not None)
    _, found = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    schemas: Schema = dict(found["$defs"])
    for endpoint in ENDPOINTS.values():
        if endpoint.request is not None:
            schemas[endpoint.request.__name__] = request_schema(endpoint.request, gateway, model_name)
    return schemas


def _endpoint(path: str, endpoint: Endpoint, key: str, model_name: str) -> Schema:
    """The description of a route that wants this key."""
    found: Schema = {
        "operationId": path.strip("/").translate(str.maketrans("/{}", "___")).replace("__", "_"),
        "summary": endpoint.summary,
        "responses": _responses(endpoint, key),
    }
    if key:
        found["security"] = [{key: []}]
    found["parameters"] = [{"$ref": "#/components/parameters/request_id"}]
    in_path = {"in": "path", "required": True, "schema": {"type": "string"}}
    for name, text in endpoint.flags.items():
        asked = {"in": "query", "name": name, "schema": {"type": "boolean"}, "description": text}
        found["parameters"].append(asked)
    for name in ("pin_id", "name"):
        if f"{{{name}}}" in path:
            found["parameters"].append(in_path | {"name": name})
    if "{model}" in path:
        named = {"name": "model", "schema": TEXT, "example": model_name}
        found["parameters"].append(in_path | named)
    if endpoint.request is not None:
        shown = {name: {"value": dict(body)} for name, body in endpoint.examples.items()}
        content = {"schema": _reference(endpoint.request), "examples": shown}
        found["requestBody"] = {"required": True, "content": {JSON: content}}
    return found


def _responses(endpoint: Endpoint, key: str) -> Schema:
    statuses = {*endpoint.statuses}
    if endpoint.request is not None:
        statuses |= {400, 404, 408, 413}
    if key:
        statuses.add(401)
    if key == "admin_key":
        statuses |= {403, *RUNNING}
    found: Schema = {"200": _success(endpoint)}
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


def _success(endpoint: Endpoint) -> Schema:
    if endpoint.answer is None:
        return {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content: Schema = {JSON: {"schema": _reference(endpoint.answer)}}
    found: Schema = {"description": "OK", "content": content}
    if endpoint.chunk is not None:
        content["text/event-stream"] = {"schema": _events(endpoint.chunk)}
        text = "Fields of other servers that the request held and that were ignored."
        found["headers"] = {schema.IGNORED_HEADER: {"schema": {"type": "string"}, "description": text}}
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


def request_schema(model: type[BaseModel], gateway: Gateway, model_name: str) -> Schema:
    """The schema of a request's body, an object without other fields."""
    found = model.model_json_schema(ref_template=REFERENCE)
    properties: Schema = {
        name: found["properties"][name] | {"title": name} for name in model.model_fields
    } | _fields_of(model, gateway, model_name)
    if schema.names_a_model(model):
        for name, values in sorted(schema.NEUTRAL.items()):
            properties.setdefault(name, neutral(values))
        for name in sorted(schema.WITHOUT_EFFECT):
            properties.setdefault(name, WITHOUT)
    if issubclass(model, schema.GenerationFields):
        properties |= dict.fromkeys(sorted(OF_OTHER_SERVERS), IGNORED)
    return {
        "type": "object",
        "description": found["description"] + BEYOND_SCHEMA * issubclass(model, schema.GenerationFields),
        "properties": properties,
        "required": found.get("required", []),
        "additionalProperties": False,
        **_rules(model),
    }


def _fields_of(model: type[BaseModel], gateway: Gateway, model_name: str) -> Schema:
    """The fields whose checks pydantic does not know."""
    tokens = {"type": "array", "items": integer(0, gateway.llm.tokenizer.vocab_size - 1)}
    max_model_len = gateway.llm.max_model_len
    fields: Schema = {}
    if schema.names_a_model(model):
        fields["model"] = {"enum": [model_name, None], "description": "What is served."}
    if issubclass(model, schema.GenerationFields):
        fields |= _generation_fields(gateway)
    if issubclass(model, schema.ChatRequest):
        fields["messages"] = _messages()
        fields["max_completion_tokens"] = fields["max_tokens"]
    elif issubclass(model, schema.CompletionRequest):
        fields["prompt"] = _prompt(tokens | {"minItems": 1})
        fields["max_tokens"] = or_null(integer(0, max_model_len - 1))
        fields["logprobs"] = or_null(in_range("logprobs", whole=True))
        fields["branch_from"] = or_null(BranchFields.model_json_schema())
    elif issubclass(model, schema.PromptFields):
        fields["prompt"] = or_null(TEXT, tokens | {"minItems": 1})
        fields["messages"] = or_null(_messages())
    elif model is schema.TokenizeRequest:
        fields["messages"] = or_null(_messages())
    elif model is schema.DetokenizeRequest:
        fields["tokens"] = tokens | {"maxItems": max_model_len}
    elif model is PolicyRequest:
        fields["policy"] = {"enum": sorted(registry("policy").names())}
    elif model is StrategyRequest:
        fields["strategy"] = {"enum": sorted(strategies.STRATEGIES)}
    elif model is schema.HintRequest:
        fields["kv_hints"] = _kv_hints()
    if "cache_salt" in model.model_fields:
        fields["cache_salt"] = or_null({"type": "string", "maxLength": 2**16, "pattern": "^[^\\u0000]*$"})
    return fields


def _generation_fields(gateway: Gateway) -> Schema:
    settings, max_model_len = gateway.settings, gateway.llm.max_model_len
    vocab_size = gateway.llm.tokenizer.vocab_size
    numbers = {
        name: or_null(in_range(name, whole=False))
        for name in ("temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    }
    numbers |= {
        name: or_null(*[in_range(name, whole=True)] * gateway.llm.has_reasoning_budgets)
        for name in ("max_reasoning_tokens", "soft_reasoning_tokens")
    }
    stop = TEXT | {"maxLength": MAX_STOP_LENGTH}
    flags: Schema = {
        name: {"type": ["boolean", "null"]} for name in ("include_usage", "continuous_usage_stats")
    }
    flags["include_obfuscation"] = {"enum": [False, None]}
    # 0 is never refused: where even that is too high, the server lowers it.
    highest = schema.MAX_PRIORITY - 1 if settings.max_priority is None else max(0, settings.max_priority)
    keys = {"pattern": f"^({numbers_below(vocab_size)})$"}
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    logit_bias = {"type": "object", "propertyNames": keys, "additionalProperties": bias}
    stream_options = {"type": "object", "properties": flags, "additionalProperties": False}
    return numbers | {
        "stream_options": or_null(stream_options),
        "top_p": or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "top_k": or_null(in_range("top_k", whole=True)),
        "n": or_null(integer(1, min(settings.max_n, gateway.load.most_of_one_client))),
        "early_stop": rule(EarlyStopFields),
        "early_exit": rule(EarlyExitFields, is_possible=gateway.llm.has_early_exits),
        "speculative_reasoning": rule(
            SpeculativeReasoningFields, is_possible=gateway.llm.has_reasoning_drafts
        ),
        "priority": or_null(integer(-schema.MAX_PRIORITY, highest)),
        "max_tokens": or_null(integer(1, max_model_len - 1)),
        "min_tokens": or_null(integer(0, max_model_len - 1)),
        "num_speculative_tokens": or_null(in_range("num_speculative_tokens", whole=True)),
        "max_reasoning_kv_tokens": or_null(
            *[integer(LEAST_BLOCKS * gateway.llm.capability().block_size, 2**31)]
            * gateway.llm.has_reasoning_kv
        ),
        "soft_reasoning_slope": or_null(in_range("soft_reasoning_slope", whole=False)),
        "stop": or_null(stop, {"type": "array", "items": stop, "maxItems": MAX_STOP_STRINGS}),
        "stop_token_ids": or_null({"type": "array", "items": integer(0, vocab_size - 1)}),
        "logit_bias": or_null(logit_bias),
        "kv_hints": or_null(_kv_hints()),
        "slo": or_null(schema.SloFields.model_json_schema()),
        "retention": or_null(
            {"type": "array", "items": schema.RetentionFields.model_json_schema(), "maxItems": MAX_RETENTIONS}
        ),
        "prompt_cache_options": or_null(schema.PromptCacheOptions.model_json_schema()),
        "return_cache_misses": {"enum": [None, False, True][: 2 + gateway.attributes_misses]},
        APPROXIMATE_REUSE: {
            "enum": [None, False, True][: 2 + (APPROXIMATE_REUSE in gateway.llm.capability().features)]
        },
    }


def _messages() -> Schema:
    mark = {
        "type": ["object", "null"],
        "properties": {"mode": {"const": "explicit"}, "ttl": {"enum": ["30m", "12h", None]}},
        "required": ["mode"],
        "additionalProperties": False,
    }
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}, BREAKPOINT: mark},
        "required": ["type", "text"],
    }
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    properties: Schema = {name: neutral(values) for name, values in schema.MESSAGE_NEUTRAL.items()}
    properties |= {
        "role": {"enum": list(schema.ROLES)},
        "content": content,
        "name": {"type": ["string", "null"]},
    }
    message = {
        "type": "object",
        "properties": properties,
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": message, "minItems": 1}


def _prompt(tokens: Schema) -> Schema:
    text = TEXT
    mixed = {"type": "array", "items": {"anyOf": [text, tokens]}, "minItems": 1}
    return {"anyOf": [text, tokens, mixed], "description": "A text, token ids, or several of either."}


def _kv_hints() -> Schema:
    action = {
        "type": "object",
        "properties": {
            "action_id": {"type": "string"},
            "action_type": TEXT,
            "action_version": {"type": "string"},
            "payload": {"type": "object"},
        },
        "required": ["action_type"],
    }
    major = PROTOCOL_VERSION.split(".")[0]
    return {
        "type": "object",
        "properties": {
            "protocol_version": {"type": "string", "pattern": f"^{major}(\\..*)?$"},
            "message_id": {"type": "string"},
            "actions": {"type": "array", "items": action, "maxItems": MAX_ACTIONS},
        },
    }


def _rules(model: type[BaseModel]) -> Schema:
    """What the fields of a request demand of each other."""
    if issubclass(model, schema.TokenizeRequest | schema.PromptFields):
        prompt, messages = {"type": ["string", "array"]}, {"type": "array"}
        return {"oneOf": [given("prompt", prompt), given("messages", messages)]}
    if not issubclass(model, schema.GenerationFields):
        return {}
    rules = [{"anyOf": [{"properties": {"stream_options": NULL}}, given("stream", {"const": True})]}]
    without = {"properties": {"early_stop": {"enum": [False, None]}}}
    rules.append({"anyOf": [without, given("n", {"type": "integer", "minimum": MIN_WINDOW})]})
    soft = [
        {"properties": {"soft_reasoning_slope": NULL}},
        given("soft_reasoning_tokens", {"type": "integer"}),
    ]
    if issubclass(model, schema.ChatRequest):
        soft.append(given("reasoning_effort", {"type": "string"}))  # it may have a soft budget
        rules.append({"anyOf": [{"properties": {"top_logprobs": NULL}}, given("logprobs", {"const": True})]})
    else:
        some = {"properties": {"max_tokens": or_null({"minimum": 1})}}
        rules.append({"anyOf": [some, given("echo", {"const": True})]})
    rules.append({"anyOf": soft})
    return {"allOf": rules}
