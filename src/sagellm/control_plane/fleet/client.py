"""`RemoteInstance`, the `EngineClient` of an instance in another process; `Instances` waits for all.

    silent --address--> connecting --> greeting --Welcome--> connected --+
      ^                                                                   |  the connection ends, or the
      +---------------------------- backoff <----------------------------+  instance is silent

A host's name is looked up before each try, as what it names may have another address by then.

ZeroMQ would reconnect by itself, and then deliver to a new process what was meant for the one before. So each
connection has a socket of its own, which is closed when it ends.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from sagellm.control_plane.fleet.host_names import AddressLookUp, HostNames, is_address, tcp_endpoint
from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Abort,
    AddPeer,
    AlivePing,
    CallAnswer,
    Changes,
    Drain,
    FromFront,
    FrontCall,
    FrontHello,
    Goodbye,
    HandedOver,
    Load,
    LosePeer,
    MessageError,
    Outputs,
    RefusedSubmit,
    Submit,
    Welcome,
    encode,
    error_of,
    facts_of,
    from_instance,
    output_of,
    result_of,
)
from sagellm.control_plane.fleet.record import InstanceRecord
from sagellm.control_plane.kv_events._doorbell import Doorbell
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError, SageError
from sagellm.core.protocols.fleet import (
    CallResult,
    Connected,
    DrainChanged,
    EngineClient,
    HandOver,
    InstanceEvent,
    InstanceFacts,
    InstanceLost,
    KVChanges,
    RequestRefused,
)
from sagellm.core.types import Request

log = logging.getLogger("sagellm.fleet")
HEARTBEAT_MS, SILENCE_MS = 500, 2000
"""ZeroMQ's own heartbeats, which a thread of its library answers also while an instance computes."""
CONNECT_S = 1.0
"""A connection is made within this time, or another try begins."""
GREETING_S = 5.0
"""A process that accepts a connection says `Welcome` within this time, unless it computes."""
PING_S = 0.5
NUM_HOT = 10
"""Hot prefixes that a look asks for."""
HUNG_S = 300.0
"""An instance reports between its steps. Without a word for so long its engine hangs."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 0.25
NAME_S, NAME_BACKOFF_S = 5.0, 2.0
"""A host's name is looked up within this time; the longest pause after a name that is not known."""
FRESH_S = 1.0
"""Tries to connect use addresses so long before they look the name up again."""
_ENDS: dict[int, str] = {
    zmq.EVENT_CLOSED: "nothing listens there",
    zmq.EVENT_CONNECT_RETRIED: "nothing listens there",
    zmq.EVENT_DISCONNECTED: "its connection has ended",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the handshake failed: it has another key, or is no instance",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: it is no instance, or has no key",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the handshake failed: it has another key",
}
_WATCHED = sum(_ENDS) | zmq.EVENT_HANDSHAKE_SUCCEEDED


