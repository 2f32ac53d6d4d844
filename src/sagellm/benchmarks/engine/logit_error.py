"""What quantizing a model changes: its logits after fixed prompts, beside those of the model as it is
stored.
"""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from sagellm.benchmarks.engine.workloads import Draws
from sagellm.core.config import Config
from sagellm.engines.build import build_backend

NUM_PROMPTS, NUM_TOKENS = 64, 32
LOGIT_ERROR, LOGIT_ERROR_CODE = "logit-error", "q"

Logits = np.ndarray[Any, np.dtype[np.float32]]


def logit_error(config: Config) -> float:
    """The relative L2 distance between the logits of the quantized model and of the same one unquantized,
    over all prompts together. One model is in memory at a time.
    """
    stored = config.model_copy(update={"model": config.model.model_copy(update={"quantization": "none"})})
    expected, found = _logits(stored), _logits(config)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def prompts(vocab_size: int) -> list[list[int]]:
    """The same as `benchmarks/peers_quantized.py` draws."""
    return [
        Draws(Random(f"{LOGIT_ERROR_CODE}/{i}"), vocab_size).tokens(NUM_TOKENS) for i in range(NUM_PROMPTS)
    ]


def _logits(config: Config) -> Logits:
    from sagellm.engines.native.backend import NativeBackend

    backend = build_backend(config)
    assert isinstance(backend, NativeBackend)
    try:
        vocab_size = backend.capability().vocab_size
        return np.stack([backend.prompt_logits(prompt).numpy() for prompt in prompts(vocab_size)])
    finally:
        backend.close()
