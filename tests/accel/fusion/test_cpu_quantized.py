"""The C++ kernel for quantized weights against plain torch, on every instruction set that this CPU has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.fusion.cpu import CpuQuantizedLinear, cpu_kernels
from sagellm.accel.fusion.cpu.calls import Caller
from sagellm.accel.fusion.cpu.library import compiled, loaded
from sagellm.accel.fusion.cpu.quantized import quantized_rows
from sagellm.core.blocks import cdiv
from sagellm.core.errors import KernelError
from sagellm.core.native_code import LEVELS, CpuLevel, find_compiler, this_cpu_flags
from sagellm.core.protocols.quantization import QuantizedMatrix
from tests.effort import examples

SCALES = (torch.float16, torch.float32, torch.bfloat16)
SHAPES = (
    (1, 1, 1),
    (1, 16, 32),
    (2, 17, 33),
    (3, 40, 96),
    (5, 64, 256),
    (63, 15, 31),
    (64, 33, 160),
    (130, 70, 65),
)


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "helped"])
def kernel(request: pytest.FixtureRequest) -> CpuQuantizedLinear:
    found = cpu_kernels(request.param).quantized
    if not isinstance(found, CpuQuantizedLinear):
        pytest.skip("no C++ compiler")
    return found


def matrix(
    outputs: int, inputs: int, bits: int, group_size: int = 32, *, zeros: bool = False, order: bool = False,
    scales: torch.dtype = torch.float16, activation_bits: int = 16, seed: int = 0,
) -> QuantizedMatrix:  # fmt: skip
    """Every code and zero that there is; results are of about unit size."""
    generator = torch.Generator().manual_seed(seed)
    groups = (outputs, cdiv(inputs, group_size))
    size = 4.0 / (1 << bits) / math.sqrt(max(1, inputs))
    return QuantizedMatrix(
        torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, generator=generator),
        (size * (0.5 + torch.rand(groups, generator=generator))).to(scales),
        bits,
        group_size,
        torch.randint(0, 1 << bits, groups, dtype=torch.uint8, generator=generator) if zeros else None,
        torch.randperm(inputs, generator=generator) if order else None,
        activation_bits,
    )


def compare(
    kernel: CpuQuantizedLinear, x: torch.Tensor, weight: QuantizedMatrix, bias: torch.Tensor | None = None
) -> None:
    packed = kernel.pack(weight)
    found, expected = kernel.apply(x, packed, bias), kernel.reference(x, packed, bias)
    assert found.dtype == x.dtype
    allowed = {t.dtype: t for t in kernel.tolerances}[str(x.dtype).removeprefix("torch.")]
    torch.testing.assert_close(found, expected, atol=allowed.absolute, rtol=allowed.relative, equal_nan=True)


def check_shapes(kernel: CpuQuantizedLinear) -> int:
    compared = 0
    for rows, outputs, inputs in SHAPES:
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows))
        for bits in (4, 8):
            compare(kernel, x, matrix(outputs, inputs, bits, activation_bits=8))
            compare(
                kernel, x, matrix(outputs, inputs, bits, 64, zeros=True, order=True, scales=torch.float32)
            )
            compared += 2
    return compared


def test_shapes(kernel: CpuQuantizedLinear) -> None:
    assert check_shapes(kernel) == 4 * len(SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in LEVELS if level.cpu_flags <= this_cpu_flags()])
def test_every_level_of_this_cpu(level: CpuLevel) -> None:
    compiler = find_compiler()
    linear, quantized = (compiled(name, level, compiler) for name in ("linear", "quantized"))
    kernel = CpuQuantizedLinear(loaded(quantized, threads_of=linear), Caller(2))
    assert check_shapes(kernel) == 4 * len(SHAPES)


@settings(max_examples=examples(150))
@given(
    rows=st.integers(0, 70),
    outputs=st.integers(1, 50),
    inputs=st.integers(1, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scales=st.sampled_from(SCALES),
    bits=st.sampled_from([4, 8]),
    activation_bits=st.sampled_from([8, 16]),
    group_size=st.sampled_from([32, 64, 128, 1 << 20]),
    zeros=st.booleans(),
    order=st.booleans(),
    layout=st.sampled_from(["rows", "columns", "strided", "repeated"]),
    with_bias=st.booleans(),
)
def test_anything(
    kernel: CpuQuantizedLinear, rows: int, outputs: int, inputs: int, dtype: torch.dtype, scales: torch.dtype,
    bits: int, activation_bits: int, group_size: int, zeros: bool, order: bool, layout: str, with_bias: bool,
) -> None:  # fmt: skip
    wide = torch.randn(2 * rows + 1, 2 * inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
    x = wide[:rows, :inputs]
    if layout == "columns":
        x = x.t().contiguous().t()
    elif layout == "strided":
        x = wide[: 2 * rows : 2, ::2]
    elif layout == "repeated":
        x = wide[:1, :inputs].expand(rows, inputs)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(dtype) if with_bias else None
    weight = matrix(
        outputs, inputs, bits, group_size, zeros=zeros, order=order, scales=scales,
        activation_bits=activation_bits, seed=inputs,
    )  # fmt: skip
    compare(kernel, x, weight, bias)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_in_any_batch(kernel: CpuQuantizedLinear, bits: int) -> None:
    packed = kernel.pack(matrix(200, 320, bits, zeros=True))
    x = torch.randn(300, 320, generator=torch.Generator().manual_seed(2))
    whole = kernel.apply(x, packed)
    for first, last in ((0, 1), (5, 7), (60, 70), (299, 300), (100, 300)):
        assert torch.equal(kernel.apply(x[first:last], packed), whole[first:last])


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_loses_nothing(kernel: CpuQuantizedLinear, bits: int) -> None:
    for outputs, inputs in ((1, 1), (16, 32), (35, 70)):
        weight = matrix(outputs, inputs, bits, 64, zeros=True, order=True)
        assert torch.equal(kernel.pack(weight).unpacked().values(), weight.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_row_nan_and_no_other(kernel: CpuQuantizedLinear, bad: float) -> None:
    packed = kernel.pack(matrix(20, 65, 4))
    x = torch.randn(5, 65, generator=torch.Generator().manual_seed(3))
    clean = kernel.apply(x, packed)
    x[2, 64] = bad
    found = kernel.apply(x, packed)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    assert kernel.reference(x, packed)[2].isnan().all()


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-31, 1e-20, 1e30])
def test_tiny_and_huge_rows(kernel: CpuQuantizedLinear, size: float) -> None:
    """Sums in proportion; what is under 1e-30 is zero."""
    packed = kernel.pack(matrix(20, 64, 8))
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(4))
    unit = kernel.apply(x, packed)
    found = kernel.apply(x * size, packed)
    torch.testing.assert_close(
        found, unit * (size if size > 1e-30 else 0.0), rtol=1e-3, atol=abs(size) * 1e-3
    )


@pytest.mark.parametrize(("bits", "most"), [(8, 127), (16, 32512)])
def test_the_twin_rounds_x_to_the_nearest_step(bits: int, most: int) -> None:
    x = torch.randn(4, 70, generator=torch.Generator().manual_seed(5))
    whole, scales = quantized_rows(x, bits)
    assert whole.abs().max() == most
    values = (whole * scales).flatten(1)[:, :70]
    assert ((values - x).abs() <= 0.5001 * scales.expand_as(whole).flatten(1)[:, :70]).all()


def test_what_is_not_supported_is_named(kernel: CpuQuantizedLinear) -> None:
    x, packed, bias = torch.randn(4, 96), kernel.pack(matrix(6, 96, 4)), torch.randn(6)
    cases = [
        ((x.double(), packed), "no kernel for torch.float64"),
        ((x[:, :5], packed), "make no linear layer"),
        ((x[0], packed), "make no linear layer"),
        ((x, packed, bias[:3]), "the bias is not 6"),
        ((x, packed, bias.bfloat16()), "the bias is not 6"),
        ((x.clone().requires_grad_(), packed), "has no gradient"),
    ]
    for inputs, reason in cases:
        assert not kernel.supports(*inputs).usable
        with pytest.raises(KernelError, match=reason):
            kernel.apply(*inputs)
    for group_size in (16, 48):
        with pytest.raises(KernelError, match=f"no form for groups of {group_size}: multiples of 32"):
            kernel.pack(matrix(6, 96, 4, group_size))


def test_a_matrix_that_does_not_fit_together_is_refused() -> None:
    good = matrix(6, 96, 4, zeros=True, order=True)
    assert good.zeros is not None
    assert good.order is not None
    for changes, words in (
        ({"bits": 3}, "use 4 or 8"),
        ({"activation_bits": 4}, "use 8 or 16"),
        ({"group_size": 0}, "at least 1"),
        ({"scales": good.scales[:, :2]}, "scales of shape"),
        ({"zeros": good.zeros[:3]}, "zeros of shape"),
        ({"order": good.order[:9]}, "an order of"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(good, **changes)
