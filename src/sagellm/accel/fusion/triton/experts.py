"""Mixture of experts in Triton: routing, grouped products and the weighted sum.

A product for all experts of a layer is one launch. The device alone knows how many rows an expert has, so a
step does not wait for it and can be recorded. Sums are float32 and rounded once.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl

from sagellm.accel.fusion.checked_kernels import DTYPES, GlueKernel
from sagellm.accel.fusion.expert_kernels import CombineExperts, RouteToExperts
from sagellm.accel.fusion.triton._launch import TritonKernel
from sagellm.core.blocks import cdiv
from sagellm.core.protocols.fusion import Routes, RoutingRule

COLUMNS_AT_ONCE, CHOICES_AT_ONCE = 1024, 1024
FEWEST_TILE_ROWS, MOST_TILE_ROWS = 16, 128
LEAST = tl.constexpr(-3e38)
"""Of a score that is no number; experts that cannot be chosen have minus infinity."""


class TritonRouteToExperts(TritonKernel, RouteToExperts):
    """`RouteToExperts` on a GPU, in two launches. Of equal scores the first is chosen."""

    def _compute(
        self, logits: torch.Tensor, correction: torch.Tensor | None, rule: RoutingRule, counts: torch.Tensor
    ) -> Routes:
        rows, experts = logits.shape
        choices = logits.new_empty(rows, rule.per_token, dtype=torch.int32)
        weights = logits.new_empty(rows, rule.per_token)
        places = counts.new_empty(rows, rule.per_token)
        tokens, starts = counts.new_empty(places.numel()), counts.new_empty(experts + 1)
        size = experts // rule.groups
        if rows:
            route_kernel[(rows,)](
                logits, logits if correction is None else correction, choices, weights, rule.scale,
                GROUPS=rule.groups, SIZE=size, PADDED_GROUPS=triton.next_power_of_2(rule.groups),
                PADDED_SIZE=triton.next_power_of_2(size), KEPT_GROUPS=rule.kept_groups,
                GROUP_BEST=rule.group_best, PER_TOKEN=rule.per_token,
                PADDED_CHOICES=triton.next_power_of_2(rule.per_token), SIGMOID=rule.scoring == "sigmoid",
                CORRECTED=correction is not None, RENORMALIZE=rule.renormalize,
            )  # fmt: skip
        sort_kernel[(experts,)](
            choices, tokens, places, starts, counts, places.numel(), PER_TOKEN=rule.per_token,
            TILE=CHOICES_AT_ONCE,
        )  # fmt: skip
        return Routes(tokens, starts, places, weights)


class TritonCombineExperts(TritonKernel, CombineExperts):
    """`CombineExperts` on a GPU. It does not check places."""

    def _compute(
        self, outputs: torch.Tensor, routes: Routes, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        (rows, per_token), columns = routes.weights.shape, outputs.shape[1]
        y = outputs.new_empty(rows, columns)
        if y.numel():
            if added is not None and not added.is_contiguous():  # as a projection may return it
                added = added.contiguous()
            combine_kernel[rows, cdiv(columns, COLUMNS_AT_ONCE)](
                outputs, routes.weights, routes.places, y if added is None else added, y, columns,
                PER_TOKEN=per_token, ADDS=added is not None, TILE=COLUMNS_AT_ONCE,
            )  # fmt: skip
        return y


class TritonGroupedLinear(TritonKernel, GlueKernel):
    """Rows times the matrices of a stack, as `Matrix.multiply_grouped`, in one launch.

    Inputs: `x` [T, inputs], `weight` [n * outputs, inputs], both with contiguous rows, `starts` int64 [n + 1]
    and `bias` [n, outputs] or None. A matrix without rows is not read. It does not check starts.
    """

    name = "grouped_linear"

    def reference(
        self, x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        stack = weight.view(len(starts) - 1, -1, x.shape[1])
        y = x.new_empty(len(x), stack.shape[1])
        for i, (begin, end) in enumerate(pairwise(starts.tolist())):
            own = None if bias is None else bias[i]
            y[begin:end] = torch.nn.functional.linear(x[begin:end], stack[i], own)
        return y

    def _obstacle(
        self, x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> str:
        if x.dtype not in DTYPES or weight.dtype != x.dtype:
            return f"no kernel for {x.dtype} times {weight.dtype}"
        if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or not x.shape[1]:
            return f"shapes {list(x.shape)} and {list(weight.shape)} make no linear layer"
        if starts.dtype != torch.int64 or starts.ndim != 1 or not starts.is_contiguous() or len(starts) < 2:
            return f"starts are contiguous int64 [n + 1], not {starts.dtype} {list(starts.shape)}"
        count = len(starts) - 1
        if len(weight) % count or weight.stride(1) != 1:
            return f"{len(weight)} outputs are not {count} equal matrices with contiguous rows"
        shape = (count, len(weight) // count)
        if bias is None:
            return self._device_obstacle(x, weight, starts)
        if bias.dtype != x.dtype or bias.shape != shape or not bias.is_contiguous():
            return f"the bias is not contiguous {x.dtype} {list(shape)}"
        return self._device_obstacle(x, weight, starts, bias)

    def _compute(
        self, x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.stride(1) != 1:  # as a projection may return it
            x = x.contiguous()
        (rows, inputs), count = x.shape, len(starts) - 1
        outputs = len(weight) // count
        y = x.new_empty(rows, outputs)
        if y.numel():
            tile = tile_rows(rows, count)
            most_tiles = min(rows, rows // tile + count)  # each matrix has at most one tile that is not full
            columns = 128 if tile == MOST_TILE_ROWS and x.dtype != torch.float32 else 64
            grouped_kernel[most_tiles, cdiv(outputs, columns)](
                x, weight, starts, y if bias is None else bias, y, count, outputs, inputs, x.stride(0),
                weight.stride(0), PADDED_COUNT=triton.next_power_of_2(count), HAS_BIAS=bias is not None,
                ROWS=tile, COLUMNS=columns, TILE=32 if x.dtype == torch.float32 else 64,
                num_warps=8 if tile == MOST_TILE_ROWS else 4,
            )  # fmt: skip
        return y


def tile_rows(rows: int, count: int) -> int:
    """Rows of a tile: about as many as a matrix has."""
    own: int = triton.next_power_of_2(cdiv(rows, count))
    return max(FEWEST_TILE_ROWS, min(MOST_TILE_ROWS, own))


@triton.jit
def route_kernel(
    logits: tl.tensor, correction: tl.tensor, choices: tl.tensor, weights: tl.tensor, scale: tl.tensor,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr,
    KEPT_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, PER_TOKEN: tl.constexpr,
    PADDED_CHOICES: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, RENORMALIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Program: one token. Its experts are [groups, size]; each choice takes the best that is left."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_SIZE)
    expert = group[:, None] * SIZE + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    own = tl.load(logits + row * (GROUPS * SIZE) + expert, mask=inside, other=-float("inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-own))
    else:
        scores = tl.exp(own - tl.max(tl.max(own, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    rank = scores
    if CORRECTED:
        rank = scores + tl.load(correction + expert, mask=inside, other=0.0)
    rank = tl.where(rank > LEAST, rank, LEAST)
    rank = tl.where(inside, rank, -float("inf"))
    if GROUPS > 1:
        rank = _in_kept_groups(rank, group, member, GROUPS, KEPT_GROUPS, GROUP_BEST)
    slot = tl.arange(0, PADDED_CHOICES)
    chosen = tl.zeros([PADDED_CHOICES], tl.int32)
    weight = tl.zeros([PADDED_CHOICES], tl.float32)
    for i in tl.static_range(PER_TOKEN):
        best = tl.max(tl.max(rank, 1), 0)
        first = tl.min(tl.min(tl.where(rank == best, expert, GROUPS * SIZE), 1), 0)
        score = tl.sum(tl.sum(tl.where(expert == first, tl.where(inside, scores, 0.0), 0.0), 1), 0)
        chosen = tl.where(slot == i, first, chosen)
        weight = tl.where(slot == i, score, weight)
        rank = tl.where((expert == first) & inside, -float("inf"), rank)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, 0)
    there = slot < PER_TOKEN
    tl.store(choices + row * PER_TOKEN + slot, chosen, mask=there)
    tl.store(weights + row * PER_TOKEN + slot, weight * scale, mask=there)


@triton.jit
def _in_kept_groups(
    rank: tl.tensor, group: tl.tensor, member: tl.tensor, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`rank`, minus infinity in groups that are not kept.

    A group's score is the sum of its best experts.
    """
    left = rank
    score = tl.zeros_like(tl.max(rank, 1))
    for _ in tl.static_range(BEST):
        best = tl.max(left, 1)
        first = tl.min(tl.where(left == best[:, None], member[None, :], left.shape[1]), 1)
        score += best
        left = tl.where(member[None, :] == first[:, None], -float("inf"), left)
    score = tl.where(group < GROUPS, tl.where(score > LEAST, score, LEAST), -float("inf"))
    kept = group < 0
    for _ in tl.static_range(KEPT):
        first = tl.min(tl.where(score == tl.max(score, 0), group, GROUPS), 0)
        kept = kept | (group == first)
        score = tl.where(group == first, -float("inf"), score)
    return tl.where(kept[:, None], rank, -float("inf"))


