"""Random tiny checkpoints of every family, written by transformers' own classes in the real file format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 257

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


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**(_SHAPE | changes)))


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


def _opt(**changes: Any) -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(**(_OPT_SHAPE | changes)))


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
    "opt": _opt,
    "opt-post-norm-projected": lambda: _opt(do_layer_norm_before=False, word_embed_proj_dim=64),
    "opt-plain-untied": lambda: _opt(
        enable_bias=False, layer_norm_elementwise_affine=False, tie_word_embeddings=False,
        word_embed_proj_dim=64,
    ),
}  # fmt: skip


def make_tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """The model `name` in float32 eval mode. Every parameter is random, biases and norms too, and large
    enough for the logits to spread over several units.
    """
    model = TINY_MODELS[name]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.1 * noise + (1.0 if "norm" in key and key.endswith("weight") else 0.0))
            else:
                parameter.copy_(noise * (1.2 / parameter.shape[1] ** 0.5))
    return model.float().eval()


def save_tiny(folder: Path, name: str, seed: int = 0, **save_options: Any) -> PreTrainedModel:
    """Make the model and write it as a Hugging Face folder; returns the model."""
    model = make_tiny(name, seed)
    model.save_pretrained(folder, **save_options)
    return model
