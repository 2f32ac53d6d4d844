"""What comes from the wire: every field is checked, and nothing damaged is taken for a message."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.comm.kv_transfer.messages import (
    MAX_TOGETHER,
    Accept,
    Ack,
    Alive,
    Cancel,
    ChunkHead,
    End,
    Hello,
    Offer,
    Refusal,
)
from sagellm.comm.kv_transfer.transports._connection import (
    MAX_MESSAGE_BYTES,
    PREFIX,
    SMALL,
    frame,
    parse,
    verify,
)
from sagellm.core.errors import KVDataError
from tests.comm.kv_transfer.test_layouts import HELLO

MESSAGES: list[Any] = [
    HELLO,
    Refusal("why"),
    Offer(1, 2, "r", ("a", "b", "c", "d"), ("t", "s"), 9, 2, False, 1),
    Accept(1, 2, 3, 4, 5),
    Ack(1, 2, (3, 4), (5,)),
    Cancel(1),
    Alive(1),
    End(1, 2, "done", ""),
    ChunkHead(1, 2, 3, b"f" * 16, b"t" * 32, "raw", (4, 5)),
]
JSON = [message for message in MESSAGES if not isinstance(message, (Ack, ChunkHead))]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back(message: Any) -> None:
    assert type(message).unpack(message.pack()) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@given(data=st.data())
def test_arbitrary_bytes_are_no_message(message: Any, data: st.DataObject) -> None:
    head = data.draw(st.binary(max_size=300))
    try:
        type(message).unpack(head)
    except KVDataError:
        return
    assert isinstance(message, (Ack, ChunkHead)), "these are structs, and the frame has a checksum"


@pytest.mark.parametrize("message", JSON, ids=lambda message: type(message).__name__)
@given(data=st.data())
def test_wrong_fields_are_refused(message: Any, data: st.DataObject) -> None:
    found = asdict(message)
    name = data.draw(st.sampled_from([each.name for each in fields(message)]))
    found[name] = data.draw(anything)
    try:
        made = type(message).unpack(json.dumps(found).encode())
    except KVDataError:
        return
    value, before = getattr(made, name), getattr(message, name)
    assert type(value) is type(before)


@pytest.mark.parametrize("message", JSON, ids=lambda message: type(message).__name__)
def test_numbers_and_texts_have_limits(message: Any) -> None:
    for each in fields(message):
        for value in (1 << 63, -1, 1.5, True if str(each.type) == "int" else 7.5, "x" * 100_000):
            found = asdict(message) | {each.name: value}
            with pytest.raises(KVDataError):
                type(message).unpack(json.dumps(found).encode())
    for found in (asdict(message) | {"more": 1}, {}):
        with pytest.raises(KVDataError, match="other fields"):
            type(message).unpack(json.dumps(found).encode())


def test_deep_json_is_no_message() -> None:
    with pytest.raises(KVDataError):
        Cancel.unpack(b"[" * 60_000)


@pytest.mark.parametrize("status", ["pending", "unknown"])
def test_an_end_has_an_outcome(status: str) -> None:
    with pytest.raises(KVDataError, match="status"):
        _ = End(1, 2, status, "").outcome


def test_a_text_that_cannot_be_encoded_is_refused() -> None:
    found = asdict(HELLO) | {"node": "\ud800"}
    with pytest.raises(KVDataError, match="node"):
        Hello.unpack(json.dumps(found).encode())


def test_a_hello_with_an_impossible_layout() -> None:
    with pytest.raises(KVDataError, match="Hello"):
        _ = Hello(**{**asdict(HELLO), "num_heads": 9}).layout


@given(st.integers(0, 255), st.binary(max_size=60), st.binary(max_size=60), st.integers(0, 1 << 20))
def test_a_damaged_frame_is_found(kind: int, head: bytes, payload: bytes, place: int) -> None:
    data = bytearray(b"".join(frame(kind, head, [memoryview(payload)], SMALL)))
    assert taken(bytes(data)) == (kind, head, payload)
    data[place % len(data)] ^= 1 << place % 8
    with pytest.raises(KVDataError):
        taken(bytes(data))


def taken(data: bytes) -> tuple[int, bytes, bytes]:
    """A frame as a connection reads it, from complete bytes."""
    found = parse(data[: PREFIX.size], 1000)
    head, payload = data[PREFIX.size :][: found.head_bytes], data[PREFIX.size + found.head_bytes :]
    if len(head) + len(payload) != found.head_bytes + found.payload_bytes:
        raise KVDataError("sizes")
    verify(found, head, payload)
    return found.kind, head, payload


MOST = 1000 * MAX_TOGETHER


@pytest.mark.parametrize(
    ("flag", "head_bytes", "payload_bytes"),
    [
        (0, 1 << 17, 0),
        (0, 0, MAX_MESSAGE_BYTES + 1),
        (1, 0, MOST + 1),
        (2, 0, MOST + 1),
        (3, 0, MOST + 1),
        (4, 0, 0),
    ],
)
def test_sizes_are_compared_before_memory_is_taken(flag: int, head_bytes: int, payload_bytes: int) -> None:
    with pytest.raises(KVDataError):
        parse(PREFIX.pack(b"sKV1", 1, flag, 0, head_bytes, payload_bytes, 0), 1000)
