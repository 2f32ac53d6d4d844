"""Which kernels for what lies between a decoder's matrices can be used for a model; torch does the rest.

They are asked once, with the shapes of one token: a model's dtype, dims and device do not change.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sagellm.core.protocols.fusion import FusedKernel, KernelSet
from sagellm.engines.native.architectures import ModelSpec
from sagellm.engines.native.projection import LookUp, look_up


def glue_of(kernels: KernelSet, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> KernelSet:
    """`kernels` without those of `add_rms_norm`, `rope_to_cache` and `silu_and_mul` that do not do what a
    model of `spec` needs in `dtype`, or not on `device`.
    """

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    x, wide = ones(1, spec.hidden_size), ones(1, 2 * spec.intermediate_size)
    heads, pool = spec.num_heads + 2 * spec.num_kv_heads, ones(1, 1, spec.num_kv_heads, spec.head_dim)
    angles = ones(1, spec.head_dim // 2) if spec.rope else None
    weight = ones(spec.head_dim) if spec.qk_norm else None
    slots = torch.zeros(1, dtype=torch.long, device=device)
    rotation = (
        ones(1, heads, spec.head_dim),
        angles,
        angles,
        weight,
        weight,
        spec.norm_eps,
        slots,
        pool,
        pool,
    )
    can_norm, can_rotate = spec.rms_norm and spec.pre_norm, spec.rms_norm or not spec.qk_norm
    can_gate = spec.gated_mlp and spec.activation in ("silu", "swish")
    return replace(
        kernels,
        add_rms_norm=_usable(kernels.add_rms_norm, x, x, x[0], spec.norm_eps) if can_norm else None,
        rope_to_cache=_usable(kernels.rope_to_cache, *rotation) if can_rotate else None,
        silu_and_mul=_usable(kernels.silu_and_mul, wide) if can_gate else None,
    )


def look_up_of(kernels: KernelSet, dtype: torch.dtype) -> LookUp:
    """How rows of a table in `dtype` are looked up: by the kernel, or by torch."""
    linear = kernels.linear
    return linear.gather if linear is not None and linear.multiplies(dtype, dtype) else look_up


def _usable(kernel: FusedKernel | None, *inputs: object) -> FusedKernel | None:
    return kernel if kernel is not None and kernel.supports(*inputs).usable else None
