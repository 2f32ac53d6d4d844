"""Model shapes, as presets or from a config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sagellm.core.errors import ModelError, nearest
from sagellm.core.types import KVCacheSchema
from sagellm.engines.simulator.devices import DTYPE_BYTES, canonical


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder: equal layers, grouped-query attention, gated MLP or experts.

    With `num_experts` > 0, `intermediate_size` is the size of one expert. `dtype`: of weights and KV.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    shared_intermediate_size: int = 0
    max_model_len: int = 131072
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        if min(*sizes, self.vocab_size, self.max_model_len) < 1 or self.intermediate_size < 1:
            raise ModelError(f"{self.name}: every size of a model is at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.name}: {self.num_heads} heads are not shared by {self.num_kv_heads}")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelError(f"{self.name}: a token visits 1 to {self.num_experts} experts")
        if self.dtype not in DTYPE_BYTES:
            raise ModelError(f"{self.name}: no number format {self.dtype!r}: {', '.join(DTYPE_BYTES)}")

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def always_read_params(self) -> int:
        """Weights of linear layers that every step reads: all but routed experts."""
        return self.attention_params + self.shared_ffn_params

    @property
    def attention_params(self) -> int:
        """Weights of the projections around attention, in all layers."""
        heads = self.num_heads + self.num_kv_heads
        return 2 * self.num_layers * self.hidden_size * self.head_dim * heads

    @property
    def shared_ffn_params(self) -> int:
        """Weights of MLPs, or of routers and shared experts, in all layers."""
        mlp = 3 * self.hidden_size * self.shared_intermediate_size
        if self.num_experts:
            return self.num_layers * (mlp + self.hidden_size * self.num_experts)
        return self.num_layers * (mlp + 3 * self.hidden_size * self.intermediate_size)

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert in all layers; 0 for a dense model."""
        return 3 * self.num_layers * self.hidden_size * self.intermediate_size if self.num_experts else 0

    @property
    def head_params(self) -> int:
        """Weights of the output projection, which a step reads once."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All weights without the vectors (norms, biases), which are below 0.1 %."""
        routed = self.num_experts * self.expert_params
        return self.always_read_params + routed + self.head_params * (1 if self.tied_embeddings else 2)

    @property
    def weight_bytes(self) -> int:
        return self.num_params * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    def kv_schema(self, block_size: int) -> KVCacheSchema:
        heads, size, dtype = self.num_kv_heads, self.head_dim, self.dtype
        return KVCacheSchema(self.num_layers, heads, size, dtype, block_size, "simulated", self.name)


_SHAPES = (
    ModelShape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, tied_embeddings=True),
    ModelShape("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, tied_embeddings=True),
    ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
    ModelShape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256),
    ModelShape("llama-3.1-405b", 126, 16384, 53248, 128, 8, 128, 128256),
    ModelShape("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32768, max_model_len=32768),
    ModelShape("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000,
               num_experts=8, experts_per_token=2, max_model_len=32768),
    ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, max_model_len=32768),
    ModelShape("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064, max_model_len=32768),
    ModelShape("qwen2.5-32b", 64, 5120, 27648, 40, 8, 128, 152064, max_model_len=32768),
    ModelShape("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064, max_model_len=32768),
    ModelShape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, tied_embeddings=True, max_model_len=40960),
    ModelShape("qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, 151936, tied_embeddings=True, max_model_len=40960),
    ModelShape("qwen3-4b", 36, 2560, 9728, 32, 8, 128, 151936, tied_embeddings=True, max_model_len=40960),
    ModelShape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, max_model_len=40960),
    ModelShape("qwen3-14b", 40, 5120, 17408, 40, 8, 128, 151936, max_model_len=40960),
    ModelShape("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936, max_model_len=40960),
    ModelShape("qwen3-30b-a3b", 48, 2048, 768, 32, 4, 128, 151936,
               num_experts=128, experts_per_token=8, max_model_len=40960),
    ModelShape("phi-4", 40, 5120, 17920, 40, 10, 128, 100352, max_model_len=16384),
)  # fmt: skip

MODELS: Mapping[str, ModelShape] = MappingProxyType({shape.name: shape for shape in _SHAPES})
"""Presets by name; the sizes are those of each model's published config.json."""


def model(name: str | Path) -> ModelShape:
    """A preset by name, or the shape in a `config.json` file or folder.

    Raises `ModelError`.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the model configuration {path}: {error}") from error
        if not isinstance(config, dict):
            raise ModelError(f"{path} must hold the keys and values of a model, as config.json of a HF model")
        return from_config(config, path.parent.name or str(path))
    shape = MODELS.get(_canonical_model(str(name)))
    if shape is None:
        hint = nearest(str(name), MODELS)
        raise ModelError(f"no model shape {str(name)!r}, and no file config.json of that name.{hint}")
    return shape


def _canonical_model(name: str) -> str:
    """The name without its owner on the hub and without suffixes of tuned versions."""
    short = canonical(name.rsplit("/", 1)[-1]).removeprefix("meta-")
    for suffix in ("-2507", "-instruct", "-chat", "-base", "-hf"):
        short = short.removesuffix(suffix)
    return short


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape in a Hugging Face `config.json`; raises `ModelError` naming a missing key."""
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = [key for key in keys if not isinstance(config.get(key), int)]
    if missing:
        raise ModelError(f"{name}: config.json lacks {', '.join(missing)} (as numbers)")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    expert_size = config.get("moe_intermediate_size") if experts else None
    intermediate = expert_size or config.get("intermediate_size")
    if not isinstance(intermediate, int):
        raise ModelError(f"{name}: config.json lacks intermediate_size (as a number)")
    return ModelShape(
        name,
        config["num_hidden_layers"],
        hidden,
        intermediate,
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or hidden // heads,
        config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        num_experts=experts or 0,
        experts_per_token=(config.get("num_experts_per_tok") or 0) if experts else 0,
        shared_intermediate_size=(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
        max_model_len=config.get("max_position_embeddings") or 131072,
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
    )
