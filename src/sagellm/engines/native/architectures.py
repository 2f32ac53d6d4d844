"""What a Hugging Face `config.json` describes, as one frozen `ModelSpec`.

There is one reader per family. It reads both forms of the file: transformers 4 (`rope_theta`, `rope_scaling`,
`torch_dtype`) and 5 (`rope_parameters`, `dtype`). A missing key has the default of that family's own config
class. A model that the engine cannot run is refused here, from the configuration alone, before any memory is
allocated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sagellm.core.errors import ModelError, UnsupportedModelError
from sagellm.engines.native.folder_files import MAX_POSITIONS, ConfigJson, checked, read_object
from sagellm.engines.native.latent_spec import LatentSpec, read_latent
from sagellm.engines.native.rope import RopeSpec, read_rope, yarn_score_factor

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
_POSITIVE = (
    "attention_scale", "score_softcap", "embed_scale", "residual_scale", "head_scale", "logit_softcap"
)  # fmt: skip
_NULL_HAS_A_MEANING = ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping", "q_lora_rank")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A family's names in its checkpoints, below `root` and below a layer. `qkv` and `up` are stacked; the
    output norms are there where `ModelSpec.norm_place` has them.
    """

    root: str = "model."
    attn_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attn_out: str = "self_attn.o_proj"
    attn_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_out_norm: str = ""
    final_norm: str = "norm"


_OUTPUT_NORMS = TensorNames(
    attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"
)
_GEMMA_NAMES = replace(_OUTPUT_NORMS, mlp_norm="pre_feedforward_layernorm")
_PHI_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))
_GLM_NAMES = TensorNames(up=("mlp.gate_up_proj",))
_GLM4_NAMES = replace(_GLM_NAMES, attn_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")
_OPT_NAMES = TensorNames(
    "model.decoder.", "self_attn_layer_norm", attn_out="self_attn.out_proj", mlp_norm="final_layer_norm",
    up=("fc1",), down="fc2", final_norm="final_layer_norm",
)  # fmt: skip

NORM_PLACES = ("input", "residual", "output", "both")
"""Of a sublayer f with residual x: x + f(norm(x)); norm(x + f(x)); x + norm(f(x)); x + norm(f(norm(x)))."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape and wiring of a decoder-only transformer. `windows[i]` is the number of latest positions that
    layer i sees, its own included; None means all. `ropes[i]` are the rotations of layer i, None for none;
    with `learned_positions` (OPT) a table of them begins with `position_offset` unused rows. `embed_dim`
    differs from `hidden_size` where the embedding is projected in and out.

    `norm_place` is one of `NORM_PLACES`; `norm_offset` is added to the weights of all norms. `qk_norm`:
    "head" norms each head of queries and keys, "all" the heads together. Attention scores are scaled by
    `attention_scale`, None means 1/sqrt(head_dim), and limited to +-`score_softcap`; with `attention_sinks`
    each head has one more logit. Embeddings are multiplied by `embed_scale`, sublayers' outputs by
    `residual_scale`, the head's input by `head_scale`; logits are limited to +-`logit_softcap`.
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
    ropes: tuple[RopeSpec | None, ...]
    embed_dim: int
    activation: str
    dtype: str
    tied: bool
    norm_eps: float = 1e-6
    rms_norm: bool = True
    norm_affine: bool = True
    norm_place: str = "input"
    norm_offset: float = 0.0
    final_norm: bool = True
    gated_mlp: bool = True
    qk_norm: str = ""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    position_offset: int = 0
    attention_scale: float | None = None
    score_softcap: float | None = None
    attention_sinks: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    head_scale: float = 1.0
    logit_softcap: float | None = None
    learned_positions: bool = False
    names: TensorNames = TensorNames()
    latent: LatentSpec | None = None
    """Latent attention: the cache has one KV head of `latent.width` numbers."""

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
        for name in _POSITIVE:
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
    def rope(self) -> RopeSpec | None:
        """The rotations of the first layer that has any."""
        return next((rope for rope in self.ropes if rope is not None), None)

    def for_length(self, max_length: int) -> ModelSpec:
        """The same for an engine whose sequences have at most so many tokens."""
        return replace(self, ropes=tuple(rope and rope.for_length(max_length) for rope in self.ropes))

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def attention_size(self) -> int:
        """Numbers of a token's attention output."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def value_dim(self) -> int | None:
        """The leading numbers of a cached key that are its value. None: values lie elsewhere."""
        return self.latent.rank if self.latent else None

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
    layers = _number(config, "num_hidden_layers")
    ropes = wiring.pop("ropes", None) or (read_rope(config, head_dim, max_positions),) * layers
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
        max_model_len=max(
            (r.max_length(max_positions) for r in ropes if r is not None), default=max_positions
        ),
        ropes=ropes,
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
        qk_norm="head",
    )  # fmt: skip


