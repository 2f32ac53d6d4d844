"""The C++ kernels between a decoder's matrices against plain torch, on every instruction set of this CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.fusion.cpu.calls import Caller
from sagellm.accel.fusion.cpu.glue import (
    CpuAddRmsNorm,
    CpuClampedSwiglu,
    CpuGeluAndMul,
    CpuRopeToCache,
    CpuSiluAndMul,
)
from sagellm.accel.fusion.cpu.library import compiled, loaded
from sagellm.core.errors import KernelError
from sagellm.core.native_code import LEVELS, CpuLevel, find_compiler, this_cpu_flags
from sagellm.core.protocols.fusion import FusedKernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Two roundings of a result, relative and absolute, for values of about unit size."""
NAN, INF = math.nan, math.inf
SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 6e4, -6e4, -88.0, -104.0, 89.0, 1e-5)
EPS = 1e-6


@dataclass(frozen=True)
class Kernels:
    norm: FusedKernel
    rope: FusedKernel
    gated: FusedKernel
    gelu: FusedKernel
    clamped: FusedKernel


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    found = cpu_kernels(2)
    norm, rope, gated, gelu = found.add_rms_norm, found.rope_to_cache, found.silu_and_mul, found.gelu_and_mul
    clamped = found.clamped_swiglu
    if norm is None or rope is None or gated is None or gelu is None or clamped is None:
        pytest.skip("no C++ compiler")
    return Kernels(norm, rope, gated, gelu, clamped)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = BOUNDS[found.dtype]
    torch.testing.assert_close(
        found.double(), expected.to(found.dtype).double(), atol=bound, rtol=bound, equal_nan=True
    )


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)


