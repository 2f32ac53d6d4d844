"""Messages between a front and its instances: msgpack by msgspec, one per ZeroMQ frame.

The types of `core` travel as they are. A message that cannot be read raises `MessageError` and changes
nothing. Both ends must have the same `PROTOCOL`; `Hello` and `Welcome` keep their form in each version, so
that a difference can be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sagellm.core import errors
from sagellm.core.errors import RequestError, SageError
from sagellm.core.events import BlocksRemoved, BlocksStored, IndexCleared
from sagellm.core.kv_hints import HintOutcome, KVHintsEnvelope
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats, PromptExplanation
from sagellm.core.protocols.fleet import HandOver, HandOverReport, InstanceFacts
from sagellm.core.protocols.prefix_cache import MissCounts, PromptSpan, ReusedPrefix
from sagellm.core.protocols.router import ExecutionInstance, InstanceType
from sagellm.core.types import (
    FinishReason,
    Namespace,
    Request,
    RequestOutput,
    TokenLogprob,
    Tokens,
)

PROTOCOL = 2
MAX_MESSAGE_BYTES = 256 << 20


class MessageError(SageError):
    """Bytes that are no message of this protocol."""


class _Message(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """A message; its type's name is the first item of an array."""


# ------------------------------------------------------------------------------------ from a front


class FrontHello(_Message, frozen=True, tag="hello"):
    """The first message of a session. Without a sign of life for `lease_s` the instance ends it.

    A former session of the same `front_id` ends now. `takes_over`: so do those of others, since the front
    before has died.
    """

    protocol: int
    lease_s: float
    front_id: str
    takes_over: bool = False


class Submit(_Message, frozen=True):
    """Start a request. `onward`: where it goes after its prefill, if `hand_over` fetches a prefix.

    `age_s`: the time since it arrived at the front. The clocks of two hosts have different beginnings, so the
    request's own `arrival_s` says nothing here.
    """

    request: Request
    hand_over: HandOver | None = None
    onward: HandOver | None = None
    age_s: float = 0.0


class Abort(_Message, frozen=True):
    request_id: str


class AlivePing(_Message, frozen=True):
    """The front lives."""


class FrontCall(_Message, frozen=True):
    """A question; `arguments` are those of `CALLS[name]`, encoded."""

    call_id: int
    name: str
    arguments: bytes


class Drain(_Message, frozen=True):
    """The instance is drained from now on, or not any more. It does nothing but say so to each front."""

    draining: bool


class AddPeer(_Message, frozen=True):
    facts: InstanceFacts


class LosePeer(_Message, frozen=True):
    instance_id: str


FromFront = FrontHello | Submit | Abort | AlivePing | FrontCall | Drain | AddPeer | LosePeer


# --------------------------------------------------------------------------------- from an instance


class Welcome(_Message, frozen=True, tag="welcome"):
    """The answer to `Hello`. `facts`, encoded, can be read only where `protocol` is one's own."""

    protocol: int
    facts: bytes = b""


class Goodbye(_Message, frozen=True):
    """The session has ended here, with all that the front had in it. It may say `Hello` again."""

    reason: str


class WireOutput(msgspec.Struct, frozen=True, gc=False, array_like=True, omit_defaults=True):
    """`RequestOutput`, field by field."""

    request_id: str
    new_token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    queued_s: float | None = None
    misses: MissCounts | None = None
    evicted: PromptSpan | None = None
    num_approximate_tokens: int = 0
    error_status: int = 500


class Outputs(_Message, frozen=True):
    """What one step has added."""

    outputs: tuple[WireOutput, ...]