def _layer_windows(config: Config) -> tuple[int | None, ...]:
    """Windows of Qwen layers: by `layer_types`, else from layer `max_window_layers` on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    return tuple(window if kind == _SLIDING else None for kind in _layer_types(config, lambda i: i >= first))


def _layer_types(config: Config, slides: Callable[[int], bool]) -> Sequence[str]:
    """The types of layers: as given, or sliding where `slides(i)`."""
    layers = _number(config, "num_hidden_layers")
    types: Sequence[str] = config.get("layer_types") or [
        _SLIDING if slides(i) else _FULL for i in range(layers)
    ]
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown or len(types) != layers:
        raise UnsupportedModelError(
            f"config.json: {len(types)} layer_types for {layers} layers, unknown: {', '.join(unknown)}; "
            f"supported are {_FULL} and {_SLIDING}, one per layer"
        )
    return types


def _mixed(
    config: Config, every: int, window: Any, thetas: Mapping[str, float], max_positions: int, head_dim: int
) -> dict[str, Any]:
    """Windows and ropes of a model whose layers slide, but for each `every`-th.

    `rope_parameters` may be by type of layer (transformers 5); `rope_scaling` is for full layers only.
    """
    types = _layer_types(config, lambda i: (i + 1) % every != 0)
    given = config.get("rope_parameters") or {}
    by_type = given if any(isinstance(value, Mapping) for value in given.values()) else {}
    ropes = {}
    for kind in sorted(set(types)):
        params = dict(by_type.get(kind) or ({} if by_type or kind == _SLIDING else given))
        if kind == _FULL and not given:
            params.update(config.get("rope_scaling") or {})
        params.setdefault("rope_theta", thetas[kind])
        rest = {key: value for key, value in config.items() if not key.startswith("rope_")}
        ropes[kind] = read_rope({**rest, "rope_parameters": params}, head_dim, max_positions)
    return {
        "windows": tuple(window if kind == _SLIDING else None for kind in types),
        "ropes": tuple(ropes[kind] for kind in types),
    }


def _olmo2(name: str, config: Config) -> ModelSpec:
    """OLMo et al. 2024, arXiv:2501.00656: norms of outputs, and of all heads of queries and keys together."""
    given = {"rms_norm_eps": 1e-5, **config}
    bias = bool(config.get("attention_bias", False))
    return _rope_family(
        name, given, norm_place="output", qk_norm="all", names=_OUTPUT_NORMS, qkv_bias=bias, out_bias=bias
    )


def _olmo3(name: str, config: Config) -> ModelSpec:
    """OLMo 2 with windows in three of four layers. Their RoPE is not extended."""
    given = {"rms_norm_eps": 1e-5, **config}
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    positions, theta = config.get("max_position_embeddings", 2048), config.get("rope_theta", 500_000.0)
    bias, thetas = bool(config.get("attention_bias", False)), {_FULL: theta, _SLIDING: theta}
    mixed = _mixed(config, 4, config.get("sliding_window", 4096), thetas, positions, hidden // heads)
    return _rope_family(
        name, given, norm_place="output", qk_norm="all", names=_OUTPUT_NORMS, qkv_bias=bias, out_bias=bias,
        **mixed,
    )  # fmt: skip


def _phi3(name: str, config: Config) -> ModelSpec:
    """Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219): Llama with stacked matrices and LongRoPE."""
    original = config.get("original_max_position_embeddings", 4096)
    given = {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **config,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if (params.get("rope_type") or params.get("type")) in ("su", "yarn"):  # older names of longrope
        given["rope_parameters"] = {**params, "rope_type": "longrope", "type": "longrope"}
        given["rope_scaling"] = None
    windows = (config.get("sliding_window"),) * _number(config, "num_hidden_layers")
    return _rope_family(name, given, windows=windows, names=_PHI_NAMES)


def _smollm3(name: str, config: Config) -> ModelSpec:
    """Llama without RoPE in each fourth layer."""
    layers = _number(config, "num_hidden_layers")
    interval = config.get("no_rope_layer_interval", 4)
    flags = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    if len(flags) < layers:
        raise UnsupportedModelError(f"config.json: {len(flags)} no_rope_layers for {layers} layers")
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    positions, bias = config.get("max_position_embeddings", 32768), bool(config.get("attention_bias", False))
    given = {"rope_theta": 2_000_000.0, "max_position_embeddings": positions, **config}
    rope = read_rope(given, config.get("head_dim") or hidden // heads, positions)
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    types = _layer_types(config, lambda i: window is not None and not flags[i])
    return _rope_family(
        name,
        given,
        ropes=tuple(rope if flag else None for flag in flags[:layers]),
        windows=tuple(window if kind == _SLIDING else None for kind in types),
        num_kv_heads=config.get("num_key_value_heads", 4),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied=bool(config.get("tie_word_embeddings", True)),
    )


def _glm(name: str, config: Config) -> ModelSpec:
    """GLM-4 (arXiv:2406.12793) and GLM-4-0414: RoPE of pairs of neighbours in half of each head."""
    given = {
        "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131_072, "head_dim": 128,
        "partial_rotary_factor": 0.5, **config,
    }  # fmt: skip
    head_dim, layers = given["head_dim"], _number(config, "num_hidden_layers")
    rope = replace(read_rope(given, head_dim, given["max_position_embeddings"]), interleaved=True)
    has_output_norms = name == "Glm4ForCausalLM"
    return _rope_family(
        name, given, ropes=(rope,) * layers, qkv_bias=bool(config.get("attention_bias", True)),
        num_kv_heads=config.get("num_key_value_heads", 2),
        norm_place="both" if has_output_norms else "input",
        names=_GLM4_NAMES if has_output_norms else _GLM_NAMES,
    )  # fmt: skip


def _granite(name: str, config: Config) -> ModelSpec:
    """Granite 3 and 4 dense: Llama with multipliers."""
    bias = bool(config.get("attention_bias", False))
    return _rope_family(
        name, config, qkv_bias=bias, out_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)),
        embed_scale=config.get("embedding_multiplier", 1.0),
        residual_scale=config.get("residual_multiplier", 1.0),
        attention_scale=config.get("attention_multiplier", 1.0),
        head_scale=1.0 / config.get("logits_scaling", 1.0),
    )  # fmt: skip


def _gemma(name: str, config: Config, *, positions: int, **wiring: Any) -> ModelSpec:
    """What Gemma 2 (arXiv:2408.00118) and 3 (arXiv:2503.19786) have in common."""
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{name} with use_bidirectional_attention does not generate text")
    hidden = _number(config, "hidden_size")
    scalar = config.get("query_pre_attn_scalar", 256)
    given = {
        "head_dim": 256, "max_position_embeddings": positions, **config,
        "hidden_act": config.get("hidden_activation", "gelu_pytorch_tanh"),
    }  # fmt: skip
    bias = bool(config.get("attention_bias", False))
    return _rope_family(
        name, given, norm_place="both", norm_offset=1.0, names=_GEMMA_NAMES, qkv_bias=bias, out_bias=bias,
        num_kv_heads=config.get("num_key_value_heads", 4), tied=bool(config.get("tie_word_embeddings", True)),
        embed_scale=float(hidden) ** 0.5, attention_scale=float(scalar) ** -0.5,
        **wiring,
    )  # fmt: skip


def _gemma2(name: str, config: Config) -> ModelSpec:
    types = _layer_types(config, lambda i: (i + 1) % 2 != 0)
    window = config.get("sliding_window", 4096)
    return _gemma(
        name, config, positions=8192, score_softcap=config.get("attn_logit_softcapping", 50.0),
        windows=tuple(window if kind == _SLIDING else None for kind in types),
        logit_softcap=config.get("final_logit_softcapping", 30.0),
    )  # fmt: skip


def _gemma3(name: str, config: Config) -> ModelSpec:
    positions = config.get("max_position_embeddings", 131_072)
    thetas = {
        _FULL: config.get("rope_theta", 1_000_000.0), _SLIDING: config.get("rope_local_base_freq", 10_000.0)
    }  # fmt: skip
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    window, head_dim = config.get("sliding_window", 4096), config.get("head_dim", 256)
    return _gemma(
        name, config, positions=131_072, qk_norm="head",
        score_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
        **_mixed(config, every, window, thetas, positions, head_dim),
    )  # fmt: skip


def _deepseek(name: str, config: Config) -> ModelSpec:
    """DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437) without experts."""
    third = name == "DeepseekV3ForCausalLM"
    layers = _number(config, "num_hidden_layers")
    dense = config.get("first_k_dense_replace", 3 if third else 0)
    if dense < layers:
        raise UnsupportedModelError(
            f"{name} with experts is not supported: first_k_dense_replace is {dense} of {layers} layers"
        )
    if config.get("attention_bias"):
        raise UnsupportedModelError(f"{name} with attention_bias is not supported; without it is")
    latent = read_latent(config, interleaved=not third or bool(config.get("rope_interleave", True)))
    max_positions = config.get("max_position_embeddings", 4096 if third else 2048)
    rotated = {**config, "head_dim": latent.rope_dim, "max_position_embeddings": max_positions}
    spec = _rope_family(
        name, rotated, num_kv_heads=1, latent=latent,
        attention_scale=latent.key_dim**-0.5 * yarn_score_factor(config),
        mlp_bias=not third and bool(config.get("mlp_bias", False)),
    )  # fmt: skip
    return replace(spec, head_dim=latent.width)


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
        ropes=(None,) * layers,
        learned_positions=True,
        names=_OPT_NAMES,
        embed_dim=config.get("word_embed_proj_dim") or hidden,
        activation=config.get("activation_function", "relu"),
        dtype=_dtype(config),
        tied=bool(config.get("tie_word_embeddings", True)),
        norm_eps=1e-5,
        rms_norm=False,
        norm_affine=bool(config.get("layer_norm_elementwise_affine", True)),
        norm_place="input" if pre_norm else "residual",
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
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "Phi3ForCausalLM": _phi3,
    "SmolLM3ForCausalLM": _smollm3,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": _glm,
    "GraniteForCausalLM": _granite,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
}