class RemoteInstance:
    """Implements `EngineClient` over ZeroMQ. Made by `Instances.add`; for one thread.

    Between two tries to connect it waits longer each time, up to `LONGEST_BACKOFF_S`. Raises `ConfigError`
    for what is no endpoint.
    """

    def __init__(
        self,
        instance_id: str,
        endpoint: str,
        key: FleetKey,
        context: zmq.SyncContext,
        clock: Clock,
        *,
        names: HostNames,
        lease_s: float,
        ping_s: float,
        silence_s: float,
        front_id: str,
    ) -> None:
        self._id, self.endpoint, self._key = instance_id, endpoint, key
        if endpoint:
            _name_and_port(instance_id, endpoint)
        self._names = names
        self._lookup: AddressLookUp | None = None
        self._found: AddressLookUp | None = None
        """The look-up that goes on, and the last that found something."""
        self._found_s, self._num_tries = 0.0, -1
        self._context, self._clock, self._lease_s = context, clock, lease_s
        self._ping_s, self._front_id, self._takes_over = ping_s, front_id, True
        self._silence_s, self._heard_s = silence_s, 0.0
        self._facts: InstanceFacts | None = None
        self._is_drained = False
        """As the instance said last."""
        self._events: list[InstanceEvent] = []
        self._calls: dict[int, str] = {}
        self._look_id: int | None = None
        self.record = InstanceRecord(clock)
        self._call_ids = itertools.count(1)
        self._socket: zmq.SyncSocket | None = None
        self._monitor: zmq.SyncSocket | None = None
        self._since_s = self._pinged_s = clock.now()
        self._retry_s = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._has_handshake = False
        self.fault = "it has not been reached yet"
        """Why it is not connected; empty while it is."""

    @property
    def instance_id(self) -> str:
        return self._id

    @property
    def facts(self) -> InstanceFacts | None:
        return self._facts

    @property
    def sockets(self) -> tuple[zmq.SyncSocket, ...]:
        """What to wait for, once there is a connection."""
        return () if self._socket is None or self._monitor is None else (self._socket, self._monitor)

    @property
    def next_tick_s(self) -> float:
        """When `tick` has something to do."""
        if self._lookup is not None:
            return self._since_s + NAME_S
        if self._socket is None:
            return self._retry_s if self.endpoint else math.inf
        return self._pinged_s + self._ping_s

    @property
    def has_events(self) -> bool:
        """Whether `poll` has something without a sign at a socket."""
        return bool(self._events)

    def submit(
        self, request: Request, hand_over: HandOver | None = None, onward: HandOver | None = None
    ) -> None:
        if hand_over is not None:
            self.record.moves(request.request_id, 1 if onward is None else 2)
        self._post(Submit(request, hand_over, onward, max(0.0, self._clock.now() - request.arrival_s)))

    def abort(self, request_id: str) -> None:
        self.record.drop(request_id)
        self._post(Abort(request_id))

    def call(self, name: str, arguments: Sequence[Any] = ()) -> int:
        call_id = next(self._call_ids)
        if self._facts is None:
            self._events.append(
                CallResult(call_id, error=SageError(f"{self._id} is not connected: {self.fault}"))
            )
        else:
            self._calls[call_id] = name
            self._post(FrontCall(call_id, name, encode(tuple(arguments))))
        return call_id

    def drain(self, *, draining: bool) -> None:
        self._post(Drain(draining))

    def add_peer(self, facts: InstanceFacts) -> None:
        self._post(AddPeer(facts))

    def lose_peer(self, instance_id: str) -> None:
        self._post(LosePeer(instance_id))

    def poll(self) -> Sequence[InstanceEvent]:
        self._read()
        self._look()
        events, self._events = self._events, []
        for event in events:
            self.record.take(event)
        return events

    def look(self) -> bool:
        """Ask for its hot prefixes; one question at a time."""
        if self._facts is not None and self._look_id is None:
            self._look_id = self.call("hot_prefixes", (NUM_HOT,))
        return self._look_id is not None

    def tick(self) -> None:
        """Do what is due: connect again, ping, or give up a connection."""
        now_s = self._clock.now()
        if self._lookup is not None:
            self._look_up(self._lookup, now_s)
        elif self._socket is None:
            if self.endpoint and now_s >= self._retry_s:
                self._begin(now_s)
        elif now_s >= self._pinged_s + self._ping_s:
            self._pinged_s = now_s
            if self._facts is not None and now_s > self._heard_s + self._silence_s:
                self._end(
                    f"it has said nothing for {self._silence_s:g} s: its engine hangs, or a step is longer"
                )
            elif self._facts is not None:
                self._send(AlivePing())
            elif now_s > self._since_s + (GREETING_S if self._has_handshake else CONNECT_S):
                self._end("it has not answered" if self._has_handshake else "no connection in time")

    def move(self, endpoint: str) -> None:
        """It was started anew, and is there now."""
        self.endpoint, self._lookup = endpoint, None
        if self._socket is not None:
            self._end("it was started again at another address")
        self._retry_s, self._backoff_s = self._clock.now(), FIRST_BACKOFF_S

    def close(self) -> None:
        self._drop_socket()
        self._facts = self._lookup = None

    def _begin(self, now_s: float) -> None:
        """Try to connect, at another address of the host than the last time."""
        name, port = _name_and_port(self._id, self.endpoint)
        found = self._found
        if not name:
            self._connect(self.endpoint)
        elif found is not None and found.host == name and now_s < self._found_s + FRESH_S:
            self._num_tries += 1
            address = found.addresses[self._num_tries % len(found.addresses)]
            self._connect(tcp_endpoint(address, port))
        else:
            self._since_s, self._lookup = now_s, self._names.look_up(name)

    def _look_up(self, lookup: AddressLookUp, now_s: float) -> None:
        """Connect once the host's addresses are there."""
        if lookup.is_done and lookup.addresses:
            self._lookup, self._found, self._found_s = None, lookup, now_s
            self._begin(now_s)
        elif lookup.is_done:
            self._end(lookup.fault, NAME_BACKOFF_S)
        elif now_s >= self._since_s + NAME_S:
            late = f"no name server has said within {NAME_S:g} s what {lookup.host} is"
            self._end(late, NAME_BACKOFF_S)

    def _connect(self, endpoint: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        self._key.secure_client(socket)
        for option, value in (
            (zmq.LINGER, 0), (zmq.RCVHWM, 0), (zmq.SNDHWM, 0), (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS), (zmq.HEARTBEAT_TIMEOUT, SILENCE_MS),
            (zmq.RECONNECT_IVL, -1), (zmq.IPV6, int("[" in endpoint)),
        ):  # fmt: skip
            socket.setsockopt(option, value)
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._socket, self._has_handshake = socket, False
        self._since_s = self._pinged_s = self._clock.now()
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._end(f"no connection can be made to {endpoint}: {error.strerror}")

    def _post(self, message: FromFront) -> None:
        if self._facts is not None:
            self._send(message)

    def _send(self, message: FromFront) -> None:
        assert self._socket is not None
        with suppress(zmq.Again):  # the connection has just ended, as the monitor will say
            self._socket.send(encode(message), zmq.NOBLOCK)

    def _read(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_s = self._clock.now()
            try:
                self._take(data)
            except MessageError as error:
                self._end(str(error))

    def _take(self, data: bytes) -> None:
        message = from_instance(data)
        if isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, Goodbye):
            self._end(message.reason)
        elif self._facts is None:
            return
        else:
            self._events += self._events_of(message)

    def _events_of(self, message: object) -> Sequence[InstanceEvent]:
        match message:
            case Outputs(outputs):
                return [output_of(output) for output in outputs]
            case Load(instance, draining):
                if draining is self._is_drained:
                    return [instance]
                self._is_drained = draining
                return [DrainChanged(draining), instance]
            case HandedOver(reports):
                return reports
            case Changes(changes, is_complete):
                return [KVChanges([change.event for change in changes], is_complete)]
            case RefusedSubmit(request_id, error):
                return [RequestRefused(request_id, error_of(error))]
            case CallAnswer(call_id, result, fault):
                name = self._calls.pop(call_id, None)
                if call_id == self._look_id:
                    self._look_id = None
                    self.record.seen([] if fault is not None else result_of("hot_prefixes", result))
                    return []
                if name is not None and fault is not None:
                    return [CallResult(call_id, error=error_of(fault))]
                if name is not None:
                    return [CallResult(call_id, result_of(name, result))]
        return []

    def _welcome(self, message: Welcome) -> None:
        if message.protocol != PROTOCOL:
            self._end(
                f"it speaks protocol {message.protocol}, this front {PROTOCOL}: run one version of sageLLM"
            )
            return
        facts = facts_of(message)
        if facts.instance_id != self._id:
            self._end(f"{facts.instance_id!r} answers at {self.endpoint}: the fleet file is wrong")
            return
        self._facts, self.fault, self._backoff_s = facts, "", FIRST_BACKOFF_S
        self._is_drained = facts.draining
        self._takes_over = False  # another front that comes later stays
        log.info("%s is connected", self._id)
        self._events.append(Connected(facts))

    def _look(self) -> None:
        """Take in what has happened to the connection."""
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._has_handshake = True
                self._send(FrontHello(PROTOCOL, self._lease_s, self._front_id, self._takes_over))
            elif event in _ENDS:
                unknown = event == zmq.EVENT_DISCONNECTED and not self._has_handshake
                self._end(_ENDS[zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL] if unknown else _ENDS[event])

    def _end(self, reason: str, longest_s: float = LONGEST_BACKOFF_S) -> None:
        """The connection, or the try, is over; the next one begins after a pause."""
        self._drop_socket()
        self._lookup = None
        if reason != self.fault:
            level = logging.DEBUG if reason == _ENDS[zmq.EVENT_CLOSED] else logging.WARNING
            log.log(level, "%s at %s is not connected: %s", self._id, self.endpoint, reason)
        self.fault = reason
        self._retry_s = self._clock.now() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, longest_s)
        for call_id in self._calls:
            self._events.append(CallResult(call_id, error=SageError(f"{self._id}: {reason}")))
        self._calls.clear()
        self._look_id = None
        if self._facts is not None:
            self._facts = None
            self._events.append(InstanceLost(reason))

    def _drop_socket(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None


def _name_and_port(instance_id: str, endpoint: str) -> tuple[str, int]:
    """The host's name, empty where none is to be looked up. Raises `ConfigError` for no endpoint."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme == "ipc" and rest:
        return "", 0
    if scheme == "tcp" and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16:
        return "" if is_address(host) else host, int(port)
    raise ConfigError(f"{instance_id}: {endpoint!r} is no endpoint: 'tcp://host:port' or 'ipc://path'")


class WakingClient(EngineClient, Protocol):
    """A client without sockets. It calls `Instances.wake` when it has something to `poll`."""

    @property
    def has_events(self) -> bool: ...


class Instances:
    """The instances that a front knows, by id. `wake` is for any thread, the rest for one.

    `resolve`: gives the addresses of a host's name; it may take its time. None: the system's.
    """

    def __init__(
        self,
        key: FleetKey,
        clock: Clock,
        *,
        lease_s: float = 10.0,
        ping_s: float = PING_S,
        silence_s: float = HUNG_S,
        resolve: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self._key, self._clock, self._lease_s = key, clock, lease_s
        self._ping_s, self._silence_s = ping_s, silence_s
        self._front_id = secrets.token_hex(8)
        self._context = zmq.Context()
        self._bell = Doorbell()
        self._names = HostNames(self._bell.ring, resolve)
        self._known: dict[str, RemoteInstance] = {}
        self._others: dict[str, WakingClient] = {}

    def add(self, instance_id: str, endpoint: str) -> RemoteInstance:
        """Know one more. One that is known goes to its new endpoint.

        An empty endpoint is not known yet: nothing is connected until another is given.
        """
        if (known := self._known.get(instance_id)) is not None:
            known.move(endpoint)
            return known
        made = RemoteInstance(
            instance_id, endpoint, self._key, self._context, self._clock,
            names=self._names, lease_s=self._lease_s, ping_s=self._ping_s, silence_s=self._silence_s,
            front_id=self._front_id,
        )  # fmt: skip
        self._known[instance_id] = made
        return made

    def include(self, client: WakingClient) -> None:
        """Know an instance that is reached in another way."""
        self._others[client.instance_id] = client

    @property
    def endpoints(self) -> Mapping[str, str]:
        """Where those that were added are; without those that were included."""
        return {name: instance.endpoint for name, instance in self._known.items()}

    def remove(self, instance_id: str) -> None:
        """Forget one that was added."""
        self._known.pop(instance_id).close()

    def wait(self, timeout_s: float) -> list[EngineClient]:
        """Those with something to `poll`, after at most this time. Also does what is due."""
        poller, by_socket = zmq.Poller(), {}
        clients: Mapping[str, WakingClient] = {**self._known, **self._others}
        now_s = self._clock.now()
        for instance in self._known.values():
            instance.tick()
            timeout_s = min(timeout_s, max(0.0, instance.next_tick_s - now_s))
            for socket in instance.sockets:
                poller.register(socket, zmq.POLLIN)
                by_socket[socket] = instance
        if any(client.has_events for client in clients.values()):
            timeout_s = 0.0
        bell = self._bell.fileno()
        poller.register(bell, zmq.POLLIN)
        ready = poller.poll(round(timeout_s * 1000))
        if any(each == bell for each, _ in ready):
            self._bell.hush()
        found: dict[str, EngineClient] = {
            by_socket[each].instance_id: by_socket[each] for each, _ in ready if each in by_socket
        }
        # After the bell is silent: what comes later rings it again.
        found |= {name: client for name, client in clients.items() if client.has_events}
        return list(found.values())

    def wake(self) -> None:
        """Have `wait` return."""
        self._bell.ring()

    def close(self) -> None:
        for client in (*self._known.values(), *self._others.values()):
            client.close()
        self._known.clear()
        self._others.clear()
        self._context.term()
        self._bell.close()
