"""A proxy between two channels over TCP, which does to their messages what networks do."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from sagellm.comm.kv_transfer.transports._auth import CHALLENGE_BYTES, MAC_BYTES, RESPONSE_BYTES
from sagellm.comm.kv_transfer.transports._connection import PREFIX, SLOT

Forward = Callable[[socket.socket, bytes], None]


class Proxy:
    """Forwards connections to a peer. Faults are for the frames that follow the handshake, in both
    directions.

    `change(frame, rng)` returns the frames to send instead of one; None resets the connection. `delay_s`:
    before each frame. While `is_stalled`, nothing moves.
    """

    def __init__(self, metadata: bytes, seed: int = 0) -> None:
        self._metadata = json.loads(metadata)
        address = self._metadata["address"]
        self._target = (address["host"], address["port"])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._rng = random.Random(seed)
        self._sockets: list[socket.socket] = []
        self.change: Callable[[bytes, random.Random], list[bytes] | None] = lambda frame, rng: [frame]
        self.delay_s = 0.0
        self.is_stalled = False
        self.num_frames = self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def metadata(self) -> bytes:
        """The peer's, with the proxy's address."""
        host, port = self._listener.getsockname()
        address = dict(self._metadata["address"], host=host, port=port)
        return json.dumps(dict(self._metadata, address=address)).encode()

    def cut(self) -> None:
        """Reset all connections."""
        for sock in self._sockets:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._sockets.clear()

    def close(self) -> None:
        self.is_stalled = False
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self.num_connections += 1
            self._sockets += [near, far]
            for ends, sizes in (((far, near), [CHALLENGE_BYTES, MAC_BYTES]), ((near, far), [RESPONSE_BYTES])):
                threading.Thread(target=self._forward, args=(*ends, sizes), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, sizes: list[int]) -> None:
        try:
            for size in sizes:
                target.sendall(_exactly(source, size))
            while True:
                prefix = _exactly(source, PREFIX.size)
                _, _, flag, _, head_bytes, payload_bytes, _ = PREFIX.unpack(prefix)
                in_stream = 0 if flag == SLOT else payload_bytes
                frame = prefix + _exactly(source, head_bytes + in_stream)
                self.num_frames += 1
                time.sleep(self.delay_s)
                while self.is_stalled:
                    time.sleep(0.005)
                frames = self.change(frame, self._rng)
                if frames is None:
                    raise OSError("reset")
                for each in frames:
                    target.sendall(each)
        except OSError:
            for sock in (source, target):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()


def _exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise OSError("closed")
        data += part
    return bytes(data)


class Shuffler:
    """Sends frames twice, and holds some back until later ones have gone."""

    def __init__(self, twice: float, late: float) -> None:
        self._twice, self._late = twice, late
        self._held: dict[int, list[bytes]] = {}

    def __call__(self, frame: bytes, rng: random.Random) -> list[bytes]:
        held = self._held.setdefault(threading.get_ident(), [])
        if rng.random() < self._late and len(held) < 3:
            held.append(frame)
            return []
        frames = [frame, *held]
        held.clear()
        return [each for one in frames for each in [one] * (1 + (rng.random() < self._twice))]


def damaged(frame: bytes, place: int) -> bytes:
    """One bit of a frame is flipped."""
    changed = bytearray(frame)
    changed[place] ^= 1
    return bytes(changed)