def compare_norm(kernels: Kernels, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> None:
    total = x.clone() if delta is None else x + delta
    expected = F.rms_norm(total.double(), x.shape[-1:], weight.double(), EPS)
    found = kernels.norm.apply(x, delta, weight, EPS)
    assert found.dtype == x.dtype
    agree(found, expected)
    same(x, total)


def compare_sandwich(
    kernels: Kernels, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None,
    delta_weight: torch.Tensor,
) -> None:  # fmt: skip
    """The norm of what is added, and then that of the sum or none."""
    total = x.double() + F.rms_norm(delta.double(), x.shape[-1:], delta_weight.double(), EPS)
    found = kernels.norm.apply(x, delta, weight, EPS, delta_weight)
    agree(x, total)
    if weight is None:
        assert found is x
    else:
        agree(found, F.rms_norm(x.double(), x.shape[-1:], weight.double(), EPS))


@dataclass
class Rotation:
    """Inputs of the second kernel; `args` in its order. Rows of heads lie in a wider buffer, pools too."""

    rows: int = 3
    query_heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32
    block_size: int = 4
    normed: bool = False
    turned: bool = True
    whole: bool = False
    seed: int = 0
    value_eps: float | None = None
    args: list[object] = field(init=False)

    def __post_init__(self) -> None:
        num_heads, blocks = self.query_heads + 2 * self.kv_heads, self.rows // self.block_size + 2
        wide = draw(self.rows, num_heads * self.dim + 5, dtype=self.dtype, seed=self.seed)
        heads = wide[:, : num_heads * self.dim].unflatten(1, (num_heads, self.dim))
        angles = draw(self.rows, self.dim // 2, seed=self.seed + 1)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        counts = (self.query_heads, self.kv_heads) if self.whole else (1, 1)
        weights = [1 + 0.1 * draw(count * self.dim, seed=self.seed + 2 + count) for count in counts]
        generator = torch.Generator().manual_seed(self.seed)
        slots = torch.randperm(blocks * self.block_size, generator=generator)[: self.rows]
        pools = torch.full(
            (blocks, 2, self.block_size, self.kv_heads, self.dim + 3), NAN, dtype=self.pool_dtype
        )
        self.args = [
            heads, *((cos, sin) if self.turned else (None, None)),
            *(weight.to(self.dtype) if self.normed else None for weight in weights), EPS, slots,
            pools[:, 0, ..., : self.dim], pools[:, 1, ..., : self.dim],
            *([] if self.value_eps is None else [self.value_eps]),
        ]  # fmt: skip

    def copied(self) -> list[object]:
        return [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in self.args]


def compare_rotation(kernels: Kernels, made: Rotation) -> None:
    expected = made.copied()
    kernels.rope.reference(*expected)
    raw = made.args[0].clone()  # type: ignore[attr-defined]
    assert kernels.rope.apply(*made.args) is None
    for at in (0, 7, 8):
        found, twin = made.args[at], expected[at]
        assert isinstance(found, torch.Tensor)
        assert isinstance(twin, torch.Tensor)
        bound = max(BOUNDS[made.dtype], BOUNDS[made.pool_dtype])
        torch.testing.assert_close(
            found.double(), twin.double(), atol=2 * bound, rtol=2 * bound, equal_nan=True
        )
    heads, slots, values = (made.args[at] for at in (0, 6, 8))
    assert isinstance(heads, torch.Tensor)
    assert isinstance(slots, torch.Tensor)
    assert isinstance(values, torch.Tensor)
    if made.value_eps is None:
        same(heads[:, -made.kv_heads :], raw[:, -made.kv_heads :])
    stored = values[slots // made.block_size, slots % made.block_size]
    same(stored, heads[:, -made.kv_heads :].to(made.pool_dtype))


def compare_gated(kernels: Kernels, wide: torch.Tensor) -> None:
    gate, up = wide.double().chunk(2, dim=-1)
    found = kernels.gated.apply(wide)
    assert found.dtype == wide.dtype
    assert found.t().is_contiguous() if wide.stride(1) != 1 else found.is_contiguous()
    agree(found, F.silu(gate) * up)
    agree(kernels.gelu.apply(wide), F.gelu(gate, approximate="tanh") * up)
    wide = 4 * wide  # so that both limits matter
    clamped = kernels.clamped.apply(wide, 3.5, 1.702)
    assert clamped.stride() == found.stride()
    bound = BOUNDS[wide.dtype]
    twin = kernels.clamped.reference(wide.double(), 3.5, 1.702)
    torch.testing.assert_close(clamped.double(), twin, atol=4 * bound, rtol=4 * bound, equal_nan=True)


def check_shapes(kernels: Kernels) -> None:
    for dtype in DTYPES:
        for rows, columns in [
            (1, 1),
            (2, 3),
            (1, 15),
            (3, 16),
            (7, 17),
            (2, 64),
            (5, 100),
            (40, 1024),
            (2, 4097),
        ]:
            x, delta = draw(rows, columns, dtype=dtype), draw(rows, columns, dtype=dtype, seed=1)
            weight = draw(columns, dtype=dtype, seed=2)
            compare_norm(kernels, x.clone(), None, weight)
            compare_norm(kernels, x.clone(), delta, weight)
            compare_norm(kernels, x.clone(), delta.t().contiguous().t(), weight)
            compare_norm(kernels, F.pad(x, (0, 3))[:, :columns], delta, weight)
            compare_sandwich(kernels, x.clone(), delta, weight, draw(columns, dtype=dtype, seed=3))
            compare_sandwich(kernels, x.clone(), delta.t().contiguous().t(), None, weight)
            compare_gated(kernels, draw(rows, 2 * columns, dtype=dtype))
            compare_gated(kernels, draw(2 * columns, rows, dtype=dtype).t())
            compare_gated(kernels, draw(rows, 2 * columns + 3, dtype=dtype)[:, : 2 * columns])
        for pool_dtype in DTYPES:
            for dim in (2, 6, 16, 24, 64, 80, 100, 128, 256):
                normed, turned, whole = dim % 16 == 0, dim != 24, dim == 80
                compare_rotation(kernels, Rotation(5, 3, 2, dim, dtype, pool_dtype, 3, normed, turned, whole))


def test_shapes_and_dtypes(kernels: Kernels) -> None:
    check_shapes(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in LEVELS if level.cpu_flags <= this_cpu_flags()])
def test_every_level_of_this_cpu(level: CpuLevel) -> None:
    made, helping = (compiled(name, level, find_compiler()) for name in ("glue", "linear"))
    library, caller = loaded(made, threads_of=helping), Caller(2)
    found = Kernels(
        CpuAddRmsNorm(library, caller), CpuRopeToCache(library, caller), CpuSiluAndMul(library, caller),
        CpuGeluAndMul(library, caller), CpuClampedSwiglu(library, caller),
    )  # fmt: skip
    check_shapes(found)
    check_special(found)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40), heads=st.integers(1, 6), kv_heads=st.integers(1, 3), half=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES), pool_dtype=st.sampled_from(DTYPES), block_size=st.integers(1, 17),
    normed=st.booleans(), turned=st.booleans(), whole=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_random_jobs(
    kernels: Kernels, rows: int, heads: int, kv_heads: int, half: int, dtype: torch.dtype,
    pool_dtype: torch.dtype, block_size: int, normed: bool, turned: bool, whole: bool, seed: int,
) -> None:  # fmt: skip
    made = Rotation(
        rows, heads, kv_heads, 2 * half, dtype, pool_dtype, block_size, normed, turned, whole, seed
    )
    compare_rotation(kernels, made)
    x, delta = (draw(rows, half * heads, dtype=dtype, seed=seed + i) for i in range(2))
    compare_norm(kernels, x, delta, draw(half * heads, dtype=dtype, seed=seed))
    compare_gated(kernels, draw(rows, 2 * half * heads, dtype=dtype, seed=seed))


