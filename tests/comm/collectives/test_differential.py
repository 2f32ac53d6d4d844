"""Every collective in shared memory against gloo, over all dtypes, odd sizes and views."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from sagellm.comm.collectives._buffers import REDUCIBLE, as_bytes
from sagellm.comm.collectives.shared_memory import SharedMemoryBackend
from sagellm.core.protocols.collectives import CommBackendProtocol, ReduceOp
from tests.comm.collectives.ranks import group, passed, run_ranks
from tests.effort import usual

MOVED = (*REDUCIBLE, torch.bool, torch.complex64)
SIZES = (0, 1, 1023, 4096 + 5)
FEW_SIZES = (0, 1023)
"""On more than two ranks, which share the cores."""
LARGE = 200_001
"""Elements that take several steps with the smallest slots."""
SMALL_SLOTS = {"slot_bytes": 8192, "cell_bytes": 4096, "one_shot_bytes": 4096}


def values(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.randn(size, generator=generator, dtype=torch.float64) * 100
        return drawn.to(dtype)
    low, high = (0, 2) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return torch.randint(low, high, (size,), generator=generator, dtype=torch.int64).to(dtype)


def layouts(dtype: torch.dtype, size: int, seed: int) -> Iterator[torch.Tensor]:
    """The same values as a contiguous tensor, as every other element, and as a column of a matrix."""
    yield values(dtype, size, seed)
    yield torch.zeros(2 * size, dtype=dtype)[::2].copy_(values(dtype, size, seed))
    yield torch.zeros(size, 3, dtype=dtype)[:, 1].copy_(values(dtype, size, seed))


def same(
    found: torch.Tensor, expected: torch.Tensor, magnitudes: torch.Tensor | None, world_size: int
) -> None:
    """Equal bits, but for the sums of three and more floating-point numbers: gloo's order is its own.

    Then each of the two sums is off by at most (n - 1) * eps / 2 of the sum of the magnitudes, to first order
    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2); 1 % covers the higher ones.
    """
    if magnitudes is None:
        assert torch.equal(found.contiguous().view(-1), expected.contiguous().view(-1))
    else:
        bound = 1.01 * (world_size - 1) * torch.finfo(found.dtype).eps * magnitudes
        assert ((found.double() - expected.double()).abs() <= bound).all()


def magnitudes_of(name: str, dtype: torch.dtype, size: int, rank: int, world_size: int) -> torch.Tensor:
    """Of each element of the rank's result, the sum of the ranks' absolute values."""
    whole = size * world_size if name == "reduce_scatter" else size
    total = sum(values(dtype, whole, seed).double().abs() for seed in range(world_size))
    assert isinstance(total, torch.Tensor)
    return total[rank * size : (rank + 1) * size] if name == "reduce_scatter" else total


Scene = Callable[[CommBackendProtocol, torch.dtype, int, int, ReduceOp], torch.Tensor]


def all_reduced(
    backend: CommBackendProtocol, dtype: torch.dtype, size: int, layout: int, op: ReduceOp
) -> torch.Tensor:
    buffer = list(layouts(dtype, size, backend.rank))[layout]
    backend.all_reduce(buffer, op).wait()
    return buffer


def reduce_scattered(
    backend: CommBackendProtocol, dtype: torch.dtype, size: int, layout: int, op: ReduceOp
) -> torch.Tensor:
    buffer = list(layouts(dtype, size * backend.world_size, backend.rank))[layout]
    output, kept = list(layouts(dtype, size, 99))[layout], buffer.clone()
    backend.reduce_scatter(output, buffer, op).wait()
    assert torch.equal(buffer, kept)
    return output


def all_gathered(
    backend: CommBackendProtocol, dtype: torch.dtype, size: int, layout: int, op: ReduceOp
) -> torch.Tensor:
    output = list(layouts(dtype, size * backend.world_size, 99))[layout]
    backend.all_gather(output, list(layouts(dtype, size, backend.rank))[layout]).wait()
    return output


def broadcast(
    backend: CommBackendProtocol, dtype: torch.dtype, size: int, layout: int, op: ReduceOp
) -> torch.Tensor:
    buffer = list(layouts(dtype, size, backend.rank))[layout]
    backend.broadcast(buffer, backend.world_size - 1).wait()
    return buffer


def exchanged(
    backend: CommBackendProtocol, dtype: torch.dtype, size: int, layout: int, op: ReduceOp
) -> torch.Tensor:
    """Rank r sends size + r + i elements to rank i, and none to the next rank."""
    ranks, rank = range(backend.world_size), backend.rank

    def count(source: int, target: int) -> int:
        return 0 if target == (source + 1) % backend.world_size else size + source + target

    sent, expected = [count(rank, i) for i in ranks], [count(i, rank) for i in ranks]
    buffer = list(layouts(dtype, sum(sent), rank))[layout]
    output = list(layouts(dtype, sum(expected), 99))[layout]
    backend.all_to_all(output, buffer, expected, sent).wait()
    equal = list(layouts(dtype, size * backend.world_size, 99))[layout]
    backend.all_to_all(equal, list(layouts(dtype, len(equal), rank))[layout]).wait()
    return torch.cat([output, equal])


def passed_on(
    backend: CommBackendProtocol, dtype: torch.dtype, size: int, layout: int, op: ReduceOp
) -> torch.Tensor:
    """Each rank sends two messages to the next, which receives them in the other order by tag."""
    following, before = (backend.rank + 1) % backend.world_size, (backend.rank - 1) % backend.world_size
    first, second = (list(layouts(dtype, size, 10 * tag + backend.rank))[layout] for tag in (1, 2))
    received = [list(layouts(dtype, size, 99))[layout] for _ in range(2)]
    works = [backend.send(first, following, tag=1), backend.send(second, following, tag=2)]
    works += [backend.recv(received[1], before, tag=2), backend.recv(received[0], before, tag=1)]
    for work in works:
        assert work.wait()
    return torch.cat(received)


SCENES: dict[str, tuple[Scene, bool]] = {
    "all_reduce": (all_reduced, True),
    "reduce_scatter": (reduce_scattered, True),
    "all_gather": (all_gathered, False),
    "broadcast": (broadcast, False),
    "all_to_all": (exchanged, False),
    "send and recv": (passed_on, False),
}


def cases(name: str, world_size: int) -> Iterator[tuple[torch.dtype, int, int, ReduceOp]]:
    """Dtype, size, layout and reduction. The layouts take turns, and so do maximum and minimum."""
    reduces = SCENES[name][1]
    for place, dtype in enumerate(REDUCIBLE if reduces else MOVED):
        sizes = SIZES if world_size == 2 else FEW_SIZES
        for number, size in enumerate((*sizes, LARGE if dtype is torch.float32 else 33)):
            for op in (ReduceOp.SUM, (ReduceOp.MAX, ReduceOp.MIN)[(place + number) % 2])[: 1 + reduces]:
                yield dtype, size, (place + number) % 3, op


def compare(rank: int, world_size: int, folder: str) -> int:
    ours = group("shared_memory", rank, world_size, folder, **SMALL_SLOTS)
    gloo = group("torch_distributed", rank, world_size, folder)
    compared = 0
    for name, (scene, reduces) in SCENES.items():
        for dtype, size, layout, op in cases(name, world_size):
            expected = scene(gloo, dtype, size, layout, op)
            found = scene(ours, dtype, size, layout, op)
            adds = reduces and op is ReduceOp.SUM and world_size > 2 and dtype.is_floating_point
            try:
                same(
                    found,
                    expected,
                    magnitudes_of(name, dtype, size, rank, world_size) if adds else None,
                    world_size,
                )
            except AssertionError as error:
                raise AssertionError(f"{name}, {dtype}, {size}, {op}: {found}, {expected}") from error
            compared += 1
    ours.barrier().wait()
    ours.close()
    gloo.close()
    return compared


@pytest.mark.parametrize("world_size", usual([2, 3], [2, 3, 4]))
def test_shared_memory_gives_what_gloo_gives(world_size: int) -> None:
    assert min(passed(run_ranks(world_size, compare))) > 150


def compare_awkward(rank: int, world_size: int, folder: str) -> None:
    """Lazy conjugates and negatives, results that need gradients, and inputs in the memory of the result."""
    made = [group(name, rank, world_size, folder) for name in ("shared_memory", "torch_distributed")]
    mine = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    everyone = torch.cat([torch.tensor([1 - 2j, 3 + 1j]) * (r + 1) for r in range(world_size)])
    for backend in made:
        gathered = torch.zeros(2 * world_size, dtype=torch.complex64)
        backend.all_gather(gathered, mine.conj()).wait()
        assert torch.equal(gathered, everyone)
        backend.all_gather(gathered.conj(), mine.conj()).wait()
        assert torch.equal(gathered, everyone.conj())
        lazy = torch.tensor([1 + 2j]).conj().imag
        assert lazy.is_neg()
        backend.all_reduce(lazy).wait()
        assert lazy.tolist() == [-2.0 * world_size]
        leaf = torch.ones(4, 3, requires_grad=True)
        backend.all_reduce(leaf.detach()[:, 1]).wait()
        assert leaf[:, 1].tolist() == [float(world_size)] * 4
        large = torch.zeros(world_size * LARGE)
        part = large[7 : 7 + LARGE]
        part.copy_(torch.arange(LARGE) + rank)
        backend.all_gather(large, part).wait()
        for other in range(world_size):
            assert torch.equal(large[other * LARGE : (other + 1) * LARGE], torch.arange(LARGE) + float(other))
        backend.reduce_scatter(large[1 : LARGE + 1], large).wait()
        assert torch.equal(large[1 : LARGE + 1], world_size * (torch.arange(LARGE) + float(rank)))
        for buffer in (torch.zeros(1).expand(4), torch.zeros(6).as_strided((3, 2), (1, 1))):
            with pytest.raises(ValueError, match="elements of a result share memory"):
                backend.all_reduce(buffer)
            with pytest.raises(ValueError, match="elements of a result share memory"):
                backend.recv(buffer, 0)
        backend.barrier().wait()
        backend.close()


def test_no_form_of_a_tensor_gives_a_wrong_number() -> None:
    passed(run_ranks(2, compare_awkward))


def compare_twin(rank: int, world_size: int, folder: str) -> int:
    fast = group("shared_memory", rank, world_size, folder, **SMALL_SLOTS)
    slow = group("shared_memory", rank, world_size, folder, native=False, **SMALL_SLOTS)
    assert isinstance(fast, SharedMemoryBackend)
    assert isinstance(slow, SharedMemoryBackend)
    assert (fast.is_native, slow.is_native) == (True, False)
    compared = 0
    for name, (scene, _) in SCENES.items():
        for dtype, size, layout, op in cases(name, 3):
            expected = scene(slow, dtype, size, layout, op)
            assert torch.equal(as_bytes(expected), as_bytes(scene(fast, dtype, size, layout, op))), name
            compared += 1
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for op in ReduceOp:
            results = [special(dtype, rank) for _ in range(3)]
            slow.all_reduce(results[0], op).wait()
            fast.all_reduce(results[1], op, num_shots=1).wait()
            fast.all_reduce(results[2], op, num_shots=2).wait()
            for found in results[1:]:
                torch.testing.assert_close(found, results[0], rtol=0, atol=0, equal_nan=True)
    return compared


def special(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Every pair of: not a number, infinities, zeros, subnormal, largest, and numbers halfway between two."""
    limits = torch.finfo(dtype)
    listed = [math.nan, math.inf, -math.inf, 0.0, -0.0, limits.tiny, limits.tiny / 4, limits.max, -limits.max]
    listed += [limits.smallest_normal * 0.75, 1.0, limits.eps, 1.5 * limits.eps, -1.0, 2.0**-24, 65519.0]
    row = torch.tensor(listed, dtype=torch.float64).to(dtype)
    return row.repeat(len(row)) if rank % 2 else row.repeat_interleave(len(row))


@pytest.mark.parametrize("world_size", usual([2], [2, 3]))
def test_the_kernel_and_its_twin_give_equal_bits(world_size: int) -> None:
    assert min(passed(run_ranks(world_size, compare_twin))) > 150
