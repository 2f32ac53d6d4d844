"""Families that mix attention with layers of the gated delta rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.families.values import FULL, Config, dtype_of, llama_like, number
from sagellm.engines.native.model_spec import ModelSpec, TensorNames
from sagellm.engines.native.recurrent_spec import DeltaSpec
from sagellm.engines.native.rope import read_rope

LINEAR = "linear_attention"
_NAMES = TensorNames(shared_experts="mlp.shared_expert")
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


def _text_of(config: Config) -> Config:
    text = {key: value for key, value in (config.get("text_config") or {}).items() if value is not None}
    tied = config.get("tie_word_embeddings", False)
    return {"tie_word_embeddings": tied, **text, "dtype": text.get("dtype") or dtype_of(config)}


def _hybrid(name: str, config: Config, *, by_head: bool, **wiring: Any) -> ModelSpec:
    layers, head_dim = number(config, "num_hidden_layers"), config.get("head_dim", 256)
    types = config.get("layer_types") or [
        FULL if (i + 1) % config.get("full_attention_interval", 4) == 0 else LINEAR for i in range(layers)
    ]
    unknown = sorted(set(types) - {FULL, LINEAR})
    if unknown or len(types) != layers or FULL not in types:
        raise UnsupportedModelError(
            f"config.json: {len(types)} layer_types for {layers} layers, unknown: {', '.join(unknown)}; "
            f"supported are {FULL} and {LINEAR}, one per layer, and at least one {FULL}"
        )
    given = {"partial_rotary_factor": 0.25, "max_position_embeddings": 32_768, "head_dim": 256, **config}
    positions, bias = given["max_position_embeddings"], bool(config.get("attention_bias", False))
    rotation = config.get("rope_parameters") or {}  # the three positions of a text token are equal
    given["rope_parameters"] = {"partial_rotary_factor": given["partial_rotary_factor"]} | {
        key: value for key, value in rotation.items() if not key.startswith("mrope_")
    }
    rope = read_rope(given, head_dim, positions)
    delta = DeltaSpec(
        tuple(kind == LINEAR for kind in types),
        config.get("linear_num_key_heads", 16),
        config.get("linear_num_value_heads", 32),
        config.get("linear_key_head_dim", 128),
        config.get("linear_value_head_dim", 128),
        config.get("linear_conv_kernel_dim", 4),
        by_head,
    )
    ropes = tuple(rope if kind == FULL else None for kind in types)
    return llama_like(
        name, given, ropes=ropes, recurrent=delta, output_gate=True, qk_norm="head", norm_offset=1.0,
        qkv_bias=bias, out_bias=bias, num_kv_heads=config.get("num_key_value_heads", 2 if by_head else 4),
        **({"names": _NAMES} | wiring),
    )  # fmt: skip


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
