"""Requests that come, decode and go at the same time, on LMDeploy's real scheduler."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from lmdeploy.pytorch.messages import UpdateTokenMode

from benchmarks.hosts.lmdeploy import scheduler
from sagellm.core.clock import ManualClock
from sagellm.engines.build_kv import make_policy
from sagellm.engines.lmdeploy.block_trie import GuidedTrie, repair_clock

SIZE = 4


class Driver:
    """LMDeploy's scheduler with `num_blocks` blocks; its trie is guided by `policy`, or has its own order."""

    def __init__(self, num_blocks: int, policy: str | None, *, repaired: bool = True) -> None:
        self.clock = ManualClock(0.0)
        self.num_blocks, self.scheduler = num_blocks, scheduler(num_blocks, SIZE)
        self.trie = self.scheduler.block_trie
        made = partial(make_policy, policy or "lru", capacity=num_blocks, clock=self.clock)
        self.guided = None if policy is None else GuidedTrie(self.trie, made, self.clock)
        if repaired:
            repair_clock(self.trie)
        self.sequences: dict[int, Any] = {}
        self.hits: dict[int, int] = {}
        self._num_requests = 0

    def add(self, prompt: list[int], adapter: str | None = None) -> int:
        """A request is waiting."""
        number = self._num_requests = self._num_requests + 1
        session = self.scheduler.add_session(number)
        self.sequences[number] = session.add_sequence(np.array(prompt), adapter_name=adapter)
        self.scheduler.add_sequence(self.sequences[number])
        return number

    def prefill(self, token: int) -> list[int]:
        """Admit what fits; each that was admitted gets one token. Returns all that were."""
        self.clock.advance(1.0)
        admitted = self.scheduler.schedule(is_prefill=True).running
        for sequence in admitted:
            self.hits[sequence.session_id] = sequence.num_history_ids // SIZE
            sequence.update_token_ids(np.array([token]), mode=UpdateTokenMode.PREFILL)
        self.check()
        return [sequence.session_id for sequence in admitted]

    def decode(self, token: int) -> None:
        """One more token for each request that runs and still has room."""
        self.clock.advance(1.0)
        if not self.scheduler.has_running():
            return
        for sequence in self.scheduler.schedule(is_prefill=False).running:
            sequence.update_token_ids(np.array([token]), mode=UpdateTokenMode.DECODE)
        self.check()

    def stop(self, number: int) -> None:
        """A request has its answer; its session stays open."""
        self.scheduler.stop_session(number)
        self.check()

    def resume(self, number: int, tokens: list[int]) -> None:
        """The next turn of a session."""
        self.sequences[number].update_token_ids(np.array(tokens), mode=UpdateTokenMode.INPUTS)
        self.scheduler.add_sequence(self.sequences[number])

    def end(self, number: int) -> None:
        self.clock.advance(1.0)
        self.sequences.pop(number)
        self.scheduler.end_session(number)
        self.check()

    def status(self, number: int) -> str:
        return str(self.sequences[number].status.name)

    def check(self) -> None:
        if self.guided is not None and self.guided.is_guided:
            self.guided.paths.check()
        held = {block for node in nodes(self.trie) for block in [node.block]}
        for sequence in self.sequences.values():
            held |= set(sequence.logical_blocks.get_real_blocks().tolist())
        assert self.scheduler.block_manager.get_num_free_gpu_blocks() == self.num_blocks - len(held)


def nodes(trie: Any) -> list[Any]:
    """All cached blocks of a trie."""
    found = list(trie._roots.values())
    for node in found:
        found += node.children.values()
    return [node for node in found if node.parent is not None]
