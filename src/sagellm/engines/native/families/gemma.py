"""Gemma 2 and 3, with norms on both sides of sublayers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.families.olmo import OUTPUT_NORMS
from sagellm.engines.native.families.values import (
    FULL,
    SLIDING,
    Config,
    dtype_of,
    layer_types,
    llama_like,
    mixed_layers,
)
from sagellm.engines.native.model_spec import ModelSpec

OUTER_NORMS = replace(OUTPUT_NORMS, mlp_norm="pre_feedforward_layernorm")
_TEXT_PART_NAMES = replace(OUTER_NORMS, root="language_model.model.", head="language_model.lm_head")


def _gemma(name: str, config: Config, *, positions: int, **wiring: Any) -> ModelSpec:
    """What Gemma 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786) have in common."""
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{name} with use_bidirectional_attention does not generate text")
    given = {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "head_dim": 256, "max_position_embeddings": positions, **config,
        "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh"),
    }  # fmt: skip
    hidden, scalar = given["hidden_size"], config.get("query_pre_attn_scalar", 256)
    bias = bool(config.get("attention_bias", False))
    return llama_like(
        name, given, norm_place="both", norm_offset=1.0, qkv_bias=bias, out_bias=bias,
        num_kv_heads=config.get("num_key_value_heads", 4), tied=bool(config.get("tie_word_embeddings", True)),
        embed_scale=rounded(hidden**0.5, dtype_of(config)), attention_scale=float(scalar) ** -0.5,
        **({"names": OUTER_NORMS} | wiring),
    )  # fmt: skip


def rounded(number: float, dtype: str) -> float:
    """The number in the dtype of the model, in which embeddings are multiplied."""
    return float(torch.tensor(number, dtype=getattr(torch, dtype, torch.float32)))


def gemma2(name: str, config: Config) -> ModelSpec:
    """Every second layer has a window."""
    config = {"num_hidden_layers": 26, "vocab_size": 256_000, **config}
    types = layer_types(config, lambda i: (i + 1) % 2 != 0)
    window = config.get("sliding_window", 4096)
    return _gemma(
        name, config, positions=8192, score_softcap=config.get("attn_logit_softcapping", 50.0),
        windows=tuple(window if kind == SLIDING else None for kind in types),
        logit_softcap=config.get("final_logit_softcapping", 30.0),
    )  # fmt: skip


def gemma3_text_part(name: str, config: Config) -> ModelSpec:
    """The text part of a Gemma 3 that takes images too."""
    text = {key: value for key, value in (config.get("text_config") or {}).items() if value is not None}
    given = {
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        **text,
        "dtype": dtype_of(config),
    }
    return gemma3(name, given, names=_TEXT_PART_NAMES)


def gemma3(name: str, config: Config, **wiring: Any) -> ModelSpec:
    """Layers have a window but for each sixth. The two kinds differ in RoPE."""
    config = {"num_hidden_layers": 26, "vocab_size": 262_208, **config}
    positions = config.get("max_position_embeddings", 131_072)
    thetas = {
        FULL: config.get("rope_theta", 1_000_000.0), SLIDING: config.get("rope_local_base_freq", 10_000.0)
    }  # fmt: skip
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    window, head_dim = config.get("sliding_window", 4096), config.get("head_dim", 256)
    return _gemma(
        name, config, positions=131_072, qk_norm="head",
        logit_softcap=config.get("final_logit_softcapping"),
        **mixed_layers(config, every, window, thetas, positions, head_dim), **wiring,
    )  # fmt: skip
