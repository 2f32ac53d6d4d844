"""Counts of steps wrap around after 2^32 steps, and nothing may look ahead then."""

from __future__ import annotations

import threading

import pytest
import torch

from sagellm.comm.collectives.shared_kernels import native_library
from sagellm.comm.collectives.shared_memory import SharedMemoryBackend
from sagellm.core.errors import KernelError

NUM_RANKS, LIMIT_S = 2, 60.0


class SharedStore:
    """A store of the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, LIMIT_S)
            return self._values[key]


@pytest.mark.parametrize("behind", [1 << 31, (1 << 31) + 6, (1 << 32) - 3])
def test_two_shots_long_after_the_last_ones(behind: int) -> None:
    """The counts of the second shot stand where the last operation that used it left them."""
    try:
        native_library()
    except KernelError as error:
        pytest.skip(str(error))
    store, start, wrong = SharedStore(), threading.Barrier(NUM_RANKS), [-1] * NUM_RANKS

    def run(rank: int) -> None:
        group = SharedMemoryBackend(rank, NUM_RANKS, store)
        group._kernel._group.step = behind % (1 << 32)  # type: ignore[attr-defined]
        group._region._flags[rank, 0] = behind % (1 << 32)
        start.wait(LIMIT_S)
        group.all_reduce(torch.ones(1), num_shots=1)
        x = torch.ones(1 << 15)
        group.all_reduce(x, num_shots=2)
        wrong[rank] = int((x != NUM_RANKS).sum())
        start.wait(LIMIT_S)
        group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert wrong == [0] * NUM_RANKS
