"""CPU kernels in C++ with intrinsics, built when they are first needed."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from sagellm.accel.fusion.cpu.attention import CpuPagedAttention
from sagellm.accel.fusion.cpu.calls import Caller
from sagellm.accel.fusion.cpu.delta import CpuDeltaStep
from sagellm.accel.fusion.cpu.experts import CpuCombineExperts, CpuRouteToExperts
from sagellm.accel.fusion.cpu.glue import (
    CpuAddRmsNorm,
    CpuClampedSwiglu,
    CpuDrawNext,
    CpuGeluAndMul,
    CpuRopeToCache,
    CpuSiluAndMul,
)
from sagellm.accel.fusion.cpu.library import compiled, kernel_function, loaded
from sagellm.accel.fusion.cpu.linear import CpuLinear
from sagellm.accel.fusion.cpu.mamba import CpuMambaStep
from sagellm.accel.fusion.cpu.quantized import CpuQuantizedLinear
from sagellm.core.errors import KernelError
from sagellm.core.native_code import cpu_level, find_compiler
from sagellm.core.protocols.fusion import KernelSet

SOURCES = ("linear", "attention", "glue", "quantized", "experts", "delta", "mamba")
log = logging.getLogger("sagellm.kernels")

__all__ = ["CpuLinear", "CpuPagedAttention", "CpuQuantizedLinear", "cpu_kernels"]


def cpu_kernels(threads: int) -> KernelSet:
    """The kernels for this CPU on so many threads. They are built now, side by side, unless the user's cache
    has them. Empty where they cannot be built; a warning then has the reason.
    """
    try:
        started_s = time.monotonic()
        compiler = find_compiler()
        level = cpu_level(compiler=compiler)
        with ThreadPoolExecutor() as pool:
            paths = list(pool.map(lambda name: compiled(name, level, compiler), SOURCES))
        linear = loaded(paths[0])
        others = (loaded(path, threads_of=paths[0]) for path in paths[1:])
        attention, glue, quantized, experts, delta, mamba = others
        caller = Caller(threads)
        kernels = KernelSet(
            CpuLinear(linear, caller, level),
            CpuPagedAttention(attention, caller),
            CpuAddRmsNorm(glue, caller),
            CpuRopeToCache(glue, caller),
            CpuSiluAndMul(glue, caller),
            CpuGeluAndMul(glue, caller),
            clamped_swiglu=CpuClampedSwiglu(glue, caller),
            quantized=CpuQuantizedLinear(quantized, caller),
            route=CpuRouteToExperts(experts, caller),
            combine=CpuCombineExperts(experts, caller),
            draw_next=CpuDrawNext(glue, caller),
            delta_step=CpuDeltaStep(delta, caller),
            mamba_step=CpuMambaStep(mamba, caller),
            record=partial(caller.record, kernel_function(linear, "sagellm_replay")),
            between=caller.between,
        )
    except KernelError as error:
        log.warning("CPU kernels are off, torch does all: %s", error)
        return KernelSet()
    took_s = time.monotonic() - started_s
    log.debug("CPU kernels for %s from %s (%.2f s)", level.name, paths[0].parent, took_s)
    return kernels
