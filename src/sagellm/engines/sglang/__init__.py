"""Our KV cache policies inside an SGLang server. `register` is SGLang's entry point for plug-ins."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("sagellm.sglang")
BACKEND = "sagellm"


def register() -> None:
    """Make `SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=sagellm` known to SGLang, once per process."""
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


def _factory(params: Any, components: Any) -> Any:
    from sagellm.engines.sglang.plugin import tree_core

    return tree_core(params, components)
