"""Learned eviction without a bound on its loss; `adaptive` adds the bound."""

from sagellm.kvmgr.eviction.adaptive.learned import LearnedPolicy

__all__ = ["PLUGIN", "LearnedPolicy"]

PLUGIN = LearnedPolicy
