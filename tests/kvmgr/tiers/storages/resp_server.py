"""A small server of the Redis protocol in this process, which fails on request.

It knows the commands that `RemoteStore` sends. Keys expire by a clock that tests move.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from typing import Any

from sagellm.core.clock import ManualClock


class RespServer:
    """Listens on 127.0.0.1 from `start` to `stop`, on one port each time.

    Faults, all off at first: `delay_s` before each reply; `trickle_s` between its bytes; `answer` instead of
    each reply to a command on data; `max_replies` on data, after which connections are cut in the middle of
    the next; `refuse_writes` as a server whose memory is full.
    """

    def __init__(self, password: str = "") -> None:
        self.password = password
        self.data: dict[bytes, tuple[bytes, float]] = {}
        """Value and end of life by key."""
        self.commands: list[list[bytes]] = []
        self.delay_s = self.trickle_s = 0.0
        self.answer: bytes | None = None
        self.max_replies: int | None = None
        self.refuse_writes = False
        self.port = 0
        self.num_connections = 0
        self.clock = ManualClock()
        self._server: socketserver.ThreadingTCPServer | None = None
        self._connections: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        owner = self

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        class Handler(socketserver.StreamRequestHandler):
            disable_nagle_algorithm = True

            def handle(self) -> None:
                owner.num_connections += 1
                owner._connections.append(self.connection)
                try:
                    owner._serve(self)
                except (OSError, ValueError):  # the client has gone, or `stop` was called
                    return

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Close the port and all connections."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed already
                continue
        self._connections.clear()
        self._server = None

    def _serve(self, handler: socketserver.StreamRequestHandler) -> None:
        knows_password = not self.password
        while line := handler.rfile.readline():
            command = [
                handler.rfile.read(int(handler.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))
            ]
            name = command[0].upper()
            if name == b"AUTH":
                knows_password = self.password in ("", command[-1].decode())
                reply = b"+OK\r\n" if knows_password else b"-WRONGPASS invalid username-password pair\r\n"
            elif name in (b"CLIENT", b"SELECT", b"PING"):
                reply = b"+OK\r\n"
            elif not knows_password:
                reply = b"-NOAUTH Authentication required.\r\n"
            else:
                self.commands.append(command)
                reply = self._encoded(self._reply(name, command[1:])) if self.answer is None else self.answer
                if self.max_replies == 0:
                    handler.wfile.write(reply[: len(reply) // 2])
                    handler.connection.shutdown(socket.SHUT_RDWR)
                    return
                if self.max_replies is not None:
                    self.max_replies -= 1
            self._send(handler, reply)

    def _send(self, handler: socketserver.StreamRequestHandler, reply: bytes) -> None:
        time.sleep(self.delay_s)
        if not self.trickle_s:
            handler.wfile.write(reply)
            return
        for at in range(len(reply)):
            handler.wfile.write(reply[at : at + 1])
            time.sleep(self.trickle_s)

    def _reply(self, name: bytes, arguments: list[bytes]) -> Any:
        now_s = self.clock.now()
        key = arguments[0]
        for asked in arguments:
            if asked in self.data and self.data[asked][1] <= now_s:
                del self.data[asked]
        if name == b"MGET":
            return [self.data[asked][0] if asked in self.data else None for asked in arguments]
        if name == b"EXISTS":
            return int(key in self.data)
        if name == b"DEL":
            return sum(self.data.pop(asked, None) is not None for asked in arguments)
        if name == b"PEXPIRE":
            if key in self.data:
                self.data[key] = self.data[key][0], now_s + int(arguments[1]) / 1000
            return int(key in self.data)
        if name != b"SET" or self.refuse_writes:
            return ValueError("OOM command not allowed when used memory > 'maxmemory'.")
        if b"NX" in arguments and key in self.data:
            return None
        self.data[key] = arguments[1], now_s + int(arguments[arguments.index(b"PX") + 1]) / 1000
        return True

    def _encoded(self, reply: Any) -> bytes:
        if isinstance(reply, ValueError):
            return b"-%s\r\n" % str(reply).encode()
        if isinstance(reply, list):
            return b"*%d\r\n" % len(reply) + b"".join(map(self._encoded, reply))
        if reply is True:
            return b"+OK\r\n"
        if isinstance(reply, int):
            return b":%d\r\n" % reply
        return b"$-1\r\n" if reply is None else b"$%d\r\n%s\r\n" % (len(reply), reply)
