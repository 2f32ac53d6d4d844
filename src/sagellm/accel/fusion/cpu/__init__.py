"""CPU kernels in C++ with intrinsics, built when they are first needed."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

from sagellm.accel.fusion.cpu.attention import CpuPagedAttention, attention_kernel
from sagellm.accel.fusion.cpu.calls import Caller, recording
from sagellm.accel.fusion.cpu.glue import glue_kernels
from sagellm.accel.fusion.cpu.library import compiled, cpu_level, find_compiler
from sagellm.accel.fusion.cpu.linear import CpuLinear, linear_kernel
from sagellm.accel.fusion.cpu.quantized import CpuQuantizedLinear, quantized_kernel
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import KernelSet

SOURCES = ("linear", "attention", "glue", "quantized")
log = logging.getLogger("sagellm.kernels")

__all__ = ["CpuLinear", "CpuPagedAttention", "CpuQuantizedLinear", "cpu_kernels"]


def cpu_kernels(threads: int) -> KernelSet:
    """The kernels for this CPU on so many threads. They are built now, side by side, unless the user's cache
    has them. Empty where they cannot be built; a warning then has the reason.
    """
    try:
        level = cpu_level()
        started_s = time.monotonic()
        compiler = find_compiler()
        with ThreadPoolExecutor() as pool:
            paths = list(pool.map(lambda name: compiled(name, level, compiler), SOURCES))
        linear, attention, glue, quantized = paths
        caller = Caller(threads)
        kernels = KernelSet(
            linear_kernel(linear, level, caller),
            attention_kernel(attention, caller, threads_of=linear),
            *glue_kernels(glue, caller, threads_of=linear),
            quantized=quantized_kernel(quantized, caller, threads_of=linear),
            record=recording(linear, caller),
        )
    except KernelError as error:
        log.warning("CPU kernels are off, torch does all: %s", error)
        return KernelSet()
    log.debug("CPU kernels for %s from %s (%.2f s)", level.name, linear.parent, time.monotonic() - started_s)
    return kernels
