"""`SageConnector`: our eviction policy in a vLLM server, by vLLM's interface for KV connectors.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SageConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": "shadow"}}'

It moves no KV. In the mode `shadow` it decides nothing: it tells how many blocks of prompts vLLM reused, and
how many a cache of the same size would have reused with our policy and with LRU. In the mode `on` the policy
decides which cached blocks go first. If its shadow then reuses fewer blocks than that of LRU, vLLM gets its
own order back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from sagellm.core.clock import MonotonicClock
from sagellm.core.protocols.eviction import EvictionPolicy, Use
from sagellm.engines.build import make_policy
from sagellm.engines.guests import ReuseCount, ShadowCache
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.vllm.block_pool import GuidedPool

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.sagellm")  # below "vllm": vLLM sets that logger up
JUDGED_BLOCKS = 10_000
"""The guard judges after so many blocks of prompts."""
MAX_LOSS = 0.01
"""Of all blocks of prompts: further than this behind LRU's shadow, the policy is switched off."""


class SageConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM makes one in the scheduler's process, and an idle one in each worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = GuestSettings.of(dict(self._kv_transfer_config.kv_connector_extra_config))
        self._clock = MonotonicClock()
        self._guided: GuidedPool | None = None
        self._shadows: dict[str, ShadowCache] = {}
        self._vllm = ReuseCount()
        self._found: dict[str, int] = {}
        self._reported_s = self._clock.now()
        self._size = 1

    # -- in the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """VLLM's pool is there; take its order over, or only look on."""
        refusal = self._refusal(gpu_block_pool)
        if refusal:
            logger.warning("sageLLM does nothing here: %s", refusal)
            return
        self._size, capacity = gpu_block_pool.hash_block_size, gpu_block_pool.num_gpu_blocks - 1

        def policy(name: str = self._settings.policy, **options: Any) -> EvictionPolicy:
            return make_policy(name, capacity=capacity, clock=self._clock, **options)

        def wanted() -> EvictionPolicy:
            return policy(**self._settings.options)

        for name, factory in (("lru", lambda: policy("lru")), (self._settings.policy, wanted)):
            self._shadows[name] = ShadowCache(capacity, factory, self._clock, num_open=1)
        if self._settings.mode == "shadow":
            return
        try:
            self._guided = GuidedPool(gpu_block_pool, wanted, self._clock)
        except AttributeError as error:
            logger.warning("sageLLM: vLLM evicts in its own order: %s", error)

    def _refusal(self, pool: BlockPool) -> str:
        """Why nothing can be decided for this model; empty if it can."""
        if not pool.enable_caching:
            return "prefix caching is switched off"
        parallel = self._vllm_config.parallel_config
        if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
            return "context parallelism spreads a block over several ranks"
        groups = self._kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            return f"the model has {len(groups)} KV cache groups; one is supported"
        spec = groups[0].kv_cache_spec
        if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
            return f"its KV cache is of the kind {type(spec).__name__}; full attention is supported"
        if spec.block_size != pool.hash_block_size:
            return f"blocks of {spec.block_size} tokens have hashes for each {pool.hash_block_size}"
        return ""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing comes from elsewhere; notes what vLLM found."""
        if self._shadows:
            self._found[request.request_id] = num_computed_tokens // self._size
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request begins; one that was preempted and comes back is not counted again."""
        found = self._found.pop(request.request_id, None)
        if found is None or request.num_preemptions:
            return
        prompt = request.block_hashes[: request.num_prompt_tokens // self._size]
        self._vllm.add(len(prompt), found)
        for shadow in self._shadows.values():
            shadow.admit(request.request_id, prompt, (request.num_prompt_tokens - 1) // self._size)
        self._judge()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request ends; its blocks are freed next."""
        self._found.pop(request.request_id, None)
        num_blocks = request.num_prompt_tokens // self._size
        use = Use(request.num_output_tokens, 0, num_blocks, -request.priority)
        if self._guided is not None:
            self._guided.finished(block_ids, use)
        for shadow in self._shadows.values():
            shadow.finish(request.request_id, request.block_hashes, use)
        now_s = self._clock.now()
        if self._settings.report_s and now_s - self._reported_s >= self._settings.report_s:
            self.report()
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if len(block_ids) == 1 else [])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def reset_cache(self) -> bool | None:
        """VLLM empties its cache; the shadows do."""
        for shadow in self._shadows.values():
            shadow.clear()
        return None

    def shutdown(self) -> None:
        if self._vllm.num_blocks:
            self.report()

    # -- reports

    def _judge(self) -> None:
        """Give vLLM its own order back where the policy loses.

        Shadow is compared with shadow: vLLM's own figure differs from both, by about a hundredth, in when
        blocks of running requests count.
        """
        lru, ours = self._shadows["lru"].reuse, self._shadows[self._settings.policy].reuse
        if self._guided is None or not self._guided.is_guided or ours.num_blocks < JUDGED_BLOCKS:
            return
        behind = lru.num_hits - ours.num_hits
        if behind > MAX_LOSS * ours.num_blocks:
            self._guided.give_back(
                f"{self._settings.policy} reuses {behind} of {ours.num_blocks} blocks fewer than LRU would"
            )

    def counts(self) -> dict[str, ReuseCount]:
        """Blocks of prompts and hits: vLLM's own, and those of each shadow cache."""
        return {"vllm": self._vllm, **{name: shadow.reuse for name, shadow in self._shadows.items()}}

    def report(self) -> None:
        """One line in the log."""
        self._reported_s = self._clock.now()
        order = self._settings.policy if self._guided is not None and self._guided.is_guided else "vLLM's own"
        shadows = ", ".join(
            f"{name} {shadow.reuse.ratio:.2%} ({shadow.reuse.num_hits - self._vllm.num_hits:+d} blocks)"
            for name, shadow in self._shadows.items()
        )
        logger.info(
            "sageLLM: order of eviction: %s; %.2f %% of %d blocks of prompts were reused; a cache of this"
            " size would have reused with %s",
            order, 100 * self._vllm.ratio, self._vllm.num_blocks, shadows,
        )  # fmt: skip

    # -- in the workers: no KV is moved

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
