"""DeepSeek V2 and V3, with latent attention, and their routing of experts."""

from __future__ import annotations

from dataclasses import replace

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.families.values import Config, llama_like, number
from sagellm.engines.native.latent_spec import read_latent
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.rope import yarn_score_factor


def deepseek(name: str, config: Config) -> ModelSpec:
    """DeepSeek-V2 (arXiv:2405.04434), and V3 (arXiv:2412.19437) and models of its shape."""
    third = name != "DeepseekV2ForCausalLM"
    if config.get("attention_bias"):
        raise UnsupportedModelError(f"{name} with attention_bias is not supported; without it is")
    latent = read_latent(config, interleaved=not third or bool(config.get("rope_interleave", True)))
    max_positions = config.get("max_position_embeddings", 4096 if third else 2048)
    rotated = {**config, "head_dim": latent.rope_dim, "max_position_embeddings": max_positions}
    spec = llama_like(
        name, rotated, num_kv_heads=1, latent=latent,
        attention_scale=latent.key_dim**-0.5 * yarn_score_factor(config),
        mlp_bias=not third and bool(config.get("mlp_bias", False)),
        experts=deepseek_experts(name, config, third=third),
    )  # fmt: skip
    return replace(spec, head_dim=latent.width)


def deepseek_experts(name: str, config: Config, *, third: bool) -> ExpertSpec | None:
    """The experts of all layers but the first. V2 keeps the groups of the best experts, V3 those of the best
    pairs. Raises `UnsupportedModelError` for another routing.
    """
    layers, dense = (
        number(config, "num_hidden_layers"),
        config.get("first_k_dense_replace", 3 if third else 0),
    )
    if dense >= layers:
        return None
    method = "noaux_tc" if third else config.get("topk_method", "greedy")
    wanted = {
        "topk_method": ("noaux_tc",) if third else ("greedy", "group_limited_greedy"),
        "scoring_func": ("sigmoid" if third else "softmax",),
        "moe_layer_freq": (1,),
    }
    for key, values in wanted.items():
        if config.get(key, values[0]) not in values:
            raise UnsupportedModelError(
                f"{name} with {key} {config[key]!r} is not supported; {' or '.join(map(repr, values))} is"
            )
    if not third and config.get("norm_topk_prob"):
        raise UnsupportedModelError(f"{name} with norm_topk_prob is not supported; without it is")
    width, grouped = config.get("moe_intermediate_size", 2048 if third else 1407), method != "greedy"
    shared = config.get("n_shared_experts", 1 if third else 2)
    return ExpertSpec(
        count=config.get("n_routed_experts", 256 if third else 64),
        per_token=config.get("num_experts_per_tok", 8) if third else number(config, "num_experts_per_tok"),
        width=width, layers=tuple(i >= dense for i in range(layers)),
        renormalize=third and bool(config.get("norm_topk_prob", True)),
        scoring="sigmoid" if third else "softmax", is_corrected=third,
        groups=config.get("n_group", 8 if third else 1) if grouped else 1,
        kept_groups=config.get("topk_group", 4 if third else 1) if grouped else 1,
        group_best=2 if third else 1, scale=config.get("routed_scaling_factor", 2.5 if third else 1.0),
        shared_width=shared * width,
    )  # fmt: skip
