"""JSON Schemas of the requests: what pydantic says of their fields, and what else is checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from sagellm.core.kv_hints import MAX_ACTIONS, PROTOCOL_VERSION
from sagellm.core.registry import registry
from sagellm.core.types import MAX_RETENTIONS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, SAMPLING_RANGES
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.serving.admin import PinRequest, PolicyRequest, StrategyRequest
from sagellm.serving.parameters import (
    MESSAGE_NEUTRAL,
    NEUTRAL,
    OF_OTHER_SERVERS,
    WITHOUT_EFFECT,
    LenientRequest,
    names_a_model,
)
from sagellm.serving.schema import (
    MAX_PRIORITY,
    ROLES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    HintRequest,
    RetentionFields,
    SloFields,
    TokenizeRequest,
)

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
BEYOND_SCHEMA = (
    " Beside what this schema says: the prompt and max_tokens must fit into the context together, min_tokens "
    "must not exceed max_tokens, and fields that say one thing twice must agree."
)
IGNORED: Schema = {"description": "Of another server; ignored, and named in a header of the answer."}
WITHOUT: Schema = {"description": "Accepted with any value, without effect."}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the schemas depend on: the served model, and what a request may ask for."""

    model_name: str
    vocab_size: int
    max_model_len: int
    max_choices: int
    max_priority: int | None = None
    attributes_misses: bool = False


def request_schema(model: type[BaseModel], limits: Limits) -> Schema:
    """The schema of a request's body, an object that takes no other fields."""
    found = model.model_json_schema(ref_template="#/components/schemas/{model}")
    properties: Schema = {
        name: found["properties"][name] | {"title": name} for name in model.model_fields
    } | _fields_of(model, limits)
    if names_a_model(model):
        for name, values in NEUTRAL.items():
            properties.setdefault(name, {"enum": _distinct([None, *values])})
        properties |= dict.fromkeys(sorted(WITHOUT_EFFECT), WITHOUT)
    if issubclass(model, LenientRequest):
        properties |= dict.fromkeys(sorted(OF_OTHER_SERVERS), IGNORED)
    return {
        "type": "object",
        "description": found["description"] + BEYOND_SCHEMA * issubclass(model, GenerationFields),
        "properties": properties,
        "required": found.get("required", []),
        "additionalProperties": False,
        **_rules(model),
    }


def _fields_of(model: type[BaseModel], limits: Limits) -> Schema:
    """Fields of which pydantic's own schema says too little."""
    tokens = {"type": "array", "items": _integer(0, limits.vocab_size - 1)}
    fields: Schema = {}
    if names_a_model(model):
        fields["model"] = {"enum": [limits.model_name, None], "description": "What is served."}
    if issubclass(model, GenerationFields):
        fields |= _generation_fields(limits)
    if issubclass(model, ChatRequest):
        fields["messages"] = _messages()
        fields["max_completion_tokens"] = fields["max_tokens"]
    elif issubclass(model, CompletionRequest):
        fields["prompt"] = _prompt(tokens | {"minItems": 1})
        fields["max_tokens"] = _or_null(_integer(0, limits.max_model_len - 1))
        fields["logprobs"] = _or_null(_in_range("logprobs", whole=True))
    elif model is PinRequest:
        fields["prompt"] = _or_null(_text(min_length=1), tokens | {"minItems": 1})
        fields["messages"] = _or_null(_messages())
    elif model is TokenizeRequest:
        fields["messages"] = _or_null(_messages())
    elif model is DetokenizeRequest:
        fields["tokens"] = tokens | {"maxItems": limits.max_model_len}
    elif model is PolicyRequest:
        fields["policy"] = {"enum": sorted(registry("policy").names())}
    elif model is StrategyRequest:
        fields["strategy"] = {"enum": sorted(strategies.STRATEGIES)}
    elif model is HintRequest:
        fields["kv_hints"] = _kv_hints()
    if "cache_salt" in model.model_fields:
        fields["cache_salt"] = _or_null(_text(max_length=2**16, pattern="^[^\\u0000]*$"))
    return fields


