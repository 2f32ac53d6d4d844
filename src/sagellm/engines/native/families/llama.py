"""Llama and its descendants, with RMSNorm, RoPE and a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.families.values import (
    SLIDING,
    Config,
    layer_types,
    llama_like,
    number,
)
from sagellm.engines.native.head_spec import HeadSpec
from sagellm.engines.native.model_spec import ModelSpec, TensorNames
from sagellm.engines.native.rope import read_rope

_PHI_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
_MIMO_HEAD = HeadSpec(
    "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
    hidden_first=True, before_norm=True,
)  # fmt: skip
"""Names and order: github.com/XiaomiMiMo/MiMo, `modeling_mimo.py`; which hidden state: vLLM's `mimo.py`."""


def llama(name: str, config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return llama_like(
        name, config, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False))
    )


def mistral(name: str, config: Config) -> ModelSpec:
    """Jiang et al. 2023, arXiv:2310.06825. Defaults: a window of 4096 and 8 KV heads."""
    window = config.get("sliding_window", 4096)
    windows = (window,) * number(config, "num_hidden_layers")
    return llama_like(name, config, windows=windows, num_kv_heads=config.get("num_key_value_heads", 8))


def qwen2(name: str, config: Config) -> ModelSpec:
    return llama_like(name, config, windows=_qwen_windows(config), qkv_bias=True)


def mimo(name: str, config: Config) -> ModelSpec:
    """MiMo-7B (arXiv:2505.07608): Qwen2 with an MTP layer."""
    return replace(qwen2(name, config), draft_head=_MIMO_HEAD)


def qwen3(name: str, config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    head_dim = config.get("head_dim") or 128
    return llama_like(
        name, {**config, "head_dim": head_dim}, windows=_qwen_windows(config), qkv_bias=bias, out_bias=bias,
        qk_norm="head",
    )  # fmt: skip


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Windows of Qwen layers: by `layer_types`, else from layer `max_window_layers` on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    return tuple(window if kind == SLIDING else None for kind in layer_types(config, lambda i: i >= first))


def phi3(name: str, config: Config) -> ModelSpec:
    """Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219): Llama with stacked matrices and LongRoPE."""
    original = config.get("original_max_position_embeddings", 4096)
    given = {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **config,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if (params.get("rope_type") or params.get("type")) in ("su", "yarn"):  # older names of longrope
        given["rope_parameters"] = {**params, "rope_type": "longrope", "type": "longrope"}
        given["rope_scaling"] = None
    windows = (config.get("sliding_window"),) * number(config, "num_hidden_layers")
    return llama_like(name, given, windows=windows, names=_PHI_NAMES)


def smollm3(name: str, config: Config) -> ModelSpec:
    """Llama without RoPE in each fourth layer."""
    layers = number(config, "num_hidden_layers")
    interval = config.get("no_rope_layer_interval", 4)
    flags = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if len(flags) < layers:
        raise UnsupportedModelError(f"config.json: {len(flags)} no_rope_layers for {layers} layers")
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    positions, bias = config.get("max_position_embeddings", 32768), bool(config.get("attention_bias", False))
    given = {"rope_theta": 2_000_000.0, "max_position_embeddings": positions, **config}
    rope = read_rope(given, config.get("head_dim") or hidden // heads, positions)
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    types = layer_types(config, lambda i: window is not None and not flags[i])
    return llama_like(
        name,
        given,
        ropes=tuple(rope if flag else None for flag in flags[:layers]),
        windows=tuple(window if kind == SLIDING else None for kind in types),
        num_kv_heads=config.get("num_key_value_heads", 4),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", True)),
    )


def granite(name: str, config: Config) -> ModelSpec:
    """Granite 3 and 4 dense: Llama with multipliers.

    That of sublayers' outputs is in the others: a residual stream x / r with norms of eps / r^2 gives the
    same sums and the same norms, and nothing is left to multiply in a layer.
    """
    residual = config.get("residual_multiplier", 1.0)
    if residual <= 0:
        raise UnsupportedModelError(f"config.json: residual_multiplier must be positive, got {residual}")
    bias = bool(config.get("attention_bias", False))
    return llama_like(
        name, config, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)),
        embed_scale=config.get("embedding_multiplier", 1.0) / residual,
        norm_eps=config.get("rms_norm_eps", 1e-6) / residual**2,
        attention_scale=config.get("attention_multiplier", 1.0),
        logit_scale=1.0 / config.get("logits_scaling", 1.0),
    )  # fmt: skip