@pytest.mark.usefixtures("two_threads")
def test_many_rows_by_two_threads(kernels: Kernels) -> None:
    for dtype in DTYPES:
        x, delta = draw(300, 1024, dtype=dtype), draw(300, 1024, dtype=dtype, seed=1)
        compare_norm(kernels, x, delta, draw(1024, dtype=dtype))
        compare_gated(kernels, draw(70, 2 * 5000, dtype=dtype))
        compare_gated(kernels, draw(2 * 5000, 70, dtype=dtype).t())
        compare_rotation(kernels, Rotation(400, 4, 2, 64, dtype, dtype, block_size=16, normed=True))


@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_same_bits_alone(kernels: Kernels) -> None:
    """In any batch, on any number of threads, transposed or not."""
    dtype = torch.bfloat16
    x, delta, wide = (draw(200, n, dtype=dtype, seed=n) for n in (1030, 1030, 2 * 777))
    weight, made = draw(1030, dtype=dtype), Rotation(300, 4, 2, 40, dtype, dtype, normed=True)
    alone, rows = made.copied(), (0, 1, 77, 199)
    normed, product = kernels.norm.apply(x.clone(), delta, weight, EPS), kernels.gated.apply(wide)
    transposed = kernels.gated.apply(wide.t().contiguous().t())
    kernels.rope.apply(*made.args)
    torch.set_num_threads(1)
    for row in rows:
        at = slice(row, row + 1)
        same(kernels.norm.apply(x[at].clone(), delta[at], weight, EPS), normed[at])
        same(kernels.gated.apply(wide[at]), product[at])
        one = [arg[at] if i in (0, 1, 2, 6) else arg for i, arg in enumerate(alone)]  # type: ignore[index]
        kernels.rope.apply(*one)
        same(one[0], made.args[0][at])  # type: ignore[arg-type, index]
    same(transposed, product)


