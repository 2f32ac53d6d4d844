"""`InstanceServer`: one engine, served to fronts over ZeroMQ.

A front says `Hello` and has a session: the requests and pins that it has here. The session ends with the
front's lease, when another front takes over, or when the front does not read; its requests are aborted then,
so that nothing of a front that has died stays. Everything happens on the thread that calls `run`, between two
steps of the engine.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import zmq

from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet.load import LoadMeter
from sagellm.control_plane.fleet.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Abort,
    AddPeer,
    AlivePing,
    CallAnswer,
    Drain,
    FromFront,
    FromInstance,
    FrontCall,
    FrontHello,
    Goodbye,
    HandedOver,
    Load,
    LosePeer,
    MessageError,
    Outputs,
    Pinned,
    RefusedSubmit,
    Submit,
    Welcome,
    WireOutput,
    arguments_of,
    changes_of,
    encode,
    from_front,
    wire_error,
)
from sagellm.control_plane.kv_events import KVEventPublisher
from sagellm.control_plane.kv_events._doorbell import Doorbell
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError, ConfigError, RequestError, SageError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus, IndexCleared
from sagellm.core.protocols.engine import EngineCore, PinnedPrefix
from sagellm.core.protocols.fleet import HandOver, HandOverPart, HandOverReport, InstanceFacts
from sagellm.core.protocols.router import InstanceType
from sagellm.core.types import FinishReason, Namespace, Request, RequestOutput, Tokens

log = logging.getLogger("sagellm.fleet")
REPORT_S = 0.1
"""The load is reported so often while it changes, and ten times as seldom while it does not."""
HEARTBEAT_MS, SILENCE_MS = 500, 2000
"""ZeroMQ's own heartbeats, which a thread of its library answers also while a step computes."""
MAX_UNSENT = 100_000
"""Messages for a front that does not read; then its session ends."""
MAX_CHANGES = 100_000
"""Cache events between two turns. Beyond that they are dropped and the front is told so."""
_LOOK_S = 0.001
"""While KV moves, it is looked at so often."""


class Progress(Protocol):
    """What `HandOverSide.poll` has found."""

    @property
    def outputs(self) -> Sequence[RequestOutput]: ...

    @property
    def reports(self) -> Sequence[HandOverReport]: ...


class HandOverSide(Protocol):
    """An engine's part in hand-overs (`engines/hand_over.py`)."""

    def prefill(self, request: Request, hand_over: HandOver) -> None: ...

    def expect(self, request: Request, hand_over: HandOver, onward: HandOver | None = None) -> None: ...

    def send_prefix(
        self, request_id: str, tokens: Tokens, peer: str, *, namespace: Namespace = ..., attempt: int = ...
    ) -> None: ...

    def fail(self, request_id: str, attempt: int, reason: str) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    def add_peer(self, metadata: bytes) -> None: ...

    def peer_lost(self, peer: str) -> None: ...

    def poll(self) -> Progress: ...

    @property
    def has_work(self) -> bool: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Session:
    """What a front has here. `identity`: its socket's, made by ZeroMQ."""

    identity: bytes
    front_id: str
    lease_s: float
    heard_s: float
    requests: set[str] = field(default_factory=set)
    pins: dict[int, PinnedPrefix] = field(default_factory=dict)


