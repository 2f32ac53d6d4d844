"""Measuring at start which of two ways is faster here: on one thread and by its own clock, so that other
processes on the same cores do not tip it.
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
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        run()
        best = min(best, time.thread_time() - start)
    return best
