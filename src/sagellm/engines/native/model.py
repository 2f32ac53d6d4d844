"""The forward pass: one pre- or post-norm decoder over a flat batch of tokens from many sequences.

Decode rows and prefill chunks lie in one [T, hidden] tensor, so that every projection is one GEMM per step.
There are no modules: a layer is a record of tensors, and what differs between the families is in `ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn import functional as F

from sagellm.engines.native.architectures import ModelSpec
from sagellm.engines.native.attention import AttentionPlan, attend
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.projection import Form, project
from sagellm.engines.native.rope import RopeTable, apply_rope

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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
class StepInputs:
    """One step as tensors. `tokens`, `positions` and KV `slots` are [T]; logits are made for rows `sampled`
    [S].

    `attention` holds one plan per distinct window of the model.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    max_position: int
    slots: torch.Tensor
    sampled: torch.Tensor
    attention: Mapping[int | None, AttentionPlan]


@dataclass(frozen=True, slots=True)
class Affine:
    """A weight and maybe a bias: a projection, or the scale and shift of a norm (both None: not affine)."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    project: Form

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, in] to [T, out]; strides are the product's own, see `project`."""
        assert self.weight is not None
        return self.project(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; `qkv` and `up` are fused by rows (`up` is gate over up where the MLP is
    gated).
    """

    window: int | None
    attn_norm: Affine
    qkv: Affine
    q_norm: Affine
    k_norm: Affine
    out: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine


class DecoderModel:
    """Weights and forward pass. `weights` are named as in `weights.parameters`, on one device: vectors in
    `dtype`, which is computed in, matrices in that or in what `project` multiplies by, or what the form for
    their name in `forms` does. Without a head of its own the model ends in its embedding.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        project: Form = project,
        forms: Mapping[str, Form] = MappingProxyType({}),
    ) -> None:
        self.spec = spec
        self._dtype = dtype
        self._embed = weights["embed.weight"]
        self._positions = weights.get("positions.weight")

        def affine(name: str) -> Affine:
            return Affine(
                weights.get(f"{name}.weight"), weights.get(f"{name}.bias"), forms.get(name, project)
            )

        self._project_in, self._project_out = affine("project_in"), affine("project_out")
        self._layers = [_layer(spec, i, affine) for i in range(spec.num_layers)]
        self._final_norm = affine("final_norm")
        self._head = affine("head") if "head.weight" in weights else Affine(self._embed, None, project)
        self._activation = _ACTIVATIONS[spec.activation]
        self._rope = RopeTable(spec.rope, self._embed.device, dtype) if spec.rope else None

    @torch.inference_mode()
    def forward(self, step: StepInputs, kv: PagedKV) -> torch.Tensor:
        """Logits [S, vocab] of the sampled rows, float32 (float64 for a float64 model); new K and V go to
        `kv`.
        """
        x = self._embedded(step)
        angles = self._rope.cos_sin(step.positions, step.max_position) if self._rope else None
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            x = self._attention(layer, i, x, step, kv, angles)
            if i == last:
                x = x[step.sampled]
            x = self._mlp(layer, x)
        return self._logits(x)

    def _embedded(self, step: StepInputs) -> torch.Tensor:
        x = F.embedding(step.tokens, self._embed).to(self._dtype)
        if self._project_in.weight is not None:
            x = self._project_in(x)
        if self._positions is not None:
            x = x + F.embedding(step.positions + self.spec.position_offset, self._positions)
        return x

    def _attention(
        self, layer: Layer, index: int, x: torch.Tensor, step: StepInputs, kv: PagedKV,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:  # fmt: skip
        spec = self.spec
        qkv = layer.qkv(self._norm(x, layer.attn_norm) if spec.pre_norm else x)
        heads = qkv.contiguous().view(len(x), -1, spec.head_dim)
        query, key, value = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if spec.qk_norm:
            query.copy_(self._norm(query, layer.q_norm))
            key.copy_(self._norm(key, layer.k_norm))
        if angles is not None:
            apply_rope(heads[:, : spec.num_heads + spec.num_kv_heads], *angles)
        kv.write(index, step.slots, key, value)
        mixed = attend(step.attention[layer.window], kv, index, query, key, value)
        x = x + layer.out(mixed.flatten(1))
        return x if spec.pre_norm else self._norm(x, layer.attn_norm)

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        wide = layer.up(self._norm(x, layer.mlp_norm) if self.spec.pre_norm else x)
        if self.spec.gated_mlp:
            gate, up = wide.chunk(2, dim=-1)
            wide = self._activation(gate).mul_(up)
        else:
            wide = self._activation(wide)
        x = x + layer.down(wide)
        return x if self.spec.pre_norm else self._norm(x, layer.mlp_norm)

    def _norm(self, x: torch.Tensor, norm: Affine) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm over the last dimension."""
        if self.spec.rms_norm:
            return F.rms_norm(x, x.shape[-1:], norm.weight, self.spec.norm_eps)
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, self.spec.norm_eps)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.final_norm:
            x = self._norm(x, self._final_norm)
        if self._project_out.weight is not None:
            x = self._project_out(x)
        logits = self._head(x).contiguous()
        return logits if logits.dtype == torch.float64 else logits.float()


def _layer(spec: ModelSpec, index: int, affine: Callable[[str], Affine]) -> Layer:
    names = ("attn_norm", "qkv", "q_norm", "k_norm", "out", "mlp_norm", "up", "down")
    return Layer(spec.windows[index], *(affine(f"layers.{index}.{name}") for name in names))
