"""`NixlTransport`: payloads over NIXL, which picks RDMA, shared memory or TCP by UCX.

Package `nixl-cu12`; CUDA is not needed. The environment variables of UCX are the user's: `UCX_TLS=tcp` and
`UCX_NET_DEVICES=eth0`, say. UCX has no authentication: a host that reaches its ports may read and write the
memory of the process, so only trusted hosts may reach them.

Where Debian's `libnl-route-3-200` is installed too, which Mooncake needs, a process with `nixl-cu12` 1.5.1
ends, when all is done, with a segmentation fault: both copies of that library are loaded. On hosts without
RDMA, `UCX_MODULES=^ib` avoids it.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from sagellm.comm.kv_transfer.transports._fabric import FabricTransport
from sagellm.comm.kv_transfer.transports._slots import NUM_SLOTS, address_of
from sagellm.comm.kv_transfer.transports._stream import AUTH_S
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.ports import SagePorts

MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
"""The wheel for a version of CUDA has a module of its own; older ones are called `nixl`."""

BUSY_S, BUSY_PAUSE_S, IDLE_PAUSE_S = 50e-3, 20e-6, 5e-3
"""How long after an offer the agent is called often; the pauses between calls."""


def load() -> ModuleType:
    """The Python interface of NIXL. Raises `MissingExtraError` where it is not installed."""
    for name in MODULES:
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if "NIXL_LOG_LEVEL" not in os.environ:  # it writes to the standard output, where results are
            logging.getLogger("nixl").setLevel(logging.WARNING)
        return found
    raise MissingExtraError("KV transfer over NIXL", "nixl", "nixl-cu12")


class NixlFabric:
    """Implements `Fabric` by one agent, which takes calls of several threads at once.

    NIXL's own thread, by which peers can read at any time, takes a whole core. So there is one here that
    calls the agent often while chunks are offered, and seldom otherwise.

    An agent of another process is removed when no connection uses it any more, so that the next one connects
    anew: an endpoint that has failed stays so.
    """

    def __init__(self, backend: str = "UCX") -> None:
        api, self._backend = load(), backend
        self._peers = threading.Lock()
        """Held while a peer is added or removed, and by no other call: that may take long."""
        self._uses: Counter[Any] = Counter()
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=[backend],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )  # fmt: skip
        self._agent: Any = api.nixl_agent(f"sagellm-{uuid.uuid4().hex}", config)
        if backend not in self._agent.backends:
            known = ", ".join(self._agent.get_plugin_list())
            raise ConfigError(f"NIXL has no backend {backend!r} here: it has {known}")
        self._memory: list[memoryview] = []
        self._offered, self._is_closing = threading.Event(), False
        self._thread = threading.Thread(target=self._progress, name="sagellm-kv-nixl-agent", daemon=True)
        self._thread.start()

    def _progress(self) -> None:
        busy_until_s = 0.0
        while not self._is_closing:
            is_busy = time.monotonic() < busy_until_s
            if self._offered.wait(0 if is_busy else IDLE_PAUSE_S):
                self._offered.clear()
                busy_until_s = time.monotonic() + BUSY_S
            elif is_busy:
                time.sleep(BUSY_PAUSE_S)
            with suppress(ConnectionError), self._calling() as agent:
                agent.get_new_notifs()

    def offered(self) -> None:
        self._offered.set()

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        """The agent. Its errors have no common class."""
        try:
            yield self._agent
        except Exception as error:
            raise ConnectionError(f"NIXL: {error}") from error

    def register(self, memory: memoryview) -> bytes:
        with self._calling() as agent:
            described = agent.register_memory([(address_of(memory), memory.nbytes, 0, "")], "DRAM")
            self._memory.append(memory)
            return bytes(agent.get_partial_agent_metadata(described, True, [self._backend]))

    def connect(self, description: bytes) -> Any:
        with self._peers, self._calling() as agent:
            name = agent.add_remote_agent(description)
            self._uses[name] += 1
            return name

    def read(self, peer: Any, local: int, remote: int, num_bytes: int) -> Any:
        with self._calling() as agent:
            into, source = (agent.get_xfer_descs([(at, num_bytes, 0)], "DRAM") for at in (local, remote))
            handle, state = agent.initialize_xfer("READ", into, source, peer), "ERR"
            try:
                state = agent.transfer(handle)
            finally:
                if state == "ERR":
                    agent.release_xfer_handle(handle)
            if state == "ERR":
                raise ConnectionError("a read cannot be posted")
            return handle

    def is_done(self, read: Any) -> bool:
        with self._calling() as agent:
            state = "ERR"
            try:
                state = agent.check_xfer_state(read)
            finally:
                if state != "PROC":
                    agent.release_xfer_handle(read)
            if state == "ERR":
                raise ConnectionError("a read failed")
            return bool(state == "DONE")

    def disconnect(self, peer: Any) -> None:
        with self._peers, self._calling() as agent:
            self._uses[peer] -= 1
            if not self._uses[peer]:
                del self._uses[peer]
                agent.remove_remote_agent(peer)

    def close(self) -> None:
        """The memory is freed behind the agent, which may be read from until then."""
        self._is_closing = True
        self._thread.join()
        self._agent = None
        self._memory.clear()


class NixlTransport(FabricTransport):
    """Implements `TransportEngine`. `key`: the same on all instances, at least 16 bytes.

    `host`, `port` and `advertise`: of the socket for messages. `backend`: of NIXL.
    """

    name = "nixl"

    def __init__(
        self, key: bytes, host: str = "127.0.0.1", port: int = SagePorts.KV_TRANSFER, backend: str = "UCX",
        num_slots: int = NUM_SLOTS, auth_s: float = AUTH_S, clock: Clock | None = None, advertise: str = "",
    ) -> None:  # fmt: skip
        super().__init__(NixlFabric(backend), key, host, port, num_slots, auth_s, clock, advertise)


PLUGIN = NixlTransport
