"""Eviction: which KV to give up first."""

from sagellm.kvmgr.eviction._candidates import EvictionCandidate
from sagellm.kvmgr.eviction.lru import LRUEvictionPolicy

__all__ = ["EvictionCandidate", "LRUEvictionPolicy"]
