"""`KVCacheManager`: the one object that a scheduler and an engine talk to about KV."""

from sagellm.kvmgr.manager.manager import KVCacheManager
from sagellm.kvmgr.manager.sequence import BlockStates, Fragmentation
from sagellm.kvmgr.manager.swap import SwapSpace

__all__ = ["BlockStates", "Fragmentation", "KVCacheManager", "SwapSpace"]
