"""The feed-forward part of decoder layers: MLPs and mixtures of experts.

Its input is a layer's normed stream, and its output what the layer adds to the stream. It keeps nothing
between steps and knows no sequences, so it can be on another rank than attention (`parallel/ffn_rank.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from sagellm.core.protocols.fusion import KernelSet
from sagellm.engines.native.experts import by_held, clamped_swiglu, combine, route, row_weights, scaled
from sagellm.engines.native.layer_parts import Linear, NormWeights, normed
from sagellm.engines.native.loading import ModelWeights
from sagellm.engines.native.matrices import LookUp, look_up
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.parallel.tensor_ranks import TensorRanks

ACTIVATION_OF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense MLP. Gate over up are fused in a gated one's `up`."""

    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts, and the matrix that chooses among them.

    `correction` is added to scores for the choice. `up` and `down` are stacks of the experts' matrices;
    `shared` computes all tokens, and `shared_gate` weighs it. `counts` are rows of each expert since the
    model was loaded.
    """

    router: Linear
    correction: torch.Tensor | None
    up: Linear
    down: Linear
    shared: Mlp | None
    shared_gate: Linear | None
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Beside:
    """Experts beside a layer's MLP, and the norms of both.

    Both get the stream: `mixture` by `norm`, its router by `router_norm`. The weights of experts are
    multiplied by `expert_scale` [count].
    """

    mixture: Mixture
    expert_scale: torch.Tensor
    router_norm: NormWeights
    norm: NormWeights
    out_norm: NormWeights
    mlp_out_norm: NormWeights


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The weights of one layer."""

    mlp: Mlp | Mixture
    beside: Beside | None

    @classmethod
    def of(
        cls, spec: ModelSpec, weights: ModelWeights, device: torch.device, ranks: TensorRanks | None,
        index: int,
    ) -> FeedForward:  # fmt: skip
        """Those of layer `index`. `ranks` share it."""
        ours = f"layers.{index}."
        beside = _beside(spec, weights, device, ours) if spec.has_experts_beside else None
        if spec.has_experts(index) and beside is None:
            return cls(_mixture(spec, weights, device, ours), None)
        return cls(Mlp(Linear.of(weights, ours + "up"), Linear.of(weights, ours + "down", ranks)), beside)

    @property
    def mixture(self) -> Mixture | None:
        """The experts, if the layer has any."""
        if self.beside is not None:
            return self.beside.mixture
        return self.mlp if isinstance(self.mlp, Mixture) else None


