"""Gemma 4: full layers have other heads, each layer has an input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.families.gemma import OUTER_NORMS, rounded
from sagellm.engines.native.families.values import FULL, SLIDING, Config, dtype_of, layer_types, llama_like
from sagellm.engines.native.layer_spec import LayerInputSpec, LayerShape
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.rope import RopeSpec, read_rope

_NAMES = replace(OUTER_NORMS, router="router.proj", experts="experts")
_TEXT_PART_NAMES = replace(_NAMES, root="model.language_model.")
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_DEFAULTS = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "sliding_window": 512, "tie_word_embeddings": True,
}  # fmt: skip


def gemma4_text_part(name: str, config: Config) -> ModelSpec:
    """The text part of a Gemma 4 that takes images and sound too."""
    text = {key: value for key, value in (config.get("text_config") or {}).items() if value is not None}
    tied = config.get("tie_word_embeddings", True)
    given = {"tie_word_embeddings": tied, **text, "dtype": text.get("dtype") or dtype_of(config)}
    return gemma4(name, given, names=_TEXT_PART_NAMES)


def gemma4(name: str, config: Config, **wiring: Any) -> ModelSpec:
    """The text model of Gemma 4 (Google, 2026)."""
    config = {**_DEFAULTS, "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh"), **config}
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedModelError(f"{name} with use_bidirectional_attention does not generate text")
    types = [*layer_types(config, lambda i: (i + 1) % 6 != 0)[:-1], FULL]
    shapes, dtype, bias = _shapes(config, types), dtype_of(config), bool(config.get("attention_bias", False))
    width = config.get("hidden_size_per_layer_input", 256)
    return llama_like(
        name, config, norm_place="both", qk_norm="head", value_norm=True, attention_scale=1.0,
        qkv_bias=bias, out_bias=bias, embed_scale=rounded(config["hidden_size"] ** 0.5, dtype),
        windows=tuple(config["sliding_window"] if kind == SLIDING else None for kind in types),
        ropes=_ropes(config, types, shapes), shapes=shapes, layer_scale=True,
        layer_inputs=_layer_inputs(config, width, dtype) if width else None,
        logit_softcap=config.get("final_logit_softcapping"), experts=_experts(config, len(types)),
        **({"names": _NAMES} | wiring),
    )  # fmt: skip


def _experts(config: Config, num_layers: int) -> ExpertSpec | None:
    if not config.get("enable_moe_block"):
        return None
    names = "num_experts", "top_k_experts", "moe_intermediate_size"
    if lacking := [key for key in names if key not in config]:
        raise UnsupportedModelError(f"config.json: enable_moe_block needs {', '.join(lacking)}")
    count, chosen, width = (config[key] for key in names)
    return ExpertSpec((True,) * num_layers, count, chosen, width, stacked="rows", beside_mlp=True)


def _layer_inputs(config: Config, width: int, dtype: str) -> LayerInputSpec:
    rows = config.get("vocab_size_per_layer_input", 262_144)
    if rows < config["vocab_size"]:
        raise UnsupportedModelError(
            f"config.json: vocab_size_per_layer_input {rows} is less than vocab_size {config['vocab_size']}"
        )
    return LayerInputSpec(width, rows, rounded(width**0.5, dtype))


def _shapes(config: Config, types: Sequence[str]) -> tuple[LayerShape, ...]:
    sources, heads = _kv_sources(config, types), _heads(config, types)
    wide = 1 + bool(config.get("use_double_wide_mlp", False))
    inner, value_is_key = config["intermediate_size"], bool(config.get("attention_k_eq_v", False))
    return tuple(
        LayerShape(*heads[i], inner * wide if source != i else inner, source, value_is_key and kind == FULL)
        for i, (kind, source) in enumerate(zip(types, sources, strict=True))
    )


def _kv_sources(config: Config, types: Sequence[str]) -> list[int]:
    """The layer whose KV each layer attends to.

    The last `num_kv_shared_layers` have that of the last layer of their type before them.
    """
    first = len(types) - config.get("num_kv_shared_layers", 0)
    lacking = sorted(set(types) - set(types[: max(first, 0)]))
    if lacking:
        raise UnsupportedModelError(
            f"config.json: num_kv_shared_layers {len(types) - first} of {len(types)} layers leaves no "
            f"{', '.join(lacking)} layer with KV to share"
        )
    last = {kind: i for i, kind in enumerate(types[:first])}
    return [i if i < first else last[kind] for i, kind in enumerate(types)]


def _heads(config: Config, types: Sequence[str]) -> list[tuple[int, int]]:
    """KV heads and head dim of each layer.

    A `per_layer_config` (transformers from 5.20 on) has them in place of numbers for all full layers.
    """
    usual, full_heads = (config["num_key_value_heads"], config["head_dim"]), None
    by_layer = config.get("per_layer_config")
    if config.get("attention_k_eq_v"):
        full_heads = config.get("num_global_key_value_heads")
    full = full_heads or usual[0], config.get("global_head_dim", 512)
    if by_layer is None:
        return [full if kind == FULL else usual for kind in types]
    unknown = [key for key in by_layer if not key.isdecimal() or int(key) >= len(types)]
    if unknown:
        raise UnsupportedModelError(
            f"config.json: per_layer_config of {', '.join(unknown)}; layers are 0 to {len(types) - 1}"
        )
    numbered = {int(key): own for key, own in by_layer.items()}  # written "04" where there are ten or more
    found = []
    for i in range(len(types)):
        own = numbered.get(i, {})
        found.append((own.get("num_key_value_heads") or usual[0], own.get("head_dim") or usual[1]))
    if len(set(zip(types, found, strict=True))) > len(set(types)):
        raise UnsupportedModelError("config.json: per_layer_config differs among layers of one type")
    return found


def _ropes(config: Config, types: Sequence[str], shapes: Sequence[LayerShape]) -> tuple[RopeSpec, ...]:
    given = config.get("rope_parameters") or _ROPES
    ropes: dict[str, RopeSpec] = {}
    for kind, shape in zip(types, shapes, strict=True):
        if kind in ropes:
            continue
        if not given.get(kind):
            raise UnsupportedModelError(f"config.json: rope_parameters has no {kind}")
        ropes[kind] = read_rope(
            {"rope_parameters": given[kind]}, shape.head_dim, config["max_position_embeddings"]
        )
    return tuple(ropes[kind] for kind in types)
