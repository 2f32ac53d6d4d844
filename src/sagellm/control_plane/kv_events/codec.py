"""Converts the event bus's KV events to vLLM's wire form and back.

A batch is a msgpack array `[ts, events, data_parallel_rank]`; an event is a map whose key `type` names it.
Until the middle of 2026 vLLM wrote events as arrays too, the name first and the fields by position: readers
of that time need `event_form="array"`. Both forms are read. Source of names, order and defaults:
`vllm/distributed/kv_events.py` of vLLM 0.33.

Two fields are ours: `BlockRemoved.cause`, why the blocks went, and `BlockStored.cache_salt` (SGLang's name).
They exist in maps alone, where a reader ignores unknown keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from sagellm.core.blocks import Tier
from sagellm.core.errors import ConfigError, SageError, nearest
from sagellm.core.events import BlocksRemoved, BlocksStored, IndexCleared
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens

MEDIA = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.NVME: "DISK", Tier.REMOTE: "EXTERNAL"}
"""The wire's `medium`: the words of vLLM, and of SGLang where vLLM has none."""
_TIERS = {medium: tier for tier, medium in MEDIA.items()}
_TIERS |= {"CPU_PINNED": Tier.DRAM, "STORAGE": Tier.NVME}  # SGLang's, vLLM's

UNKNOWN_POSITION = -1
"""`BlocksStored.num_tokens_before` of an event from the wire that does not begin a prompt."""

HashForm = Literal["bytes", "int64"]
EventForm = Literal["map", "array"]
BlockHash: TypeAlias = bytes | int
KVEvent = BlocksStored | BlocksRemoved | IndexCleared

_INT64_BYTES = 8
_INT64_MASK = (1 << 64) - 1
_SALT_BYTES = 16


class KVEventError(SageError):
    """Bytes that are no batch of KV events, or an unencodable event.

    The message says where."""


@dataclass(frozen=True, slots=True)
class WireForm:
    """How events are written. `block_size` is in tokens.

    `hash_form` "bytes" is the whole hash; "int64" its last 8 bytes as an unsigned big-endian number, which is
    what vLLM writes unless told otherwise and all that some routers read. `event_form` "array" is for readers
    of before vLLM's maps. Raises `ConfigError` for a value that is none of these.
    """

    block_size: int
    hash_form: HashForm = "bytes"
    event_form: EventForm = "map"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        _one_of("hash_form", self.hash_form, get_args(HashForm))
        _one_of("event_form", self.event_form, get_args(EventForm))


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is unknown.{nearest(value, choices)}")


# ------------------------------------------------------------------------------------------ wire structs


def _null() -> None:
    """A default unknown to msgspec: the field may be missing but is always written."""


class _WireEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The fields of an event in vLLM's order.

    Fields after `lora_name` or `medium` are left out where they are None."""


class BlockStored(_WireEvent):
    """Consecutive blocks below `parent_block_hash`; `token_ids` are those of all the blocks, in order."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = msgspec.field(default_factory=_null)
    medium: str | None = msgspec.field(default_factory=_null)
    lora_name: str | None = msgspec.field(default_factory=_null)
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None


class BlockRemoved(_WireEvent):
    """Blocks that are gone from `medium`."""

    block_hashes: list[BlockHash]
    medium: str | None = msgspec.field(default_factory=_null)
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    cause: str | None = None


class AllBlocksCleared(_WireEvent):
    """No block is left."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one engine step changed; `ts` is seconds since the epoch."""

    ts: float
    events: list[WireEvent]
    data_parallel_rank: int | None = None


# ------------------------------------------------------------------------------------ from and to the bus


def salt_digest(tenant: str) -> str:
    """The wire form of a tenant's name or cache salt; empty without one.

    The name cannot be read from it, but a reader that guesses the name can confirm the guess."""
    if not tenant:
        return ""
    data = tenant.encode("utf-8", "surrogatepass")
    return "salt:" + blake2b(data, digest_size=_SALT_BYTES, person=b"sagellm-salt").hexdigest()


def to_wire(event: KVEvent, form: WireForm) -> WireEvent:
    """The wire's word for an event of the bus. Raises `KVEventError` where tokens and blocks do not match.

    Of the namespace, the adapter becomes `lora_name`, and the tenant its `salt_digest`, both in `cache_salt`
    and, where a prompt begins, in `extra_keys` as vLLM has it. Model and dtype are one per publisher.
    """
    match event:
        case BlocksStored():
            return _stored(event, form)
        case BlocksRemoved():
            return BlockRemoved(_hashes(event.hashes, form), MEDIA[event.tier], cause=event.cause)
        case IndexCleared():
            return AllBlocksCleared()


def _stored(event: BlocksStored, form: WireForm) -> BlockStored:
    expected = len(event.hashes) * form.block_size * TOKEN_BYTES
    if len(event.tokens) != expected:
        raise KVEventError(
            f"{len(event.hashes)} blocks of {form.block_size} tokens are {expected} bytes of tokens, the "
            f"event has {len(event.tokens)}: the publisher's block_size must be the engine's"
        )
    parent = event.parent_hash
    return BlockStored(
        block_hashes=_hashes(event.hashes, form),
        parent_block_hash=None if parent is None else _hash(parent, form),
        token_ids=Tokens.frombytes(event.tokens).tolist(),
        block_size=form.block_size,
        medium=MEDIA[event.tier],
        lora_name=event.namespace.adapter or None,
        extra_keys=_extra_keys(event),
        cache_salt=salt_digest(event.namespace.tenant) or None,
    )


