"""The receiver of `sagellm bench micro kv_transfer`, in a process of its own.

    python -m sagellm.benchmarks.micro.kv_transfer_peer KIND NUM_BLOCKS

Prints what the sender connects to, then receives until it is ended. KIND is a transport, or `raw`: a loop
over a plain TCP socket; or one of `kv_transfer_plain`.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sagellm.comm.kv_transfer.channel import TransferChannel
from sagellm.comm.kv_transfer.transports import TRANSPORTS
from sagellm.core.protocols.kv_pool import KVPool
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.protocols.kv_transfer import TransportEngine
from sagellm.core.registry import registry
from sagellm.core.shared_pages import SharedPages
from sagellm.core.types import KVCacheSchema, Tokens
from sagellm.engines.build_kv import hashes_of
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals

BLOCK_TOKENS = 16
BLOCK_BYTES = 1 << 20
SCHEMA = KVCacheSchema(64, 8, 32, "bfloat16", BLOCK_TOKENS, "benchmark", "benchmark")
"""Of a model whose blocks of 16 tokens have 1 MB."""
KEY = b"the key of a benchmark"
OWNER = "prefix index"
RAW = "raw"


class OneArray:
    """Implements `BlockBytes` and `BlockViews`: each block in one piece."""

    bytes_per_block = BLOCK_BYTES
    numa_node: int | None = None
    has_views = True

    def __init__(self, num_blocks: int) -> None:
        self.shared_pages = SharedPages(num_blocks * BLOCK_BYTES)
        self.memory = self.shared_pages.memory
        self.rows = np.frombuffer(self.memory, np.uint8).reshape(num_blocks, BLOCK_BYTES)
        self.rows[:] = 1

    def lock_pages(self, buffer: memoryview) -> None:
        pass

    def follow_steps(self) -> None:
        pass

    def views(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        return [self.memory[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] for block in block_ids]

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        rows = np.frombuffer(target, np.uint8).reshape(-1, BLOCK_BYTES)
        for row, block in zip(rows, block_ids, strict=True):
            np.copyto(row, self.rows[block])

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        rows = np.frombuffer(data, np.uint8).reshape(-1, BLOCK_BYTES)
        for row, block in zip(rows, block_ids, strict=True):
            np.copyto(self.rows[block], row)


def transport_options(kind: str) -> dict[str, Any]:
    return {"key": KEY} | ({} if kind == "shared_memory" else {"port": 0})


class TransferNode:
    """A channel over a transport, and a prefix cache of so many blocks."""

    def __init__(self, name: str, transport: TransportEngine, num_blocks: int) -> None:
        self.index = registry("index").create(
            "radix", block_size=BLOCK_TOKENS, policy=registry("policy").create("lru")
        )
        self.pool: KVPool = registry("pool").create(
            "free_list", total_blocks=num_blocks, block_size=BLOCK_TOKENS
        )
        arrivals = PrefixArrivals(self.index, self.pool)
        arrivals.serve(lambda count, account: None, OWNER)
        self.memory = OneArray(num_blocks)
        self.channel = TransferChannel(
            name, transport, self.memory, SCHEMA, None, arrivals,
            partial(hashes_of, BLOCK_TOKENS),
        )  # fmt: skip

    def cache(self, tokens: Tokens) -> None:
        """Have a prompt of all blocks in the cache."""
        own = self.pool.allocate(self.pool.total_blocks, "request")
        assert own is not None
        self.index.insert(tokens, own.block_ids)
        self.pool.hand_over(own, 0, len(own.block_ids), OWNER)

    def evict_all(self) -> None:
        evicted = self.index.evict(self.index.num_evictable)
        if evicted is not None:
            self.pool.take_back(OWNER, evicted)


def receive(kind: str, num_blocks: int) -> None:
    node = TransferNode("peer", TRANSPORTS.create(kind, **transport_options(kind)), num_blocks)
    print(node.channel.metadata().decode(), flush=True)
    while True:
        node.channel.wait(1.0)
        node.channel.poll()
        if node.channel.received():
            node.evict_all()


def receive_raw(num_blocks: int) -> None:
    """Read all blocks into distinct memory, and answer with a byte; again and again."""
    memory, listener = OneArray(num_blocks), socket.create_server(("127.0.0.1", 0))
    print(json.dumps(listener.getsockname()), flush=True)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        for view in memory.views(range(num_blocks)):
            left = view
            while left:
                num_bytes = sock.recv_into(left)
                if not num_bytes:
                    return
                left = left[num_bytes:]
        sock.sendall(b"\1")


def main(kind: str, num_blocks: int) -> None:
    from sagellm.benchmarks.micro.kv_transfer_plain import WRITERS, force_tcp, receive_plain

    if kind == RAW:
        receive_raw(num_blocks)
    elif kind in WRITERS:
        receive_plain(kind, num_blocks)
    else:
        force_tcp()
        receive(kind, num_blocks)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
