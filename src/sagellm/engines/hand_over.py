"""`HandOvers`: an instance's side of requests that move between instances.

    prefill instance                              decode instance
    prefill(request, HandOver(PREFILL, peer))
    poll: sends the layers that are computed ---> PREALLOCATED -> TRANSFERRING
    ... its first token: the output says MOVED
    poll: sends the rest, or the whole prompt --> expect(request, HandOver(DECODE, peer)), before or after
                                                  READY: the engine gets the request, finds its KV cached
                                                  FAILED: the engine gets it, or it ends with an error

Between two steps, on the engine's thread: `poll` after each step, and while the engine is idle when the
channel has something or `idle_s` is over. KV is verified and published by the channel; so tokens never depend
on what comes here, nor on when: it only decides how long a request waits for its KV.

What has come is kept, that is pinned, until its request is admitted. A running request that lacks blocks
takes it (`PinnedPrefixes.give_way`), and KV without a request is kept for a while only.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sagellm.core.errors import BookkeepingError, ConfigError, RequestError
from sagellm.core.events import RequestFinished, RequestScheduled
from sagellm.core.protocols.fleet import (
    MAX_ATTEMPT,
    FailurePolicy,
    HandOver,
    HandOverPart,
    HandOverReport,
    HandOverState,
)
from sagellm.core.protocols.kv_transfer import (
    IncomingKV,
    ReceivedKV,
    Ticket,
    TransferReport,
    TransferStatus,
)
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import FinishReason, Namespace, Request, RequestOutput, Tokens
from sagellm.engines.transfers import KVTransfers

MAX_DECIDED = 4096
"""Hand-overs that have been decided here and are remembered, so that late KV of theirs is not kept."""
_NOTE = struct.Struct("<4sQ?")
"""What a transfer is, its attempt, and whether another follows if it fails."""
_MAGIC = b"HAND"
_ORDER = [
    HandOverState.BOOTSTRAPPING, HandOverState.PREALLOCATED, HandOverState.TRANSFERRING
]  # fmt: skip


class HandOverProgress(NamedTuple):
    """What happened since the last `poll`. `outputs`: of requests that ended without entering the engine."""

    outputs: Sequence[RequestOutput]
    reports: Sequence[HandOverReport]


@dataclass(slots=True, eq=False)
class _Awaited:
    """A request that waits for KV. `onward`: where it goes after its prompt. `sign_s`: when its KV was last
    heard of, or the request came; `seen_s`: the same by the channel's clock."""

    request: Request
    hand_over: HandOver
    onward: HandOver | None
    sign_s: float
    seen_s: float | None = None
    state: HandOverState = HandOverState.BOOTSTRAPPING
    num_layers: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        return self.request.request_id, self.hand_over.peer, self.hand_over.attempt


@dataclass(frozen=True, slots=True)
class _Early:
    """KV that has come, or failed to, before its request. `since_s`: when."""

    attempt: int
    source: str
    has_come: bool
    reason: str
    since_s: float


@dataclass(slots=True, eq=False)
class _Outgoing:
    """KV to send, or being sent. `ahead`: the transfer that began before the prompt was computed, while it
    lasts. `is_there`: it brought all. `has_left`: the request is not in the engine any more."""

    request_id: str
    tokens: Tokens
    namespace: Namespace
    hand_over: HandOver
    ahead: Ticket | None = None
    is_there: bool = False
    has_left: bool = False


