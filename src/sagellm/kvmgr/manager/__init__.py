"""`KVCacheManager`: which request has which KV block, and what stays when the request leaves."""

from sagellm.kvmgr.manager.allocator import BlockAllocator, BlockStates, Fragmentation
from sagellm.kvmgr.manager.checkpoints import CheckpointConfig
from sagellm.kvmgr.manager.hot_prefixes import HotPrefixes
from sagellm.kvmgr.manager.manager import KVCacheManager
from sagellm.kvmgr.manager.quotes import Quotes

__all__ = [
    "BlockAllocator",
    "BlockStates",
    "CheckpointConfig",
    "Fragmentation",
    "HotPrefixes",
    "KVCacheManager",
    "Quotes",
]
