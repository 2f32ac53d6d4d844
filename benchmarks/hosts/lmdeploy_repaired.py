"""As `lmdeploy`, with the clock of LMDeploy's LRU repaired."""

from __future__ import annotations

from benchmarks.hosts import lmdeploy
from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import PolicyFactory
from sagellm.engines.lmdeploy.block_trie import repair_clock


class Host(lmdeploy.Host):
    """With a policy there is no difference."""

    def __init__(self, capacity: int, policy: PolicyFactory | None, clock: Clock) -> None:
        super().__init__(capacity, policy, clock)
        repair_clock(self.scheduler.block_trie)
