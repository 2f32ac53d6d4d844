"""`RemoteStore`: KV blocks that several instances share, over the Redis protocol.

Keys are `sagellm:{format digest}:{token hash}` in hexadecimal digits, so other weights, dtypes and layouts
never meet. A value is what a disk holds: a `BlockHeader` and the encoded block. Every block is verified when
it is read.

For production use Valkey (or Redis from 6.2 on) on a network that only the instances reach, over TLS and with
a password: the checksum finds damage, not a writer that means harm. What bounds the memory of the server is
its own `maxmemory` with `maxmemory-policy allkeys-lru`. Each instance bounds what it puts, by rate and by
bytes in the time that a block stays. A cluster is not supported: one call asks for keys of several nodes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import xxhash

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError, ConfigError, KVDataError
from sagellm.core.protocols.kv_tiers import (
    FORMAT_VERSION,
    HEADER_BYTES,
    BlockFormat,
    BlockHeader,
    Buffer,
    KVCodec,
    ReadOutcome,
    StoredBlock,
)
from sagellm.kvmgr.kv_pool.tiers.circuit_breaker import ByteBudget, CircuitBreaker
from sagellm.kvmgr.kv_pool.tiers.redis_link import (
    Command,
    Execute,
    RedisAddress,
    RedisLink,
    import_redis,
)

T = TypeVar("T")
RAW = "raw"
"""The codec of blocks that are stored as they are."""
CHUNK_BYTES = 1 << 20
"""Of blocks in a round trip; a larger block travels alone."""
CHUNK_KEYS = 1000
"""Keys in a round trip that moves no values."""
_KEPT = (ReadOutcome.OK, ReadOutcome.ABSENT, ReadOutcome.UNKNOWN_CODEC)
"""What stays in the store. All else under our keys is damaged, and would be in the way of a good block."""


class PutOutcome(Enum):
    """What became of putting a block. All but the first two leave the store without it."""

    STORED = "stored"
    PRESENT = "present"
    """It was there, from any instance, and stays for another `ttl_s`."""
    OVER_BUDGET = "over_budget"
    REFUSED = "refused"
    """The server answered with an error, such as that its memory is full."""
    IO_ERROR = "io_error"


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Settings of a remote store. `url`: see `redis_link.FORMS`; it is not part of the `repr`.

    A call takes at most `call_timeout_s`, and a second more for each `min_bytes_per_s` that it moves. After
    `max_failures` failed calls in a row, none is made for `first_backoff_s`; then one is tried, and the pause
    doubles up to `max_backoff_s`. A block that is not used for `ttl_s` goes.

    Raises `ConfigError` for a wrong URL, and `MissingExtraError` without the package `redis`.
    """

    url: str = field(repr=False)
    ttl_s: float = 86_400.0
    call_timeout_s: float = 1.0
    connect_timeout_s: float = 0.5
    min_bytes_per_s: float = 50e6
    max_failures: int = 3
    first_backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    max_put_bytes: int = 64 << 30
    """Bytes that this instance puts in any `ttl_s`: its share of the server's memory."""
    max_put_bytes_per_s: int = 250_000_000

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name != "url" and value <= 0:
                raise ConfigError(f"remote KV store: {option.name} must be above 0, not {value}")
        if self.max_backoff_s < self.first_backoff_s:
            raise ConfigError("remote KV store: max_backoff_s must be at least first_backoff_s")
        RedisAddress.parse(self.url)
        import_redis()