class FeedForwardCompute:
    """Computes the feed-forward part of any layer of a model. `kernels` support it (`usable_glue`)."""

    def __init__(
        self, spec: ModelSpec, kernels: KernelSet, dtype: torch.dtype, ranks: TensorRanks | None = None
    ) -> None:
        self._spec, self._kernels, self._ranks = spec, kernels, ranks
        self._wide = torch.promote_types(dtype, torch.float32)
        self._activation = ACTIVATION_OF[spec.activation]
        self._gate = kernels.silu_and_mul or kernels.gelu_and_mul
        self._rows_of = row_look_up(kernels, dtype)

    def __call__(self, own: FeedForward, seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The output [T, hidden] of a layer's MLP or experts.

        `seen` [T, hidden] is the norm of the stream `x` [T, hidden], or in some models the stream.
        """
        mlp = own.mlp
        delta = self._dense(mlp, seen) if isinstance(mlp, Mlp) else self._mixture(mlp, seen, seen)
        return delta if own.beside is None else self._with_experts(own.beside, delta, x)

    def _dense(self, mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        return mlp.down(self._activated(mlp.up(x)))

    def _with_experts(self, own: Beside, delta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """An MLP's output with that of the experts beside it, of the stream `x`."""
        norm = partial(normed, self._spec)
        seen, routed = norm(x, own.norm), norm(x, own.router_norm)
        mixed = self._mixture(own.mixture, seen, routed, own.expert_scale)
        return norm(delta, own.mlp_out_norm) + norm(mixed, own.out_norm)

    def _mixture(
        self, mlp: Mixture, x: torch.Tensor, routed: torch.Tensor, expert_scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output of experts over `x`; `routed` is the router's input."""
        spec = self._spec.experts
        assert spec is not None
        logits = x.new_empty(len(x), spec.count, dtype=self._wide)
        mlp.router.matrix.multiply(routed, mlp.router.bias, logits)
        by_kernel = self._kernels.route, self._kernels.combine
        routes = (by_kernel[0].apply if by_kernel[0] else route)(logits, mlp.correction, spec, mlp.counts)
        if expert_scale is not None:
            routes = scaled(routes, expert_scale)
        rows = self._rows_of(x, routes.tokens, x.dtype)
        if spec.weighs_input:
            weights, routes = row_weights(routes)
            rows = rows * weights.to(rows.dtype)
        outputs = by_held(spec, rows, routes.starts, partial(self._by_experts, mlp))
        shared = None if mlp.shared is None else self._dense(mlp.shared, x)
        if shared is not None and mlp.shared_gate is not None:
            shared = shared * mlp.shared_gate(x).sigmoid()
        mixed: torch.Tensor = (by_kernel[1].apply if by_kernel[1] else combine)(outputs, routes, shared)
        return mixed if self._ranks is None else self._ranks.summed(mixed)

    def _by_experts(self, mlp: Mixture, rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        inner = self._activated(mlp.up.matrix.multiply_grouped(rows, starts, mlp.up.bias))
        outputs: torch.Tensor = mlp.down.matrix.multiply_grouped(inner, starts, mlp.down.bias)
        return outputs

    def _activated(self, wide: torch.Tensor) -> torch.Tensor:
        experts = self._spec.experts
        if experts is not None and experts.swiglu_limit is not None:
            kernel = self._kernels.clamped_swiglu
            clamped: torch.Tensor = (kernel.apply if kernel else clamped_swiglu)(
                wide, experts.swiglu_limit, experts.swiglu_alpha
            )
            return clamped
        if self._gate is not None:
            product: torch.Tensor = self._gate.apply(wide)
            return product
        if not self._spec.gated_mlp:
            return self._activation(wide)
        gate, up = wide.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)


def row_look_up(kernels: KernelSet, dtype: torch.dtype) -> LookUp:
    """What looks up rows of a tensor in `dtype`."""
    linear = kernels.linear
    return linear.gather if linear is not None and linear.multiplies(dtype, dtype) else look_up


def _mixture(spec: ModelSpec, weights: ModelWeights, device: torch.device, ours: str) -> Mixture:
    experts = spec.experts
    assert experts is not None
    stacks = [Linear.of(weights, f"{ours}experts.{name}") for name in ("up", "down")]
    up, down = (
        Linear(stack.matrix, None if stack.bias is None else stack.bias.view(experts.num_held, -1))
        for stack in stacks
    )
    has_shared = experts.shared_width > 0
    shared = Mlp(Linear.of(weights, ours + "up"), Linear.of(weights, ours + "down")) if has_shared else None
    gate = Linear.of(weights, ours + "shared_gate") if experts.shared_gate else None
    counts = torch.zeros(experts.count, dtype=torch.long, device=device)
    correction = weights.tensors.get(ours + "router.correction")
    return Mixture(Linear.of(weights, ours + "router"), correction, up, down, shared, gate, counts)


def _beside(spec: ModelSpec, weights: ModelWeights, device: torch.device, ours: str) -> Beside:
    router_norm = NormWeights.of(weights, ours + "router_norm", 0.0, spec.hidden_size**-0.5)
    norms = (
        NormWeights.of(weights, ours + name, spec.norm_offset)
        for name in ("experts_norm", "experts_out_norm", "mlp_own_norm")
    )
    mixture, scale = _mixture(spec, weights, device, ours), weights.tensors[ours + "expert_scale"]
    return Beside(mixture, scale, router_norm, *norms)
