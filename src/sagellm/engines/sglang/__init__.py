"""Our KV cache policies and passes inside an SGLang server.

`register` is SGLang's entry point for plug-ins.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from sagellm.core.errors import SageError

logger = logging.getLogger("sagellm.sglang")
BACKEND = "sagellm"


def register() -> None:
    """Register what the environment asks for with SGLang, once per process.

    That is the backend of `SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=sagellm`, and the hooks of
    `SAGELLM_SCHEDULING`.
    """
    _register_backend()
    if os.environ.get("SAGELLM_SCHEDULING"):
        _register_scheduling()


def _register_backend() -> None:
    try:
        from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
            get_tree_core_factory,
            register_tree_core_backend,
        )
    except ImportError as error:
        logger.warning("sageLLM: this SGLang cannot be guided: %s", error)
        return
    if get_tree_core_factory(BACKEND) is None:
        register_tree_core_backend(BACKEND, _factory)


def _register_scheduling() -> None:
    try:
        from sagellm.engines.sglang.hooks import register_scheduling

        register_scheduling(os.environ)
    except (ImportError, AttributeError, SageError) as error:
        logger.warning("sageLLM: SGLang schedules in its own order: %s", error)


def _factory(params: Any, components: Any) -> Any:
    from sagellm.engines.sglang.plugin import tree_core

    return tree_core(params, components)
