"""Prefix reuse: which leading tokens of a prompt already have their KV in blocks."""

from sagellm.kvmgr.prefix_cache.radix import PrefixMatch, RadixPrefixCache

__all__ = ["PrefixMatch", "RadixPrefixCache"]
