"""Recorded calls of kernels: run again, they do what the kernels would do with what their inputs hold now."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import Capture, KernelSet, LinearKernel, Matrix

HIDDEN, VOCAB, EPS = 48, 70, 1e-5


class Chain:
    """Looked up, normed, multiplied, gated: every result is allocated by its kernel, but the last."""

    def __init__(self, kernels: KernelSet, rows: int, dtype: torch.dtype) -> None:
        linear, norm, gated = kernels.linear, kernels.add_rms_norm, kernels.silu_and_mul
        assert linear is not None
        assert norm is not None
        assert gated is not None
        self.linear, self.norm, self.gated = linear, norm.apply, gated.apply
        generator = torch.Generator().manual_seed(1)
        self.index = torch.zeros(rows, dtype=torch.int64)
        self.table, self.weight = (
            torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype),
            torch.ones(HIDDEN),
        )
        self.weight = self.weight.to(dtype)
        self.up = packed(self.linear, torch.randn(2 * HIDDEN, HIDDEN, generator=generator).to(dtype))
        self.out = torch.zeros(rows, HIDDEN, dtype=dtype)

    def __call__(self) -> torch.Tensor:
        x = self.linear.gather(self.table, self.index, self.table.dtype)
        normed = self.norm(x, x.view(x.shape), self.weight, EPS)
        wide = self.up.multiply(normed)
        gated = self.gated(wide)
        self.norm(self.out, gated, self.weight, EPS)
        return self.out


def packed(linear: LinearKernel, weight: torch.Tensor) -> Matrix:
    outputs, inputs = weight.shape
    matrix = linear.empty(outputs, inputs, weight.dtype, torch.zeros)
    matrix.store(0, weight)
    return matrix


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "helped"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    found = cpu_kernels(request.param)
    if found.record is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(scope="module")
def record(kernels: KernelSet) -> Capture:
    found = kernels.record
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_replay_computes_with_what_the_inputs_hold_now(
    kernels: KernelSet, record: Capture, rows: int, dtype: torch.dtype
) -> None:
    chain = Chain(kernels, rows, dtype)
    if not chain.linear.multiplies(dtype, dtype):
        pytest.skip("this CPU does not multiply bfloat16")
    replay = record(chain)
    assert replay is not None
    generator = torch.Generator().manual_seed(rows)
    for _ in range(5):
        chain.index.random_(0, VOCAB, generator=generator)
        expected = chain.out.zero_().clone()
        expected.copy_(chain())
        assert expected.isfinite().all()
        assert expected.any()
        chain.out.zero_()
        for _ in range(50):  # what the recording does not hold would be taken by others
            torch.full((rows, 2 * HIDDEN), torch.nan, dtype=dtype)
        replay()
        assert torch.equal(chain.out, expected)


def test_what_torch_computes_is_not_recorded(kernels: KernelSet, record: Capture) -> None:
    chain = Chain(kernels, 2, torch.float32)
    other = torch.ones(2, HIDDEN)
    works = {
        "new": lambda: chain().add(other),
        "in place": lambda: chain().add_(0),
        "copy": lambda: chain().clone(),
        "number": lambda: chain()[0, 0].item(),
        "conversion": lambda: chain().double(),
        "nothing": lambda: other.view(-1),
    }
    for name, work in works.items():
        assert record(work) is None, name
    assert record(lambda: chain().view(-1)[3:].view(1, -1).t()) is not None


def test_work_between_kernels_is_repeated_in_its_place(kernels: KernelSet, record: Capture) -> None:
    between, chain, count = kernels.between, Chain(kernels, 2, torch.float32), 0
    assert between is not None

    def add_up() -> None:  # by torch, and by kernels: neither is recorded
        nonlocal count
        count += 1
        chain.out.mul_(2)
        chain()

    def work() -> None:
        chain()
        between(add_up)
        chain()

    replay = record(work)
    assert replay is not None
    for index in ([1, 2], [3, 0]):
        chain.index.copy_(torch.tensor(index))
        chain.out.zero_()
        work()
        expected = chain.out.clone()
        chain.out.zero_()
        replay()
        assert torch.equal(chain.out, expected)
    assert count == 5
    assert record(lambda: between(add_up)) is None, "no kernel runs"


def test_work_is_done_while_it_is_recorded_or_refused(kernels: KernelSet, record: Capture) -> None:
    chain = Chain(kernels, 2, torch.float32)
    expected = chain().clone()
    chain.out.zero_()
    assert record(chain) is not None
    assert torch.equal(chain.out, expected)
    chain.out.zero_()
    assert record(lambda: chain().clone()) is None
    assert torch.equal(chain.out, expected)


def test_a_replay_fails_as_the_kernel_would(kernels: KernelSet, record: Capture) -> None:
    chain = Chain(kernels, 2, torch.float32)
    replay = record(chain)
    assert replay is not None
    chain.index[1] = VOCAB
    with pytest.raises(KernelError, match="gather: an index is outside the table"):
        replay()
    chain.index[1] = 0
    replay()


def test_after_work_that_failed_nothing_is_recorded_on(kernels: KernelSet, record: Capture) -> None:
    chain = Chain(kernels, 1, torch.float32)

    def failing() -> None:
        chain()
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        record(failing)
    assert not call_is_kept(chain)


def call_is_kept(chain: Chain) -> bool:
    """Whether what a call made now outlives it: a recording holds what its jobs point to."""
    made = chain.linear.gather(chain.table, chain.index, torch.float32)
    gone = weakref.ref(made)
    del made
    gc.collect()
    return gone() is not None


def test_the_calls_of_another_thread_are_not_recorded(kernels: KernelSet, record: Capture) -> None:
    """Which also holds after a fork: in the child, the thread that recorded is gone, and never ends it."""
    chain, other = Chain(kernels, 2, torch.float32), Chain(kernels, 2, torch.float32)
    kept = {}

    def work() -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            kept["other"] = pool.submit(call_is_kept, other).result()
        kept["own"] = call_is_kept(chain)
        return chain()

    assert record(work) is not None
    assert kept == {"other": False, "own": True}
