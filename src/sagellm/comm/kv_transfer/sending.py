"""`Sender`: the transfers that this instance sends.

A transfer is offered, accepted, sent in chunks and ended by the target. If its link is lost, it is offered
again: the target has kept the leading blocks that verified, so only the rest is sent (resume).
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from sagellm.comm.kv_transfer.blocks import InstanceBlocks
from sagellm.comm.kv_transfer.chunks import ChunkSpan, can_cut_by_layer, cut, cut_by_layer
from sagellm.comm.kv_transfer.layouts import Agreement
from sagellm.comm.kv_transfer.messages import Accept, Ack, Alive, Cancel, ChunkHead, End, Kind, Offer
from sagellm.comm.kv_transfer.options import ChannelOptions, HashesOf
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError, ConfigError, KVDataError
from sagellm.core.protocols.kv_tiers import BlockHeader
from sagellm.core.protocols.kv_transfer import (
    BlockLayout,
    KVPath,
    Message,
    Ticket,
    TransferReport,
    TransferStatus,
    TransportEngine,
)

log = logging.getLogger("sagellm.kv_transfer")


@dataclass(slots=True)
class Outgoing:
    """One transfer. `credits`: chunks that may be sent now; `in_flight`: sent and not acknowledged.

    `num_posted`: chunks whose payload a transport may still read. `outcome`: how it ends, once that is known;
    it is reported when nothing reads its blocks any more.
    """

    ticket: Ticket
    path: KVPath
    target: str
    link: int
    by_layer: bool
    began_s: float
    progress_s: float
    all_layers: int
    """Of the model: a chunk of whole blocks waits for them, in a transfer by layer."""
    num_layers: int = 0
    num_attempts: int = 0
    offer_s: float | None = None
    """When it is to be offered again; None: it is offered."""
    accept: Accept | None = None
    plan: Sequence[ChunkSpan] = ()
    hashes: Sequence[bytes] = ()
    todo: deque[int] = field(default_factory=deque)
    in_flight: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)
    credits: int = 0
    num_posted: int = 0
    is_pumping: bool = False
    num_bytes: int = 0
    num_tokens: int = 0
    said_s: float = 0.0
    """When the target was last told that this side is alive."""
    outcome: TransferStatus | None = None
    reason: str = ""
    ended_s: float = 0.0

    def next_chunk(self) -> int | None:
        """A chunk that may be sent now; it is in flight from then on."""
        if self.outcome is not None or not self.credits or not self.todo:
            return None
        if self.by_layer and self._lacks_layers:
            return None
        number = self.todo.popleft()
        self.in_flight.add(number)
        self.credits -= 1
        return number

    def take_back(self, number: int) -> None:
        """The chunk was not sent."""
        if number in self.in_flight:
            self.in_flight.remove(number)
            self.todo.appendleft(number)
            self.credits += 1

    def begin_anew(self, offer_s: float) -> None:
        """Its link was lost: it is offered again then."""
        self.offer_s, self.accept, self.plan, self.credits = offer_s, None, (), 0
        self.todo.clear()
        self.in_flight.clear()

    @property
    def _lacks_layers(self) -> bool:
        """Whether the next chunk has layers that are not computed."""
        return (self.plan[self.todo[0]].num_layers or self.all_layers) > self.num_layers

    @property
    def waits_for_layers(self) -> bool:
        """Whether its next chunk is not computed yet, and none is on its way."""
        if self.outcome is not None or not self.by_layer or not self.todo or self.in_flight:
            return False
        return self._lacks_layers

    @property
    def waits_for_target(self) -> bool:
        return self.outcome is None and self.offer_s is None and not self.waits_for_layers

    @property
    def is_quiet(self) -> bool:
        """Whether nothing reads its blocks."""
        return not self.num_posted and not self.is_pumping


class Sender:
    """All methods but `_pump` are called with the channel's lock held."""

    def __init__(
        self, transport: TransportEngine, blocks: InstanceBlocks, layout: BlockLayout | None,
        hashes_of: HashesOf, agreement_of: Callable[[int], Agreement | None], changed: threading.Condition,
        worker: Executor, options: ChannelOptions, clock: Clock, num_layers: int,
    ) -> None:  # fmt: skip
        self._transport, self._blocks, self._layout = transport, blocks, layout
        self._num_layers = num_layers
        self._hashes_of, self._agreement_of, self._changed = hashes_of, agreement_of, changed
        self._worker, self._options, self._clock = worker, options, clock
        self._transfers: dict[int, Outgoing] = {}
        self._num_begun = self._num_sent = 0
        self._starved: dict[int, None] = {}
        """Transfers for whose next chunk a link had no memory, the first to wait first."""
        self._rates: dict[str, deque[tuple[int, float]]] = {}

    def begin(self, path: KVPath, target: str, link: int, *, by_layer: bool) -> Ticket:
        """Raises `ConfigError` for a path that no offer can name."""
        now = self._clock.now()
        made = Outgoing(Ticket(self._num_begun + 1), path, target, link, by_layer, now, now, self._num_layers)
        made.offer_s = now
        try:
            Offer.unpack(self._offer_of(made).pack())
        except (KVDataError, TypeError) as error:
            raise ConfigError(f"this path cannot be offered: {error}") from error
        self._num_begun += 1
        self._transfers[self._num_begun] = made
        self.offer_due(link)
        return made.ticket

    def move(self, old: int, new: int, reason: str) -> None:
        """The target has another link now, on which all is offered again."""
        now = self._clock.now()
        for transfer in self._on(old):
            if transfer.outcome is None:
                transfer.link, transfer.num_attempts = new, 0
                transfer.begin_anew(now)
        self._transport.reset(old, reason)

    def offer_due(self, link: int) -> None:
        """Offer what is due on a link that is agreed on."""
        if self._agreement_of(link) is None:
            return
        now = self._clock.now()
        for each in self._on(link):
            if each.outcome is None and each.offer_s is not None and each.offer_s <= now:
                self._offer(each, now)

    def is_due(self, link: int) -> bool:
        """Whether a transfer waits for a handshake on this link."""
        now = self._clock.now()
        return any(
            each.outcome is None and each.offer_s is not None and each.offer_s <= now
            for each in self._on(link)
        )

    @property
    def has_news(self) -> bool:
        return any(each.outcome is not None and each.is_quiet for each in self._transfers.values())

    def _on(self, link: int) -> list[Outgoing]:
        return [each for each in self._transfers.values() if each.link == link]

    def _offer(self, transfer: Outgoing, now: float) -> None:
        path, offer = transfer.path, self._offer_of(transfer)
        transfer.offer_s, transfer.progress_s = None, now
        transfer.num_attempts += 1
        self._transport.post(
            transfer.link, Message(offer.kind, offer.pack(), [path.tokens.tobytes(), path.note])
        )

    def _offer_of(self, transfer: Outgoing) -> Offer:
        path, number = transfer.path, transfer.ticket.transfer_id
        by_layer = transfer.by_layer and self._layers_lie_together(transfer.link)
        return Offer(
            number, path.request_id, path.namespace, path.account, len(path.tokens), len(path.block_ids),
            by_layer, next(iter(self._transfers), number),
        )  # fmt: skip

    def _layers_lie_together(self, link: int) -> bool:
        agreed = self._agreement_of(link)
        return agreed is not None and agreed.has_views and can_cut_by_layer(self._layout)

    # -- what the target says

    def accepted(self, link: int, accept: Accept) -> None:
        transfer, agreed = self._transfers.get(accept.transfer), self._agreement_of(link)
        is_known = transfer is not None and transfer.link == link and transfer.outcome is None
        if transfer is None or not is_known or agreed is None:
            cancel = Cancel(accept.transfer)
            self._transport.post(link, Message(cancel.kind, cancel.pack()))
            return
        if transfer.accept is not None or transfer.offer_s is not None:
            return  # a duplicate
        num_blocks = len(transfer.path.block_ids) - accept.first
        if num_blocks <= 0:
            self._fail(transfer, TransferStatus.REFUSED, "the target accepts blocks that were not offered")
            return
        transfer.accept, transfer.progress_s = accept, self._clock.now()
        transfer.credits = min(accept.credits, self._options.max_credits)
        by_layer = transfer.by_layer and self._layers_lie_together(link)
        transfer.plan = plan_of(num_blocks, agreed, self._layout if by_layer else None)
        transfer.todo = deque(range(len(transfer.plan)))
        self._send_more(transfer)

    def acknowledged(self, link: int, ack: Ack) -> None:
        transfer = self._live(link, ack.transfer, ack.epoch)
        if transfer is None:
            return
        transfer.progress_s = self._clock.now()
        landed = transfer.in_flight.intersection(ack.good)
        transfer.in_flight -= landed
        transfer.credits += len(landed)
        for number in transfer.in_flight.intersection(ack.damaged):
            transfer.take_back(number)
            transfer.failures[number] += 1
            if transfer.failures[number] > self._options.num_retries:
                self._fail(
                    transfer, TransferStatus.CORRUPT, f"chunk {number} arrived damaged again and again"
                )
                return
        self._send_more(transfer)

    def alive(self, link: int, alive: Alive) -> None:
        """The target has it wait for room, or for other ranks."""
        transfer = self._transfers.get(alive.transfer)
        if transfer is not None and transfer.link == link:
            transfer.progress_s = self._clock.now()

    def ended(self, link: int, end: End) -> None:
        transfer = self._transfers.get(end.transfer)
        if transfer is None or transfer.link != link or transfer.outcome is not None:
            return
        if transfer.offer_s is not None:
            return  # of an attempt that was given up
        transfer.num_tokens = min(end.num_tokens, len(transfer.path.tokens))
        self._end(transfer, end.outcome, end.reason)

    def lost(self, link: int, reason: str) -> None:
        now = self._clock.now()
        for transfer in self._on(link):
            if transfer.outcome is not None or (transfer.offer_s is not None and transfer.offer_s > now):
                continue
            if transfer.offer_s is not None:  # it waited for the handshake
                transfer.num_attempts += 1
            transfer.begin_anew(now + self._options.backoff_s * 2 ** (transfer.num_attempts - 1))
            if transfer.num_attempts > self._options.num_retries:
                self._end(transfer, TransferStatus.RETRY, reason)

    def refused(self, link: int, reason: str) -> None:
        for transfer in self._on(link):
            if transfer.outcome is None:
                self._end(transfer, TransferStatus.REFUSED, reason)

    def _live(self, link: int, number: int, epoch: int) -> Outgoing | None:
        transfer = self._transfers.get(number)
        if transfer is None or transfer.link != link or transfer.outcome is not None:
            return None
        return transfer if transfer.accept is not None and transfer.accept.epoch == epoch else None

    # -- what the engine says

    def computed(self, ticket: Ticket, num_layers: int) -> None:
        transfer = self._transfers.get(ticket.transfer_id)
        if transfer is not None:
            transfer.num_layers = max(transfer.num_layers, num_layers)
            transfer.progress_s = self._clock.now()
            self._send_more(transfer)

    def cancel(self, ticket: Ticket) -> None:
        transfer = self._transfers.get(ticket.transfer_id)
        if transfer is not None and transfer.outcome is None:
            self._fail(transfer, TransferStatus.CANCELLED, "cancelled")

    def fail_all(self, reason: str) -> None:
        """The transport and the worker have ended, so nothing reads blocks any more."""
        for transfer in self._transfers.values():
            transfer.num_posted, transfer.is_pumping = 0, False
            if transfer.outcome is None:
                self._end(transfer, TransferStatus.CANCELLED, reason)

    def reports(self) -> list[TransferReport]:
        """Transfers that have ended since, and whose blocks nothing reads. Resets what has stalled."""
        now, found, stalled = self._clock.now(), [], dict[int, str]()
        for number, transfer in list(self._transfers.items()):
            if transfer.outcome is not None and transfer.is_quiet:
                del self._transfers[number]
                found.append(self._report(transfer, transfer.outcome))
            elif transfer.waits_for_layers:
                self._say_alive(transfer, now)
            elif self._deadline_s(transfer) < now:
                transfer.progress_s = now
                silence = f"no answer for {self._options.stall_s:g} s"
                taken = "a chunk of a transfer that has ended was not taken"
                stalled[transfer.link] = silence if transfer.outcome is None else taken
        for link, reason in stalled.items():
            self._transport.reset(link, reason)
        return found

    def _report(self, transfer: Outgoing, outcome: TransferStatus) -> TransferReport:
        spent_s = transfer.ended_s - transfer.began_s
        if outcome is TransferStatus.DONE and transfer.num_bytes and spent_s > 0:
            rates = self._rates.setdefault(transfer.target, deque(maxlen=8))
            rates.append((transfer.num_bytes, spent_s))
        return TransferReport(
            transfer.ticket, outcome, transfer.num_tokens, transfer.num_bytes, spent_s, transfer.reason
        )

    def _say_alive(self, transfer: Outgoing, now: float) -> None:
        agreed = self._agreement_of(transfer.link)
        if agreed is not None and now - transfer.said_s >= agreed.beat_s:
            transfer.said_s = now
            alive = Alive(transfer.ticket.transfer_id)
            self._transport.post(transfer.link, Message(alive.kind, alive.pack()))

    def _deadline_s(self, transfer: Outgoing) -> float:
        """When its link is reset, if nothing comes until then."""
        if transfer.outcome is not None:
            since_s = max(transfer.ended_s, transfer.progress_s)
            return since_s + self._options.drain_s if transfer.num_posted else math.inf
        return transfer.progress_s + self._options.stall_s if transfer.waits_for_target else math.inf

    def deadlines(self) -> Iterator[float]:
        """When `poll` has something to do, even if nothing comes."""
        now = self._clock.now()
        for transfer in self._transfers.values():
            agreed = self._agreement_of(transfer.link)
            if transfer.waits_for_layers and agreed is not None:
                yield transfer.said_s + agreed.beat_s
            elif transfer.outcome is None and transfer.offer_s is not None and transfer.offer_s > now:
                yield transfer.offer_s
            else:
                yield self._deadline_s(transfer)

    def bandwidth_bytes_per_s(self, target: str) -> float | None:
        rates = self._rates.get(target)
        return sum(size for size, _ in rates) / sum(spent for _, spent in rates) if rates else None

    def _fail(self, transfer: Outgoing, status: TransferStatus, reason: str) -> None:
        """End it here, and tell the target."""
        if transfer.offer_s is None:
            cancel = Cancel(transfer.ticket.transfer_id)
            self._transport.post(transfer.link, Message(cancel.kind, cancel.pack()))
        self._end(transfer, status, reason)

    def _end(self, transfer: Outgoing, status: TransferStatus, reason: str) -> None:
        transfer.outcome, transfer.reason, transfer.ended_s = status, reason, self._clock.now()
        self._changed.notify_all()

    # -- chunks

    def sent(self, token: int) -> None:
        transfer = self._transfers.get(token)
        if transfer is None:
            return
        transfer.num_posted -= 1
        self._num_sent += 1
        self._note_quiet(transfer)
        starved, self._starved = self._starved, {}
        for number in starved:
            if number in self._transfers:
                self._send_more(self._transfers[number])

    def _note_quiet(self, transfer: Outgoing) -> None:
        if transfer.outcome is not None and transfer.is_quiet:
            self._changed.notify_all()

    def _send_more(self, transfer: Outgoing) -> None:
        can_send = transfer.outcome is None and transfer.credits and transfer.todo
        agreed = self._agreement_of(transfer.link)
        if can_send and agreed is not None and not transfer.is_pumping:
            transfer.is_pumping = True
            self._submit(transfer, agreed)

    def _submit(self, transfer: Outgoing, agreed: Agreement) -> None:
        """Have a chunk made, on the transport's thread if its bytes go unchanged."""
        if agreed.has_views and not agreed.codec:
            self._transport.call(partial(self._pump, transfer))
        else:
            self._worker.submit(self._pump, transfer)

    def _pump(self, transfer: Outgoing) -> None:
        """Make and post a chunk, and go on while there are credits. Without the lock."""
        with self._changed:
            link, accept = transfer.link, transfer.accept
            agreed = self._agreement_of(link)
            number = None if agreed is None or accept is None else transfer.next_chunk()
            if agreed is None or accept is None or number is None:
                transfer.is_pumping = False
                self._note_quiet(transfer)
                return
            chunk, num_sent = transfer.plan[number], self._num_sent
        try:
            message = self._made(transfer, link, agreed, accept, number, chunk)
        except BlockingIOError:  # the link's memory is full
            with self._changed:
                transfer.take_back(number)
                if num_sent != self._num_sent:  # some is free again
                    self._submit(transfer, agreed)
                else:
                    transfer.is_pumping = False
                    self._starved[transfer.ticket.transfer_id] = None
                    self._note_quiet(transfer)
            return
        except Exception as error:
            log.exception("reading KV of %s failed", transfer.path.request_id)
            with self._changed:
                transfer.is_pumping = False
                self._note_quiet(transfer)
                if transfer.outcome is None:
                    self._fail(transfer, TransferStatus.RETRY, f"reading its blocks failed: {error}")
            return
        with self._changed:
            transfer.num_posted += 1
            transfer.num_bytes += sum(memoryview(part).nbytes for part in message.payload)
        self._transport.post(link, message)
        with self._changed:
            self._submit(transfer, agreed)

    def _made(
        self, transfer: Outgoing, link: int, agreed: Agreement, accept: Accept, number: int, chunk: ChunkSpan
    ) -> Message:
        if not transfer.hashes:
            tokens = transfer.path.tokens.tobytes()
            transfer.hashes = self._hashes_of(tokens, transfer.path.namespace)
        ids = transfer.path.block_ids[accept.first + chunk.first : accept.first + chunk.stop]
        reserved = self._transport.reserve(link, self._transport.max_payload_bytes)
        try:
            codec, payload, checksum = self._blocks.payload(ids, chunk, agreed, reserved)
            header = BlockHeader(
                self._blocks.digest, transfer.hashes[accept.first + chunk.stop - 1], codec,
                sum(memoryview(part).nbytes for part in payload), checksum,
            )  # fmt: skip
        except BaseException:
            if reserved is not None:
                self._transport.discard(link, reserved)
            raise
        head = ChunkHead(transfer.ticket.transfer_id, accept.epoch, number, header)
        return Message(Kind.CHUNK, head.pack(), payload, True, transfer.ticket.transfer_id)

    def check(self) -> None:
        """Raise `BookkeepingError` where transfers and chunks do not add up."""
        for transfer in self._transfers.values():
            flying, todo = transfer.in_flight, set(transfer.todo)
            if flying & todo or len(todo) != len(transfer.todo) or transfer.num_posted < 0:
                raise BookkeepingError(f"{transfer}: a chunk is in flight and to be sent, or is so twice")
            accept = transfer.accept
            if accept is not None and transfer.credits + len(flying) != min(
                accept.credits, self._options.max_credits
            ):
                raise BookkeepingError(f"{transfer}: its credits do not add up")


def plan_of(num_blocks: int, agreed: Agreement, by_layer: BlockLayout | None) -> list[ChunkSpan]:
    """The chunks of a transfer, equal on both sides. `by_layer`: the layout, for a transfer by layer."""
    if by_layer is not None:
        return cut_by_layer(num_blocks, by_layer, agreed.chunk_bytes)
    has_views = agreed.has_views and not agreed.codec
    return cut(num_blocks, agreed.wire_bytes, agreed.chunk_bytes, has_views=has_views)
