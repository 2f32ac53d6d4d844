"""vLLM's real KV cache manager, driven as `sagellm replay` drives ours. Runs in an environment with vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import PolicyFactory, Use
from sagellm.engines.vllm.block_pool import GuidedPool, RequestEnd

BLOCK = 2
NULL_BLOCK = TAIL_BLOCK = 1
"""vLLM keeps a block that no request gets, and each request computes at least one token."""


def kv_cache_manager(num_blocks: int, block_size: int = BLOCK) -> Any:
    """A `KVCacheManager` for one layer of full attention, `num_blocks` blocks and the null block."""
    init_none_hash(lambda seed: b"0" * 32)
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=num_blocks + NULL_BLOCK,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config, max_model_len=1 << 22, scheduler_block_size=block_size, hash_block_size=block_size
    )


def request_of(name: str, digests: Sequence[bytes], num_tokens: int, block_size: int = BLOCK) -> Any:
    """A request whose whole blocks have these hashes."""

    def hashes(request: Any) -> list[bytes]:
        known = len(request.block_hashes) if hasattr(request, "block_hashes") else 0
        return list(digests[known : request.num_tokens // block_size])

    return Request(
        request_id=name,
        prompt_token_ids=[0] * num_tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=hashes,
    )


class Host:
    """One request at a time. With a policy: the pool is guided by it."""

    def __init__(self, capacity: int, policy: PolicyFactory | None, clock: Clock) -> None:
        self.kv = kv_cache_manager(capacity + TAIL_BLOCK)
        self.guided = None if policy is None else GuidedPool(self.kv.block_pool, policy, clock)
        self._num_requests = 0

    def serve(self, digests: Sequence[bytes], num_output_tokens: int) -> int:
        """Serve a prompt and free it; returns how many of its blocks were cached."""
        self._num_requests += 1
        request = request_of(f"r{self._num_requests}", digests, BLOCK * len(digests) + 1)
        found, num_found = self.kv.get_computed_blocks(request)[:2]
        new = self.kv.allocate_slots(request, request.num_tokens - num_found, num_found, found)
        assert new is not None
        if self.guided is not None:
            blocks = self.kv.get_block_ids(request.request_id)[0]
            self.guided.finished(blocks, RequestEnd(Use(num_output_tokens, num_found // BLOCK)))
        self.kv.free(request)
        return int(num_found) // BLOCK
