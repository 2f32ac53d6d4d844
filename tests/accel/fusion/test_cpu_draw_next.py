"""Greedy draws between recorded steps, against their plain twin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.core.errors import KernelError
from sagellm.core.protocols.fusion import FusedKernel

BLOCK_SIZE, MOST, SIZE = 4, 5, 6


@pytest.fixture(scope="module")
def kernel() -> FusedKernel:
    found = cpu_kernels(1).draw_next
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def inputs(rows: int, vocab: int, seed: int) -> list[Any]:
    """Rows at positions 2, 3, ... with four blocks each, in their order in the kernel."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(2, 2 + rows)
    spans = torch.stack([torch.arange(rows), torch.ones(rows), positions, 4 * torch.arange(rows)], 1).long()
    tables = torch.randperm(4 * rows + 3, generator=generator)[: 4 * rows].int()
    return [
        torch.randn(rows, vocab, generator=generator) * 4, torch.randn(rows, SIZE, generator=generator),
        torch.zeros(rows, SIZE), torch.zeros(rows, dtype=torch.int64), positions.clone(), spans,
        torch.zeros(rows, dtype=torch.int64), tables, torch.zeros(MOST, rows, dtype=torch.int64),
        torch.zeros(MOST, rows), torch.tensor([0, MOST]), BLOCK_SIZE,
    ]  # fmt: skip


def copied(own: list[Any]) -> list[Any]:
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in own]


@given(st.integers(1, 5), st.integers(1, 70), st.integers(0, 99), st.integers(1, MOST))
def test_it_draws_and_moves_on_as_its_twin(
    kernel: FusedKernel, rows: int, vocab: int, seed: int, count: int
) -> None:
    ours = inputs(rows, vocab, seed)
    ours[10][1] = count
    twins = copied(ours)
    for step in range(count):
        ours[0].copy_(torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed + step)))
        twins[0].copy_(ours[0])
        kernel.apply(*ours)
        kernel.reference(*twins)
        for mine, other in zip(ours[:-1], twins[:-1], strict=True):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
    assert ours[4].tolist() == [2 + row + count - 1 for row in range(rows)]


def test_logits_that_are_no_numbers_have_no_chance(kernel: FusedKernel) -> None:
    own = inputs(2, 20, 1)
    own[0][0, 7] = math.nan
    own[0][1] = -math.inf
    kernel.apply(*own)
    assert own[9][0].isnan().all()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda own: own[10].copy_(torch.tensor([MOST, 9])), "an index is outside"),
        (lambda own: own[5][:, 3].add_(40), "a span is not within"),
        (lambda own: own.__setitem__(0, own[0].double()), "logits are float32 rows"),
        (lambda own: own.__setitem__(3, own[3].int()), "are int64, tables int32"),
        (lambda own: own.__setitem__(6, own[6][:1]), "are not those of 2 rows"),
        (lambda own: own.__setitem__(2, own[2][:, :3]), "are not what a step is given"),
        (lambda own: own.__setitem__(11, 0), "a block has a token"),
    ],
)
def test_what_leads_outside_is_refused(
    kernel: FusedKernel, change: Callable[[list[Any]], object], told: str
) -> None:
    own = inputs(2, 20, 1)
    change(own)
    before = copied(own)
    with pytest.raises(KernelError, match=told):
        kernel.apply(*own)
    assert torch.equal(own[4], before[4])
