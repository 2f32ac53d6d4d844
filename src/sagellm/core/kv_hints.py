"""KV hints: what a client knows about the future use of its cache.

The form is that of the open proposals in vLLM (issue 53421) and SGLang (issue 36224): an envelope of
independent, versioned actions, each with its own payload. An action that this engine does not know is
answered as unsupported and is no error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from sagellm.core.errors import RequestError

PROTOCOL_VERSION = "0.1"
ACTION_VERSIONS: Mapping[str, str] = {
    "kv.retain": "1.0",
    "kv.expect": "1.0",
    "session.end": "1.0",
    "session.supersede": "1.0",
    "session.describe": "1.0",
}
"""Supported actions and their versions.

`kv.retain`: keep longer (`priority` 0 to 100, `duration_s`). `kv.expect`: keep, it is about to be used, or
will be in `in_s` seconds. `session.end`: evict first, the session has ended. `session.supersede`: evict
first, an edited history has replaced it. `session.describe`: an embedding by which `kv.expect` finds the
session."""
MAX_ACTIONS = 64
MAX_DURATION_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class KVHintAction:
    """One action. Its payload names a target (`session_id` or `token_ids`; none: the request that brought it)
    and the parameters of its type."""

    action_id: str
    action_type: str
    action_version: str = "1.0"
    payload: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        ours = ACTION_VERSIONS.get(self.action_type)
        return ours is not None and ours.split(".")[0] == self.action_version.split(".")[0]


@dataclass(frozen=True, slots=True)
class KVHintsEnvelope:
    """A message: actions that do not depend on each other."""

    protocol_version: str
    message_id: str
    actions: tuple[KVHintAction, ...]

    @classmethod
    def parse(cls, values: Any) -> Self:
        """From decoded JSON; raises `RequestError` naming the field."""
        message = _mapping(values, "kv_hints")
        version = _text(message, "protocol_version", "kv_hints", PROTOCOL_VERSION)
        if version.split(".")[0] != PROTOCOL_VERSION.split(".")[0]:
            raise RequestError(
                f"kv_hints.protocol_version {version!r} is not supported: send {PROTOCOL_VERSION!r}",
                "kv_hints",
            )
        actions = message.get("actions", ())
        if not isinstance(actions, Sequence) or isinstance(actions, str):
            raise RequestError("kv_hints.actions must be a list", "kv_hints")
        if len(actions) > MAX_ACTIONS:
            raise RequestError(f"kv_hints has {len(actions)} actions, at most {MAX_ACTIONS}", "kv_hints")
        parsed = tuple(_action(action, f"kv_hints.actions[{n}]") for n, action in enumerate(actions))
        return cls(version, _text(message, "message_id", "kv_hints", ""), parsed)


class HintStatus(str, Enum):
    """What became of an action."""

    APPLIED = "applied"
    NOT_FOUND = "not_found"
    UNSUPPORTED = "unsupported"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class HintOutcome:
    """The answer to one action: how many cached blocks it concerned, or why none."""

    action_id: str
    status: HintStatus
    num_blocks: int = 0
    reason: str = ""


def number(payload: Mapping[str, Any], name: str, default: float, most: float) -> float:
    """A number of a payload, from 0 to `most`; raises `RequestError`."""
    value = payload.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise RequestError(f"{name} must be a number from 0 to {most:g}", name)
    return float(value) if math.isfinite(value) else most


def _action(values: Any, where: str) -> KVHintAction:
    action = _mapping(values, where)
    return KVHintAction(
        _text(action, "action_id", where, ""),
        _text(action, "action_type", where),
        _text(action, "action_version", where, "1.0"),
        _mapping(action.get("payload", {}), f"{where}.payload"),
    )


def _mapping(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise RequestError(f"{where} must be an object, got {type(values).__name__}", "kv_hints")
    return values


def _text(values: Mapping[str, Any], name: str, where: str, default: str | None = None) -> str:
    value = values.get(name, default)
    if not isinstance(value, str) or (default is None and not value):
        raise RequestError(f"{where}.{name} must be a string", "kv_hints")
    return value