def _generation_fields(limits: Limits) -> Schema:
    numbers = {
        name: _or_null(_in_range(name, whole=False))
        for name in ("temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    }
    stop = _text(max_length=MAX_STOP_LENGTH, min_length=1)
    flags: Schema = {
        name: {"type": ["boolean", "null"]} for name in ("include_usage", "continuous_usage_stats")
    }
    flags["include_obfuscation"] = {"enum": [False, None]}
    stream_options = {"type": "object", "properties": flags, "additionalProperties": False}
    return numbers | {
        "stream_options": _or_null(stream_options),
        "top_p": _or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "top_k": _or_null(_in_range("top_k", whole=True)),
        "n": _or_null(_integer(1, limits.max_choices)),
        "priority": _or_null(_integer(-MAX_PRIORITY, _highest_priority(limits))),
        "max_tokens": _or_null(_integer(1, limits.max_model_len - 1)),
        "min_tokens": _or_null(_integer(0, limits.max_model_len - 1)),
        "stop": _or_null(stop, {"type": "array", "items": stop, "maxItems": MAX_STOP_STRINGS}),
        "stop_token_ids": _or_null({"type": "array", "items": _integer(0, limits.vocab_size - 1)}),
        "logit_bias": _or_null(_logit_bias(limits.vocab_size)),
        "kv_hints": _or_null(_kv_hints()),
        "slo": _or_null(SloFields.model_json_schema()),
        "retention": _or_null(
            {"type": "array", "items": RetentionFields.model_json_schema(), "maxItems": MAX_RETENTIONS}
        ),
        "return_cache_misses": {"enum": [None, False, True][: 2 + limits.attributes_misses]},
    }


def _highest_priority(limits: Limits) -> int:
    """0 is never refused: where even that is too high, it is lowered."""
    return MAX_PRIORITY - 1 if limits.max_priority is None else max(0, limits.max_priority)


def _logit_bias(vocab_size: int) -> Schema:
    keys = {"pattern": f"^({numbers_below(vocab_size)})$"}
    bias = {"type": "number", "minimum": -100, "maximum": 100}
    return {"type": "object", "propertyNames": keys, "additionalProperties": bias}


def numbers_below(limit: int) -> str:
    """A regular expression for the decimal numbers from 0 to `limit - 1`, without leading zeros."""
    digits = str(limit - 1)
    forms = ["0", f"[1-9][0-9]{{0,{len(digits) - 2}}}"] if len(digits) > 1 else []
    for i, digit in enumerate(digits):
        lowest = 1 if i == 0 and len(digits) > 1 else 0
        if int(digit) > lowest:
            forms.append(f"{digits[:i]}[{lowest}-{int(digit) - 1}][0-9]{{{len(digits) - i - 1}}}")
    return "|".join([*forms, digits])


def _messages() -> Schema:
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    }
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}
    properties: Schema = {
        name: {"enum": _distinct([None, *values])} for name, values in MESSAGE_NEUTRAL.items()
    }
    properties |= {"role": {"enum": list(ROLES)}, "content": content, "name": {"type": ["string", "null"]}}
    message = {
        "type": "object",
        "properties": properties,
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": message, "minItems": 1}


def _prompt(tokens: Schema) -> Schema:
    text = _text(min_length=1)
    mixed = {"type": "array", "items": {"anyOf": [text, tokens]}, "minItems": 1}
    return {"anyOf": [text, tokens, mixed], "description": "A text, token ids, or several of either."}


def _kv_hints() -> Schema:
    action = {
        "type": "object",
        "properties": {
            "action_id": {"type": "string"},
            "action_type": _text(min_length=1),
            "action_version": {"type": "string"},
            "payload": {"type": "object"},
        },
        "required": ["action_type"],
    }
    major = PROTOCOL_VERSION.split(".")[0]
    return {
        "type": "object",
        "properties": {
            "protocol_version": _text(pattern=f"^{major}(\\..*)?$"),
            "message_id": {"type": "string"},
            "actions": {"type": "array", "items": action, "maxItems": MAX_ACTIONS},
        },
    }


def _rules(model: type[BaseModel]) -> Schema:
    """What fields demand of each other."""
    if model in (TokenizeRequest, PinRequest):
        prompt, messages = {"type": ["string", "array"]}, {"type": "array"}
        return {"oneOf": [_given("prompt", prompt), _given("messages", messages)]}
    if not issubclass(model, GenerationFields):
        return {}
    rules = [{"anyOf": [_absent("stream_options"), _given("stream", {"const": True})]}]
    if issubclass(model, ChatRequest):
        rules.append({"anyOf": [_absent("top_logprobs"), _given("logprobs", {"const": True})]})
    else:
        some = {"properties": {"max_tokens": _or_null({"minimum": 1})}}
        rules.append({"anyOf": [some, _given("echo", {"const": True})]})
    return {"allOf": rules}


def _given(name: str, schema: Schema) -> Schema:
    return {"properties": {name: schema}, "required": [name]}


def _absent(name: str) -> Schema:
    return {"properties": {name: NULL}}


def _in_range(name: str, *, whole: bool) -> Schema:
    low, high = SAMPLING_RANGES[name]
    return {"type": "integer" if whole else "number", "minimum": low} | (
        {} if math.isinf(high) else {"maximum": high}
    )


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _text(*, min_length: int = 0, max_length: int | None = None, pattern: str | None = None) -> Schema:
    limits = {"minLength": min_length or None, "maxLength": max_length, "pattern": pattern}
    return {"type": "string"} | {name: value for name, value in limits.items() if value is not None}


def _or_null(*schemas: Mapping[str, Any]) -> Schema:
    return {"anyOf": [*schemas, NULL]}


def _distinct(values: Iterable[Any]) -> list[Any]:
    """JSON Schema knows one 1, Python has 1 and 1.0."""
    found: list[Any] = []
    for value in values:
        if not any(type(one) is type(value) and one == value for one in found) and (
            not isinstance(value, float) or int(value) not in found
        ):
            found.append(value)
    return found
