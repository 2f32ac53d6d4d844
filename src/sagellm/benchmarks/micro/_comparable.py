"""Which rows of the peers' harness do the same work as which of ours.

A row of a peer that does more at once stands against the sum of ours: vLLM's and LMDeploy's look-ups also
collect the blocks, SGLang's do not. A prompt that comes as a list becomes tokens and bytes with us. Sections
and sizes are the harness's own; a case is found by its beginning, since some names end in numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sagellm.benchmarks.micro import kv_pool, memory, prefix_cache, scheduler_ir

PEERS = ("vllm", "sglang", "lmdeploy")


class Comparable(NamedTuple):
    """Rows of `peer` whose case begins with `case` stand against the sum of `ours`."""

    peer: str
    section: str
    case: str
    ours: tuple[str, ...]


_FROM_LIST = (prefix_cache.FROM_LIST, prefix_cache.TO_BYTES)
_HIT = (prefix_cache.ONE_EDGE, prefix_cache.GATHER)
_HIT_OF_HALF = (prefix_cache.HALF, prefix_cache.GATHER_HALF)
_ALLOCATE = (kv_pool.ALLOCATE + kv_pool.WITH_QUOTA,)
_FREE = (kv_pool.FREE + kv_pool.WITH_QUOTA,)

COMPARABLE = (
    Comparable("vllm", "a", "full_hit lookup only", _HIT),
    Comparable("vllm", "a", "full_hit Request(list)+hash+lookup", (*_FROM_LIST, *_HIT)),
    Comparable("vllm", "b", "miss lookup only", (prefix_cache.MISS,)),
    Comparable("vllm", "b", "miss Request(list)+hash+lookup", (*_FROM_LIST, prefix_cache.MISS)),
    Comparable("vllm", "b", "half hit lookup only", _HIT_OF_HALF),
    Comparable("vllm", "c", "insert: allocate_slots (alloc+register", (prefix_cache.INSERT,)),
    Comparable("vllm", "c", "insert: allocate_slots, every block evicts", (prefix_cache.INSERT_EVICTING,)),
    Comparable("vllm", "d", "alloc N blocks, half-full", _ALLOCATE),
    Comparable("vllm", "d", "free N blocks", _FREE),
    Comparable("vllm", "d", "alloc N blocks, all evict", (kv_pool.EVICT,)),
    Comparable("vllm", "d", "big pool", (kv_pool.EVICT_LARGE,)),
    Comparable("vllm", "e", "Scheduler schedule+update", (scheduler_ir.STEP,)),
    Comparable("vllm", "e", "AsyncScheduler schedule+update", (scheduler_ir.STEP,)),
    Comparable("lmdeploy", "e", "schedule+update", (scheduler_ir.STEP,)),
    Comparable("vllm", "f", "bytes/block rss: pool object", (memory.EMPTY,)),
    Comparable("vllm", "f", "bytes/block rss: cached metadata", (memory.CACHED,)),
    Comparable("vllm", "f", "bytes/block rss: total", (memory.TOTAL,)),
    Comparable("sglang", "a", "full_hit match_prefix (", (prefix_cache.ONE_EDGE,)),
    Comparable("sglang", "a", "full_hit list->", (*_FROM_LIST, prefix_cache.ONE_EDGE)),
    Comparable("sglang", "a", "full_hit match_prefix+gather", _HIT),
    Comparable("sglang", "a", "full_hit match_prefix, path", (prefix_cache.PATH,)),
    Comparable("sglang", "b", "miss match_prefix", (prefix_cache.MISS,)),
    Comparable("sglang", "b", "miss list->", (*_FROM_LIST, prefix_cache.MISS)),
    Comparable("sglang", "c", "alloc pages + insert", (prefix_cache.INSERT,)),
    Comparable("sglang", "d", "alloc N pages, half-full", _ALLOCATE),
    Comparable("sglang", "d", "free N pages", _FREE),
    Comparable("sglang", "d", "evict + alloc N pages", (kv_pool.EVICT,)),
    Comparable("sglang", "d", "big pool", (kv_pool.EVICT_LARGE,)),
    Comparable("sglang", "f", "bytes/block RSS, 2048-token", (memory.CACHED,)),
    Comparable("lmdeploy", "a", "full_hit BlockTrie.match", _HIT),
    Comparable("lmdeploy", "a", "full_hit add_sequence(list)+match", (*_FROM_LIST, *_HIT)),
    Comparable("lmdeploy", "b", "miss BlockTrie.match", (prefix_cache.MISS,)),
    Comparable("lmdeploy", "b", "miss add_sequence(list)", (*_FROM_LIST, prefix_cache.MISS)),
    Comparable("lmdeploy", "c", "insert: block_manager.allocate +", (prefix_cache.INSERT,)),
    Comparable("lmdeploy", "d", "alloc N blocks, half-full", _ALLOCATE),
    Comparable("lmdeploy", "d", "free N blocks", _FREE),
    Comparable("lmdeploy", "d", "trie.evict + alloc N blocks", (kv_pool.EVICT,)),
    Comparable("lmdeploy", "d", "big pool", (kv_pool.EVICT_LARGE,)),
    Comparable("lmdeploy", "f", "bytes/block rss: pool", (memory.EMPTY,)),
    Comparable("lmdeploy", "f", "bytes/block rss: cached metadata", (memory.CACHED,)),
)


def comparables(peer: str, section: str, case: str) -> Iterator[Comparable]:
    """What the peer's row may be compared with."""
    return (
        one for one in COMPARABLE if (one.peer, one.section) == (peer, section) and case.startswith(one.case)
    )
