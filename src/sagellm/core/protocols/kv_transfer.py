"""Contracts of KV transfer: blocks of one instance enter the prefix index of another.

    ticket = channel.transfer(path, "decode-1")     returns at once
    for report in channel.poll(): ...               never blocks; ends each ticket once
    for received in channel.received(): ...         what has arrived here from others

A channel speaks the protocol: it asks the target for room, sends chunks of about 1 MB as the target has
credits, and the target verifies each and publishes what is whole. A transport below it moves the messages:
over TCP, in shared memory, within a process.

The receiver allocates first and the sender frees last. A transfer that fails at any point leaves the source
as it was, and the target with the leading blocks that had verified. What does not verify at the target
(model, layout, dtype, tokens, checksum) counts as not sent: a miss, never an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds, Namespace, Tokens

if TYPE_CHECKING:
    from sagellm.core.shared_pages import SharedPages

MAX_NOTE_BYTES = 64 << 10
AXES = frozenset({"kv", "layer", "token", "head", "dim"})
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}


class TransferStatus(Enum):
    """Outcome of a transfer.

    `RETRY`: the target had no room or did not answer; the same call may succeed later, and sends only what
    the target has not verified yet. `REFUSED`: models or layouts differ, or the target fails on this path, so
    it never will. `CORRUPT`: bytes arrived that failed verification, several times.
    """

    PENDING = "pending"
    DONE = "done"
    RETRY = "retry"
    REFUSED = "refused"
    CORRUPT = "corrupt"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The order of numbers in the bytes of a block.

    `axes` names the axes from the outermost on, each of `AXES` once: token-first is
    `kv.layer.token.head.dim`, head-first `kv.layer.head.token.dim`. The block holds heads `first_head` to
    `first_head + num_heads` of the model's `total_heads` KV heads: with tensor parallelism, those of a rank.
    """

    axes: str
    num_layers: int
    total_heads: int
    head_dim: int
    block_size: int
    dtype: str
    first_head: int = 0
    num_heads: int = 0
    """0: all of them."""

    def __post_init__(self) -> None:
        names = self.axes.split(".")
        if len(names) != len(AXES) or set(names) != AXES or names[-1] != "dim":
            raise ConfigError(f"axes {self.axes!r}: name kv, layer, token, head once, then dim")
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"KV of dtype {self.dtype!r}: known are {', '.join(ITEM_BYTES)}")
        if not self.num_heads:
            object.__setattr__(self, "num_heads", self.total_heads)
        sizes = self.num_layers, self.head_dim, self.block_size, self.num_heads
        if min(sizes) < 1 or self.first_head < 0 or self.first_head + self.num_heads > self.total_heads:
            raise ConfigError(f"{self}: heads of a block lie within the model's, and no size is 0")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a block, in the order of `axes`."""
        sizes = {
            "kv": 2, "layer": self.num_layers, "token": self.block_size,
            "head": self.num_heads, "dim": self.head_dim,
        }  # fmt: skip
        return tuple(sizes[axis] for axis in self.axes.split("."))

    @property
    def bytes_per_block(self) -> int:
        numbers = 2 * self.num_layers * self.block_size * self.num_heads * self.head_dim
        return numbers * ITEM_BYTES[self.dtype]

    @property
    def last_head(self) -> int:
        """Behind its heads."""
        return self.first_head + self.num_heads

    def of_heads(self, first: int, last: int) -> BlockLayout:
        """The same order, for heads `[first, last)` of the model."""
        return replace(self, first_head=first, num_heads=last - first)


class KVPath(NamedTuple):
    """Blocks to send: KV of the first `len(block_ids)` whole blocks of `tokens`.

    The caller keeps them pinned until the report that ends their transfer. `note`: bytes for the
    engine that receives them (the drawn token, say), at most `MAX_NOTE_BYTES`.
    """

    request_id: str
    tokens: Tokens
    namespace: Namespace
    block_ids: BlockIds
    note: bytes = b""
    account: Account = NO_ACCOUNT


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names one transfer on its channel."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The end of a transfer.

    `num_tokens` counts from the first token on, without gaps, what the target may use; those that it had
    before are counted too. `num_bytes`: of the payload that was sent, retries included.
    """

    ticket: Ticket
    status: TransferStatus
    num_tokens: int
    num_bytes: int
    duration_s: float
    reason: str = ""


