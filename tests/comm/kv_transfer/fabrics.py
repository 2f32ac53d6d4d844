"""Transports for tests by name, and a fabric within one process that can fail, wait and repeat."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple

import pytest

from sagellm.comm.kv_transfer.transports import TRANSPORTS
from sagellm.comm.kv_transfer.transports._fabric import FabricTransport
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork
from sagellm.core.protocols.kv_transfer import TransportEngine
from tests.comm.kv_transfer.world import KEY

FAKE = "fake fabric"
LIBRARIES = [pytest.param(name, marks=pytest.mark.peer) for name in ("nixl", "mooncake")]
"""Transports that need the package of a library."""
NAMES = [*sorted({*TRANSPORTS.names()} - {"nixl", "mooncake"}), *LIBRARIES]


class _Copy(NamedTuple):
    local: int
    remote: int
    num_bytes: int


class FakeFabric:
    """Implements `Fabric` by copies within the process, made when a read is found done.

    The next `num_failing` reads fail. While it `is_stuck`, none ends.
    """

    def __init__(self) -> None:
        self.memory: list[memoryview] = []
        self.peers: list[bytes] = []
        self.num_failing = self.num_reads = 0
        self.is_stuck = self.is_closed = False

    def register(self, memory: memoryview) -> bytes:
        self.memory.append(memory)
        return b"fake"

    def offered(self) -> None:
        pass

    def connect(self, description: bytes) -> bytes:
        if description != b"fake":
            raise ConnectionError("no such peer")
        self.peers.append(description)
        return description

    def read(self, peer: Any, local: int, remote: int, num_bytes: int) -> _Copy:
        assert peer in self.peers
        assert not self.is_closed
        self.num_reads += 1
        return _Copy(local, remote, num_bytes)

    def is_done(self, read: _Copy) -> bool:
        if self.is_stuck:
            return False
        if self.num_failing:
            self.num_failing -= 1
            raise ConnectionError("told to fail")
        ctypes.memmove(read.local, read.remote, read.num_bytes)
        return True

    def disconnect(self, peer: bytes) -> None:
        self.peers.remove(peer)

    def close(self) -> None:
        self.is_closed = True


def transport(
    kind: str, node: str = "", network: InProcessNetwork | None = None, **options: Any
) -> TransportEngine:
    """A transport of `NAMES`, or `FAKE`. `node` and `network` are for the one within a process."""
    if kind == "in_process":
        return TRANSPORTS.create(kind, node=node, network=network)
    if kind == FAKE:
        return FabricTransport(FakeFabric(), KEY, port=0, **options)
    os.environ.setdefault("UCX_MODULES", "^ib")  # see transports/nixl.py
    return TRANSPORTS.create(kind, key=KEY, **({} if kind == "shared_memory" else {"port": 0}), **options)