class WireError(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An error: its class in `core.errors`, and what a `RequestError` has beside."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400


class RefusedSubmit(_Message, frozen=True):
    request_id: str
    error: WireError


class Load(_Message, frozen=True):
    instance: ExecutionInstance
    draining: bool = False


class HandedOver(_Message, frozen=True):
    reports: tuple[HandOverReport, ...]


class Stored(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    event: BlocksStored


class Removed(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    event: BlocksRemoved


class Cleared(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    event: IndexCleared


class Changes(_Message, frozen=True):
    """What entered and left the caches, in order. Without `is_complete`, some of it is missing."""

    events: tuple[Stored | Removed | Cleared, ...]
    is_complete: bool = True


class CallAnswer(_Message, frozen=True):
    """`result`: encoded as `CALLS` says."""

    call_id: int
    result: bytes = b""
    error: WireError | None = None


FromInstance = Welcome | Goodbye | Outputs | RefusedSubmit | Load | HandedOver | Changes | CallAnswer


class Pinned(msgspec.Struct, frozen=True, array_like=True):
    """A pin, which the instance holds until `unpin` or the session's end."""

    pin_id: int
    num_tokens: int
    num_blocks: int


CALLS: Mapping[str, tuple[Any, Any]] = {
    "stats": (tuple[()], EngineStats),
    "diagnostics": (tuple[()], EngineDiagnostics),
    "pin": (tuple[Tokens, Namespace], Pinned),
    "unpin": (tuple[int], None),
    "hot_prefixes": (tuple[int], list[ReusedPrefix]),
    "clear_cache": (tuple[bool], int),
    "hint": (tuple[KVHintsEnvelope, Namespace], list[HintOutcome]),
    "explain": (tuple[Tokens, Namespace, str | None], PromptExplanation),
    "set_policy": (tuple[str, dict[str, Any]], None),
    "set_strategy": (tuple[str, dict[str, dict[str, Any]]], None),
    "set_kind": (tuple[InstanceType], None),
    "send_prefix": (tuple[str, Tokens, str, Namespace], None),
    "fail": (tuple[str, int, str], None),
}
"""What an instance can be asked: the types of the arguments and of the result."""


# ------------------------------------------------------------------------------------------ encoding


def _encode_other(value: Any) -> Any:
    if isinstance(value, Tokens):
        return value.tobytes()
    raise TypeError(f"{type(value).__name__} is in no message")


def _decode_other(kind: type, value: Any) -> Any:
    if kind is Tokens:
        if not isinstance(value, bytes) or len(value) % 4:
            raise ValueError("tokens are int32 numbers")
        return Tokens.frombytes(value)
    raise TypeError(f"{kind.__name__} is in no message")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_FROM_FRONT = msgspec.msgpack.Decoder(FromFront, dec_hook=_decode_other)
_FROM_INSTANCE = msgspec.msgpack.Decoder(FromInstance, dec_hook=_decode_other)
_FACTS = msgspec.msgpack.Decoder(InstanceFacts, dec_hook=_decode_other)
_ARGUMENTS = {
    name: msgspec.msgpack.Decoder(given, dec_hook=_decode_other) for name, (given, _) in CALLS.items()
}
_RESULTS = {
    name: msgspec.msgpack.Decoder(result, dec_hook=_decode_other) for name, (_, result) in CALLS.items()
}
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, SageError)


def encode(message: Any) -> bytes:
    return _ENCODER.encode(message)


def from_front(data: bytes) -> FromFront:
    """Raises `MessageError`."""
    message: FromFront = _decoded(_FROM_FRONT, data)
    return message


def from_instance(data: bytes) -> FromInstance:
    """Raises `MessageError`."""
    message: FromInstance = _decoded(_FROM_INSTANCE, data)
    return message


def facts_of(welcome: Welcome) -> InstanceFacts:
    """Raises `MessageError`."""
    facts: InstanceFacts = _decoded(_FACTS, welcome.facts)
    return facts


def arguments_of(call: FrontCall) -> Sequence[Any]:
    """Raises `MessageError`, also for a call that is unknown here."""
    if call.name not in _ARGUMENTS:
        raise MessageError(f"an instance cannot be asked {call.name!r}.{errors.nearest(call.name, CALLS)}")
    arguments: Sequence[Any] = _decoded(_ARGUMENTS[call.name], call.arguments)
    return arguments


def result_of(name: str, data: bytes) -> Any:
    """Raises `MessageError`."""
    return _decoded(_RESULTS[name], data)


def _decoded(decoder: Any, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except _UNREADABLE as error:
        raise MessageError(f"{len(data)} bytes are no message of protocol {PROTOCOL}: {error}") from error


def output_of(output: WireOutput) -> RequestOutput:
    return RequestOutput(*msgspec.structs.astuple(output))


_KINDS = {BlocksStored: Stored, BlocksRemoved: Removed, IndexCleared: Cleared}


def changes_of(
    events: Sequence[BlocksStored | BlocksRemoved | IndexCleared], *, is_complete: bool
) -> Changes:
    return Changes(tuple(_KINDS[type(event)](event) for event in events), is_complete)


def wire_error(error: Exception) -> WireError:
    """Errors that are none of ours keep their message."""
    kind, message = type(error).__name__, str(error)
    if not isinstance(error, RequestError):
        return WireError(kind, message)
    return WireError(kind, message, error.param, error.code, error.status)


def error_of(wire: WireError) -> SageError:
    """An error of the same class, if that is made of a message."""
    kind = getattr(errors, wire.kind, SageError)
    if not isinstance(kind, type) or not issubclass(kind, SageError):
        kind = SageError
    if issubclass(kind, RequestError):
        made = RequestError(wire.message, wire.param, wire.code)
        made.status = wire.status
        return made
    return (
        kind(wire.message)
        if kind.__init__ in (SageError.__init__, Exception.__init__)
        else SageError(wire.message)
    )
