"""GLM-4, whose RoPE turns neighbours, and the later GLM with experts."""

from __future__ import annotations

from dataclasses import replace

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.families.deepseek import deepseek, deepseek_experts
from sagellm.engines.native.families.values import (
    Config,
    llama_like,
    number,
)
from sagellm.engines.native.model_spec import ModelSpec, TensorNames
from sagellm.engines.native.rope import read_rope

_GLM_NAMES = TensorNames(up=("mlp.gate_up_proj",))
_GLM4_NAMES = replace(_GLM_NAMES, attn_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")


def glm(name: str, config: Config) -> ModelSpec:
    """GLM-4 (arXiv:2406.12793) and GLM-4-0414: RoPE of pairs of neighbours in half of each head."""
    given = {
        "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131_072, "head_dim": 128,
        "partial_rotary_factor": 0.5, **config,
    }  # fmt: skip
    head_dim, layers = given["head_dim"], number(config, "num_hidden_layers")
    rope = replace(read_rope(given, head_dim, given["max_position_embeddings"]), interleaved=True)
    has_output_norms = name == "Glm4ForCausalLM"
    return llama_like(
        name, given, ropes=(rope,) * layers, qkv_bias=bool(config.get("attention_bias", True)),
        num_kv_heads=config.get("num_key_value_heads", 2),
        norm_place="both" if has_output_norms else "input",
        names=_GLM4_NAMES if has_output_norms else _GLM_NAMES,
    )  # fmt: skip


def glm4_moe(name: str, config: Config) -> ModelSpec:
    """GLM-4.5 to 4.7 (arXiv:2508.06471): experts as in DeepSeek-V3, RoPE in half of each head."""
    given = {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1, "n_routed_experts": 128, "moe_intermediate_size": 1408, "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0, **config,
    }  # fmt: skip
    return llama_like(
        name, given, qkv_bias=bool(config.get("attention_bias", False)),
        experts=deepseek_experts(name, given, third=True),
        num_kv_heads=config.get("num_key_value_heads", 8),
        qk_norm="head" if config.get("use_qk_norm") else "",
    )  # fmt: skip


def glm4_moe_lite(name: str, config: Config) -> ModelSpec:
    """GLM-4.7-Flash: a model of the shape of DeepSeek-V3."""
    given = {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 202_752, "q_lora_rank": 768, "v_head_dim": 256,
        "qk_nope_head_dim": 192, "first_k_dense_replace": 1, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.8, **config,
    }  # fmt: skip
    types = config.get("mlp_layer_types")
    if types is not None:
        given["first_k_dense_replace"] = dense = list(types).count("dense")
        layers = number(config, "num_hidden_layers")
        if list(types) != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise UnsupportedModelError(
                f"{name}: mlp_layer_types must be dense layers and then sparse ones, {layers} in all"
            )
    return deepseek(name, given)
