"""Prefix reuse: which leading tokens of a prompt already have their KV in blocks."""

from sagellm.kvmgr.prefix_cache.hashed import HashedIndex
from sagellm.kvmgr.prefix_cache.metrics import PrefixReuseMetrics
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

__all__ = ["HashedIndex", "PrefixReuseMetrics", "RadixIndex"]
