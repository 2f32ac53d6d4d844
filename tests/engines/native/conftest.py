"""What tests of the native backend share."""

from __future__ import annotations

import pytest

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.protocols.fusion import KernelSet


@pytest.fixture(scope="module")
def kernels() -> KernelSet:
    """Of one thread; skips where they cannot be compiled."""
    found = cpu_kernels(1)
    if found.quantized is None:
        pytest.skip("no C++ compiler")
    return found
