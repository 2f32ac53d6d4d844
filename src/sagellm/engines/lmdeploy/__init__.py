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
from sagellm.engines.guests.settings import GuestSettings, SchedulingSettings
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from sagellm.engines.lmdeploy.order import SequenceOrder

SETTINGS = "SAGELLM_LMDEPLOY"
"""The environment variable with our settings as JSON: those of `GuestSettings`, and `scheduling`.

`scheduling` has `strategy` and `options` of our passes; without it LMDeploy orders its sequences.
"""
logger = logging.getLogger("lmdeploy.sagellm")  # below "lmdeploy": LMDeploy sets that logger up


def attach(scheduler: Any) -> None:
    """Let what `SAGELLM_LMDEPLOY` names guide a new scheduler.

    Where that cannot be done, a warning says why, and LMDeploy goes on alone.
    """
    engine = None
    try:
        given = dict(json.loads(os.environ.get(SETTINGS, "{}")))
        scheduling = given.pop("scheduling", None)
        settings = GuestSettings.of(given)
        engine = LMDeployEngine(scheduler, settings, MonotonicClock())
        logger.info("sageLLM: mode %s, policy %s", settings.mode, settings.policy)
        if scheduling is not None:
            SequenceOrder(scheduler, SchedulingSettings.of(dict(scheduling)), engine.guided)
            logger.info("sageLLM: sequences are ordered by our passes")
    except (SageError, AttributeError, TypeError, ValueError) as error:
        kept = "evicts" if engine is None else "orders its sequences"
        logger.warning("sageLLM: LMDeploy %s in its own order: %s", kept, error)
