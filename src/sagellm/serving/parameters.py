"""Which fields requests and messages may hold: those served, those that only OpenAI or vLLM know, typos."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sagellm.core.errors import RequestError, UnsupportedParameterError, nearest
from sagellm.serving.errors import MAX_ECHO_CHARS, clipped

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

MESSAGE_FIELDS = frozenset({"role", "content", "name"})

MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""The same for the fields of a message: an answer may come back as the client library dumped it."""

M = TypeVar("M", bound=BaseModel)


def checked(model: type[M], fields: Mapping[str, Any]) -> M:
    """The request of these fields. Every defect is a `RequestError` that names one; nothing is ignored."""
    check_names(fields, model.model_fields.keys() | WITHOUT_EFFECT, NEUTRAL)
    known = {name: value for name, value in fields.items() if name in model.model_fields}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise _readable(error) from error


def check_names(
    fields: Mapping[str, Any],
    served: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    prefix: str = "",
) -> None:
    """Refuse names that are neither `served` nor `neutral`, and those of the latter that ask for something.
    Errors put `prefix` (`messages[0].`) before the name.
    """
    for name, value in fields.items():
        if name in served:
            continue
        where = f"{prefix}{clipped(name)}"
        if name not in neutral:
            guess = nearest(name, served) if len(name) <= MAX_ECHO_CHARS else ""
            raise RequestError(f"unknown field {where!r}.{guess}", where, code="unknown_parameter")
        if value is not None and not _among(value, neutral[name]):
            allowed = _allowed(neutral[name])
            raise UnsupportedParameterError(f"{where!r} is not supported by this server{allowed}", where)


def _among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that tells 1 from True."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)


def _allowed(neutral: tuple[Any, ...]) -> str:
    values = " or ".join(json.dumps(value) for value in neutral)
    return f": leave it out, or send {values}" if values else ": leave it out"


def _readable(error: ValidationError) -> RequestError:
    """The first field in error, by its JSON path, with what its alternatives expect."""
    details = error.errors(include_url=False, include_input=False)
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
