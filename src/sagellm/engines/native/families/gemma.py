"""Gemma 2 and 3, with norms on both sides of sublayers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.families.olmo import OUTPUT_NORMS
from sagellm.engines.native.families.values import (
    FULL,
    SLIDING,
    Config,
    layer_types,
    llama_like,
    mixed_layers,
    number,
)
from sagellm.engines.native.model_spec import ModelSpec

_GEMMA_NAMES = replace(OUTPUT_NORMS, mlp_norm="pre_feedforward_layernorm")


def _gemma(name: str, config: Config, *, positions: int, **wiring: Any) -> ModelSpec:
    """What Gemma 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786) have in common."""
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{name} with use_bidirectional_attention does not generate text")
    hidden = number(config, "hidden_size")
    scalar = config.get("query_pre_attn_scalar", 256)
    given = {
        "head_dim": 256, "max_position_embeddings": positions, **config,
        "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh"),
    }  # fmt: skip
    bias = bool(config.get("attention_bias", False))
    return llama_like(
        name, given, norm_place="both", norm_offset=1.0, names=_GEMMA_NAMES, qkv_bias=bias, out_bias=bias,
        num_kv_heads=config.get("num_key_value_heads", 4), tied=bool(config.get("tie_word_embeddings", True)),
        embed_scale=float(hidden) ** 0.5, attention_scale=float(scalar) ** -0.5,
        **wiring,
    )  # fmt: skip


def gemma2(name: str, config: Config) -> ModelSpec:
    types = layer_types(config, lambda i: (i + 1) % 2 != 0)
    window = config.get("sliding_window", 4096)
    return _gemma(
        name, config, positions=8192, score_softcap=config.get("attn_logit_softcapping", 50.0),
        windows=tuple(window if kind == SLIDING else None for kind in types),
        logit_softcap=config.get("final_logit_softcapping", 30.0),
    )  # fmt: skip


def gemma3(name: str, config: Config) -> ModelSpec:
    positions = config.get("max_position_embeddings", 131_072)
    thetas = {
        FULL: config.get("rope_theta", 1_000_000.0), SLIDING: config.get("rope_local_base_freq", 10_000.0)
    }  # fmt: skip
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    window, head_dim = config.get("sliding_window", 4096), config.get("head_dim", 256)
    return _gemma(
        name, config, positions=131_072, qk_norm="head",
        score_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
        **mixed_layers(config, every, window, thetas, positions, head_dim),
    )  # fmt: skip
