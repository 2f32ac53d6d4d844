"""Rounding weights to codes: what is lost, what is kept, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.quantization.round_to_nearest import RoundToNearest
from sagellm.core.errors import ModelError
from sagellm.core.protocols.quantization import QuantizedMatrix

NAME = "layers.0.up.weight"


def normal(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def error(matrix: QuantizedMatrix, weight: torch.Tensor) -> float:
    return float((matrix.values() - weight).norm() / weight.norm())


def q4_0(weight: torch.Tensor) -> torch.Tensor:
    """What llama.cpp's format of that name makes of a matrix."""
    groups = weight.view(len(weight), -1, 32)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (largest / -8).half().float()
    return ((torch.floor(groups / scale + 8.5).clamp(0, 15) - 8) * scale).flatten(1)


def test_less_is_lost_than_by_q4_0_and_q8_0() -> None:
    weight = normal(256, 1024)
    four, eight = (RoundToNearest(bits).quantized(NAME, weight) for bits in (4, 8))
    theirs = float((q4_0(weight) - weight).norm() / weight.norm())
    assert error(four, weight) < 0.0815 < 0.0858 < theirs
    assert error(eight, weight) < 0.0048 < 0.0053  # q8_0


@settings(max_examples=60)
@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 100),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    size=st.sampled_from([0.0, 1e-9, 1e-4, 1.0, 1e3]),
)
def test_no_value_is_further_off_than_a_step(
    outputs: int, inputs: int, bits: int, dtype: torch.dtype, size: float
) -> None:
    weight = (normal(outputs, inputs) * size).to(dtype)
    before = weight.clone()
    matrix = RoundToNearest(bits).quantized(NAME, weight)
    assert torch.equal(weight, before)
    steps = matrix.scales.float().abs().repeat_interleave(32, dim=1)[:, :inputs]
    most = weight.float().abs().max().item() if weight.numel() else 0.0
    unit_of_float16 = 2.0**-24  # what a scale may be off by where it is subnormal
    cut_off = most * (1 - 5.5 / 8) if bits == 4 else most / 128
    assert (
        (matrix.values() - weight.float()).abs() <= steps / 2 + cut_off + unit_of_float16 * (1 << bits)
    ).all()
    assert int(matrix.codes.max() if matrix.codes.numel() else 0) < 1 << bits


def test_rows_may_be_quantized_apart() -> None:
    weight = normal(3000, 96)
    whole = RoundToNearest(4).quantized(NAME, weight)
    part = RoundToNearest(4).quantized(NAME, weight[2000:])
    assert torch.equal(whole.codes[2000:], part.codes)
    assert torch.equal(whole.scales[2000:], part.scales)


def test_values_on_the_grid_are_kept() -> None:
    weight = torch.arange(-8, 8).repeat(4, 2).float() * 0.25
    assert torch.equal(RoundToNearest(4).quantized(NAME, weight).values(), weight)
    weight = torch.arange(-128, 128).repeat(2, 1).float() * 0.5
    assert torch.equal(RoundToNearest(8).quantized(NAME, weight[:, :32]).values(), weight[:, :32])


def test_the_head_has_eight_bits() -> None:
    assert RoundToNearest(4).quantized("head.weight", normal(4, 32)).bits == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    weight = normal(4, 40)
    weight[3, 39] = bad
    with pytest.raises(ModelError, match=r"layers\.0\.up\.weight holds values that are not finite"):
        RoundToNearest(8).quantized(NAME, weight)


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(ModelError, match="is too large for scales"):
        RoundToNearest(8).quantized(NAME, normal(4, 32) * 1e9)


def test_other_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="use 8 or 4"):
        RoundToNearest(3)
