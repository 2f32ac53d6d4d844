"""Tests on a real GPU: `pytest -m gpu tests/gpu`. Without one they are skipped, and counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """float32 in full, so that CPU and GPU can be compared; and nothing of an earlier test on the device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.cuda.empty_cache()
