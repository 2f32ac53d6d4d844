"""The default policy: learned eviction with a bound on its loss to LRU. README.md walks through it."""

from sagellm.kvmgr.eviction.adaptive.policy import AdaptivePolicy

__all__ = ["PLUGIN", "AdaptivePolicy"]

PLUGIN = AdaptivePolicy
