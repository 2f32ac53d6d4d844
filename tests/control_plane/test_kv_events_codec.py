"""KV events on the wire: round trips, the bytes themselves, and readers that know nothing of us."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.control_plane.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventError,
    WireForm,
    decode_batch,
    encode_batch,
    from_wire,
    salt_digest,
    to_wire,
)
from sagellm.control_plane.kv_events.codec import UNKNOWN_POSITION, EventForm, HashForm, KVEvent
from sagellm.core.errors import ConfigError
from sagellm.core.events import BlocksRemoved, BlocksStored, IndexCleared
from sagellm.core.types import Namespace, Tokens

FIRST, SECOND = bytes(range(8)), bytes(range(8, 16))
STORED = BlocksStored(
    block_ids=(3, 4),
    num_tokens_before=0,
    hashes=(FIRST, SECOND),
    parent_hash=None,
    tokens=Tokens([1, 2, 70000, 4]).tobytes(),
    namespace=Namespace("acme", "model", "poet", "bfloat16"),
)
BELOW = BlocksStored((5,), 2, (b"\xff" * 8,), FIRST, Tokens([5, 6]).tobytes(), Namespace())
REMOVED = BlocksRemoved((4,), "capacity", (SECOND,), STORED.namespace)
EVENTS: list[KVEvent] = [STORED, BELOW, REMOVED, IndexCleared()]
FORMS: list[tuple[HashForm, EventForm]] = [
    ("bytes", "map"),
    ("bytes", "array"),
    ("int64", "map"),
    ("int64", "array"),
]

hashes = st.binary(min_size=32, max_size=32)
namespaces = st.builds(Namespace, *[st.text(max_size=5)] * 4)


@st.composite
def stored(draw: st.DrawFn, block_size: int = 4) -> BlocksStored:
    names = draw(st.lists(hashes, max_size=3))
    count = len(names) * block_size
    tokens = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=count, max_size=count))
    return BlocksStored(
        block_ids=tuple(range(len(names))),
        num_tokens_before=draw(st.integers(0, 100)),
        hashes=tuple(names),
        parent_hash=draw(st.none() | hashes),
        tokens=Tokens(tokens).tobytes(),
        namespace=draw(namespaces),
    )


removed = st.builds(
    BlocksRemoved,
    st.just((1,)),
    st.sampled_from(["capacity", "cleared", "ttl"]),
    st.lists(hashes).map(tuple),
    namespaces,
)
events = stored() | removed | st.just(IndexCleared())


def batch_of(happened: list[KVEvent], form: WireForm) -> bytes:
    wired = [to_wire(event, form) for event in happened]
    return encode_batch(KVEventBatch(1.5, wired, 0), form.event_form)


def expected(event: KVEvent, form: WireForm) -> KVEvent:
    """The event without what the wire does not carry."""
    cut = slice(None) if form.hash_form == "bytes" else slice(-8, None)
    named = form.event_form == "map"
    match event:
        case BlocksStored():
            tenant = salt_digest(event.namespace.tenant) if named else ""
            return BlocksStored(
                block_ids=(),
                num_tokens_before=0 if event.parent_hash is None else UNKNOWN_POSITION,
                hashes=tuple(h[cut] for h in event.hashes),
                parent_hash=event.parent_hash and event.parent_hash[cut],
                tokens=event.tokens,
                namespace=Namespace(tenant=tenant, adapter=event.namespace.adapter),
            )
        case BlocksRemoved():
            cause = event.cause if named else ""
            return BlocksRemoved((), cause, tuple(h[cut] for h in event.hashes), Namespace())
        case _:
            return event


@pytest.mark.parametrize(("hash_form", "event_form"), FORMS)
@settings(max_examples=40)
@given(happened=st.lists(events, max_size=4))
def test_round_trip(hash_form: HashForm, event_form: EventForm, happened: list[KVEvent]) -> None:
    form = WireForm(4, hash_form, event_form)
    back = decode_batch(batch_of(happened, form))
    assert (back.ts, back.data_parallel_rank) == (1.5, 0)
    assert [from_wire(event) for event in back.events] == [expected(event, form) for event in happened]


# Written down once from vLLM 0.33 (the second: from its arrays of before); a change here breaks routers.
GOLDEN_MAP = (
    "93cb3ff800000000000093"
    "de0008a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c408ffffffffffffffff"
    "b1706172656e745f626c6f636b5f68617368c4080001020304050607a9746f6b656e5f696473920506"
    "aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
    "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c40808090a0b0c0d0e0f"
    "a66d656469756da3475055a56361757365a86361706163697479"
    "81a474797065b0416c6c426c6f636b73436c656172656400"
)
GOLDEN_ARRAY = (
    "93cb3ff800000000000093"
    "98ab426c6f636b53746f72656491c408ffffffffffffffffc408000102030405060792050602c0a3475055c0"
    "93ac426c6f636b52656d6f76656491c40808090a0b0c0d0e0fa3475055"
    "91b0416c6c426c6f636b73436c656172656400"
)


@pytest.mark.parametrize(("event_form", "golden"), [("map", GOLDEN_MAP), ("array", GOLDEN_ARRAY)])
def test_the_bytes(event_form: EventForm, golden: str) -> None:
    form = WireForm(2, "bytes", event_form)
    assert batch_of([BELOW, REMOVED, IndexCleared()], form).hex() == golden


def test_numbers_are_the_last_eight_bytes() -> None:
    event = to_wire(
        BlocksRemoved((), "ttl", (bytes(24) + SECOND, b"\xff" * 32), Namespace()), WireForm(2, "int64")
    )
    assert event == BlockRemoved([0x08090A0B0C0D0E0F, 2**64 - 1], "GPU", cause="ttl")


def test_the_fields_of_a_stored_event() -> None:
    digest = salt_digest("acme")
    assert to_wire(STORED, WireForm(2)) == BlockStored(
        block_hashes=[FIRST, SECOND],
        parent_block_hash=None,
        token_ids=[1, 2, 70000, 4],
        block_size=2,
        medium="GPU",
        lora_name="poet",
        extra_keys=[("poet", digest), ("poet",)],
        cache_salt=digest,
    )


def test_a_tenant_is_never_in_clear_text() -> None:
    assert salt_digest("acme") == "salt:49ab64dc6093e14a51a1ea9ad2f1e8d4"
    assert salt_digest("") == ""
    for hash_form, event_form in FORMS:
        payload = batch_of(EVENTS, WireForm(2, hash_form, event_form))
        assert b"acme" not in payload
        assert salt_digest("acme").encode() in payload


# ------------------------------------------------------------------------------------------- other readers


class NewEvent(msgspec.Struct, tag=True):
    """As a reader of vLLM's maps declares them; strict about what vLLM always writes."""


