"""Drawing without a sort against the twin that sorts, and against the engine's own sampler."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from sagellm.accel.fusion.triton.draw import TritonDraw, draw
from sagellm.core.errors import KernelError
from sagellm.core.types import SamplingParams
from sagellm.engines.native.sampler import RowSampler, kernel_draw, sample
from tests.accel.fusion.triton.scenes import DEVICE
from tests.effort import examples

ROW = st.tuples(
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 20, 10_000]),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.floats(0.0, 1.0, exclude_max=True),
)


@settings(max_examples=examples(8))
@given(
    rows=st.lists(ROW, min_size=1, max_size=2),
    vocab=st.sampled_from([1, 7, 300, 5000]),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    ties=st.booleans(),
    hidden=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_same_token_as_the_twin(
    rows: list[tuple[float, ...]], vocab: int, spread: float, ties: bool, hidden: bool, seed: int
) -> None:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if ties:
        logits = logits.round()
    if hidden and vocab > 1:
        logits[:, ::3] = -math.inf
    logits, params = logits.to(DEVICE), torch.tensor(rows, dtype=torch.float64, device=DEVICE)
    assert TritonDraw().apply(logits, params).tolist() == draw(logits, params).tolist()


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, math.nextafter(1.0, 0.0)])
def test_ties_zeros_of_both_signs_and_borders(uniform: float) -> None:
    logits = torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0]] * 3, device=DEVICE)
    rows = [(1.0, 2, 1.0, 0.0, uniform), (1.0, 0, 0.4, 0.0, uniform), (1.0, 3, 0.4, 0.0, uniform)]
    params = torch.tensor(rows, dtype=torch.float64, device=DEVICE)
    found = TritonDraw().apply(logits, params)
    assert found.tolist() == draw(logits, params).tolist()
    assert all(token < 2 for token in found.tolist())


def test_as_the_sampler_draws() -> None:
    """Greedy rows, rows with NaN and all sorts of rows in one batch, twice: reproducible by seed."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.1),
        SamplingParams(temperature=1.0, top_k=-1),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, logit_bias={3: 2.0}, logprobs=2),
        SamplingParams(temperature=1.0),
    ]
    rows = [RowSampler.of(p, 7 + i, [1, 2], [3], (), 500, DEVICE) for i, p in enumerate(params)]
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)).mul_(3).to(DEVICE)
    logits[5] = math.nan
    expected = sample(logits.clone(), rows)
    by_kernel = [sample(logits.clone(), rows, kernel_draw(TritonDraw())) for _ in range(2)]
    assert by_kernel[0].token_ids == by_kernel[1].token_ids == expected.token_ids
    assert by_kernel[0].logprobs.keys() == expected.logprobs.keys() == {4}


def test_frequencies_follow_the_distribution() -> None:
    """top_k 3 of four: the drawn shares are those of the three, renormalised."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5]] * 8, device=DEVICE)
    uniform = (torch.arange(8, dtype=torch.float64, device=DEVICE) + 0.5) / 8
    params = torch.tensor([(1.0, 3, 1.0, 0.0, 0.0)] * 8, dtype=torch.float64, device=DEVICE)
    params[:, 4] = uniform
    counts = torch.bincount(TritonDraw().apply(logits, params), minlength=4)
    expected = torch.tensor([-math.inf, 1.0, 2.0, 0.5]).softmax(0) * 8
    assert counts[0] == 0
    assert (counts.cpu() - expected).abs().max() <= 1


def test_what_it_refuses() -> None:
    logits, params = torch.zeros(2, 5, device=DEVICE), torch.ones(2, 5, dtype=torch.float64, device=DEVICE)
    kernel = TritonDraw()
    assert kernel.supports(logits, params).usable
    for bad in (
        (logits.double(), params),
        (logits.t(), params),
        (logits, params.float()),
        (logits, params[:1]),
    ):
        with pytest.raises(KernelError):
            kernel.apply(*bad)
