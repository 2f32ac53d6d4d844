"""`SageConnector`: our eviction policy in a vLLM server, by vLLM's interface for KV connectors.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SageConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": "shadow"}}'

It moves no KV. In the mode `shadow` it decides nothing: it tells how many blocks of prompts vLLM reused, and
how many a cache of the same size would have reused with our policy and with LRU. In the mode `on` the policy
decides which cached blocks go first. If its shadow then reuses fewer blocks than that of LRU, vLLM gets its
own order back. `stats.py` puts the counts, and why blocks had to be computed, on vLLM's `/metrics`.

A request may say more of its KV in `vllm_xargs`: `sage_session`, `sage_hints`, `sage_pin_s`
(`guests/request_hints.py`). The setting `hints` names the kinds that are heeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import RequestError
from sagellm.core.protocols.eviction import Use
from sagellm.core.types import Namespace
from sagellm.engines.guests import ReuseCount, path_of
from sagellm.engines.guests.comparison import Comparison
from sagellm.engines.guests.paths import TOKENS_PER_DIGEST
from sagellm.engines.guests.request_hints import NO_HINTS, RequestHints, hints_of
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.vllm import register
from sagellm.engines.vllm.block_pool import GuidedPool, RequestEnd
from sagellm.engines.vllm.stats import SageMetrics, SageStats, Tally

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
register()  # a MultiConnector looks its members' classes up by name, for their counts


class SageConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM makes one in the scheduler's process, and an idle one in each worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = GuestSettings.of(dict(self._kv_transfer_config.kv_connector_extra_config))
        self._comparison: Comparison | None = None
        self._guided: GuidedPool | None = None
        self._tally: Tally | None = None
        self._warned_of_hints = False
        self._found: dict[str, int] = {}
        self._size = 1
        self._pool: BlockPool | None = None
        self._hashes: Any = None

    # -- in the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The pool of vLLM is there; take its order over, or only look on."""
        refusal = self._refusal(gpu_block_pool)
        if refusal:
            logger.warning("sageLLM does nothing here: %s", refusal)
            return
        self._size, clock, settings = gpu_block_pool.hash_block_size, MonotonicClock(), self._settings
        capacity = gpu_block_pool.num_gpu_blocks - 1
        comparison = Comparison("vLLM", capacity, self._size, TOKENS_PER_DIGEST, settings, clock, logger)
        self._comparison, self._tally = comparison, Tally(comparison)
        self._pool, self._hashes = gpu_block_pool, _hash_map(gpu_block_pool)
        if settings.mode == "shadow":
            return
        try:
            self._guided = comparison.guide = GuidedPool(
                gpu_block_pool, comparison.policy, clock, settings.hints
            )
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
        if self._comparison is not None:
            self._follow_reset()
            self._found[request.request_id] = num_computed_tokens // self._size
        return 0, False

    def _follow_reset(self) -> None:
        """Empty the shadows if vLLM has emptied its cache.

        Its pool begins a new map of hashes then. vLLM calls `reset_cache` only where a reset is to reach
        connectors, and also where the pool has refused it.
        """
        hashes = _hash_map(self._pool)
        if hashes is not self._hashes and self._comparison is not None:
            self._hashes = hashes
            self._counted(self._comparison.cleared)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request begins; one that was preempted and comes back is not counted again."""
        found = self._found.pop(request.request_id, None)
        if found is None or request.num_preemptions or self._comparison is None:
            return
        self._counted(self._count, self._comparison, request, found)

    def _count(self, comparison: Comparison, request: Request, found: int) -> None:
        num_tokens = request.num_prompt_tokens
        prompt = path_of(request.block_hashes[: num_tokens // self._size])
        reads = (
            not request.skip_reading_prefix_cache
        )  # such a one computes its whole prompt, as for prompt_logprobs
        comparison.began(
            request.request_id, prompt, found, num_tokens, _namespace(request), reads_cache=reads
        )

    def _end(self, comparison: Comparison, request: Request, finish: RequestEnd) -> None:
        num_computed = request.num_tokens - bool(request.num_output_tokens)  # the last one drawn has no KV
        path = path_of(request.block_hashes[: num_computed // self._size])
        comparison.ended(request.request_id, path, finish.use, finish.said)

    def _said(self, request: Request) -> RequestHints:
        """The hints of a request. Wrong ones are ignored, with one warning."""
        params = request.sampling_params
        fields = params.extra_args if params is not None else None
        if not fields or not self._settings.hints:
            return NO_HINTS
        try:
            return hints_of(fields)
        except RequestError as error:
            if not self._warned_of_hints:
                logger.warning("sageLLM: hints of request %s are ignored: %s", request.request_id, error)
            self._warned_of_hints = True
            return NO_HINTS

    def _counted(self, listener: Callable[..., None], *arguments: Any) -> None:
        """Count; an error ends the counts, and the policy with them, never a request."""
        try:
            listener(*arguments)
        except Exception as error:  # noqa: BLE001 - the server must go on
            logger.warning("sageLLM: reuse is not counted any more: %r", error)
            self._comparison = self._tally = None
            if self._guided is not None:
                self._guided.give_back("what it reuses cannot be compared with LRU any more")

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request ends; its blocks are freed next."""
        self._found.pop(request.request_id, None)
        num_blocks = request.num_prompt_tokens // self._size
        use = Use(request.num_output_tokens, 0, num_blocks, -request.priority)
        finish = RequestEnd(use, self._said(request), _namespace(request))
        if self._guided is not None:
            self._guided.finished(block_ids, finish)
        if self._comparison is not None:
            self._counted(self._end, self._comparison, request, finish)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if len(block_ids) == 1 else [])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def reset_cache(self) -> bool | None:
        """The shadows follow the pool of vLLM, which may have refused to be emptied."""
        self._follow_reset()
        return None

    def shutdown(self) -> None:
        if self._comparison is not None and self._comparison.reuse.num_blocks:
            self._comparison.report()

    def counts(self) -> dict[str, ReuseCount]:
        """Blocks of prompts and hits: vLLM's own, and those of each shadow cache."""
        found = self._comparison
        if found is None:
            return {}
        return {"vllm": found.reuse, **{name: shadow.reuse for name, shadow in found.shadows.items()}}

    # -- counts on their way to vLLM's server

    def get_kv_connector_stats(self) -> SageStats | None:
        """The counts since the last step; None if no prompt came."""
        return None if self._tally is None else self._tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SageStats:
        """Counts that a logger adds up. Several loggers get the same `data`, so it stays as it is."""
        return SageStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SageMetrics:
        return SageMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

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


def _hash_map(pool: BlockPool | None) -> Any:
    """Where the pool finds blocks by their hashes.

    None if that has moved; resets go unseen then.
    """
    return getattr(pool, "cached_block_hash_to_block", None)


def _namespace(request: Request) -> Namespace:
    """The tenant of a request is its `cache_salt`. Its hints reach no other's sessions."""
    return Namespace(tenant=request.cache_salt or "")
