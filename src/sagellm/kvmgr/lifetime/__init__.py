"""Lifetime prediction: how long a request will run, whether a block is reused.

The neural predictors need torch; they are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sagellm.core.protocols.lifetime import (
    Prediction,
    PredictionRequest,
    ReuseFeatures,
    ReusePrediction,
)
from sagellm.kvmgr.lifetime.reuse.reuse_table import ReuseTable
from sagellm.kvmgr.lifetime.statistical import StatisticalLifetimePredictor

if TYPE_CHECKING:
    from sagellm.kvmgr.lifetime.lstm import LSTMLifetimePredictor
    from sagellm.kvmgr.lifetime.transformer import TransformerLifetimePredictor

__all__ = [
    "LSTMLifetimePredictor",
    "Prediction",
    "PredictionRequest",
    "ReuseFeatures",
    "ReusePrediction",
    "ReuseTable",
    "StatisticalLifetimePredictor",
    "TransformerLifetimePredictor",
]
_NEED_TORCH = {"LSTMLifetimePredictor": "lstm", "TransformerLifetimePredictor": "transformer"}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
