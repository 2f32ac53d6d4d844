"""The messages of a transfer, as bytes. Every field from the wire is checked for type and range.

Heads are JSON, but for chunks and their ACKs, which are structs. Nothing is unpickled. What is no message
raises `KVDataError`, after which the link is reset.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Self

from sagellm.core.errors import ConfigError, KVDataError, shown
from sagellm.core.protocols.kv_transfer import BlockLayout, TransferStatus

PROTOCOL = 4
MAX_HEAD_BYTES = 64 << 10
MAX_TOKENS = 1 << 24
MAX_REASON = 2000
_LARGEST = 1 << 62
_ENDS = {each.value for each in TransferStatus} - {TransferStatus.PENDING.value}
MAX_TOGETHER = 64
"""Chunks in one message."""
_CHUNKS, _ACK = struct.Struct("<QQI16s32s16s"), struct.Struct("<QQHH")


class Kind(IntEnum):
    """Which message a head is."""

    HELLO = 1
    REFUSED = 2
    OFFER = 3
    ACCEPT = 4
    CHUNK = 5
    ACK = 6
    CANCEL = 7
    END = 8
    ALIVE = 9


class ChunkHead(NamedTuple):
    """In front of the payloads of chunks that follow one another in the plan.

    `epoch`: of the arrival at the receiver; `number`: of the first chunk. `digest`, `token_hash` and `codec`
    are as in the `BlockHeader` of tiers; the hash is that of the last block that the chunks have bytes of, so
    it covers all of them. `checksums`: xxh3 of each chunk. Chunks in a codec come one by one.
    """

    transfer: int
    epoch: int
    number: int
    digest: bytes
    token_hash: bytes
    codec: str
    checksums: tuple[int, ...]

    @property
    def numbers(self) -> range:
        return range(self.number, self.number + len(self.checksums))

    def pack(self) -> bytes:
        fields = self.transfer, self.epoch, self.number, self.digest, self.token_hash, self.codec.encode()
        return _CHUNKS.pack(*fields) + struct.pack(f"<{len(self.checksums)}Q", *self.checksums)

    @classmethod
    def unpack(cls, head: bytes) -> Self:
        count, rest = divmod(len(head) - _CHUNKS.size, 8)
        if rest or not 1 <= count <= MAX_TOGETHER:
            raise KVDataError(f"{len(head)} bytes are no head of 1 to {MAX_TOGETHER} chunks")
        transfer, epoch, number, digest, token_hash, codec = _CHUNKS.unpack_from(head)
        name = codec.rstrip(b"\0").decode("ascii", "replace")
        checksums = struct.unpack_from(f"<{count}Q", head, _CHUNKS.size)
        return cls(transfer, epoch, number, digest, token_hash, name, checksums)


class Ack(NamedTuple):
    """Chunks that are verified and in their blocks, and those that are not. Returns their credits."""

    transfer: int
    epoch: int
    good: tuple[int, ...]
    damaged: tuple[int, ...] = ()

    def pack(self) -> bytes:
        numbers = self.good + self.damaged
        head = _ACK.pack(self.transfer, self.epoch, len(self.good), len(self.damaged))
        return head + struct.pack(f"<{len(numbers)}I", *numbers)

    @classmethod
    def unpack(cls, head: bytes) -> Self:
        if len(head) < _ACK.size:
            raise KVDataError(f"an ACK has at least {_ACK.size} bytes, not {len(head)}")
        transfer, epoch, num_good, num_damaged = _ACK.unpack_from(head)
        if len(head) != _ACK.size + 4 * (num_good + num_damaged):
            raise KVDataError(f"an ACK of {num_good} and {num_damaged} chunks with {len(head)} bytes")
        numbers = struct.unpack_from(f"<{num_good + num_damaged}I", head, _ACK.size)
        return cls(transfer, epoch, numbers[:num_good], numbers[num_good:])


@dataclass(frozen=True, slots=True)
class _Json:
    """A message whose head is JSON, of at most `MAX_HEAD_BYTES`.

    Strings have at most `limits[name]` characters, integers are not negative.
    """

    limits: ClassVar[Mapping[str, int]] = {}
    kind: ClassVar[Kind]

    def pack(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, head: bytes) -> Self:
        if len(head) > MAX_HEAD_BYTES:
            raise KVDataError(f"{cls.__name__}: {len(head)} bytes, at most {MAX_HEAD_BYTES}")
        try:
            found = json.loads(head)
        except (ValueError, RecursionError) as error:
            raise KVDataError(f"{cls.__name__}: no JSON: {error}") from None
        if not isinstance(found, dict) or found.keys() != {each.name for each in fields(cls)}:
            names = sorted(found) if isinstance(found, dict) else found
            raise KVDataError(
                f"{cls.__name__}: other fields than expected: {shown(names)}; "
                "run the same version on both sides"
            )
        for each in fields(cls):
            found[each.name] = cls._checked(each.name, str(each.type), found[each.name])
        return cls(**found)

    @classmethod
    def _checked(cls, name: str, kind: str, value: Any) -> Any:
        most = cls.limits.get(name, _LARGEST if kind == "int" else 64)
        if kind.startswith("tuple"):
            count = kind.count("str")
            fits = (
                isinstance(value, list)
                and len(value) == count
                and all(_is_text(part, most) for part in value)
            )
            value = tuple(value) if fits else value
        elif kind == "bool":
            fits = isinstance(value, bool)
        elif kind == "int":
            fits = type(value) is int and 0 <= value <= most
        else:
            fits = _is_text(value, most)
        if not fits:
            size = "" if kind == "bool" else f" of at most {most}"
            raise KVDataError(f"{cls.__name__}: {name} is {shown(value)}; {kind}{size} fits")
        return value


def reason_of(text: str) -> str:
    """As much of a text as the reason of a message holds."""
    return text[:MAX_REASON].encode("utf-8", "replace").decode()


def _is_text(value: Any, most: int) -> bool:
    """Whether it is a text of at most `most` letters, which UTF-8 can encode."""
    if not isinstance(value, str) or len(value) > most:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


@dataclass(frozen=True, slots=True)
class Hello(_Json):
    """What an instance has: sent by both sides first. `axes` is empty where the layout has no conversion.

    `instance`: a random name for this run of it. `digest`: of the block format, in hexadecimal digits.
    `has_views`: parts of a block can be moved alone. `stall_ms`: it gives a silent link up after that.
    """

    kind = Kind.HELLO
    limits: ClassVar[Mapping[str, int]] = {
        "node": 256,
        "fingerprint": 256,
        "codec": 16,
        "chunk_bytes": 1 << 30,
        "bytes_per_block": 1 << 34,
    }
    protocol: int
    node: str
    fingerprint: str
    digest: str
    bytes_per_block: int
    has_views: bool
    codec: str
    chunk_bytes: int
    axes: str
    num_layers: int
    total_heads: int
    head_dim: int
    block_size: int
    dtype: str
    first_head: int
    num_heads: int
    instance: str
    stall_ms: int

    @property
    def layout(self) -> BlockLayout | None:
        """Raises `KVDataError` where the fields make none."""
        if not self.axes:
            return None
        try:
            made = BlockLayout(
                self.axes, self.num_layers, self.total_heads, self.head_dim, self.block_size, self.dtype,
                self.first_head, self.num_heads,
            )  # fmt: skip
        except ConfigError as error:
            raise KVDataError(f"Hello: {error}") from error
        if made.bytes_per_block != self.bytes_per_block:
            raise KVDataError(f"Hello: a block of {made} has not {self.bytes_per_block} bytes")
        return made


@dataclass(frozen=True, slots=True)
class Refusal(_Json):
    """The models or layouts of two instances differ, and why. Ends all transfers between them."""

    kind = Kind.REFUSED
    limits: ClassVar[Mapping[str, int]] = {"reason": MAX_REASON}
    reason: str


@dataclass(frozen=True, slots=True)
class Offer(_Json):
    """A path to send. The payload: its tokens as little-endian int32, then the note.

    `attempt` counts the offers of this transfer. `oldest`: the sender will not offer transfers with smaller
    numbers again.
    """

    kind = Kind.OFFER
    limits: ClassVar[Mapping[str, int]] = {
        "request_id": 512,
        "namespace": 4096,
        "account": 4096,
        "num_tokens": MAX_TOKENS,
    }
    transfer: int
    attempt: int
    request_id: str
    namespace: tuple[str, str, str, str]
    account: tuple[str, str]
    num_tokens: int
    num_blocks: int
    by_layer: bool
    oldest: int


@dataclass(frozen=True, slots=True)
class Accept(_Json):
    """The target takes blocks from `first` on, `credits` chunks at a time. `attempt`: of the offer."""

    kind = Kind.ACCEPT
    transfer: int
    attempt: int
    epoch: int
    first: int
    credits: int


@dataclass(frozen=True, slots=True)
class Cancel(_Json):
    """The sender sends no more of it."""

    kind = Kind.CANCEL
    transfer: int


@dataclass(frozen=True, slots=True)
class Alive(_Json):
    """A sign of life: the transfer waits for layers, room or other ranks here."""

    kind = Kind.ALIVE
    transfer: int


@dataclass(frozen=True, slots=True)
class End(_Json):
    """The target has ended a transfer, and has the first `num_tokens` tokens now."""

    kind = Kind.END
    limits: ClassVar[Mapping[str, int]] = {"reason": MAX_REASON}
    transfer: int
    num_tokens: int
    status: str
    reason: str

    @property
    def outcome(self) -> TransferStatus:
        if self.status not in _ENDS:
            raise KVDataError(f"End: status is {shown(self.status)}")
        return TransferStatus(self.status)
