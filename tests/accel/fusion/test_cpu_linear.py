"""The C++ linear kernel against plain torch, on every instruction set that this CPU has."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.fusion.cpu.calls import Caller
from sagellm.accel.fusion.cpu.library import compiled, loaded
from sagellm.accel.fusion.cpu.linear import CpuLinear, PackedMatrix
from sagellm.core.errors import KernelError
from sagellm.core.native_code import LEVELS, Compiler, CpuLevel, cpu_level, find_compiler, this_cpu_flags

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ATOL, RTOL = 2e-5, 2e-5
SHAPES = (
    (1, 1, 1), (1, 7, 5), (2, 48, 64), (3, 49, 100), (8, 97, 1024), (9, 13, 33), (15, 24, 31), (16, 25, 32),
    (17, 12, 1025), (33, 11, 2048), (47, 100, 96), (130, 95, 40), (300, 13, 2080), (400, 130, 515),
)  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "helped"])
def kernel(request: pytest.FixtureRequest) -> CpuLinear:
    found = cpu_kernels(request.param).linear
    if found is None:
        pytest.skip("no C++ compiler")
    assert isinstance(found, CpuLinear)
    return found


def tensors(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and bias; results are of about unit size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / math.sqrt(max(inputs, 1))
    return x, weight.to(dtype), torch.randn(outputs, generator=generator)


def packed(kernel: CpuLinear, weight: torch.Tensor, pieces: int = 1) -> PackedMatrix:
    """Stored in so many pieces, whose ends are no ends of panels."""
    outputs, inputs = weight.shape
    matrix = kernel.empty(outputs, inputs, weight.dtype)
    row = 0
    for piece in torch.tensor_split(weight, pieces):
        matrix.store(row, piece)
        row += len(piece)
    return matrix


def compare(kernel: CpuLinear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """In float64, so that the only rounding is the kernel's."""
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    found = kernel.apply(x, packed(kernel, weight, pieces=3), bias)
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), expected, atol=ATOL, rtol=RTOL, equal_nan=True)


def check_shapes(kernel: CpuLinear) -> int:
    compared = 0
    for dtype in DTYPES:
        for shape in SHAPES:
            x, weight, bias = tensors(*shape, dtype)
            compare(kernel, x, weight, None)
            compare(kernel, x, weight, bias)
            compared += 1
    return compared


def test_shapes_and_dtypes(kernel: CpuLinear) -> None:
    assert check_shapes(kernel) == 3 * len(SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in LEVELS if level.cpu_flags <= this_cpu_flags()])
