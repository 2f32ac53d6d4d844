"""The C++ attention kernel against its plain twin in float64, on every instruction set that this CPU has."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.fusion.cpu.attention import CpuPagedAttention
from sagellm.accel.fusion.cpu.calls import Caller
from sagellm.accel.fusion.cpu.library import compiled, loaded
from sagellm.core.blocks import cdiv
from sagellm.core.errors import KernelError
from sagellm.core.native_code import LEVELS, CpuLevel, find_compiler, this_cpu_flags
from sagellm.core.protocols.fusion import FusedKernel, Scores
from tests.effort import examples

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1e-2, 1.6e-2), torch.float16: (2e-3, 2e-3)}


@pytest.fixture(scope="module")
def kernel() -> FusedKernel:
    found = cpu_kernels(2).attention
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@dataclass
class Scene:
    """Inputs of the kernel; `args` in its order."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    spans: torch.Tensor
    tables: torch.Tensor
    window: int | None = None
    scores: Scores | None = None
    decode_rows: int = 0

    @property
    def args(self) -> tuple[torch.Tensor | int | Scores | None, ...]:
        pools = self.query, self.keys, self.values
        return *pools, self.spans, self.tables, self.window, self.scores, self.decode_rows


def scene(
    parts: list[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, dim: int = 16, block_size: int = 4,
    dtype: torch.dtype = torch.float32, pool_dtype: torch.dtype = torch.float32, window: int | None = None,
    seed: int = 0, shared: bool = False,
) -> Scene:  # fmt: skip
    """`parts`: (start, tokens) of each span. Blocks are scattered; where `shared`, sequences may have the
    same ones. What no sequence reads, padding too, is NaN.
    """
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [cdiv(start + tokens, block_size) for start, tokens in parts]
    num_blocks = sum(needed) + 2
    free = chance.sample(range(num_blocks), num_blocks)
    spans: list[tuple[int, ...]] = []
    tables: list[int] = []
    row = 0
    shape = (num_blocks, block_size, kv_heads, dim)
    keys, values = torch.full(shape, math.nan), torch.full(shape, math.nan)
    for (start, tokens), count in zip(parts, needed, strict=True):
        own = chance.choices(range(num_blocks), k=count) if shared else [free.pop() for _ in range(count)]
        spans.append((row, tokens, start, len(tables)))
        tables += own
        row += tokens
        at = torch.arange(start + tokens)
        blocks = torch.tensor(own)[at // block_size]
        for pool in (keys, values):
            pool[blocks, at % block_size] = torch.randn(len(at), kv_heads, dim, generator=generator)
    query = torch.randn(row, heads, dim, generator=generator).to(dtype)
    return Scene(
        query, keys.to(pool_dtype), values.to(pool_dtype), torch.tensor(spans),
        torch.tensor(tables, dtype=torch.int32), window,
    )  # fmt: skip


def compare(kernel: FusedKernel, made: Scene, slack: float = 0.0) -> torch.Tensor:
    """In float64, so that the only rounding is the kernel's."""
    doubles = (made.query.double(), made.keys.double(), made.values.double())
    expected = kernel.reference(*doubles, made.spans, made.tables, made.window, made.scores)
    found: torch.Tensor = kernel.apply(*made.args)
    assert found.dtype == made.query.dtype
    absolute, relative = (bound + slack for bound in TOLERANCES[found.dtype])
    torch.testing.assert_close(found.double(), expected, atol=absolute, rtol=relative, equal_nan=True)
    return found


def check_shapes(kernel: FusedKernel) -> None:
    for dim in (16, 24, 64, 80, 100, 128, 256):
        compare(kernel, scene([(0, 1), (37, 1), (3, 20)], dim=dim, seed=dim))
    for group in (1, 2, 3, 4, 5, 7, 8, 12):
        compare(kernel, scene([(200, 1), (60, 9)], heads=3 * group, kv_heads=3, seed=group))
    for block_size in (1, 3, 16, 17, 64):
        compare(kernel, scene([(130, 1), (70, 90), (0, 70)], block_size=block_size, window=65))
    for dtype in DTYPES:
        for pool_dtype in DTYPES:
            made = scene([(150, 1), (0, 33)], dim=72, dtype=dtype, pool_dtype=pool_dtype)
            compare(kernel, made)
            made.scores = Scores(0.2, 3.0, torch.tensor([-50.0, -1.0, 2.0, 80.0]))
            compare(kernel, made)
            made.values = made.keys[..., :40]
            compare(kernel, made)


def test_shapes_and_dtypes(kernel: FusedKernel) -> None:
    check_shapes(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in LEVELS if level.cpu_flags <= this_cpu_flags()])
def test_every_level_of_this_cpu(level: CpuLevel) -> None:
    made, helping = (compiled(name, level, find_compiler()) for name in ("attention", "linear"))
    check_shapes(CpuPagedAttention(loaded(made, threads_of=helping), Caller(2)))


@pytest.mark.parametrize("start", [0, 15, 16, 126, 127, 128, 129, 255, 300, 1023, 2047, 4095])
def test_lengths(kernel: FusedKernel, start: int) -> None:
    """One token after so many others: one part of keys, several, and their borders."""
    compare(kernel, scene([(start, 1), (start // 2, 1)], block_size=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 511, 512, 1100])
def test_latent_vectors(kernel: FusedKernel, start: int, dtype: torch.dtype) -> None:
    """Values that are a part of the keys of one KV head: tasks of 512 keys."""
    made = scene([(start, 1), (start // 3, 7)], heads=16, kv_heads=1, dim=576, dtype=dtype, pool_dtype=dtype)
    made.values, made.scores = made.keys[..., :512], Scores(192**-0.5)
    compare(kernel, made)


def test_a_long_prompt_and_chunks_of_it(kernel: FusedKernel) -> None:
    whole = scene([(0, 700)], heads=6, kv_heads=2, block_size=16)
    expected = compare(kernel, whole)
    for first, tokens in ((0, 300), (300, 1), (301, 399)):
        part = Scene(
            whole.query[first : first + tokens], whole.keys, whole.values,
            torch.tensor([(0, tokens, first, 0)]), whole.tables,
        )  # fmt: skip
        found = kernel.apply(*part.args)
        torch.testing.assert_close(found, expected[first : first + tokens], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [None, 1, 2, 33, 128])
def test_pairs_of_bfloat16(kernel: FusedKernel, window: int | None) -> None:
    """Dims and keys that are odd or few, tiles that end anywhere, windows that begin within a pair."""
    chance = random.Random(window or 0)
    for seed in range(24):
        group, dim = chance.choice((1, 2, 3, 4, 5, 8)), chance.choice((1, 2, 15, 17, 31, 33, 47, 64, 65, 128))
        parts = [(chance.randrange(150), 1), (chance.randrange(150), chance.randrange(2, 40)), (126, 4)]
        made = scene(
            parts, heads=2 * group, dim=dim, window=window, seed=seed, dtype=torch.bfloat16,
            pool_dtype=torch.bfloat16,
        )  # fmt: skip
        compare(kernel, made)


def test_weights_of_bfloat16_add_up_to_one(kernel: FusedKernel) -> None:
    """What all keys have in common comes out as it is: weights and their sum are rounded alike."""
    made = scene([(700, 1), (0, 300)], dim=32, dtype=torch.bfloat16, pool_dtype=torch.bfloat16)
    made.values[:] = 1.0
    assert torch.equal(kernel.apply(*made.args), torch.ones_like(made.query))


@settings(max_examples=examples(60))
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 60))), min_size=1, max_size=4
    ),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 9),
    dim=st.integers(1, 140),
    block_size=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    pool_dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 200),
    seed=st.integers(0, 99),
    shared=st.booleans(),
    strided=st.booleans(),
    scores=st.none() | st.builds(Scores, st.floats(0.05, 1), st.none() | st.floats(0.5, 60)),
    value_dim=st.none() | st.integers(1, 140),
)
def test_any_tables_and_strides(
    kernel: FusedKernel, parts: list[tuple[int, int]], kv_heads: int, group: int, dim: int, block_size: int,
    dtype: torch.dtype, pool_dtype: torch.dtype, window: int | None, seed: int, shared: bool,
    strided: bool, scores: Scores | None, value_dim: int | None,
) -> None:  # fmt: skip
    made = scene(
        parts, heads=kv_heads * group, kv_heads=kv_heads, dim=dim, block_size=block_size, dtype=dtype,
        pool_dtype=pool_dtype, window=window, seed=seed, shared=shared,
    )  # fmt: skip
    if strided:  # the query is a part of fused heads, keys and values are two halves of one pool
        made.query = torch.cat([made.query, made.query], dim=1)[:, : kv_heads * group]
        both = torch.cat([made.keys, made.values], dim=2)
        made.keys, made.values = both[:, :, :kv_heads], both[:, :, kv_heads:]
    if scores is not None:
        sinks = 4 * torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(seed))
        made.scores = replace(scores, sinks=sinks) if seed % 2 else scores
    if value_dim is not None:  # as in latent attention: a part of the keys
        made.values = made.keys[..., :value_dim]
    compare(kernel, made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_capped_scores_of_any_size(kernel: FusedKernel, dtype: torch.dtype) -> None:
    """From 1e-3 of the limit, where capping must change nothing, to far beyond it."""
    for scale in (1e-3, 0.3, 30.0, 1e4):
        made = scene([(300, 1), (0, 100)], dim=32, dtype=dtype, pool_dtype=dtype)
        made.scores = Scores(scale, 30.0)
        compare(kernel, made, slack=1e-4 * min(scale, 1.0))


@pytest.mark.parametrize("sink", [-math.inf, -300.0, 0.0, 300.0])
def test_sinks_far_from_the_scores(kernel: FusedKernel, sink: float) -> None:
    made = scene([(300, 1), (0, 100)], dim=32)
    made.scores = Scores(0.2, None, torch.tensor([sink, 0.0, sink, 1.0]))
    found = compare(kernel, made)
    if sink == 300.0:
        assert not found[:, ::2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_span_does_not_depend_on_its_company(kernel: FusedKernel, dtype: torch.dtype) -> None:
    """The same bits alone, among others, and on another number of threads."""
    together = scene(
        [(400, 1), (90, 50), (33, 1), (0, 300)], dim=64, block_size=16, dtype=dtype, pool_dtype=dtype
    )
    found = kernel.apply(*together.args)
    for threads in (1, 2):
        other = cpu_kernels(threads).attention
        assert other is not None
        for i in range(4):
            alone = other.apply(*together.args[:3], together.spans[i : i + 1], together.tables)
            first, tokens = together.spans[i, :2].tolist()
            assert torch.equal(alone[first : first + tokens], found[first : first + tokens])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_inf_reach_whoever_sees_them(
    kernel: FusedKernel, bad: float, window: int | None, dtype: torch.dtype
) -> None:
    """And nobody else: no query before them in their own chunk, none whose window is past them."""
    chance = random.Random(5)
    reached = 0
    for seed in range(12):
        parts, dim = [(150, 1), (20, 90), (0, 70)], (24, 23)[seed % 2]
        made = scene(parts, dim=dim, window=window, seed=seed, dtype=dtype, pool_dtype=dtype)
        pool = (made.keys, made.values)[seed % 2]
        for _ in range(3):
            entry = chance.randrange(len(made.tables))
            pool[made.tables[entry], chance.randrange(4), chance.randrange(2), chance.randrange(dim)] = bad
        if seed % 3 == 0:
            made.query[chance.randrange(len(made.query)), chance.randrange(4), 3] = bad
        if seed % 4 == 3:
            made.keys[made.tables[0]] = bad
        found = compare(kernel, made)
        assert found.isfinite().any()
        reached += int((~found.isfinite()).sum())
    assert reached


@pytest.mark.parametrize("scale", [0.0, 1e-30, 30.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_any_size(kernel: FusedKernel, scale: float, dtype: torch.dtype) -> None:
    """Weights that underflow, rows where one key takes all. Float32 knows a score of 1,000 to 1e-4."""
    made = scene([(300, 1), (0, 100), (77, 40)], dim=32, dtype=dtype, pool_dtype=dtype)
    made.query *= scale
    compare(kernel, made, slack=2e-6 * scale)


def test_keys_that_are_all_the_same(kernel: FusedKernel) -> None:
    same = scene([(500, 1), (0, 64)])
    same.keys[:] = 1.0
    compare(kernel, same)


@pytest.mark.parametrize("value", [65504.0, 65519.0, 65520.0, 1e-8, 3e-8, 6.1e-5, -6.0e-8, 0.1, 2049.0, 1e30])
def test_outputs_are_rounded_as_torch_does(kernel: FusedKernel, value: float) -> None:
    """One key: its value is the output, in the query's dtype."""
    for dtype in DTYPES:
        made = scene([(0, 1)], dim=16, dtype=dtype)
        made.values[:] = value
        assert torch.equal(kernel.apply(*made.args), torch.full((1, 4, 16), value).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_a_few_tokens_are_computed_as_each_alone(kernel: FusedKernel, dtype: torch.dtype, group: int) -> None:
    """What speculative decoding verifies has the bits of plain decoding, whatever follows a token."""
    for start, tokens in ((0, 5), (60, 6), (63, 2), (126, 5), (255, 3), (300, 48 // group)):
        made = scene(
            [(start, tokens)], heads=2 * group, block_size=16, dtype=dtype, pool_dtype=dtype, seed=start
        )
        made.decode_rows = tokens
        together = compare(kernel, made)
        for token in range(tokens):
            alone = torch.tensor([[token, 1, start + token, 0]])
            found = kernel.apply(*made.args[:3], alone, *made.args[4:])
            assert torch.equal(found[token], together[token])


def test_no_key_behind_a_token_reaches_it(kernel: FusedKernel) -> None:
    """Proposed tokens may be absurd: their keys and values may be inf or NaN."""
    for dtype in DTYPES:
        made = scene([(61, 7)], dtype=dtype, pool_dtype=dtype, block_size=16)
        made.decode_rows = 7
        clean = kernel.apply(*made.args)
        for last in range(1, 7):
            block, slot = made.tables[(61 + last) // 16], (61 + last) % 16
            keys, values = made.keys.clone(), made.values.clone()
            keys[block, slot], values[block, slot] = math.nan, math.inf
            found = kernel.apply(made.query, keys, values, *made.args[3:])
            assert torch.equal(found[:last], clean[:last])


@pytest.mark.parametrize("window", [1, 2, 5, 63, 64, 65, 130])
def test_a_few_tokens_in_a_window(kernel: FusedKernel, window: int) -> None:
    """What is left of the window of every token is NaN."""
    for dtype in (torch.float32, torch.bfloat16):
        made = scene([(200, 5), (2, 7)], dtype=dtype, pool_dtype=dtype, window=window, block_size=8)
        made.decode_rows = 12
        for position in range(max(0, 201 - window)):
            made.keys[made.tables[position // 8], position % 8] = math.nan
            made.values[made.tables[position // 8], position % 8] = math.nan
        compare(kernel, made)


def test_a_span_without_tokens_is_padding(kernel: FusedKernel) -> None:
    made = scene([(70, 1), (9, 3)])
    padded = torch.cat([made.spans, torch.zeros(2, 4, dtype=torch.int64)])
    assert torch.equal(kernel.apply(*made.args[:3], padded, made.tables), kernel.apply(*made.args))


def test_what_leads_outside_is_refused(kernel: FusedKernel) -> None:
    good = scene([(9, 3), (5, 1)])
    num_blocks = len(good.keys)
    bad_spans: list[tuple[int, ...]] = [
        (2, 3, 9, 0), (-1, 1, 5, 3), (0, -1, 5, 0), (0, 1, -1, 0), (0, 1, 40, 0), (0, 1, 5, 4), (0, 1, 5, -1),
        (0, 1, 2**62, 0), (2**62, 1, 5, 0), (0, 2**62, 5, 0),
    ]  # fmt: skip
    for span in bad_spans:
        with pytest.raises(KernelError, match="a span is not within"):
            kernel.apply(*good.args[:3], torch.tensor([span]), good.tables)
    for block in (-1, num_blocks, 2**31 - 1):
        tables = good.tables.clone()
        tables[1] = block
        with pytest.raises(KernelError, match="outside the pool"):
            kernel.apply(*good.args[:4], tables)


def test_what_is_not_supported_is_named(kernel: FusedKernel) -> None:
    q, k, v, spans, tables, *_ = scene([(9, 3), (5, 1)]).args
    assert isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)  # noqa: PT018
    assert isinstance(spans, torch.Tensor) and isinstance(tables, torch.Tensor)  # noqa: PT018
    cases: list[tuple[tuple[object, ...], str]] = [
        ((q, k), "takes query, keys, values, spans, tables"),
        ((q.double(), k, v, spans, tables), "no kernel for torch.float64"),
        ((q, k, v.half(), spans, tables), "no kernel for torch.float32 over torch.float32 and torch.float16"),
        ((q, k, v[:3], spans, tables), "are no query and pools"),
        ((q[:, :, :8], k, v, spans, tables), "are no query and pools"),
        ((q[:, :3], k, v, spans, tables), "make no groups"),
        ((q, k.transpose(1, 3), v.transpose(1, 3), spans, tables), "are no query and pools"),
        ((q, k.mT.contiguous().mT, v, spans, tables), "not contiguous"),
        ((q, k, v, spans.int(), tables), "spans are contiguous int64"),
        ((q, k, v, spans, tables.long()), "tables are contiguous int32"),
        ((q, k, v, spans, tables, 0), "shows nothing"),
        ((q, k, v, spans, tables, None, Scores(1.0, 0.0)), "limited to a positive number"),
        ((q, k, v, spans, tables, None, Scores(1.0, None, q[0, :3, 0])), "sinks are contiguous float32"),
        ((q.clone().requires_grad_(), k, v, spans, tables), "has no gradient"),
        ((q.to("meta"), k, v, spans, tables), "runs on a CPU"),
    ]
    for inputs, reason in cases:
        assert not kernel.supports(*inputs).usable
        with pytest.raises(KernelError, match=reason):
            kernel.apply(*inputs)


def test_no_spans_is_no_work(kernel: FusedKernel) -> None:
    made = scene([(0, 1)])
    assert kernel.apply(*made.args[:3], torch.zeros(0, 4, dtype=torch.int64), made.tables).shape == (1, 4, 16)