def check_special(kernels: Kernels) -> None:
    """Each special value in each place of a row beside ordinary ones: what torch gives in the same dtype."""
    for dtype in DTYPES:
        for columns in (19, 64):
            values = torch.tensor(SPECIAL).to(dtype)
            x = draw(len(SPECIAL), columns, dtype=dtype)
            for at in (0, 5, 17, columns - 1):
                spoiled, weight = x.clone(), draw(columns, dtype=dtype, seed=3)
                spoiled[:, at] = values
                delta = draw(*x.shape, dtype=dtype, seed=4)
                twin = spoiled.clone()
                expected = kernels.norm.reference(twin, delta, weight, EPS)
                agree(kernels.norm.apply(spoiled, delta, weight, EPS), expected)
                same(spoiled, twin)
        gates = torch.tensor(SPECIAL).to(dtype).repeat_interleave(len(SPECIAL))
        ups = torch.tensor(SPECIAL).to(dtype).repeat(len(SPECIAL))
        wide = torch.stack([gates, ups], dim=1)
        agree(kernels.gated.apply(wide), kernels.gated.reference(wide.float()))
        agree(kernels.gated.apply(wide.t().reshape(1, -1)), kernels.gated.reference(wide.float()).t())


def test_special_values(kernels: Kernels) -> None:
    check_special(kernels)


@pytest.mark.parametrize("spoiled", [NAN, INF, -INF])
def test_a_spoiled_head_spoils_no_other(kernels: Kernels, spoiled: float) -> None:
    for normed in (False, True):
        made = Rotation(4, 4, 2, 24, normed=normed)
        heads = made.args[0]
        assert isinstance(heads, torch.Tensor)
        heads[1, 2, 3] = heads[2, 5, 7] = heads[3, 6, 0] = spoiled
        compare_rotation(kernels, made)


def test_bfloat16_is_rounded_as_torch_rounds(kernels: Kernels) -> None:
    """Every float16 and a sweep of float32, by storing heads in a pool of another dtype."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    sweep = torch.arange(-(2**31), 2**31, 65_521).to(torch.int32).view(torch.float32)
    for numbers in (every, sweep[: len(sweep) // 16 * 16]):
        heads = numbers.reshape(-1, 2, 8).repeat(1, 2, 1)[:, :3].contiguous()
        rows = len(heads)
        for dtype in DTYPES:
            pool = torch.zeros(2, rows, 1, 1, 8, dtype=dtype)
            kernels.rope.apply(heads, None, None, None, None, EPS, torch.arange(rows), *pool)
            expected = heads[:, 2:].to(dtype)
            same(pool[1, :, 0], expected)


def test_values_are_normed_without_weights(kernels: Kernels) -> None:
    for dtype, pool_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
        compare_rotation(kernels, Rotation(5, 4, 2, 24, dtype, pool_dtype, normed=True, value_eps=1e-3))


@pytest.mark.parametrize("normed", [False, True])
def test_queries_alone(kernels: Kernels, normed: bool) -> None:
    """Of layers that attend to another layer's KV."""
    heads, cos, sin, weight = Rotation(5, 4, 2, 24, normed=normed).args[:4]
    assert isinstance(heads, torch.Tensor)
    twin = heads.clone()
    kernels.rope.apply(heads, cos, sin, weight, None, EPS, None, None, None)
    kernels.rope.reference(twin, cos, sin, weight, None, EPS, None, None, None)
    torch.testing.assert_close(heads, twin, atol=2e-6, rtol=2e-6)


def test_a_slot_outside_is_refused_and_nothing_is_changed(kernels: Kernels) -> None:
    made = Rotation(normed=True)
    keys, slots = made.args[7], made.args[6]
    assert isinstance(keys, torch.Tensor)
    assert isinstance(slots, torch.Tensor)
    for slot in (-1, keys.shape[0] * keys.shape[1], -(2**63), 2**63 - 1):
        wrong = made.copied()
        wrong[6] = torch.cat([slots[:-1], torch.tensor([slot])])
        before = [arg.clone() for arg in wrong if isinstance(arg, torch.Tensor)]
        with pytest.raises(KernelError, match="a slot is outside the pool"):
            kernels.rope.apply(*wrong)
        for one, other in zip(before, (arg for arg in wrong if isinstance(arg, torch.Tensor)), strict=True):
            same(one, other)


