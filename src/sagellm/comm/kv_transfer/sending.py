"""`Sender`: the transfers that this instance sends.

A transfer is offered, accepted, sent in chunks and ended by the target. If its link is lost, or the target is
silent about it, it is offered again: the target has kept the leading blocks that verified, so only the rest
is sent (resume).
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from sagellm.comm.kv_transfer.blocks import InstanceBlocks
from sagellm.comm.kv_transfer.chunks import ChunkSpan, can_cut_by_layer, cut, cut_by_layer
from sagellm.comm.kv_transfer.deadlines import Deadlines
from sagellm.comm.kv_transfer.layouts import Agreement
from sagellm.comm.kv_transfer.messages import Accept, Ack, Alive, Cancel, ChunkHead, End, Kind, Offer
from sagellm.comm.kv_transfer.options import ChannelOptions, HashesOf
from sagellm.comm.kv_transfer.outgoing import Outgoing
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError, ConfigError, KVDataError
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


MESSAGE_SHARE = 0.05
"""Of `stall_s`: a message of several chunks should take no longer."""


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
        self._of_link: dict[int, dict[int, Outgoing]] = {}
        self._due: dict[int, dict[int, Outgoing]] = {}
        """By link, transfers that are offered as soon as the link is agreed on."""
        self._ended: dict[int, Outgoing] = {}
        """Those that the next `reports` names."""
        self._deadlines: Deadlines[int] = Deadlines()
        """When a transfer is looked at, even if nothing comes."""
        self._heard_s: dict[int, float] = {}
        """By link, when its other side last said anything."""
        self._num_begun = self._num_sent = 0
        self._starved: dict[int, dict[int, Outgoing]] = {}
        """By link, transfers for whose next chunk it had no memory, the first to wait first."""
        self._rates: dict[str, deque[tuple[int, float]]] = {}

    def begin(self, path: KVPath, target: str, link: int, num_blocks: int, *, by_layer: bool) -> Ticket:
        """Raises `ConfigError` for a path that no offer can name."""
        now, known = self._clock.now(), 0 if by_layer else num_blocks
        made = Outgoing(
            Ticket(self._num_begun + 1), path, target, link, by_layer, num_blocks,
            [known] * self._num_layers, now, now, path.block_ids[:],
        )  # fmt: skip
        made.offer_s = now
        try:
            Offer.unpack(self._offer_of(made).pack())
        except (KVDataError, TypeError) as error:
            raise ConfigError(f"this path cannot be offered: {error}") from error
        self._num_begun += 1
        self._transfers[made.number] = made
        self._join(made, link)
        return made.ticket

    def _join(self, transfer: Outgoing, link: int) -> None:
        """Have it offered on this link now."""
        transfer.link = link
        self._of_link.setdefault(link, {})[transfer.number] = transfer
        self._have_offered(transfer)
        self.offer_due(link)

    def move(self, old: int, new: int, reason: str) -> None:
        """The target has another link now, on which all is offered again."""
        now, moved = self._clock.now(), self._of_link.get(old, {})
        for transfer in [each for each in moved.values() if each.outcome is None]:
            del moved[transfer.number]
            self._withdraw(transfer)
            transfer.num_attempts = 0
            transfer.begin_anew(now)
            self._join(transfer, new)
        if not moved:
            self._of_link.pop(old, None)
        self._forget(old)
        self._transport.reset(old, reason)

    def _forget(self, link: int) -> None:
        """Its connection is lost."""
        self._heard_s.pop(link, None)
        self._starved.pop(link, None)

    def _have_offered(self, transfer: Outgoing) -> None:
        self._due.setdefault(transfer.link, {})[transfer.number] = transfer

    def _withdraw(self, transfer: Outgoing) -> None:
        """It is not to be offered now."""
        due = self._due.get(transfer.link, {})
        if due.pop(transfer.number, None) is not None and not due:
            del self._due[transfer.link]

    def offer_due(self, link: int) -> None:
        """Offer what is due on a link, if it is agreed on."""
        if self._agreement_of(link) is not None:
            for each in self._due.pop(link, {}).values():
                self._offer(each)

    @property
    def due_links(self) -> Sequence[int]:
        """Links on which transfers are to be offered."""
        return list(self._due)

    def is_due(self, link: int) -> bool:
        return link in self._due

    @property
    def has_news(self) -> bool:
        return bool(self._ended)

    def _offer(self, transfer: Outgoing) -> None:
        path = transfer.path
        transfer.offer_s, transfer.progress_s = None, self._clock.now()
        transfer.num_attempts += 1
        transfer.num_offers += 1
        offer = self._offer_of(transfer)
        self._transport.post(
            transfer.link, Message(offer.kind, offer.pack(), [path.tokens.tobytes(), path.note])
        )
        self._watch(transfer)

    def _offer_of(self, transfer: Outgoing) -> Offer:
        path = transfer.path
        by_layer = transfer.by_layer and self._layers_lie_together(transfer.link)
        return Offer(
            transfer.number, transfer.num_offers, path.request_id, path.namespace, path.account,
            len(path.tokens), transfer.num_blocks, by_layer, next(iter(self._transfers), transfer.number),
        )  # fmt: skip

    def _layers_lie_together(self, link: int) -> bool:
        agreed = self._agreement_of(link)
        return agreed is not None and agreed.has_views and can_cut_by_layer(self._layout)

    # -- what the target says

    def heard(self, link: int) -> None:
        """The other side of a link has said something."""
        self._heard_s[link] = self._clock.now()

    def accepted(self, link: int, accept: Accept) -> None:
        transfer, agreed = self._transfers.get(accept.transfer), self._agreement_of(link)
        is_known = transfer is not None and transfer.link == link and transfer.outcome is None
        if transfer is None or not is_known or agreed is None:
            cancel = Cancel(accept.transfer)
            self._transport.post(link, Message(cancel.kind, cancel.pack()))
            return
        if transfer.accept is not None or transfer.offer_s is not None:
            return  # a duplicate
        if accept.attempt != transfer.num_offers:
            return  # of an offer that was given up
        num_blocks = transfer.num_blocks - accept.first
        if num_blocks <= 0:
            self._fail(transfer, TransferStatus.REFUSED, "the target accepts blocks that were not offered")
            return
        transfer.progress_s = self._clock.now()
        by_layer = transfer.by_layer and self._layers_lie_together(link)
        plan = plan_of(num_blocks, agreed, self._layout if by_layer else None)
        transfer.begin(accept, plan, self._options.max_credits, transfer.progress_s)
        self._watch(transfer)
        self._send_more(transfer)

    def acknowledged(self, link: int, ack: Ack) -> None:
        transfer = self._live(link, ack.transfer, ack.epoch)
        if transfer is None:
            return
        transfer.progress_s = self._clock.now()
        transfer.landed(ack.good)
        for number in transfer.in_flight.intersection(ack.damaged):
            transfer.take_back(range(number, number + 1))
            transfer.failures[number] += 1
            if transfer.failures[number] > self._options.num_retries:
                self._fail(
                    transfer, TransferStatus.CORRUPT, f"chunk {number} arrived damaged again and again"
                )
                return
        if transfer.waits_for_layers:
            self._watch(transfer)
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
        self._forget(link)
        for transfer in self._of_link.get(link, {}).values():
            if transfer.outcome is not None or (transfer.offer_s is not None and transfer.offer_s > now):
                continue
            if transfer.offer_s is not None:  # it waited for the handshake
                transfer.num_attempts += 1
            if transfer.num_attempts > self._options.num_retries:
                self._end(transfer, TransferStatus.RETRY, reason)
            else:
                self._try_again(transfer)

    def _try_again(self, transfer: Outgoing) -> None:
        """Offer it once more, after a pause."""
        self._withdraw(transfer)
        pause_s = self._options.backoff_s * 2 ** (transfer.num_attempts - 1)
        transfer.begin_anew(self._clock.now() + pause_s)
        self._watch(transfer)

    def refused(self, link: int, reason: str) -> None:
        for transfer in self._of_link.get(link, {}).values():
            if transfer.outcome is None:
                self._end(transfer, TransferStatus.REFUSED, reason)

    def _live(self, link: int, number: int, epoch: int) -> Outgoing | None:
        transfer = self._transfers.get(number)
        if transfer is None or transfer.link != link or transfer.outcome is not None:
            return None
        return transfer if transfer.accept is not None and transfer.accept.epoch == epoch else None

    # -- what the engine says

    def extend(self, ticket: Ticket, block_ids: Sequence[int]) -> None:
        transfer = self._transfers.get(ticket.transfer_id)
        if transfer is not None:
            transfer.extend(block_ids)

    def computed(self, ticket: Ticket, num_layers: int, num_blocks: int | None) -> None:
        transfer = self._transfers.get(ticket.transfer_id)
        if transfer is not None:
            transfer.note_computed(num_layers, len(transfer.block_ids) if num_blocks is None else num_blocks)
            transfer.progress_s = self._clock.now()
            self._send_more(transfer)

    def layers_there(self, ticket: Ticket) -> int | None:
        transfer = self._transfers.get(ticket.transfer_id)
        return None if transfer is None or transfer.outcome is not None else transfer.layers_there

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
            self._note_quiet(transfer)

    def reports(self) -> list[TransferReport]:
        """Transfers that have ended since, and whose blocks nothing reads. Looks at those that are due."""
        now, silent = self._clock.now(), dict[int, str]()
        for number in self._deadlines.take_due(now):
            self._look_at(self._transfers[number], now, silent)
        for link, reason in silent.items():
            self._transport.reset(link, reason)
        ended, self._ended = self._ended, {}
        return [self._report(transfer) for transfer in ended.values()]

    def _report(self, transfer: Outgoing) -> TransferReport:
        assert transfer.outcome is not None
        del self._transfers[transfer.number]
        of_link = self._of_link[transfer.link]
        del of_link[transfer.number]
        if not of_link:
            del self._of_link[transfer.link]
        self._deadlines.drop(transfer.number)
        spent_s = transfer.ended_s - transfer.began_s
        if transfer.outcome is TransferStatus.DONE and transfer.num_bytes and spent_s > 0:
            rates = self._rates.setdefault(transfer.target, deque(maxlen=8))
            rates.append((transfer.num_bytes, spent_s))
        return TransferReport(
            transfer.ticket, transfer.outcome, transfer.num_tokens, transfer.num_bytes, spent_s,
            transfer.reason,
        )  # fmt: skip

    # -- what happens if nothing comes

    def _watch(self, transfer: Outgoing) -> None:
        self._deadlines.set(transfer.number, self._due_s(transfer))

    def _due_s(self, transfer: Outgoing) -> float:
        """When it is to be looked at, if nothing comes until then."""
        if transfer.outcome is not None:
            since_s = max(transfer.ended_s, transfer.progress_s)
            return since_s + self._options.drain_s if transfer.num_posted else math.inf
        if transfer.offer_s is not None:
            return transfer.offer_s
        agreed = self._agreement_of(transfer.link)
        if transfer.waits_for_layers and agreed is not None:
            return transfer.said_s + agreed.beat_s
        return transfer.progress_s + self._options.stall_s

    def _look_at(self, transfer: Outgoing, now: float, silent: dict[int, str]) -> None:
        """Do what is due; `silent` gets its link, if that is to be reset."""
        if self._due_s(transfer) <= now:
            if transfer.outcome is None and transfer.offer_s is not None:
                self._have_offered(transfer)
                return
            if transfer.waits_for_layers:
                transfer.said_s = now
                alive = Alive(transfer.number)
                self._transport.post(transfer.link, Message(alive.kind, alive.pack()))
            elif transfer.outcome is None:
                self._on_silence(transfer, now, silent)
            else:
                self._on_unread(transfer, now, silent)
        self._watch(transfer)

    def _on_silence(self, transfer: Outgoing, now: float, silent: dict[int, str]) -> None:
        """The target says nothing of this transfer.

        While its link is alive, this attempt alone is given up.
        """
        stall_s = self._options.stall_s
        reason = f"no answer for {stall_s:g} s"
        if not self._was_heard(transfer.link, now, stall_s):
            transfer.progress_s, silent[transfer.link] = now, reason
        elif transfer.num_attempts > self._options.num_retries:
            self._fail(transfer, TransferStatus.RETRY, reason)
        else:
            self._try_again(transfer)

    def _on_unread(self, transfer: Outgoing, now: float, silent: dict[int, str]) -> None:
        """A transfer has ended, and a chunk of it is still read. A link that is alive gets more time."""
        is_late = now - transfer.ended_s >= self._options.stall_s
        if is_late or not self._was_heard(transfer.link, now, self._options.drain_s):
            silent[transfer.link] = "a chunk of a transfer that has ended was not taken"
        transfer.progress_s = now

    def _was_heard(self, link: int, now: float, within_s: float) -> bool:
        return now - self._heard_s.get(link, -math.inf) < within_s

    @property
    def next_s(self) -> float:
        """When `reports` has something to do, even if nothing comes."""
        return self._deadlines.next_s

    def bandwidth_bytes_per_s(self, target: str) -> float | None:
        rates = self._rates.get(target)
        return sum(size for size, _ in rates) / sum(spent for _, spent in rates) if rates else None

    def _fail(self, transfer: Outgoing, status: TransferStatus, reason: str) -> None:
        """End it here, and tell the target."""
        if transfer.offer_s is None:
            cancel = Cancel(transfer.number)
            self._transport.post(transfer.link, Message(cancel.kind, cancel.pack()))
        self._end(transfer, status, reason)

    def _end(self, transfer: Outgoing, status: TransferStatus, reason: str) -> None:
        self._withdraw(transfer)
        transfer.outcome, transfer.reason, transfer.ended_s = status, reason, self._clock.now()
        self._watch(transfer)
        self._note_quiet(transfer)
        self._changed.notify_all()

    # -- chunks

    def sent(self, link: int, token: int) -> None:
        transfer = self._transfers.get(token)
        if transfer is None:
            return
        transfer.num_posted -= 1
        self._num_sent += 1
        self._note_quiet(transfer)
        for starved in self._starved.pop(link, {}).values():
            self._send_more(starved)

    def _note_quiet(self, transfer: Outgoing) -> None:
        if transfer.outcome is not None and transfer.is_quiet:
            self._ended[transfer.number] = transfer
            self._changed.notify_all()

    def _send_more(self, transfer: Outgoing) -> None:
        can_send = transfer.outcome is None and transfer.credits and transfer.todo
        agreed = self._agreement_of(transfer.link)
        if can_send and agreed is not None and not transfer.is_pumping:
            transfer.is_pumping = True
            self._submit(transfer, agreed)

    def _submit(self, transfer: Outgoing, agreed: Agreement) -> None:
        """Have chunks made, on the transport's thread if their bytes go unchanged."""
        if agreed.goes_unchanged:
            self._transport.call(partial(self._pump, transfer), copies=True)
        else:
            self._worker.submit(self._pump, transfer)

    def _pump(self, transfer: Outgoing) -> None:
        """Make and post a message of chunks, and go on while there are credits. Without the lock."""
        with self._changed:
            link, accept = transfer.link, transfer.accept
            agreed, numbers = self._agreement_of(link), range(0)
            if agreed is not None and accept is not None:
                numbers = transfer.next_chunks(self._num_together(transfer, agreed))
            if agreed is None or accept is None or not numbers:
                transfer.is_pumping = False
                self._note_quiet(transfer)
                return
            chunks, num_sent = transfer.plan[numbers.start : numbers.stop], self._num_sent
        try:
            head, payload = self._made(transfer, link, agreed, accept, numbers.start, chunks)
        except BlockingIOError:  # the link's memory is full
            with self._changed:
                transfer.take_back(numbers)
                if num_sent != self._num_sent:  # some is free again
                    self._submit(transfer, agreed)
                else:
                    transfer.is_pumping = False
                    self._starved.setdefault(link, {})[transfer.number] = transfer
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
            transfer.take_back(numbers[len(head.checksums) :])
            transfer.num_posted += 1
            if transfer.outcome is not None:
                self._watch(transfer)
            transfer.num_bytes += sum([part.nbytes for part in payload])
        self._transport.post(link, Message(Kind.CHUNK, head.pack(), payload, True, transfer.number))
        with self._changed:
            self._submit(transfer, agreed)

    def _num_together(self, transfer: Outgoing, agreed: Agreement) -> int:
        """How many chunks the next message may have.

        Over a slow link it is few, since a side that hears of none for `stall_s` gives up.
        """
        if not agreed.goes_unchanged:
            return 1
        most, time_s = self._options.together, self._options.stall_s * MESSAGE_SHARE
        return transfer.num_within(time_s, self._clock.now(), most)

    def _made(
        self, transfer: Outgoing, link: int, agreed: Agreement, accept: Accept, number: int,
        chunks: Sequence[ChunkSpan],
    ) -> tuple[ChunkHead, Sequence[memoryview]]:  # fmt: skip
        """The message of these chunks, or of the first of them.

        It has fewer where the link has memory for fewer.
        """
        if not transfer.hashes:
            tokens = transfer.path.tokens.tobytes()
            transfer.hashes = self._hashes_of(tokens, transfer.path.namespace)
        reserved = self._transport.reserve(
            link, self._transport.max_payload_bytes, len(chunks),
            is_registered=self._blocks.lies_in_shared_pages(agreed),
        )  # fmt: skip
        if reserved is not None:
            chunks = chunks[: len(reserved)]
        first = accept.first
        ids = [transfer.block_ids[first + chunk.first : first + chunk.stop] for chunk in chunks]
        try:
            codec, payload, checksums = self._blocks.payload(ids, chunks, agreed, reserved)
        except BaseException:
            for memory in reserved or ():
                self._transport.discard(link, memory)
            raise
        token_hash = transfer.hashes[first + max([chunk.stop for chunk in chunks]) - 1]
        digest = self._blocks.digest
        head = ChunkHead(transfer.number, accept.epoch, number, digest, token_hash, codec, tuple(checksums))
        return head, payload

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
    return cut(num_blocks, agreed.wire_bytes, agreed.chunk_bytes, has_views=agreed.goes_unchanged)
