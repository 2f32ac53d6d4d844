"""`Receiver`: the transfers that come to this instance.

Blocks are reserved by `begin_receive`, filled chunk by chunk, verified, and enter the prefix index by
`publish`. If a transfer ends early, its leading blocks that are whole and verified are published, and the
rest is free again: after `Incoming.close`, no thread writes to it. Late data finds another epoch, or none.

Ranks of a tensor-parallel sender may send their heads of one path apart: these transfers share an arrival.
"""

from __future__ import annotations

import logging
import sys
import threading
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from sagellm.comm.kv_transfer.blocks import RAW, InstanceBlocks, scratch
from sagellm.comm.kv_transfer.chunks import ChunkSpan
from sagellm.comm.kv_transfer.layouts import Agreement
from sagellm.comm.kv_transfer.messages import Accept, Ack, Cancel, ChunkHead, End, Hello, Kind, Offer
from sagellm.comm.kv_transfer.options import ChannelOptions, HashesOf
from sagellm.comm.kv_transfer.sending import plan_of
from sagellm.core.checksums import checksum, copy_with_checksum
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError, KVDataError
from sagellm.core.protocols.kv_tiers import FORMAT_VERSION, Arrival, KVArrivals
from sagellm.core.protocols.kv_transfer import (
    MAX_NOTE_BYTES,
    BlockLayout,
    Message,
    ReceivedKV,
    TransferStatus,
    TransportEngine,
)
from sagellm.core.types import TOKEN_BYTES, Account, Namespace, Tokens

log = logging.getLogger("sagellm.kv_transfer")


@dataclass(slots=True)
class Waiting:
    """An offer that was not answered yet."""

    link: int
    sender: Hello
    agreed: Agreement
    offer: Offer
    tokens: Tokens
    note: bytes
    since_s: float


@dataclass(slots=True)
class ArrivalBlocks:
    """The blocks of an arrival, which several transfers may fill. No thread writes to them after `close`."""

    arrival: Arrival
    hashes: Sequence[bytes]
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True

    def close(self) -> None:
        """Wait for the copy that is under way, which waits for no network."""
        with self.lock:
            self.is_open = False


@dataclass(slots=True)
class Incoming:
    """One transfer.

    Chunks are `pending` from their arrival until they are verified; then they are `landed`.
    """

    waiting: Waiting
    target: ArrivalBlocks
    plan: Sequence[ChunkSpan]
    credits: int
    progress_s: float
    pending: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    failure: tuple[TransferStatus, str] | None = None

    @property
    def is_whole(self) -> bool:
        return len(self.landed) == len(self.plan)

    def num_whole(self) -> int:
        """Leading blocks of which all bytes are there and verified."""
        return min(
            (chunk.first for number, chunk in enumerate(self.plan) if number not in self.landed),
            default=len(self.target.arrival.block_ids),
        )


class Place:
    """Implements `ChunkPlace`. `views` are the blocks themselves, or memory from which they are filled.

    `checksum`: of what was written, if it was computed then. `blocks`: those of `views`, if it is they.
    """

    __slots__ = ("_blocks", "checksum", "chunk", "head", "ids", "in_place", "incoming", "views")

    def __init__(
        self, incoming: Incoming, head: ChunkHead, ids: Sequence[int], views: list[memoryview],
        blocks: InstanceBlocks | None,
    ) -> None:  # fmt: skip
        self.incoming, self.head, self.ids, self.views = incoming, head, ids, views
        self.chunk = incoming.plan[head.number]
        self._blocks, self.in_place = blocks, blocks is not None
        self.checksum: int | None = None

    @property
    def lock(self) -> threading.Lock:
        return self.incoming.target.lock

    @property
    def is_open(self) -> bool:
        return self.incoming.target.is_open

    def write(self, data: memoryview) -> None:
        with self.lock:
            if not self.is_open:
                return
            if self._blocks is None:
                self.checksum = copy_with_checksum(self.views, [data])
            else:
                self.checksum = self._blocks.fill(self.ids, self.chunk, self.views, data)


