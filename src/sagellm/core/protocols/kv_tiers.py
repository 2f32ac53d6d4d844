"""Contracts of KV tiers: block headers, codecs, storage, and the arrival of blocks.

A tier (host memory, a disk) is a prefix index and a pool of slots, owned by the engine's thread, and a
`BlockStorage`, whose calls copy bytes on worker threads:

    tiers.offer(hit)                     saves a path; returns at once
    tiers.request(request_id, ...)       loads what the device lacks of a prompt; returns at once
    tiers.load_tail(request_id, ...)     loads its last blocks, while the request computes those before them
    for request_id in tiers.poll(): ...  requests that need not wait any more; never blocks

A stored block describes itself by a `BlockHeader`. What does not verify when it is read is a miss, counted by
its `ReadOutcome`; a request never uses it. Blocks that come back, from a tier or from another
instance, enter the device through `KVArrivals`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple, Protocol, Self, TypeAlias

from sagellm.core.blocks import Tier
from sagellm.core.errors import KVDataError
from sagellm.core.protocols.eviction import Hint, Use
from sagellm.core.protocols.kv_pool import Allocation
from sagellm.core.protocols.prefix_cache import EvictedPath, PrefixHit, SharedPrefix
from sagellm.core.types import Account, BlockIds, KVCacheSchema, Namespace, Tokens

Buffer: TypeAlias = bytes | bytearray | memoryview
MAGIC = b"sageKVb1"
FORMAT_VERSION = 1
HEADER_BYTES = 512
"""A header is padded to this size, so that what follows it is aligned for direct I/O."""
_FIELDS = struct.Struct("<8sHHIQQ16s32s16s")


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What makes the bytes of two blocks mean the same KV.

    `digest`: 16 bytes of all of it. `bytes_per_block`: of one block as the backend holds it, without codec.
    `details`: what the digest is of, by name, as far as it is known; for people.
    """

    digest: bytes
    bytes_per_block: int
    details: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, schema: KVCacheSchema, bytes_per_block: int) -> Self:
        """Weights, tokenizer, dtype, layout, shapes and block size of a model in an engine.

        Raises `KVDataError` for a schema without a fingerprint of its model.
        """
        if not schema.model_fingerprint:
            raise KVDataError(
                "this backend gives its model no fingerprint, so its KV cannot be told from others'"
            )
        text = repr((FORMAT_VERSION, bytes_per_block, schema)).encode()
        details = {each.name: str(getattr(schema, each.name)) for each in fields(schema)}
        return cls(blake2b(text, digest_size=16).digest(), bytes_per_block, details)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Stands before the stored bytes of a block.

    `token_hash`: the chained hash of the block's tokens, all before them, and the namespace (32 bytes, see
    `kvmgr/prefix_cache/fingerprint.py`). `num_bytes` and `checksum` (xxh3, 64 bits) are of the bytes as they
    are stored, behind the codec.
    """

    format_digest: bytes
    token_hash: bytes
    codec: str
    num_bytes: int
    checksum: int
    version: int = FORMAT_VERSION

    def pack(self) -> bytes:
        """`HEADER_BYTES` bytes, with a checksum of their own."""
        packed = _FIELDS.pack(
            MAGIC, self.version, HEADER_BYTES, 0, self.num_bytes, self.checksum,
            self.format_digest, self.token_hash, self.codec.encode().ljust(16, b"\0"),
        )  # fmt: skip
        return (packed + blake2b(packed, digest_size=16).digest()).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: Buffer) -> Self:
        """The header in the first bytes of `data`. Raises `KVDataError` for anything else."""
        packed = bytes(data[: _FIELDS.size])
        digest = bytes(data[_FIELDS.size : _FIELDS.size + 16])
        if len(packed) < _FIELDS.size or blake2b(packed, digest_size=16).digest() != digest:
            raise KVDataError("no block header, or a damaged one")
        magic, version, _, _, num_bytes, checksum, format_digest, token_hash, codec = _FIELDS.unpack(packed)
        if magic != MAGIC:
            raise KVDataError("no block header")
        name = codec.rstrip(b"\0").decode("ascii", "replace")
        return cls(format_digest, token_hash, name, num_bytes, checksum, version)


class ReadOutcome(Enum):
    """What became of reading a block. All but `OK` are misses, counted by name."""

    OK = "ok"
    ABSENT = "absent"
    """Nothing is stored there, or less than the header says."""
    OTHER_VERSION = "other_version"
    OTHER_FORMAT = "other_format"
    """Other weights, tokenizer, dtype, layout or block size."""
    OTHER_TOKENS = "other_tokens"
    CORRUPT = "corrupt"
    """Header or checksum do not agree with the bytes."""
    UNKNOWN_CODEC = "unknown_codec"
    IO_ERROR = "io_error"


class TierLookup(Enum):
    """What a tier knows of blocks. `RETRY`: it cannot say now; the same question may be answered later."""

    HIT = "hit"
    HIT_PENDING = "hit_pending"
    """Being written or fetched; they are there soon."""
    MISS = "miss"
    RETRY = "retry"
    SPLIT = "split"
    """The last blocks are best loaded while the request computes those before them."""


class KVCodec(Protocol):
    """How the bytes of blocks are stored. Stateless; called from worker threads.

    Made with `dtype`, and with `layout`: the `BlockLayout` of the blocks, None where they have none that can
    be named. A codec that needs one raises `ConfigError` without. `data` are blocks one behind the other.

    `name`: at most 16 ASCII characters, written into headers. `is_exact`: decoding gives back every bit; if
    not, `max_error` states the largest error relative to the largest number of a block.
    """

    name: str
    is_exact: bool
    max_error: float

    def encode(self, data: Buffer) -> Buffer: ...

    def decode(self, data: Buffer, target: memoryview) -> None:
        """Fill `target` with the block. Raises `KVDataError` if the bytes are no block of that size."""


class BlockBytes(Protocol):
    """The KV blocks of a backend as bytes. Worker threads copy them, beside the engine's steps.

    The caller makes sure that no step writes the blocks that are read, nor reads the blocks that are written.
    A block has `bytes_per_block` bytes, in the order of the backend's layout. `numa_node`: the memory node
    that the device is near; None where the system names none, and for a CPU.
    """

    bytes_per_block: int
    numa_node: int | None

    def lock_pages(self, buffer: memoryview) -> None:
        """Page-lock a buffer, if the device then copies faster to and from it.

        It stays locked, and is kept, as long as this object lives. A system that refuses is no error.
        """

    def follow_steps(self) -> None:
        """Have later copies come behind the steps that were executed so far.

        A device may still compute a step whose result was not waited for. For the thread that executes
        steps, or commits them.
        """

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        """Copy blocks one behind the other into `target` (len(block_ids) x bytes_per_block bytes)."""

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        """Copy the blocks in `data` to these places."""


class StoredBlock(NamedTuple):
    """What a storage that survives a restart remembers of a block.

    `tokens`: the int32 bytes of the block's own tokens. `parent`: the hash of the block before it, or empty.
    `used_s`: seconds since the epoch of its last use.
    """

    slot: int
    token_hash: bytes
    parent: bytes
    namespace: Namespace
    tokens: bytes
    used_s: float


BlockHash: TypeAlias = Callable[[StoredBlock], bytes]
"""The hash that a block must have: of its tokens, its parent's hash and its namespace."""


