"""Prefix reuse: which leading tokens of a prompt already have their KV in blocks."""

from sagellm.kvmgr.prefix_cache._simple_door import PrefixMatch
from sagellm.kvmgr.prefix_cache.hashed import HashedPrefixCache
from sagellm.kvmgr.prefix_cache.matcher import PrefixMatcher
from sagellm.kvmgr.prefix_cache.metrics import PrefixReuseMetrics
from sagellm.kvmgr.prefix_cache.radix import RadixPrefixCache

__all__ = ["HashedPrefixCache", "PrefixMatch", "PrefixMatcher", "PrefixReuseMetrics", "RadixPrefixCache"]
