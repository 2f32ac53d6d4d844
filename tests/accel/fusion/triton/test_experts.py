"""Routing, grouped products and weighted sums in Triton against their plain twins."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from sagellm.accel.fusion.triton.experts import (
    TritonCombineExperts,
    TritonGroupedLinear,
    TritonRouteToExperts,
)
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import Routes
from sagellm.engines.native.experts import ExpertSpec
from tests.accel.fusion.triton.scenes import DEVICE, DTYPES

RULES = {
    "softmax": ExpertSpec((True,), 7, 3, 8),
    "not normalised": ExpertSpec((True,), 20, 5, 8, renormalize=False, scale=2.0),
    "one expert": ExpertSpec((True,), 1, 1, 8),
    "best groups": ExpertSpec((True,), 12, 4, 8, groups=4, kept_groups=2),
    "best pairs": ExpertSpec(
        (True,), 18, 5, 8, "sigmoid", scale=2.5, is_corrected=True, groups=3, kept_groups=2, group_best=2
    ),
}


def routed(spec: ExpertSpec, rows: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = 3 * torch.randn(rows, spec.count, generator=generator)
    correction = torch.randn(spec.count, generator=generator).to(DEVICE) if spec.is_corrected else None
    return logits.to(DEVICE), correction, torch.zeros(spec.count, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("rule", RULES)
def test_routes(rule: str, rows: int) -> None:
    spec, kernel = RULES[rule], TritonRouteToExperts()
    logits, correction, counts = routed(spec, rows)
    found = kernel.apply(logits, correction, spec, counts)
    expected_counts = torch.zeros(spec.count, dtype=torch.int64)
    corrected = None if correction is None else correction.cpu()
    expected = kernel.reference(logits.cpu(), corrected, spec, expected_counts)
    for name in ("tokens", "starts", "places"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    torch.testing.assert_close(found.weights.cpu(), expected.weights, atol=1e-6, rtol=1e-5)
    kernel.apply(logits, correction, spec, counts)
    assert torch.equal(counts.cpu(), 2 * expected_counts)


@pytest.mark.parametrize("rule", ["softmax", "best pairs"])
def test_logits_that_are_no_numbers_choose_each_expert_once(rule: str) -> None:
    spec = RULES[rule]
    logits, correction, counts = routed(spec, 5)
    logits[2] = math.nan
    found = TritonRouteToExperts().apply(logits, correction, spec, counts)
    assert sorted(found.places.flatten().tolist()) == list(range(5 * spec.per_token))
    assert found.weights[2].isnan().all()
    assert not found.weights[3].isnan().any()


def test_more_choices_than_a_tile() -> None:
    spec = ExpertSpec((True,), 3, 2, 8)
    logits, _, counts = routed(spec, 700)
    kernel = TritonRouteToExperts()
    found, expected = (f(logits, None, spec, counts) for f in (kernel.apply, kernel.reference))
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert torch.equal(found.places.cpu(), expected.places)


@settings(max_examples=12)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 17, 40]), min_size=1, max_size=5),
    outputs=st.integers(1, 140),
    inputs=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    strided=st.booleans(),
)
def test_grouped_product(
    sizes: list[int], outputs: int, inputs: int, dtype: torch.dtype, biased: bool, strided: bool
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    starts = torch.tensor([0, *sizes]).cumsum(0).to(DEVICE)
    x = torch.randn(sum(sizes), inputs, generator=generator) / inputs**0.5
    weight = torch.randn(len(sizes) * outputs, inputs, generator=generator)
    for number, size in enumerate(sizes):
        if not size:  # is not read
            weight[number * outputs : (number + 1) * outputs] = math.nan
    bias = torch.randn(len(sizes), outputs, generator=generator).to(DEVICE, dtype) if biased else None
    x, weight = x.to(DEVICE, dtype), weight.to(DEVICE, dtype)
    if strided:  # as a projection may return it
        x = x.t().contiguous().t()
    kernel = TritonGroupedLinear()
    found = kernel.apply(x, weight, starts, bias)
    wide = kernel.reference(x.double(), weight.double(), starts, None if bias is None else bias.double())
    limit = next(t for t in kernel.tolerances if str(dtype).endswith(t.dtype))
    torch.testing.assert_close(found.double(), wide, atol=limit.absolute, rtol=limit.relative)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 1100])
def test_sums(dtype: torch.dtype, columns: int) -> None:
    spec = RULES["softmax"]
    routes = TritonRouteToExperts().apply(*routed(spec, 4)[:2], spec, routed(spec, 4)[2])
    outputs = torch.randn(12, columns).to(DEVICE, dtype)
    added = torch.randn(columns, 4).to(DEVICE, dtype).t()
    kernel = TritonCombineExperts()
    limit = next(t for t in kernel.tolerances if str(dtype).endswith(t.dtype))
    for more in (None, added):
        found, expected = kernel.apply(outputs, routes, more), kernel.reference(outputs, routes, more)
        torch.testing.assert_close(found, expected, atol=limit.absolute, rtol=limit.relative)


def test_what_is_no_stack_is_refused() -> None:
    x, weight = torch.ones(6, 8, device=DEVICE), torch.ones(20, 8, device=DEVICE)
    kernel = TritonGroupedLinear()
    for inputs, reason in (
        ((x, weight, torch.tensor([0, 2, 4, 6], device=DEVICE)), "equal matrices"),
        ((x, weight, torch.tensor([0.0, 6.0], device=DEVICE)), "int64"),
        ((x[:, :7], weight, torch.tensor([0, 6], device=DEVICE)), "no linear layer"),
        ((x, weight.half(), torch.tensor([0, 6], device=DEVICE)), "no kernel"),
        ((x, weight, torch.tensor([0, 3, 6], device=DEVICE), x[0]), "bias"),
    ):
        assert not kernel.supports(*inputs).usable
        with pytest.raises(KernelError, match=reason):
            kernel.apply(*inputs)
    place = torch.zeros(6, 1, dtype=torch.int64, device=DEVICE)
    routes = Routes(place, place, place, x[:, :1].half())
    assert "weights of torch.float16" in TritonCombineExperts().supports(x, routes).reason
