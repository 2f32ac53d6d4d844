"""Triton's kernels on the device against their twins in higher precision, at the sizes that models have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from sagellm.accel.fusion.triton import triton_kernels
from sagellm.accel.fusion.triton.attention import TritonPagedAttention, paged_attention
from sagellm.accel.fusion.triton.draw import draw
from sagellm.core.protocols.fusion import FusedKernel
from tests.accel.fusion.triton.scenes import attention

pytestmark = [
    pytest.mark.gpu,
    # Triton 3.9 asks whoever has not said so to choose how it fuses multiplications and additions.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = triton_kernels()
SHAPES = {"0.6B": (16, 8, 128), "8B": (32, 8, 128), "wide": (8, 1, 256), "odd": (6, 2, 80)}


def bounds(kernel: FusedKernel, dtype: torch.dtype) -> tuple[float, float]:
    [one] = [one for one in kernel.tolerances if f"torch.{one.dtype}" == str(dtype)]
    return one.absolute, one.relative


def close(kernel: FusedKernel, found: torch.Tensor, expected: torch.Tensor) -> None:
    absolute, relative = bounds(kernel, found.dtype)
    torch.testing.assert_close(
        found.double(), expected.double(), atol=absolute, rtol=relative, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    "parts",
    [
        [(4095, 1)],
        [(at, 1) for at in range(0, 4096, 61)],
        [(1000, 1), (17, 1), (0, 1), (512, 700), (0, 1500), (3000, 33)],
    ],
    ids=["one row", "decode", "mixed"],
)
def test_attention(parts: list[tuple[int, int]], window: int | None, shape: str, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = SHAPES[shape]
    scene = attention(
        parts, heads=heads, kv_heads=kv_heads, dim=dim, block_size=16, dtype=dtype, window=window, seed=1
    )
    kernel = TritonPagedAttention()
    close(kernel, kernel.apply(*scene.args), paged_attention(*scene.doubled().args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1024), (256, 4096), (2048, 1000), (7, 16_384)])
def test_norm_and_gate(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, delta = torch.randn(2, rows, columns, device="cuda").to(dtype)
    weight = torch.randn(columns, device="cuda").to(dtype)
    norm, gate = KERNELS.add_rms_norm, KERNELS.silu_and_mul
    assert norm is not None
    assert gate is not None
    mine, theirs = x.clone(), x.clone()
    close(norm, norm.apply(mine, delta, weight, 1e-6), norm.reference(theirs, delta, weight, 1e-6))
    assert torch.equal(mine, theirs)
    mine, theirs = x.clone(), x.double()
    inputs = delta.double(), weight.double(), 1e-6, weight.double()
    close(norm, norm.apply(mine, delta, weight, 1e-6, weight), norm.reference(theirs, *inputs))
    wide = torch.cat([x, delta], dim=1)
    for kernel in (gate, KERNELS.gelu_and_mul):
        assert kernel is not None
        close(kernel, kernel.apply(wide), kernel.reference(wide.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("rows", [1, 256, 2000])
def test_rotation_and_kv_write(rows: int, norms: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = torch.randn(rows, 48, 128, device="cuda").to(dtype)
    cos, sin = torch.randn(2, rows, 64, device="cuda").to(dtype)
    weights = torch.randn(2, 128, device="cuda").to(dtype) if norms else (None, None)
    slots = torch.randperm(200 * 16, device="cuda")[:rows].contiguous()
    kernel = KERNELS.rope_to_cache
    assert kernel is not None
    results: list[tuple[torch.Tensor, ...]] = []
    for run in (kernel.apply, kernel.reference):
        own, pools = heads.clone(), torch.zeros(2, 200, 16, 8, 128, device="cuda", dtype=dtype)
        run(own, cos, sin, weights[0], weights[1], 1e-6, slots, pools[0], pools[1])
        results.append((own, pools))
    for found, expected in zip(*results, strict=True):
        close(kernel, found, expected)


@pytest.mark.parametrize("vocab", [32_000, 151_936])
@pytest.mark.parametrize(
    "row", [(1.0, 0, 1.0, 0.0), (0.6, 0, 0.95, 0.0), (0.8, 50, 0.9, 0.0), (1.2, 0, 1.0, 0.05)]
)
def test_draws(row: tuple[float, ...], vocab: int) -> None:
    """One in some hundred thousand draws may fall within the rounding of a border: none of these does."""
    torch.manual_seed(0)
    logits = torch.randn(64, vocab, device="cuda") * 3
    params = torch.tensor([(*row, 0.0)] * 64, dtype=torch.float64, device="cuda")
    params[:, 4] = torch.rand(64, dtype=torch.float64, device="cuda")
    kernel = KERNELS.draw
    assert kernel is not None
    found: list[Any] = [kernel.apply(logits, params).tolist() for _ in range(2)]
    assert found[0] == found[1] == draw(logits, params).tolist()