class BlockStorage(Protocol):
    """Slots for one block each.

    `write` and `read` run on worker threads, several at a time, never on one slot at once. The other methods
    are called by the engine's thread and, but for `sync` and `close`, do not wait for a device.

    Errors of the medium never raise out of `read`; `write` raises `OSError`, and the slot then holds nothing.
    """

    num_slots: int

    @property
    def fault(self) -> str | None:
        """Why the medium is not used now, for reads either; None while it works."""

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        """Store blocks, each in its slot; `data` has `len(blocks)` x bytes_per_block bytes.

        A crash at any instant leaves in a slot the old block, the new one or none.
        """

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> Sequence[ReadOutcome]:
        """Fill `target` with blocks, each verified against the hash of its tokens.

        The bytes of one that is not OK mean nothing.
        """

    def forget(self, slots: Iterable[int]) -> None:
        """The slots hold nothing any more."""

    def touch(self, slots: Iterable[int]) -> None:
        """Blocks were used now. May reach the medium later, or not at all."""

    def sync(self) -> None:
        """Wait until what `forget` changed outlives a crash of this process."""

    def recover(self) -> Sequence[StoredBlock]:
        """What is there from before, to be called once, before anything else."""

    def close(self) -> None:
        """Write what is pending and let go of the medium."""


