"""Which fields a request may hold: those served here, those that only OpenAI or vLLM know, typos."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sagellm.core.errors import RequestError, UnsupportedParameterError, nearest

WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Accepted with any value: they describe the caller, or tools of which there are none."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known and not supported: the values, beside null, that ask for nothing."""

M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], body: bytes) -> M:
    """The request in `body`. Every defect is a `RequestError` that names the field; nothing is ignored."""
    fields = _json_object(body)
    _check_names(fields, model.model_fields.keys())
    known = {name: value for name, value in fields.items() if name in model.model_fields}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise _readable(error) from error


def _json_object(body: bytes) -> dict[str, Any]:
    """The body's object, every string of which can be written as UTF-8."""
    try:
        content = json.loads(body)
        if b"\\u" in body:
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError("a string in the body holds half a surrogate pair", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return content


def _check_names(fields: Mapping[str, Any], served: Collection[str]) -> None:
    for name, value in fields.items():
        if name in served or name in WITHOUT_EFFECT:
            continue
        if name not in NEUTRAL:
            message = f"unknown field {name!r}.{nearest(name, served)}"
            raise RequestError(message, name, code="unknown_parameter")
        if value is not None and not _among(value, NEUTRAL[name]):
            raise UnsupportedParameterError(f"{name!r} is not supported by this server{_allowed(name)}", name)


def _among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that tells 1 from True."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)


def _allowed(name: str) -> str:
    values = " or ".join(json.dumps(value) for value in NEUTRAL[name])
    return f": leave it out, or send {values}" if values else ": leave it out"


def _readable(error: ValidationError) -> RequestError:
    """The first field in error, by its JSON path, with what its alternatives expect."""
    details = error.errors()
    path = _path(details[0]["loc"])
    messages = [one["msg"] for one in details if _path(one["loc"]) == path]
    message = " or ".join(dict.fromkeys(_lowered(text) for text in messages))
    return RequestError(f"{path or 'body'}: {message}", path or None)


def _lowered(message: str) -> str:
    return message.removeprefix("Value error, ").replace("Input should be", "should be")


def _path(location: tuple[int | str, ...]) -> str:
    """`stop` or `messages[0]`: pydantic's location without the names of union branches."""
    path = str(location[0]) if location else ""
    return path + "".join(f"[{part}]" for part in location[1:2] if isinstance(part, int))
