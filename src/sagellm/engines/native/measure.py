"""Measurements at start: kernels, memory bandwidth, the time of calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sagellm.engines.native.accelerators import module_of


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch computes on `count` threads within this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_s(run: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this thread for the fastest run; other processes hardly change them."""
    return fastest(run, repeats, time.thread_time)


def device_s(device: torch.device, run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run until `device` has finished. On a CPU as `cpu_s`."""
    if device.type == "cpu":
        return cpu_s(run, repeats)
    synchronize = module_of(device).synchronize

    def now() -> float:
        synchronize()
        return time.perf_counter()

    return fastest(run, repeats, now)


def fastest(run: Callable[[], object], repeats: int, now: Callable[[], float]) -> float:
    """Seconds by `now` of the fastest of `repeats` runs."""
    best = float("inf")
    for _ in range(repeats):
        start = now()
        run()
        best = min(best, now() - start)
    return best


CPU_BYTES, CUDA_BYTES = 1 << 28, 1 << 31
_REPEATS = 7


def read_bandwidth(device_name: str) -> float:
    """Bytes per second that a device reads from memory: the bound of decode steps. The best of a few sums
    over more memory than any cache holds, with torch's threads.
    """
    device = torch.device(device_name)
    size = CPU_BYTES if device.type == "cpu" else CUDA_BYTES
    values = torch.ones(size // 4, device=device)  # written, so that it is there
    return size / fastest(lambda: values.sum().item(), _REPEATS, time.perf_counter)  # waits for the device