class NewStored(NewEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class NewRemoved(NewEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class NewCleared(NewEvent, tag="AllBlocksCleared"):
    pass


class NewBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[NewStored | NewRemoved | NewCleared]
    data_parallel_rank: int | None = None


class OldEvent(msgspec.Struct, tag=True, array_like=True):
    """As a reader of 2025 declares them, numbers for hashes and fields by position."""


class OldStored(OldEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class OldRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[int]


class OldCleared(OldEvent, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OldStored | OldRemoved | OldCleared]


def test_a_reader_of_maps_passes_over_our_fields() -> None:
    payload = batch_of(EVENTS, WireForm(2))
    whole, below, gone, cleared = msgspec.msgpack.decode(payload, type=NewBatch).events
    digest = salt_digest("acme")
    assert whole == NewStored(
        [FIRST, SECOND], None, [1, 2, 70000, 4], 2, None, "GPU", "poet", [("poet", digest), ("poet",)]
    )
    assert below == NewStored([b"\xff" * 8], FIRST, [5, 6], 2, None, "GPU", None)
    assert gone == NewRemoved([SECOND], "GPU")
    assert cleared == NewCleared()


def test_a_reader_of_arrays() -> None:
    payload = batch_of(EVENTS, WireForm(2, "int64", "array"))
    batch = msgspec.msgpack.decode(payload, type=OldBatch)
    first, second = int.from_bytes(FIRST, "big"), int.from_bytes(SECOND, "big")
    assert batch.events == [
        OldStored([first, second], None, [1, 2, 70000, 4], 2, None),
        OldStored([2**64 - 1], first, [5, 6], 2, None),
        OldRemoved([second]),
        OldCleared(),
    ]


# ------------------------------------------------------------------------------------------ what we accept


def pack(*happened: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, list(happened), 0])


def test_fields_of_a_later_time_are_passed_over() -> None:
    later = {"type": "BlockRemoved", "block_hashes": [1], "medium": None, "colour": "red"}
    assert decode_batch(pack(later, ["AllBlocksCleared", 1, 2])).events == [
        BlockRemoved([1]),
        AllBlocksCleared(),
    ]


def test_fields_that_other_engines_leave_out_may_be_missing() -> None:
    sparse = {
        "type": "BlockStored",
        "block_hashes": [-1],
        "parent_block_hash": None,
        "token_ids": [7],
        "block_size": 1,
    }
    event = decode_batch(pack(sparse)).events[0]
    assert event == BlockStored([-1], None, [7], 1)
    assert from_wire(event) == BlocksStored((), 0, (b"\xff" * 8,), None, Tokens([7]).tobytes(), Namespace())


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "not a batch of KV events .*truncated"),
        (b"\xc1", "not a batch of KV events .*malformed"),
        (msgspec.msgpack.encode({"ts": 1.0}), "Expected `array`, got `object`"),
        (msgspec.msgpack.encode([1.0]), "at least length 2"),
        (b"\x91" * 5000, "not a batch of KV events"),
        (pack(7), "event 0 of the batch: Expected `object`, got `int`"),
        (pack(["AllBlocksCleared"], []), "event 1 of the batch: .*begins with one of BlockStored.*got None"),
        (pack(["Nonsense"]), "got 'Nonsense'"),
        (pack({"type": "Nonsense"}), "Invalid value 'Nonsense'"),
        (pack({"block_hashes": []}), "missing required field `type`"),
        (pack({"type": "BlockStored"}), "missing required field `block_hashes`"),
        (pack({"type": "BlockRemoved", "block_hashes": ["x"]}), "got `str` - at `\\$.block_hashes"),
        (pack(["BlockRemoved", ["x"]]), "got `str` - at `\\$.block_hashes"),
        (pack({"type": "AllBlocksCleared"}).replace(b"Cleared", b"Clear\xe9d"), "event 0 .*'utf-8' codec"),
        (pack(["BlockRemoved", [1], "GPU"]).replace(b"GPU", b"\xe9PU"), "event 0 .*'utf-8' codec"),
    ],
)
def test_a_malformed_payload_says_what_is_wrong(payload: bytes, says: str) -> None:
    with pytest.raises(KVEventError, match=says):
        decode_batch(payload)


@given(payload=st.binary(max_size=40) | st.binary(max_size=40).map(lambda tail: pack()[:10] + tail))
def test_noise_gives_a_batch_or_an_error(payload: bytes) -> None:
    with suppress(KVEventError):
        assert isinstance(decode_batch(payload), KVEventBatch)


def test_tokens_that_do_not_match_the_blocks() -> None:
    with pytest.raises(KVEventError, match="2 blocks of 4 tokens are 32 bytes of tokens, the event has 16"):
        to_wire(STORED, WireForm(4))


def test_a_token_that_is_no_int32() -> None:
    with pytest.raises(KVEventError, match="no int32"):
        from_wire(BlockStored([1], None, [2**31], 1))


def test_a_form_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'int64'"):
        WireForm(4, "int6")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"event_form 'xml' is unknown\. Known: array, map"):
        WireForm(4, "bytes", "xml")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="block_size must be at least 1"):
        WireForm(0)
