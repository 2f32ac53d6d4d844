"""LMDeploy's real scheduler, driven as `sagellm replay` drives ours. Runs in an environment with LMDeploy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.messages import MessageStatus, SequenceMeta
from lmdeploy.pytorch.paging.scheduler import Scheduler
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import PolicyFactory
from sagellm.engines.guests import DIGEST_BYTES
from sagellm.engines.lmdeploy.block_trie import GuidedTrie

BLOCK = 4
"""Tokens per block: the first 16 bytes of a hash stand for them, as in our index."""
TAIL_BLOCK = 1
"""Each request computes at least one token."""


def scheduler(num_blocks: int, block_size: int = BLOCK, max_batches: int = 4) -> Any:
    """A `Scheduler` with prefix caching and blocks on a GPU that is not there."""
    return Scheduler(
        SchedulerConfig(max_batches=max_batches, max_session_len=1 << 22),
        CacheConfig(
            max_batches=max_batches, block_size=block_size, num_cpu_blocks=0, num_gpu_blocks=num_blocks,
            max_prefill_token_num=1 << 22, enable_prefix_caching=True,
        ),
        seq_meta=SequenceMeta(block_size, strategy=ARSequenceStrategy()),
    )  # fmt: skip


class Host:
    """One request at a time. With a policy: the trie is guided by it."""

    def __init__(self, capacity: int, policy: PolicyFactory | None, clock: Clock) -> None:
        self.scheduler = scheduler(capacity + TAIL_BLOCK)
        trie = self.scheduler.block_trie
        self.guided = None if policy is None else GuidedTrie(trie, policy, clock)
        self._num_requests = 0

    def serve(self, digests: Sequence[bytes], num_output_tokens: int) -> int:
        """Serve a prompt and free it; returns how many of its blocks were cached."""
        self._num_requests += 1
        session = self.scheduler.add_session(self._num_requests)
        data = b"".join([digest[:DIGEST_BYTES] for digest in digests])
        sequence = session.add_sequence(np.append(np.frombuffer(data, np.int32), 0).astype(np.int64))
        self.scheduler.add_sequence(sequence)
        assert len(self.scheduler.schedule(is_prefill=True).running) == 1
        num_hits = int(sequence.num_history_ids) // BLOCK
        self.scheduler.block_trie.allocate(sequence)
        sequence.num_new_tokens = num_output_tokens
        sequence.status = MessageStatus.STOPPED
        self.scheduler.end_session(self._num_requests)
        return num_hits
