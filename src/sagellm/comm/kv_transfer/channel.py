"""`TransferChannel`: KV blocks of this instance to others, and theirs to this one.

Three threads share the work. The engine's thread submits and polls: it alone touches the pool and the prefix
index. The transport's thread moves messages. The worker gathers, encodes and checksums chunks before they are
sent, and verifies and decodes those that came; so a chunk is checked while the next one moves.

    sender                                         receiver
    transfer ---- HELLO, once for a link --------> compares model, layout, dtype
             <--- HELLO or REFUSED ---------------
             ---- OFFER: tokens -----------------> poll: begin_receive
             <--- ACCEPT: first block, epoch, credits
             ---- CHUNK, CHUNK, ... -------------> verified on arrival
             <--- ACK: returns a credit ----------
    poll     <--- END: tokens that it has now ---- poll: publish

Chunks carry a checksum and no MAC: peers prove that they have the key when they connect, and after that the
network is trusted not to forge (docs/decisions/0018-kv-transfer.md).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

from sagellm.comm.kv_transfer.blocks import InstanceBlocks
from sagellm.comm.kv_transfer.layouts import Agreement, agree
from sagellm.comm.kv_transfer.messages import (
    PROTOCOL,
    Accept,
    Ack,
    Cancel,
    ChunkHead,
    End,
    Hello,
    Kind,
    Refusal,
)
from sagellm.comm.kv_transfer.options import ChannelOptions, HashesOf
from sagellm.comm.kv_transfer.receiving import Place, Receiver
from sagellm.comm.kv_transfer.sending import Sender
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError, KVDataError, nearest
from sagellm.core.protocols.kv_tiers import BlockBytes, BlockFormat, KVArrivals, KVCodec
from sagellm.core.protocols.kv_transfer import (
    MAX_NOTE_BYTES,
    BlockLayout,
    ChunkPlace,
    KVPath,
    Message,
    ReceivedKV,
    Ticket,
    TransferReport,
    TransportEngine,
)
from sagellm.core.types import KVCacheSchema

log = logging.getLogger("sagellm.kv_transfer")


@dataclass(slots=True)
class _Link:
    """`theirs`: what the other side has said.

    `greeted`: our HELLO was posted on the connection that it has.
    """

    is_ours: bool
    greeted_s: float | None = None
    theirs: Hello | None = None
    agreed: Agreement | None = None


class TransferChannel:
    """Implements `KVTransferChannel` over one transport, which it starts and closes.

    `schema`: of the model's KV. `layout`: the order of a block's bytes, for peers with another; None where it
    cannot be converted. `arrivals`: where blocks enter; None for an instance that only sends. `hashes_of`:
    the chained hashes of blocks. `worker`: runs tasks one at a time, in order; None makes a thread.
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
        codec: KVCodec | None = None,
        options: ChannelOptions | None = None,
        clock: Clock | None = None,
        worker: Executor | None = None,
    ) -> None:
        options, clock = options or ChannelOptions(), clock or MonotonicClock()
        block_format = BlockFormat.of(schema, memory.bytes_per_block)
        blocks = InstanceBlocks(memory, block_format.digest, codec)
        if layout is not None and layout.bytes_per_block != memory.bytes_per_block:
            raise ConfigError(f"a block of {layout} has not {memory.bytes_per_block} bytes")
        self.node, self._transport, self._block_size = node, transport, schema.block_size
        self._options, self._clock = options, clock
        self._hello = _hello(node, schema, layout, block_format, blocks, options.chunk_bytes)
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
        transport.start(self)

    # -- for the engine's thread

    def metadata(self) -> bytes:
        return json.dumps({"node": self.node, "address": dict(self._transport.address())}).encode()

    def add_peer(self, metadata: bytes) -> str:
        try:
            found = json.loads(metadata)
            node, address = found["node"], found["address"]
            is_good = isinstance(node, str) and isinstance(address, dict)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_good = False
        if not is_good:
            raise KVDataError("no metadata of a KV transfer channel: pass what its metadata() returns")
        link = self._transport.connect(address)
        with self._changed:
            self._links[link] = _Link(is_ours=True)
            self._peers[node] = link
        return str(node)

    def transfer(self, path: KVPath, target: str, *, by_layer: bool = False) -> Ticket:
        with self._changed:
            if self._is_closed:
                raise ConfigError("this channel is closed")
            if target not in self._peers:
                raise ConfigError(
                    f"unknown instance {target!r}: add_peer first.{nearest(target, self._peers)}"
                )
            if len(path.block_ids) * self._block_size > len(path.tokens):
                raise ConfigError(f"{len(path.tokens)} tokens do not fill {len(path.block_ids)} blocks")
            if len(path.note) > MAX_NOTE_BYTES:
                raise ConfigError(f"a note has at most {MAX_NOTE_BYTES} bytes, not {len(path.note)}")
            ticket = self._sender.begin(path, target, self._peers[target], by_layer=by_layer)
            self._greet(self._peers[target])
            return ticket

    def computed(self, ticket: Ticket, num_layers: int) -> None:
        with self._changed:
            self._sender.computed(ticket, num_layers)

    def poll(self, *, may_take: bool = True) -> Sequence[TransferReport]:
        with self._changed:
            self._receiver.advance(may_take=may_take)
            for link in self._peers.values():
                self._sender.offer_due(link)
                self._greet(link)
                self._expect_greeting(link)
            return self._sender.reports()

    @property
    def wants_blocks(self) -> bool:
        with self._changed:
            return self._receiver.wants_blocks

    def received(self) -> Sequence[ReceivedKV]:
        with self._changed:
            return self._receiver.take_received()

    def cancel(self, ticket: Ticket) -> None:
        with self._changed:
            self._sender.cancel(ticket)

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._receiver.has_news or self._sender.has_news or self._changed.wait(timeout_s)

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
        return self._receiver.num_late

    @property
    def num_damaged(self) -> int:
        """Chunks that did not verify, and were asked for again."""
        return self._receiver.num_damaged

    # -- for the transport's thread

    def message(self, link: int, message: Message) -> None:
        """Raises `KVDataError` for what is no message; the transport then resets the link."""
        head = message.head
        with self._lock:
            if self._is_closed:
                return
            if message.kind == Kind.HELLO:
                self._on_hello(link, Hello.unpack(head))
                return
            state = self._links.get(link)
            if state is None or (state.theirs is None and message.kind != Kind.REFUSED):
                raise KVDataError("the first message is a HELLO")
            if message.kind == Kind.OFFER and state.agreed is not None and state.theirs is not None:
                self._receiver.offered(link, state.theirs, state.agreed, message)
            elif message.kind == Kind.CANCEL:
                self._receiver.cancelled(link, Cancel.unpack(head))
            elif message.kind == Kind.ACCEPT:
                self._sender.accepted(link, Accept.unpack(head))
            elif message.kind == Kind.ACK:
                self._sender.acknowledged(link, Ack.unpack(head))
            elif message.kind == Kind.END:
                self._sender.ended(link, End.unpack(head))
            elif message.kind == Kind.REFUSED:
                self._refuse(link, state, Refusal.unpack(head).reason)
            else:
                raise KVDataError(f"a message of kind {message.kind} is not expected here")

    def place(self, link: int, head: bytes, num_bytes: int) -> Place | None:
        with self._lock:
            return None if self._is_closed else self._receiver.place(link, ChunkHead.unpack(head), num_bytes)

    def filled(self, link: int, place: ChunkPlace) -> None:
        assert isinstance(place, Place)
        if not self._is_closed:
            self._receiver.filled(place)

    def sent(self, link: int, token: int) -> None:
        with self._lock:
            self._sender.sent(token)

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
        return self._links[link].agreed

    def _greet(self, link: int) -> None:
        """Send our HELLO, which connects the link, if something is to be sent."""
        state = self._links[link]
        if state.greeted_s is None and not self._is_closed and self._sender.is_due(link):
            state.greeted_s = self._clock.now()
            self._transport.post(link, Message(self._hello.kind, self._hello.pack()))

    def _expect_greeting(self, link: int) -> None:
        """Disconnect a link whose other side does not answer our HELLO."""
        state, stall_s = self._links[link], self._options.stall_s
        if state.greeted_s is None or state.agreed is not None:
            return
        if self._clock.now() - state.greeted_s > stall_s:
            state.greeted_s = self._clock.now()
            self._transport.reset(link, f"no answer to our HELLO for {stall_s:g} s")

    def _on_hello(self, link: int, theirs: Hello) -> None:
        state = self._links.setdefault(link, _Link(is_ours=False))
        if state.theirs is not None and state.theirs != theirs:
            raise KVDataError("a second HELLO, which differs")
        if state.is_ours and state.agreed is not None:
            return
        state.theirs = theirs
        if state.is_ours:
            try:
                state.agreed = agree(self._hello, theirs)
            except KVDataError as error:
                self._refuse(link, state, str(error))
            else:
                self._sender.offer_due(link)
            return
        answer: Hello | Refusal = self._hello
        try:
            state.agreed = agree(theirs, self._hello)
        except KVDataError as error:
            answer = Refusal(str(error)[:2000])
        self._transport.post(link, Message(answer.kind, answer.pack()))

    def _refuse(self, link: int, state: _Link, reason: str) -> None:
        """End all that waits for the link; the next transfer asks again."""
        state.greeted_s, state.theirs = None, None
        self._sender.refused(link, reason)


def _hello(
    node: str, schema: KVCacheSchema, layout: BlockLayout | None, block_format: BlockFormat,
    blocks: InstanceBlocks, chunk_bytes: int,
) -> Hello:  # fmt: skip
    codec = "" if blocks.codec is None or blocks.codec.name == "raw" else blocks.codec.name
    return Hello(
        protocol=PROTOCOL,
        node=node,
        fingerprint=schema.model_fingerprint,
        digest=block_format.digest.hex(),
        bytes_per_block=block_format.bytes_per_block,
        has_views=blocks.has_views,
        codec=codec,
        chunk_bytes=chunk_bytes,
        axes="" if layout is None else layout.axes,
        num_layers=schema.num_layers,
        total_heads=schema.num_kv_heads if layout is None else layout.total_heads,
        head_dim=schema.head_dim,
        block_size=schema.block_size,
        dtype=schema.dtype,
        first_head=0 if layout is None else layout.first_head,
        num_heads=0 if layout is None else layout.num_heads,
    )
