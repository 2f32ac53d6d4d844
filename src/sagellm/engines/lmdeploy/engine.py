"""`LMDeployEngine`: our policies in a patched LMDeploy, or what they would reuse.

In the mode `shadow` nothing is decided: the log says how many blocks of prompts LMDeploy reused, and how many
a cache of the same size would have reused with our policy and with LRU. In the mode `on` the policy decides
what is evicted; if its shadow cache then reuses fewer blocks than that of LRU, LMDeploy gets its own order
back, with its clock repaired.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError, PlanError
from sagellm.core.protocols.eviction import Use
from sagellm.core.types import Tokens
from sagellm.engines.guests.comparison import Comparison
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.lmdeploy.block_moves import DeviceMove
from sagellm.engines.lmdeploy.block_trie import (
    UNFINISHED,
    EvictionCallback,
    GuidedTrie,
    Sequence,
    cached_blocks,
    repair_clock,
    sequence_path,
)
from sagellm.engines.lmdeploy.communication import CallCount, CommOperation, Communication
from sagellm.engines.lmdeploy.cpu_cache import CPUCache

logger = logging.getLogger("lmdeploy.sagellm")


class LMDeployBlock(NamedTuple):
    """A logical block. `num_references`: sequences, and the cache if it is cached; 0 is free.

    Physical blocks from `num_gpu_blocks` on are those of the CPU. `is_cached`: in LMDeploy's trie.
    """

    physical_id: int
    num_references: int
    is_cached: bool


class LMDeployEngine:
    """The `hooks` of a patched LMDeploy's trie and block manager.

    Raises `AttributeError` naming what this LMDeploy lacks, and `ValueError` where prefix caching is off.
    """

    def __init__(self, scheduler: Any, settings: GuestSettings, clock: Clock) -> None:
        trie, manager = scheduler.block_trie, scheduler.block_manager
        if not (hasattr(trie, "hooks") and hasattr(manager, "hooks")):
            raise AttributeError("this LMDeploy has no patch 0001-extend-kv-manager-api or 0002")
        self._trie, self._settings, self._size = trie, settings, int(trie.block_size)
        self._scheduler, self._clock, self._reported_s = scheduler, clock, clock.now()
        self.cpu_cache: CPUCache | None = None
        capacity = int(manager.num_gpu_blocks)
        self.comparison = Comparison("LMDeploy", capacity, self._size, self._size, settings, clock, logger)
        self.guided = GuidedTrie(trie, self.comparison.policy, clock, decides=settings.mode == "on")
        self.comparison.guide, self._is_counting = self.guided, True
        if settings.mode == "on":
            repair_clock(trie)
        self._found: dict[int, int] = {}
        self._admitted: set[int] = set()
        trie.hooks = manager.hooks = self

    # -- for other parts

    def get_block_info(self, block_id: int) -> LMDeployBlock:
        """What is known of a logical block. Raises `IndexError` for one that does not exist."""
        allocator = self._trie.allocator
        return LMDeployBlock(
            int(allocator.get_physical_blocks(np.array([block_id]))[0]),
            int(allocator.get_ref_count(np.array([block_id]))[0]),
            block_id in cached_blocks(self._trie),
        )

    def register_eviction_callback(self, callback: EvictionCallback) -> None:
        """Call it after each eviction of cached blocks, with their logical ids."""
        self.guided.register_eviction_callback(callback)

    def swap_to_cpu(self) -> int:
        """Keep what leaves the GPU cache in LMDeploy's CPU blocks; returns their number.

        Raises `ConfigError` in the mode `shadow`, `AttributeError` for an LMDeploy without the patch, and
        `ValueError` where swapping would not be sound.
        """
        if self._settings.mode != "on":
            raise ConfigError('swap decides what is kept: it needs the mode "on"')
        self.cpu_cache = CPUCache(self._scheduler, self.guided)
        self.guided.paths.on_evict = self._evicting
        return self.cpu_cache.moves.num_free_cpu

    def migrate_blocks(self, plan: SequenceOf[DeviceMove]) -> None:
        """Move cached blocks between GPU and CPU before the next step; all or none.

        A block that moves to the CPU must be in LMDeploy's prefix cache, with all blocks that continue it in
        the plan and no sequence that uses one of them. It is cached on the CPU then. A block that moves to
        the GPU must be cached on the CPU, with the block before it on the GPU or in the plan. Where the CPU
        is full, blocks cached there make room, the least recently used first. Raises `PlanError` for a block
        that cannot move, and `CapacityError` where the blocks do not fit.
        """
        if self.cpu_cache is None:
            raise PlanError('no block is cached on the CPU: set "swap": true in SAGELLM_LMDEPLOY')
        self.cpu_cache.migrate(plan)

    def communication(self) -> Mapping[CommOperation, CallCount]:
        """Counts of the collectives and KV transfers of this process, if they are watched."""
        try:
            hooks = importlib.import_module("lmdeploy.pytorch.comm_hooks").hooks
        except ImportError:
            return {}
        return dict(hooks.counts) if isinstance(hooks, Communication) else {}

    def _swapping(self, listener: Callable[[CPUCache], None]) -> None:
        """Let the CPU cache act while it works. An error ends it; what is in it is computed again."""
        if self.cpu_cache is None:
            return
        try:
            listener(self.cpu_cache)
        except Exception as error:  # noqa: BLE001 - the server must go on
            logger.warning("sageLLM: nothing is swapped any more: %r", error)
            cache, self.cpu_cache, self.guided.paths.on_evict = self.cpu_cache, None, None
            with suppress(Exception):  # what cannot be freed stays taken
                cache.close()

    def _evicting(self, nodes: list[Any]) -> None:
        self._swapping(lambda cache: cache.evicted(nodes))

    # -- what the patches call

    def matching(self, sequence: Sequence) -> bool:
        """Before `match`: whether to look a sequence up."""
        return self._settings.mode == "shadow" or self.guided.matching(sequence)

    def matched(self, sequence: Sequence) -> None:
        """After `match`."""
        self.guided.matched(sequence)
        if self._is_counting and sequence.seq_id not in self._admitted:
            self._found[sequence.seq_id] = sequence.num_history_ids // self._size
        self._swapping(lambda cache: cache.admitting(sequence))

    def allocated(self, sequence: Sequence) -> None:
        """After `allocate` that has blocks for the trie; the first one counts the request."""
        self.guided.allocated(sequence)
        self._watch(self._count, sequence)

    def _count(self, sequence: Sequence) -> None:
        found = self._found.pop(sequence.seq_id, None)
        if found is None:
            return
        self._forget_cancelled(sequence.seq_manager)
        self._admitted.add(sequence.seq_id)
        num_tokens = sequence.output_start_pos
        prompt, namespace = sequence_path(sequence, num_tokens - num_tokens % self._size)
        self.comparison.began(str(sequence.seq_id), prompt, found, num_tokens, namespace)

    def _forget_cancelled(self, manager: Any) -> None:
        """Let go of sequences that were cancelled while they waited to run again."""
        for number in self._admitted - manager._seq_map.keys():
            self._admitted.discard(number)
            self.comparison.ended(str(number), Tokens())
        for number in self._found.keys() - manager._seq_map.keys():
            del self._found[number]

    def releasing(self, sequence: Sequence) -> None:
        """Before the block manager's `free`."""
        self._swapping(lambda cache: cache.preempted(sequence))

    def released(self, sequence: Sequence) -> None:
        """After the block manager's `free`."""
        self.guided.released(sequence)
        if sequence.status.name not in UNFINISHED:
            self._watch(self._finish, sequence)

    def _watch(self, listener: Callable[[Sequence], None], sequence: Sequence) -> None:
        """Count while counting works; an error ends the counts, never a request."""
        if not self._is_counting:
            return
        try:
            listener(sequence)
        except Exception as error:  # noqa: BLE001 - the server must go on
            logger.warning("sageLLM: reuse is not counted any more: %r", error)
            self._is_counting = False
            self._found.clear()
            self._admitted.clear()

    def _finish(self, sequence: Sequence) -> None:
        if sequence.num_new_tokens:  # all of its blocks were cached, or it generated one token
            self._count(sequence)
        self._found.pop(sequence.seq_id, None)
        if sequence.seq_id not in self._admitted:
            return
        self._admitted.discard(sequence.seq_id)
        num_tokens = sequence.num_all_ids - bool(sequence.num_new_tokens)  # the last one drawn has no KV
        path, _ = sequence_path(sequence, num_tokens - num_tokens % self._size)
        self.comparison.ended(str(sequence.seq_id), path, Use(sequence.num_new_tokens))
        report_s = self._settings.report_s
        if report_s and self._clock.now() - self._reported_s >= report_s:
            self.report_swaps()

    def report_swaps(self) -> None:
        """One line in the log about the CPU cache, if there is one."""
        self._reported_s = self._clock.now()
        if self.cpu_cache is None:
            return
        cache, moves = self.cpu_cache, self.cpu_cache.moves
        logger.info(
            "sageLLM: %d blocks were swapped out and %d in; %d were reused from the CPU and %d dropped there;"
            " %d are cached there",
            moves.num_swapped_out, moves.num_swapped_in, cache.num_reused, cache.num_dropped, len(cache),
        )  # fmt: skip

    def evict(self, num_blocks: int) -> int | None:
        """In place of `evict`; None where LMDeploy has to do it."""
        return self.guided.evict(num_blocks)

    def evicted(self, blocks: list[int]) -> None:
        """After an eviction of LMDeploy's."""
        self.guided.evicted(blocks)
