"""Which kernels serve a model: they are asked once, before any is used."""

from __future__ import annotations

from dataclasses import replace

import torch

from sagellm.core.protocols.fusion import FusedKernel, KernelSet, Routes
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.recurrent_spec import DeltaSpec, MambaSpec

TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def usable_glue(kernels: KernelSet, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> KernelSet:
    """`kernels` without the glue kernels that cannot serve this model. They are asked once, with the shapes
    of one token: a model's dtype, dims and device do not change.
    """

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    x, wide = ones(1, spec.hidden_size), ones(1, 2 * spec.intermediate_size)
    can_norm = spec.rms_norm and spec.norm_place != "residual"
    can_rotate = (spec.rms_norm or not spec.qk_norm) and _rotates(kernels.rope_to_cache, spec, x)
    by_silu, by_gelu = spec.activation in ("silu", "swish"), spec.activation in TANH_GELU
    if spec.experts is not None:
        kernels = _for_experts(kernels, spec.experts, x)
    if isinstance(spec.recurrent, DeltaSpec):
        kernels = _for_delta(kernels, spec.recurrent, x)
    if isinstance(spec.recurrent, MambaSpec):
        kernels = _for_mamba(kernels, spec.recurrent, x)
    return replace(
        kernels,
        add_rms_norm=_usable(kernels.add_rms_norm, x, x, x[0], spec.norm_eps) if can_norm else None,
        rope_to_cache=kernels.rope_to_cache if can_rotate else None,
        silu_and_mul=_usable(kernels.silu_and_mul, wide) if spec.gated_mlp and by_silu else None,
        gelu_and_mul=_usable(kernels.gelu_and_mul, wide) if spec.gated_mlp and by_gelu else None,
        clamped_swiglu=_usable(kernels.clamped_swiglu, wide, 7.0, 1.702),
    )


def _rotates(kernel: FusedKernel | None, spec: ModelSpec, x: torch.Tensor) -> bool:
    """Whether a kernel rotates and stores the heads of all layers."""
    if kernel is None:
        return False
    slots = torch.zeros(1, dtype=torch.long, device=x.device)
    heads_of = {(s.num_kv_heads, s.head_dim, spec.has_kv(i)) for i, s in enumerate(spec.shapes)}
    for num_kv_heads, dim, has_kv in heads_of or {(spec.num_kv_heads, spec.head_dim, True)}:
        counts = (spec.num_heads, num_kv_heads) if has_kv else (spec.num_heads,)
        sizes = [count * dim if spec.qk_norm == "all" else dim for count in counts]
        weights = [x.new_ones(size) if spec.qk_norm else None for size in sizes]
        angles = x.new_ones(1, dim // 2) if spec.rope else None
        pool = x.new_ones(1, 1, num_kv_heads, dim) if has_kv else None
        heads = x.new_ones(1, spec.num_heads + 2 * num_kv_heads * has_kv, dim)
        cache = (slots, pool, pool) if has_kv else (None, None, None)
        inputs = heads, angles, angles, *weights, *[None] * (2 - len(weights)), spec.norm_eps, *cache
        if not kernel.supports(*inputs, spec.value_eps).usable:
            return False
    return True


def _for_delta(kernels: KernelSet, delta: DeltaSpec, x: torch.Tensor) -> KernelSet:
    """`kernels` without that of the gated delta rule where it cannot serve these layers."""
    channels, heads, wide = (
        delta.conv_channels,
        delta.value_heads,
        torch.promote_types(x.dtype, torch.float32),
    )
    rates, states = (x.new_ones(shape, dtype=wide) for shape in (heads, (1, *delta.state_shape)))
    inputs = (
        x.new_ones(1, channels + delta.value_size), x.new_ones(1, 2 * heads),
        torch.zeros(1, dtype=torch.long, device=x.device), x.new_ones(1, delta.conv_width - 1, channels),
        states, x.new_ones(delta.conv_width, channels), rates, rates, x.new_ones(delta.value_dim), 1e-6,
    )  # fmt: skip
    return replace(kernels, delta_step=_usable(kernels.delta_step, *inputs))


def _for_mamba(kernels: KernelSet, mamba: MambaSpec, x: torch.Tensor) -> KernelSet:
    """`kernels` without that of Mamba-2 where it cannot serve these layers."""
    channels, wide = mamba.conv_channels, torch.promote_types(x.dtype, torch.float32)
    rates, states = (x.new_ones(shape, dtype=wide) for shape in (mamba.heads, (1, *mamba.state_shape)))
    inputs = (
        x.new_ones(1, mamba.inner_size + channels + mamba.heads),
        torch.zeros(1, dtype=torch.long, device=x.device), x.new_ones(1, mamba.conv_width - 1, channels),
        states, x.new_ones(mamba.conv_width, channels), None, rates, rates, rates,
    )  # fmt: skip
    return replace(kernels, mamba_step=_usable(kernels.mamba_step, *inputs))


def _for_experts(kernels: KernelSet, experts: ExpertSpec, x: torch.Tensor) -> KernelSet:
    """`kernels` without those that cannot serve these experts."""
    logits = x.new_ones(1, experts.count, dtype=torch.promote_types(x.dtype, torch.float32))
    correction = logits[0] if experts.is_corrected else None
    places = torch.zeros(1, experts.per_token, dtype=torch.long, device=x.device)
    routes = Routes(places[0], places[0], places, logits[:, : experts.per_token])
    outputs, counts = x.expand(experts.per_token, -1).contiguous(), places.new_zeros(experts.count)
    return replace(
        kernels,
        route=_usable(kernels.route, logits, correction, experts, counts),
        combine=_usable(kernels.combine, outputs, routes, x),
    )


def _usable(kernel: FusedKernel | None, *inputs: object) -> FusedKernel | None:
    return kernel if kernel is not None and kernel.supports(*inputs).usable else None