def _extra_keys(event: BlocksStored) -> list[tuple[Any, ...] | None] | None:
    """What the hashes cover besides tokens, block by block.

    The adapter in each block, the salt in a prompt's first."""
    adapter = (event.namespace.adapter,) if event.namespace.adapter else ()
    digest = salt_digest(event.namespace.tenant) if event.parent_hash is None else ""
    first = (*adapter, digest) if digest else adapter
    keys = [first or None, *[adapter or None] * (len(event.hashes) - 1)]
    return keys if event.hashes and any(keys) else None


def _hashes(hashes: tuple[bytes, ...], form: WireForm) -> list[BlockHash]:
    return [_hash(block_hash, form) for block_hash in hashes]


def _hash(block_hash: bytes, form: WireForm) -> BlockHash:
    return block_hash if form.hash_form == "bytes" else int.from_bytes(block_hash[-_INT64_BYTES:], "big")


def from_wire(event: WireEvent) -> KVEvent:
    """An event of the bus for one of the wire. Raises `KVEventError` for a token that is no int32.

    What the wire does not carry is left empty: block ids, model, dtype, and `num_tokens_before` of blocks
    that do not begin a prompt (`UNKNOWN_POSITION`). The tenant is its digest. A number for a hash gives the 8
    bytes that it was cut to.
    """
    match event:
        case BlockStored():
            return _stored_on_bus(event)
        case BlockRemoved():
            hashes = tuple(_hash_bytes(block_hash) for block_hash in event.block_hashes)
            return BlocksRemoved((), event.cause or "", hashes, Namespace(), tier_of(event.medium))
        case AllBlocksCleared():
            return IndexCleared()


def _stored_on_bus(event: BlockStored) -> BlocksStored:
    try:
        tokens = array("i", event.token_ids).tobytes()
    except OverflowError as error:
        raise KVEventError(f"a token id of the event is no int32: {error}") from error
    parent = event.parent_block_hash
    return BlocksStored(
        block_ids=(),
        num_tokens_before=0 if parent is None else UNKNOWN_POSITION,
        hashes=tuple(_hash_bytes(block_hash) for block_hash in event.block_hashes),
        parent_hash=None if parent is None else _hash_bytes(parent),
        tokens=tokens,
        namespace=Namespace(tenant=event.cache_salt or "", adapter=event.lora_name or ""),
        tier=tier_of(event.medium),
    )


def tier_of(medium: str | None) -> Tier:
    """The device without a medium; an unknown one is further away."""
    return _TIERS.get(medium, Tier.REMOTE) if medium else Tier.HBM


def _hash_bytes(block_hash: BlockHash) -> bytes:
    if isinstance(block_hash, bytes):
        return block_hash
    return (block_hash & _INT64_MASK).to_bytes(_INT64_BYTES, "big")


# ------------------------------------------------------------------------------------------------ msgpack


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch with undecoded events, so that an error can name the wrong one."""

    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_BATCHES = msgspec.msgpack.Decoder(_RawBatch)
_MAPS = msgspec.msgpack.Decoder(WireEvent)
_ROW_HEADS = frozenset(range(0x90, 0xA0)) | {0xDC, 0xDD}
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
"""What msgspec raises for bytes that it cannot decode; the last one for text that is no UTF-8."""
_KINDS: Mapping[str, type[WireEvent]] = {kind.__name__: kind for kind in get_args(WireEvent)}


def encode_batch(batch: KVEventBatch, event_form: EventForm = "map") -> bytes:
    """The msgpack bytes of a batch."""
    if event_form == "map":
        return msgspec.msgpack.encode(batch)
    return msgspec.msgpack.encode(
        [batch.ts, [_row(event) for event in batch.events], batch.data_parallel_rank]
    )


def _row(event: WireEvent) -> list[Any]:
    """An event by position, as far as every reader of arrays knows the positions."""
    match event:
        case BlockStored():
            row = ["BlockStored", event.block_hashes, event.parent_block_hash, event.token_ids]
            row += [event.block_size, event.lora_id, event.medium, event.lora_name]
            return [*row, event.extra_keys] if event.extra_keys else row
        case BlockRemoved():
            return ["BlockRemoved", event.block_hashes, event.medium]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


def decode_batch(payload: bytes) -> KVEventBatch:
    """Decode a batch whose events are maps or arrays.

    Raises `KVEventError` naming the wrong event and why; unknown fields are ignored."""
    try:
        batch = _BATCHES.decode(payload)
    except _UNREADABLE as error:
        raise KVEventError(f"not a batch of KV events [ts, events, rank]: {error}") from error
    events = [_decode_event(bytes(raw), index) for index, raw in enumerate(batch.events)]
    return KVEventBatch(batch.ts, events, batch.data_parallel_rank)


def _decode_event(raw: bytes, index: int) -> WireEvent:
    try:
        return _decode_row(raw) if raw[0] in _ROW_HEADS else _MAPS.decode(raw)
    except _UNREADABLE as error:
        raise KVEventError(f"event {index} of the batch: {error}") from error


def _decode_row(raw: bytes) -> WireEvent:
    tag, *values = msgspec.msgpack.decode(raw) or [None]
    kind = _KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise msgspec.ValidationError(f"an array begins with one of {', '.join(_KINDS)}, got {tag!r}")
    fields = dict(zip(kind.__struct_fields__, values, strict=False)) | {"type": tag}
    return msgspec.convert(fields, kind, builtin_types=[bytes])  # else it takes a string for base64
