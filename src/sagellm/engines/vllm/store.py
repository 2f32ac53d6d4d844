"""`SageStoreConnector`: KV of a vLLM engine in host memory and on a disk.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SageStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "sagellm.engines.vllm.store", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_gb": 4, "disk_gb": 20, "dir": DIR}}'

Blocks are saved when a prompt is computed and when a request ends, and loaded for prompts whose blocks vLLM
has evicted, while other requests run. The half in the scheduler keeps the books (`store_books.py`), the half
in each worker moves the bytes (`store_worker.py`). A block that does not verify is reported as a failed load,
and vLLM computes it. May be a member of a `MultiConnector`.
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
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from sagellm.core.blocks import Tier
from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Use
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.guests.settings import StoreSettings
from sagellm.engines.vllm import register
from sagellm.engines.vllm.store_books import Found, StoreBooks
from sagellm.engines.vllm.store_format import refusal
from sagellm.engines.vllm.store_messages import StoreMetadata, StoreReport
from sagellm.engines.vllm.store_stats import StoreMetrics, StoreStats, StoreTally
from sagellm.engines.vllm.store_worker import StoreWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.sagellm")  # below "vllm": vLLM sets that logger up
register()  # a MultiConnector looks its members' classes up by name, for their counts
SOURCES = {Tier.DRAM: CacheHitSource.HOST, Tier.NVME: CacheHitSource.DISK}


class SageStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """vLLM makes one in the scheduler's process and one in each worker."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._kv_transfer_config
        self._settings = StoreSettings.of(dict(config.kv_connector_extra_config))
        if config.kv_role != "kv_both":
            raise ConfigError(f"kv_role {config.kv_role!r}: a store both saves and loads, use kv_both")
        if config.kv_load_failure_policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy {config.kv_load_failure_policy!r}: use recompute, or a block that"
                " does not verify ends its request"
            )
        self._books: StoreBooks | None = None
        self._worker: StoreWorker | None = None
        self._tally = StoreTally()
        self._found: dict[str, Found] = {}
        self._prompts: dict[str, Tokens] = {}
        self._unsaved: dict[str, Request] = {}
        self._size = 0
        if role is KVConnectorRole.WORKER:
            self._worker = StoreWorker(self._settings, vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not saved is computed again."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """The worker holds on to the memory that it was given."""
        return False

    # -- in the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        reason = refusal(self._vllm_config, self._kv_cache_config)
        if reason:
            logger.warning("sageLLM stores no KV here: %s", reason)
            return
        self._size = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        num_ranks = self._vllm_config.parallel_config.world_size
        self._books = StoreBooks(self._settings, gpu_block_pool, self._size, num_ranks, MonotonicClock())

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that come from the store; None until the workers have opened it."""
        books = self._books
        if books is None or not _is_plain(request):
            return 0, False
        if not books.is_open:
            return None, False
        most = (request.num_tokens - 1) // self._size * self._size  # one token at least is computed
        found = None
        if not request.skip_reading_prefix_cache:
            found = books.find(
                self._tokens(request), _namespace(request), num_computed_tokens // self._size, most
            )
        if found is None:
            self._found.pop(request.request_id, None)
            return 0, False
        self._found[request.request_id] = found
        return (found.hit.num_blocks - found.num_local) * self._size, True

    def _tokens(self, request: Request) -> Tokens:
        """All tokens of a request; kept while it waits."""
        known = self._prompts.get(request.request_id)
        if known is None or len(known) != request.num_tokens:
            known = self._prompts[request.request_id] = Tokens(list(request.all_token_ids))
        return known

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has blocks, and begins to load or to run."""
        found = self._found.pop(request.request_id, None)
        if self._books is None:
            return
        if num_external_tokens and found is not None:
            (block_ids,) = blocks.get_block_ids()
            stop = found.num_local + num_external_tokens // self._size
            self._books.load(request.request_id, found, block_ids[found.num_local : stop])
        elif _is_plain(request):
            self._unsaved[request.request_id] = request

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        tier = None if self._books is None else self._books.loads_for(request.request_id)
        if tier is None:
            return dict(super().get_external_cache_hit_sources(request, num_external_tokens))
        return {SOURCES[tier]: num_external_tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        books = self._books
        if books is None:
            return StoreMetadata()
        counts = scheduler_output.num_scheduled_tokens
        for name in [name for name in self._unsaved if name in counts]:
            request = self._unsaved[name]
            if request.num_computed_tokens + counts[name] >= request.num_prompt_tokens:
                del self._unsaved[name]
                self._save(books, request, request.num_prompt_tokens)
        return books.step_metadata(scheduler_output.total_num_scheduled_tokens)

    def _save(
        self,
        books: StoreBooks,
        request: Request,
        num_tokens: int,
        block_ids: list[int] | None = None,
        use: Use | None = None,
    ) -> None:
        if block_ids is None:
            (block_ids,) = self._kv_cache_manager.get_block_ids(request.request_id)
        num_blocks = min(num_tokens // self._size, len(block_ids))
        if num_blocks:
            books.save(self._tokens(request), _namespace(request), block_ids[:num_blocks], use)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._books is not None and isinstance(report, StoreReport):
            self._books.take_in(report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request ends. Its blocks are freed next, except while they are saved."""
        name, books = request.request_id, self._books
        self._unsaved.pop(name, None)
        self._found.pop(name, None)
        if books is not None and _is_plain(request) and not books.loads_for(name):
            num_with_kv = request.num_tokens - bool(request.num_output_tokens)  # the last one drawn has none
            num_blocks = request.num_prompt_tokens // self._size
            use = Use(request.num_output_tokens, 0, num_blocks, -request.priority)
            self._save(books, request, min(request.num_computed_tokens, num_with_kv), block_ids, use)
        self._prompts.pop(name, None)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if len(block_ids) == 1 else [])

    def has_pending_block_frees(self) -> bool:
        return self._books is not None and self._books.is_saving

    def has_pending_push_work(self) -> bool:
        """Whether steps go on: until all is saved."""
        return self.has_pending_block_frees()

    def reset_cache(self) -> bool | None:
        return None if self._books is None else self._books.clear()

    def get_kv_connector_stats(self) -> StoreStats | None:
        """What the tiers did since the last step; None for nothing."""
        return None if self._books is None else self._tally.take([tier.state() for tier in self._books.tiers])

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        """Counts that a logger adds up. Several loggers get the same `data`, so it stays as it is."""
        return StoreStats({tier: dict(found) for tier, found in (data or {}).items()})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StoreMetrics:
        return StoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- in a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.open(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StoreMetadata):
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads have begun with the step's metadata."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request runs before its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Begin to save; the scheduler's half holds the blocks until they are."""
        if self._worker is not None:
            self._worker.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        self._report = self._worker.report()
        finished, self._worker.finished = self._worker.finished, set()
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._worker is None:
            return set()
        failed, self._worker.failed = self._worker.failed, set()
        return failed

    def build_connector_worker_meta(self) -> StoreReport | None:
        return None if self._worker is None else self._report

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _is_plain(request: Request) -> bool:
    """Whether token ids alone determine the request's KV: no images, embeddings or adapter."""
    return not (request.mm_features or request.lora_request or request.prompt_embeds is not None)


def _namespace(request: Request) -> Namespace:
    """The tenant of a request is its `cache_salt`."""
    return Namespace(tenant=request.cache_salt or "")
