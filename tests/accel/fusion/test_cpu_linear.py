"""The C++ linear kernels against plain torch, on every instruction set that this CPU has."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.fusion.cpu.cpu_level import LEVELS, CpuLevel, cpu_level, this_cpu_flags
from sagellm.accel.fusion.cpu.library import compiled, find_compiler
from sagellm.accel.fusion.cpu.linear import linear_kernels
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import FusedKernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATOL, RTOL = 2e-5, 2e-5
SHAPES = (
    (1, 1, 1), (1, 7, 5), (2, 48, 64), (3, 49, 100), (8, 97, 1024), (9, 13, 33), (15, 24, 31), (16, 25, 32),
    (17, 12, 1025), (33, 11, 2048), (47, 100, 96), (130, 95, 40), (300, 13, 2080),
)  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> Sequence[FusedKernel]:
    found = cpu_kernels().linear
    if not found:
        pytest.skip("no C++ compiler")
    return found


def tensors(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias; results are of about unit size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / math.sqrt(max(inputs, 1))
    return x, weight.to(dtype), torch.randn(outputs, generator=generator)


def compare(kernel: FusedKernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """In float64, so that the only rounding is the kernel's."""
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    found = kernel.apply(x, weight, bias)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), expected, atol=ATOL, rtol=RTOL, equal_nan=True)


def check_shapes(kernels: Sequence[FusedKernel]) -> int:
    compared = 0
    for kernel in kernels:
        for dtype in DTYPES:
            for shape in SHAPES:
                x, weight, bias = tensors(*shape, dtype)
                if not kernel.supports(x, weight).usable:
                    continue
                compare(kernel, x, weight, None)
                compare(kernel, x, weight, bias)
                compared += 1
    return compared


def test_shapes_and_dtypes(kernels: Sequence[FusedKernel]) -> None:
    assert check_shapes(kernels) == len(SHAPES) * (3 + 2)  # the second kernel leaves float32 weights to torch


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in LEVELS if level.cpu_flags <= this_cpu_flags()])
def test_every_level_of_this_cpu(level: CpuLevel) -> None:
    assert check_shapes(linear_kernels(compiled("linear", level, find_compiler()), level)) == len(SHAPES) * 5


@settings(max_examples=150)
@given(
    rows=st.integers(0, 70),
    outputs=st.integers(0, 130),
    inputs=st.integers(0, 300),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["rows", "columns", "strided", "repeated"]),
    gap=st.integers(0, 3),
    with_bias=st.booleans(),
    threads=st.integers(1, 2),
    which=st.integers(0, 1),
)
def test_any_strides(
    kernels: Sequence[FusedKernel], rows: int, outputs: int, inputs: int, dtype: torch.dtype, layout: str,
    gap: int, with_bias: bool, threads: int, which: int,
) -> None:  # fmt: skip
    wide = tensors(2 * rows, outputs, 2 * inputs + gap, dtype, seed=rows)
    x, weight = wide[0][:rows, :inputs], wide[1][:, gap : gap + inputs]
    if layout == "columns":
        x = x.t().contiguous().t()
    elif layout == "strided":
        x = wide[0][::2, : 2 * inputs : 2]
    elif layout == "repeated":
        x = wide[0][:1, :inputs].expand(rows, inputs)
    if not kernels[which].supports(x, weight).usable:
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(kernels[which], x, weight, wide[2] if with_bias else None)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_where_they_belong(
    kernels: Sequence[FusedKernel], dtype: torch.dtype, bad: float
) -> None:
    """Also behind the end of a row: an odd number of inputs, whose neighbour is the next row's first."""
    chance = random.Random(3)
    for kernel in kernels:
        for rows, outputs, inputs in ((1, 9, 33), (5, 26, 95), (20, 30, 64)):
            x, weight, bias = tensors(rows, outputs, inputs, dtype)
            if not kernel.supports(x, weight).usable:
                continue
            for tensor in (x, weight):
                tensor[chance.randrange(len(tensor)), chance.randrange(inputs)] = bad
            weight[outputs // 2, 0] = bad
            compare(kernel, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_is_widened_exactly(
    kernels: Sequence[FusedKernel], dtype: torch.dtype
) -> None:
    """All 65,536 bit patterns, subnormals, infinities and NaN among them, as weights of one input."""
    weight = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    for kernel in kernels:
        found = kernel.apply(torch.ones(1, 1), weight)[0]
        torch.testing.assert_close(found, weight[:, 0].float(), atol=0, rtol=0, equal_nan=True)


def test_what_is_not_supported_is_named(kernels: Sequence[FusedKernel]) -> None:
    few, many = kernels
    x, weight, bias = tensors(4, 6, 8, torch.bfloat16)
    cases: list[tuple[FusedKernel, tuple[torch.Tensor, ...], str]] = [
        (few, (x.double(), weight), "no kernel for torch.float64"),
        (many, (x, weight.float()), "no kernel for torch.float32 times torch.float32"),
        (few, (x, weight[:, :5]), "make no linear layer"),
        (few, (x[0], weight), "make no linear layer"),
        (few, (x, weight.t().contiguous().t()), "rows of the weight are not contiguous"),
        (few, (x, weight, bias[:3]), "the bias is not 6"),
        (few, (x, weight, bias.bfloat16()), "the bias is not 6"),
        (few, (x.requires_grad_(), weight), "has no gradient"),
    ]
    for kernel, inputs, reason in cases:
        with pytest.raises(KernelError, match=reason):
            kernel.apply(*inputs)


def test_the_best_level_is_taken(tmp_path: Path) -> None:
    everything = {flag for level in LEVELS for flag in level.cpu_flags}
    older, oldest = everything - {"avx512_bf16"}, everything - {"avx512_bf16", "avx512_vnni"}
    names = [cpu_level(flags).name for flags in (everything, older, oldest, {"avx2"}, ())]
    assert names == ["avx512_bf16", "avx512_vnni", "avx512", "plain", "plain"]
    assert cpu_level({"avx2", "fma", "f16c", "avx512f"}).name == "avx2"