@dataclass(slots=True)
class Arrival:
    """Blocks of the device that are being filled for a prefix.

    `block_ids` are those from block `first` of `tokens` on. They belong to the arrival until `publish` or
    `abort`. `epoch` is unique, so late data of an aborted arrival can be told apart.
    """

    tokens: Tokens
    namespace: Namespace
    first: int
    block_ids: BlockIds
    epoch: int


class KVArrivals(Protocol):
    """Where blocks of a lower tier or another instance enter the device."""

    @property
    def num_changes(self) -> int:
        """Grows with each arrival that begins or is published, for `KVQuotes.version`."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the arrivals that are open."""

    def serve(self, make_room: Callable[[int, Account], None], owner: str) -> None:
        """Set how room is made, and the index's name as an owner."""

    def begin_receive(
        self,
        tokens: Tokens,
        namespace: Namespace,
        num_blocks: int,
        account: Account = ...,
        first: int | None = None,
    ) -> Arrival | None:
        """Reserve blocks for what is not cached of the first `num_blocks` of a prefix.

        With `first`, only for those from this block on: a request computes what is missing before them, and
        gets them by `hand_over`. None, and no change, if there are none to fill or too few could be made
        free.
        """

    def num_cached(self, tokens: Tokens, namespace: Namespace, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks of a prefix the device has now."""

    def publish(self, arrival: Arrival, num_blocks: int, use: Use = ...) -> int:
        """The first `num_blocks` blocks are filled and enter the prefix index.

        The others are free again. Returns how many entered: fewer, if others have
        computed the same blocks meanwhile. `use`: of the request that brought them.
        """

    def hand_over(self, arrival: Arrival, num_blocks: int, target: Allocation) -> BlockIds:
        """The first `num_blocks` blocks are filled, and become a running request's last ones.

        The others are free again. Returns the blocks that `target` got, which must be of the same account.
        """

    def abort(self, arrival: Arrival) -> None:
        """Free the blocks, to which no thread may write any more."""

    def check(self) -> None:
        """Raise `BookkeepingError` where blocks and arrivals do not add up."""


class TierState(NamedTuple):
    """Counts of one tier, in blocks.

    `cached` of `total` slots hold blocks; `held`: those that preempted requests hold, counted for each.
    `stored`, `loaded` and `evicted` count since the start; `misses`: blocks that were there and did not
    verify, by `ReadOutcome`. `fault`: why nothing is written any more.
    `dropped`: blocks that were not saved: too many were under way, there were no slots, or a server did not
    take them;
    `refused`: those that had too few uses (`kv.disk_min_uses`), counted each time.
    """

    tier: Tier
    total: int
    cached: int
    held: int
    stored: int
    loaded: int
    evicted: int
    misses: Mapping[str, int]
    fault: str = ""
    dropped: int = 0
    refused: int = 0


class Tail(NamedTuple):
    """The last blocks of a prompt, once their load has ended.

    The first `num_blocks` blocks of `arrival` are filled; it is None if nothing came.
    """

    arrival: Arrival | None = None
    num_blocks: int = 0


class KVTiers(Protocol):
    """Memory below the device. For the engine's thread.

    Only `hold`, `wait`, `give_way`, `clear` and `close` block. `arrivals` are the device's. `load_hot`: the
    engine loads what stored prompts share while it is idle.
    """

    load_hot: bool

    @property
    def arrivals(self) -> KVArrivals: ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""

    def offer(self, hit: PrefixHit, account: Account = ..., use: Use | None = None) -> None:
        """A path of the device, pinned now, was computed: save it.

        `use`: the request that ends with it; None: the request goes on, and its use counts later.
        """

    @property
    def num_acceptable(self) -> int:
        """Blocks that may be saved now before any is dropped."""

    def save_evicted(self, paths: Iterable[EvictedPath], give_back: Callable[[], None]) -> None:
        """Save paths whose ends the device has just evicted.

        A tier whose loads were measured gets no path that would take longer to load than to compute.
        `give_back` is called once, when the blocks are not read any more: at once, or in a later `poll`.
        """

    def hold(self, request_id: str, hit: PrefixHit, account: Account, use: Use) -> None:
        """Save the path of a preempted request, and keep it until `let_go`.

        The path is pinned on the device now.

        The nearest tier that works takes it, if copying it there and back takes less time than computing it
        again, and if preempted requests together hold at most half of that tier. Waits for the copy, since
        the device's blocks are wanted at once; nothing else should be under way (`give_way`).
        """

    def let_go(self, request_id: str) -> None:
        """The request runs again or has ended. Unknown ids are ignored."""

    def load_s(self, num_blocks: int) -> float:
        """Seconds to load so many blocks from the nearest working tier.

        Infinite without any.
        """

    def slowest_load_s(self, tokens: Tokens, namespace: Namespace) -> float:
        """Seconds to load a prefix from the slowest working tier with it.

        0 if none has any. A shared store does not count.
        """

    def hint(self, tokens: Tokens, namespace: Namespace, hint: Hint) -> int:
        """Apply a hint to the order of eviction in each tier.

        Returns the largest number of blocks in one tier that it concerns.
        """

    def shared_prefixes(self, count: int) -> Iterator[SharedPrefix | None]:
        """Search the working tiers, but not a shared store: at most `count` of each.

        See `PrefixReuseIndex.shared_prefixes`.
        """

    def request(
        self,
        request_id: str,
        tokens: Tokens,
        namespace: Namespace,
        max_tokens: int,
        account: Account = ...,
        *,
        start: bool = True,
        has_room: bool = True,
        asks: bool = True,
        tail_blocks: int = 0,
    ) -> TierLookup:
        """Bring up what tiers have of a prompt and the device lacks.

        HIT: the device has all whole blocks up to `max_tokens`. HIT_PENDING: more comes, or a shared store is
        asked, and `poll` will name the request. MISS: nothing more is worth it. RETRY: the device has no room
        for it now, by itself or because the caller says so. SPLIT: nothing begins, since `load_tail` with so
        many blocks would be faster; call it when the request is admitted, or `request` without `tail_blocks`.

        With `start=False` the blocks are written from `start_loads` on, since the step that computes now may
        still write to them. With `asks=False` a shared store is not asked.
        """

    def load_tail(
        self,
        request_id: str,
        tokens: Tokens,
        namespace: Namespace,
        max_tokens: int,
        account: Account,
        tail_blocks: int,
    ) -> int | None:
        """Load the last blocks of a prompt while its request computes those before.

        Returns the first block that is loaded, for `RequestState.compute_until`; None, and no change, where
        that is not worth it now. At most `tail_blocks` blocks. No step may be in flight.
        """

    def take_tail(self, request_id: str) -> Tail | None:
        """The tail of a request, for `KVCacheManager.append_filled`; None while it is being loaded."""

    def is_loading(self, request_id: str) -> bool:
        """Whether its `request` answered HIT_PENDING, and `poll` has not named it since."""

    def start_loads(self) -> None:
        """Begin the loads that were requested with `start=False`.

        No step that computes now may write to their blocks.
        """

    def drop_unstarted(self) -> bool:
        """End the loads that `start_loads` has not begun; False without any.

        Their blocks are free, and `poll` names their requests.
        """

    def cancel(self, request_id: str) -> None:
        """The request has ended: its load stops. To be called for each that was asked for."""

    def poll(self) -> Sequence[str]:
        """Take in what has finished; returns ids of requests whose wait has ended.

        Call `request` for them again: a shared store has answered, or a further tier may have more. Where
        much has finished, the next calls take in the rest: until then the tiers are not idle, and `wait`
        returns at once.
        """

    def give_way(self) -> bool:
        """Stop all moves, which frees their device blocks; False without any.

        Waits for the chunk that each thread is copying. That takes the size of a chunk (8 MB, or a block that
        is larger) over the bandwidth: 8 ms at 1 GB/s.
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has moved or `wake` was called; False after the time."""

    def wake(self) -> None:
        """End a `wait`. For any thread."""

    def states(self) -> Sequence[TierState]:
        """The tiers, the nearest first."""

    def faults(self) -> Sequence[str]:
        """The tiers that have failed, and why. For any thread."""

    def close(self) -> None: ...

    def clear(self) -> int:
        """Stop all moves, then empty all tiers; returns how many blocks were evicted.

        They do not come back after a crash.
        """

    def check(self) -> None:
        """Raise `BookkeepingError` where the books disagree."""
