"""Measuring at start which of two ways is faster here: on a CPU by one thread and its own clock, so that
other processes on the same cores do not tip it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one thread within."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cpu_s(run: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this thread for the fastest of so many runs."""
    return _fastest(run, repeats, time.thread_time)


def cuda_s(run: Callable[[], object], repeats: int) -> float:
    """Seconds until a GPU is done, for the fastest of so many runs."""

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return _fastest(run, repeats, now)


def _fastest(run: Callable[[], object], repeats: int, now: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = now()
        run()
        best = min(best, now() - start)
    return best
