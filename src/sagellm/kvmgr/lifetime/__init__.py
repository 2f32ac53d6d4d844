"""Lifetime prediction: how long a request will run, and so how long its KV will be needed.

`LSTMLifetimePredictor` needs torch; it is loaded when it is first named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sagellm.core.protocols.lifetime import Prediction, PredictionRequest
from sagellm.kvmgr.lifetime.statistical import StatisticalLifetimePredictor

if TYPE_CHECKING:
    from sagellm.kvmgr.lifetime.lstm import LSTMLifetimePredictor

__all__ = ["LSTMLifetimePredictor", "Prediction", "PredictionRequest", "StatisticalLifetimePredictor"]


def __getattr__(name: str) -> Any:
    if name == "LSTMLifetimePredictor":
        from sagellm.kvmgr.lifetime.lstm import LSTMLifetimePredictor

        return LSTMLifetimePredictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