class InstanceServer:
    """Serves one engine at an endpoint, which is bound when it is made.

    `endpoint`: `tcp://host:port`, port 0 for a free one, or `ipc://path`.

    `actions`: calls that need more than the engine (`set_policy`, ...), by name. `publisher`: of the engine's
    KV events for others. `version`: of this software. Raises `ConfigError` for an endpoint that cannot be
    bound.
    """

    def __init__(
        self,
        instance_id: str,
        engine: EngineCore,
        endpoint: str,
        key: FleetKey,
        *,
        max_model_len: int,
        kind: InstanceType = InstanceType.GENERAL,
        events: EventBus | None = None,
        hand_overs: HandOverSide | None = None,
        transfers: bytes = b"",
        actions: Mapping[str, Callable[..., Any]] | None = None,
        report_s: float = REPORT_S,
        publisher: KVEventPublisher | None = None,
        version: str = "",
        clock: Clock | None = None,
    ) -> None:
        if kind is InstanceType.HYBRID and not transfers:
            kind = InstanceType.GENERAL  # without an exchange of KV it cannot have a part
        self.instance_id, self.engine, self.kind = instance_id, engine, kind
        self.hand_overs, self.publisher, self._actions = hand_overs, publisher, dict(actions or {})
        self._clock = clock or MonotonicClock()
        self._sessions: dict[bytes, _Session] = {}
        self._owner: dict[str, _Session] = {}
        self._pin_ids = itertools.count(1)
        self._stopping, self._report_s = False, report_s
        capability, self._began_s = engine.capability(), self._clock.now()
        self._facts = InstanceFacts(
            instance_id, secrets.token_hex(8), kind, capability, max_model_len, os.getpid(), transfers,
            version=version,
            kv_events="" if publisher is None else publisher.endpoint,
            kv_replay="" if publisher is None else publisher.replay_endpoint or "",
        )  # fmt: skip
        bus = events or EventBus()
        self._load = LoadMeter(capability, bus, self._clock)
        self._reported: tuple[float, object] = (-1.0, None)
        self._changes: list[BlocksStored | BlocksRemoved | IndexCleared] = []
        self._num_dropped = 0
        self._unsubscribe = [
            bus.subscribe(BlocksStored, self._on_change),
            bus.subscribe(BlocksRemoved, self._on_change),
            bus.subscribe(IndexCleared, self._on_change),
        ]
        self._context = zmq.Context()
        self._bell = Doorbell()
        self._socket = self._bound(endpoint, key)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell.fileno(), zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        """Where it is bound."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def run(self) -> None:
        """Serve until `stop`. An error that leaves the engine leaves this too: only a new one can go on."""
        while not self._stopping:
            self.turn()

    def stop(self) -> None:
        """Have `run` return. For any thread."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        """End a `turn` that waits. For any thread."""
        self._bell.ring()

    def turn(self) -> None:
        """Take in what fronts say, run one step, and tell them what it gave."""
        for identity, data in self._received(self._wait_s()):
            self._take(identity, data)
        self._end_leases()
        outputs = self.engine.step() if self.engine.has_work() else ()
        reports: Sequence[HandOverReport] = ()
        if self.hand_overs is not None:
            progress = self.hand_overs.poll()
            outputs, reports = [*outputs, *progress.outputs], progress.reports
        self._send_changes()  # first: a front with the tokens may ask for the prefix
        self._send_outputs(outputs)
        self._send_reports(reports)
        self._send_load()

    def close(self) -> None:
        """End all sessions and free the socket; the engine is the caller's."""
        for session in list(self._sessions.values()):
            self._end(session, "this instance ends")
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._load.close()
        self._socket.close(linger=0)
        self._context.term()
        self._bell.close()

    def check(self) -> None:
        """Raise `BookkeepingError` unless each request has the session that says so."""
        owned = {(request_id, session.identity) for request_id, session in self._owner.items()}
        held = {(name, session.identity) for session in self._sessions.values() for name in session.requests}
        if owned != held:
            raise BookkeepingError(f"requests of sessions: {sorted(owned ^ held)} are known on one side only")

    # ------------------------------------------------------------------------------------ messages in

    def _wait_s(self) -> float:
        if self._stopping or self.engine.has_work():
            return 0.0
        if self.hand_overs is not None and self.hand_overs.has_work:
            return _LOOK_S
        idle_s = self.engine.idle_s()
        return self._report_s if idle_s is None else min(idle_s, self._report_s)

    def _received(self, wait_s: float) -> list[tuple[bytes, bytes]]:
        ready = dict(self._poller.poll(round(wait_s * 1000)))
        if self._bell.fileno() in ready:
            self._bell.hush()
        found: list[tuple[bytes, bytes]] = []
        while self._socket in ready:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            found.append((frames[0], frames[-1]))
        return found

    def _take(self, identity: bytes, data: bytes) -> None:
        try:
            message = from_front(data)
        except MessageError as error:
            log.warning("a front sent what cannot be read, and was passed over: %s", error)
            return
        session = self._sessions.get(identity)
        if isinstance(message, FrontHello):
            self._greet(identity, message)
        elif session is None:
            self._post(identity, Goodbye("the session has ended"))
        else:
            session.heard_s = self._clock.now()
            self._carry_out(session, message)

    def _greet(self, identity: bytes, hello: FrontHello) -> None:
        if hello.protocol != PROTOCOL:
            log.error("a front speaks protocol %d, this instance %d", hello.protocol, PROTOCOL)
            self._post(identity, Welcome(PROTOCOL))
            return
        if (former := self._sessions.get(identity)) is not None:
            self._end(former, "its front begins anew")
        for session in list(self._sessions.values()):
            if session.front_id == hello.front_id:
                self._end(session, "its front begins anew")
            elif hello.takes_over:
                self._end(session, "another front takes over")
        self._sessions[identity] = _Session(identity, hello.front_id, hello.lease_s, self._clock.now())
        self._reported = (-1.0, None)
        facts = replace(self._facts, uptime_s=self._clock.now() - self._began_s)
        self._post(identity, Welcome(PROTOCOL, encode(facts)))
        stats = self.engine.stats()
        if stats.blocks_active or stats.blocks_cached:
            self._post(identity, changes_of((), is_complete=False))

    def _carry_out(self, session: _Session, message: FromFront) -> None:
        match message:
            case Submit(request, hand_over, onward, age_s):
                arrived = replace(request, arrival_s=self._clock.now() - age_s)
                self._submit(session, arrived, hand_over, onward)
            case Abort(request_id):
                self._abort(session, request_id)
            case FrontCall():
                self._post(session.identity, self._answer(session, message))
            case Drain(draining):
                self._facts = replace(self._facts, draining=draining)
            case AddPeer(facts):
                if self.hand_overs is not None and facts.transfers:
                    self.hand_overs.add_peer(facts.transfers)
            case LosePeer(instance_id):
                if self.hand_overs is not None:
                    self.hand_overs.peer_lost(instance_id)
            case FrontHello() | AlivePing():
                pass

    def _submit(
        self, session: _Session, request: Request, hand_over: HandOver | None, onward: HandOver | None
    ) -> None:
        request_id = request.request_id
        try:
            if request_id in self._owner:
                raise RequestError(f"request id {request_id!r} is in use: send another", "request_id")
            if hand_over is None:
                self.engine.add(request)
            elif self.hand_overs is None:
                raise RequestError(f"{self.instance_id} exchanges no KV with other instances")
            elif hand_over.part is HandOverPart.PREFILL:
                self.hand_overs.prefill(request, hand_over)
            else:
                self.hand_overs.expect(request, hand_over, onward)
        except SageError as error:
            self._post(session.identity, RefusedSubmit(request_id, wire_error(error)))
            return
        self._owner[request_id] = session
        session.requests.add(request_id)
        self._load.enter(request_id, len(request.tokens))

    def _abort(self, session: _Session, request_id: str) -> None:
        if self._owner.get(request_id) is not session:
            return
        self._forget(request_id)
        abort = self.engine.abort if self.hand_overs is None else self.hand_overs.abort
        abort(request_id)

    def _forget(self, request_id: str) -> None:
        session = self._owner.pop(request_id, None)
        if session is not None:
            session.requests.discard(request_id)
        self._load.leave(request_id)

    def _answer(self, session: _Session, call: FrontCall) -> CallAnswer:
        try:
            result = self._called(session, call.name, arguments_of(call))
        except Exception as error:
            if not isinstance(error, SageError):  # of a plug-in, most likely: only this call has failed
                log.exception("a call of a front failed; the engine goes on")
            return CallAnswer(call.call_id, error=wire_error(error))
        return CallAnswer(call.call_id, encode(result))

    def _called(self, session: _Session, name: str, given: Sequence[Any]) -> Any:
        match name:
            case "stats" | "diagnostics" | "explain" | "hint":
                return getattr(self.engine, name)(*given)
            case "clear_cache":
                return self.engine.clear_cache(tiers=given[0])
            case "pin":
                pin, pin_id = self.engine.pin_prefix(*given), next(self._pin_ids)
                session.pins[pin_id] = pin
                return Pinned(pin_id, pin.num_tokens, pin.num_blocks)
            case "unpin":
                if (held := session.pins.pop(given[0], None)) is not None:
                    held.release()
                return None
            case "set_kind":
                self.kind = given[0]
                self._reported = (-1.0, None)
                return None
            case "send_prefix" if self.hand_overs is not None:
                request_id, tokens, peer, namespace = given
                return self.hand_overs.send_prefix(request_id, tokens, peer, namespace=namespace)
            case "fail" if self.hand_overs is not None:
                return self.hand_overs.fail(*given)
        if name not in self._actions:
            raise RequestError(f"{self.instance_id} cannot do {name!r}")
        return self._actions[name](*given)

    # ---------------------------------------------------------------------------------- messages out

    def _send_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        by_session: dict[bytes, list[WireOutput]] = {}
        for output in outputs:
            session = self._owner.get(output.request_id)
            if session is None:
                continue
            by_session.setdefault(session.identity, []).append(WireOutput(*output))
            self._load.leave(output.request_id)
            if output.finish_reason not in (None, FinishReason.MOVED):  # its KV still goes to another
                self._forget(output.request_id)
        for identity, own in by_session.items():
            self._post(identity, Outputs(tuple(own)))

    def _send_reports(self, reports: Sequence[HandOverReport]) -> None:
        for report in reports:
            if (session := self._owner.get(report.request_id)) is not None:
                self._post(session.identity, HandedOver((report,)))
                if report.part is HandOverPart.PREFILL and report.is_last:
                    self._forget(report.request_id)

    def _send_changes(self) -> None:
        if not self._changes and not self._num_dropped:
            return
        if self._sessions:
            self._post_all(changes_of(self._changes, is_complete=not self._num_dropped))
        self._changes, self._num_dropped = [], 0

    def _send_load(self) -> None:
        now_s, (reported_s, former) = self._clock.now(), self._reported
        if not self._sessions or now_s < reported_s + self._report_s:
            return
        stats = self.engine.stats()
        draining = self._facts.draining
        shape = (
            stats.num_running, stats.num_waiting, stats.blocks_free, stats.blocks_cached, self.kind, draining
        )  # fmt: skip
        if shape != former or now_s >= reported_s + 10 * self._report_s:
            self._reported = now_s, shape
            self._post_all(Load(self._load.report(self.instance_id, self.kind, stats), draining))

    def _post_all(self, message: FromInstance) -> None:
        data = encode(message)
        for identity in list(self._sessions):
            self._send(identity, data)

    def _post(self, identity: bytes, message: FromInstance) -> None:
        self._send(identity, encode(message))

    def _send(self, identity: bytes, data: bytes) -> None:
        try:
            self._socket.send_multipart([identity, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it has gone, or does not read
            if (session := self._sessions.get(identity)) is not None:
                self._end(session, f"its front cannot be reached: {error.strerror}")

    def _on_change(self, event: BlocksStored | BlocksRemoved | IndexCleared) -> None:
        if len(self._changes) < MAX_CHANGES:
            self._changes.append(event)
        else:
            self._num_dropped += 1

    # --------------------------------------------------------------------------------------- sessions

    def _end_leases(self) -> None:
        now_s = self._clock.now()
        for session in list(self._sessions.values()):
            if now_s > session.heard_s + session.lease_s:
                self._end(session, f"nothing was heard of its front for {session.lease_s:g} s")

    def _end(self, session: _Session, reason: str) -> None:
        """Abort what the session has here."""
        del self._sessions[session.identity]
        if session.requests or session.pins:
            log.warning("%d requests of a front are dropped: %s", len(session.requests), reason)
        for request_id in list(session.requests):
            self._abort(session, request_id)
        for pin in session.pins.values():
            pin.release()
        self._post(session.identity, Goodbye(reason))

    def _bound(self, endpoint: str, key: FleetKey) -> zmq.SyncSocket:
        socket = self._context.socket(zmq.ROUTER)
        key.secure_server(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 0)  # now: connections keep what holds when they are made
        socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._context.term()
            raise ConfigError(
                f"{self.instance_id} cannot listen on {endpoint!r} ({error.strerror}): an endpoint is "
                "'tcp://host:port', port 0 for a free one, or 'ipc://path'"
            ) from error
        return socket
