"""Learned eviction without a bound on its loss; `adaptive` adds the bound."""

from sagellm.kvmgr.eviction.adaptive.learned import LearnedEvictionPolicy

__all__ = ["PLUGIN", "LearnedEvictionPolicy"]

PLUGIN = LearnedEvictionPolicy
