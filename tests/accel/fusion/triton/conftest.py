"""Without a GPU the Triton kernels run in Triton's interpreter, which is chosen before Triton is imported."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """The interpreter computes with numpy, which would warn of every inf and NaN that a test is about."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
