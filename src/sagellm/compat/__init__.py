"""Names and call forms of the design documents, over the core classes.

Nothing in the engine imports this package. New code uses the core classes: README.md lists them.
"""

from sagellm.compat.kv_cache import (
    BlockAllocationRequest,
    EvictionCandidate,
    GPUKVPool,
    KVBackendProtocol,
    LRUEvictionPolicy,
    PrefixMatch,
    PrefixMatcher,
    RadixPrefixCache,
    allocate_blocks,
    insert_prefix,
    select_victims,
)
from sagellm.compat.scheduling import BaseSchedulerIR, IRBuilder, ScheduleRequest, ScheduleResult

__all__ = [
    "BaseSchedulerIR",
    "BlockAllocationRequest",
    "EvictionCandidate",
    "GPUKVPool",
    "IRBuilder",
    "KVBackendProtocol",
    "LRUEvictionPolicy",
    "PrefixMatch",
    "PrefixMatcher",
    "RadixPrefixCache",
    "ScheduleRequest",
    "ScheduleResult",
    "allocate_blocks",
    "insert_prefix",
    "select_victims",
]
