"""`HostNames`: looks up host names in threads.

ZeroMQ looks a name up in the thread that moves the data of all its connections, so one slow name server would
hold up all of them.
"""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from collections.abc import Callable, Sequence

MAX_THREADS = 32
"""Names that are looked up at the same time. A system's resolver may hold a thread for half a minute."""
IDLE_S = 10.0
"""A thread without a name ends after so long."""


class AddressLookUp:
    """One look-up of a host. Once `is_done`, it has `addresses`, or a `fault` that says why not."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_done = False
        self.addresses: tuple[str, ...] = ()
        self.fault = ""


class HostNames:
    """Look-ups of a front. `on_done` is called in another thread after each of them."""

    def __init__(
        self, on_done: Callable[[], None], resolve: Callable[[str], Sequence[str]] | None = None
    ) -> None:
        self._on_done, self._resolve = on_done, resolve or addresses_of
        self._running: dict[str, AddressLookUp] = {}
        self._waiting: queue.SimpleQueue[AddressLookUp] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0

    def look_up(self, host: str) -> AddressLookUp:
        """Begin to look a host up, or join the look-up that goes on."""
        with self._lock:
            found = self._running.get(host)
            if found is not None:
                return found
            found = self._running[host] = AddressLookUp(host)
            self._waiting.put(found)
            if self._num_threads < min(MAX_THREADS, len(self._running)):
                self._num_threads += 1
                threading.Thread(target=self._work, name="host names", daemon=True).start()
        return found

    def _work(self) -> None:
        while True:
            try:
                lookup = self._waiting.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._num_threads -= 1
                        return
                continue
            try:
                lookup.addresses = tuple(self._resolve(lookup.host))
                lookup.fault = "" if lookup.addresses else f"the host {lookup.host} has no address"
            except (OSError, ValueError) as error:  # ValueError: no text that a name can have
                reason = getattr(error, "strerror", None) or error
                lookup.fault = f"the host name {lookup.host} is not known: {reason}"
            with self._lock:
                del self._running[lookup.host]
            lookup.is_done = True
            self._on_done()


def addresses_of(host: str) -> list[str]:
    """The addresses of a host, those of IPv4 first. Raises `OSError` for an unknown one; may take long."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    ordered = sorted(found, key=lambda each: each[0] != socket.AF_INET)
    return list(dict.fromkeys(str(each[4][0]) for each in ordered))


def is_address(host: str) -> bool:
    """Whether it is a number, and no name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def tcp_endpoint(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
