"""What readers of config.json share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sagellm.core.errors import UnsupportedModelError
from sagellm.engines.native.model_spec import ModelSpec
from sagellm.engines.native.rope import read_rope

Config = Mapping[str, Any]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def number(config: Config, key: str) -> Any:
    try:
        return config[key]
    except KeyError:
        raise UnsupportedModelError(
            f"config.json has no {key!r}, which {config.get('model_type')} needs"
        ) from None


def dtype_of(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def llama_like(name: str, config: Config, **wiring: Any) -> ModelSpec:
    """Llama and its descendants: RMSNorm before each part, RoPE, a gated MLP."""
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    max_positions = config.get("max_position_embeddings", 2048)
    layers = number(config, "num_hidden_layers")
    ropes = wiring.pop("ropes", None) or (read_rope(config, head_dim, max_positions),) * layers
    values: dict[str, Any] = {
        "windows": (None,) * layers,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
    }
    return ModelSpec(
        architecture=name,
        vocab_size=number(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=number(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim,
        max_positions=max_positions,
        max_model_len=max(
            (r.max_length(max_positions) for r in ropes if r is not None), default=max_positions
        ),
        ropes=ropes,
        embed_dim=hidden,
        activation=config.get("hidden_act", "silu"),
        dtype=dtype_of(config),
        **(values | wiring),
    )


def layer_types(config: Config, is_local: Callable[[int], bool], local: str = SLIDING) -> Sequence[str]:
    """The types of layers: as given, or `local` where `is_local(i)`."""
    layers = number(config, "num_hidden_layers")
    types: Sequence[str] = config.get("layer_types") or [
        local if is_local(i) else FULL for i in range(layers)
    ]
    check_types(types, layers, (FULL, local))
    return types


def check_types(types: Sequence[str], layers: int, known: Sequence[str]) -> None:
    """Refuses layer types that are not one of `known` for each layer."""
    unknown = sorted(set(types) - set(known))
    if unknown or len(types) != layers:
        count = f"{len(types)} layer_types for {layers} layers"
        wrong = f"layer_types, unknown: {', '.join(unknown)}" if unknown else count
        raise UnsupportedModelError(
            f"config.json: {wrong}; supported are {' and '.join(known)}, one for each layer"
        )


def mixed_layers(
    config: Config, every: int, window: Any, thetas: Mapping[str, float], max_positions: int, head_dim: int
) -> dict[str, Any]:
    """Windows and ropes of a model whose layers slide, but for each `every`-th.

    `rope_parameters` may be by type of layer (transformers 5); `rope_scaling` is for full layers only.
    """
    types = layer_types(config, lambda i: (i + 1) % every != 0)
    given = config.get("rope_parameters") or {}
    by_type = given if any(isinstance(value, Mapping) for value in given.values()) else {}
    ropes = {}
    for kind in sorted(set(types)):
        params = dict(by_type.get(kind) or ({} if by_type or kind == SLIDING else given))
        if kind == FULL and not given:
            params.update(config.get("rope_scaling") or {})
        params.setdefault("rope_theta", thetas[kind])
        rest = {key: value for key, value in config.items() if not key.startswith("rope_")}
        ropes[kind] = read_rope({**rest, "rope_parameters": params}, head_dim, max_positions)
    return {
        "windows": tuple(window if kind == SLIDING else None for kind in types),
        "ropes": tuple(ropes[kind] for kind in types),
    }
