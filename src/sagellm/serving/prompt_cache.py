"""Reads the breakpoints of a chat, as OpenAI's clients send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.errors import RequestError

CACHE_LIFETIMES_S: Mapping[str, float] = {"30m": 1800.0, "12h": 43_200.0, "24h": 86_400.0}
BREAKPOINT = "prompt_cache_breakpoint"
MAX_BREAKPOINTS = 4
Messages = Sequence[dict[str, Any]]


def breakpoints(messages: Messages, *, explicit: bool) -> list[tuple[Messages, float]]:
    """Each of the latest breakpoints: the messages before it, and its seconds.

    Four count in `explicit` mode, else three beside the prompt's end. Raises `RequestError` for other forms.
    """
    found = [
        (i, j, _lifetime_s(part[BREAKPOINT], f"messages[{i}].content[{j}].{BREAKPOINT}"))
        for i, message in enumerate(messages)
        if isinstance(parts := message.get("content"), list)
        for j, part in enumerate(parts)
        if isinstance(part, dict) and part.get(BREAKPOINT) is not None
    ]
    latest = found[-(MAX_BREAKPOINTS if explicit else MAX_BREAKPOINTS - 1) :]
    return [
        ([*messages[:i], messages[i] | {"content": messages[i]["content"][: j + 1]}], lifetime_s)
        for i, j, lifetime_s in latest
    ]


def _lifetime_s(asked: object, where: str) -> float:
    if isinstance(asked, dict) and asked.get("mode") == "explicit" and asked.keys() <= {"mode", "ttl"}:
        ttl = asked.get("ttl")
        if ttl in (None, "30m", "12h"):
            return CACHE_LIFETIMES_S[ttl or "30m"]
    raise RequestError(f'{where} must be {{"mode": "explicit"}}, with "ttl": "30m" or "12h" or none', where)
