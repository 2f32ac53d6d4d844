"""`Receiver`: the transfers that come to this instance.

Blocks are reserved by `begin_receive`, filled chunk by chunk, verified, and enter the prefix index by
`publish`. If a transfer ends early, its leading blocks that are whole and verified are published, and the
rest is free again: after `ArrivalBlocks.close`, no thread writes to it. Late data finds another epoch, or
none.

Ranks of a tensor-parallel sender may send their heads of one path apart: these transfers share an arrival.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from array import array
from collections import deque
from concurrent.futures import Executor

from sagellm.comm.kv_transfer.arriving_chunks import ArrivingChunks, Place
from sagellm.comm.kv_transfer.blocks import InstanceBlocks
from sagellm.comm.kv_transfer.deadlines import Deadlines
from sagellm.comm.kv_transfer.ended import EndedTransfers
from sagellm.comm.kv_transfer.incoming import ArrivalBlocks, Incoming, Key, Lost, Waiting, heads_of
from sagellm.comm.kv_transfer.layouts import Agreement
from sagellm.comm.kv_transfer.messages import (
    Accept,
    Alive,
    Cancel,
    ChunkHead,
    End,
    Hello,
    Offer,
    reason_of,
)
from sagellm.comm.kv_transfer.offers import OfferQueue
from sagellm.comm.kv_transfer.options import ChannelOptions, HashesOf
from sagellm.comm.kv_transfer.sending import plan_of
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError, KVDataError
from sagellm.core.protocols.kv_tiers import KVArrivals
from sagellm.core.protocols.kv_transfer import (
    MAX_NOTE_BYTES,
    BlockLayout,
    IncomingKV,
    Message,
    ReceivedKV,
    TransferStatus,
    TransportEngine,
)
from sagellm.core.types import TOKEN_BYTES, Account, Namespace, Tokens

log = logging.getLogger("sagellm.kv_transfer")
TRIES = 100
"""How often an offer that waits for room is tried, at most, until its time is over."""


class Receiver:
    """What comes to an instance.

    Methods are called with the channel's lock held, but for `filled` and what the worker runs.
    """

    def __init__(
        self, transport: TransportEngine, blocks: InstanceBlocks, layout: BlockLayout | None,
        arrivals: KVArrivals | None, hashes_of: HashesOf, block_size: int, changed: threading.Condition,
        worker: Executor, options: ChannelOptions, clock: Clock,
    ) -> None:  # fmt: skip
        self._transport, self._layout, self._arrivals = transport, layout, arrivals
        self._hashes_of, self._block_size, self._changed = hashes_of, block_size, changed
        self._worker, self._options, self._clock = worker, options, clock
        self._offers = OfferQueue()
        self._new_heads: list[Waiting] = []
        """Offers of a part of the heads that have come since, and may join an arrival."""
        self._try_s = -math.inf
        """The first offer is tried then, or when a transfer has ended."""
        self._incoming: dict[Key, Incoming] = {}
        """At most as many as there are credits: each has one."""
        self._open: list[ArrivalBlocks] = []
        self._live: dict[tuple[str, int], Waiting] = {}
        """By instance and transfer, what is offered or comes: its last offer."""
        self._finished: deque[Key] = deque()
        self._deadlines: Deadlines[Key] = Deadlines()
        """When an offer or a transfer is looked at, even if nothing comes."""
        self._lost: dict[tuple[str, int], Lost] = {}
        """By instance and transfer: their links were lost, and they may be offered again."""
        self._ended = EndedTransfers()
        self._received: list[ReceivedKV] = []
        self.chunks = ArrivingChunks(transport, blocks, changed)

    # -- on the transport's thread

    def offered(self, link: int, sender: Hello, agreed: Agreement, message: Message) -> None:
        offer = Offer.unpack(message.head)
        data = b"".join(message.payload)
        num_bytes = offer.num_tokens * TOKEN_BYTES
        if not num_bytes <= len(data) <= num_bytes + MAX_NOTE_BYTES:
            raise KVDataError(f"an offer of {offer.num_tokens} tokens with {len(data)} bytes")
        if offer.num_blocks * self._block_size > offer.num_tokens:
            raise KVDataError(f"{offer.num_blocks} blocks of {offer.num_tokens} tokens are offered")
        now = self._clock.now()
        waiting = Waiting(link, sender, agreed, offer, _tokens(data[:num_bytes]), data[num_bytes:], now, now)
        is_late = self._ended.is_known(sender.instance, offer.transfer, offer.oldest)
        if is_late or self._is_known(waiting):
            return
        end = self._ended.find(sender.instance, offer.transfer)
        if end is None:
            end = self._turned_away(link, offer)
        if end is not None:
            self._post(link, end)
            return
        self._give_up_last_attempt(waiting.identity)
        self._live[waiting.identity] = waiting
        self._offers.add(waiting)
        self._deadlines.set(waiting.key, waiting.beat_s)
        if agreed.is_partial:
            self._new_heads.append(waiting)
        if len(self._offers) == 1:
            self._try_s = -math.inf
        self._changed.notify_all()

    def _is_known(self, waiting: Waiting) -> bool:
        """Whether this offer or a later one of the same transfer has come before."""
        lost = self._lost.get(waiting.identity)
        known = self._live.get(waiting.identity, None if lost is None else lost.waiting)
        return known is not None and known.offer.attempt >= waiting.offer.attempt

    def _turned_away(self, link: int, offer: Offer) -> End | None:
        if self._arrivals is None:
            reason = "it takes no KV"
        elif self._offers.num_of_link(link) >= self._options.max_offers:
            reason = "too many offers wait"
        else:
            return None
        return End(offer.transfer, 0, TransferStatus.RETRY.value, reason)

    def _give_up_last_attempt(self, identity: tuple[str, int]) -> None:
        """The transfer is offered again: its sender has given up what it sent before."""
        before = self._live.get(identity)
        if before is None:
            return
        incoming = self._incoming.get(before.key)
        if self._offers.get(before.key) is before:
            self._offers.remove(before.key)
        elif incoming is not None and incoming.waiting is before:
            incoming.is_lost = (
                True  # also if it has failed: its end is not reported, but that of this attempt
            )
            self._fail(before.key, TransferStatus.RETRY, "it was offered again")

    def _forget(self, waiting: Waiting) -> None:
        """It is offered and comes no longer."""
        if self._live.get(waiting.identity) is waiting:
            del self._live[waiting.identity]

    def cancelled(self, link: int, cancel: Cancel) -> None:
        key = (link, cancel.transfer)
        waiting = self._offers.remove(key)
        if waiting is not None:
            self._forget(waiting)
        self._fail(key, TransferStatus.CANCELLED, "the sender cancelled it")

    def alive(self, link: int, alive: Alive) -> None:
        """Its sender computes layers."""
        incoming = self._incoming.get((link, alive.transfer))
        if incoming is not None:
            incoming.progress_s = self._clock.now()

    def lost(self, link: int, reason: str) -> None:
        for waiting in self._offers.of_link(link):
            self._offers.remove(waiting.key)
            self._forget(waiting)
            if waiting.identity in self._lost:
                self._keep_lost(self._lost[waiting.identity].waiting, reason)
        for incoming in self._incoming.values():
            if incoming.waiting.link == link:
                self._lose(incoming, reason)

    def place(self, link: int, head: ChunkHead, num_bytes: int) -> Place | None:
        incoming = self._incoming.get((link, head.transfer))
        return self.chunks.place(incoming, head, num_bytes, self._clock.now())

    def filled(self, place: Place) -> None:
        """Verify chunks that are in their blocks while the processor's cache has it."""
        if place.in_place:
            self._finish(place)
        else:
            self._worker.submit(self._finish, place)

    def _finish(self, place: Place) -> None:
        good = self.chunks.verify(place)
        with self._changed:
            if self.chunks.land(place, self._clock.now(), good):
                incoming = place.incoming
                self._finished.append(incoming.key)
                self._deadlines.set(incoming.key, incoming.waiting.beat_s)
                self._changed.notify_all()

    # -- on the engine's thread

    def advance(self, *, may_take: bool = True) -> None:
        """End what is whole or has failed; begin what there is room for.

        Without `may_take` the index and the pool stay as they are, and only what has stalled is noted.
        """
        now = self._clock.now()
        for key in self._deadlines.take_due(now):
            self._look_at(key, now)
        if not may_take:
            return
        while self._finished:
            key = self._finished.popleft()
            if key in self._incoming:
                self._end(self._incoming[key].target)
        self._join_heads()
        if now >= self._try_s:
            self._answer_offers(now)
        self._report_lost(now)

    def _look_at(self, key: Key, now: float) -> None:
        """End what has stalled; tell a waiting sender that this side is alive."""
        incoming, waiting = self._incoming.get(key), self._offers.get(key)
        if waiting is None and incoming is not None and incoming.failure is None:
            stall_s = self._options.stall_s
            if not incoming.is_complete and incoming.progress_s + stall_s <= now:
                is_whole, silence = incoming.is_whole, f"nothing came for {stall_s:g} s"
                reason = "other ranks did not send their heads" if is_whole else silence
                self._fail(key, TransferStatus.RETRY, reason)
                return
            if incoming.is_whole:
                self._say_alive(incoming.waiting, now)
            self._deadlines.set(key, self._due_s(incoming))
        elif waiting is not None:
            self._say_alive(waiting, now)
            self._deadlines.set(key, waiting.beat_s)

    def _due_s(self, incoming: Incoming) -> float:
        """When it is looked at, if nothing comes until then."""
        beat_s = incoming.waiting.beat_s if incoming.is_whole else math.inf
        stalls_s = math.inf if incoming.is_complete else incoming.progress_s + self._options.stall_s
        return min(beat_s, stalls_s)

    def _say_alive(self, waiting: Waiting, now: float) -> None:
        if waiting.beat_s <= now:
            waiting.said_s = now
            self._post(waiting.link, Alive(waiting.offer.transfer))

    @property
    def next_s(self) -> float:
        """When `advance` has something to do, even if nothing comes."""
        lost = next(iter(self._lost.values()), None)
        lost_s = math.inf if lost is None else lost.since_s + self._options.resume_s
        return min(self._deadlines.next_s, self._try_s if len(self._offers) else math.inf, lost_s)

    def _join_heads(self) -> None:
        """Answer offers of heads for which an open arrival waits.

        They need neither credits nor room, so no offer keeps them back: an arrival cannot wait for itself.
        """
        arrived, self._new_heads = self._new_heads, []
        for waiting in arrived:
            if self._offers.get(waiting.key) is waiting and self._other_heads(waiting) is not None:
                self._answer(waiting, is_last=True)

    def _answer_offers(self, now: float) -> None:
        """Answer offers, the oldest first, up to one that waits for credits or room.

        With one that is answered go the other heads of its path. If it was sent back, they are too: alone,
        they would hold their room for nothing.
        """
        while (waiting := self._offers.first()) is not None:
            is_late = now - waiting.since_s > self._options.offer_wait_s
            if not self._answer(waiting, is_last=is_late or not self._incoming):
                self._try_s = now + self._options.offer_wait_s / TRIES
                return
            if waiting.agreed.is_partial:
                is_open = waiting.key in self._incoming
                for other in self._offers.heads_of(waiting.path):
                    if not is_open or self._other_heads(other) is not None:
                        self._answer(other, is_last=True)
        self._try_s = -math.inf

    def _answer(self, waiting: Waiting, *, is_last: bool) -> bool:
        """Answer an offer; False if it waits for credits or room. A last try does not wait."""
        try:
            if not self._begin(waiting, self._other_heads(waiting), is_last=is_last):
                return False
        except Exception as error:  # the other offers go on
            log.exception("an offer of %s cannot be taken", waiting.offer.request_id)
            self._conclude(waiting, 0, TransferStatus.REFUSED, f"{type(error).__name__}: {error}")
        self._offers.remove(waiting.key)
        return True

    def _begin(self, waiting: Waiting, target: ArrivalBlocks | None, *, is_last: bool) -> bool:
        """As `_answer`. `target`: an arrival which waits for its heads."""
        assert self._arrivals is not None
        if target is not None:
            self._take(waiting, target)
            return True
        num_blocks = waiting.offer.num_blocks
        namespace = Namespace(*waiting.offer.namespace)
        if self._arrivals.num_cached(waiting.tokens, namespace, num_blocks) >= num_blocks:
            self._report(waiting, TransferStatus.DONE, "")
            return True
        num_free = self._options.max_credits - sum(each.credits for each in self._open)
        arrival = None
        if num_free > 0:
            account = Account(*waiting.offer.account)
            arrival = self._arrivals.begin_receive(waiting.tokens, namespace, num_blocks, account)
        if arrival is None:
            if is_last:
                reason = "no room for its blocks" if num_free > 0 else "too many transfers come"
                self._report(waiting, TransferStatus.RETRY, reason)
            return is_last
        target = ArrivalBlocks(arrival, min(num_free, self._options.credits))
        try:
            self._take(waiting, target)
        except Exception:
            self._incoming.pop((waiting.link, waiting.offer.transfer), None)
            self._arrivals.abort(arrival)
            raise
        self._open.append(target)
        return True

    def _take(self, waiting: Waiting, target: ArrivalBlocks) -> None:
        layout = waiting.agreed.wire or self._layout
        by_layer = layout if waiting.offer.by_layer and waiting.agreed.has_views else None
        plan = plan_of(len(target.arrival.block_ids), waiting.agreed, by_layer)
        incoming = Incoming(waiting, target, plan, target.share_of(waiting), self._clock.now())
        target.transfers.append(incoming)
        self._incoming[incoming.key] = incoming
        self._deadlines.set(incoming.key, self._due_s(incoming))
        self._worker.submit(self._accept, incoming)

    def _other_heads(self, waiting: Waiting) -> ArrivalBlocks | None:
        """The open arrival of the same path to which other ranks send other heads."""
        if not waiting.agreed.is_partial:
            return None
        mine = heads_of(waiting)
        for target in self._open:
            other = target.transfers[0].waiting
            if (
                other.offer.request_id == waiting.offer.request_id
                and other.agreed.is_partial
                and other.path == waiting.path
                and other.tokens == waiting.tokens
                and not any(each.failure or mine & heads_of(each.waiting) for each in target.transfers)
            ):
                return target
        return None

    def _accept(self, incoming: Incoming) -> None:
        """On the worker: hashes of a long prompt take milliseconds."""
        target, offer = incoming.target, incoming.waiting.offer
        try:
            if not target.hashes:
                path = target.arrival.tokens.slice(0, offer.num_blocks * self._block_size).tobytes()
                target.hashes = self._hashes_of(path, target.arrival.namespace)[target.arrival.first :]
        except Exception as error:
            log.exception("the tokens of %s cannot be hashed", offer.request_id)
            with self._changed:
                self._fail(incoming.key, TransferStatus.REFUSED, f"{type(error).__name__}: {error}")
            return
        self._post(
            incoming.waiting.link,
            Accept(
                offer.transfer, offer.attempt, target.arrival.epoch, target.arrival.first, incoming.credits
            ),
        )

    def _fail(self, key: Key, status: TransferStatus, reason: str) -> None:
        incoming = self._incoming.get(key)
        if incoming is not None and incoming.failure is None:
            incoming.failure = status, reason
            self._finished.append(key)
            self._changed.notify_all()

    def _lose(self, incoming: Incoming, reason: str) -> None:
        if incoming.failure is None:
            incoming.is_lost = True
            self._fail(incoming.key, TransferStatus.RETRY, reason)

    def fail_all(self, reason: str) -> None:
        """End all; nothing is offered again."""
        self._offers.clear()
        self._live.clear()
        for incoming in self._incoming.values():
            self._fail(incoming.key, TransferStatus.RETRY, reason)
            incoming.is_lost = False
        for lost in list(self._lost.values()):
            self._report(lost.waiting, TransferStatus.DONE, lost.reason)

    def _end(self, target: ArrivalBlocks) -> None:
        """Publish an arrival, if all its transfers are whole or one has failed."""
        failures = [each.failure for each in target.transfers if each.failure is not None]
        is_covered = target.is_covered
        if not failures and not (is_covered and all(each.is_whole for each in target.transfers)):
            return
        target.close()
        self._open.remove(target)
        for each in target.transfers:
            del self._incoming[each.key]
        self._try_s = -math.inf
        num_whole = min(each.num_whole() for each in target.transfers) if is_covered else 0
        assert self._arrivals is not None
        if num_whole:
            self._arrivals.publish(target.arrival, num_whole)
        else:
            self._arrivals.abort(target.arrival)
        status, reason = failures[0] if failures else (TransferStatus.DONE, "")
        for each in target.transfers:
            if each.is_lost:
                self._keep_lost(each.waiting, each.failure[1] if each.failure else reason)
            else:
                self._report(each.waiting, status, reason)

    def _keep_lost(self, waiting: Waiting, reason: str) -> None:
        self._forget(waiting)
        self._lost.pop(waiting.identity, None)  # so that they are in the order of time
        self._lost[waiting.identity] = Lost(waiting, reason, self._clock.now())

    def _report_lost(self, now: float) -> None:
        """Report transfers whose link was lost, and that were not offered again in time."""
        while self._has_lost(now):
            lost = next(iter(self._lost.values()))
            if lost.waiting.identity in self._live:
                self._keep_lost(lost.waiting, lost.reason)
            else:
                self._report(lost.waiting, TransferStatus.DONE, lost.reason)

    def _has_lost(self, now: float) -> bool:
        first = next(iter(self._lost.values()), None)
        return first is not None and now - first.since_s > self._options.resume_s

    def _report(self, waiting: Waiting, status: TransferStatus, reason: str) -> None:
        """Tell the sender, and the engine.

        What is DONE becomes RETRY, for this reason, if blocks are missing.
        """
        assert self._arrivals is not None
        namespace = Namespace(*waiting.offer.namespace)
        num_blocks = self._arrivals.num_cached(waiting.tokens, namespace, waiting.offer.num_blocks)
        if status is TransferStatus.DONE:
            is_there = num_blocks >= waiting.offer.num_blocks
            status = TransferStatus.DONE if is_there else TransferStatus.RETRY
            reason = "" if is_there else reason or "the blocks before them are gone"
        self._conclude(waiting, num_blocks * self._block_size, status, reason)

    def _conclude(self, waiting: Waiting, num_tokens: int, status: TransferStatus, reason: str) -> None:
        end = End(waiting.offer.transfer, num_tokens, status.value, reason_of(reason))
        self._ended.keep(waiting.sender.instance, end)
        self._forget(waiting)
        self._lost.pop(waiting.identity, None)
        self._post(waiting.link, end)
        self._received.append(
            ReceivedKV(
                waiting.offer.request_id, waiting.sender.node, waiting.tokens,
                Namespace(*waiting.offer.namespace), num_tokens, status, waiting.note, reason,
            )
        )  # fmt: skip

    def _post(self, link: int, message: Accept | Alive | End) -> None:
        self._transport.post(link, Message(message.kind, message.pack()))

    def under_way(self) -> list[IncomingKV]:
        """The offers that wait, and what comes."""
        found = []
        for waiting in self._live.values():
            known = IncomingKV(waiting.offer.request_id, waiting.sender.node, waiting.note, waiting.since_s)
            incoming = self._incoming.get(waiting.key)
            if incoming is not None and incoming.waiting is waiting:
                known = known._replace(
                    sign_s=incoming.progress_s, has_blocks=True, num_chunks=len(incoming.landed),
                    num_layers=incoming.num_layers(),
                )  # fmt: skip
            found.append(known)
        return found

    def take_received(self) -> list[ReceivedKV]:
        taken, self._received = self._received, []
        return taken

    @property
    def wants_blocks(self) -> bool:
        """Whether `advance` would take blocks, or publish some."""
        now = self._clock.now()
        has_offers = bool(self._new_heads) or (len(self._offers) > 0 and now >= self._try_s)
        return bool(self._finished) or has_offers or self._has_lost(now)

    @property
    def has_news(self) -> bool:
        return bool(self._received) or self.wants_blocks

    def check(self) -> None:
        """Raise `BookkeepingError` where transfers, credits and arrivals do not add up."""
        used = sum(each.credits for each in self._open)
        if used > self._options.max_credits:
            raise BookkeepingError(f"{used} credits are given, at most {self._options.max_credits}")
        for target in self._open:
            shared = sum(each.credits for each in target.transfers)
            if shared > target.credits + len(target.transfers) or not target.is_open:
                raise BookkeepingError(f"{target}: it is closed, or its transfers have {shared} credits")
        for each in self._incoming.values():
            if each.pending & each.landed or len(each.pending) > each.credits:
                raise BookkeepingError(f"{each}: a chunk has landed and is pending, or there are too many")
            if each.target not in self._open or each not in each.target.transfers:
                raise BookkeepingError(f"{each}: its arrival is closed")
        if self._arrivals is not None:
            self._arrivals.check()


def _tokens(data: bytes) -> Tokens:
    if sys.byteorder == "little":
        return Tokens.frombytes(data)
    swapped = array("i", data)
    swapped.byteswap()
    return Tokens.frombytes(swapped.tobytes())
