"""Llama 4: chunked attention beside layers that see all, experts whose input is weighted."""

from __future__ import annotations

from dataclasses import replace

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.types import AttentionChunk
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.families.values import CHUNKED, Config, dtype_of, layer_types, llama_like, number
from sagellm.engines.native.layer_spec import TemperatureSpec
from sagellm.engines.native.model_spec import ModelSpec, TensorNames
from sagellm.engines.native.rope import read_rope

_NAMES = TensorNames(
    up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj",
    router="feed_forward.router", experts="feed_forward.experts", shared_experts="feed_forward.shared_expert",
)  # fmt: skip
_TEXT_PART_NAMES = replace(_NAMES, root="language_model.model.", head="language_model.lm_head")
_DEFAULTS = {
    "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
}  # fmt: skip


def llama4_text_part(name: str, config: Config) -> ModelSpec:
    """The text part of a Llama 4 that takes images too."""
    text = {key: value for key, value in (config.get("text_config") or {}).items() if value is not None}
    tied = config.get("tie_word_embeddings", False)
    given = {"tie_word_embeddings": tied, **text, "dtype": text.get("dtype") or dtype_of(config)}
    return llama4(name, given, names=_TEXT_PART_NAMES)


def llama4(name: str, config: Config, names: TensorNames = _NAMES) -> ModelSpec:
    """The text model of Llama 4 (Meta, 2025). Layers without RoPE see all tokens, the others a chunk.

    A norm of queries and keys behind RoPE is the same before it, since it has no weights.
    """
    config = {**_DEFAULTS, **config}
    layers, bias = number(config, "num_hidden_layers"), bool(config.get("attention_bias", False))
    interval = config.get("no_rope_layer_interval", 4)
    turned = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if len(turned) < layers:
        raise UnsupportedModelError(f"config.json: {len(turned)} no_rope_layers for {layers} layers")
    types = layer_types(config, lambda i: bool(turned[i]), CHUNKED)
    rope = replace(read_rope(config, config["head_dim"], config["max_position_embeddings"]), interleaved=True)
    chunk = AttentionChunk(config.get("attention_chunk_size", 8192))
    return llama_like(
        name, {**config, "intermediate_size": config["intermediate_size_mlp"]}, qkv_bias=bias, out_bias=bias,
        windows=tuple(chunk if kind == CHUNKED else None for kind in types),
        ropes=tuple(rope if flag else None for flag in turned[:layers]),
        qk_norm="plain" if config.get("use_qk_norm", True) else "",
        experts=_experts(config, layers), names=names, temperature=_temperature(config),
    )  # fmt: skip


def _experts(config: Config, layers: int) -> ExpertSpec | None:
    step = config.get("interleave_moe_layer_step", 1)
    chosen = config.get("moe_layers")
    chosen = range(step - 1, layers, step) if chosen is None else chosen
    wrong = [index for index in chosen if not 0 <= index < layers]
    if wrong:
        raise UnsupportedModelError(f"config.json: moe_layers {wrong}; layers are 0 to {layers - 1}")
    if not len(chosen):
        return None
    width = config["intermediate_size"]
    return ExpertSpec(
        tuple(i in chosen for i in range(layers)), config.get("num_local_experts", 16),
        config.get("num_experts_per_tok", 1), width, scoring="sigmoid", renormalize=False,
        weighs_input=True, shared_width=width, stacked="columns",
    )  # fmt: skip


def _temperature(config: Config) -> TemperatureSpec | None:
    if not config.get("attn_temperature_tuning", True):
        return None
    return TemperatureSpec(config.get("floor_scale", 8192), config.get("attn_scale", 0.1))
