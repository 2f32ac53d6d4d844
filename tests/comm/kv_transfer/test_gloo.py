"""Why there is no transport `gloo`: what a receive of `torch.distributed` cannot do.

A test that fails says that it can now.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

Groups = tuple[Any, Any]
NUMBERS = 1 << 16


@pytest.fixture
def groups() -> Iterator[Groups]:
    """Both ends of a group of two, in this process."""
    from torch._C._distributed_c10d import HashStore

    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(dist.ProcessGroupGloo, store, rank, 2, timedelta(seconds=20)) for rank in (0, 1)]
        yield made[0].result(), made[1].result()


def test_a_receive_cannot_be_polled(groups: Groups) -> None:
    """Its bytes are there, and it is not completed until a thread waits for it."""
    sender, receiver = groups
    target = torch.zeros(NUMBERS)
    work = receiver.recv([target], 0, 1)
    sender.send([torch.ones(NUMBERS)], 1, 1).wait()
    end_s = time.monotonic() + 10
    while not target[-1].item() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert target.sum().item() == NUMBERS
    assert not work.is_completed()
    work.wait()
    assert work.is_completed()


def test_a_receive_cannot_be_given_up(groups: Groups) -> None:
    """Python cannot abort it; waiting with a limit closes the connection, for all other chunks too."""
    sender, receiver = groups
    work = receiver.recv([torch.zeros(NUMBERS)], 0, 1)
    assert not hasattr(work, "abort")
    with pytest.raises(RuntimeError, match="Timed out"):
        work.wait(timedelta(milliseconds=50))
    with pytest.raises(RuntimeError, match=r"closure|closed|reset|peer"):
        receiver.recv([torch.zeros(NUMBERS)], 0, 2).wait(timedelta(seconds=5))
    del sender


def test_a_group_waits_for_its_peer() -> None:
    """Making one blocks a thread until the other side makes it, or for all of its time."""
    from torch._C._distributed_c10d import HashStore

    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)timeout|timed out"):
        dist.ProcessGroupGloo(HashStore(), 0, 2, timedelta(seconds=0.5))
    assert time.monotonic() - began_s > 0.4
