"""Transfers KV between instances: the time it takes, and its arrival.

Blocks arrive as those of real transfers do: `begin_receive`, then `publish` (`KVArrivals`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sagellm.benchmarks.simulate.instance import Instance
from sagellm.control_plane.queues import PhaseQueue, QueuedRequest, QueuePhase
from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.router import RequestMetadata
from sagellm.core.types import Request
from sagellm.kvmgr.manager import KVCacheManager

SPARE_BLOCKS = 4
"""Blocks that a decode instance keeps free for each of its requests before it accepts another."""


@dataclass(slots=True)
class PromptTransfer:
    """KV of a prompt on its way. The target will serve `request`."""

    request: Request
    num_prompt_tokens: int
    source: Instance
    target: Instance
    ready_s: float
    num_blocks: int = 0
    end_s: float = 0.0


@dataclass(slots=True)
class Links:
    """One link per instance and direction, each with one transfer at a time. Transfers to an instance start
    in order (its `decode_queue`). The first waits until the target has room for it, so that its KV is not
    evicted unused. `latency_s`: before the first byte of a transfer."""

    bytes_per_s: float = 50e9
    latency_s: float = 1e-3
    _free_s: dict[str, float] = field(default_factory=dict)
    _queues: dict[str, PhaseQueue] = field(default_factory=dict)
    _transfers: dict[str, PromptTransfer] = field(default_factory=dict)
    _promised: dict[str, list[PromptTransfer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and 0 <= self.latency_s < math.inf):
            raise ConfigError(
                "a network needs a bandwidth above 0 and a latency from 0 on, got "
                f"{self.bytes_per_s} bytes/s and {self.latency_s} s"
            )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way, nor waits for it."""
        return not self._transfers and not any(self._promised.values())

    def send(self, transfer: PromptTransfer) -> None:
        """Puts the transfer into the queue of its target."""
        name, request = transfer.target.name, transfer.request
        if name not in self._queues:
            self._queues[name] = PhaseQueue(QueuePhase.DECODE, lambda *_: 0.0, max_waiting=1 << 30)
        self._transfers[request.request_id] = transfer
        self._queues[name].push(RequestMetadata(request.request_id, request.tokens), transfer.ready_s)

    def start(self, target: Instance, now_s: float) -> list[PromptTransfer]:
        """Starts transfers for which the target has room; sets their `end_s`."""
        queue = self._queues.get(target.name)
        begun: list[PromptTransfer] = []

        def begin(waiting: QueuedRequest) -> bool:
            transfer = self._transfers[waiting.request.request_id]
            if not self._has_room(transfer):
                return False
            del self._transfers[waiting.request.request_id]
            self._promised.setdefault(target.name, []).append(transfer)
            self.book(transfer, now_s)
            begun.append(transfer)
            return True

        if queue is not None:
            queue.drain(begin)
        return begun

    def num_expected(self, target: Instance) -> int:
        """Requests that wait for their KV, or whose KV is on its way."""
        queue = self._queues.get(target.name)
        return len(self._promised.get(target.name, ())) + (0 if queue is None else len(queue))

    def book(self, transfer: PromptTransfer, now_s: float) -> None:
        """Gives the transfer the next free time of its links; sets its `end_s`."""
        target = transfer.target
        outgoing, incoming = f"{transfer.source.name} out", f"{target.name} in"
        num_tokens = max(0, transfer.num_prompt_tokens - _cached_tokens(target.engine.kv, transfer))
        num_bytes = num_tokens * target.engine.backend.get_kv_schema().bytes_per_token
        ready_s = max(transfer.ready_s, now_s)  # the target's clock may be behind the source's
        start_s = max(ready_s, self._free_s.get(outgoing, 0.0), self._free_s.get(incoming, 0.0))
        transfer.end_s = start_s + (self.latency_s + num_bytes / self.bytes_per_s)
        self._free_s[outgoing] = self._free_s[incoming] = transfer.end_s

    def arrive(self, transfer: PromptTransfer) -> None:
        """Registers the KV at the target."""
        self._promised[transfer.target.name].remove(transfer)
        receive(transfer.target.engine.kv, transfer.request, transfer.num_prompt_tokens)

    def _has_room(self, transfer: PromptTransfer) -> bool:
        """Whether the target has a row and blocks for the transfer. Blocks promised to other transfers and
        kept for requests at the target do not count. An idle target always has room."""
        target, promised = transfer.target, self._promised.get(transfer.target.name, [])
        kv, stats = target.engine.kv, target.engine.stats()
        cached_blocks = _cached_tokens(kv, transfer) // kv.block_size
        transfer.num_blocks = cdiv(len(transfer.request.tokens), kv.block_size) - cached_blocks
        others = stats.num_running + stats.num_waiting + len(promised)
        if not others:
            return True
        reserved = sum(other.num_blocks for other in promised) + SPARE_BLOCKS * others
        room = kv.quotes.available_blocks() - reserved
        return others < target.engine.max_num_seqs and transfer.num_blocks <= room


def _cached_tokens(kv: KVCacheManager, transfer: PromptTransfer) -> int:
    namespace = kv.namespace_of(transfer.request.namespace)
    return kv.index.lookup(transfer.request.tokens, namespace, transfer.num_prompt_tokens).num_tokens


def receive(kv: KVCacheManager, request: Request, num_tokens: int) -> int:
    """Registers the whole blocks of the first `num_tokens` tokens as cached. Evicts what is needed for
    them. Returns the number of tokens cached now: fewer if running requests hold too many blocks. The
    last, partial block is not registered, since the index holds whole blocks; it is computed again."""
    arrivals, namespace, tokens = kv.arrivals, kv.namespace_of(request.namespace), request.tokens
    if arrivals is None:
        raise ConfigError("this instance takes no KV: its model has sliding windows or recurrent states")
    wanted = num_tokens // kv.block_size
    hit = kv.pins.hold(kv.quotes.lookup(tokens, namespace, num_tokens))
    room = hit.num_blocks + kv.quotes.available_blocks()
    kv.pins.let_go(hit)
    arrival = arrivals.begin_receive(tokens, namespace, min(wanted, room))
    if arrival is not None:
        arrivals.publish(arrival, len(arrival.block_ids))
    return arrivals.num_cached(tokens, namespace, wanted) * kv.block_size
