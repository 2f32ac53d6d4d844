"""Paged attention against its slow twin, and how decode rows are grouped."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.granite import modeling_granite as granite

from sagellm.core.blocks import cdiv
from sagellm.core.protocols.fusion import Scores
from sagellm.core.types import AttentionChunk, Window
from sagellm.engines.native import attention
from sagellm.engines.native.attention import AttentionPlanner, Span, attend, group_rows
from sagellm.engines.native.kv_cache import PagedKV
from tests.engines.native.attention_reference import attention_reference

BLOCK_SIZE, KV_HEADS, HEADS, DIM = 4, 2, 6, 8


def scene(
    decode: list[int], prefill: list[tuple[int, int]], *, seed: int, consecutive: bool
) -> tuple[list[Span], list[Span], PagedKV, torch.Tensor]:
    """Spans with tables of their own and a pool of random KV. `decode`: positions; `prefill`: (start,
    tokens).
    """
    torch.manual_seed(seed)
    kv = PagedKV(1, 256, BLOCK_SIZE, KV_HEADS, DIM, torch.device("cpu"), torch.float64)
    kv.keys[0].normal_()
    kv.values[0].normal_()
    free = list(range(256))
    if not consecutive:
        random.Random(seed).shuffle(free)
    spans, first_row = [], 0
    for start, count in [(position, 1) for position in sorted(decode, reverse=True)] + prefill:
        table = [free.pop(0) for _ in range(cdiv(start + count, BLOCK_SIZE))]
        spans.append(Span(first_row, count, start, table))
        first_row += count
    query = torch.randn(first_row, HEADS, DIM, dtype=torch.float64)
    return spans[: len(decode)], spans[len(decode) :], kv, query


def new_rows(spans: list[Span], pool: torch.Tensor) -> torch.Tensor:
    """The K or V of the spans' own tokens, which the forward pass has just written to the pool."""
    slots = [
        span.block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for span in spans
        for p in range(span.start, span.end)
    ]
    return pool.flatten(0, 1)[slots]


def check(
    decode: list[int], prefill: list[tuple[int, int]], window: Window | None, seed: int, *, consecutive: bool,
    scores: Scores | None = None,
) -> None:  # fmt: skip
    first, second, kv, query = scene(decode, prefill, seed=seed, consecutive=consecutive)
    plain = scores is None or scores.is_scaled_only
    plan = AttentionPlanner(kv, plain_scores=plain).plan(first, second[:1], second[1:], window)
    spans = first + second
    key, value = new_rows(spans, kv.keys[0]), new_rows(spans, kv.values[0])
    got = attend(plan, kv, 0, query, key, value, scores)
    expected = attention_reference(spans, kv, 0, query, window, scores)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-10)


@settings(max_examples=60)
@given(
    decode=st.lists(st.integers(0, 40), max_size=6),
    prefill=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 25)), max_size=3),
    window=st.none() | st.integers(1, 40) | st.builds(AttentionChunk, st.sampled_from([4, 8, 12, 20])),
    seed=st.integers(0, 99),
    consecutive=st.booleans(),
    scores=st.none() | st.builds(Scores, st.floats(0.05, 1.5), st.none() | st.floats(0.5, 60)),
    with_sinks=st.booleans(),
)
def test_agrees_with_its_slow_twin(
    decode: list[int], prefill: list[tuple[int, int]], window: Window | None, seed: int, consecutive: bool,
    scores: Scores | None, with_sinks: bool,
) -> None:  # fmt: skip
    if scores is not None and with_sinks:
        scores = replace(scores, sinks=torch.randn(HEADS, dtype=torch.float64))
    if decode or prefill:
        check(decode, prefill, window, seed, consecutive=consecutive, scores=scores)


@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_scores_are_those_of_transformers(scale: float) -> None:
    """In float32, a prompt: soft-capping of Gemma 2, sinks of gpt-oss, a scale of Granite."""
    kv = PagedKV(1, 8, BLOCK_SIZE, KV_HEADS, DIM, torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    query = torch.randn(25, HEADS, DIM)
    key, value = torch.randn(2, 25, KV_HEADS, DIM)
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False, sinks=torch.randn(HEADS))
    mask = torch.full((25, 25), -torch.inf).triu(1)
    heads_first = [part.transpose(0, 1)[None] for part in (query, key, value)]
    for forward, scores, more in (
        (gemma2.eager_attention_forward, Scores(scale, 2.5), {"softcap": 2.5}),
        (gpt_oss.eager_attention_forward, Scores(scale, None, module.sinks), {}),
        (granite.eager_attention_forward, Scores(scale), {}),
    ):
        theirs = forward(module, *heads_first, mask, scaling=scale, **more)[0][0]
        planner = AttentionPlanner(kv, plain_scores=scores.is_scaled_only)
        plan = planner.plan([], [], [Span(0, 25, 0, range(7))], None)
        ours = attend(plan, kv, 0, query, key, value, scores)
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 9, 33, AttentionChunk(4), AttentionChunk(24)])
def test_tiles_agree_with_the_slow_twin(window: Window | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_TILE", 8)
    check([50, 3], [(0, 37), (21, 30), (5, 8), (16, 1)], window, 0, consecutive=False)


def test_groups_are_bounded_by_size_and_by_padding() -> None:
    assert group_rows([], 100) == []
    assert group_rows([10, 10, 10], 100) == [(0, 3)]
    assert group_rows([10, 10, 10], 20) == [(0, 2), (2, 3)]
    assert group_rows([1000, 10, 8, 7], 100) == [(0, 1), (1, 3), (3, 4)]
    assert group_rows([1000, 999], 100) == [(0, 1), (1, 2)]


@given(lengths=st.lists(st.integers(1, 500)), limit=st.integers(1, 2000))
def test_groups_cover_every_row_once(lengths: list[int], limit: int) -> None:
    lengths.sort(reverse=True)
    groups = group_rows(lengths, limit)
    assert [i for start, stop in groups for i in range(start, stop)] == list(range(len(lengths)))
    for start, stop in groups:
        assert stop - start == 1 or (stop - start) * lengths[start] <= limit
        assert lengths[stop - 1] * 4 >= lengths[start] * 3


def test_one_long_row_does_not_make_short_rows_pay() -> None:
    first, second, kv, _ = scene([120, 8, 7, 7], [], seed=0, consecutive=False)
    plan = AttentionPlanner(kv).plan(first, (), second, None)
    assert [group.read.num_seqs * group.read.num_blocks for group in plan.decode] == [31, 9]
