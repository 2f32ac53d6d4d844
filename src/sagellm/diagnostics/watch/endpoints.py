"""`ServerAddress`: where one server publishes KV events and metrics; and what reads them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sagellm.control_plane.kv_events import KVEventError, KVEventSubscriber
from sagellm.control_plane.kv_events.sequence import Item, Malformed
from sagellm.core.errors import ConfigError
from sagellm.diagnostics.watch.counters import ServerCounters, metrics_url, scrape

EVENT_SCHEMES = ("tcp://", "ipc://")
POLL_S = 0.2
CONNECT_S = 3.0
ZMQ_GREETING = b"\xff"
"""The first byte that a ZeroMQ socket sends (ZMTP 3, signature)."""
HOW_TO_PUBLISH = (
    'vLLM publishes events with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:PORT"}\', SGLang with the same option, sageLLM with --set events.endpoint=tcp://*:PORT'
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server publishes events, replays missed ones, and has its metrics."""

    events: str | None = None
    replay: str | None = None
    metrics: str | None = None

    @property
    def name(self) -> str:
        return self.events or self.metrics or ""

    def check_sockets(self) -> None:
        """Connect to each tcp:// address. Raises `ConfigError` if no ZeroMQ socket listens there."""
        for address in filter(None, (self.events, self.replay)):
            path = address.removeprefix("ipc://")
            if address.startswith("tcp://"):
                _check_socket(address)
            elif not path.startswith("@") and not Path(path).is_socket():
                raise ConfigError(f"nothing publishes KV events at {address}: there is no socket {path}")

    @classmethod
    def parse(cls, text: str) -> ServerAddress:
        """Read `tcp://host:port[,tcp://host:port][,http://host:port]`: events, replay, metrics.

        Raises `ConfigError` that says what is wrong with a part.
        """
        sockets, metrics = list[str](), None
        for part in filter(None, map(str.strip, text.split(","))):
            if part.startswith(EVENT_SCHEMES):
                sockets.append(_checked(part))
            elif part.startswith(("http://", "https://")) and metrics is None:
                metrics = metrics_url(part)
            else:
                raise ConfigError(
                    f"{part!r} in {text!r}: write tcp://host:port for KV events, behind a comma a second one "
                    f"for the socket that replays them, and http://host:port for the metrics"
                )
        if len(sockets) > 2 or not (sockets or metrics):
            raise ConfigError(f"{text!r}: one server has one address of KV events and one for replays")
        events, replay = [*sockets, None, None][:2]
        return cls(events, replay, metrics)


def _checked(address: str) -> str:
    if "*" in address:
        raise ConfigError(f"{address!r} is where a server binds: write the name of its host instead of *")
    port = address.rpartition(":")[2]
    if address.startswith("tcp://") and not (port.isdecimal() and 0 < int(port) < 65_536):
        raise ConfigError(f"{address!r} has no port: write tcp://host:port")
    return address


def _check_socket(address: str) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as connection:
            greeting = connection.recv(1)
    except TimeoutError:
        greeting = b""
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"nothing publishes KV events at {address} ({reason}). {HOW_TO_PUBLISH}") from error
    if greeting != ZMQ_GREETING:
        raise ConfigError(
            f"{address} is no socket of KV events: another program answers, or none. If it serves HTTP, "
            f"write http://; for events, its own port is needed. {HOW_TO_PUBLISH}"
        )


class EventReader:
    """Reads the events of one endpoint in a thread, from construction to `close`.

    Each item goes to `take`, which is called in that thread. `num_items` counts them; `error` is what ended
    the reading, if anything did.
    """

    def __init__(self, endpoint: ServerAddress, take: Callable[[Item], None]) -> None:
        assert endpoint.events is not None
        self.error: Exception | None = None
        self.num_items = 0
        self._take = take
        self._subscriber = KVEventSubscriber(endpoint.events, endpoint.replay)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {endpoint.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    item = self._subscriber.poll(POLL_S)
                except KVEventError as error:
                    item = Malformed(-1, str(error))
                if item is not None:
                    self.num_items += 1
                    self._take(item)
        except Exception as error:  # noqa: BLE001 - the watch reports it at its end
            self.error = error

    def close(self) -> None:
        """Stop reading. Items that have arrived are lost."""
        self._closing.set()
        self._thread.join()
        self._subscriber.close()


class CounterWatch:
    """Adds up what a server's counters grow by, across restarts. A scrape that fails changes nothing."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._first = self._last = scrape(url)
        self._before_restart = (0, 0, 0)
        self.num_failed = 0

    def update(self) -> None:
        """Scrape again."""
        try:
            now = scrape(self._url)
        except ConfigError:
            self.num_failed += 1
            return
        if (now.num_queried_tokens or 0) < (self._last.num_queried_tokens or 0):
            total = self.grown()
            self._before_restart = (
                total.num_queried_tokens or 0,
                total.num_hit_tokens or 0,
                total.num_requests or 0,
            )
            self._first = ServerCounters()
        self._last = now

    def grown(self) -> ServerCounters:
        """The counters of the watched time; other figures as last scraped."""
        grown, (queried, hit, requests) = self._last.since(self._first), self._before_restart
        return ServerCounters(
            grown.engine,
            grown.model,
            None if grown.num_queried_tokens is None else grown.num_queried_tokens + queried,
            None if grown.num_hit_tokens is None else grown.num_hit_tokens + hit,
            None if grown.num_requests is None else grown.num_requests + requests,
            grown.num_blocks,
            grown.block_size,
            grown.bytes_per_block,
        )