def test_every_level_of_this_cpu(level: CpuLevel) -> None:
    built = compiled("linear", level, find_compiler())
    assert check_shapes(CpuLinear(loaded(built), Caller(2), level)) == 3 * len(SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_by_its_own_instruction(kernel: CpuLinear, shape: tuple[int, int, int]) -> None:
    if not kernel.multiplies(torch.bfloat16, torch.bfloat16):
        pytest.skip("this CPU does not multiply bfloat16")
    x, weight, bias = (tensor.bfloat16() for tensor in tensors(*shape, torch.bfloat16))
    for added in (None, bias):
        exact = None if added is None else added.double()
        expected = kernel.reference(x.double(), packed(kernel, weight), exact)
        found = kernel.apply(x, packed(kernel, weight), added)
        torch.testing.assert_close(found, expected.bfloat16(), atol=1e-2, rtol=1.6e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_is_beside_it(kernel: CpuLinear, dtype: torch.dtype) -> None:
    x, weight, bias = tensors(400, 70, 515, dtype)
    if kernel.multiplies(torch.bfloat16, dtype):
        x, bias = x.bfloat16(), bias.bfloat16()
    matrix = packed(kernel, weight)
    whole = kernel.apply(x, matrix, bias)
    for count in (1, 2, 6, 7, 13, 16, 17, 30, 32, 33, 385):
        for first in (0, 400 - count):
            part = kernel.apply(x[first : first + count], matrix, bias)
            assert torch.equal(part, whole[first : first + count])


@settings(max_examples=150)
@given(
    rows=st.integers(0, 70),
    outputs=st.integers(0, 130),
    inputs=st.integers(0, 300),
    dtype=st.sampled_from(DTYPES),
    repeated=st.booleans(),
    gap=st.integers(0, 3),
    with_bias=st.booleans(),
)
def test_any_strides(
    kernel: CpuLinear, rows: int, outputs: int, inputs: int, dtype: torch.dtype, repeated: bool, gap: int,
    with_bias: bool,
) -> None:  # fmt: skip
    wide = tensors(2 * rows, outputs, 2 * inputs + gap, dtype, seed=rows)
    x, weight = wide[0][::2, gap : gap + inputs], wide[1][:, gap : gap + inputs]
    if repeated and rows:
        x = wide[0][:1, :inputs].expand(rows, inputs)
    compare(kernel, x, weight, wide[2] if with_bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_where_they_belong(kernel: CpuLinear, dtype: torch.dtype, bad: float) -> None:
    """Also behind the end of a row: an odd number of inputs, whose neighbour is the next row's first."""
    chance = random.Random(3)
    for rows, outputs, inputs in ((1, 9, 33), (5, 26, 95), (20, 30, 64)):
        x, weight, bias = tensors(rows, outputs, inputs, dtype)
        for tensor in (x, weight):
            tensor[chance.randrange(len(tensor)), chance.randrange(inputs)] = bad
        weight[outputs // 2, 0] = bad
        compare(kernel, x, weight, bias)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_in_pairs_of_bfloat16(kernel: CpuLinear, bad: float) -> None:
    if not kernel.multiplies(torch.bfloat16, torch.bfloat16):
        pytest.skip("this CPU does not multiply bfloat16")
    for rows, inputs in ((1, 33), (20, 33), (20, 64)):
        x, weight, _ = (tensor.bfloat16() for tensor in tensors(rows, 26, inputs, torch.bfloat16))
        x[0, inputs - 1] = weight[7, 0] = bad
        expected = torch.nn.functional.linear(x.double(), weight.double())
        found = kernel.apply(x, packed(kernel, weight)).double()
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_is_widened_exactly(kernel: CpuLinear, dtype: torch.dtype) -> None:
    """All 65,536 bit patterns, subnormals, infinities and NaN among them, as weights of one input."""
    weight = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    found = kernel.apply(torch.ones(1, 1), packed(kernel, weight))[0]
    torch.testing.assert_close(found, weight[:, 0].float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (130, 33), (64, 64), (63, 2)])
def test_rows_are_read_back(kernel: CpuLinear, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(dtype)
    matrix = packed(kernel, weight, pieces=2)
    index = torch.randint(shape[0], (50,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(matrix.rows(index), weight[index])
    assert torch.equal(matrix.rows(torch.arange(shape[0])), weight)


@pytest.mark.parametrize("to", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (70, 33), (200, 64)])
def test_rows_are_looked_up(
    kernel: CpuLinear, dtype: torch.dtype, to: torch.dtype | None, shape: tuple[int, int]
) -> None:
    table = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    table[-1, -1], table[0, 0] = math.inf, math.nan
    matrix, wanted = packed(kernel, table), to or dtype
    for count in (0, 1, 5, 300):
        index = torch.randint(0, shape[0], (count,), generator=torch.Generator().manual_seed(count))
        expected = table[index].to(wanted)
        for found in (
            kernel.gather(table, index, wanted),
            matrix.rows(index, to),
            matrix.rows(index.int(), to),
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        scaled = (table[index].float() * 2.7).to(wanted)
        for found in (kernel.gather(table, index, wanted, 2.7), matrix.rows(index, to, 2.7)):
            torch.testing.assert_close(found, scaled, rtol=0, atol=0, equal_nan=True)


def test_rows_that_are_not_there_are_not_read(kernel: CpuLinear) -> None:
    table = torch.ones(40, 3)
    matrix = packed(kernel, table)
    for bad in (-1, 40, 1 << 40):
        for look_up in (matrix.rows, lambda index: kernel.gather(table, index, torch.float32)):
            with pytest.raises(KernelError, match="outside the table"):
                look_up(torch.tensor([0, bad]))
    with pytest.raises(KernelError, match=r"not as torch\.float16"):
        matrix.rows(torch.tensor([0]), torch.float16)
    with pytest.raises(KernelError, match="at integers"):
        matrix.rows(torch.tensor([0.0]))
    with pytest.raises(KernelError, match="no contiguous table"):
        kernel.gather(table.t(), torch.tensor([0]), torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_bfloat16_are_not_rounded_into_a_float32_out(
    kernel: CpuLinear, shape: tuple[int, int, int]
) -> None:
    if not kernel.multiplies(torch.bfloat16, torch.bfloat16):
        pytest.skip("this CPU does not multiply bfloat16")
    x, weight, bias = tensors(*shape, torch.bfloat16)
    x, bias, matrix = x.bfloat16(), bias.bfloat16(), packed(kernel, weight)
    for added in (None, bias):
        out = torch.full((len(x), len(weight)), math.nan)
        assert matrix.multiply(x, added, out) is out
        assert torch.equal(out.bfloat16(), matrix.multiply(x, added))
        exact = kernel.reference(x, matrix, added, torch.empty_like(out))
        torch.testing.assert_close(out, exact, atol=ATOL, rtol=RTOL)


def test_an_out_that_does_not_fit_is_named(kernel: CpuLinear) -> None:
    matrix, x = packed(kernel, torch.ones(4, 3)), torch.ones(2, 3)
    for out in (torch.empty(2, 3), torch.empty(4, 2).t(), torch.empty(2, 4, dtype=torch.bfloat16)):
        with pytest.raises(KernelError, match=r"out is no contiguous \[2, 4\]"):
            matrix.multiply(x, None, out)


def test_what_is_not_supported_is_named(kernel: CpuLinear) -> None:
    x, weight, bias = tensors(4, 6, 8, torch.bfloat16)
    matrix = packed(kernel, weight)
    cases: list[tuple[tuple[object, ...], str]] = [
        ((x.double(), matrix), "no kernel for torch.float64"),
        ((x[:, :5], matrix), "make no linear layer"),
        ((x[0], matrix), "make no linear layer"),
        ((x.t().contiguous().t(), matrix), "rows of x are not contiguous"),
        ((x, matrix, bias[:3]), "the bias is not 6"),
        ((x, matrix, bias.bfloat16()), "the bias is not 6"),
        ((x.clone().requires_grad_(), matrix), "has no gradient"),
    ]
    for inputs, reason in cases:
        with pytest.raises(KernelError, match=reason):
            kernel.apply(*inputs)
    for first, rows in ((0, weight.float()), (0, weight[:, :5]), (0, weight[0])):
        with pytest.raises(KernelError, match=r"rows of 8 .* are packed"):
            matrix.store(first, rows)
    for first in (-1, 1):
        with pytest.raises(KernelError, match=f"6 rows from {first} on are not in 6"):
            matrix.store(first, weight)


def test_the_best_level_is_taken() -> None:
    everything = {flag for level in LEVELS for flag in level.cpu_flags}
    without_tiles = everything - {"amx_tile"}
    older, oldest = without_tiles - {"avx512_bf16"}, without_tiles - {"avx512_bf16", "avx512_vnni"}
    names = [cpu_level(flags).name for flags in (everything, without_tiles, older, oldest, {"avx2"}, ())]
    assert names == ["amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "plain", "plain"]
    assert cpu_level({"avx2", "fma", "f16c", "avx512f"}).name == "avx2"


def test_a_compiler_without_the_options_of_the_best_level(tmp_path: Path) -> None:
    everything = {flag for level in LEVELS for flag in level.cpu_flags}
    old = tmp_path / "g++"
    old.write_text('#!/bin/sh\ncase "$*" in *amx*) exit 1;; esac\n', encoding="ascii")
    old.chmod(0o755)
    assert cpu_level(everything, Compiler((str(old),), "")).name == "avx512_bf16"
