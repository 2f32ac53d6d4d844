"""The inputs of the kernels for experts: their checks and slow twins."""

from __future__ import annotations

import math
from typing import Any

import torch

from sagellm.accel.fusion.checked_kernels import DTYPES, CheckedKernel, GlueKernel
from sagellm.core.protocols.fusion import Routes, RoutingRule


class RouteToExperts(CheckedKernel):
    """The experts of each token, and their rows sorted by expert.

    Inputs: `logits`, contiguous float32 [T, experts]; `correction`, float32 [experts] or None; `rule`; and
    `counts`, int64 [experts], to which the number of rows of each expert is added. The result is `Routes`.
    """

    name = "route_to_experts"

    def reference(
        self, logits: torch.Tensor, correction: torch.Tensor | None, rule: RoutingRule, counts: torch.Tensor
    ) -> Routes:
        """The slow twin, token by token, in float64. Of equal scores the first is chosen."""
        num_experts = logits.shape[1]
        by_expert: list[list[int]] = [[] for _ in range(num_experts)]
        weights = torch.empty(len(logits), rule.per_token)
        for row, own in enumerate(logits.double()):
            scores = (own.sigmoid() if rule.scoring == "sigmoid" else own.softmax(0)).tolist()
            extra = [0.0] * num_experts if correction is None else correction.tolist()
            rank = [score + more for score, more in zip(scores, extra, strict=True)]
            chosen = sorted(_in_kept_groups(rank, rule), key=lambda e: -rank[e])[: rule.per_token]
            whole = sum(scores[e] for e in chosen) if rule.renormalize else 1.0
            weights[row] = torch.tensor([scores[e] / whole * rule.scale for e in chosen])
            for place, expert in enumerate(chosen):
                by_expert[expert].append(row * rule.per_token + place)
        pairs = torch.tensor([pair for own in by_expert for pair in own], dtype=torch.int64)
        sizes = torch.tensor([len(own) for own in by_expert])
        places = torch.empty(len(logits) * rule.per_token, dtype=torch.int64)
        places[pairs] = torch.arange(len(pairs))
        counts += sizes
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return Routes(pairs // rule.per_token, starts, places.view(weights.shape), weights)

    def _obstacle(
        self, logits: torch.Tensor, correction: torch.Tensor | None, rule: RoutingRule, counts: torch.Tensor
    ) -> str:
        if logits.dtype is not torch.float32 or logits.ndim != 2 or not logits.is_contiguous():
            return f"logits are contiguous float32 [T, experts], not {logits.dtype} {list(logits.shape)}"
        experts = logits.shape[1]
        if counts.dtype is not torch.int64 or counts.shape != (experts,) or not counts.is_contiguous():
            return f"counts are contiguous int64 [{experts}], not {counts.dtype} {list(counts.shape)}"
        given = (counts,) if correction is None else (counts, correction)
        if correction is not None and (
            correction.dtype is not torch.float32
            or correction.shape != (experts,)
            or not correction.is_contiguous()
        ):
            return f"the correction is no contiguous float32 [{experts}]"
        return self._device_obstacle(logits, *given)


def _in_kept_groups(rank: list[float], rule: RoutingRule) -> list[int]:
    """The experts of the best groups."""
    size = len(rank) // rule.groups
    groups = [range(first, first + size) for first in range(0, len(rank), size)]

    def best(group: range) -> float:
        return math.fsum(sorted((rank[e] for e in group), reverse=True)[: rule.group_best])

    kept = sorted(groups, key=best, reverse=True)[: rule.kept_groups]
    return sorted(expert for group in kept for expert in group)


class CombineExperts(GlueKernel):
    """The weighted sum of each token's rows.

    Inputs: `outputs` [rows, n] in order of experts; `routes`; and optionally `added` [T, n], to which the sum
    is added. The result is [T, n] in the dtype of `outputs`.
    """

    name = "combine_experts"

    def reference(
        self, outputs: torch.Tensor, routes: Routes, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows: torch.Tensor = outputs[routes.places].double()
        total = (rows * routes.weights[..., None].double()).sum(1)
        whole: torch.Tensor = (total if added is None else total + added.double()).to(outputs.dtype)
        return whole

    def _obstacle(self, outputs: torch.Tensor, routes: Routes, added: torch.Tensor | None = None) -> str:
        dtype, tokens = outputs.dtype, len(routes.weights)
        if dtype not in DTYPES or routes.weights.dtype is not torch.float32:
            return f"no kernel for {dtype} by weights of {routes.weights.dtype}"
        if outputs.ndim != 2 or len(outputs) != routes.places.numel() or not outputs.is_contiguous():
            return f"outputs are contiguous [{routes.places.numel()}, n], not {list(outputs.shape)}"
        given: tuple[Any, ...] = (outputs, routes.weights, routes.places)
        if added is None:
            return self._device_obstacle(*given)
        if added.dtype is not dtype or added.shape != (tokens, outputs.shape[1]):
            return f"no {dtype} [{tokens}, {outputs.shape[1]}] to add to: {added.dtype} {list(added.shape)}"
        return self._device_obstacle(*given, added)
