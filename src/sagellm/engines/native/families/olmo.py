"""OLMo 2 and 3, which norm what sublayers return."""

from __future__ import annotations

from sagellm.engines.native.families.values import (
    FULL,
    SLIDING,
    Config,
    llama_like,
    mixed_layers,
    number,
)
from sagellm.engines.native.model_spec import ModelSpec, TensorNames

OUTPUT_NORMS = TensorNames(
    attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"
)


def olmo2(name: str, config: Config) -> ModelSpec:
    """OLMo et al. 2024, arXiv:2501.00656: norms of outputs, and of all heads of queries and keys together."""
    given = {"rms_norm_eps": 1e-5, **config}
    bias = bool(config.get("attention_bias", False))
    return llama_like(
        name, given, norm_place="output", qk_norm="all", names=OUTPUT_NORMS, qkv_bias=bias, out_bias=bias
    )


def olmo3(name: str, config: Config) -> ModelSpec:
    """OLMo 2 with windows in three of four layers. Their RoPE is not extended."""
    given = {"rms_norm_eps": 1e-5, **config}
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    positions, theta = config.get("max_position_embeddings", 2048), config.get("rope_theta", 500_000.0)
    bias, thetas = bool(config.get("attention_bias", False)), {FULL: theta, SLIDING: theta}
    mixed = mixed_layers(config, 4, config.get("sliding_window", 4096), thetas, positions, hidden // heads)
    return llama_like(
        name, given, norm_place="output", qk_norm="all", names=OUTPUT_NORMS, qkv_bias=bias, out_bias=bias,
        **mixed,
    )  # fmt: skip
