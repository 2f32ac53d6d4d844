"""Families whose MLPs are mixtures of experts."""

from __future__ import annotations

from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.families.values import SLIDING, Config, layer_types, llama_like, number
from sagellm.engines.native.model_spec import ModelSpec, TensorNames

_GPT_OSS_NAMES = TensorNames(router="mlp.router")
_MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert_up=("w1", "w3"),
    expert_down="w2",
)  # fmt: skip


def mixtral(name: str, config: Config) -> ModelSpec:
    """Jiang et al. 2024, arXiv:2401.04088."""
    layers = number(config, "num_hidden_layers")
    given = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **config}
    experts = ExpertSpec(
        (True,) * layers, config.get("num_local_experts", 8), config.get("num_experts_per_tok", 2),
        number(config, "intermediate_size"),
    )  # fmt: skip
    return llama_like(
        name, given, windows=(config.get("sliding_window"),) * layers, experts=experts, names=_MIXTRAL_NAMES,
        num_kv_heads=config.get("num_key_value_heads", 8),
    )  # fmt: skip


def qwen3_moe(name: str, config: Config) -> ModelSpec:
    """Yang et al. 2025, arXiv:2505.09388: Qwen3 with experts in most layers."""
    layers, step = number(config, "num_hidden_layers"), config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    experts = ExpertSpec(
        tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        config.get("num_experts", config.get("num_local_experts", 128)),
        config.get("num_experts_per_tok", 8),
        config.get("moe_intermediate_size", 768),
        renormalize=bool(config.get("norm_topk_prob", False)),
    )
    given = {"head_dim": 128, "intermediate_size": 6144, **config}
    bias = bool(config.get("attention_bias", False))
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    return llama_like(
        name, given, windows=(window,) * layers, qkv_bias=bias, out_bias=bias, qk_norm="head",
        experts=experts, num_kv_heads=config.get("num_key_value_heads", 4),
    )  # fmt: skip


def gpt_oss(name: str, config: Config) -> ModelSpec:
    """OpenAI 2025, arXiv:2508.10925: attention sinks, windows in every other layer, experts in MXFP4."""
    layers = number(config, "num_hidden_layers")
    given = {
        "head_dim": 64, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
        **config,
    }  # fmt: skip
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        given["rope_parameters"] = {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        }  # fmt: skip
    experts = ExpertSpec(
        (True,) * layers, config.get("num_local_experts", 128), config.get("num_experts_per_tok", 4),
        number(config, "intermediate_size"), stacked="columns", alternates=True, has_bias=True,
        swiglu_limit=config.get("swiglu_limit", 7.0), swiglu_alpha=config.get("swiglu_alpha", 1.702),
    )  # fmt: skip
    window, bias = config.get("sliding_window", 128), bool(config.get("attention_bias", True))
    types = layer_types(config, lambda i: (i + 1) % 2 != 0)
    return llama_like(
        name, given, experts=experts, names=_GPT_OSS_NAMES, qkv_bias=bias, out_bias=bias,
        attention_sinks=True, num_kv_heads=config.get("num_key_value_heads", 8),
        windows=tuple(window if kind == SLIDING else None for kind in types),
    )  # fmt: skip
