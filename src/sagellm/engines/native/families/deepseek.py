"""DeepSeek V2 and V3, with latent attention."""

from __future__ import annotations

from dataclasses import replace

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.families.values import (
    Config,
    llama_like,
    number,
)
from sagellm.engines.native.latent_spec import read_latent
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.rope import yarn_score_factor


def deepseek(name: str, config: Config) -> ModelSpec:
    """DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437) without experts."""
    third = name == "DeepseekV3ForCausalLM"
    layers = number(config, "num_hidden_layers")
    dense = config.get("first_k_dense_replace", 3 if third else 0)
    if dense < layers:
        raise UnsupportedModelError(
            f"{name} with experts is not supported: first_k_dense_replace is {dense} of {layers} layers"
        )
    if config.get("attention_bias"):
        raise UnsupportedModelError(f"{name} with attention_bias is not supported; without it is")
    latent = read_latent(config, interleaved=not third or bool(config.get("rope_interleave", True)))
    max_positions = config.get("max_position_embeddings", 4096 if third else 2048)
    rotated = {**config, "head_dim": latent.rope_dim, "max_position_embeddings": max_positions}
    spec = llama_like(
        name, rotated, num_kv_heads=1, latent=latent,
        attention_scale=latent.key_dim**-0.5 * yarn_score_factor(config),
        mlp_bias=not third and bool(config.get("mlp_bias", False)),
    )  # fmt: skip
    return replace(spec, head_dim=latent.width)
