"""Families that mix attention with recurrent layers: the gated delta rule, or Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.families.llama import granite
from sagellm.engines.native.families.values import FULL, Config, check_types, dtype_of, llama_like, number
from sagellm.engines.native.model_spec import ModelSpec, TensorNames
from sagellm.engines.native.recurrent_spec import DeltaSpec, MambaSpec
from sagellm.engines.native.rope import read_rope

LINEAR = "linear_attention"
_NAMES = TensorNames(shared_experts="mlp.shared_expert")
_GRANITE_NAMES = TensorNames(
    up=("shared_mlp.input_linear",), down="shared_mlp.output_linear", recurrent="mamba",
    router="block_sparse_moe.router.layer", experts="block_sparse_moe",
    stacked_up="input_linear.weight", stacked_down="output_linear.weight",
    shared_experts="shared_mlp", shared_up=("input_linear",), shared_down="output_linear",
)  # fmt: skip
_GRANITE_TYPES = {"mamba": LINEAR, "attention": FULL}
"""As transformers 4 names types of layers."""
_TEXT_PART_NAMES = replace(_NAMES, root="model.language_model.")


def qwen3_next(name: str, config: Config) -> ModelSpec:
    """Qwen3-Next (2025): gated delta rule, each fourth layer gated attention, experts."""
    layers, step = number(config, "num_hidden_layers"), config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    renormalize = bool(config.get("norm_topk_prob", True))
    experts = _experts(config, sparse, count=512, chosen=10, renormalize=renormalize)
    return _hybrid(name, config, by_head=True, experts=experts if any(sparse) else None)


def qwen3_5(name: str, config: Config, **wiring: Any) -> ModelSpec:
    """The text model of Qwen3.5 (2026), with dense MLPs."""
    return _hybrid(name, config, by_head=False, **wiring)


def qwen3_5_text_part(name: str, config: Config) -> ModelSpec:
    """The text part of a Qwen3.5 that takes images too."""
    return qwen3_5(name, _text_of(config), names=_TEXT_PART_NAMES)


def qwen3_5_moe(name: str, config: Config, **wiring: Any) -> ModelSpec:
    """The text model of Qwen3.5 (2026), with experts in all layers."""
    experts = _experts(config, (True,) * number(config, "num_hidden_layers"), count=256, chosen=8)
    given = {"num_key_value_heads": 2, "intermediate_size": experts.width, **config}
    return _hybrid(name, given, by_head=False, experts=experts, **wiring)


def qwen3_5_moe_text_part(name: str, config: Config) -> ModelSpec:
    """The text part of a Qwen3.5 with experts that takes images too."""
    return qwen3_5_moe(name, _text_of(config), names=_TEXT_PART_NAMES)


def granite_hybrid(name: str, config: Config) -> ModelSpec:
    """Granite 4 (2025): Mamba-2, a few layers of attention, often experts."""
    layers, shared = number(config, "num_hidden_layers"), config.get("shared_intermediate_size", 1024)
    types = [_GRANITE_TYPES.get(kind, kind) for kind in config.get("layer_types") or ()]
    _check_types(types, layers)
    experts, count = None, config.get("num_local_experts", 8)
    if count:
        experts = ExpertSpec(
            (True,) * layers, count, config.get("num_experts_per_tok", 2),
            number(config, "intermediate_size"), shared_width=shared, stacked="rows",
        )  # fmt: skip
    spec = granite(name, {"num_key_value_heads": config.get("num_attention_heads"), **config})
    rotates = config.get("position_embedding_type") == "rope"
    ropes = tuple(spec.rope if rotates and kind == FULL else None for kind in types)
    mamba = _mamba(config, tuple(kind == LINEAR for kind in types))
    return replace(
        spec, ropes=ropes, intermediate_size=shared, experts=experts, recurrent=mamba, names=_GRANITE_NAMES
    )


def _mamba(config: Config, layers: tuple[bool, ...]) -> MambaSpec:
    heads, inner = config.get("mamba_n_heads", 128), config.get("mamba_expand", 2) * config["hidden_size"]
    head_dim, limits = config.get("mamba_d_head", "auto"), config.get("time_step_limit") or (0.0,)
    if limits[0] or any(isinstance(limit, int | float) and limit < math.inf for limit in limits[1:]):
        raise UnsupportedModelError(f"config.json: time_step_limit {limits} is not supported, only [0, inf]")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"config.json: hidden_act {config['hidden_act']!r} is not supported in Mamba layers, only silu"
        )
    mamba = MambaSpec(
        layers,
        config.get("mamba_d_conv", 4),
        heads,
        inner // max(1, heads) if head_dim == "auto" else head_dim,
        config.get("mamba_d_state", 256),
        config.get("mamba_n_groups", 1),
        config.get("rms_norm_eps", 1e-6),
        has_bias=bool(config.get("mamba_proj_bias", False)),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
    )
    if mamba.inner_size != inner:
        raise UnsupportedModelError(
            f"config.json: {heads} Mamba heads of {mamba.head_dim}, not mamba_expand x hidden_size = {inner}"
        )
    return mamba


def _text_of(config: Config) -> Config:
    text = {key: value for key, value in (config.get("text_config") or {}).items() if value is not None}
    tied = config.get("tie_word_embeddings", False)
    return {"tie_word_embeddings": tied, **text, "dtype": text.get("dtype") or dtype_of(config)}


def _hybrid(name: str, config: Config, *, by_head: bool, **wiring: Any) -> ModelSpec:
    layers, head_dim = number(config, "num_hidden_layers"), config.get("head_dim", 256)
    interval = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
    _check_types(types, layers)
    given = {"partial_rotary_factor": 0.25, "max_position_embeddings": 32_768, "head_dim": 256, **config}
    positions, bias = given["max_position_embeddings"], bool(config.get("attention_bias", False))
    rotation = config.get("rope_parameters") or {}  # the three positions of a text token are equal
    given["rope_parameters"] = {"partial_rotary_factor": given["partial_rotary_factor"]} | {
        key: value for key, value in rotation.items() if not key.startswith("mrope_")
    }
    rope = read_rope(given, head_dim, positions)
    delta = DeltaSpec(
        tuple(kind == LINEAR for kind in types),
        config.get("linear_conv_kernel_dim", 4),
        config.get("linear_num_key_heads", 16),
        config.get("linear_num_value_heads", 32),
        config.get("linear_key_head_dim", 128),
        config.get("linear_value_head_dim", 128),
        by_head,
    )
    ropes = tuple(rope if kind == FULL else None for kind in types)
    return llama_like(
        name, given, ropes=ropes, recurrent=delta, output_gate=True, qk_norm="head", norm_offset=1.0,
        qkv_bias=bias, out_bias=bias, num_kv_heads=config.get("num_key_value_heads", 2 if by_head else 4),
        **({"names": _NAMES} | wiring),
    )  # fmt: skip


def _check_types(types: Sequence[str], layers: int) -> None:
    check_types(types, layers, (FULL, LINEAR))
    if FULL not in types:
        raise UnsupportedModelError(f"config.json: layer_types need at least one {FULL}")


def _experts(
    config: Config, layers: tuple[bool, ...], *, count: int, chosen: int, renormalize: bool = True
) -> ExpertSpec:
    return ExpertSpec(
        layers,
        config.get("num_experts", count),
        config.get("num_experts_per_tok", chosen),
        config.get("moe_intermediate_size", 512),
        renormalize=renormalize,
        shared_width=config.get("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
