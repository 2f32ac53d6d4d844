"""Tiers in `sagellm bench micro kv_pool`: CPU time of their calls, and bandwidth.

Section t: prompts of `paths` tokens, an LRU device with one tier, over blocks without bytes. Worker threads
run beside the calls; their CPU time is not counted. Section m: distinct blocks of 1 MB.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from sagellm.benchmarks.micro._kv import Prompts
from sagellm.benchmarks.micro.cases import (
    BLOCK_SIZE,
    MicroBenchCell,
    MicroBenchPlan,
    MicroBenchRow,
    Recipe,
    Stopwatch,
    TimedOperation,
    timed,
)
from sagellm.benchmarks.micro.kv_bytes import (
    COPY_FROM,
    COPY_TO,
    HOST_READ,
    HOST_WRITE,
    MB,
    RAW_READ,
    RAW_WRITE,
    READ,
    WRITE,
    Blocks,
    measure_disk,
    measure_host,
)
from sagellm.benchmarks.tiered import TieredDevice
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_tiers import TierLookup
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens

OFFER_KNOWN = "offer a path that the tier has"
OFFER_NEW = "offer a new path"
REQUEST_MISS = "request, nothing there"
REQUEST_HIT = "request, all there"
POLL_IDLE = "poll, nothing under way"
POLL_STORED = "poll, a path is stored"
POLL_LOADED = "poll, a path is loaded"
GB_PER_S = "GB/s"


class _Scene:
    """A device and a tier that hold `2 * (calls + 1)` paths each."""

    def __init__(self, cell: MicroBenchCell, calls: int) -> None:
        def index_of(_: int) -> Any:
            policy = registry("policy").create(cell.plan.policy)
            return registry("index").create("radix", block_size=BLOCK_SIZE, policy=policy)

        def pool_of(size: int) -> Any:
            return registry("pool").create(cell.variant, total_blocks=size, block_size=BLOCK_SIZE)

        size = 2 * (calls + 1) * cell.num_blocks
        self._cell, self._prompts, self._names = cell, Prompts(cell.plan.seed), count()
        self.device = TieredDevice(size, size, index_of, pool_of)
        self.tiers, self.index = self.device.tiers, self.device.index

    def draw(self) -> Tokens:
        return self._prompts.draw(self._cell.size)

    def computed(self) -> PrefixHit:
        """A new path on the device, pinned."""
        return self.device.compute(self.draw())[1]

    def saved(self) -> Tokens:
        """A new path that the tier has and the device lacks."""
        hit = self.computed()
        self.tiers.offer(hit)
        self.device.settle()
        self.index.unpin(hit)
        self.device.evict_all()
        return hit.tokens

    def request(self, tokens: Tokens, expected: TierLookup) -> None:
        found = self.tiers.request(f"r{next(self._names)}", tokens, Namespace(), len(tokens))
        if found is not expected:
            raise BookkeepingError(f"the tier answered {found}, not {expected}")

    def forget(self, hit: PrefixHit) -> None:
        """Let the moves end, and the path go from the device."""
        self.device.settle()
        self.index.unpin(hit)
        self.device.evict_all()


def _offer_known(cell: MicroBenchCell, calls: int) -> TimedOperation:
    scene = _Scene(cell, calls)
    hit = scene.computed()
    scene.tiers.offer(hit)
    scene.device.settle()
    return TimedOperation(run=lambda _: scene.tiers.offer(hit))


def _offer_new(cell: MicroBenchCell, calls: int) -> TimedOperation:
    scene = _Scene(cell, calls)
    return TimedOperation(
        run=scene.tiers.offer, setup=scene.computed, teardown=lambda hit, _: scene.forget(hit)
    )


def _request_miss(cell: MicroBenchCell, calls: int) -> TimedOperation:
    scene = _Scene(cell, calls)
    scene.saved()
    tokens = scene.draw()
    return TimedOperation(run=lambda _: scene.request(tokens, TierLookup.MISS))


def _request_hit(cell: MicroBenchCell, calls: int) -> TimedOperation:
    scene = _Scene(cell, calls)

    def end(tokens: Tokens, _: object) -> None:
        scene.device.settle()
        scene.device.evict_all()

    return TimedOperation(
        run=lambda tokens: scene.request(tokens, TierLookup.HIT_PENDING), setup=scene.saved, teardown=end
    )


def _poll_idle(cell: MicroBenchCell, calls: int) -> TimedOperation:
    scene = _Scene(cell, calls)
    scene.saved()
    return TimedOperation(run=lambda _: scene.tiers.poll())


def _poll_stored(cell: MicroBenchCell, calls: int) -> TimedOperation:
    scene = _Scene(cell, calls)

    def stored() -> PrefixHit:
        hit = scene.computed()
        scene.tiers.offer(hit)
        scene.tiers.wait(10.0)
        return hit

    return TimedOperation(
        run=lambda _: scene.tiers.poll(), setup=stored, teardown=lambda hit, _: scene.forget(hit)
    )


def _poll_loaded(cell: MicroBenchCell, calls: int) -> TimedOperation:
    scene = _Scene(cell, calls)

    def loaded() -> None:
        scene.request(scene.saved(), TierLookup.HIT_PENDING)
        scene.tiers.wait(10.0)

    return TimedOperation(
        run=lambda _: scene.tiers.poll(), setup=loaded, teardown=lambda *_: scene.device.evict_all()
    )


books = timed(
    "t",
    Recipe(OFFER_KNOWN, _offer_known, "paths"),
    Recipe(OFFER_NEW, _offer_new, "paths", calls=1),
    Recipe(REQUEST_MISS, _request_miss, "paths"),
    Recipe(REQUEST_HIT, _request_hit, "paths", calls=1),
    Recipe(POLL_IDLE, _poll_idle, "paths"),
    Recipe(POLL_STORED, _poll_stored, "paths", calls=1),
    Recipe(POLL_LOADED, _poll_loaded, "paths", calls=1),
)


def moves(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section m: GB/s of wall time, medians of the rounds."""
    blocks = Blocks(MB, plan.moved_mb * MB)
    host = measure_host(blocks, plan.rounds)
    with tempfile.TemporaryDirectory(prefix="sagellm-bench-") as folder:
        disk = measure_disk(Path(folder), blocks, plan.rounds)
    cases = {"host": (host, (HOST_WRITE, COPY_TO, HOST_READ, COPY_FROM)),
             "disk": (disk, (WRITE, RAW_WRITE, READ, RAW_READ))}  # fmt: skip
    for variant, (rates, names) in cases.items():
        for name in names:
            yield MicroBenchRow("m", name, blocks.num_bytes // MB, variant, GB_PER_S, rates.median(name))
