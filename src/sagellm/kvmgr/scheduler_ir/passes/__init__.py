"""Scheduler passes, one file each. A pass edits the draft in place and says why."""

from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import MemoryAwarePreemptionPass
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass

__all__ = ["ChunkedPrefillPass", "MemoryAwarePreemptionPass", "PrefixCacheAwarePass", "PriorityBasedPass"]
