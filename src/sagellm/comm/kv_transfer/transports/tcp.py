"""`TcpTransport`: a connection for each pair of instances and direction. Payloads go straight into blocks."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sagellm.comm.kv_transfer.transports._stream import AUTH_S, StreamTransport
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.ports import SagePorts

_KEEPALIVE = MappingProxyType({"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3})
"""A peer that is gone without a word is noticed after 30 s, even where nothing is sent."""


class TcpTransport(StreamTransport):
    """Implements `TransportEngine`. `host`: the address that it listens on.

    `advertise`: a name or an address on which others reach this instance, if that is not `host`; it must be
    given where `host` is 0.0.0.0 or ::. `port` 0: any that is free. `key`: the same on all instances, at
    least 16 bytes. Names are resolved here, once, by `start`; peers are told addresses. Raises `OSError` from
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
        advertise: str = "",
    ) -> None:
        super().__init__(key, auth_s, clock)
        self._host, self._port, self._advertise = host, port, advertise

    def _listen(self) -> socket.socket:
        family, *_, place = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
        known = self._advertise or self._host
        reached = str(socket.getaddrinfo(known, self._port, type=socket.SOCK_STREAM)[0][4][0])
        if _is_no_host(reached):
            raise ConfigError(
                f"no other host reaches this instance at {known}: give `advertise`, the address of this host "
                "in the network of its peers"
            )
        self._reached = reached
        return socket.create_server(place, family=family)

    def address(self) -> Mapping[str, str | int]:
        host, port = self._reached, self._listener.getsockname()[1]
        return {"transport": self.name, "host": host, "port": port}

    def connect(self, address: Mapping[str, str | int]) -> int:
        host, port = address.get("host"), address.get("port")
        is_port = isinstance(port, int) and 0 < port < 1 << 16
        if address.get("transport") != self.name or not isinstance(host, str) or not is_port:
            raise ConfigError(f"{dict(address)} is no address of a transport {self.name}")
        try:
            _numeric(host, 0)
        except (OSError, ValueError):
            raise ConfigError(
                f"{host!r} is no IP address: an instance advertises addresses, not names, since resolving a "
                "name may take long"
            ) from None
        if _is_no_host(host):
            raise ConfigError(f"no host is reached at {host}: its transport needs `advertise`")
        link = next(self._links)
        self._addresses[link] = address
        return link

    def _dial(self, address: Mapping[str, str | int]) -> socket.socket:
        family, place = _numeric(str(address["host"]), int(address["port"]))
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        self._prepare(sock)
        failure = sock.connect_ex(place)
        if failure not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(failure, os.strerror(failure))
        return sock

    def _prepare(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _numeric(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """The family and the socket address of an IP address, without a resolver."""
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    return family, place


def _is_no_host(address: str) -> bool:
    """Whether it is 0.0.0.0 or ::, in any form."""
    return ipaddress.ip_address(_numeric(address, 0)[1][0]).is_unspecified


PLUGIN = TcpTransport
