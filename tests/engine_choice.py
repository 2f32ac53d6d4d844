"""The engines that text-level tests run over: a scripted fake, and the native one with the demo model."""

from __future__ import annotations

import pytest

from sagellm.engines.build import load
from sagellm.engines.llm import LLM
from sagellm.engines.native import DEMO_MODEL
from tests.scripted_engine import scripted_llm

SCRIPTED = "scripted"
NATIVE = "native"
ENGINES = [SCRIPTED, NATIVE]
TEXT = "Well, 你好: 1 + 2 is 3 🙂, as far as I know, and so it goes on. "


def llm_of(name: str) -> LLM:
    """A fresh `LLM`; skips where the demo model is not there."""
    if name == SCRIPTED:
        return scripted_llm(TEXT, num_cached=1, step_s=0.001)
    if not (DEMO_MODEL / "config.json").is_file():
        pytest.skip("the demo model is not built")
    return load(settings={"kv.num_blocks": 512, "engine.threads": 1})
