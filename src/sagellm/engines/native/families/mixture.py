"""Families whose MLPs are mixtures of experts."""

from __future__ import annotations

from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.families.values import Config, llama_like, number
from sagellm.engines.native.model_spec import ModelSpec, TensorNames

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
