"""`TcpTransport`: a connection for each pair of instances and direction. Payloads go straight into blocks."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from sagellm.comm.kv_transfer.transports._stream import AUTH_S, StreamTransport
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.ports import SagePorts


class TcpTransport(StreamTransport):
    """Implements `TransportEngine`. `host`: the address on which others reach this instance.

    `port` 0: any that is free. `key`: the same on all instances, at least 16 bytes. Raises `OSError` from
    `start` where the address cannot be had.
    """

    name = "tcp"

    def __init__(
        self,
        key: bytes,
        host: str = "127.0.0.1",
        port: int = SagePorts.KV_TRANSFER,
        auth_s: float = AUTH_S,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(key, auth_s, clock)
        self._host, self._port = host, port

    def _listen(self) -> socket.socket:
        family = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((self._host, self._port), family=family)

    def address(self) -> Mapping[str, str | int]:
        host, port = self._listener.getsockname()[:2]
        return {"transport": self.name, "host": host, "port": port}

    def connect(self, address: Mapping[str, str | int]) -> int:
        host, port = address.get("host"), address.get("port")
        is_port = type(port) is int and 0 < port < 1 << 16
        if address.get("transport") != self.name or not isinstance(host, str) or not is_port:
            raise ConfigError(f"{dict(address)} is no address of a transport {self.name}")
        link = next(self._links)
        self._addresses[link] = address
        return link

    def _dial(self, address: Mapping[str, str | int]) -> socket.socket:
        found = socket.getaddrinfo(str(address["host"]), int(address["port"]), type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect_ex(place)
        return sock


PLUGIN = TcpTransport
