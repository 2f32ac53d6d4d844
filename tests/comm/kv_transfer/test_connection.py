"""One socket of a stream transport, without a network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from sagellm.comm.kv_transfer.transports._connection import LEAST_BYTES, READ_BYTES, PeerSocket


class Place(NamedTuple):
    """Implements `ChunkPlace` for a payload that comes from a socket."""

    views: Sequence[memoryview]
    lock: Any
    is_open: bool = True

    def received(self, num_bytes: int) -> None:
        pass

    def write(self, data: Sequence[memoryview]) -> None:
        raise AssertionError("it comes from a socket")


class Socket:
    """Has bytes without end, of which a call gets some. Notes from how many on it is readable."""

    family = socket.AF_INET
    least = LEAST_BYTES

    def recv_into(self, view: memoryview) -> int:
        return min(len(view), 400_000)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        self.least = value


def test_the_rest_of_a_payload_wakes_after_a_turn_that_was_too_short_for_it() -> None:
    """Nothing may follow it, so a socket that waits for more would never be readable."""
    sock: Any = Socket()
    connection = PeerSocket(sock, 1, is_ours=False, deadline_s=None, least=LEAST_BYTES)
    place = Place([memoryview(bytearray(READ_BYTES + 500_000))], threading.Lock())
    connection.expect(place.views, lambda: None, place)
    connection.read(memoryview(bytearray(10)))
    [rest] = connection.views
    assert 0 < len(rest) < LEAST_BYTES
    assert sock.least == len(rest)
