"""Our KV cache policies inside LMDeploy's PyTorch engine.

`attach` is what a patched LMDeploy calls with each new scheduler.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import SageError
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.engines.build import make_policy
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.lmdeploy.block_trie import GuidedTrie, repair_clock

SETTINGS = "SAGELLM_LMDEPLOY"
"""The environment variable with our settings as JSON, of which `policy` and `options` are read."""
logger = logging.getLogger("lmdeploy.sagellm")  # below "lmdeploy": LMDeploy sets that logger up


def attach(scheduler: Any) -> GuidedTrie | None:
    """Let the policy of `SAGELLM_LMDEPLOY` guide a new scheduler.

    Where that cannot be done, a warning says why, and LMDeploy goes on alone.
    """
    try:
        settings = GuestSettings.of({"mode": "on", **json.loads(os.environ.get(SETTINGS, "{}"))})
        if settings.mode != "on":
            raise ValueError(f"mode {settings.mode!r} is not there for LMDeploy: use on")
        clock, capacity = MonotonicClock(), scheduler.block_manager.num_gpu_blocks

        def policy() -> EvictionPolicy:
            return make_policy(settings.policy, capacity=capacity, clock=clock, **settings.options)

        guided = GuidedTrie(scheduler.block_trie, policy, clock)
        repair_clock(scheduler.block_trie)
    except (SageError, AttributeError, TypeError, ValueError) as error:
        logger.warning("sageLLM: LMDeploy evicts in its own order: %s", error)
        return None
    logger.info("sageLLM: evictions by the policy %s", settings.policy)
    return guided