class RemoteStore:
    """Blocks of one format on a server. Worker threads call it, several at a time.

    No trouble of the server or the network raises: it is a miss, and after a few failures the server is left
    alone for a while (`CircuitBreaker`). Blocks are written with `codec`, where that makes them smaller, and
    read if they are in it or in none. `clock` is that of pauses and budgets; limits of calls are real time.

    `num_reads` and `num_puts` count blocks by outcome, `num_deleted` those that did not verify. The
    constructor does not connect.
    """

    def __init__(
        self,
        options: RemoteOptions,
        block_format: BlockFormat,
        codec: KVCodec | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or MonotonicClock()
        stored_bytes = HEADER_BYTES + block_format.bytes_per_block
        if options.max_put_bytes < stored_bytes:
            raise ConfigError(f"remote KV store: max_put_bytes is less than a block, {stored_bytes} bytes")
        self.num_reads: Counter[ReadOutcome] = Counter()
        self.num_puts: Counter[PutOutcome] = Counter()
        self.num_deleted = 0
        self._options = options
        self._format = block_format
        self._codec = None if codec is None or codec.name == RAW else codec
        self._stored_bytes = stored_bytes
        self._ttl_ms = max(1, round(options.ttl_s * 1000))
        self._counting = threading.Lock()
        self._is_closed = False
        backoff = options.first_backoff_s, options.max_backoff_s
        breaker = CircuitBreaker("the remote KV store", clock, options.max_failures, *backoff)
        self._writes = CircuitBreaker("writing to the remote KV store", clock, 1, *backoff)
        self._link = RedisLink(RedisAddress.parse(options.url), breaker, options.connect_timeout_s)
        # The rate first: what it takes for a block that the other refuses comes back within a second.
        self._budgets = (
            ByteBudget(max(stored_bytes, options.max_put_bytes_per_s), 1.0, clock),
            ByteBudget(options.max_put_bytes, options.ttl_s, clock),
        )

    @property
    def call_timeout_s(self) -> float:
        return self._options.call_timeout_s

    @property
    def fault(self) -> str | None:
        """Why the server is not used now."""
        return self._link.breaker.fault

    @property
    def write_fault(self) -> str | None:
        """Why nothing is put now."""
        return self._writes.fault or self.fault

    @property
    def takes_blocks(self) -> bool:
        """Whether a `put` would be tried now, maybe as a probe."""
        return self._writes.is_due and self._link.breaker.is_due

    def contains(self, token_hashes: Sequence[bytes]) -> Sequence[bool] | None:
        """Which blocks the store holds; they are not read. None if the server did not answer."""
        found: list[bool] = []
        try:
            with self._call(0) as execute:
                for chunk in _chunks(token_hashes, CHUNK_KEYS):
                    found += map(_as_flag, execute([("EXISTS", self._key(each)) for each in chunk]))
        except ConnectionError:  # the breaker has it
            return None
        return found

    def get(self, token_hashes: Sequence[bytes], target: memoryview) -> Sequence[ReadOutcome]:
        """Fill `target`, one block behind the other, with blocks that verify.

        The bytes of one that is not OK mean nothing. A block that was read stays for another `ttl_s`. What is
        damaged is deleted.
        """
        size, places = self._format.bytes_per_block, _bytes_of(target)
        _check_length(len(places), len(token_hashes) * size)
        outcomes = [ReadOutcome.IO_ERROR] * len(token_hashes)
        with suppress(ConnectionError), self._call(len(places)) as execute:  # the breaker has it
            for chunk in _chunks(range(len(token_hashes)), CHUNK_BYTES // self._format.bytes_per_block):
                for i, value in zip(
                    chunk, self._read(execute, [token_hashes[i] for i in chunk]), strict=True
                ):
                    outcomes[i] = self._verify(value, token_hashes[i], places[i * size : (i + 1) * size])
                damaged = [token_hashes[i] for i in chunk if outcomes[i] not in _KEPT]
                if damaged:
                    self._delete(execute, damaged)
        with self._counting:
            self.num_reads.update(outcomes)
        return outcomes

    def put(self, blocks: Sequence[StoredBlock], data: Buffer) -> Sequence[PutOutcome]:
        """Store blocks that are not there yet. `data` has `len(blocks)` x bytes_per_block bytes.

        Their slots mean nothing here. Blocks that are there are not sent. One whose codec this instance
        cannot read counts as present.
        """
        size, source = self._format.bytes_per_block, _bytes_of(data)
        _check_length(len(source), len(blocks) * size)
        outcomes = [PutOutcome.IO_ERROR] * len(blocks)
        if not self._writes.allows():
            outcomes = [PutOutcome.REFUSED] * len(blocks)
        else:
            hashes = [block.token_hash for block in blocks]
            with suppress(ConnectionError), self._call(len(source)) as execute:  # the breaker has it
                self._put(execute, hashes, source, outcomes)
                if self._writes.fault and PutOutcome.REFUSED not in outcomes:
                    self._probe_write(execute)
        with self._counting:
            self.num_puts.update(outcomes)
        return outcomes

    def close(self) -> None:
        """Close the connections. Calls from now on are misses."""
        self._is_closed = True
        self._link.close()

    def check(self) -> None:
        """Raise `BookkeepingError` where breakers, budgets or counters are in a state they cannot have."""
        for part in (self._link.breaker, self._writes, *self._budgets):
            part.check()
        with self._counting:
            damaged = sum(count for outcome, count in self.num_reads.items() if outcome not in _KEPT)
            if self.num_deleted > damaged:
                raise BookkeepingError(f"{self.num_deleted} blocks deleted, {damaged} damaged")

    def _call(self, num_bytes: int) -> AbstractContextManager[Execute]:
        if self._is_closed:
            raise ConnectionError("the remote KV store is closed")
        return self._link.call(self._options.call_timeout_s + num_bytes / self._options.min_bytes_per_s)

    def _key(self, token_hash: bytes) -> str:
        return f"sagellm:{self._format.digest.hex()}:{token_hash.hex()}"

    # -- reading

    def _read(self, execute: Execute, token_hashes: Sequence[bytes]) -> list[Any]:
        keys = [self._key(token_hash) for token_hash in token_hashes]
        commands: list[Command] = [("MGET", *keys)]
        commands += [("PEXPIRE", key, self._ttl_ms) for key in keys]
        values = execute(commands)[0]
        if not isinstance(values, list) or len(values) != len(keys):
            raise _unexpected(values)
        return values

    def _verify(self, value: Any, token_hash: bytes, place: memoryview) -> ReadOutcome:
        """Compare version, format, tokens and checksum; bring the block to its place."""
        if value is None:
            return ReadOutcome.ABSENT
        if not isinstance(value, bytes):
            return ReadOutcome.CORRUPT
        try:
            header = BlockHeader.unpack(value)
        except KVDataError:
            return ReadOutcome.CORRUPT
        payload = memoryview(value)[HEADER_BYTES:]
        if header.version != FORMAT_VERSION:
            return ReadOutcome.OTHER_VERSION
        if header.format_digest != self._format.digest:
            return ReadOutcome.OTHER_FORMAT
        if header.token_hash != token_hash:
            return ReadOutcome.OTHER_TOKENS
        if len(payload) != header.num_bytes or xxhash.xxh3_64_intdigest(payload) != header.checksum:
            return ReadOutcome.CORRUPT
        return self._decode(header.codec, payload, place)

    def _decode(self, codec: str, payload: memoryview, place: memoryview) -> ReadOutcome:
        if codec == RAW:
            if len(payload) != len(place):
                return ReadOutcome.CORRUPT
            # A slice of a memoryview would be copied under the interpreter's lock.
            np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(payload, np.uint8))
            return ReadOutcome.OK
        if self._codec is None or self._codec.name != codec:
            return ReadOutcome.UNKNOWN_CODEC
        try:
            self._codec.decode(payload, place)
        except KVDataError:
            return ReadOutcome.CORRUPT
        return ReadOutcome.OK

    def _delete(self, execute: Execute, token_hashes: Sequence[bytes]) -> None:
        [num_deleted] = execute([("DEL", *(self._key(token_hash) for token_hash in token_hashes))])
        with self._counting:
            self.num_deleted += num_deleted if isinstance(num_deleted, int) else 0

    # -- writing

    def _put(
        self, execute: Execute, token_hashes: Sequence[bytes], source: memoryview, outcomes: list[PutOutcome]
    ) -> None:
        """Set each outcome as soon as it is known: a later chunk may fail."""
        absent = []
        for chunk in _chunks(range(len(token_hashes)), CHUNK_KEYS):
            commands: list[Command] = [("PEXPIRE", self._key(token_hashes[i]), self._ttl_ms) for i in chunk]
            for i, reply in zip(chunk, execute(commands), strict=True):
                if _as_flag(reply):
                    outcomes[i] = PutOutcome.PRESENT
                else:
                    absent.append(i)
        size = self._format.bytes_per_block
        for chunk in _chunks(absent, CHUNK_BYTES // self._format.bytes_per_block):
            commands = []
            for i in chunk:
                value = self._encode(token_hashes[i], source[i * size : (i + 1) * size])
                if not all(budget.take(len(value)) for budget in self._budgets):
                    break
                commands.append(("SET", self._key(token_hashes[i]), value, "NX", "PX", self._ttl_ms))
            if commands:
                replies = execute(commands)
                for i, reply in zip(chunk, replies, strict=False):
                    outcomes[i] = self._outcome(reply)
                self._note_writes(replies)
            if len(commands) < len(chunk):
                for i in absent[absent.index(chunk[len(commands)]) :]:
                    outcomes[i] = PutOutcome.OVER_BUDGET
                return

    def _encode(self, token_hash: bytes, block: memoryview) -> bytes:
        codec, payload = RAW, block
        if self._codec is not None:
            encoded = memoryview(self._codec.encode(block))
            if len(encoded) < len(block):
                codec, payload = self._codec.name, encoded
        checksum = xxhash.xxh3_64_intdigest(payload)
        header = BlockHeader(self._format.digest, token_hash, codec, len(payload), checksum)
        return b"".join((header.pack(), payload))

    def _probe_write(self, execute: Execute) -> None:
        """Find out whether writes work again, by an empty value that goes at once.

        For a put that was let through as a probe, and had no block to send.
        """
        self._note_writes(execute([("SET", self._key(b""), b"", "PX", 1)]))

    def _outcome(self, reply: Any) -> PutOutcome:
        if self._link.is_refusal(reply):
            return PutOutcome.REFUSED
        # The server answers with nil where another instance was faster.
        return PutOutcome.STORED if reply else PutOutcome.PRESENT

    def _note_writes(self, replies: Sequence[Any]) -> None:
        refusal = next((reply for reply in replies if self._link.is_refusal(reply)), None)
        if refusal is None:
            self._writes.worked()
        else:
            self._writes.failed(f"{self._link.address.shown}: {refusal}")


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    size = max(1, size)
    return (items[at : at + size] for at in range(0, len(items), size))


def _bytes_of(data: Buffer) -> memoryview:
    return memoryview(data).cast("B")


def _check_length(num_bytes: int, expected: int) -> None:
    if num_bytes != expected:
        raise BookkeepingError(f"{num_bytes} bytes of memory for blocks of {expected} bytes")


def _as_flag(reply: Any) -> bool:
    """A reply of 0 or 1. Raises `ConnectionError` for errors of the server, and what is no reply."""
    if isinstance(reply, int):
        return bool(reply)
    raise _unexpected(reply)


def _unexpected(reply: Any) -> ConnectionError:
    return ConnectionError(
        f"the server answers {str(reply) if isinstance(reply, Exception) else type(reply)}"
    )
