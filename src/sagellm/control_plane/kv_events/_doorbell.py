"""Wakes a thread that polls sockets. Unlike a ZeroMQ socket it may be rung from any thread."""

from __future__ import annotations

import contextlib
import socket


class Doorbell:
    """Register `fileno()` with a poller; after `ring` it is readable until `hush`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def ring(self) -> None:
        """Never blocks, and does nothing after `close`."""
        with contextlib.suppress(OSError):  # full: it rings already
            self._writer.send(b"\0")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
