"""What every registered backend of collectives must do, on two ranks."""

from __future__ import annotations

import pytest
import torch

from sagellm.core.errors import CommError
from sagellm.core.protocols.collectives import CommBackendProtocol, ReduceOp, WorkStatus
from sagellm.core.registry import members, registry
from tests.comm.collectives.ranks import group, passed, run_ranks

BACKENDS = registry("collectives").names()


def test_there_are_backends() -> None:
    assert {"auto", "shared_memory", "torch_distributed"} <= set(BACKENDS)


@pytest.mark.parametrize("name", BACKENDS)
def test_it_has_every_member(name: str) -> None:
    plugin = registry("collectives").get(name)
    assert {member for member in members(CommBackendProtocol) if not hasattr(plugin, member)} <= {
        "rank", "world_size",
    }  # fmt: skip


def keeps_contract(rank: int, world_size: int, folder: str, name: str) -> None:
    backend = group(name, rank, world_size, folder)
    assert (backend.rank, backend.world_size) == (rank, world_size)
    other = 1 - rank
    buffer = torch.tensor([1.0 + rank, 5.0 - rank])
    work = backend.all_reduce(buffer, ReduceOp.MAX)
    assert work.wait()
    assert work.poll() is WorkStatus.DONE
    assert work.error() is None
    assert buffer.tolist() == [2.0, 5.0]
    gathered = torch.zeros(2, 3, dtype=torch.int16)
    backend.all_gather(gathered, torch.full((3,), rank, dtype=torch.int16)).wait()
    assert gathered.tolist() == [[0, 0, 0], [1, 1, 1]]
    piece = torch.zeros(1)
    backend.reduce_scatter(piece, torch.tensor([1.0, 10.0])).wait()
    assert piece.tolist() == [[2.0], [20.0]][rank]
    text = torch.tensor([rank == 1] * 3)
    backend.broadcast(text, 1).wait()
    assert text.tolist() == [True] * 3
    exchanged = torch.zeros(3, dtype=torch.int64)
    backend.all_to_all(
        exchanged, torch.arange(3) + 10 * rank, [1, 2][:: 1 - 2 * rank], [1, 2][:: 1 - 2 * rank]
    ).wait()
    assert exchanged.tolist() == [[0, 10, 11], [1, 2, 12]][rank]
    received = torch.zeros(2)
    sending, receiving = (
        backend.send(torch.ones(2) * rank, other, tag=3),
        backend.recv(received, other, tag=3),
    )
    assert sending.wait(30)
    assert receiving.wait(30)
    assert received.tolist() == [float(other)] * 2
    refuses(backend)
    backend.barrier().wait()
    backend.barrier().wait()
    backend.close()
    backend.close()
    with pytest.raises(CommError):
        backend.barrier().wait()


def refuses(backend: CommBackendProtocol) -> None:
    """Bad input raises before anything is sent, so that ranks need not agree on it."""
    ones = torch.ones(4)
    with pytest.raises(ValueError, match="cannot be reduced"):
        backend.all_reduce(ones.bool())
    with pytest.raises(ValueError, match="'mean' is not a valid ReduceOp"):
        backend.all_reduce(ones, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="all_gather: the whole has 4 elements, not 2 times 4"):
        backend.all_gather(ones, ones)
    with pytest.raises(ValueError, match="dtypes differ"):
        backend.reduce_scatter(torch.ones(2, dtype=torch.float64), ones)
    with pytest.raises(ValueError, match="not 2 equal pieces"):
        backend.all_to_all(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match="add up to 4"):
        backend.all_to_all(ones, ones, [2, 2], [1, 2])
    with pytest.raises(ValueError, match="source must be a rank from 0 to 1, got 2"):
        backend.broadcast(ones, 2)
    with pytest.raises(ValueError, match="target must be a rank"):
        backend.send(ones, -1)
    with pytest.raises(ValueError, match="tag must be a whole number from 0"):
        backend.send(ones, 0, tag=-1)
    with pytest.raises(ValueError, match="elements of a result share memory"):
        backend.recv(torch.ones(1).expand(4), 0)


@pytest.mark.parametrize("name", BACKENDS)
def test_it_keeps_the_contract(name: str) -> None:
    passed(run_ranks(2, keeps_contract, name))


def alone(rank: int, world_size: int, folder: str) -> None:
    for name in BACKENDS:
        backend = group(name, rank, world_size, folder)
        buffer = torch.arange(3.0)
        backend.all_reduce(buffer).wait()
        backend.broadcast(buffer, 0).wait()
        gathered = torch.zeros(3)
        backend.all_gather(gathered, buffer).wait()
        backend.all_to_all(buffer, gathered).wait()
        backend.reduce_scatter(gathered, buffer).wait()
        backend.barrier().wait()
        assert gathered.tolist() == buffer.tolist() == [0.0, 1.0, 2.0]
        backend.close()


def test_a_rank_may_be_alone() -> None:
    passed(run_ranks(1, alone))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(name: str, rank: int, world_size: int) -> None:
    with pytest.raises(Exception, match="rank must be from 0 to world_size - 1"):
        registry("collectives").create(name, rank=rank, world_size=world_size, store=None)