class ReceivedKV(NamedTuple):
    """A transfer from another instance has ended here. Each is named once, whatever happens to its link.

    `num_tokens`: from the first token on, what the prefix index has now. DONE, or why it is less.
    """

    request_id: str
    source: str
    tokens: Tokens
    namespace: Namespace
    num_tokens: int
    status: TransferStatus
    note: bytes = b""
    reason: str = ""


class IncomingKV(NamedTuple):
    """A transfer from another instance that is under way.

    `has_blocks`: they are reserved here; before, it waits for room. `num_chunks`: those that have come and
    verified. `num_layers`: of a transfer by layer, the leading layers that are whole. `sign_s`: when it was
    last heard of, in seconds of the channel's clock.
    """

    request_id: str
    source: str
    note: bytes
    sign_s: float
    has_blocks: bool = False
    num_chunks: int = 0
    num_layers: int = 0


class KVTransferChannel(Protocol):
    """Transfers of one instance to and from others.

    For the engine's thread, which only submits and polls; bytes move on other threads.
    """

    def metadata(self) -> bytes:
        """What others need to reach this instance: its name, address, model and layout."""

    def add_peer(self, metadata: bytes) -> str:
        """Know another instance; returns its name. It is connected to by the first transfer.

        If it is known at another address, transfers under way begin anew at the new one.

        Raises `KVDataError` for what is no metadata, and `ConfigError` for another transport. Models and
        layouts are compared when it is connected.
        """

    def transfer(
        self, path: KVPath, target: str, *, by_layer: bool = False, num_blocks: int | None = None
    ) -> Ticket:
        """Begin to send a path.

        Raises `ConfigError` for an unknown target, and for names or tokens that no offer can hold.

        With `by_layer` only what `computed` has named is sent, and it is sent layer by layer where both sides
        can move a part of a block alone. The path may lack its last blocks then: `num_blocks` says how many
        it will have, for which the target makes room at once, and `extend` names them.
        """

    def extend(self, ticket: Ticket, block_ids: Sequence[int]) -> None:
        """The next blocks of a path, in which its KV will be. Raises `ConfigError` for too many."""

    def computed(self, ticket: Ticket, num_layers: int, num_blocks: int | None = None) -> None:
        """The first `num_layers` layers of the first `num_blocks` blocks are computed. None: of all known.

        For any thread. Does nothing for a transfer that has ended. Raises `ConfigError` for layers or blocks
        that are not known.
        """

    def layers_there(self, ticket: Ticket) -> int | None:
        """How many layers of all its blocks the target has.

        None before the target has made room, and once the transfer has ended.
        """

    def poll(self, *, may_take: bool = True) -> Sequence[TransferReport]:
        """Take in what has happened; returns the transfers that have ended since, each once.

        Without `may_take` no blocks are reserved and none are published: a step is computed now, which may
        write to free blocks, and whose own prefixes may still fail.
        """

    @property
    def wants_blocks(self) -> bool:
        """Whether `poll` would reserve or publish blocks."""

    def received(self) -> Sequence[ReceivedKV]:
        """What `poll` found to have ended here, since the last call."""

    def incoming(self) -> Sequence[IncomingKV]:
        """The transfers to this instance that are under way. Each rank that sends has one."""

    def cancel(self, ticket: Ticket) -> None:
        """Stop the transfer as soon as possible. It still ends with a report, which may be `DONE`."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to do; False if the time is over before."""

    def bandwidth_bytes_per_s(self, target: str) -> float | None:
        """Of the last transfers to a target; None before the first."""

    def close(self) -> None:
        """End all transfers, which the next `poll` reports. No thread reads or writes blocks any more."""

    def check(self) -> None:
        """Raise `BookkeepingError` where the books of transfers do not add up."""


