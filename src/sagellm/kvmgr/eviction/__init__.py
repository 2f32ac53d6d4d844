"""Eviction: which KV to give up first."""

from sagellm.kvmgr.eviction.adaptive import AdaptivePolicy
from sagellm.kvmgr.eviction.cost_model import PrefillCostModel
from sagellm.kvmgr.eviction.lru import LRUPolicy
from sagellm.kvmgr.eviction.qos import jain_index

__all__ = [
    "AdaptivePolicy",
    "LRUPolicy",
    "PrefillCostModel",
    "jain_index",
]
