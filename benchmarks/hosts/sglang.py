"""SGLang's real prefix cache, driven as `sagellm replay` drives ours. Runs in an environment with SGLang.

A page is one token, and a block is a page. The calls are those of SGLang's scheduler for a request: match,
lock, make room, allocate, checkpoint, release. The last token of a prompt may be reused here; the scheduler
would have it computed anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    register_tree_core_backend,
    registered_tree_core_backends,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import PolicyFactory
from sagellm.engines.guests.settings import GuestSettings

MAX_ROWS = 16


def token_pools(num_tokens: int, max_context: int) -> tuple[Any, Any]:
    """Rows of requests, and an allocator of `num_tokens` slots, on the CPU."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=1))
    rows = ReqToTokenPool(size=MAX_ROWS, max_context_len=max_context, device="cpu", enable_memory_saver=False)
    kv = MHATokenToKVPool(
        size=num_tokens, page_size=1, dtype=torch.float16, head_num=1, head_dim=1, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    allocator = TokenToKVPoolAllocator(
        size=num_tokens, dtype=torch.float16, device="cpu", kvcache=kv, need_sort=False
    )
    return rows, allocator


def prefix_cache(num_tokens: int, backend: str | None, max_context: int = 1 << 18) -> Any:
    """A `UnifiedRadixCache` of full attention, with the TreeCore of a backend."""
    rows, allocator = token_pools(num_tokens, max_context)
    params = CacheInitParams(
        disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=1,
        tree_components=(ComponentType.FULL,), tree_core_backend=backend,
    )  # fmt: skip
    return UnifiedRadixCache(params)


@dataclass
class Request:
    """The fields of SGLang's `Req` that its prefix cache reads.

    `num_kept`: so many of the output's tokens have KV; traces tell only how many there were.
    """

    rid: str
    origin_input_ids: array[int]
    extra_key: str | None = None
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    num_kept: int = 0
    kv: Any = field(default_factory=ReqKvInfo)
    is_done: bool = False
    lock: Any = None
    last_node: Any = None
    cache_salt: str | None = None
    session_id: str | None = None
    sampling_params: Any = None
    kv_rotation_base: int | None = None
    priority: int = 0
    host_loaded_length: int = 0
    session: Any = None
    num_found: int = 0

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids[: self.num_kept]

    def finished(self) -> bool:
        return self.is_done


class Serving:
    """Requests on one cache, by the calls of SGLang's scheduler."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.allocator = cache, cache.token_to_kv_pool_allocator
        self._rows = list(range(MAX_ROWS))

    def begin(self, req: Request) -> bool:
        """Match, lock and compute a prompt; False if there is no room."""
        cache, prompt = self.cache, req.origin_input_ids
        found = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt, req.extra_key)))
        req.num_found = num_found = found.device_prefix_len
        req.last_node = found.last_device_node
        req.lock = cache.lock(req.last_node)
        slots = self._alloc(len(prompt) - num_found)
        if slots is None:
            cache.unlock(req.lock)
            req.lock = None
            return False
        req.kv.req_pool_idx, req.kv.cache_protected_len = self._rows.pop(), num_found
        row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        row[:num_found] = cache.path_device_indices(req.last_node)[:num_found]
        row[num_found : len(prompt)] = slots
        cache.checkpoint(req, up_to=len(prompt))
        return True

    def _alloc(self, num_tokens: int) -> Any:
        if num_tokens == 0:
            return torch.empty(0, dtype=torch.int64)
        evict_from_tree_cache(self.cache, num_tokens)
        return self.allocator.alloc(num_tokens)

    def decode(self, req: Request, token: int) -> bool:
        """One more token; False if there is no room for it."""
        slot = self._alloc(1)
        if slot is None:
            return False
        length = len(req.full_untruncated_fill_ids)
        self.cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, length] = slot
        req.output_ids.append(token)
        req.num_kept += 1
        return True

    def end(self, req: Request, *, finished: bool = True) -> None:
        """The request ends, or is preempted: then its last tokens are lost."""
        cache, length = self.cache, len(req.full_untruncated_fill_ids)
        req.is_done = finished
        row = cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        if finished:
            cache.checkpoint(req, up_to=length)
        self.allocator.free(row[req.kv.cache_protected_len : length].to(torch.int64))
        cache.unlock(req.lock)
        req.lock = None
        cache.on_release(req, checkpointed=finished)
        self._rows.append(req.kv.req_pool_idx)


def guided_cache(
    num_tokens: int,
    settings: GuestSettings,
    clock: Clock,
    policy: PolicyFactory | None,
    max_context: int = 1 << 18,
) -> Any:
    """A cache as the backend `sagellm` makes it, with another policy and clock."""
    from sagellm.engines.sglang.plugin import make_core

    def factory(params: Any, components: Any) -> Any:
        return make_core(params, components, settings, clock, policy)

    name = f"sagellm-{len(registered_tree_core_backends())}"
    register_tree_core_backend(name, factory)
    return prefix_cache(num_tokens, name, max_context)


class Host:
    """One request at a time. With a policy: it chooses what is evicted."""

    def __init__(self, capacity: int, policy: PolicyFactory | None, clock: Clock) -> None:
        if policy is None:
            self.cache = prefix_cache(capacity, "rust")
        else:
            self.cache = guided_cache(capacity, GuestSettings("on", report_s=0), clock, policy)
        self._serving, self._num_requests = Serving(self.cache), 0

    def serve(self, digests: Sequence[bytes], num_output_tokens: int) -> int:
        """Serve a prompt and free it; returns how many of its blocks were cached."""
        self._num_requests += 1
        prompt = array("q", [int.from_bytes(digest[:8], "little") for digest in digests])
        space = digests[0][8:].hex() if digests else None
        request = Request(f"r{self._num_requests}", prompt, space)
        began = self._serving.begin(request)
        assert began
        request.output_ids = array("q", bytes(8 * num_output_tokens))
        self._serving.end(request)
        return request.num_found