def test_no_rows_is_no_work(kernels: Kernels) -> None:
    assert kernels.norm.apply(torch.ones(0, 8), None, torch.ones(8), EPS).shape == (0, 8)
    assert kernels.gated.apply(torch.ones(0, 8)).shape == (0, 4)
    made = Rotation(1)
    kernels.rope.apply(*(arg[:0] if i in (0, 1, 2, 6) else arg for i, arg in enumerate(made.args)))  # type: ignore[index]


def refused(kernel: FusedKernel, cases: list[tuple[tuple[object, ...], str]]) -> None:
    for inputs, reason in cases:
        assert not kernel.supports(*inputs).usable
        with pytest.raises(KernelError, match=reason):
            kernel.apply(*inputs)


def test_what_is_not_supported_is_named(kernels: Kernels) -> None:
    x, weight = torch.ones(3, 8), torch.ones(8)
    refused(kernels.norm, [
        ((x.double(), None, weight, EPS), "no kernel for torch.float64"),
        ((x, None, weight.half(), EPS), "a weight of torch.float16"),
        ((x, None, weight[:7], EPS), "no rows and weight"),
        ((x[0], None, weight, EPS), "no rows and weight"),
        ((x.t().contiguous().t(), None, weight, EPS), "must be contiguous"),
        ((x[:1].expand(3, 8), None, weight, EPS), "must not overlap"),
        ((x, x[:2], weight, EPS), "delta is torch.float32"),
        ((x, x.half(), weight, EPS), "delta is torch.float16"),
        ((x.clone().requires_grad_(), None, weight, EPS), "no gradient"),
        ((x.to("meta"), None, weight, EPS), "runs on a CPU"),
    ])  # fmt: skip
    refused(kernels.gated, [
        ((x.double(),), "no kernel for torch.float64"),
        ((x[:, :7],), "no rows of gate and up"),
        ((torch.ones(4, 8, 2)[..., 0],), "neither"),
        ((x.to("meta"),), "runs on a CPU"),
    ])  # fmt: skip
    good = Rotation(normed=True).args
    heads, cos, _, weights, _, _, slots, keys, values = good
    assert isinstance(heads, torch.Tensor)
    assert isinstance(cos, torch.Tensor)
    assert isinstance(weights, torch.Tensor)
    assert isinstance(slots, torch.Tensor)
    assert isinstance(keys, torch.Tensor)
    assert isinstance(values, torch.Tensor)
    cases: list[tuple[int, object, str]] = [
        (0, heads.double(), "no kernel for torch.float64"),
        (0, heads[:, :3], "do not fit"),
        (0, heads[:, :, :8], "do not fit"),
        (0, heads[0], "no heads and pools"),
        (0, heads.transpose(0, 1).contiguous().transpose(0, 1), "must be contiguous"),
        (0, heads[:1].expand(heads.shape), "must not overlap"),
        (1, None, "or both None"),
        (1, cos[:2], "cos and sin must be"),
        (1, cos.half(), "must be torch.float32"),
        (1, cos.t().contiguous().t(), "contiguous rows"),
        (3, weights[:9], "weights of norms"),
        (6, slots.int(), "slots are contiguous int64"),
        (6, slots[:2], "slots are contiguous int64"),
        (7, keys.half(), "into torch.float16 and torch.float32"),
        (7, keys[:1], "no heads and pools"),
        (8, values.to("meta"), "runs on a CPU"),
    ]
    refused(kernels.rope, [((*good[:at], bad, *good[at + 1 :]), reason) for at, bad, reason in cases])
    queries: list[object] = [heads, cos, good[2], weights, None, EPS, None, None, None]
    cases = [
        (0, heads.double(), "no query heads"),
        (0, heads[:1].expand(heads.shape), "must not overlap"),
        (1, None, "or both None"),
        (3, weights[:9], "weights of norms"),
        (4, weights, "without slots"),
        (7, keys, "without slots"),
    ]
    refused(kernels.rope, [((*queries[:at], bad, *queries[at + 1 :]), reason) for at, bad, reason in cases])
