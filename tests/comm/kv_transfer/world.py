"""Instances without a model: each has an index, a pool, and blocks whose bytes follow from their tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache
from typing import Any

import numpy as np

from sagellm.comm.kv_transfer.channel import TransferChannel
from sagellm.comm.kv_transfer.options import ChannelOptions, CodecOf
from sagellm.core.clock import Clock
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.protocols.kv_transfer import (
    BlockLayout,
    KVPath,
    ReceivedKV,
    Ticket,
    TransferReport,
    TransferStatus,
    TransportEngine,
)
from sagellm.core.registry import registry
from sagellm.core.shared_pages import SharedPages
from sagellm.core.types import TOKEN_BYTES, KVCacheSchema, Namespace, Tokens
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals
from sagellm.kvmgr.prefix_cache.fingerprint import chain

KEY = b"a key that tests share"
SIZE, INDEX, SPACE = 4, "prefix index", Namespace()
TOKEN_FIRST, HEAD_FIRST = "kv.layer.token.head.dim", "kv.layer.head.token.dim"
LAYOUT = BlockLayout(TOKEN_FIRST, num_layers=3, total_heads=4, head_dim=8, block_size=SIZE, dtype="float32")


def hashes_of(path: bytes, namespace: Namespace) -> list[bytes]:
    return chain(path, SIZE * TOKEN_BYTES, namespace)


@lru_cache(4096)
def canonical(token_hash: bytes, layout: BlockLayout) -> Any:
    """The KV of a block for all heads: [kv, layer, token, head, dim] as numbers without a meaning."""
    rng = np.random.default_rng(np.frombuffer(token_hash, np.uint32))
    shape = 2, layout.num_layers, layout.block_size, layout.total_heads, layout.head_dim
    return rng.integers(0, 1 << 32, shape, np.uint32)


def content(token_hash: bytes, layout: BlockLayout) -> bytes:
    """The bytes of a block, made without the code under test."""
    whole = canonical(token_hash, layout)[:, :, :, layout.first_head : layout.first_head + layout.num_heads]
    names = ["kv", "layer", "token", "head", "dim"]
    order = [names.index(axis) for axis in layout.axes.split(".")]
    return bytes(np.ascontiguousarray(whole.transpose(order)).tobytes())


def schema_of(layout: BlockLayout, fingerprint: str = "weights") -> KVCacheSchema:
    return KVCacheSchema(
        layout.num_layers, layout.num_heads, layout.head_dim, layout.dtype, layout.block_size, layout.axes,
        fingerprint,
    )  # fmt: skip


class Memory:
    """Implements `BlockBytes`, without views, as a GPU's memory."""

    numa_node: int | None = None

    def __init__(self, num_blocks: int, bytes_per_block: int) -> None:
        self.bytes_per_block = bytes_per_block
        self.rows = np.zeros((num_blocks, bytes_per_block), np.uint8)

    def lock_pages(self, buffer: memoryview) -> None: ...

    def follow_steps(self) -> None: ...

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        np.frombuffer(target, np.uint8).reshape(len(block_ids), -1)[:] = self.rows[list(block_ids)]

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        self.rows[list(block_ids)] = np.frombuffer(data, np.uint8).reshape(len(block_ids), -1)


class ViewedMemory(Memory):
    """Implements `BlockViews` too: `num_parts` views of a block."""

    has_views = True

    def __init__(self, num_blocks: int, bytes_per_block: int, num_parts: int = 6) -> None:
        super().__init__(num_blocks, bytes_per_block)
        self._part = bytes_per_block // num_parts
        assert self._part * num_parts == bytes_per_block

    def views(self, block_ids: Sequence[int]) -> Sequence[memoryview]:
        size = self._part
        rows = [memoryview(self.rows[block]) for block in block_ids]
        return [row[at : at + size] for row in rows for at in range(0, self.bytes_per_block, size)]


class SharedMemoryOfBlocks(ViewedMemory):
    """As `ViewedMemory`, in `shared_pages`: a receiver on this host copies blocks from there."""

    def __init__(self, num_blocks: int, bytes_per_block: int) -> None:
        super().__init__(num_blocks, bytes_per_block)
        self.shared_pages = SharedPages(num_blocks * bytes_per_block)
        self.rows = np.frombuffer(self.shared_pages.memory, np.uint8).reshape(num_blocks, -1)


