"""Draws from the largest logits against a twin that sorts the whole vocabulary."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.types import SamplingParams
from sagellm.engines.native.sampler import FIRST_SIZE, draw, filter_rows, greatest

Values = Callable[[int, torch.Generator], torch.Tensor]


def normal(vocab: int, generator: torch.Generator) -> torch.Tensor:
    return 3 * torch.randn(vocab, generator=generator)


def flat(vocab: int, generator: torch.Generator) -> torch.Tensor:
    return torch.zeros(vocab)


def with_ties(vocab: int, generator: torch.Generator) -> torch.Tensor:
    """As bfloat16 has them: a few dozen different values in all."""
    return normal(vocab, generator).div(2).round()


def mostly_impossible(vocab: int, generator: torch.Generator) -> torch.Tensor:
    values = normal(vocab, generator)
    values[torch.rand(vocab, generator=generator) < 0.9] = -math.inf
    values[vocab // 2] = 1.0
    return values


def one_above_all(vocab: int, generator: torch.Generator) -> torch.Tensor:
    values = normal(vocab, generator)
    values[vocab // 3] = 1e30
    return values


def impossible_but_one(vocab: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.full((vocab,), -math.inf)
    values[vocab // 3] = -7.0
    return values


VALUES: tuple[Values, ...] = (
    normal, flat, with_ties, mostly_impossible, one_above_all, impossible_but_one,
)  # fmt: skip


def sorted_weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The weight of every token of a row [vocab], 0 where a filter takes it: all of them sorted."""
    scores = (logits.double() - logits.max().double()) / params.temperature
    ordered, ids = scores.sort(descending=True, stable=True)
    weights = ordered.exp()
    if params.top_k > 0:
        weights[params.top_k :] = 0.0
    if params.top_p < 1.0:
        cut = weights.cumsum(0) - weights >= params.top_p * weights.sum()
        cut[0] = False
        weights[cut] = 0.0
    if params.min_p > 0:
        weights[1:][ordered[1:] < math.log(params.min_p)] = 0.0
    return torch.zeros_like(weights).scatter_(0, ids, weights)


def check(logits: torch.Tensor, params: list[SamplingParams]) -> None:
    """The kept sets and their weights, and what is drawn at points on a fine grid."""
    best, _ = greatest(logits)
    expected = torch.stack([sorted_weights(row, own) for row, own in zip(logits, params, strict=True)])
    before = logits.clone()
    seen: list[int] = []
    for kept in filter_rows(logits, best, params, range(len(params))):
        for row, ids, weights in zip(kept.rows, kept.ids, kept.weights, strict=True):
            found = torch.zeros(logits.shape[1] + 1, dtype=torch.float64).scatter_(0, ids, weights)
            assert torch.equal(found[:-1], expected[row])
            seen.append(row)
    assert sorted(seen) == list(range(len(params)))
    for point in (0.0, 0.1, 0.5, 0.77, 0.999, 1 - 2**-53):
        drawn = draw(logits, best, params, [point] * len(params))
        for row, token_id in enumerate(drawn):
            cumulative = expected[row].cumsum(0)
            limit = int((cumulative == cumulative[-1]).nonzero()[0])
            assert token_id == min(int((cumulative <= point * cumulative[-1]).sum()), limit)
            assert expected[row, token_id] > 0
    assert torch.equal(logits, before)


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.01, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 3, 100, FIRST_SIZE - 1, FIRST_SIZE, 1000]),
    top_p=st.sampled_from([1e-9, 0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0]),
)


@settings(max_examples=120)
@given(
    params=st.lists(params_strategy, min_size=1, max_size=4),
    vocab=st.sampled_from([2, 24, FIRST_SIZE, FIRST_SIZE + 1, 3000]),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_kept_tokens_and_their_weights(
    params: list[SamplingParams], vocab: int, seed: int, dtype: torch.dtype
) -> None:
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    rows = [chance.choice(VALUES)(vocab, generator).to(dtype) for _ in params]
    check(torch.stack(rows), params)


@pytest.mark.parametrize("values", VALUES)
def test_each_filter_alone_and_all_together(values: Values) -> None:
    """In one batch, where some rows need the whole vocabulary and others a few tokens."""
    generator = torch.Generator().manual_seed(1)
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=7),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.01),
        SamplingParams(temperature=0.7, top_k=500, top_p=0.8, min_p=0.001),
    ]
    check(torch.stack([values(20_000, generator) for _ in params]), params)


def test_the_greatest_is_the_first_of_equals_and_a_nan_is_greater() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-math.inf] * 4, [1.0, math.inf, 2.0, math.nan]])
    best, ids = greatest(logits)
    assert ids.tolist() == [1, 0, 3]
    assert best[:2].tolist() == [3.0, -math.inf]
    assert best[2].isnan()


def test_no_row_is_no_token() -> None:
    assert draw(torch.zeros(0, 9), torch.zeros(0), [], []) == []
