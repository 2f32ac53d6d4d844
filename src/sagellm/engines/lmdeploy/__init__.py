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
from sagellm.engines.guests.settings import GuestSettings, SchedulingSettings
from sagellm.engines.lmdeploy.block_trie import GuidedTrie, repair_clock
from sagellm.engines.lmdeploy.order import SequenceOrder

SETTINGS = "SAGELLM_LMDEPLOY"
"""The environment variable with our settings as JSON: `policy` and `options` of evictions, and `scheduling`.

`scheduling` has `strategy` and `options` of our passes; without it LMDeploy orders its sequences.
"""
logger = logging.getLogger("lmdeploy.sagellm")  # below "lmdeploy": LMDeploy sets that logger up


def attach(scheduler: Any) -> None:
    """Let what `SAGELLM_LMDEPLOY` names guide a new scheduler.

    Where that cannot be done, a warning says why, and LMDeploy goes on alone.
    """
    guided = None
    try:
        given = dict(json.loads(os.environ.get(SETTINGS, "{}")))
        scheduling = given.pop("scheduling", None)
        guided = _guided(scheduler, GuestSettings.of({"mode": "on", **given}))
        if scheduling is not None:
            SequenceOrder(scheduler, SchedulingSettings.of(dict(scheduling)), guided)
            logger.info("sageLLM: sequences are ordered by our passes")
    except (SageError, AttributeError, TypeError, ValueError) as error:
        kept = "evicts" if guided is None else "orders its sequences"
        logger.warning("sageLLM: LMDeploy %s in its own order: %s", kept, error)


def _guided(scheduler: Any, settings: GuestSettings) -> GuidedTrie:
    """Guide a scheduler's trie; an error changes nothing."""
    if settings.mode != "on":
        raise ValueError(f"mode {settings.mode!r} is not there for LMDeploy: use on")
    clock, capacity = MonotonicClock(), scheduler.block_manager.num_gpu_blocks

    def policy() -> EvictionPolicy:
        return make_policy(settings.policy, capacity=capacity, clock=clock, **settings.options)

    guided = GuidedTrie(scheduler.block_trie, policy, clock)
    repair_clock(scheduler.block_trie)
    logger.info("sageLLM: evictions by the policy %s", settings.policy)
    return guided
