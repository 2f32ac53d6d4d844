"""Random tiny checkpoints of architectures that run through the transformers bridge, by model type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_models import VOCAB

_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    **_SPECIAL,
}
_BASE = _WIDE | {"num_key_value_heads": 2}
_HEADS = _BASE | {"head_dim": 16}
_GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, **_SPECIAL}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWED = _HEADS | {"sliding_window": 13, "layer_types": _WINDOWS}
_LATENT = _BASE | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

BRIDGED_MODELS: dict[str, dict[str, Any]] = {
    "afmoe": _WINDOWED | _EXPERTS | {"num_dense_layers": 1},
    "apertus": _BASE,
    "arcee": _HEADS,
    "aria_text": _BASE | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": _LATENT | _GROUPED_EXPERTS,
    "beam": _HEADS | _EXPERTS,
    "biogpt": _WIDE,
    "bitnet": _BASE,
    "codegen": _GPT | {"n_inner": 96, "n_positions": 256, "rotary_dim": 8},
    "cohere": _HEADS,
    "cohere2": _WINDOWED,
    "cohere2_moe": _WINDOWED | _EXPERTS,
    "ctrl": _GPT | {"dff": 96, "n_positions": 256},
    "cwm": _WINDOWED,
    "deepseek_v2": _LATENT | _GROUPED_EXPERTS | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT | _GROUPED_EXPERTS,
    "dots1": _HEADS | _GROUPED_EXPERTS | {"n_shared_experts": 1},
    "ernie4_5": _HEADS,
    "ernie4_5_moe": _HEADS | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": _WINDOWED,
    "exaone_moe": _WINDOWED | _EXPERTS | _GROUPED_EXPERTS,
    "flex_olmo": _BASE | _EXPERTS,
    "flint": _HEADS | _EXPERTS,
    "glm4_moe": _HEADS | _GROUPED_EXPERTS,
    "glm4_moe_lite": _LATENT | _GROUPED_EXPERTS,
    "gpt-sw3": _GPT | {"n_inner": 96, "n_positions": 256},
    "gpt2": _GPT | {"n_inner": 96, "n_positions": 256},
    "gpt_bigcode": _GPT | {"n_inner": 96, "n_positions": 256},
    "gpt_neox": _WIDE,
    "gptj": _GPT | {"n_inner": 96, "n_positions": 256, "rotary_dim": 8},
    "gpt_oss": _WINDOWED | _LOCAL_EXPERTS,
    "granite_swa": _WINDOWED,
    "granitemoe": _BASE | _LOCAL_EXPERTS,
    "granitemoe_swa": _WINDOWED | _LOCAL_EXPERTS,
    "granitemoeshared": _BASE | _LOCAL_EXPERTS | {"shared_intermediate_size": 32},
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS | {"num_experts": 4, "moe_topk": 2},
    "hy_v3": _HEADS | _EXPERTS,
    "hyperclovax": _BASE,
    "internlm3": _HEADS,
    "iquestcoder": _HEADS,
    "jais2": _HEADS,
    "kolibri1": _HEADS | _EXPERTS,
    "laguna": _HEADS | _EXPERTS,
    "mellum": _HEADS | _EXPERTS,
    "minicpm3": _LATENT,
    "minimax_m2": _HEADS | _LOCAL_EXPERTS,
    "minimax_m3_vl_text": _HEADS | _LOCAL_EXPERTS,
    "ministral": _WINDOWED,
    "ministral3": _HEADS,
    "modernbert-decoder": _WIDE
    | {"layer_types": _WINDOWS, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2},
    "moshi": _HEADS | {"ffn_dim": 96},
    "nanochat": _BASE,
    "nemotron": _HEADS,
    "olmo": _BASE,
    "olmoe": _BASE | _EXPERTS,
    "persimmon": _WIDE,
    "phi": _BASE,
    "phimoe": _BASE | _LOCAL_EXPERTS,
    "qwen2_moe": _BASE | _EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "seed_oss": _HEADS,
    "solar_open": _HEADS | _GROUPED_EXPERTS,
    "stablelm": _BASE,
    "starcoder2": _BASE,
    "vaultgemma": _WINDOWED,
    "youtu": _LATENT,
}


def save_bridged(folder: Path, model_type: str, **changes: Any) -> PreTrainedModel:
    """Write a random model in float32; returns it as transformers loads it."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    kind = getattr(transformers, names if isinstance(names, str) else names[0])
    torch.manual_seed(0)
    model = kind(CONFIG_MAPPING[model_type](**(BRIDGED_MODELS[model_type] | changes)))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim == 1:
                parameter.copy_(0.1 * noise + (1.0 if "norm" in key and key.endswith("weight") else 0.0))
            else:
                parameter.copy_(noise * (1.2 / parameter.shape[-1] ** 0.5))
    model.float().save_pretrained(folder)
    loaded: PreTrainedModel = kind.from_pretrained(folder).eval()
    return loaded
