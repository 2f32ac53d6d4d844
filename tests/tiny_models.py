"""Random tiny checkpoints of every family, written by transformers' own classes in the real file format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

VOCAB = 257
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OPT_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "ffn_dim": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 160,
    "dropout": 0.0,
}


_RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}


_SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
_IMAGES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}


def _qwen3_next(**changes: Any) -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**(_SHAPE | _RECURRENT | _SHARED_EXPERT | changes)))


def _qwen3_5(**changes: Any) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(_SHAPE | _RECURRENT | changes)))


def _qwen3_5_with_images() -> PreTrainedModel:
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=_SHAPE | _RECURRENT, vision_config=_IMAGES)
    )


def _qwen3_5_moe(**changes: Any) -> dict[str, Any]:
    shape = {key: value for key, value in _SHAPE.items() if key != "intermediate_size"}
    return shape | _RECURRENT | _SHARED_EXPERT | changes


def _granite_hybrid(**changes: Any) -> PreTrainedModel:
    mamba = {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12,
        "mamba_expand": 1, "num_local_experts": 0, "shared_intermediate_size": 72, "mamba_proj_bias": True,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.15,
        "logits_scaling": 2.0,
    }  # fmt: skip
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**(_SHAPE | mamba | changes)))


def _qwen3_5_moe_with_images() -> PreTrainedModel:
    return Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=_qwen3_5_moe(linear_conv_kernel_dim=2), vision_config=_IMAGES)
    )


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**(_SHAPE | changes)))


_LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "intermediate_size": 40,
    "intermediate_size_mlp": 112,
    "num_local_experts": 4,
    "attention_chunk_size": 32,
    "floor_scale": 24,
    "attn_scale": 0.4,
    "no_rope_layer_interval": 3,
}


def _llama4(**changes: Any) -> PreTrainedModel:
    return Llama4ForCausalLM(Llama4TextConfig(**(_SHAPE | _LLAMA4 | changes)))


def _llama4_with_images() -> PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 1, "projector_input_dim": 16}
    vision |= {"projector_output_dim": 16, "vision_output_dim": 16}
    text = _SHAPE | _LLAMA4 | {"moe_layers": [], "attn_temperature_tuning": False}
    model = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=vision))
    # transformers 5.24 reads this of the text part, which does not give it.
    model.language_model.register_forward_hook(lambda module, given, out: setattr(out, "image_outputs", None))
    return model


def _rope(rope_type: str, max_positions: int = 512, **parameters: Any) -> PreTrainedModel:
    rope = {"rope_type": rope_type, "rope_theta": 1000.0, **parameters}
    return _llama(rope_parameters=rope, max_position_embeddings=max_positions)


def _mistral(**changes: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**(_SHAPE | changes)))


def _qwen2(**changes: Any) -> PreTrainedModel:
    shape = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    return Qwen2ForCausalLM(Qwen2Config(**(shape | {"hidden_size": 128, "num_attention_heads": 4} | changes)))


def _qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**(_SHAPE | changes)))


_LATENT: dict[str, Any] = {
    **{key: value for key, value in _SHAPE.items() if key not in ("head_dim", "num_key_value_heads")},
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
    "first_k_dense_replace": 3,
}


_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
}


def _deepseek2(**changes: Any) -> PreTrainedModel:
    return DeepseekV2ForCausalLM(DeepseekV2Config(**(_LATENT | changes)))


def _deepseek3(**changes: Any) -> PreTrainedModel:
    return DeepseekV3ForCausalLM(DeepseekV3Config(**(_LATENT | changes)))


def _opt(**changes: Any) -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(**(_OPT_SHAPE | changes)))


def _phi3(**changes: Any) -> PreTrainedModel:
    shape = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    return Phi3ForCausalLM(Phi3Config(**(shape | {"hidden_size": 128} | changes)))


def _longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "rope_theta": 1000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)],
    }  # fmt: skip


def _olmo(config: type, model: type, **changes: Any) -> PreTrainedModel:
    shape = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    made: PreTrainedModel = model(config(**(shape | {"hidden_size": 128} | changes)))
    return made


def _smollm3(**changes: Any) -> PreTrainedModel:
    shape = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    shape |= {"hidden_size": 128, "num_hidden_layers": 4, "no_rope_layer_interval": 2}
    return SmolLM3ForCausalLM(SmolLM3Config(**(shape | changes)))


def _granite(**changes: Any) -> PreTrainedModel:
    shape = {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    shape |= {"hidden_size": 128, "embedding_multiplier": 3.0, "logits_scaling": 0.7}
    shape |= {"residual_multiplier": 0.6, "attention_multiplier": 0.11}
    return GraniteForCausalLM(GraniteConfig(**(shape | changes)))


def _gemma(config: type, model: type, **changes: Any) -> PreTrainedModel:
    shape = {"num_hidden_layers": 4, "sliding_window": 19, "query_pre_attn_scalar": 40}
    made: PreTrainedModel = model(config(**(_SHAPE | shape | changes)))
    return made


def _qwen3_moe(**changes: Any) -> PreTrainedModel:
    shape = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(_SHAPE | shape | changes)))


def _gpt_oss(**changes: Any) -> PreTrainedModel:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "truncate": False}
    shape: dict[str, Any] = {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "num_hidden_layers": 4,
        "sliding_window": 16, "rope_parameters": rope | {"original_max_position_embeddings": 128},
    }  # fmt: skip
    return GptOssForCausalLM(GptOssConfig(**(_SHAPE | shape | changes)))


def _mixtral(**changes: Any) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**(_SHAPE | {"num_local_experts": 4} | changes)))


def _gemma3_with_images() -> PreTrainedModel:
    text = _SHAPE | {"num_hidden_layers": 4, "sliding_window": 12, "layer_types": [SLIDING, FULL] * 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 1}
    images = {"vision_config": vision, "mm_tokens_per_image": 4, "image_token_index": VOCAB}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, **images))


_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "global_head_dim": 48,
    "sliding_window": 13,
    "num_kv_shared_layers": 2,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 12.0,
}


def _gemma4(**changes: Any) -> PreTrainedModel:
    return Gemma4ForCausalLM(Gemma4TextConfig(**(_SHAPE | _GEMMA4 | changes)))


def _gemma4_with_images() -> PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"num_key_value_heads": 1, "head_dim": 16, "position_embedding_size": 4}
    text = _SHAPE | _GEMMA4 | {"use_double_wide_mlp": True}
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision))


TINY_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-head80-tied": lambda: _llama(head_dim=80, hidden_size=64, tie_word_embeddings=True),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh"),
    "llama-one-head-each": lambda: _llama(num_key_value_heads=4, head_dim=24, hidden_act="gelu"),
    "rope-linear": lambda: _rope("linear", factor=4.0),
    "rope-dynamic": lambda: _rope("dynamic", max_positions=48, factor=3.0),
    "rope-llama3": lambda: _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "rope-yarn": lambda: _rope("yarn", max_positions=128, factor=4.0, original_max_position_embeddings=32),
    "rope-yarn-mscale": lambda: _rope(
        "yarn", max_positions=256, factor=4.0, original_max_position_embeddings=64, mscale=0.7,
        mscale_all_dim=1.3, beta_fast=4.0, beta_slow=0.5, truncate=False,
    ),
    "rope-yarn-attention": lambda: _rope(
        "yarn", max_positions=96, factor=2.0, original_max_position_embeddings=48, attention_factor=0.8
    ),
    "llama4": _llama4,
    "llama4-dense-first": lambda: _llama4(
        interleave_moe_layer_step=2, use_qk_norm=False, attn_temperature_tuning=False, attention_bias=True,
        num_experts_per_tok=2, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 32,
        },
    ),
    "llama4-text-part": _llama4_with_images,
    "mistral-window": lambda: _mistral(sliding_window=17),
    "mistral-full": lambda: _mistral(sliding_window=None, head_dim=32),
    "qwen2": _qwen2,
    "qwen2-window-tied": lambda: _qwen2(
        use_sliding_window=True, sliding_window=13, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": _qwen3,
    "qwen3-head80-window": lambda: _qwen3(
        head_dim=80, attention_bias=True, use_sliding_window=True, sliding_window=20, max_window_layers=2
    ),
    "deepseek2": _deepseek2,
    "deepseek2-lite": lambda: _deepseek2(q_lora_rank=None, v_head_dim=40),
    "deepseek2-moe": lambda: _deepseek2(**_EXPERTS, first_k_dense_replace=0, q_lora_rank=None),
    "deepseek2-moe-groups": lambda: _deepseek2(
        **_EXPERTS, first_k_dense_replace=0, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=3.0,
    ),
    "deepseek3-moe-groups": lambda: _deepseek3(**_EXPERTS, n_group=4, topk_group=2, first_k_dense_replace=1),
    "deepseek3-yarn": lambda: _deepseek3(
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 64,
        },
    ),
    "deepseek3-halves": lambda: _deepseek3(rope_interleave=False, num_attention_heads=6),
    "opt": _opt,
    "opt-post-norm-projected": lambda: _opt(do_layer_norm_before=False, word_embed_proj_dim=64),
    "opt-plain-untied": lambda: _opt(
        enable_bias=False, layer_norm_elementwise_affine=False, tie_word_embeddings=False,
        word_embed_proj_dim=64,
    ),
    "gpt-oss": _gpt_oss,
    "mixtral": _mixtral,
    "mixtral-window": lambda: _mixtral(sliding_window=21, num_experts_per_tok=1),
    "qwen3-moe": _qwen3_moe,
    "qwen3-moe-some-dense": lambda: _qwen3_moe(
        mlp_only_layers=[0], norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True
    ),
    "granite-hybrid": _granite_hybrid,
    "granite-hybrid-moe-rope": lambda: _granite_hybrid(
        position_embedding_type="rope", num_local_experts=8, num_experts_per_tok=3, mamba_proj_bias=False,
        mamba_conv_bias=False, mamba_n_groups=1, attention_bias=True, tie_word_embeddings=True,
    ),
    "qwen3-next": _qwen3_next,
    "qwen3-next-dense-first": lambda: _qwen3_next(
        layer_types=[FULL, LINEAR, LINEAR, FULL], mlp_only_layers=[0, 1], linear_conv_kernel_dim=3,
        tie_word_embeddings=True, attention_bias=True, norm_topk_prob=False,
    ),
    "qwen3.5": lambda: _qwen3_5(
        rope_parameters={
            "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2], "mrope_interleaved": True,
        },
    ),
    "qwen3.5-text-part": _qwen3_5_with_images,
    "qwen3.5-moe": lambda: Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**_qwen3_5_moe(tie_word_embeddings=True))
    ),
    "qwen3.5-moe-text-part": _qwen3_5_moe_with_images,
    "phi3": _phi3,
    "phi3-longrope-partial": lambda: _phi3(
        rope_parameters=_longrope(8) | {"partial_rotary_factor": 0.5}, original_max_position_embeddings=4
    ),
    "phi3-longrope-short-window": lambda: _phi3(
        rope_parameters=_longrope(16), original_max_position_embeddings=512, sliding_window=15
    ),
    "olmo2": lambda: _olmo(Olmo2Config, Olmo2ForCausalLM),
    "olmo3-window-mix": lambda: _olmo(
        Olmo3Config, Olmo3ForCausalLM, num_hidden_layers=4, sliding_window=14, attention_bias=True
    ),
    "smollm3": _smollm3,
    "smollm3-window-mix": lambda: _smollm3(
        use_sliding_window=True, sliding_window=18, tie_word_embeddings=False
    ),
    "granite": _granite,
    "glm": lambda: GlmForCausalLM(GlmConfig(**_SHAPE)),
    "glm4-moe-lite": lambda: Glm4MoeLiteForCausalLM(Glm4MoeLiteConfig(**(_LATENT | _EXPERTS))),
    "glm4-moe": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(**(_SHAPE | _EXPERTS | {"attention_bias": True, "use_qk_norm": True}))
    ),
    "glm4-moe-plain": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(**(_SHAPE | _EXPERTS | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False}))
    ),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**(_SHAPE | {"attention_bias": False}))),
    "gemma2": lambda: _gemma(Gemma2Config, Gemma2ForCausalLM),
    "gemma3": lambda: _gemma(Gemma3TextConfig, Gemma3ForCausalLM, num_hidden_layers=7, num_key_value_heads=1),
    "gemma3-text-part": _gemma3_with_images,
    "gemma4": _gemma4,
    "gemma4-wide-windows": lambda: _gemma4(
        num_hidden_layers=9, layer_types=[SLIDING, SLIDING, FULL] * 3, num_key_value_heads=4, head_dim=32,
        attention_k_eq_v=True, num_global_key_value_heads=1, num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, attention_bias=True, tie_word_embeddings=False,
    ),
    "gemma4-moe": lambda: _gemma4(
        num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2, num_kv_shared_layers=0, attention_k_eq_v=True,
        num_global_key_value_heads=2, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=8,
        top_k_experts=3, moe_intermediate_size=40,
    ),
    "gemma4-text-part": _gemma4_with_images,
    "gemma3-rope-linear": lambda: _gemma(
        Gemma3TextConfig, Gemma3ForCausalLM, tie_word_embeddings=False, layer_types=[FULL, SLIDING] * 2,
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
}  # fmt: skip


RECURRENT = {name for name in TINY_MODELS if name.startswith(("qwen3-next", "qwen3.5", "granite-hybrid"))}
"""Those with recurrent states."""
DISTINCT = (
    *("llama", "llama-head80-tied", "llama-one-head-each", "llama4", "mistral-window", "qwen3"),
    *(
        "deepseek2-lite",
        "deepseek3-yarn",
        "opt-post-norm-projected",
        "gpt-oss",
        "mixtral-window",
        "qwen3-moe",
    ),
    *("granite-hybrid", "qwen3-next", "qwen3.5", "phi3-longrope-short-window", "olmo3-window-mix"),
    *("smollm3", "granite", "glm4", "gemma2", "gemma3", "gemma4", "gemma4-wide-windows"),
)
"""One of each way of attention and of each wiring of layers. The others differ from one of them in angles of
RoPE, biases, tied weights or names in their checkpoints; `test_parity.py` compares all with transformers."""


def make_tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """The model `name` in float32 eval mode. Every parameter is random, biases and norms too, and large
    enough for the logits to spread over several units.
    """
    model = TINY_MODELS[name]()
    generator = torch.Generator().manual_seed(seed)
    adds_one = model.config.model_type.startswith(("gemma2", "gemma3", "qwen3_next", "qwen3_5"))
    norm = 0.0 if adds_one else 1.0  # to a norm's weights

    def is_scale(key: str) -> bool:
        return ("norm" in key and key.endswith("weight")) or "router." in key

    scaled = model.config.model_type.startswith("gemma4")  # scores, by the norm of queries
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.1 * noise + (norm if is_scale(key) else 0.0))
            else:
                parameter.copy_(noise * (1.2 / parameter.shape[1] ** 0.5))
            if scaled and key.endswith("q_norm.weight"):
                parameter.mul_(0.2)
        for key, buffer in model.named_buffers():
            if key.endswith("correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if key.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.1 * torch.randn(buffer.shape, generator=generator))
    return model.float().eval()


def save_tiny(folder: Path, name: str, seed: int = 0, **save_options: Any) -> PreTrainedModel:
    """Make the model and write it as a Hugging Face folder; returns the model."""
    model = make_tiny(name, seed)
    model.save_pretrained(folder, **save_options)
    return model
