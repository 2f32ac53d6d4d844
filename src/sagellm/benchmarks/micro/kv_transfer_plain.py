"""NIXL and Mooncake alone: one-sided writes of blocks to another process, over TCP.

Both sides register all their memory once. A move is one call with all blocks, which ends when the library
says that they have arrived; nothing else is agreed on, allocated or verified.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sagellm.benchmarks.micro.kv_transfer_peer import BLOCK_BYTES, OneArray
from sagellm.comm.kv_transfer.transports import mooncake, nixl
from sagellm.comm.kv_transfer.transports._slots import address_of
from sagellm.core.errors import BookkeepingError, ConfigError, MissingExtraError

PLAIN_NIXL, PLAIN_MOONCAKE = "plain NIXL", "plain Mooncake"
HOST = "127.0.0.1"


def force_tcp() -> None:
    """Have both libraries use TCP, unless the user has said what to use."""
    tcp = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib", "MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR"}
    for name, value in tcp.items():
        os.environ.setdefault(name, value)


def installed() -> list[str]:
    """Of both libraries, the transports for which the package is there."""
    found = []
    for name, load in (("nixl", nixl.load), ("mooncake", mooncake.load)):
        try:
            load()
        except (MissingExtraError, ConfigError):
            continue
        found.append(name)
    return found


def _agent(memory: OneArray, *, has_thread: bool) -> Any:
    """NIXL's thread serves a peer at any time; a side that polls needs none."""
    api = nixl.load()
    config = api.nixl_agent_config(enable_prog_thread=has_thread, backends=["UCX"])
    agent = api.nixl_agent(f"bench-{os.getpid()}", config)
    agent.register_memory([(address_of(memory.memory), len(memory.memory), 0, "")], "DRAM")
    return agent


def _engine(memory: OneArray) -> Any:
    engine = mooncake.load()()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
        raise BookkeepingError("Mooncake does not start")
    engine.register_memory(address_of(memory.memory), len(memory.memory))
    return engine


class NixlWriter:
    """Writes all blocks into those of a peer, whose first line was `said`."""

    def __init__(self, said: bytes, num_blocks: int) -> None:
        found = json.loads(said)
        self._memory = OneArray(num_blocks)
        self._agent = _agent(self._memory, has_thread=False)
        peer = self._agent.add_remote_agent(bytes.fromhex(found["metadata"]))
        own, theirs = (
            self._agent.get_xfer_descs(
                [(start + at * BLOCK_BYTES, BLOCK_BYTES, 0) for at in range(num_blocks)], "DRAM"
            )
            for start in (address_of(self._memory.memory), found["address"])
        )
        self._transfer = self._agent.initialize_xfer("WRITE", own, theirs, peer)

    def move(self) -> None:
        state = self._agent.transfer(self._transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._transfer)
        if state != "DONE":
            raise BookkeepingError("NIXL's write failed")


class MooncakeWriter:
    """Writes all blocks into those of a peer, whose first line was `said`."""

    def __init__(self, said: bytes, num_blocks: int) -> None:
        found = json.loads(said)
        self._memory = OneArray(num_blocks)
        self._engine = _engine(self._memory)
        own, theirs = (
            [start + at * BLOCK_BYTES for at in range(num_blocks)]
            for start in (address_of(self._memory.memory), found["address"])
        )
        self._call = found["session"], own, theirs, [BLOCK_BYTES] * num_blocks

    def move(self) -> None:
        if self._engine.batch_transfer_sync_write(*self._call):
            raise BookkeepingError("Mooncake's write failed")


WRITERS: Mapping[str, Callable[[bytes, int], NixlWriter | MooncakeWriter]] = {
    PLAIN_NIXL: NixlWriter,
    PLAIN_MOONCAKE: MooncakeWriter,
}


def receive_plain(kind: str, num_blocks: int) -> None:
    """Print where the blocks are, and keep them until the process is ended."""
    force_tcp()
    memory = OneArray(num_blocks)
    said: dict[str, Any] = {"address": address_of(memory.memory)}
    if kind == PLAIN_NIXL:
        library = _agent(memory, has_thread=True)
        said["metadata"] = library.get_agent_metadata().hex()
    else:
        library = _engine(memory)
        said["session"] = f"{HOST}:{library.get_rpc_port()}"
    print(json.dumps(said), flush=True)
    threading.Event().wait()
