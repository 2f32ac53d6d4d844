"""`LMDeployEngine`: our policies in a patched LMDeploy, or what they would reuse.

In the mode `shadow` nothing is decided: the log says how many blocks of prompts LMDeploy reused, and how many
a cache of the same size would have reused with our policy and with LRU. In the mode `on` the policy decides
what is evicted; if LMDeploy then reuses fewer blocks than the LRU of the shadow cache, it gets its own order
back, with its clock repaired.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import EvictionPolicy, Use
from sagellm.core.types import TOKEN_BYTES
from sagellm.engines.build import make_policy
from sagellm.engines.guests import Digests, ReuseCount, ShadowCache
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.lmdeploy.block_trie import (
    UNFINISHED,
    EvictionCallback,
    GuidedTrie,
    Sequence,
    cached_blocks,
    repair_clock,
    sequence_path,
)
from sagellm.kvmgr.prefix_cache.fingerprint import chain

logger = logging.getLogger("lmdeploy.sagellm")
JUDGED_BLOCKS = 10_000
"""The guard judges after so many blocks of prompts."""
MAX_LOSS = 0.01
"""Of all blocks of prompts: further than this behind LRU's shadow, the policy is switched off."""


class LMDeployBlock(NamedTuple):
    """A logical block. `num_references`: sequences, and the trie if it is cached; 0 is free."""

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
        self._trie, self._settings, self._clock = trie, settings, clock
        self._size, capacity = int(trie.block_size), int(manager.num_gpu_blocks)

        def policy(name: str = settings.policy, **options: Any) -> EvictionPolicy:
            return make_policy(name, capacity=capacity, clock=clock, **options)

        def wanted() -> EvictionPolicy:
            return policy(**settings.options)

        self.guided = GuidedTrie(trie, wanted, clock, decides=settings.mode == "on")
        self.shadows = {"lru": ShadowCache(capacity, lambda: policy("lru"), clock)}
        if settings.mode == "shadow":
            self.shadows[settings.policy] = ShadowCache(capacity, wanted, clock)
        else:
            repair_clock(trie)
        self.reuse = ReuseCount()
        self._found: dict[int, int] = {}
        self._admitted: set[int] = set()
        self._reported_s = clock.now()
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

    # -- what the patches call

    def matching(self, sequence: Sequence) -> bool:
        """Before `match`: whether to look a sequence up."""
        return self._settings.mode == "shadow" or self.guided.matching(sequence)

    def matched(self, sequence: Sequence) -> None:
        """After `match`."""
        self.guided.matched(sequence)
        if self.shadows and sequence.seq_id not in self._admitted:
            self._found[sequence.seq_id] = sequence.num_history_ids // self._size

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
        prompt = self._digests(sequence, num_tokens)
        self.reuse.add(len(prompt), found)
        for shadow in self.shadows.values():
            shadow.admit(str(sequence.seq_id), prompt, (num_tokens - 1) // self._size)
        self._judge()

    def _forget_cancelled(self, manager: Any) -> None:
        """Let go of sequences that were cancelled while they waited to run again."""
        for number in self._admitted - manager._seq_map.keys():
            self._admitted.discard(number)
            for shadow in self.shadows.values():
                shadow.finish(str(number), [])
        for number in self._found.keys() - manager._seq_map.keys():
            del self._found[number]

    def released(self, sequence: Sequence) -> None:
        """After the block manager's `free`."""
        self.guided.released(sequence)
        if sequence.status.name not in UNFINISHED:
            self._watch(self._finish, sequence)

    def _watch(self, listener: Callable[[Sequence], None], sequence: Sequence) -> None:
        """Count while counting works; an error ends the counts, never a request."""
        if not self.shadows:
            return
        try:
            listener(sequence)
        except Exception as error:  # noqa: BLE001 - the server must go on
            logger.warning("sageLLM: reuse is not counted any more: %r", error)
            self.shadows.clear()
            self._found.clear()
            self._admitted.clear()

    def _finish(self, sequence: Sequence) -> None:
        if sequence.num_new_tokens:  # all of its blocks were cached, or it generated one token
            self._count(sequence)
        self._found.pop(sequence.seq_id, None)
        if sequence.seq_id not in self._admitted:
            return
        self._admitted.discard(sequence.seq_id)
        digests = self._digests(sequence, sequence.num_all_ids)
        for shadow in self.shadows.values():
            shadow.finish(str(sequence.seq_id), digests, Use(sequence.num_new_tokens))
        now_s = self._clock.now()
        if self._settings.report_s and now_s - self._reported_s >= self._settings.report_s:
            self.report()

    def evict(self, num_blocks: int) -> int | None:
        """In place of `evict`; None where LMDeploy has to do it."""
        return self.guided.evict(num_blocks)

    def evicted(self, blocks: list[int]) -> None:
        """After an eviction of LMDeploy's."""
        self.guided.evicted(blocks)

    # -- reports

    def _digests(self, sequence: Sequence, num_tokens: int) -> Digests:
        tokens, namespace = sequence_path(sequence, num_tokens)
        return chain(tokens.tobytes(), self._size * TOKEN_BYTES, namespace)

    def _judge(self) -> None:
        """Give LMDeploy its own order back where the policy loses."""
        if not self.guided.is_guided or self.reuse.num_blocks < JUDGED_BLOCKS:
            return
        behind = self.shadows["lru"].reuse.num_hits - self.reuse.num_hits
        if behind > MAX_LOSS * self.reuse.num_blocks:
            self.guided.give_back(
                f"{self._settings.policy} reused {behind} of {self.reuse.num_blocks} blocks fewer than LRU"
                " would have"
            )

    def report(self) -> None:
        """One line in the log."""
        self._reported_s = self._clock.now()
        order = self._settings.policy if self.guided.is_guided else "LMDeploy's own"
        shadows = ", ".join(f"{name} {shadow.reuse.ratio:.2%}" for name, shadow in self.shadows.items())
        logger.info(
            "sageLLM: order of eviction: %s; %.2f %% of %d blocks of prompts were reused; a cache of this"
            " size would have reused with %s",
            order, 100 * self.reuse.ratio, self.reuse.num_blocks, shadows,
        )  # fmt: skip