class BlockViews(Protocol):
    """`BlockBytes` whose memory a CPU may reach, so that bytes need no further copy.

    With an attribute `shared_pages` (`SharedPages`, or None) all views lie there, and other processes may map
    them: then a receiver on this host copies blocks from there.
    """

    @property
    def has_views(self) -> bool:
        """Whether it does; a GPU's does not."""

    def views(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        """The memory of blocks, writable, in the order of `BlockBytes.read_blocks`.

        Each block consists of equally many views, of the same sizes.
        """


class ChunkPlace(Protocol):
    """Where the payload of a message of chunks goes at its receiver.

    A transport fills `views` in order, under `lock` and only while `is_open`: after that, the blocks may
    belong to another request.
    """

    @property
    def views(self) -> Sequence[memoryview]: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def lock(self) -> threading.Lock: ...

    def received(self, num_bytes: int) -> None:
        """So many bytes more are in `views`. Under the lock, while the processor's cache has them."""

    def write(self, data: Sequence[memoryview]) -> None:
        """Fill all of it from memory of the transport, in such parts. Takes the lock."""


class Message(NamedTuple):
    """What a link carries. `kind` and `head` belong to the protocol.

    The payload of chunks (`is_chunk`) is read where it lies, until `sent`; other payloads are small and
    copied. `token`: what `sent` names. `opens`: it begins a conversation, so a link may be connected for it.
    """

    kind: int
    head: bytes
    payload: Sequence[Buffer] = ()
    is_chunk: bool = False
    token: int = 0
    opens: bool = False


class TransportEndpoint(Protocol):
    """What a transport calls, on its own thread, with no lock held. Nothing may block."""

    def message(self, link: int, message: Message) -> None:
        """A message that is no chunk has arrived."""

    def place(self, link: int, head: bytes, num_bytes: int) -> ChunkPlace | None:
        """Where the payload of chunks goes; None if it comes late or again."""

    def filled(self, link: int, place: ChunkPlace) -> None:
        """The place has its payload."""

    def sent(self, link: int, token: int) -> None:
        """A message of chunks is not read any more: sent, or lost."""

    def lost(self, link: int, reason: str) -> None:
        """A link could not be connected or has ended. The next message that opens connects it again."""


class TransportEngine(Protocol):
    """Moves messages between instances. `post`, `call` and `reset` are for any thread.

    A transport may lose a link, but then says so; what was posted on it is gone. Messages may come late,
    twice or in another order: the protocol above copes. Payloads are not changed on purpose; a checksum finds
    damage.
    """

    max_payload_bytes: int
    """Of one chunk. Set before `start`."""

    def register(self, pages: SharedPages) -> None:
        """Let receivers read payloads where they lie in this memory, if the transport can. Before `start`."""

    def start(self, endpoint: TransportEndpoint) -> None:
        """Accept links from now on."""

    def address(self) -> Mapping[str, str | int]:
        """Where others connect to. After `start`."""

    def connect(self, address: Mapping[str, str | int]) -> int:
        """A link to another instance; returns at once. The first message that opens connects it.

        Raises `ConfigError` for an address that is none of this transport.
        """

    def reserve(
        self, link: int, num_bytes: int, count: int = 1, *, is_registered: bool = False
    ) -> Sequence[memoryview] | None:
        """Memory in which payloads of chunks are best made, if any. `is_registered`: where they lie now.

        It is for 1 to `count` chunks, a part for each, and belongs to the caller until a `post` with these
        parts, or `discard`. Raises `BlockingIOError` if too much of it is in use: `sent` says when to try
        again.
        """

    def discard(self, link: int, memory: memoryview) -> None:
        """Give back reserved memory without a post."""

    def post(self, link: int, message: Message) -> None:
        """Queue a message; returns at once.

        On a link that is not connected, only one that opens is sent. Others were meant for the connection
        before: they are dropped, and a chunk counts as sent.
        """

    def call(self, task: Callable[[], None], *, copies: bool = False) -> None:
        """Have the endpoint's thread run a task, behind what was posted before.

        A task that copies chunks comes behind all others, and what was posted is sent before it.
        """

    def reset(self, link: int, reason: str) -> None:
        """Disconnect a link, which is `lost` then."""

    def close(self) -> None:
        """Disconnect all, and end the threads. Nothing of the endpoint is called any more."""