class Receiver:
    """What comes to an instance.

    Methods are called with the channel's lock held, but for `filled` and what the worker runs.
    """

    def __init__(
        self, transport: TransportEngine, blocks: InstanceBlocks, layout: BlockLayout | None,
        arrivals: KVArrivals | None, hashes_of: HashesOf, block_size: int, changed: threading.Condition,
        worker: Executor, options: ChannelOptions, clock: Clock,
    ) -> None:  # fmt: skip
        self._transport, self._blocks, self._layout, self._arrivals = transport, blocks, layout, arrivals
        self._hashes_of, self._block_size, self._changed = hashes_of, block_size, changed
        self._worker, self._options, self._clock = worker, options, clock
        self._offers: deque[Waiting] = deque()
        self._incoming: dict[tuple[int, int], Incoming] = {}
        self._finished: deque[tuple[int, int]] = deque()
        self._received: list[ReceivedKV] = []
        self._unsent: list[tuple[Incoming, int, bool]] = []
        self.num_late = self.num_damaged = 0

    # -- on the transport's thread

    def offered(self, link: int, sender: Hello, agreed: Agreement, message: Message) -> None:
        offer = Offer.unpack(message.head)
        data = b"".join(message.payload)
        num_bytes = offer.num_tokens * TOKEN_BYTES
        if not num_bytes <= len(data) <= num_bytes + MAX_NOTE_BYTES:
            raise KVDataError(f"an offer of {offer.num_tokens} tokens with {len(data)} bytes")
        if offer.num_blocks * self._block_size > offer.num_tokens:
            raise KVDataError(f"{offer.num_blocks} blocks of {offer.num_tokens} tokens are offered")
        key = (link, offer.transfer)
        if key in self._incoming or any((each.link, each.offer.transfer) == key for each in self._offers):
            return
        tokens = _tokens(data[:num_bytes])
        waiting = Waiting(link, sender, agreed, offer, tokens, data[num_bytes:], self._clock.now())
        if len(self._offers) >= self._options.max_offers or self._arrivals is None:
            reason = "it takes no KV" if self._arrivals is None else "too many offers wait"
            self._tell(waiting, 0, TransferStatus.RETRY, reason)
            return
        self._offers.append(waiting)
        self._changed.notify_all()

    def cancelled(self, link: int, cancel: Cancel) -> None:
        self._fail((link, cancel.transfer), TransferStatus.CANCELLED, "the sender cancelled it")
        self._offers = deque(
            each for each in self._offers if (each.link, each.offer.transfer) != (link, cancel.transfer)
        )

    def lost(self, link: int, reason: str) -> None:
        self._offers = deque(each for each in self._offers if each.link != link)
        for key in list(self._incoming):
            if key[0] == link:
                self._fail(key, TransferStatus.RETRY, reason)

    def place(self, link: int, head: ChunkHead, num_bytes: int) -> Place | None:
        incoming = self._incoming.get((link, head.transfer))
        if incoming is None or incoming.failure is not None or head.epoch != incoming.target.arrival.epoch:
            self.num_late += 1
            return None
        number, agreed = head.number, incoming.waiting.agreed
        if number in incoming.landed or number in incoming.pending or number >= len(incoming.plan):
            self.num_late += 1
            return None
        if len(incoming.pending) >= incoming.credits:
            raise KVDataError(f"more than {incoming.credits} chunks without credit")
        incoming.progress_s = self._clock.now()
        chunk = incoming.plan[number]
        if not self._fits(head, incoming, chunk, num_bytes):
            self._acknowledge(incoming, number, ok=False)
            return None
        incoming.pending.add(number)
        ids = self._ids(incoming, chunk)
        if head.header.codec != RAW or agreed.is_partial or not self._blocks.has_views:
            return Place(incoming, head, ids, [scratch(num_bytes)], None)
        return Place(incoming, head, ids, self._blocks.views(ids, chunk), self._blocks)

    def _fits(self, head: ChunkHead, incoming: Incoming, chunk: ChunkSpan, num_bytes: int) -> bool:
        header, agreed = head.header, incoming.waiting.agreed
        return (
            header.version == FORMAT_VERSION
            and header.format_digest.hex() == incoming.waiting.sender.digest
            and header.token_hash == incoming.target.hashes[chunk.stop - 1]
            and header.num_bytes == num_bytes
            and (num_bytes == chunk.num_bytes if header.codec == RAW else header.codec == agreed.codec)
        )

    def filled(self, place: Place) -> None:
        """Verify a chunk that is in its blocks while the processor's cache has it."""
        if place.in_place:
            self._finish(place)
        else:
            self._worker.submit(self._finish, place)

    # -- without the lock; on the worker, but for what is in place

    def _finish(self, place: Place) -> None:
        """Verify a chunk, and bring it to its blocks if it is not there."""
        incoming, number = place.incoming, place.head.number
        try:
            is_good = self._is_good(place)
        except Exception:
            log.exception("a chunk of %s could not be taken", incoming.waiting.offer.request_id)
            is_good = False
        with self._changed:
            incoming.pending.discard(number)
            if incoming.failure is not None or not incoming.target.is_open:
                return
            if is_good:
                incoming.landed.add(number)
            else:
                self.num_damaged += 1
            incoming.progress_s = self._clock.now()
            self._acknowledge(incoming, number, ok=is_good)
            if incoming.is_whole:
                self._finished.append((incoming.waiting.link, incoming.waiting.offer.transfer))
                self._changed.notify_all()

    def _is_good(self, place: Place) -> bool:
        incoming, header = place.incoming, place.head.header
        found = checksum(place.views) if place.checksum is None else place.checksum
        if found != header.checksum:
            return False
        if place.in_place:
            return True
        try:
            data = self._blocks.decoded(header.codec, place.views[0], place.chunk.num_bytes)
        except KVDataError:
            return False
        with place.lock:
            if place.is_open:
                self._blocks.write(place.ids, incoming.waiting.agreed, data)
        return True

    def _ids(self, incoming: Incoming, chunk: ChunkSpan) -> Sequence[int]:
        return incoming.target.arrival.block_ids[chunk.first : chunk.stop]

    def _acknowledge(self, incoming: Incoming, number: int, *, ok: bool) -> None:
        if not self._unsent:
            self._transport.call(self._send_acks)
        self._unsent.append((incoming, number, ok))

    def _send_acks(self) -> None:
        """One message for all chunks of a transfer that were verified meanwhile."""
        with self._changed:
            unsent, self._unsent = self._unsent, []
        found: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
        for incoming, number, ok in unsent:
            waiting = incoming.waiting
            key = waiting.link, waiting.offer.transfer, incoming.target.arrival.epoch
            found.setdefault(key, ([], []))[0 if ok else 1].append(number)
        for (link, transfer, epoch), (good, damaged) in found.items():
            ack = Ack(transfer, epoch, tuple(good), tuple(damaged))
            self._transport.post(link, Message(Kind.ACK, ack.pack()))

    # -- on the engine's thread

    def advance(self, *, may_take: bool = True) -> None:
        """End what is whole or has failed; begin what there is room for.

        Without `may_take` the index and the pool stay as they are, and only what has stalled is noted.
        """
        now = self._clock.now()
        for key, incoming in list(self._incoming.items()):
            if incoming.failure is None and now - incoming.progress_s > self._options.stall_s:
                if not incoming.is_whole:
                    self._fail(key, TransferStatus.RETRY, f"nothing came for {self._options.stall_s:g} s")
                elif not self._is_covered(incoming.target):
                    self._fail(key, TransferStatus.RETRY, "other ranks did not send their heads")
        if not may_take:
            return
        while self._finished:
            key = self._finished.popleft()
            if key in self._incoming:
                self._end(self._incoming[key].target)
        while self._offers:
            is_late = now - self._offers[0].since_s > self._options.offer_wait_s
            if not self._begin(self._offers[0], is_last=is_late or not self._incoming):
                break
            self._offers.popleft()

    def _begin(self, waiting: Waiting, *, is_last: bool) -> bool:
        """Answer an offer; False if it waits for credits or room.

        A last try does not wait.
        """
        assert self._arrivals is not None
        num_blocks = waiting.offer.num_blocks
        namespace = Namespace(*waiting.offer.namespace)
        shared = self._other_heads(waiting)
        if shared is None and self._arrivals.num_cached(waiting.tokens, namespace, num_blocks) >= num_blocks:
            self._report(waiting, TransferStatus.DONE, "")
            return True
        num_free = self._options.max_credits - sum(each.credits for each in self._incoming.values())
        if num_free < 1 and not is_last:
            return False
        if num_free < 1:
            self._report(waiting, TransferStatus.RETRY, "too many transfers come")
            return True
        if shared is None:
            account = Account(*waiting.offer.account)
            arrival = self._arrivals.begin_receive(waiting.tokens, namespace, num_blocks, account)
            if arrival is None and not is_last:
                return False
            if arrival is None:
                self._report(waiting, TransferStatus.RETRY, "no room for its blocks")
                return True
            shared = ArrivalBlocks(arrival, ())
        layout = waiting.agreed.wire or self._layout
        by_layer = layout if waiting.offer.by_layer and waiting.agreed.has_views else None
        plan = plan_of(len(shared.arrival.block_ids), waiting.agreed, by_layer)
        num_credits = min(num_free, self._options.credits)
        incoming = Incoming(waiting, shared, plan, num_credits, self._clock.now())
        self._incoming[waiting.link, waiting.offer.transfer] = incoming
        self._worker.submit(self._accept, incoming)
        return True

    def _other_heads(self, waiting: Waiting) -> ArrivalBlocks | None:
        """The arrival of the same path to which another rank sends other heads."""
        mine = _heads(waiting)
        for each in self._incoming.values():
            other = each.waiting
            is_same = (
                each.failure is None and waiting.agreed.is_partial and other.agreed.is_partial
                and other.offer.request_id == waiting.offer.request_id
                and other.offer.namespace == waiting.offer.namespace
                and other.offer.num_blocks == waiting.offer.num_blocks
                and other.tokens == waiting.tokens
            )  # fmt: skip
            if is_same and not mine & set().union(*map(_heads, self._sharing(each.target))):
                return each.target
        return None

    def _sharing(self, target: ArrivalBlocks) -> list[Waiting]:
        return [each.waiting for each in self._incoming.values() if each.target is target]

    def _is_covered(self, target: ArrivalBlocks) -> bool:
        """Whether all heads of its blocks come."""
        [first, *others] = self._sharing(target)
        if not first.agreed.is_partial:
            return True
        assert first.agreed.target is not None
        wanted = set(range(first.agreed.target.first_head, first.agreed.target.last_head))
        return wanted == _heads(first).union(*map(_heads, others))

    def _accept(self, incoming: Incoming) -> None:
        """On the worker: hashes of a long prompt take milliseconds."""
        target, offer = incoming.target, incoming.waiting.offer
        if not target.hashes:
            path = target.arrival.tokens.slice(0, offer.num_blocks * self._block_size).tobytes()
            target.hashes = self._hashes_of(path, target.arrival.namespace)[target.arrival.first :]
        accept = Accept(offer.transfer, target.arrival.epoch, target.arrival.first, incoming.credits)
        self._transport.post(incoming.waiting.link, Message(accept.kind, accept.pack()))

    def _fail(self, key: tuple[int, int], status: TransferStatus, reason: str) -> None:
        incoming = self._incoming.get(key)
        if incoming is not None and incoming.failure is None:
            incoming.failure = status, reason
            self._finished.append(key)
            self._changed.notify_all()

    def fail_all(self, reason: str) -> None:
        for key in list(self._incoming):
            self._fail(key, TransferStatus.RETRY, reason)
        self._offers.clear()

    def _end(self, target: ArrivalBlocks) -> None:
        """Publish an arrival, if all its transfers are whole or one has failed."""
        sharing = {key: each for key, each in self._incoming.items() if each.target is target}
        failures = [each.failure for each in sharing.values() if each.failure is not None]
        is_covered = self._is_covered(target)
        if not failures and not (is_covered and all(each.is_whole for each in sharing.values())):
            return
        target.close()
        num_whole = min(each.num_whole() for each in sharing.values()) if is_covered else 0
        assert self._arrivals is not None
        if num_whole:
            self._arrivals.publish(target.arrival, num_whole)
        else:
            self._arrivals.abort(target.arrival)
        status, reason = failures[0] if failures else (TransferStatus.DONE, "")
        for key, each in sharing.items():
            del self._incoming[key]
            self._report(each.waiting, status, reason)

    def _report(self, waiting: Waiting, status: TransferStatus, reason: str) -> None:
        """Tell the sender, and the engine."""
        assert self._arrivals is not None
        namespace = Namespace(*waiting.offer.namespace)
        num_blocks = self._arrivals.num_cached(waiting.tokens, namespace, waiting.offer.num_blocks)
        if status is TransferStatus.DONE and num_blocks < waiting.offer.num_blocks:
            status, reason = TransferStatus.RETRY, "the blocks before them are gone"
        num_tokens = num_blocks * self._block_size
        self._tell(waiting, num_tokens, status, reason)
        self._received.append(
            ReceivedKV(
                waiting.offer.request_id, waiting.sender.node, waiting.tokens, namespace, num_tokens, status,
                waiting.note, reason,
            )
        )  # fmt: skip

    def _tell(self, waiting: Waiting, num_tokens: int, status: TransferStatus, reason: str) -> None:
        end = End(waiting.offer.transfer, num_tokens, status.value, reason)
        self._transport.post(waiting.link, Message(end.kind, end.pack()))

    def take_received(self) -> list[ReceivedKV]:
        taken, self._received = self._received, []
        return taken

    @property
    def wants_blocks(self) -> bool:
        """Whether `advance` would take blocks, or publish some."""
        return bool(self._offers or self._finished)

    @property
    def has_news(self) -> bool:
        return bool(self._offers or self._finished or self._received)

    def check(self) -> None:
        """Raise `BookkeepingError` where transfers, credits and arrivals do not add up."""
        used = sum(each.credits for each in self._incoming.values())
        if used > self._options.max_credits:
            raise BookkeepingError(f"{used} credits are given, at most {self._options.max_credits}")
        for each in self._incoming.values():
            if each.pending & each.landed or len(each.pending) > each.credits:
                raise BookkeepingError(f"{each}: a chunk has landed and is pending, or there are too many")
            if not each.target.is_open:
                raise BookkeepingError(f"{each}: its arrival is closed")
        if self._arrivals is not None:
            self._arrivals.check()


def _heads(waiting: Waiting) -> set[int]:
    wire = waiting.agreed.wire
    return set() if wire is None else set(range(wire.first_head, wire.last_head))


def _tokens(data: bytes) -> Tokens:
    if sys.byteorder == "little":
        return Tokens.frombytes(data)
    swapped = array("i", data)
    swapped.byteswap()
    return Tokens.frombytes(swapped.tobytes())
