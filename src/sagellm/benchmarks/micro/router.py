"""`sagellm bench micro router`: decisions over a fleet, and KV events absorbed.

Section d: `instances` instances that have `indexed_blocks` different blocks cached. Each of them has a common
beginning of 1,024 tokens, and four have the prompt: a quarter, half, three quarters and all of it. Section e:
batches of all instances as they come from the socket, decoded and applied, in blocks per second of one core.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    MicroBenchCell,
    MicroBenchmark,
    MicroBenchPlan,
    MicroBenchRow,
    Recipe,
    Stopwatch,
    TimedOperation,
    timed,
)
from sagellm.control_plane.kv_events.codec import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    WireEvent,
    decode_batch,
    encode_batch,
)
from sagellm.control_plane.kv_events.sequence import ReceivedBatch
from sagellm.control_plane.router import DEFAULT_ROUTER, make_router
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import ManualClock
from sagellm.core.events import BlocksStored
from sagellm.core.protocols.router import CachedPrefix, ExecutionInstance, RequestMetadata
from sagellm.core.registry import registry
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens

COMMON_BLOCKS = 64
PATH_BLOCKS = 512
"""Blocks of each other prompt that an instance has cached."""
PROMPTS = 16
CHUNK_BLOCKS = 32
"""Blocks that a prefill step stores at once."""
_BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES


class _Fleet:
    """An index, filled, and prompts of one length that four instances have in part."""

    def __init__(self, plan: MicroBenchPlan, num_tokens: int) -> None:
        self._random = random.Random(plan.seed)
        self.index = PrefixIndex(ManualClock())
        self.names = tuple(f"instance-{number}" for number in range(plan.instances))
        self.instances = [
            ExecutionInstance(name, num_running=20, num_queued_tokens=1000 + number, prefill_token_s=1e-4,
                              step_s=0.02, num_free_blocks=10_000, block_size=BLOCK_SIZE, reported_s=1.0)
            for number, name in enumerate(self.names)
        ]  # fmt: skip
        common = self._tokens(COMMON_BLOCKS)
        hashes = self._hashes(COMMON_BLOCKS)
        for name in self.names:
            self.index.apply(name, _stored(hashes, None, common))
        while self.index.num_blocks < plan.indexed_blocks:
            for name in self.names:
                self.index.apply(
                    name, _stored(self._hashes(PATH_BLOCKS), hashes[-1], self._tokens(PATH_BLOCKS))
                )
        self.prompts = [self._prompt(common, hashes, num_tokens // BLOCK_SIZE) for _ in range(PROMPTS)]

    def _prompt(self, common: bytes, hashes: Sequence[bytes], num_blocks: int) -> Tokens:
        shared = min(COMMON_BLOCKS, num_blocks // 2)
        own, names = self._tokens(num_blocks - shared), self._hashes(num_blocks - shared)
        for quarter, name in enumerate(self._random.sample(self.names, min(4, len(self.names))), 1):
            held = max(1, len(names) * quarter // 4)
            self.index.apply(name, _stored(names[:held], hashes[shared - 1], own[: held * _BLOCK_BYTES]))
        return Tokens.frombytes(common[: shared * _BLOCK_BYTES] + own)

    def _tokens(self, num_blocks: int) -> bytes:
        """Random tokens below 65,536."""
        low = self._random.randbytes(num_blocks * BLOCK_SIZE * 2)
        data = bytearray(num_blocks * _BLOCK_BYTES)
        data[0::4], data[1::4] = low[0::2], low[1::2]
        return bytes(data)

    def _hashes(self, count: int) -> list[bytes]:
        data = self._random.randbytes(8 * count)
        return [data[at : at + 8] for at in range(0, len(data), 8)]


@lru_cache(maxsize=1)
def _fleet(plan: MicroBenchPlan, num_tokens: int) -> _Fleet:
    """Kept for the next case: it takes seconds to fill."""
    return _Fleet(plan, num_tokens)


def _stored(hashes: Sequence[bytes], parent: bytes | None, tokens: bytes) -> BlocksStored:
    return BlocksStored((), 0, tuple(hashes), parent, tokens, Namespace())


def _decide(cell: MicroBenchCell, calls: int, *, is_cached: bool, looks_up: bool = True) -> TimedOperation:
    """One look-up and one placement, of prompts in turn."""
    fleet = _fleet(cell.plan, cell.size)
    router = make_router(cell.variant, ManualClock())
    prompts = fleet.prompts
    if not is_cached:
        prompts = [Tokens.frombytes(b"\xff\xff\x01\x00" + prompt.tobytes()[4:]) for prompt in prompts]
    for prompt in prompts:
        prompt.tobytes()
    asked = [RequestMetadata("r", prompt) for prompt in prompts]
    nothing = [CachedPrefix()] * len(fleet.names)
    turn = iter(range(1 << 60))

    def run(_: object) -> object:
        request = asked[next(turn) % PROMPTS]
        cached = fleet.index.lookup(request.tokens, request.namespace, fleet.names) if looks_up else nothing
        return router.place(request, fleet.instances, cached)

    return TimedOperation(run)


def _events(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Blocks per second of the thread's CPU time: stored, and as many removed."""
    rounds = max(1, plan.indexed_blocks // (plan.instances * CHUNK_BLOCKS * 8))
    for case, per_event in (
        ("prompts, 32 blocks per event", CHUNK_BLOCKS),
        ("answers, 1 block per event", 1),
    ):
        payloads = _payloads(plan, per_event, rounds)
        index = PrefixIndex(ManualClock())
        began = time.thread_time()
        for number, (name, payload, _) in enumerate(payloads):
            index.apply(name, ReceivedBatch(number, decode_batch(payload)))
        rate = sum(num_blocks for *_, num_blocks in payloads) / (time.thread_time() - began)
        yield MicroBenchRow("e", case, plan.instances, plan.variants[0], "blocks/s", rate)


def _payloads(plan: MicroBenchPlan, per_event: int, rounds: int) -> list[tuple[str, bytes, int]]:
    """Batches of 32 stored and 32 removed blocks, of all instances in turn.

    Blocks are removed one by one, eight batches after they were stored, as vLLM evicts them. Gives instance,
    payload and number of blocks."""
    draw = random.Random(plan.seed)
    names = [f"instance-{number}" for number in range(plan.instances)]
    chains: dict[str, list[list[bytes | int]]] = {name: [] for name in names}
    made = []
    for _ in range(rounds):
        for name in names:
            hashes: list[bytes | int] = [draw.getrandbits(64) for _ in range(CHUNK_BLOCKS)]
            events: list[WireEvent] = []
            for at in range(0, CHUNK_BLOCKS, per_event):
                tokens = [draw.getrandbits(16) for _ in range(per_event * BLOCK_SIZE)]
                parent = hashes[at - 1] if at else None
                events.append(
                    BlockStored(hashes[at : at + per_event], parent, tokens, BLOCK_SIZE, None, "GPU")
                )
            chains[name].append(hashes)
            num_blocks = CHUNK_BLOCKS
            if len(chains[name]) > 8:
                num_blocks *= 2
                events += [BlockRemoved([gone], "GPU") for gone in reversed(chains[name].pop(0))]
            made.append((name, encode_batch(KVEventBatch(0.0, events, 0)), num_blocks))
    return made


BENCHMARK = MicroBenchmark(
    "router",
    lambda: [DEFAULT_ROUTER],
    registry("router").get,
    {
        "d": timed(
            "d",
            Recipe("decide, prompt is cached", partial(_decide, is_cached=True)),
            Recipe("decide, prompt is new", partial(_decide, is_cached=False)),
            Recipe("place alone", partial(_decide, is_cached=False, looks_up=False), "one_length"),
        ),
        "e": _events,
    },
)
