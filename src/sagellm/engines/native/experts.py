"""Mixture of experts: which ones compute a token, and with what weight.

Shazeer et al. 2017, arXiv:1701.06538. The rows of a step are sorted by expert, so every expert that is hit
multiplies once, by all of its rows. An expert is two matrices like those of any MLP: packed by the same
kernels, and quantized by the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sagellm.core.errors import UnsupportedModelError

SCORINGS = ("softmax", "softmax_of_chosen", "sigmoid")


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Experts of the layers `layers`: `count` MLPs of width `width`. A token uses `per_token` of them.

    `scoring` of the router's logits: "softmax" of all, then the best; "softmax_of_chosen" of the best ones
    alone; "sigmoid". With `is_corrected` a bias is added to scores, for the choice alone. Experts lie in
    `groups`, and are chosen from the `kept_groups` best: a group's score is the sum of its `group_best` best
    (DeepSeek V2 and V3). `renormalize`: the chosen weights sum to 1. They are multiplied by `scale`. One more
    MLP, of `shared_width`, computes all tokens; 0 for none.
    With `is_stacked` (gpt-oss) a tensor of the checkpoint has all experts of a layer; with `has_bias` router
    and experts have biases. `swiglu_limit`: the gate is clamped, multiplied by the sigmoid of `swiglu_alpha`
    times itself, and by the clamped up plus 1.
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
    is_stacked: bool = False
    has_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "width", "groups", "kept_groups"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModelError(f"config.json: experts: {name} must be positive, got {value!r}")
        if self.per_token > self.count:
            raise UnsupportedModelError(f"config.json: {self.per_token} of {self.count} experts per token")
        if self.count % self.groups or self.kept_groups > self.groups:
            raise UnsupportedModelError(
                f"config.json: {self.kept_groups} of {self.groups} groups of {self.count} experts: groups "
                "have equally many, and at most all are kept"
            )
        size = self.count // self.groups
        if self.groups > 1 and (size < self.group_best or size * self.kept_groups < self.per_token):
            raise UnsupportedModelError(
                f"config.json: {self.kept_groups} groups of {size} experts are too few for {self.per_token} "
                "per token"
            )


@dataclass(frozen=True, slots=True)
class Routing:
    """Expert `indices` and their `weights` for each row, both [T, per_token]."""

    indices: torch.Tensor
    weights: torch.Tensor


def route(spec: ExpertSpec, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Routing:
    """The experts of each row, from the router's logits [T, count].

    `bias` [count] is added for the choice alone.
    """
    if spec.scoring == "softmax_of_chosen":
        best, indices = logits.topk(spec.per_token, dim=-1)
        return Routing(indices, best.softmax(-1) * spec.scale)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1) if spec.scoring == "softmax" else wide.sigmoid()
    rank = _in_kept_groups(spec, scores if bias is None else scores + bias)
    indices = rank.topk(spec.per_token, dim=-1).indices
    weights = scores.gather(-1, indices)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(indices, weights * spec.scale)


def _in_kept_groups(spec: ExpertSpec, rank: torch.Tensor) -> torch.Tensor:
    """`rank` [T, count], minus infinity for experts of other groups than the best."""
    if spec.groups == 1:
        return rank
    by_group = rank.view(len(rank), spec.groups, spec.count // spec.groups)
    best = by_group.topk(spec.group_best, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best).scatter_(1, best.topk(spec.kept_groups, dim=-1).indices, 1.0)
    return by_group.masked_fill(kept[..., None] == 0, -torch.inf).flatten(1)


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert's projections: `up` has gate over up, as in a dense MLP."""

    up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]


def clamped_swiglu(wide: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """The activation of gpt-oss, of gate beside up [T, 2 n]."""
    gate, up = wide.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * (gate * alpha).sigmoid()


def compute_experts(
    experts: Sequence[Expert], routing: Routing, x: torch.Tensor,
    activated: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The weighted sum of the chosen experts' answers to rows `x`, both [T, hidden].

    The answers of a row are added in the order of its choices, so they do not depend on the other rows.
    """
    num_rows, per_token = routing.indices.shape
    flat = routing.indices.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=len(experts)).tolist()
    sorted_rows = x.index_select(0, order // per_token)
    answers = torch.empty(num_rows * per_token, x.shape[1], dtype=x.dtype, device=x.device)
    first = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            own = slice(first, first + count)
            answers[own] = expert.down(activated(expert.up(sorted_rows[own])))
            first += count
    in_order = torch.empty_like(answers)
    in_order[order] = answers
    weighted = in_order.view(num_rows, per_token, x.shape[1]) * routing.weights.unsqueeze(-1)
    total = weighted[:, 0]
    for choice in range(1, per_token):
        total = total + weighted[:, choice]
    return total.to(x.dtype)
