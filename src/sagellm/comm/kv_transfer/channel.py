"""`TransferChannel`: KV blocks of this instance to others, and theirs to this one.

The engine's thread submits and polls: it alone touches the pool and the prefix index. The transport's thread
moves messages, and reads, checksums and verifies chunks whose bytes go unchanged from blocks to blocks, while
the processor's cache has them. A worker does so for all others: it gathers blocks of a GPU, converts layouts,
encodes and decodes.

    sender                                         receiver
    transfer ---- HELLO, once for a link --------> compares model, layout, dtype
             <--- HELLO or REFUSED ---------------
             ---- OFFER: tokens -----------------> poll: begin_receive
             <--- ACCEPT: first block, epoch, credits
             ---- CHUNK, CHUNK, ... -------------> verified on arrival
             <--- ACK: returns a credit ----------
    poll     <--- END: tokens that it has now ---- poll: publish

A side that has the other wait (for layers, for room, for the heads of other ranks) says ALIVE now and then. A
transfer whose link is lost is offered again under its number, so the receiver's engine sees its end once.

Chunks carry a checksum and no MAC: peers prove that they have the key when they connect, and after that the
network is trusted not to forge (docs/decisions/0018-kv-transfer.md).
"""

from __future__ import annotations

import json
import math
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from sagellm.comm.kv_transfer.arriving_chunks import Place
from sagellm.comm.kv_transfer.blocks import RAW, InstanceBlocks
from sagellm.comm.kv_transfer.layouts import Agreement, agree
from sagellm.comm.kv_transfer.messages import (
    PROTOCOL,
    Accept,
    Ack,
    Alive,
    Cancel,
    ChunkHead,
    End,
    Hello,
    Kind,
    Refusal,
    reason_of,
)
from sagellm.comm.kv_transfer.options import ChannelOptions, CodecOf, HashesOf
from sagellm.comm.kv_transfer.receiving import Receiver
from sagellm.comm.kv_transfer.sending import Sender
from sagellm.core.checksums import checksum_kernel
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError, KVDataError, nearest
from sagellm.core.protocols.kv_tiers import BlockBytes, BlockFormat, KVArrivals
from sagellm.core.protocols.kv_transfer import (
    MAX_NOTE_BYTES,
    BlockLayout,
    ChunkPlace,
    IncomingKV,
    KVPath,
    Message,
    ReceivedKV,
    Ticket,
    TransferReport,
    TransportEngine,
)
from sagellm.core.types import KVCacheSchema

_LONGEST_S = 1e9


@dataclass(slots=True)
class _Link:
    """`theirs`: what the other side has said.

    `target`: the instance to which a link of ours leads; empty for a link of theirs. `greeted_s`: when our
    HELLO was posted on the connection that it has.
    """

    target: str = ""
    address: Mapping[str, str | int] = field(default_factory=dict)
    greeted_s: float | None = None
    theirs: Hello | None = None
    agreed: Agreement | None = None

    @property
    def is_ours(self) -> bool:
        return bool(self.target)


