"""`StoreBooks`: which KV of a vLLM engine is in which tier, and what moves.

In the scheduler's process. The bytes are in the workers (`store_worker.py`), which carry out the moves of
`step_metadata` and report their ends to `take_in`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from sagellm.core.blocks import Tier
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Use
from sagellm.core.protocols.kv_tiers import Buffer, ReadOutcome, StoredBlock
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.build_kv import make_policy
from sagellm.engines.guests.settings import StoreSettings
from sagellm.engines.vllm.store_messages import Move, MoveResult, OpenedStore, StoreMetadata, StoreReport
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.migrator import MigrationPlan, MoveTarget
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier, TierStore
from sagellm.kvmgr.prefix_cache.fingerprint import block_hash
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

logger = logging.getLogger("vllm.sagellm")  # below "vllm": vLLM sets that logger up
MAX_HELD_SHARE = 0.5
"""Of the device's blocks, which saves of several ended requests may hold. What is beyond is not saved."""
FIRST_BYTES_PER_S = 1e9
"""Assumed bandwidth of a tier from which nothing has been read yet."""
LATENCY_S = 1e-3
"""Assumed time of a load before its first byte."""
FEWEST_MEASURED_BYTES, FEWEST_MEASURED_TOKENS = 1 << 20, 256
"""Loads and steps with fewer say nothing about bandwidth and prefill."""
REGAINED = 1.05
"""Each load that is refused raises the assumed bandwidth of its tier by this factor, up to
`FIRST_BYTES_PER_S`, so that a tier that was slow once is tried again."""


class StorageLink:
    """Implements `BlockStorage` for the books of a tier; the workers have the bytes.

    `forgotten`: slots that the next step's metadata names.
    """

    def __init__(self, num_slots: int, blocks: Sequence[StoredBlock]) -> None:
        self.num_slots, self._blocks = num_slots, [block for block in blocks if block.slot < num_slots]
        self.fault: str | None = None
        self.forgotten: list[int] = []

    def forget(self, slots: Iterable[int]) -> None:
        self.forgotten += slots

    def touch(self, slots: Iterable[int]) -> None:
        """Does nothing: each write brings its time."""

    def sync(self) -> None:
        """Does nothing: the workers forget with the next step."""

    def recover(self) -> Sequence[StoredBlock]:
        return self._blocks

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        raise BookkeepingError("the workers write blocks: send them a plan")

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> Sequence[ReadOutcome]:
        raise BookkeepingError("the workers read blocks: send them a plan")

    def close(self) -> None:
        """Does nothing: the workers close what they have opened."""


class Found(NamedTuple):
    """A prefix that is worth loading.

    The device has its first `num_local` blocks."""

    tier: KVTier
    hit: PrefixHit
    num_local: int


@dataclass(slots=True)
class _Save:
    """A path on its way down; its `blocks` are held until then.

    `num_held` of them no request has any more.
    """

    blocks: list[Any]
    stores: dict[Tier, TierStore]
    num_held: int
    result: MoveResult | None = None


@dataclass(slots=True)
class _Load:
    """Blocks on their way up for a request. `source` pins them in their tier."""

    request_id: str
    tier: KVTier
    source: PrefixHit
    first: int
    result: MoveResult | None = None


@dataclass(slots=True)
class _Speed:
    """Seconds per token that prefill takes, and bytes per second of loads, as measured."""

    token_s: float = 0.0
    bytes_per_s: dict[Tier, float] = field(default_factory=dict)


