"""`MooncakeTransport`: payloads over Mooncake's Transfer Engine, by RDMA or TCP.

Package `mooncake-transfer-engine-non-cuda`, which needs the libraries `libibverbs1`, `libnl-3-200` and
`libnl-route-3-200` of Debian. Its environment variables are the user's: `MC_LOG_LEVEL`, say. It has no
authentication: a host that reaches its ports may read and write registered memory, so only trusted hosts may
reach them.
"""

from __future__ import annotations

from typing import Any

from sagellm.comm.kv_transfer.transports._fabric import FabricTransport
from sagellm.comm.kv_transfer.transports._slots import NUM_SLOTS, address_of
from sagellm.comm.kv_transfer.transports._stream import AUTH_S
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.ports import SagePorts


def load() -> Any:
    """Its class of transfer engines. Raises `MissingExtraError` where Mooncake is not installed."""
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError:
        package = "mooncake-transfer-engine-non-cuda"
        raise MissingExtraError("KV transfer over Mooncake", "mooncake", package) from None
    except ImportError as error:
        needed = "apt-get install libibverbs1 libnl-3-200 libnl-route-3-200"
        raise ConfigError(f"Mooncake does not load: {error}. On Debian: {needed}") from error
    return TransferEngine


class MooncakeFabric:
    """Implements `Fabric` by one transfer engine, which may be called by several threads.

    A peer is the host and port on which its engine answers. The first read from it connects.
    """

    def __init__(self, host: str, protocol: str = "tcp", device: str = "") -> None:
        self._engine = load()()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise ConfigError(
                f"Mooncake does not start on host {host!r} with protocol {protocol!r}, device {device!r}"
            )
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._memory: list[memoryview] = []

    def register(self, memory: memoryview) -> bytes:
        if self._engine.register_memory(address_of(memory), memory.nbytes):
            raise OSError(f"Mooncake cannot register {memory.nbytes} bytes")
        self._memory.append(memory)
        return self._session.encode()

    def offered(self) -> None:
        """Nothing: its threads serve peers."""

    def connect(self, description: bytes) -> str:
        return description.decode("ascii", "replace")

    def read(self, peer: str, local: int, remote: int, num_bytes: int) -> int:
        read = int(self._engine.batch_transfer_async_read(peer, [local], [remote], [num_bytes]))
        if not read:
            raise ConnectionError(f"Mooncake cannot read from {peer}")
        return read

    def is_done(self, read: int) -> bool:
        """A read that has timed out may still arrive: it is not done."""
        state = self._engine.transfer_check_status(read)
        if state == -1:
            raise ConnectionError("Mooncake: a read failed")
        return bool(state == 1)

    def disconnect(self, peer: str) -> None:
        """Nothing: its interface has no such call."""

    def close(self) -> None:
        """The memory is freed behind the engine, which may be read from until then."""
        self._engine = None
        self._memory.clear()


class MooncakeTransport(FabricTransport):
    """Implements `TransportEngine`. `key`: the same on all instances, at least 16 bytes.

    `host`, `port` and `advertise`: of the socket for messages; Mooncake is reached at the same address.
    `protocol` and `device` are Mooncake's: "tcp", or "rdma" and NICs with commas between.
    """

    name = "mooncake"

    def __init__(
        self, key: bytes, host: str = "127.0.0.1", port: int = SagePorts.KV_TRANSFER, protocol: str = "tcp",
        device: str = "", num_slots: int = NUM_SLOTS, auth_s: float = AUTH_S, clock: Clock | None = None,
        advertise: str = "",
    ) -> None:  # fmt: skip
        fabric = MooncakeFabric(advertise or host, protocol, device)
        super().__init__(fabric, key, host, port, num_slots, auth_s, clock, advertise)


PLUGIN = MooncakeTransport