class Inline(Executor):
    """Runs a task when it is submitted."""

    def submit(self, task: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(task(*given, **named))
        return done


class Instance:
    """A channel with its blocks. `compute` stands for a model; `check` finds wrong KV in the index."""

    def __init__(
        self, name: str, transport: TransportEngine, *, num_blocks: int = 64, layout: BlockLayout = LAYOUT,
        has_views: bool = True, codec: CodecOf | None = None, fingerprint: str = "weights",
        options: ChannelOptions | None = None, clock: Clock | None = None, worker: Executor | None = None,
        converts: bool = True, is_shared: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.layout = name, layout
        self.index = registry("index").create("radix", block_size=SIZE)
        self.pool = FreeListPool(num_blocks, SIZE)
        self.arrivals = PrefixArrivals(self.index, self.pool)
        self.arrivals.serve(self._make_room, INDEX)
        made = SharedMemoryOfBlocks if is_shared else ViewedMemory if has_views else Memory
        self.memory = made(num_blocks, layout.bytes_per_block)
        self.channel = TransferChannel(
            name, transport, self.memory, schema_of(layout, fingerprint), layout if converts else None,
            self.arrivals, hashes_of, codec=codec, options=options, clock=clock, worker=worker,
        )  # fmt: skip
        self._pinned: dict[Ticket, Any] = {}
        self.reports: dict[Ticket, TransferReport] = {}
        self.received: list[ReceivedKV] = []

    def _make_room(self, num_blocks: int, account: object) -> None:
        missing = min(num_blocks - self.pool.num_free, self.index.num_evictable)
        if missing > 0:
            self.pool.take_back(INDEX, self.index.evict(missing))

    def evict_all(self) -> None:
        if self.index.num_evictable:
            self.pool.take_back(INDEX, self.index.evict(self.index.num_evictable))

    def compute(self, tokens: Tokens) -> bool:
        """Have the KV of the whole blocks of a prompt, as a request would; False without room."""
        hit = self.index.pin(self.index.lookup(tokens))
        there = self.index.block_ids(hit)
        missing = len(tokens) // SIZE - len(there)
        self._make_room(missing, None)
        own = self.pool.allocate(missing, "request")
        if own is not None:
            path = Tokens(tokens.slice(0, len(tokens) // SIZE * SIZE))
            for block, token_hash in zip(
                own.block_ids, hashes_of(path.tobytes(), SPACE)[len(there) :], strict=True
            ):
                self.memory.write_blocks([block], content(token_hash, self.layout))
            self.index.insert(path, there + own.block_ids)
            self.pool.hand_over(own, 0, missing, INDEX)
            self.pool.free(own)
        self.index.unpin(hit)
        return own is not None

    def send(self, tokens: Tokens, target: str, name: str = "r", note: bytes = b"", **options: Any) -> Ticket:
        hit = self.index.pin(self.index.lookup(tokens))
        path = KVPath(name, tokens, SPACE, self.index.block_ids(hit), note)
        ticket = self.channel.transfer(path, target, **options)
        self._pinned[ticket] = hit
        return ticket

    def poll(self) -> None:
        for report in self.channel.poll():
            assert report.ticket not in self.reports, "a ticket ends once"
            assert report.status is not TransferStatus.PENDING
            self.reports[report.ticket] = report
            self.index.unpin(self._pinned.pop(report.ticket))
        self.received += self.channel.received()

    def num_tokens(self, tokens: Tokens) -> int:
        return int(self.index.lookup(tokens).num_tokens)

    def check(self, *prompts: Tokens) -> None:
        """The books balance, and each prompt finds its own KV only."""
        self.channel.check()
        self.index.check()
        self.pool.check({INDEX: self.index.all_block_ids()})
        for tokens in prompts:
            found = self.index.block_ids(self.index.lookup(tokens))
            for block, token_hash in zip(found, hashes_of(tokens.tobytes(), SPACE), strict=False):
                assert bytes(self.memory.rows[block]) == content(token_hash, self.layout), (
                    f"{self.name}: {block}"
                )


def prompt(seed: int, num_blocks: int, rest: int = 1) -> Tokens:
    rng = random.Random(seed)
    return Tokens(rng.randrange(1000) for _ in range(num_blocks * SIZE + rest))


def introduce(*instances: Instance) -> None:
    """Each knows all others."""
    for each in instances:
        for other in instances:
            if other is not each:
                each.channel.add_peer(other.channel.metadata())


def until(condition: Callable[[], object], *instances: Instance, timeout_s: float = 20.0) -> None:
    """Poll until something is so."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        for each in instances:
            each.poll()
            each.channel.wait(0.002)
        assert time.monotonic() < end_s, "it takes too long"


def finish(sender: Instance, ticket: Ticket, *others: Instance, timeout_s: float = 20.0) -> TransferReport:
    until(lambda: ticket in sender.reports, sender, *others, timeout_s=timeout_s)
    return sender.reports[ticket]


class PairScene:
    """A sender, a receiver, and the prompt that is sent."""

    source: Instance
    target: Instance
    tokens: Tokens

    def check(self) -> None:
        """What has arrived is right, and no block is waited for any more."""
        until(lambda: not self.target.arrivals.num_blocks, self.source, self.target)
        self.source.check(self.tokens)
        self.target.check(self.tokens)
