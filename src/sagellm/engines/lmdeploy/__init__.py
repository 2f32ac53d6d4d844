"""Our KV cache policies inside LMDeploy's PyTorch engine.

`attach` is what a patched LMDeploy calls with each new scheduler; `watch_communication` in each process of a
model.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import ConfigError, SageError
from sagellm.engines.guests.settings import GuestSettings, SchedulingSettings
from sagellm.engines.lmdeploy.communication import watch_communication
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from sagellm.engines.lmdeploy.order import SequenceOrder

__all__ = ["SETTINGS", "LMDeployEngine", "SequenceOrder", "attach", "watch_communication"]

SETTINGS = "SAGELLM_LMDEPLOY"
"""The environment variable with our settings as JSON: those of `GuestSettings`, `scheduling` and `swap`.

`scheduling` has `strategy` and `options` of our passes; without it LMDeploy orders its sequences. With `swap`
(default false) what leaves the GPU cache goes on being cached in LMDeploy's CPU blocks.
"""
logger = logging.getLogger("lmdeploy.sagellm")  # below "lmdeploy": LMDeploy sets that logger up
FAILURES = (SageError, AttributeError, TypeError, ValueError)


def attach(scheduler: Any) -> None:
    """Let what `SAGELLM_LMDEPLOY` names guide a new scheduler.

    Where that cannot be done, a warning says why, and LMDeploy goes on alone.
    """
    kept = "evicts in its own order"
    try:
        given = dict(json.loads(os.environ.get(SETTINGS, "{}")))
        scheduling, swap = given.pop("scheduling", None), given.pop("swap", False)
        if not isinstance(swap, bool):
            raise ConfigError(f"swap must be true or false, got {swap!r}")
        settings = GuestSettings.of(given)
        if settings.hints:
            raise ConfigError("hints: LMDeploy's requests carry none; leave the setting out")
        engine = LMDeployEngine(scheduler, settings, MonotonicClock())
        logger.info("sageLLM: mode %s, policy %s", settings.mode, settings.policy)
        if swap:
            _swap(engine)
        if scheduling is not None:
            kept = "orders its sequences in its own order"
            SequenceOrder(scheduler, SchedulingSettings.of(dict(scheduling)), engine.guided)
            logger.info("sageLLM: sequences are ordered by our passes")
    except FAILURES as error:
        logger.warning("sageLLM: LMDeploy %s: %s", kept, error)


def _swap(engine: LMDeployEngine) -> None:
    """Start swapping; a failure leaves the rest as it is."""
    try:
        num_blocks = engine.swap_to_cpu()
        logger.info("sageLLM: what leaves the GPU cache is kept in %d CPU blocks", num_blocks)
    except FAILURES as error:
        logger.warning("sageLLM: LMDeploy swaps nothing: %s", error)