@triton.jit
def sort_kernel(
    choices: tl.tensor, tokens: tl.tensor, places: tl.tensor, starts: tl.tensor, counts: tl.tensor,
    num_choices: tl.tensor, PER_TOKEN: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Program: one expert, which finds its rows in all choices. Rows keep the order of tokens."""
    expert = tl.program_id(0)
    lane = tl.arange(0, TILE)
    below, mine = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    for first in range(0, num_choices, TILE):
        pair = first + lane
        choice = tl.load(choices + pair, mask=pair < num_choices, other=2147483647)
        below += (choice < expert).to(tl.int64)
        mine += (choice == expert).to(tl.int64)
    start, size = tl.sum(below, 0), tl.sum(mine, 0)
    tl.store(starts + expert, start)
    tl.store(counts + expert, tl.load(counts + expert) + size)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, start + size)
    for first in range(0, num_choices, TILE):
        pair = first + lane
        is_mine = tl.load(choices + pair, mask=pair < num_choices, other=2147483647) == expert
        place = start + tl.cumsum(is_mine.to(tl.int64), 0) - 1
        tl.store(tokens + place, (pair // PER_TOKEN).to(tl.int64), mask=is_mine)
        tl.store(places + pair, place, mask=is_mine)
        start += tl.sum(is_mine.to(tl.int64), 0)


@triton.jit
def grouped_kernel(
    x: tl.tensor, weight: tl.tensor, starts: tl.tensor, bias: tl.tensor, y: tl.tensor, count: tl.tensor,
    outputs: tl.tensor, inputs: tl.tensor, x_row: tl.tensor, weight_row: tl.tensor,
    PADDED_COUNT: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tile of rows, tile of outputs). It counts the tiles of all matrices to find its own."""
    tile = tl.program_id(0)
    number = tl.arange(0, PADDED_COUNT)
    begin = tl.load(starts + number, mask=number < count, other=0)
    end = tl.load(starts + number + 1, mask=number < count, other=0)
    tiles = ((end - begin + ROWS - 1) // ROWS).to(tl.int32)
    after = tl.cumsum(tiles, 0)
    matrix = tl.sum((after <= tile).to(tl.int32), 0)
    if matrix < count:
        is_mine = number == matrix
        within = tile - tl.sum(tl.where(is_mine, after - tiles, 0), 0)
        row = tl.sum(tl.where(is_mine, begin, 0), 0) + within * ROWS + tl.arange(0, ROWS)
        is_row = row < tl.sum(tl.where(is_mine, end, 0), 0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < outputs
        x_at = x + row[:, None] * x_row
        weight_at = weight + (matrix.to(tl.int64) * outputs + column)[None, :] * weight_row
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, inputs, TILE):
            k = first + tl.arange(0, TILE)
            a = tl.load(x_at + k[None, :], mask=is_row[:, None] & (k < inputs)[None, :], other=0.0)
            b = tl.load(weight_at + k[:, None], mask=is_column[None, :] & (k < inputs)[:, None], other=0.0)
            total += tl.dot(a, b, input_precision="ieee")
        if HAS_BIAS:
            own = tl.load(bias + matrix.to(tl.int64) * outputs + column, mask=is_column, other=0.0)
            total += own.to(tl.float32)[None, :]
        answer = total.to(y.dtype.element_ty)
        tl.store(
            y + row[:, None] * outputs + column[None, :], answer, mask=is_row[:, None] & is_column[None, :]
        )


@triton.jit
def combine_kernel(
    outputs: tl.tensor, weights: tl.tensor, places: tl.tensor, added: tl.tensor, y: tl.tensor,
    columns: tl.tensor, PER_TOKEN: tl.constexpr, ADDS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, TILE of its columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    total = tl.zeros([TILE], tl.float32)
    if ADDS:
        total = tl.load(added + token * columns + column, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        place = tl.load(places + token * PER_TOKEN + choice)
        value = tl.load(outputs + place * columns + column, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weights + token * PER_TOKEN + choice)
    tl.store(y + token * columns + column, total.to(y.dtype.element_ty), mask=inside)