class TransferChannel:
    """Implements `KVTransferChannel` over one transport, which it starts and closes.

    `schema`: of the model's KV. `layout`: the order of a block's bytes, for peers with another; None where it
    cannot be converted. `arrivals`: where blocks enter; None for an instance that only sends. `hashes_of`:
    the chained hashes of blocks. `codec`: how chunks are encoded if the other side has the same, made for the
    layout on the wire. `worker`: runs tasks one at a time, in order; None makes a thread.
    """

    def __init__(
        self,
        node: str,
        transport: TransportEngine,
        memory: BlockBytes,
        schema: KVCacheSchema,
        layout: BlockLayout | None,
        arrivals: KVArrivals | None,
        hashes_of: HashesOf,
        *,
        codec: CodecOf | None = None,
        options: ChannelOptions | None = None,
        clock: Clock | None = None,
        worker: Executor | None = None,
    ) -> None:
        options, clock = options or ChannelOptions(), clock or MonotonicClock()
        block_format = BlockFormat.of(schema, memory.bytes_per_block)
        if layout is not None and layout.bytes_per_block != memory.bytes_per_block:
            raise ConfigError(f"a block of {layout} has not {memory.bytes_per_block} bytes")
        blocks = InstanceBlocks(memory, block_format.digest, layout, codec)
        self.node, self._transport, self._block_size = node, transport, schema.block_size
        self._options, self._clock = options, clock
        self._hello = _hello(node, schema, layout, block_format, blocks, options)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Guards all books of transfers; notified when `poll` has something to do."""
        self._worker = worker or ThreadPoolExecutor(1, "sagellm-kv-chunks")
        self._links: dict[int, _Link] = {}
        self._peers: dict[str, int] = {}
        shared = self._changed, self._worker, options, clock
        self._sender = Sender(
            transport, blocks, layout, hashes_of, self._agreement, *shared, schema.num_layers
        )  # fmt: skip
        self._receiver = Receiver(
            transport, blocks, layout, arrivals, hashes_of, schema.block_size, *shared
        )  # fmt: skip
        self._is_closed = False
        transport.max_payload_bytes = max(options.chunk_bytes, memory.bytes_per_block)
        if blocks.shared_pages is not None:
            transport.register(blocks.shared_pages)
        checksum_kernel()  # compiling it takes a second
        transport.start(self)

    # -- for the engine's thread

    def metadata(self) -> bytes:
        return json.dumps({"node": self.node, "address": dict(self._transport.address())}).encode()

    def add_peer(self, metadata: bytes) -> str:
        try:
            found = json.loads(metadata)
            node, address = found["node"], found["address"]
            is_good = isinstance(node, str) and isinstance(address, dict) and bool(node)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_good = False
        if not is_good:
            raise KVDataError("no metadata of a KV transfer channel: pass what its metadata() returns")
        with self._changed:
            old = self._peers.get(node)
            if old is not None and self._links[old].address == address:
                return str(node)
            link = self._transport.connect(address)
            self._links[link] = _Link(node, address)
            self._peers[node] = link
            if old is not None:
                del self._links[old]
                self._sender.move(old, link, f"{node} has another address")
        return str(node)

    def transfer(
        self, path: KVPath, target: str, *, by_layer: bool = False, num_blocks: int | None = None
    ) -> Ticket:
        num_known = len(path.block_ids)
        if num_blocks is None:
            num_blocks = num_known
        with self._changed:
            if self._is_closed:
                raise ConfigError("this channel is closed")
            if target not in self._peers:
                raise ConfigError(
                    f"unknown instance {target!r}: add_peer first.{nearest(target, self._peers)}"
                )
            if num_blocks * self._block_size > len(path.tokens):
                raise ConfigError(f"{len(path.tokens)} tokens do not fill {num_blocks} blocks")
            if num_blocks < num_known or (num_blocks > num_known and not by_layer):
                raise ConfigError(
                    f"{num_known} blocks of a path that has {num_blocks}: only a transfer by layer gets "
                    "blocks later"
                )
            if len(path.note) > MAX_NOTE_BYTES:
                raise ConfigError(f"a note has at most {MAX_NOTE_BYTES} bytes, not {len(path.note)}")
            link = self._peers[target]
            ticket = self._sender.begin(path, target, link, num_blocks, by_layer=by_layer)
            self._greet(link)
            return ticket

    def extend(self, ticket: Ticket, block_ids: Sequence[int]) -> None:
        with self._changed:
            self._sender.extend(ticket, block_ids)

    def computed(self, ticket: Ticket, num_layers: int, num_blocks: int | None = None) -> None:
        with self._changed:
            self._sender.computed(ticket, num_layers, num_blocks)

    def layers_there(self, ticket: Ticket) -> int | None:
        with self._changed:
            return self._sender.layers_there(ticket)

    def poll(self, *, may_take: bool = True) -> Sequence[TransferReport]:
        with self._changed:
            self._receiver.advance(may_take=may_take)
            reports = self._sender.reports()
            for link in self._sender.due_links:
                self._sender.offer_due(link)
                self._greet(link)
                self._expect_greeting(link)
            return reports

    @property
    def wants_blocks(self) -> bool:
        with self._changed:
            return self._receiver.wants_blocks

    def received(self) -> Sequence[ReceivedKV]:
        with self._changed:
            return self._receiver.take_received()

    def incoming(self) -> Sequence[IncomingKV]:
        with self._changed:
            return self._receiver.under_way()

    def cancel(self, ticket: Ticket) -> None:
        with self._changed:
            self._sender.cancel(ticket)

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            if self._receiver.has_news or self._sender.has_news:
                return True
            due_s = self._deadline_s() - self._clock.now()
            is_due = due_s <= timeout_s
            return self._changed.wait(max(0.0, min(due_s, timeout_s))) or is_due

    def _deadline_s(self) -> float:
        """When `poll` has something to do, even if nothing comes."""
        greeted_s = (self._links[link].greeted_s for link in self._sender.due_links)
        answers_s = [each + self._options.stall_s for each in greeted_s if each is not None]
        return min([*answers_s, self._sender.next_s, self._receiver.next_s])

    def bandwidth_bytes_per_s(self, target: str) -> float | None:
        with self._changed:
            return self._sender.bandwidth_bytes_per_s(target)

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._transport.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            self._sender.fail_all("this channel is closed")
            self._receiver.fail_all("this channel is closed")
            self._receiver.advance()

    def check(self) -> None:
        with self._changed:
            self._sender.check()
            self._receiver.check()

    @property
    def num_late(self) -> int:
        """Chunks that came late or twice, and were dropped."""
        return self._receiver.chunks.num_late

    @property
    def num_damaged(self) -> int:
        """Chunks that did not verify, and were asked for again."""
        return self._receiver.chunks.num_damaged

    # -- for the transport's thread

    def message(self, link: int, message: Message) -> None:
        """Raises `KVDataError` for what is no message; the transport then resets the link."""
        with self._lock:
            if self._is_closed:
                return
            if message.kind == Kind.HELLO:
                self._on_hello(link, message.head)
                return
            state = self._links.get(link)
            if state is None or (state.theirs is None and message.kind != Kind.REFUSED):
                raise KVDataError("the first message is a HELLO")
            is_taken = (self._of_target if state.is_ours else self._of_sender)(link, state, message)
            if not is_taken:
                raise KVDataError(f"a message of kind {message.kind} is not expected here")

    def _of_target(self, link: int, state: _Link, message: Message) -> bool:
        """A message to the side that sends; False for another kind."""
        head = message.head
        self._sender.heard(link)
        if message.kind == Kind.ACK:
            self._sender.acknowledged(link, Ack.unpack(head))
        elif message.kind == Kind.ACCEPT:
            self._sender.accepted(link, Accept.unpack(head))
        elif message.kind == Kind.END:
            self._sender.ended(link, End.unpack(head))
        elif message.kind == Kind.ALIVE:
            self._sender.alive(link, Alive.unpack(head))
        elif message.kind == Kind.REFUSED:
            self._refuse(link, state, Refusal.unpack(head).reason)
        else:
            return False
        return True

    def _of_sender(self, link: int, state: _Link, message: Message) -> bool:
        """A message to the side that receives; False for another kind."""
        if state.agreed is None or state.theirs is None:
            return False
        if message.kind == Kind.OFFER:
            self._receiver.offered(link, state.theirs, state.agreed, message)
        elif message.kind == Kind.CANCEL:
            self._receiver.cancelled(link, Cancel.unpack(message.head))
        elif message.kind == Kind.ALIVE:
            self._receiver.alive(link, Alive.unpack(message.head))
        else:
            return False
        return True

    def place(self, link: int, head: bytes, num_bytes: int) -> Place | None:
        with self._lock:
            return None if self._is_closed else self._receiver.place(link, ChunkHead.unpack(head), num_bytes)

    def filled(self, link: int, place: ChunkPlace) -> None:
        assert isinstance(place, Place)
        if not self._is_closed:
            self._receiver.filled(place)

    def sent(self, link: int, token: int) -> None:
        with self._lock:
            self._sender.sent(link, token)

    def lost(self, link: int, reason: str) -> None:
        with self._lock:
            state = self._links.get(link)
            if state is None:
                return
            state.greeted_s, state.theirs, state.agreed = None, None, None
            if not state.is_ours:
                del self._links[link]
                self._receiver.lost(link, reason)
            elif not self._is_closed:
                self._sender.lost(link, reason)
            self._changed.notify_all()

    # -- handshakes

    def _agreement(self, link: int) -> Agreement | None:
        state = self._links.get(link)
        return None if state is None else state.agreed

    def _greet(self, link: int) -> None:
        """Send our HELLO, which connects the link, if something is to be sent."""
        state = self._links[link]
        if state.greeted_s is None and not self._is_closed and self._sender.is_due(link):
            state.greeted_s = self._clock.now()
            self._transport.post(link, Message(self._hello.kind, self._hello.pack(), opens=True))

    def _expect_greeting(self, link: int) -> None:
        """Disconnect a link whose other side does not answer our HELLO."""
        state, stall_s = self._links[link], self._options.stall_s
        if state.greeted_s is None or state.agreed is not None:
            return
        if self._clock.now() - state.greeted_s > stall_s:
            state.greeted_s = self._clock.now()
            self._transport.reset(link, f"no answer to our HELLO for {stall_s:g} s")

    def _on_hello(self, link: int, head: bytes) -> None:
        state = self._links.setdefault(link, _Link())
        theirs, agreed, reason = None, None, ""
        try:
            theirs = Hello.unpack(head)
            if state.is_ours and theirs.node != state.target:
                raise KVDataError(
                    f"{theirs.node!r} answers there: add_peer with the metadata that it has now"
                )
            agreed = agree(self._hello, theirs) if state.is_ours else agree(theirs, self._hello)
        except KVDataError as error:
            reason = str(error)
        if state.theirs not in (None, theirs):
            raise KVDataError("a second HELLO, which differs")
        if state.is_ours and state.agreed is not None:
            return
        state.theirs, state.agreed = theirs, agreed
        if not state.is_ours:
            answer = self._hello if agreed is not None else Refusal(reason_of(reason))
            self._transport.post(link, Message(answer.kind, answer.pack()))
        elif agreed is None:
            self._refuse(link, state, reason)
        else:
            self._sender.offer_due(link)

    def _refuse(self, link: int, state: _Link, reason: str) -> None:
        """End all that waits for the link; the next transfer asks again."""
        state.greeted_s, state.theirs, state.agreed = None, None, None
        self._sender.refused(link, reason)


def _hello(
    node: str, schema: KVCacheSchema, layout: BlockLayout | None, block_format: BlockFormat,
    blocks: InstanceBlocks, options: ChannelOptions,
) -> Hello:  # fmt: skip
    """Raises `ConfigError` for names that no HELLO can hold."""
    made = Hello(
        protocol=PROTOCOL,
        node=node,
        fingerprint=schema.model_fingerprint,
        digest=block_format.digest.hex(),
        bytes_per_block=block_format.bytes_per_block,
        has_views=blocks.has_views,
        codec="" if blocks.codec_name == RAW else blocks.codec_name,
        chunk_bytes=options.chunk_bytes,
        axes="" if layout is None else layout.axes,
        num_layers=schema.num_layers,
        total_heads=schema.num_kv_heads if layout is None else layout.total_heads,
        head_dim=schema.head_dim,
        block_size=schema.block_size,
        dtype=schema.dtype,
        first_head=0 if layout is None else layout.first_head,
        num_heads=0 if layout is None else layout.num_heads,
        instance=secrets.token_hex(16),
        stall_ms=math.ceil(min(options.stall_s, _LONGEST_S) * 1000),
    )
    try:
        return Hello.unpack(made.pack())
    except KVDataError as error:
        raise ConfigError(f"KV transfer: {error}") from error
