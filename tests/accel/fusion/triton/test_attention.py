"""Paged attention in Triton against its plain twin in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from sagellm.accel.fusion.triton.attention import TritonPagedAttention, paged_attention
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import Scores
from tests.accel.fusion.triton.scenes import DEVICE, DTYPES, Attention, attention, interpreted
from tests.effort import examples

F32, F16 = torch.float32, torch.float16
TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1e-2, 1.6e-2), torch.float16: (2e-3, 2e-3)}


def compare(scene: Attention, processors: int = 8) -> torch.Tensor:
    expected = paged_attention(*scene.doubled().args)
    found: torch.Tensor = TritonPagedAttention(processors).apply(*scene.args)
    assert found.dtype == scene.query.dtype
    absolute, relative = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), expected, atol=absolute, rtol=relative, equal_nan=True)
    return found


@pytest.mark.parametrize(
    ("dim", "dtype"),
    interpreted([(24, F16), (128, F32), (256, F16)], product([24, 128, 256], DTYPES)),
)
def test_head_dims(dim: int, dtype: torch.dtype) -> None:
    compare(attention([(0, 1), (37, 1)], dim=dim, seed=dim, dtype=dtype))
    compare(attention([(37, 1), (3, 20)], dim=dim, seed=dim, dtype=dtype))


@pytest.mark.parametrize(
    "scores", [Scores(0.5), Scores(0.5, 2.0), Scores(0.3, 2.0, True), Scores(1.0, None, True)]
)
def test_scores(scores: Scores) -> None:
    """A scale, soft-capping and sinks; in one part of the keys and in several."""
    if scores.sinks:
        scores = replace(scores, sinks=torch.tensor([-2.0, 0.5, 4.0, 30.0], device=DEVICE))
    for processors in (1, 8):
        compare(replace(attention([(70, 1), (0, 1)]), scores=scores), processors)
    compare(replace(attention([(37, 1), (3, 20)]), scores=scores))


@pytest.mark.parametrize(
    ("dim", "value_dim", "heads", "dtype"),
    interpreted(
        [(24, 16, 4, F32), (576, 512, 32, F16)], [(24, 16, 4, F32), (40, 32, 32, F16), (576, 512, 32, F16)]
    ),
)
def test_values_that_are_a_part_of_the_keys(dim: int, value_dim: int, heads: int, dtype: torch.dtype) -> None:
    for parts in ([(37, 1), (0, 1)], [(5, 1), (3, 9)]):
        scene = attention(parts, heads=heads, kv_heads=1, dim=dim, dtype=dtype)
        compare(replace(scene, values=scene.keys[..., :value_dim], scores=Scores(0.1)))


def test_values_of_other_dims_than_keys() -> None:
    for dim, value_dim in ((24, 40), (24, 16)):
        scene = attention([(37, 1), (3, 20)], dim=dim, seed=dim)
        values = torch.cat([scene.values, scene.keys], dim=-1)[..., :value_dim]
        compare(replace(scene, values=values))


@pytest.mark.parametrize("group", [1, 3, 8, 17])
def test_groups_of_query_heads(group: int) -> None:
    compare(attention([(70, 1), (0, 1)], heads=3 * group, kv_heads=3, seed=group))
    compare(attention([(70, 1), (11, 9)], heads=3 * group, kv_heads=3, seed=group))


@pytest.mark.parametrize(
    ("block_size", "window"),
    interpreted([(1, 65), (48, 1), (48, None)], product([1, 48], [None, 1, 65])),
)
def test_block_sizes_and_windows(block_size: int, window: int | None) -> None:
    compare(attention([(90, 1), (12, 1), (0, 1)], block_size=block_size, window=window))
    compare(attention([(90, 1), (40, 60), (0, 30)], block_size=block_size, window=window))


@pytest.mark.parametrize(
    ("start", "processors"),
    interpreted(
        [(0, 1), (63, 16), (64, 1), (64, 16), (300, 1), (4095, 16)],
        product([0, 63, 64, 300, 4095], [1, 16]),
    ),
)
def test_lengths(start: int, processors: int) -> None:
    """Keys in one part and in up to 32, most of them empty where there are few keys."""
    compare(attention([(start, 1), (start // 2, 1)], block_size=16), processors)


@pytest.mark.parametrize("length", interpreted([150], [150, 300]))
def test_a_long_prompt_and_a_chunk_of_it(length: int) -> None:
    start, end = length // 3, length * 5 // 6
    whole = attention([(0, length)], heads=6, kv_heads=2, block_size=16)
    expected = compare(whole)
    part = Attention(
        whole.query[start:end], whole.keys, whole.values,
        torch.tensor([(0, end - start, start, 0)], device=DEVICE), whole.tables,
    )  # fmt: skip
    torch.testing.assert_close(compare(part), expected[start:end], atol=2e-6, rtol=2e-6)


any_step = given(
    parts=st.lists(st.tuples(st.integers(0, 90), st.just(1) | st.integers(1, 40)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 6),
    dim=st.integers(1, 70),
    block_size=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 100),
    processors=st.sampled_from([1, 16]),
    seed=st.integers(0, 99),
    shared=st.booleans(),
    strided=st.booleans(),
)


def check_step(processors: int, kv_heads: int, group: int, **scene: Any) -> None:
    compare(attention(heads=kv_heads * group, kv_heads=kv_heads, **scene), processors)


@settings(max_examples=examples(6))
@any_step
def test_any_step(**step: Any) -> None:
    check_step(**step)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=300)
@any_step
def test_any_step_thoroughly(**step: Any) -> None:
    check_step(**step)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["query", "keys", "values"])
def test_nan_and_inf_go_where_the_twin_takes_them(name: str, bad: float) -> None:
    """In the first token, which all of its sequence see, in another split than the last; nowhere else."""
    scene = attention([(80, 1), (0, 1), (33, 1)], dim=8)
    first = int(scene.tables[int(scene.spans[0, 3])])
    place = (0, 1, 2) if name == "query" else (first, 0, 1, 2)
    getattr(scene, name)[place] = bad
    found = compare(scene, processors=12)
    assert found[1:].isfinite().all()


def test_every_score_minus_inf_is_nan_as_softmax_says() -> None:
    scene = attention([(9, 1), (2, 1)], dim=8)
    scene.query[0] = torch.inf
    scene.keys.fill_(-1.0)
    assert compare(scene)[0].isnan().all()


def test_rows_of_no_span_and_no_spans() -> None:
    scene = attention([(9, 5), (2, 4)])
    kernel = TritonPagedAttention(8)
    found = kernel.apply(*replace(scene, spans=scene.spans[1:]).args)
    torch.testing.assert_close(found[5:], compare(scene)[5:])
    assert kernel.apply(*scene.args[:3], scene.spans[:0], scene.tables).shape == scene.query.shape


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": torch.zeros(3, 4, 2, 16, dtype=torch.float64)}, "no kernel for"),
        ({"query": torch.zeros(2, 3, 16)}, "make no groups"),
        ({"query": torch.zeros(2, 4, 8)}, "no query and pools"),
        ({"spans": torch.zeros(1, 3, dtype=torch.int64)}, "int64"),
        ({"tables": torch.zeros(9, dtype=torch.int64)}, "int32"),
        ({"window": 0}, "shows nothing"),
    ],
)
def test_what_it_refuses(changes: dict[str, torch.Tensor | int], reason: str) -> None:
    scene = attention([(3, 2)])
    moved = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in changes.items()
    }
    args = Attention(**(scene.__dict__ | moved)).args
    kernel = TritonPagedAttention(8)
    assert reason in kernel.supports(*args).reason
    with pytest.raises(KernelError, match=reason):
        kernel.apply(*args)
