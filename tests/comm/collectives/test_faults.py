"""Ranks that die, leave, hang, are interrupted, or submit something else: no other rank waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.core.errors import CommError
from sagellm.core.protocols.collectives import WorkStatus
from tests.comm.collectives.ranks import DeadRankError, die, group, passed, run_ranks

BACKENDS: dict[str, dict[str, Any]] = {
    "shared_memory": {},
    "twin": {"native": False},
    "torch_distributed": {},
}


def made(name: str, rank: int, world_size: int, folder: str, **options: Any) -> Any:
    backend = "shared_memory" if name == "twin" else name
    return group(backend, rank, world_size, folder, **BACKENDS[name], **options)


def killed_in_the_middle(rank: int, world_size: int, folder: str, name: str) -> str:
    backend = made(name, rank, world_size, folder)
    buffer = torch.ones(1 << 20)
    backend.barrier().wait()  # all have joined
    if rank == 1:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(CommError) as raised:
        [backend.all_reduce(buffer).wait() for _ in iter(int, 1)]
    with pytest.raises(CommError):
        backend.barrier().wait()
    with pytest.raises(CommError):
        backend.send(buffer, 0).wait()
    backend.close()
    backend.close()
    return str(raised.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_killed_rank_fails_the_work_of_the_others(name: str) -> None:
    first, second, third = run_ranks(3, killed_in_the_middle, name)
    assert isinstance(second, DeadRankError)
    for answer in passed([first, third]):
        assert "rank 1 has died" in answer or "found the group broken" in answer or "a rank died" in answer


def killed_before_its_message(rank: int, world_size: int, folder: str, name: str) -> str:
    backend = made(name, rank, world_size, folder)
    joined = Path(folder) / "joined"
    if rank == 1:
        while not joined.exists():  # who dies earlier fails the connecting
            time.sleep(0.01)
        die()
    joined.touch()
    work = backend.recv(torch.empty(10), 1)
    while work.poll() is WorkStatus.PENDING:
        time.sleep(0.01)
    assert work.poll() is WorkStatus.FAILED
    with pytest.raises(CommError) as raised:
        work.wait()
    assert work.error() is not None
    return str(raised.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_killed_rank_fails_a_receive(name: str) -> None:
    answer, _ = run_ranks(2, killed_before_its_message, name)
    passed([answer])
    assert "died" in answer


def killed_before_it_joins(rank: int, world_size: int, folder: str) -> str:
    if rank == 1:
        die()
    with pytest.raises(CommError, match="rank 0 could not join its group") as raised:
        group("torch_distributed", rank, world_size, folder, timeout_s=1.0)
    return str(raised.value)


def test_a_rank_that_dies_before_it_joins_fails_the_joining_of_the_others() -> None:
    answer, _ = run_ranks(2, killed_before_it_joins)
    passed([answer])
    assert answer.startswith("rank 0 could not join its group: ")


def left(rank: int, world_size: int, folder: str) -> str:
    backend = group("shared_memory", rank, world_size, folder)
    backend.barrier().wait()
    if rank == 1:
        backend.close()
        return ""
    with pytest.raises(CommError, match="rank 1 has left the group"):
        backend.barrier().wait()
    with pytest.raises(CommError):
        backend.barrier()
    backend.close()
    with pytest.raises(CommError, match="left"):
        backend.barrier()
    return ""


def test_a_rank_that_leaves_fails_those_that_wait_for_it() -> None:
    passed(run_ranks(2, left))


def closed(rank: int, world_size: int, folder: str, name: str) -> str:
    """Rank 1 leaves and stays alive, so no end of a process tells the others."""
    backend = group(name, rank, world_size, folder)
    backend.barrier().wait()
    until_s = time.monotonic() + 20.0
    if rank == 1:
        backend.close()
        while len(list(Path(folder).glob("ended-*"))) < world_size - 1 and time.monotonic() < until_s:
            time.sleep(0.01)
        return ""
    with pytest.raises(CommError):
        backend.barrier().wait()
    assert time.monotonic() < until_s
    (Path(folder) / f"ended-{rank}").touch()
    return ""


@pytest.mark.parametrize("name", ["shared_memory", "torch_distributed", "auto"])
def test_a_rank_that_closes_its_group_ends_the_wait_of_the_others(name: str) -> None:
    passed(run_ranks(3, closed, name))


def hung(rank: int, world_size: int, folder: str, name: str) -> str:
    backend = made(name, rank, world_size, folder, timeout_s=0.5)
    backend.barrier().wait()
    if rank == 1:
        time.sleep(2)
        return ""
    began_s = time.monotonic()
    with pytest.raises(CommError, match=r"has not answered for 0\.5 s|has found the group broken"):
        backend.all_reduce(torch.ones(3)).wait()
    assert time.monotonic() - began_s < 2
    return ""


@pytest.mark.parametrize("name", ["shared_memory", "twin"])
def test_a_rank_that_hangs_fails_those_that_wait_for_it(name: str) -> None:
    passed(run_ranks(3, hung, name))


def interrupted(rank: int, world_size: int, folder: str) -> str:
    backend = group("shared_memory", rank, world_size, folder)
    backend.barrier().wait()
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            backend.barrier()
        with pytest.raises(CommError, match="rank 0 was interrupted"):
            backend.barrier()
        return ""
    time.sleep(1)
    with pytest.raises(CommError, match="rank 0 has found the group broken"):
        backend.recv(torch.empty(1), 0).wait()
    return ""


def test_an_interrupted_wait_ends() -> None:
    passed(run_ranks(2, interrupted))


def called_within(rank: int, world_size: int, folder: str) -> str:
    """The handler of a signal calls the backend that waits in an operation."""
    backend = group("shared_memory", rank, world_size, folder)
    backend.barrier().wait()
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: backend.barrier())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(CommError, match="rank 0 was called within an operation"):
            backend.all_reduce(torch.ones(3))
    else:
        time.sleep(1)
    buffer = torch.ones(3)
    with pytest.raises(CommError):  # rank 0 had shown its part of the first
        [backend.all_reduce(buffer).wait() for _ in range(2)]
    assert buffer.tolist() in ([1.0] * 3, [2.0] * 3)
    return ""


def test_a_call_within_an_operation_breaks_the_group() -> None:
    passed(run_ranks(2, called_within))


def disagreeing(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> str:
    backend: Any = group("shared_memory", rank, world_size, folder, **options)
    with pytest.raises(ValueError, match=r"rank 0: all_reduce of 5 float32.*rank 1: all_reduce of 6 float32"):
        backend.all_reduce(torch.ones(5 + rank))
    with pytest.raises(ValueError, match=r"rank 0: all_reduce of 5 float32.*rank 1: all_reduce of 5 float64"):
        backend.all_reduce(torch.ones(5, dtype=torch.float64 if rank else torch.float32))
    with pytest.raises(ValueError, match=r"rank 0: barrier.*rank 1: broadcast"):
        backend.broadcast(torch.ones(1), 0) if rank else backend.barrier()
    with pytest.raises(ValueError, match="what a rank sends is not what the other expects"):
        backend.all_to_all(torch.ones(3), torch.ones(3), [1, 2], [1, 2])
    with pytest.raises(ValueError, match="different operations"):
        backend.all_reduce(torch.ones(1 << (10 + 10 * rank)))
    buffer = torch.full((3,), 1.0 + rank)
    backend.all_reduce(buffer).wait()  # the group goes on
    assert buffer.tolist() == [3.0, 3.0, 3.0]
    if rank == 0:
        backend.send(torch.ones(4), 1).wait()
    else:
        with pytest.raises(ValueError, match="rank 0 sent 16 bytes with tag 0, the buffer has 12"):
            backend.recv(torch.ones(3), 0).wait()
    backend.barrier().wait()
    return ""


@pytest.mark.parametrize("options", [{}, {"native": False}], ids=["kernel", "twin"])
def test_ranks_that_submit_different_operations_learn_it(options: dict[str, Any]) -> None:
    passed(run_ranks(2, disagreeing, options))


def absent(rank: int, world_size: int, folder: str) -> str:
    if rank == 0:
        with pytest.raises(CommError, match=r"no sign of rank 1 of the group within 0\.3 s"):
            group("shared_memory", rank, world_size, folder, timeout_s=0.3)
    return ""


def test_a_rank_that_never_comes_is_named() -> None:
    passed(run_ranks(2, absent))


def mapped(rank: int, world_size: int, folder: str) -> list[str]:
    before = set(Path("/dev/shm").iterdir())
    backend = group("shared_memory", rank, world_size, folder)
    backend.barrier().wait()
    assert set(Path("/dev/shm").iterdir()) <= before
    if rank == 0:
        die()
    with pytest.raises(CommError, match="rank 0 has died"):
        backend.barrier().wait()
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return [line for line in lines if "sagellm-collectives" in line]


def test_the_memory_has_no_name_that_could_remain() -> None:
    """The kernel frees it with the last process that maps it."""
    _, maps = run_ranks(2, mapped)
    passed([maps])
    assert maps
    assert all(line.endswith("(deleted)") for line in maps)


def crossing(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> str:
    """Both send far more than the ring holds before either receives, then a collective follows."""
    backend = group("shared_memory", rank, world_size, folder, **options)
    sent = torch.arange(500_000, dtype=torch.int32) * (rank + 1)
    received = [torch.empty_like(sent) for _ in range(3)]
    works = [backend.send(sent, 1 - rank, tag=tag) for tag in (1, 2, 3)]
    works += [backend.recv(received[tag - 1], 1 - rank, tag=tag) for tag in (3, 1, 2)]
    if rank == 0:
        assert all(work.wait() for work in works)
    total = torch.ones(2)
    backend.all_reduce(total).wait()
    assert {work.poll() for work in works} == {WorkStatus.DONE}
    expected = torch.arange(500_000, dtype=torch.int32) * (2 - rank)
    assert all(torch.equal(buffer, expected) for buffer in received)
    to_self = torch.zeros(3)
    works = [backend.recv(to_self, rank), backend.send(torch.ones(3), rank)]
    assert all(work.wait() for work in works)
    assert to_self.tolist() == [1.0, 1.0, 1.0]
    if rank == 0:
        last = backend.recv(to_self, 1, tag=9)
        assert last.wait(0.05) is False
        backend.send(torch.zeros(3), 1, tag=8)
        assert last.wait()
    else:
        backend.recv(to_self, 0, tag=8).wait()
        backend.send(to_self, 0, tag=9).wait()
    return ""


@pytest.mark.parametrize("options", [{}, {"native": False}], ids=["kernel", "twin"])
def test_messages_that_cross(options: dict[str, Any]) -> None:
    passed(run_ranks(2, crossing, options))