class StoreBooks:
    """The tiers below one vLLM engine, and the moves under way. For the scheduler's thread.

    `pool` is vLLM's `BlockPool`. The books are `is_open` from the first report of all `num_ranks` workers on.
    If these refuse, they have no tiers.
    """

    def __init__(
        self, settings: StoreSettings, pool: Any, block_size: int, num_ranks: int, clock: Clock
    ) -> None:
        self._settings, self._pool, self._size, self._clock = settings, pool, block_size, clock
        self._num_ranks = num_ranks
        self._most_held = int(MAX_HELD_SHARE * pool.num_gpu_blocks)
        self.is_open = False
        self._opened: OpenedStore | None = None
        self.tiers: tuple[KVTier, ...] = ()
        self._links: dict[Tier, StorageLink] = {}
        self._saves: dict[int, _Save] = {}
        self._loads: dict[int, _Load] = {}
        self._loading: dict[str, Tier] = {}
        self._metadata = StoreMetadata()
        self._num_moves = self._num_held = 0
        self._steps: dict[int, tuple[float, int]] = {}
        self._last_s = 0.0
        self._speed = _Speed()

    # -- opening

    def _open(self, opened: OpenedStore) -> None:
        self._opened = opened if self._opened is None else self._opened.merged(opened)
        if self._opened.num_ranks < self._num_ranks:
            return
        self.is_open = True
        if self._opened.refusal:
            logger.warning("sageLLM stores no KV here: %s", self._opened.refusal)
            return
        for name, num_slots in self._opened.num_slots.items():
            link = self._links[name] = StorageLink(num_slots, self._opened.blocks.get(name, ()))
            tier = KVTier(name, self._index(num_slots), FreeListPool(num_slots, self._size), link)
            num_blocks = tier.recover(block_hash)
            logger.info("sageLLM: the tier %s has %d of %d blocks from before", name, num_blocks, num_slots)
            self.tiers += (tier,)

    def _index(self, num_slots: int) -> RadixIndex:
        settings, clock = self._settings, self._clock
        made = partial(
            make_policy, settings.policy, capacity=num_slots, clock=clock,
            model=PrefillCostModel(self._size), **settings.options,
        )  # fmt: skip
        return RadixIndex(self._size, clock=clock, policy_factory=made)

    # -- up

    def find(self, tokens: Tokens, namespace: Namespace, num_local: int, max_tokens: int) -> Found | None:
        """The longest prefix in a tier, if it is longer than the device's.

        Of equal ones that of the nearest tier."""
        found, longest = None, num_local
        for tier in self.tiers:
            hit = tier.lookup(tokens, namespace, max_tokens)
            if hit.num_blocks > longest and self._is_worth(tier.tier, num_local, hit.num_blocks):
                found, longest = Found(tier, hit, num_local), hit.num_blocks
        return found

    def _is_worth(self, tier: Tier, first: int, stop: int) -> bool:
        """Whether loading takes less time than prefill; true until that has been measured."""
        assert self._opened is not None
        bytes_per_s = self._speed.bytes_per_s.setdefault(tier, FIRST_BYTES_PER_S)
        load_s = LATENCY_S + (stop - first) * self._opened.bytes_per_block / bytes_per_s
        is_worth = not self._speed.token_s or load_s < (stop - first) * self._size * self._speed.token_s
        if not is_worth:
            self._speed.bytes_per_s[tier] = min(REGAINED * bytes_per_s, FIRST_BYTES_PER_S)
        return is_worth

    def load(self, request_id: str, found: Found, block_ids: Sequence[int]) -> None:
        """Fill these blocks of a request with what was found behind its own."""
        source, first = found.tier.begin_load(found.hit), found.num_local
        stop = first + len(block_ids)
        slots = found.tier.index.block_ids(source)[first:stop]
        plan = MigrationPlan(
            self._path(found.hit.tokens, stop), found.hit.namespace, range(first, stop), found.tier.tier,
            slots.tolist(), (MoveTarget(Tier.HBM, range(stop - first), list(block_ids)),),
        )  # fmt: skip
        self._loads[self._move(plan, request_id)] = _Load(request_id, found.tier, source, first)
        self._loading[request_id] = found.tier.tier

    def loads_for(self, request_id: str) -> Tier | None:
        """The tier from which blocks of a request come, if any do."""
        return self._loading.get(request_id)

    # -- down

    def save(
        self, tokens: Tokens, namespace: Namespace, block_ids: Sequence[int], use: Use | None = None
    ) -> None:
        """Write what tiers lack of a path.

        It is in these blocks once the step has run. `use`: the request that ends with it; None: the request
        goes on.
        """
        stores: dict[Tier, TierStore] = {}
        num_held = 0 if use is None else len(block_ids)
        has_room = not self._num_held or self._num_held + num_held <= self._most_held
        for tier in self.tiers:
            if not has_room:
                tier.num_dropped += self._num_missing(tier, tokens, namespace, block_ids)
            store = tier.begin_store(tokens, namespace, len(block_ids), use=use, has_time=has_room)
            if store is not None:
                stores[tier.tier] = store
        if not stores:
            return
        positions = sorted({position for store in stores.values() for position in store.positions})
        offset_of = {position: offset for offset, position in enumerate(positions)}
        targets = tuple(
            MoveTarget(name, [offset_of[position] for position in store.positions], list(store.slots))
            for name, store in stores.items()
        )
        plan = MigrationPlan(
            self._path(tokens, positions[-1] + 1), namespace, positions, Tier.HBM,
            [block_ids[position] for position in positions], targets,
        )  # fmt: skip
        # All blocks in front are held too: they are freed in one go, so the device evicts the last one first.
        blocks = [self._pool.blocks[block_id] for block_id in block_ids[: positions[-1] + 1]]
        type(self._pool).touch(self._pool, blocks)  # not what `GuidedPool` has put in its place
        self._num_held += num_held
        self._saves[self._move(plan)] = _Save(blocks, stores, num_held)

    def _num_missing(
        self, tier: KVTier, tokens: Tokens, namespace: Namespace, block_ids: Sequence[int]
    ) -> int:
        """How many blocks a tier lacks and is not being given."""
        known = tier.lookup(tokens, namespace, len(block_ids) * self._size).num_blocks
        saves = [save.blocks for save in self._saves.values() if tier.tier in save.stores]
        under_way = {block.block_id for blocks in saves for block in blocks}
        return sum(block_id not in under_way for block_id in block_ids[known:])

    def _move(self, plan: MigrationPlan, request_id: str = "") -> int:
        self._num_moves += 1
        moves = self._metadata.loads if request_id else self._metadata.saves
        moves.append(Move(self._num_moves, plan, request_id))
        return self._num_moves

    def _path(self, tokens: Tokens, num_blocks: int) -> bytes:
        return bytes(tokens.slice(0, num_blocks * self._size))

    # -- with each step

    def step_metadata(self, num_tokens: int) -> StoreMetadata:
        """What the workers do with a step that computes so many tokens."""
        step = self._metadata.step
        made, self._metadata = self._metadata, StoreMetadata(step + 1)
        made.has_forward = num_tokens > 0
        for name, link in self._links.items():
            made.forgotten[name], link.forgotten = link.forgotten, []
        if num_tokens >= FEWEST_MEASURED_TOKENS:
            self._steps[step] = self._clock.now(), num_tokens
        return made

    def take_in(self, report: StoreReport) -> None:
        """What the workers report of a step."""
        if report.opened is not None:
            self._open(report.opened)
        self._measure(report.step)
        for name, fault in report.faults.items():
            if name in self._links:
                self._links[name].fault = fault
        for move_id, result in report.results.items():
            move = self._saves.get(move_id) or self._loads[move_id]
            move.result = result if move.result is None else move.result.merged(result)
            if move.result.num_ranks == self._num_ranks:
                self._end(move_id)

    def _measure(self, step: int) -> None:
        now_s = self._clock.now()
        if step in self._steps:
            began_s, num_tokens = self._steps.pop(step)
            token_s = (now_s - max(began_s, self._last_s)) / num_tokens
            self._speed.token_s = (
                0.8 * self._speed.token_s + 0.2 * token_s if self._speed.token_s else token_s
            )
        self._last_s = now_s

    def _end(self, move_id: int) -> None:
        save = self._saves.pop(move_id, None)
        if save is not None:
            self._saved(save)
        else:
            self._loaded(self._loads.pop(move_id))

    def _saved(self, save: _Save) -> None:
        result = save.result
        assert result is not None
        for tier in self.tiers:
            if tier.tier in save.stores:
                error = result.errors.get(tier.tier, "")
                if error and not tier.fault:
                    logger.warning("sageLLM: the tier %s is not used any more: %s", tier.tier, error)
                tier.end_store(save.stores[tier.tier], result.num_written.get(tier.tier, 0), error)
        self._num_held -= save.num_held
        type(self._pool).free_blocks(self._pool, reversed(save.blocks))

    def _loaded(self, load: _Load) -> None:
        result = load.result
        assert result is not None
        load.tier.end_load(load.source, load.first, result.num_read, result.outcome)
        del self._loading[load.request_id]
        if result.num_bytes >= FEWEST_MEASURED_BYTES:
            reached = result.num_bytes / max(result.spent_s - LATENCY_S, 1e-9)
            before = self._speed.bytes_per_s[load.tier.tier]
            self._speed.bytes_per_s[load.tier.tier] = 0.8 * before + 0.2 * reached

    # -- all of it

    @property
    def is_saving(self) -> bool:
        """Whether blocks of the device are held."""
        return bool(self._saves)

    def clear(self) -> bool:
        """Forget all blocks. False, and no change, while any move."""
        if self._saves or self._loads:
            return False
        for tier in self.tiers:
            tier.clear()
        return True

    def check(self) -> None:
        """Raise `BookkeepingError` where the books of tiers, moves and blocks disagree."""
        for tier in self.tiers:
            tier.check()
        if self._num_held != sum(save.num_held for save in self._saves.values()):
            raise BookkeepingError(f"{self._num_held} blocks are noted as held by saves")
        if {load.request_id for load in self._loads.values()} != self._loading.keys():
            raise BookkeepingError("requests that wait and loads under way differ")
