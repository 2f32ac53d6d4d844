"""What a Hugging Face `config.json` describes, as one frozen `ModelSpec`.

There is one reader per family. It reads both forms of the file: transformers 4 (`rope_theta`, `rope_scaling`,
`torch_dtype`) and 5 (`rope_parameters`, `dtype`). A missing key has the default of that family's own config
class. A model that the engine cannot run is refused here, from the configuration alone, before any memory is
allocated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.core.errors import ModelError, UnsupportedModelError
from sagellm.engines.native.folder_files import MAX_POSITIONS, ConfigJson, checked, read_object
from sagellm.engines.native.rope import RopeSpec, read_rope

Config = Mapping[str, Any]

DTYPES = ("float32", "bfloat16", "float16", "float64")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu")
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)
_NULL_HAS_A_MEANING = ("sliding_window",)
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and wiring of a decoder-only transformer. `windows[i]` is the number of latest positions that
    layer i sees, its own included; None means all. `rope` is None where positions are learned (OPT); their
    table begins with `position_offset` unused rows. `embed_dim` differs from `hidden_size` where the
    embedding is projected in and out. Attention scores are scaled by `attention_scale`, None means
    1/sqrt(head_dim), and limited to +-`score_softcap`; with `attention_sinks` each head has one more logit.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    max_model_len: int
    windows: tuple[int | None, ...]
    rope: RopeSpec | None
    embed_dim: int
    activation: str
    dtype: str
    tied: bool
    norm_eps: float = 1e-6
    rms_norm: bool = True
    norm_affine: bool = True
    pre_norm: bool = True
    final_norm: bool = True
    gated_mlp: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    position_offset: int = 0
    attention_scale: float | None = None
    score_softcap: float | None = None
    attention_sinks: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModelError(f"config.json: {name} must be a positive integer, got {value!r}")
        if self.max_model_len > MAX_POSITIONS:
            raise UnsupportedModelError(
                f"config.json: {self.max_model_len} positions; at most {MAX_POSITIONS} are supported"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"config.json: {self.num_heads} heads, not a multiple of {self.num_kv_heads} KV heads"
            )
        for name in ("attention_scale", "score_softcap"):
            number = getattr(self, name)
            if number is not None and not 0 < number < float("inf"):
                raise UnsupportedModelError(f"config.json: {name} must be positive, got {number!r}")
        if self.activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"activation {self.activation!r} is not supported; these are: {', '.join(ACTIVATIONS)}"
            )
        if self.dtype not in DTYPES:
            raise UnsupportedModelError(
                f"dtype {self.dtype!r} is not supported; these are: {', '.join(DTYPES)}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a model folder. Raises `ModelError` if it is missing, cannot be read, is
    not JSON or has a value of the wrong kind.
    """
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    config = read_object(path)
    checked(ConfigJson, config, path)
    return config


def read_spec(config: Config) -> ModelSpec:
    """The `ModelSpec` of a parsed config.json. `UnsupportedModelError` names what is not supported."""
    given = {key: value for key, value in config.items() if value is not None or key in _NULL_HAS_A_MEANING}
    names = config.get("architectures") or [_architecture_of_type(config)]
    for name in names:
        if name in _READERS:
            return _READERS[name](name, given)
    raise UnsupportedModelError(
        f"architecture {', '.join(map(str, names))} is not supported; these are: {', '.join(_READERS)}"
    )


def _architecture_of_type(config: Config) -> str:
    """The architecture of a folder that gives only `model_type`."""
    by_type = {name.removesuffix("ForCausalLM").lower(): name for name in _READERS}
    model_type = str(config.get("model_type", "(no architectures in config.json)"))
    return by_type.get(model_type, model_type)


def _number(config: Config, key: str) -> Any:
    try:
        return config[key]
    except KeyError:
        raise UnsupportedModelError(
            f"config.json has no {key!r}, which {config.get('model_type')} needs"
        ) from None


def _dtype(config: Config) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _rope_family(name: str, config: Config, **wiring: Any) -> ModelSpec:
    """Llama and its descendants: RMSNorm before each part, RoPE, a gated MLP."""
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    max_positions = config.get("max_position_embeddings", 2048)
    rope = read_rope(config, head_dim, max_positions)
    layers = _number(config, "num_hidden_layers")
    values: dict[str, Any] = {
        "windows": (None,) * layers,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "tied": bool(config.get("tie_word_embeddings", False)),
    }
    return ModelSpec(
        architecture=name,
        vocab_size=_number(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_number(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim,
        max_positions=max_positions,
        max_model_len=rope.max_length(max_positions),
        rope=rope,
        embed_dim=hidden,
        activation=config.get("hidden_act", "silu"),
        dtype=_dtype(config),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        **(values | wiring),
    )


def _llama(name: str, config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return _rope_family(
        name, config, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False))
    )


def _mistral(name: str, config: Config) -> ModelSpec:
    """Jiang et al. 2023, arXiv:2310.06825. Defaults: a window of 4096 and 8 KV heads."""
    window = config.get("sliding_window", 4096)
    windows = (window,) * _number(config, "num_hidden_layers")
    return _rope_family(name, config, windows=windows, num_kv_heads=config.get("num_key_value_heads", 8))


def _qwen2(name: str, config: Config) -> ModelSpec:
    return _rope_family(name, config, windows=_layer_windows(config), qkv_bias=True)


def _qwen3(name: str, config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    head_dim = config.get("head_dim") or 128
    return _rope_family(
        name, {**config, "head_dim": head_dim}, windows=_layer_windows(config), qkv_bias=bias, out_bias=bias,
        qk_norm=True,
    )  # fmt: skip


def _layer_windows(config: Config) -> tuple[int | None, ...]:
    """Windows of Qwen layers: by `layer_types`, else from layer `max_window_layers` on."""
    layers = _number(config, "num_hidden_layers")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    types = config.get("layer_types") or [_SLIDING if i >= first else _FULL for i in range(layers)]
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown or len(types) != layers:
        raise UnsupportedModelError(
            f"config.json: {len(types)} layer_types for {layers} layers, unknown: {', '.join(unknown)}; "
            f"supported are {_FULL} and {_SLIDING}, one per layer"
        )
    return tuple(window if kind == _SLIDING else None for kind in types)


def _opt(name: str, config: Config) -> ModelSpec:
    """Zhang et al. 2022, arXiv:2205.01068: LayerNorm, learned positions, ReLU, biases everywhere."""
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    if hidden % heads:
        raise UnsupportedModelError(f"config.json: hidden_size {hidden} is not a multiple of {heads} heads")
    pre_norm = bool(config.get("do_layer_norm_before", True))
    bias = bool(config.get("enable_bias", True))
    positions = config.get("max_position_embeddings", 2048)
    layers = _number(config, "num_hidden_layers")
    return ModelSpec(
        architecture=name,
        vocab_size=_number(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_number(config, "ffn_dim"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=positions,
        max_model_len=positions,
        windows=(None,) * layers,
        rope=None,
        embed_dim=config.get("word_embed_proj_dim") or hidden,
        activation=config.get("activation_function", "relu"),
        dtype=_dtype(config),
        tied=bool(config.get("tie_word_embeddings", True)),
        norm_eps=1e-5,
        rms_norm=False,
        norm_affine=bool(config.get("layer_norm_elementwise_affine", True)),
        pre_norm=pre_norm,
        final_norm=pre_norm and not config.get("_remove_final_layer_norm", False),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        position_offset=2,
    )


_READERS: dict[str, Callable[[str, Config], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "OPTForCausalLM": _opt,
}
