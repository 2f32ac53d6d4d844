"""Norm, rotation with KV write, and gate in Triton against their plain twins."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from sagellm.accel.fusion.triton.glue import (
    TritonAddRmsNorm,
    TritonGeluAndMul,
    TritonRopeToCache,
    TritonSiluAndMul,
)
from sagellm.core.errors import KernelError
from tests.accel.fusion.triton.scenes import DEVICE, DTYPES

TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1.6e-2, 1.6e-2), torch.float16: (2e-3, 2e-3)}
BAD = (math.nan, math.inf, -math.inf)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    absolute, relative = TOLERANCES[found.dtype]
    torch.testing.assert_close(found, expected, atol=absolute, rtol=relative, equal_nan=True)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@settings(max_examples=12)
@given(
    rows=st.integers(0, 4),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    adds=st.booleans(),
    sandwich=st.sampled_from([(False, True), (True, True), (True, False)]),
    strided=st.booleans(),
    bad=st.none() | st.sampled_from(BAD),
    seed=st.integers(0, 99),
)
def test_add_rms_norm(
    rows: int, columns: int, dtype: torch.dtype, adds: bool, sandwich: tuple[bool, bool], strided: bool,
    bad: float | None, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    width = columns + (5 if strided else 0)
    x, delta, weight = (randn(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (columns,)))
    if bad is not None and rows:
        x[0, 0] = bad
    kernel = TritonAddRmsNorm()
    mine, theirs = x.clone()[:, :columns], x.clone()[:, :columns]
    added = delta[:, :columns] if adds else None
    if adds and strided:  # as a projection may return it
        added = delta[:, :columns].t().contiguous().t()
    delta_weight = randn(columns, dtype=dtype) if adds and sandwich[0] else None
    inputs = added, weight if sandwich[1] or delta_weight is None else None, 1e-6, delta_weight
    close(kernel.apply(mine, *inputs), kernel.reference(theirs, *inputs))
    if delta_weight is None:
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0, equal_nan=True)
    else:
        close(mine, theirs)


@settings(max_examples=15)
@given(
    rows=st.integers(0, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    half=st.integers(1, 40),
    block_size=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    pool_dtype=st.sampled_from(DTYPES),
    turns=st.booleans(),
    norms=st.sampled_from([(False, False), (True, True), (True, False)]),
    bad=st.none() | st.sampled_from(BAD),
    seed=st.integers(0, 99),
)
def test_rope_to_cache(
    rows: int, kv_heads: int, group: int, half: int, block_size: int, dtype: torch.dtype,
    pool_dtype: torch.dtype, turns: bool, norms: tuple[bool, bool], bad: float | None, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    heads = randn(rows, kv_heads * (group + 2) + 1, 2 * half, dtype=dtype)[:, 1:]  # as part of a wider row
    if bad is not None and rows:
        heads[0, 0, 0] = heads[0, -1, 0] = bad
    cos, sin = randn(2, rows, half, dtype=dtype) if turns else (None, None)
    query_weight, key_weight = (randn(2 * half, dtype=dtype) if has else None for has in norms)
    slots = torch.randperm(7 * block_size)[:rows].to(DEVICE)
    pools = randn(2, 7, block_size, kv_heads + 1, 2 * half, dtype=pool_dtype)
    if len(slots) < rows:
        return
    kernel = TritonRopeToCache()
    results = []
    for run in (kernel.apply, kernel.reference):
        own, (keys, values) = heads.clone(), pools.clone()[:, :, :, 1:]
        run(own, cos, sin, query_weight, key_weight, 1e-6, slots, keys, values, 1e-4 if turns else None)
        results.append((own, keys, values))
    for found, expected in zip(*results, strict=True):
        close(found, expected)
    alone = [heads.clone(), heads.clone()]
    for own, run in zip(alone, (kernel.apply, kernel.reference), strict=True):
        run(own, cos, sin, query_weight, None, 1e-6, None, None, None)
    close(*alone)


@settings(max_examples=12)
@given(
    rows=st.integers(0, 4),
    columns=st.integers(1, 2500),
    dtype=st.sampled_from(DTYPES),
    bad=st.none() | st.sampled_from(BAD),
    where=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_silu_and_mul(
    rows: int, columns: int, dtype: torch.dtype, bad: float | None, where: int, seed: int
) -> None:
    torch.manual_seed(seed)
    wide = randn(rows, 2 * columns + 3, dtype=dtype)[:, : 2 * columns]
    if bad is not None and rows:
        wide[0, where * columns] = bad
    if where:  # as a projection may return it
        wide = wide.t().contiguous().t()
    kernel = TritonSiluAndMul()
    close(kernel.apply(wide), kernel.reference(wide))
    close(TritonGeluAndMul().apply(wide), TritonGeluAndMul().reference(wide))


def test_what_they_refuse() -> None:
    x, weight = randn(2, 8, dtype=torch.float32), randn(8, dtype=torch.float16)
    with pytest.raises(KernelError, match="with a weight of"):
        TritonAddRmsNorm().apply(x, None, weight, 1e-6)
    with pytest.raises(KernelError, match="contiguous"):
        TritonAddRmsNorm().apply(x.t(), None, weight[:2].float(), 1e-6)
    with pytest.raises(KernelError, match="gate and up"):
        TritonSiluAndMul().apply(x[:, :7])
    pools = randn(2, 3, 4, 1, 8, dtype=torch.float32)
    heads, slots = randn(2, 4, 8, dtype=torch.float32), torch.arange(2, device=DEVICE)
    kernel = TritonRopeToCache()
    assert kernel.supports(heads, None, None, None, None, 1e-6, slots, *pools).usable
    with pytest.raises(KernelError, match="slots are"):
        kernel.apply(heads, None, None, None, None, 1e-6, slots.int(), *pools)
    with pytest.raises(KernelError, match="do not fit"):
        kernel.apply(heads[:, :2], None, None, None, None, 1e-6, slots, *pools)
    with pytest.raises(KernelError, match="cos and sin"):
        kernel.apply(heads, heads[:, 0, :4], None, None, None, 1e-6, slots, *pools)
