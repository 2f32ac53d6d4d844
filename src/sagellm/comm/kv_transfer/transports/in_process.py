"""`InProcessTransport`: messages between channels of one process. An exact fake of a network, also for users.

network = InProcessNetwork()
prefill, decode = InProcessTransport("prefill", network), InProcessTransport("decode", network)
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_transfer import Message, TransportEndpoint

if TYPE_CHECKING:
    from sagellm.core.shared_pages import SharedPages

log = logging.getLogger("sagellm.kv_transfer")


class InProcessNetwork:
    """Delivers messages in order, on a thread of its own.

    With `threaded=False` it has none, and `run_one` delivers.
    """

    def __init__(self, *, threaded: bool = True) -> None:
        self.nodes: dict[str, InProcessTransport] = {}
        self.links = itertools.count(1)
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self.running = threading.RLock()
        """Held by what runs a task."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="sagellm-kv-network", daemon=True)
            self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def run_one(self) -> bool:
        """Deliver one message; False without any."""
        with self._changed:
            if not self._tasks:
                return False
            task = self._tasks.popleft()
        with self.running:
            task()
        return True

    def remove(self, node: str) -> None:
        """A node has closed. The last one ends the thread."""
        with self._changed:
            self.nodes.pop(node, None)
            self._is_closed = not self.nodes
            self._changed.notify_all()
        if self._is_closed and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._is_closed)
                if self._is_closed:
                    return
            try:
                self.run_one()
            except Exception:  # the others' messages go on
                log.exception("delivering a message failed")


class InProcessTransport:
    """Implements `TransportEngine`. A link has a number at each end; `node` is its address."""

    max_payload_bytes = 0

    def __init__(self, node: str, network: InProcessNetwork) -> None:
        self.node, self._network = node, network
        self._ends: dict[int, tuple[str, int]] = {}
        """By link: the node at its other end, and the link's number there; 0 if it is not connected."""
        self._own: set[int] = set()
        """Links that were connected from here."""
        self._is_closed = False

    def register(self, pages: SharedPages) -> None:
        """Payloads are read where they lie anyway."""

    def start(self, endpoint: TransportEndpoint) -> None:
        if self.node in self._network.nodes:
            raise ConfigError(f"the network has a node {self.node!r}: give another name")
        self._endpoint = endpoint
        self._network.nodes[self.node] = self

    def address(self) -> Mapping[str, str | int]:
        return {"transport": "in_process", "node": self.node}

    def connect(self, address: Mapping[str, str | int]) -> int:
        node = address.get("node")
        if address.get("transport") != "in_process" or not isinstance(node, str):
            raise ConfigError(f"{dict(address)} is no address of a transport in_process")
        link = next(self._network.links)
        self._ends[link] = node, 0
        self._own.add(link)
        return link

    def reserve(self, link: int, num_bytes: int, count: int = 1, *, is_registered: bool = False) -> None:
        return None

    def discard(self, link: int, memory: memoryview) -> None:
        """Nothing is reserved here."""

    def post(self, link: int, message: Message) -> None:
        self._network.submit(partial(self.deliver, link, message))

    def call(self, task: Callable[[], None], *, copies: bool = False) -> None:
        self._network.submit(task)

    def reset(self, link: int, reason: str) -> None:
        self._network.submit(partial(self._break, link, reason))

    def close(self) -> None:
        with self._network.running:  # no task reads or writes blocks after this
            self._is_closed = True
        for node, other in list(self._ends.values()):
            peer = self._network.nodes.get(node)
            if peer is not None and other:
                self._network.submit(partial(peer._break, other, f"{self.node} has closed"))
        self._network.remove(self.node)

    # -- on the network's thread

    def deliver(self, link: int, message: Message) -> None:
        """Bring a message to the other end."""
        if self._is_closed or link not in self._ends:
            return
        node, other = self._ends[link]
        peer = self._network.nodes.get(node)
        if not other and not message.opens:
            peer = None
        elif peer is None:
            self._break(link, f"no node {node!r} answers")
        if peer is not None:
            if not other:
                other = next(self._network.links)
                peer._ends[other] = self.node, link
                self._ends[link] = node, other
            try:
                peer.take(other, message)
            except KVDataError as error:
                peer._break(other, str(error))
        if message.is_chunk:
            self._endpoint.sent(link, message.token)

    def take(self, link: int, message: Message) -> None:
        """A message from the other end."""
        if not message.is_chunk:
            self._endpoint.message(link, message)
            return
        data = [memoryview(part).cast("B") for part in message.payload]
        place = self._endpoint.place(link, message.head, sum(map(len, data)))
        if place is not None:
            place.write(data)
            self._endpoint.filled(link, place)

    def _break(self, link: int, reason: str) -> None:
        """Disconnect both ends."""
        found = self._ends.get(link)
        if found is None:
            return
        node, other = found
        self._disconnect(link, reason)
        peer = self._network.nodes.get(node)
        if peer is not None and peer._ends.get(other) == (self.node, link):
            peer._disconnect(other, reason)

    def _disconnect(self, link: int, reason: str) -> None:
        if link in self._own:
            self._ends[link] = self._ends[link][0], 0
        else:
            del self._ends[link]
        if not self._is_closed:
            self._endpoint.lost(link, reason)


PLUGIN = InProcessTransport
