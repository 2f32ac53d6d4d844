"""Requests that come, decode and go at the same time, on vLLM's real KV cache manager."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from benchmarks.hosts.vllm import kv_cache_manager
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.eviction import Use
from sagellm.engines.build_kv import make_policy
from sagellm.engines.vllm.block_pool import GuidedPool, RequestEnd

SIZE = 4


@dataclass
class Running:
    request: Any
    prompt: list[int]
    num_hits: int


class Manager:
    """vLLM's manager with `num_blocks` blocks; its pool is guided by `policy`, or stock."""

    def __init__(self, num_blocks: int, policy: str | None) -> None:
        self.clock = ManualClock(0.0)
        self.kv = kv_cache_manager(num_blocks, SIZE)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(SIZE, sha256)
        self.pool = self.kv.block_pool
        made = partial(make_policy, policy or "lru", capacity=num_blocks, clock=self.clock)
        self.guided = None if policy is None else GuidedPool(self.pool, made, self.clock)
        self.running: dict[str, Running] = {}
        self._num_requests = 0

    def begin(self, prompt: list[int]) -> str | None:
        """Admit and compute a prompt; None if there is no room."""
        self._num_requests += 1
        name = f"r{self._num_requests}"
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=1000),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        return name if self._admit(request) else None

    def _admit(self, request: Any) -> bool:
        self.clock.advance(1.0)
        found, num_found = self.kv.get_computed_blocks(request)[:2]
        if self.kv.allocate_slots(request, request.num_tokens - num_found, num_found, found) is None:
            return False
        request.num_computed_tokens = request.num_tokens
        self.running[request.request_id] = Running(request, list(request.prompt_token_ids), num_found // SIZE)
        self.check()
        return True

    def decode(self, name: str, token: int) -> bool:
        """One more token; False if there is no room for it."""
        request = self.running[name].request
        request.append_output_token_ids(token)
        if self.kv.allocate_slots(request, 1) is None:
            return False
        request.num_computed_tokens += 1
        self.check()
        return True

    def end(self, name: str, *, preempted: bool = False) -> Running:
        self.clock.advance(1.0)
        found = self.running.pop(name)
        if self.guided is not None and not preempted:
            self.guided.finished(
                self.kv.get_block_ids(name)[0], RequestEnd(Use(found.request.num_output_tokens))
            )
        self.kv.free(found.request)
        self.check()
        return found

    def check(self) -> None:
        if self.guided is not None and self.guided.is_guided:
            self.guided.queue.check()
        free = self.pool.free_block_queue.get_all_free_blocks()
        ids = [block.block_id for block in free]
        assert len(set(ids)) == len(ids) == self.pool.get_num_free_blocks()
        assert all(block.ref_cnt == 0 and not block.is_null for block in free)