class HandOvers:
    """Owns the hand-overs of an engine, for its life.

    Requests wait here for KV, and the KV of others goes from here. `max_early`: transfers without a request
    whose outcome is remembered, each for `early_s` seconds.
    """

    def __init__(self, transfers: KVTransfers, *, early_s: float = 30.0, max_early: int = 256) -> None:
        self.transfers, self._engine = transfers, transfers.engine
        self._pins, self._clock = transfers.engine.kv.pins, transfers.engine.clock
        self._early_s, self._max_early = early_s, max_early
        self._awaited: dict[str, _Awaited] = {}
        self._early: OrderedDict[str, _Early] = OrderedDict()
        """By request id, the oldest first."""
        self._decided: OrderedDict[str, int] = OrderedDict()
        """By request id: up to this attempt, KV that comes belongs to no request that waits or will come."""
        self._entering: set[str] = set()
        """Requests in the engine that were not admitted yet, for which KV may be kept."""
        self._leaving: dict[str, _Outgoing] = {}
        """Requests in the engine that leave it with their next token."""
        self._to_begin: list[str] = []
        """Requests of those that are computed now, or next."""
        self._to_send: deque[_Outgoing] = deque()
        self._sending: dict[Ticket, _Outgoing] = {}
        self._outputs: list[RequestOutput] = []
        self._reports: list[HandOverReport] = []
        events = self._engine.events
        self._unsubscribe = (
            events.subscribe(RequestScheduled, self._scheduled),
            events.subscribe(RequestFinished, self._finished),
        )

    # -- requests in and out

    def prefill(self, request: Request, hand_over: HandOver) -> None:
        """Compute the prompt and the next token; then send the KV to the peer.

        The request's only output has `FinishReason.MOVED`, unless it ends here with that token. Hints that
        it brought are applied where it ends. Raises `RequestError` as `Engine.add`.
        """
        _check_part(hand_over, HandOverPart.PREFILL)
        self._check_free(request, hand_over)
        self._add(request, hand_over)
        self._report(request.request_id, hand_over, HandOverState.BOOTSTRAPPING)
        self._send_ahead()
        self._send_moved()

    def expect(self, request: Request, hand_over: HandOver, onward: HandOver | None = None) -> None:
        """Give the request to the engine once its KV has come.

        Or when it does not come in time, if the policy says so. With `onward` its KV then goes to another
        peer, as by `prefill`. A later attempt takes the place of one that waits. Raises `RequestError` for a
        request that the engine would refuse now.
        """
        _check_part(hand_over, HandOverPart.DECODE, HandOverPart.FETCH)
        if onward is not None:
            _check_part(onward, HandOverPart.PREFILL)
        self._check_free(request, hand_over)
        name, early = request.request_id, self._early.get(request.request_id)
        awaited = self._awaited[name] = _Awaited(request, hand_over, onward, self._clock.now())
        self._decided.pop(name, None)
        self._report(name, hand_over, HandOverState.BOOTSTRAPPING)
        if early is not None and early.attempt <= hand_over.attempt:
            self._forget_early(name)
        if early is not None and (name, early.source, early.attempt) == awaited.key:
            self._settle(awaited, has_come=early.has_come, reason=early.reason)
        elif self._is_cached(awaited):
            self._settle(awaited, has_come=True, reason="")
        self._send_moved()

    def send_prefix(
        self,
        request_id: str,
        tokens: Tokens,
        peer: str,
        *,
        namespace: Namespace = Namespace(),
        attempt: int = 0,
    ) -> None:
        """Send what is cached of a prompt to a peer.

        It expects that by a FETCH, or by a DECODE of the same attempt. If nothing is cached, it is told so.
        """
        hand_over = HandOver(HandOverPart.FETCH, peer, attempt=attempt)
        self._to_send.append(_Outgoing(request_id, tokens, namespace, hand_over))
        self._send_moved()

    def abort(self, request_id: str) -> bool:
        """End a request, whatever it waits for; False if it is unknown.

        What comes for it later is cached as any other KV, but not kept.
        """
        known = self._awaited.pop(request_id, None) is not None
        self._forget_early(request_id)
        self._decide(request_id, MAX_ATTEMPT)
        self._stop_sending(lambda each: each.request_id == request_id, "")
        self._outputs = [output for output in self._outputs if output.request_id != request_id]
        known = self._engine.abort(request_id) or known
        self._send_moved()  # of a step that the abort has completed
        return known

    def fail(self, request_id: str, attempt: int, reason: str) -> None:
        """The KV of a request does not come, the front says; its policy decides.

        Nothing happens if it is not known, or this attempt does not wait.
        """
        awaited = self._awaited.get(request_id)
        if awaited is not None and awaited.hand_over.attempt == attempt:
            self._settle(awaited, has_come=False, reason=reason)
        self._send_moved()

    def add_peer(self, metadata: bytes) -> None:
        """Know where another instance takes KV; raises as `KVTransferChannel.add_peer`."""
        self.transfers.channel.add_peer(metadata)

    def peer_lost(self, peer: str) -> None:
        """All transfers from and to a peer fail; policies decide.

        A request whose prompt is computed for that peer still moves, and the front says where to.
        """
        reason = f"the instance {peer} was lost"
        self._stop_sending(lambda each: each.hand_over.peer == peer, reason)
        for awaited in [each for each in self._awaited.values() if each.hand_over.peer == peer]:
            self._settle(awaited, has_come=False, reason=reason)
        self._send_moved()

    def poll(self) -> HandOverProgress:
        """Move all hand-overs on; returns what happened since. Never waits for a peer."""
        self._send_ahead()
        self._send_moved()  # before what comes has anything evicted
        received = self.transfers.poll()
        self._send_moved()
        ended, self.transfers.reports = self.transfers.reports, []
        for report in ended:
            outgoing = self._sending.pop(report.ticket, None)
            if outgoing is not None:
                self._sent(outgoing, report)
        for arrived in received:
            self._take(arrived)
        if self._awaited:
            self._watch()
        while self._early and self._first_early_s() <= self._clock.now():
            self._forget_early(next(iter(self._early)))
        self._send_moved()
        progress = HandOverProgress(self._outputs, self._reports)
        self._outputs, self._reports = [], []
        return progress

    @property
    def has_work(self) -> bool:
        """Whether `poll` is needed while the engine has nothing to do."""
        waits = self._awaited or self._sending or self._to_send or self._early
        return bool(waits or self._outputs or self._reports)

    def idle_s(self) -> float | None:
        """Seconds until `poll` has something to do even if nothing comes; None: never."""
        if self._to_send or self._outputs or self._reports:
            return 0.0
        due_s = [each.sign_s + each.hand_over.lease_s for each in self._awaited.values()]
        if self._early:
            due_s.append(self._first_early_s())
        return max(0.0, min(due_s) - self._clock.now()) if due_s else None

    def close(self) -> None:
        """Forget all requests, and unpin what is kept for them. Transfers go on until they are closed."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        for name in [*self._early, *self._entering]:
            self._pins.drop(name)
        lists = self._to_begin, self._to_send
        for known in (self._awaited, self._early, self._entering, self._leaving, *lists):
            known.clear()

    def check(self) -> None:
        """Raise `BookkeepingError` where requests and what is kept for them do not add up."""
        unknown = set(self._pins.kept_names) - self._early.keys() - self._entering
        if unknown:
            raise BookkeepingError(f"KV is kept for {sorted(unknown)}, for which no request waits")
        if len(self._early) > self._max_early or len(self._decided) > MAX_DECIDED:
            raise BookkeepingError(f"{len(self._early)} transfers and {len(self._decided)} are remembered")
        twice = self._awaited.keys() & (self._entering | self._leaving.keys())
        if twice:
            raise BookkeepingError(f"{sorted(twice)} wait for KV and are in the engine")
        late = [name for name, each in self._awaited.items() if name in self._decided]
        if late:
            raise BookkeepingError(f"{late} wait for KV that would not be taken")

    # -- KV that leaves

    def _scheduled(self, event: RequestScheduled) -> None:
        """Its hit is pinned now."""
        if event.request_id in self._entering:
            self._entering.remove(event.request_id)
            self._pins.drop(event.request_id)
        if event.request_id in self._leaving:
            self._to_begin.append(event.request_id)

    def _finished(self, event: RequestFinished) -> None:
        """A request has left the engine. Called within a step: nothing is sent now."""
        name = event.request_id
        if name in self._entering:
            self._entering.remove(name)
            self._pins.drop(name)
        outgoing = self._leaving.pop(name, None)
        if outgoing is None:
            return
        outgoing.has_left = True
        if event.reason != FinishReason.MOVED.value:
            self._stop_sending(lambda each: each is outgoing, "")
        elif outgoing.ahead is None and not outgoing.is_there:
            self._to_send.append(outgoing)

    def _send_ahead(self) -> None:
        """Begin to send prompts that are computed from now on, while they are.

        The peer makes room for all of a prompt when its transfer begins, so none begins while it waits.
        """
        names, self._to_begin = self._to_begin, []
        for name in names:
            outgoing = self._leaving.get(name)
            if outgoing is not None and outgoing.ahead is None:
                self._begin_ahead(outgoing)

    def _begin_ahead(self, outgoing: _Outgoing) -> None:
        """Not for a request that goes on: its KV is more than its prompt's."""
        name, hand_over = outgoing.request_id, outgoing.hand_over
        state = self._engine.find(name)
        if state is None or state.request.generated or state.num_uncomputed < self._engine.kv.block_size:
            return
        note = _NOTE.pack(_MAGIC, hand_over.attempt, True)
        try:
            ticket = self.transfers.send_prefill(name, hand_over.peer, note)
        except (ConfigError, RequestError):  # it is sent, or that fails, when the request leaves
            return
        outgoing.ahead = ticket
        self._sending[ticket] = outgoing
        self._report(name, hand_over, HandOverState.TRANSFERRING)

    def _sent(self, outgoing: _Outgoing, report: TransferReport) -> None:
        """A transfer from here has ended."""
        is_done = report.status is TransferStatus.DONE
        if outgoing.ahead == report.ticket:
            outgoing.ahead, outgoing.is_there = None, is_done
            if not is_done:
                if outgoing.has_left:
                    self._to_send.append(outgoing)
                return
        state = HandOverState.READY if is_done else HandOverState.FAILED
        reason = "" if is_done else report.reason or report.status.value
        name, hand_over = outgoing.request_id, outgoing.hand_over
        self._report(name, hand_over, state, num_tokens=report.num_tokens, reason=reason)

    def _send_moved(self) -> None:
        """Send the KV of requests that have left, and of those that leave meanwhile."""
        while self._to_send:
            outgoing = self._to_send.popleft()
            name, hand_over = outgoing.request_id, outgoing.hand_over
            note = _NOTE.pack(_MAGIC, hand_over.attempt, False)
            try:
                ticket = self.transfers.send(name, outgoing.tokens, hand_over.peer, outgoing.namespace, note)
            except ConfigError as error:  # an unknown peer, or a name that no offer can hold
                self._report(name, hand_over, HandOverState.FAILED, reason=str(error))
                continue
            self._sending[ticket] = outgoing
            self._report(name, hand_over, HandOverState.TRANSFERRING)

    def _stop_sending(self, matches: Callable[[_Outgoing], bool], reason: str) -> None:
        """Send nothing more of these; with a reason, they have failed."""
        known = *self._leaving.values(), *self._to_send, *self._sending.values()
        stopped = dict.fromkeys(each for each in known if matches(each))
        self._leaving = {name: each for name, each in self._leaving.items() if not matches(each)}
        self._to_send = deque(each for each in self._to_send if not matches(each))
        for ticket, each in list(self._sending.items()):
            if matches(each):
                del self._sending[ticket]
                self.transfers.channel.cancel(ticket)
        for each in stopped if reason else ():
            self._report(each.request_id, each.hand_over, HandOverState.FAILED, reason=reason)

    # -- KV that comes

    def _take(self, arrived: ReceivedKV) -> None:
        """A transfer to this instance has ended."""
        attempt, name = _attempt_of(arrived.note), arrived.request_id
        has_come, reason = arrived.status is TransferStatus.DONE, arrived.reason or arrived.status.value
        if attempt is None or not (has_come or _is_last(arrived.note)):
            return
        awaited = self._awaited.get(name)
        if awaited is not None and (name, arrived.source, attempt) == awaited.key:
            self._settle(awaited, has_come=has_come, reason=reason)
            return
        early = self._early.get(name)
        known = [] if awaited is None else [awaited.hand_over.attempt]
        known += [] if early is None else [early.attempt]
        if attempt <= max([self._decided.get(name, -1), *known]):
            return
        self._forget_early(name)
        while len(self._early) >= self._max_early:
            self._forget_early(next(iter(self._early)))
        self._early[name] = _Early(attempt, arrived.source, has_come, reason, self._clock.now())
        self._engine.drain()
        hit = self._engine.kv.quotes.lookup(arrived.tokens, arrived.namespace, arrived.num_tokens)
        self._keep(name, hit)

    def _watch(self) -> None:
        """Renew leases by signs of transfers, and end those that are over."""
        signs: dict[tuple[str, str, int | None], IncomingKV] = {
            (each.request_id, each.source, _attempt_of(each.note)): each
            for each in self.transfers.channel.incoming()
        }
        now = self._clock.now()
        for awaited in list(self._awaited.values()):
            sign = signs.get(awaited.key)
            if sign is not None:
                self._note_sign(awaited, sign, now)
            if now - awaited.sign_s >= awaited.hand_over.lease_s:
                silence = f"no sign of its KV for {awaited.hand_over.lease_s:g} s"
                self._settle(awaited, has_come=False, reason=silence)

    def _note_sign(self, awaited: _Awaited, sign: IncomingKV, now: float) -> None:
        if sign.sign_s != awaited.seen_s:
            awaited.seen_s, awaited.sign_s = sign.sign_s, now
        state = _ORDER[bool(sign.has_blocks) + bool(sign.num_chunks)]
        state = max(state, awaited.state, key=_ORDER.index)
        num_layers = max(sign.num_layers, awaited.num_layers)
        if (state, num_layers) != (awaited.state, awaited.num_layers):
            awaited.state, awaited.num_layers = state, num_layers
            self._report(awaited.request.request_id, awaited.hand_over, state, num_layers=num_layers)

    def _settle(self, awaited: _Awaited, *, has_come: bool, reason: str) -> None:
        """The KV of a request is there, or does not come.

        A step in flight is completed first: what it has published may still fail.
        """
        self._engine.drain()
        request, hand_over = awaited.request, awaited.hand_over
        name, hit = request.request_id, self._cached(request)
        del self._awaited[name]
        self._decide(name, hand_over.attempt)
        takes_any = hand_over.part is HandOverPart.FETCH and hand_over.num_tokens is None
        is_ready = self._is_there(awaited, hit) or (takes_any and has_come)
        if is_ready:
            reason = ""
        elif has_come:
            reason = f"{hit.num_tokens} of {self._num_expected(awaited)} tokens came"
        if not is_ready and hand_over.policy is FailurePolicy.FAIL:
            self._end(request, f"its KV did not come from {hand_over.peer}: {reason}")
        else:
            self._keep(name, hit)
            self._entering.add(name)
            try:
                self._add(request, awaited.onward)
            except RequestError as error:
                self._entering.remove(name)
                self._pins.drop(name)
                self._end(request, str(error))
        state = HandOverState.READY if is_ready else HandOverState.FAILED
        self._report(
            name, hand_over, state, num_layers=awaited.num_layers, num_tokens=hit.num_tokens, reason=reason
        )

    def _num_expected(self, awaited: _Awaited) -> int:
        """Tokens, in whole blocks, that should come.

        Of all but the last token of the request, or of those that were announced.
        """
        request, size = awaited.request, self._engine.kv.block_size
        most, said = len(request.tokens) + len(request.generated) - 1, awaited.hand_over.num_tokens
        return (most if said is None else min(most, said)) // size * size

    def _is_there(self, awaited: _Awaited, hit: PrefixHit) -> bool:
        return hit.num_tokens >= self._num_expected(awaited)

    def _is_cached(self, awaited: _Awaited) -> bool:
        """Whether nothing has to come.

        What a step in flight has published counts once that is completed.
        """
        if not self._is_there(awaited, self._cached(awaited.request)):
            return False
        self._engine.drain()
        return self._is_there(awaited, self._cached(awaited.request))

    def _cached(self, request: Request) -> PrefixHit:
        kv, tokens = self._engine.kv, _tokens_of(request)
        return kv.quotes.lookup(tokens, kv.namespace_of(request.namespace), len(tokens) - 1)

    # -- books

    def _check_free(self, request: Request, hand_over: HandOver) -> None:
        """Raise `RequestError` unless the engine would take the request now.

        Also if this attempt of it or a later one waits; an earlier one is dropped.
        """
        self._engine.check_request(request)
        waiting = self._awaited.get(request.request_id)
        if waiting is not None and waiting.hand_over.attempt >= hand_over.attempt:
            raise RequestError(
                f"request {request.request_id!r} waits for KV already, as attempt "
                f"{waiting.hand_over.attempt}: abort it, or send a later attempt",
                "request_id",
            )
        self._awaited.pop(request.request_id, None)

    def _add(self, request: Request, onward: HandOver | None) -> None:
        if onward is None:
            self._engine.add(request)
            return
        name, is_next = request.request_id, not self._engine.stats().num_waiting
        self._engine.add(replace(request, moves=True, kv_hints=None))
        self._leaving[name] = _Outgoing(name, _tokens_of(request), request.namespace, onward)
        if is_next:
            self._to_begin.append(name)

    def _end(self, request: Request, error: str) -> None:
        num_prompt, num_output = len(request.tokens), len(request.generated)
        reason = FinishReason.ERROR
        output = RequestOutput(request.request_id, (), num_prompt, 0, num_output, (), reason, error)
        self._outputs.append(output)

    def _keep(self, name: str, hit: PrefixHit) -> None:
        """Pin a prefix, if need be in place of the oldest of `_early`."""
        for other in [each for each in self._early if each != name]:
            if self._pins.keep(name, hit):
                return
            self._pins.drop(other)
        self._pins.keep(name, hit)

    def _decide(self, name: str, attempt: int) -> None:
        self._decided[name] = max(attempt, self._decided.pop(name, 0))
        while len(self._decided) > MAX_DECIDED:
            self._decided.popitem(last=False)

    def _forget_early(self, name: str) -> None:
        if self._early.pop(name, None) is not None:
            self._pins.drop(name)

    def _first_early_s(self) -> float:
        return next(iter(self._early.values())).since_s + self._early_s

    def _report(
        self,
        name: str,
        hand_over: HandOver,
        state: HandOverState,
        *,
        num_layers: int = 0,
        num_tokens: int = 0,
        reason: str = "",
    ) -> None:
        self._reports.append(
            HandOverReport(name, hand_over.part, state, num_layers, num_tokens, reason, hand_over.attempt)
        )


def _check_part(hand_over: HandOver, *parts: HandOverPart) -> None:
    if hand_over.part not in parts:
        names = " or ".join(part.name for part in parts)
        raise ConfigError(f"a hand-over with part {hand_over.part.name}, {names} is expected here")


def _tokens_of(request: Request) -> Tokens:
    """The prompt, and what is generated of the answer."""
    tokens = Tokens(request.tokens)
    tokens.extend(request.generated)
    return tokens


def _attempt_of(note: bytes) -> int | None:
    """The attempt that a transfer belongs to; None if it is no hand-over."""
    if len(note) != _NOTE.size:
        return None
    magic, attempt, _ = _NOTE.unpack(note)
    return int(attempt) if magic == _MAGIC else None


def _is_last(note: bytes) -> bool:
    """Whether no other transfer follows if this one fails."""
    return not _NOTE.unpack(note)[2]
