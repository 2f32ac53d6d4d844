"""GPU kernels in Triton, compiled when they are first called.

CUDA builds of torch bring Triton along.
"""

from __future__ import annotations

import logging

from sagellm.core.protocols.fusion import KernelSet

log = logging.getLogger("sagellm.kernels")

__all__ = ["triton_kernels"]


def triton_kernels() -> KernelSet:
    """The kernels; none, with a warning, where Triton is not installed."""
    try:
        from sagellm.accel.fusion.triton.attention import TritonPagedAttention
        from sagellm.accel.fusion.triton.draw import TritonDraw
        from sagellm.accel.fusion.triton.experts import (
            TritonCombineExperts,
            TritonGroupedLinear,
            TritonRouteToExperts,
        )
        from sagellm.accel.fusion.triton.glue import (
            TritonAddRmsNorm,
            TritonGeluAndMul,
            TritonRopeToCache,
            TritonSiluAndMul,
        )
    except ImportError as error:
        log.warning("GPU kernels are off, torch does all (pip install triton): %s", error)
        return KernelSet()
    return KernelSet(
        attention=TritonPagedAttention(),
        add_rms_norm=TritonAddRmsNorm(),
        rope_to_cache=TritonRopeToCache(),
        silu_and_mul=TritonSiluAndMul(),
        gelu_and_mul=TritonGeluAndMul(),
        draw=TritonDraw(),
        route=TritonRouteToExperts(),
        combine=TritonCombineExperts(),
        grouped=TritonGroupedLinear(),
    )
