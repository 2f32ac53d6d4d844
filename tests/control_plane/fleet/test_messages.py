"""Messages survive the wire, and bytes that are none raise one error."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.control_plane.fleet import messages
from sagellm.control_plane.fleet.messages import (
    CALLS,
    CallAnswer,
    FrontCall,
    MessageError,
    Outputs,
    Submit,
    WireOutput,
    arguments_of,
    changes_of,
    encode,
    error_of,
    from_front,
    from_instance,
    output_of,
    result_of,
    wire_error,
)
from sagellm.core.errors import CapacityError, ConfigError, ContextLengthError, RequestError, SageError
from sagellm.core.events import BlocksRemoved, BlocksStored, IndexCleared
from sagellm.core.kv_hints import KVHintAction, KVHintsEnvelope
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats
from sagellm.core.protocols.fleet import HandOver, HandOverPart
from sagellm.core.protocols.prefix_cache import MissCounts, PromptSpan, SpanState
from sagellm.core.types import (
    SLO,
    FinishReason,
    Namespace,
    Request,
    RequestOutput,
    Retention,
    SamplingParams,
    TokenLogprob,
    Tokens,
)


def test_a_request_arrives_as_it_was() -> None:
    hints = KVHintsEnvelope("0.1", "m", (KVHintAction("a", "kv.retain", payload={"x": 1}),))
    request = Request(
        "r", Tokens([1, 2, 3]),
        SamplingParams(0.5, logit_bias={3: 1.0}, stop=("a",), seed=7, logprobs=2, num_speculative_tokens=3),
        frozenset({4, 5}), 1.5, 3, Namespace("t", "m", "a", "d"), SLO(1.0, 0.1), "g", "class",
        (Retention(0, 2),), "s", hints, 9, ("c", "d"), True, True, True,
    )  # fmt: skip
    sent = Submit(request, HandOver(HandOverPart.DECODE, "p"))
    assert from_front(encode(sent)) == sent


def test_an_output_has_every_field() -> None:
    assert WireOutput.__struct_fields__ == RequestOutput._fields
    output = RequestOutput(
        "r", (1, 2), 3, 2, 4, (TokenLogprob(1, -0.5, ((2, -1.0),)),), FinishReason.STOP, "e",
        (TokenLogprob(1, -0.1),), 0.5, MissCounts(1, 2, 3), PromptSpan(0, 1, SpanState.UNKNOWN), 7,
    )  # fmt: skip
    received = from_instance(encode(Outputs((WireOutput(*output),))))
    assert isinstance(received, Outputs)
    assert output_of(received.outputs[0]) == output


def test_changes_keep_their_order() -> None:
    events: list[BlocksStored | BlocksRemoved | IndexCleared] = [
        BlocksStored((1,), 0, (b"h",), None, b"\1\0\0\0", Namespace("t")),
        BlocksRemoved((1,), "capacity", (b"h",), Namespace()),
        IndexCleared(),
    ]
    assert from_instance(encode(changes_of(events, is_complete=False))) == changes_of(
        events, is_complete=False
    )


@pytest.mark.parametrize(
    "error",
    [
        RequestError("text", "param", "code"),
        ContextLengthError(7, "the prompt has 9", "prompt"),
        ConfigError("text"),
        CapacityError("text", "r", 3),
        SageError("text"),
        ValueError("text"),
    ],
)
def test_errors_keep_what_a_client_sees(error: Exception) -> None:
    received = error_of(wire_error(error))
    assert str(received) == str(error)
    assert isinstance(received, SageError)
    if isinstance(error, RequestError):
        assert isinstance(received, RequestError)
        assert (received.param, received.code, received.status) == (error.param, error.code, error.status)
    if type(error) is ConfigError:
        assert type(received) is ConfigError


def test_each_call_is_read_by_its_types() -> None:
    call = FrontCall(1, "pin", encode((Tokens([1]), Namespace("t"))))
    assert arguments_of(call) == (Tokens([1]), Namespace("t"))
    with pytest.raises(MessageError):
        arguments_of(FrontCall(1, "pin", encode((1, 2))))
    with pytest.raises(MessageError, match="clear_cache"):
        arguments_of(FrontCall(1, "clear_cash", b""))
    for name, result in (("stats", EngineStats(1, 2, 3, 4, 5)), ("diagnostics", EngineDiagnostics())):
        answer = from_instance(encode(CallAnswer(1, encode(result))))
        assert isinstance(answer, CallAnswer)
        assert encode(result_of(name, answer.result)) == encode(result)
    assert set(CALLS) == set(messages._ARGUMENTS)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for read in (from_front, from_instance):
        with contextlib.suppress(MessageError):
            read(data)
