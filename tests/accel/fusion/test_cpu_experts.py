"""The C++ kernels for experts against their slow twins, and grouped products against one product each."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.quantization.round_to_nearest import RoundToNearest
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import KernelSet, Routes
from sagellm.engines.native.experts import ExpertSpec, combine, route

PLAIN = ExpertSpec((True,), 7, 3, 8)
RULES = {
    "softmax": PLAIN,
    "softmax, not normalised": ExpertSpec((True,), 128, 8, 8, renormalize=False, scale=2.0),
    "one expert": ExpertSpec((True,), 1, 1, 8),
    "best groups": ExpertSpec((True,), 12, 4, 8, groups=4, kept_groups=2),
    "best pairs": ExpertSpec(
        (True,), 16, 5, 8, "sigmoid", scale=2.5, is_corrected=True, groups=4, kept_groups=3, group_best=2
    ),
}


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "helped"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    found = cpu_kernels(request.param)
    if found.route is None:
        pytest.skip("no C++ compiler")
    return found


def routed(
    spec: ExpertSpec, rows: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, spec.count, generator=generator)
    correction = torch.randn(spec.count, generator=generator) if spec.is_corrected else None
    return logits, correction, torch.zeros(spec.count, dtype=torch.int64)


def same(mine: Routes, theirs: Routes) -> None:
    """Expert by expert: the choices of a token may come in another order."""
    assert torch.equal(mine.starts, theirs.starts)
    assert torch.equal(mine.tokens, theirs.tokens)
    for one, other in ((mine, theirs), (theirs, mine)):
        assert sorted(one.places.flatten().tolist()) == list(range(one.places.numel()))
        rows = torch.arange(len(one.places))[:, None].expand(one.places.shape)
        assert torch.equal(one.tokens[one.places], rows), "a place is a row of its token"
        weights = torch.empty(one.places.numel())
        weights[one.places] = one.weights
        own = torch.empty_like(weights)
        own[other.places] = other.weights.float()
        torch.testing.assert_close(weights, own, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 5, 70])
@pytest.mark.parametrize("rule", RULES)
def test_routes_are_those_of_the_twin_and_of_torch(kernels: KernelSet, rule: str, rows: int) -> None:
    spec = RULES[rule]
    logits, correction, counts = routed(spec, rows)
    assert kernels.route is not None
    found = kernels.route.apply(logits, correction, spec, counts)
    counted = counts.clone()
    same(found, kernels.route.reference(logits, correction, spec, counts))
    same(found, route(logits, correction, spec, counts))
    assert counted.sum() == rows * spec.per_token
    assert torch.equal(counts, 3 * counted)


def test_logits_that_are_no_numbers_choose_each_expert_once(kernels: KernelSet) -> None:
    logits, _, counts = routed(PLAIN, 9)
    logits[4] = torch.nan
    assert kernels.route is not None
    found = kernels.route.apply(logits, None, PLAIN, counts)
    assert sorted(found.places.flatten().tolist()) == list(range(27))
    assert found.weights[4].isnan().all()
    assert not found.weights[5].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 33, 200])
def test_sums_are_those_of_the_twin(kernels: KernelSet, dtype: torch.dtype, columns: int) -> None:
    logits, _, counts = routed(PLAIN, 11)
    assert kernels.route is not None
    assert kernels.combine is not None
    routes = kernels.route.apply(logits, None, PLAIN, counts)
    outputs, added = torch.randn(33, columns).to(dtype), torch.randn(columns, 11).to(dtype).t()
    limit = next(t for t in kernels.combine.tolerances if str(dtype).endswith(t.dtype))
    for more in (None, added):
        found = kernels.combine.apply(outputs, routes, more)
        for twin in (kernels.combine.reference, combine):
            expected = twin(outputs, routes, more)
            torch.testing.assert_close(found, expected, atol=limit.absolute, rtol=limit.relative)
    with pytest.raises(KernelError, match="index"):
        kernels.combine.apply(
            outputs, Routes(routes.tokens, routes.starts, routes.places + 1, routes.weights)
        )


STARTS = ([0, 3, 3, 3, 10], [0, 0, 0, 0, 1], [0, 400, 401, 480, 500], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0])


@pytest.mark.parametrize("outputs", [16, 24, 64, 97, 130])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
def test_a_grouped_product_has_the_bits_of_a_product_for_each_matrix(
    kernels: KernelSet, kind: str, outputs: int
) -> None:
    """Outputs that fill panels, and stacks in which two matrices share one."""
    generator = torch.Generator().manual_seed(outputs)
    matrices = torch.randn(4, outputs, 70, generator=generator)
    bias = torch.randn(4, outputs, generator=generator)
    assert kernels.linear is not None
    assert kernels.quantized is not None
    if kind in ("float32", "bfloat16"):
        matrices = matrices.to(getattr(torch, kind))
        stack: Any = kernels.linear.empty(4 * outputs, 70, matrices.dtype, torch.zeros)
        stack.store(0, matrices.flatten(0, 1))
        each: list[Any] = [kernels.linear.empty(outputs, 70, matrices.dtype, torch.zeros) for _ in range(4)]
        for own, values in zip(each, matrices, strict=True):
            own.store(0, values)
        kernel: Any = kernels.linear
    else:
        quantizer = RoundToNearest(int(kind[3:]))
        pack = kernels.quantized.pack
        stack = pack(quantizer.quantized("w", matrices.flatten(0, 1)))
        each = [pack(quantizer.quantized("w", values)) for values in matrices]
        kernel = kernels.quantized
    for bounds in STARTS:
        x = torch.randn(bounds[-1], 70, generator=generator)
        for biases in (None, bias):
            found = kernel.apply_grouped(x, stack, torch.tensor(bounds), biases)
            for i, (begin, end) in enumerate(pairwise(bounds)):
                own_bias = None if biases is None else biases[i]
                assert torch.equal(found[begin:end], kernel.apply(x[begin:end], each[i], own_bias))


@pytest.mark.parametrize(
    ("starts", "reason"),
    [
        ([0, 2], "index"),
        ([0, 5, 4, 5, 6], "index"),
        ([1, 5, 6], "index"),
        ([0, 5, 7], "index"),
        ([0, 2, 4, 6], "equal matrices"),
    ],
)
def test_starts_that_are_none_are_refused(kernels: KernelSet, starts: list[int], reason: str) -> None:
    assert kernels.linear is not None
    stack = kernels.linear.empty(20, 8, torch.float32, torch.zeros)
    with pytest.raises(KernelError, match=reason):
        stack.multiply_grouped(torch.ones(6, 8), torch.tensor(starts))
