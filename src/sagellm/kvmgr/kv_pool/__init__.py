"""The block pool: the owner of each block of KV memory, quotas, and compaction."""

from sagellm.kvmgr.kv_pool.buddy import BuddyPool
from sagellm.kvmgr.kv_pool.defrag import as_copies, plan_compaction
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.quota import QuotaManager, Share

__all__ = [
    "BuddyPool",
    "FreeListPool",
    "QuotaManager",
    "Share",
    "as_copies",
    "plan_compaction",
]
