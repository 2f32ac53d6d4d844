"""SGLang's real HiCache on a CPU: its radix tree, host pool, controller and threads.

Host memory is not pinned here, and nothing is copied between the device and the host pool, since SGLang's
kernels for that need a GPU. What moves pages between the host pool and a storage is SGLang's own.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

MAX_ROWS = 8
STORAGE = {
    "backend_name": "sagellm",
    "module_path": "sagellm.engines.sglang.hicache",
    "class_name": "SageHiCache",
}


@contextmanager
def hicache(
    storage: dict[str, Any] | None,
    *,
    num_tokens: int = 64,
    page_size: int = 4,
    layout: str = "page_first",
    heads: int = 2,
    head_dim: int = 8,
    layers: int = 3,
    is_mla: bool = False,
    dtype: torch.dtype = torch.float16,
    tp: tuple[int, int] = (0, 1),
    model: str = "dummy",
    host_ratio: float = 2.0,
    **arguments: Any,
) -> Iterator[Any]:
    """A `UnifiedRadixCache` with HiCache, and the `dynamic` storage of this extra config.

    None: HiCache without a storage. `tp`: rank and number of ranks, of which this process is one.
    """
    config = {} if storage is None else {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(STORAGE | storage),
    }  # fmt: skip
    args = ServerArgs(
        model_path=model, page_size=page_size, enable_hierarchical_cache=True, hicache_ratio=host_ratio,
        hicache_mem_layout=layout, hicache_io_backend="kernel", attention_backend="torch_native",
        hicache_write_policy="write_through", device="cpu",
        **({"served_model_name": "model"} | config | arguments),
    )  # fmt: skip
    set_global_server_args_for_scheduler(args)
    common_size: dict[str, Any] = {
        "size": num_tokens, "page_size": page_size, "dtype": dtype, "layer_num": layers, "device": "cpu",
        "enable_memory_saver": False,
    }  # fmt: skip
    kv: Any
    if is_mla:
        kv = MLATokenToKVPool(kv_lora_rank=head_dim, qk_rope_head_dim=4, **common_size)
    else:
        kv = MHATokenToKVPool(head_num=heads, head_dim=head_dim, **common_size)
    rows = ReqToTokenPool(size=MAX_ROWS, max_context_len=1024, device="cpu", enable_memory_saver=False)
    allocator = PagedTokenToKVPoolAllocator(
        size=num_tokens, page_size=page_size, dtype=dtype, device="cpu", kvcache=kv, need_sort=False
    )
    params = CacheInitParams(
        disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=page_size,
        tree_components=(ComponentType.FULL,),
    )  # fmt: skip
    cache = UnifiedRadixCache(params)
    ranks = get_parallel().override(
        tp_rank=tp[0],
        tp_size=tp[1],
        attn_tp_size=tp[1],
        moe_tp_size=tp[1],
        pp_rank=0,
        pp_size=1,
        attn_dcp_size=1,
        attn_dcp_rank=0,
    )
    unpinned = property(lambda pool: False, lambda pool, value: None)
    with mock.patch.object(HostKVCache, "pin_memory", unpinned, create=True), ranks:
        cache.init_hicache(args, params)
        try:
            yield cache
        finally:
            cache.shutdown()


class Pages:
    """Pages of the host pool of a controller, moved by its own threads."""

    def __init__(self, cache: Any) -> None:
        self.controller: HybridCacheController = cache.cache_controller
        self.pool: Any = self.controller.storage_host_pool
        self.page_size: int = self.controller.page_size

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    def alloc(self, num_pages: int) -> torch.Tensor:
        """Token slots of free pages in the host pool."""
        found: torch.Tensor | None = self.controller.mem_pool_host.alloc(num_pages * self.page_size)
        assert found is not None
        return found

    def fill(self, indices: torch.Tensor, seed: int) -> list[torch.Tensor]:
        """Write pages that follow from the seed; returns them."""
        generator = torch.Generator().manual_seed(seed)
        for index in indices[:: self.page_size].tolist():
            page = self.pool.get_dummy_flat_data_page()
            numbers = torch.randint(0, 256, (page.nbytes,), dtype=torch.uint8, generator=generator)
            self.pool.set_from_flat_data_page(index, numbers.view(page.dtype))
        return self.read(indices)

    def read(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The bytes of pages, one tensor each."""
        return [
            self.pool.get_data_page(index, flat=True).clone().view(torch.uint8)
            for index in indices[:: self.page_size].tolist()
        ]

    def hashes(self, tokens: list[int]) -> list[str]:
        """SGLang's names of the pages of a prompt."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        return list(get_storage_hash_str(array("q", tokens), None, page_size=self.page_size))

    def back_up(self, tokens: list[int], indices: torch.Tensor) -> int:
        """Store pages through SGLang's backup thread; returns the tokens that it says are stored."""
        self.controller.write_storage(indices, tokens, self.hashes(tokens))
        assert self.controller.ack_backup_queue is not None
        return int(self.controller.ack_backup_queue.get(timeout=30).completed_tokens)

    def prefetch(self, tokens: list[int]) -> tuple[int, torch.Tensor]:
        """Load what is there of a prompt, through SGLang's threads.

        Returns how many tokens were loaded, and their slots in the host pool. The part of SGLang's scheduler
        between its two threads is done here.
        """
        controller = self.controller
        operation = controller.prefetch(CacheRequestHandle("request", 0), array("q", tokens))
        assert controller.prefetch_hit_queue is not None
        assert controller.prefetch_buffer is not None
        assert controller.prefetch_hit_queue.get(timeout=30) is operation
        num_pages = operation.storage_hit_count // self.page_size
        operation.host_indices = self.alloc(num_pages) if num_pages else torch.empty(0, dtype=torch.int64)
        controller.prefetch_buffer.put(operation)
        num_tokens = 0
        while True:
            ack = controller.ack_prefetch_queue.get(timeout=30)
            num_tokens = max(num_tokens, ack.completed_tokens or 0)
            if ack.completed_req:
                return num_tokens, operation.host_indices
