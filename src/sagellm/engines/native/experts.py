"""Mixture of experts: which ones compute a token, and with what weight.

Shazeer et al. 2017, arXiv:1701.06538. The rows of a step are sorted by expert, so every expert that is hit
multiplies once, by all of its rows. The matrices of a layer's experts are one stack, which is packed and
quantized like any matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.fusion import Routes


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Experts of the layers `layers`: `count` MLPs of width `width`. A token uses `per_token` of them.

    `scoring` of the router's logits is "softmax" or "sigmoid". With `is_corrected` a bias is added to scores,
    for the choice alone. Experts lie in `groups`, and are chosen from the `kept_groups` best: a group's score
    is the sum of its `group_best` best (DeepSeek V2 and V3). `renormalize`: the chosen weights sum to 1. They
    are multiplied by `scale`. One more MLP, of `shared_width`, computes all tokens; 0 for none. With
    `shared_gate` its output is multiplied by the sigmoid of one number per token.
    `stacked`: a tensor of the checkpoint has all experts of a layer, whose outputs are its "rows" or its
    "columns"; with `alternates` gate and up alternate (gpt-oss). With `has_bias` router and experts have
    biases. With `weighs_input` a weight multiplies an expert's input, not its output (Llama 4).
    `swiglu_limit`: the gate is clamped, multiplied by the sigmoid of `swiglu_alpha` times itself, and by the
    clamped up plus 1.
    """

    layers: tuple[bool, ...]
    count: int
    per_token: int
    width: int
    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    is_corrected: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1
    shared_width: int = 0
    shared_gate: bool = False
    stacked: str = ""
    alternates: bool = False
    weighs_input: bool = False
    has_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    beside_mlp: bool = False
    """Layers have an MLP too; router, experts and MLP have norms of their own (Gemma 4)."""
    held: tuple[int, int] | None = None
    """The range of experts that this rank has; None: all."""

    @property
    def num_held(self) -> int:
        return self.count if self.held is None else self.held[1] - self.held[0]

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "width", "groups", "kept_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModelError(f"config.json: experts: {name} must be positive, got {value!r}")
        if self.per_token > self.count:
            raise UnsupportedModelError(
                f"config.json: a token takes {self.per_token} experts, but there are only {self.count}"
            )
        if self.count % self.groups or self.kept_groups > self.groups:
            raise UnsupportedModelError(
                f"config.json: {self.count} experts in {self.groups} groups, of which a token takes "
                f"{self.kept_groups}: groups must have equally many experts, and a token takes at most all"
            )
        size = self.count // self.groups
        if self.groups > 1 and (size < self.group_best or size * self.kept_groups < self.per_token):
            raise UnsupportedModelError(
                f"config.json: {self.kept_groups} groups of {size} experts are too few for {self.per_token} "
                "per token"
            )


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, spec: ExpertSpec, counts: torch.Tensor
) -> Routes:
    """The experts of each row, from the router's logits.

    They are [T, count], in float32 or float64. `correction` [count] is added for the choice alone. The rows
    of each expert are added to `counts`.
    """
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
    rank = _in_kept_groups(spec, scores if correction is None else scores + correction)
    chosen = rank.topk(spec.per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    order = chosen.flatten().argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    sizes = chosen.flatten().bincount(minlength=spec.count)
    counts += sizes
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return Routes(order // spec.per_token, starts, places.view(chosen.shape), weights * spec.scale)


def row_weights(routes: Routes) -> tuple[torch.Tensor, Routes]:
    """Weights [rows, 1] of experts' inputs, and routes without weights."""
    weights = torch.empty_like(routes.weights).flatten()
    weights[routes.places.flatten()] = routes.weights.flatten()
    return weights[:, None], replace(routes, weights=torch.ones_like(routes.weights))


def by_held(
    spec: ExpertSpec, rows: torch.Tensor, starts: torch.Tensor,
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """`compute(rows, starts)` for the experts that this rank has.

    The result [n, hidden] is zero for rows of other experts.
    """
    if spec.held is None:
        return compute(rows, starts)
    bounds = starts[spec.held[0] : spec.held[1] + 1]
    first, stop = bounds[0], bounds[-1]
    outputs = torch.zeros_like(rows)
    if first < stop:
        outputs[first:stop] = compute(rows[first:stop], bounds - first)
    return outputs


def scaled(routes: Routes, expert_scale: torch.Tensor) -> Routes:
    """`routes` with weights multiplied by the number [count] of each expert."""
    experts = torch.searchsorted(routes.starts, routes.places, right=True) - 1
    return replace(routes, weights=routes.weights * expert_scale[experts])


def _in_kept_groups(spec: ExpertSpec, rank: torch.Tensor) -> torch.Tensor:
    """`rank` [T, count], minus infinity for experts of other groups than the best."""
    if spec.groups == 1:
        return rank
    by_group = rank.view(len(rank), spec.groups, spec.count // spec.groups)
    best = by_group.topk(spec.group_best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best).scatter_(1, best.topk(spec.kept_groups, dim=-1).indices, 1.0)
    return by_group.masked_fill(kept[..., None] == 0, -torch.inf).flatten(1)


def clamped_swiglu(wide: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """The activation of gpt-oss, of gate beside up [T, 2 n]."""
    gate, up = wide.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * (gate * alpha).sigmoid()


def combine(outputs: torch.Tensor, routes: Routes, added: torch.Tensor | None) -> torch.Tensor:
    """The weighted sum [T, hidden] of each token's rows of `outputs`, and of `added`.

    The rows of a token are added in the order of its choices, so the sum does not depend on other tokens.
    """
    weighted: torch.Tensor = outputs[routes.places] * routes.weights.unsqueeze(-1)
    total = weighted[:, 0] if added is None else added + weighted[:, 0]
    for choice in range(1, weighted.shape[1]):
        total = total + weighted[:, choice]
    return total.to(outputs.dtype)
