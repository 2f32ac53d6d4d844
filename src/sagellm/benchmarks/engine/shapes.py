"""Models with random weights in the shapes that the peers' harness measures.

A model is written as a Hugging Face folder (config.json, one safetensors file in bfloat16) without a
tokenizer, and loaded like any other model. Weights are normal with deviation 0.02, from one seed: values do
not change the speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from sagellm.core.errors import ConfigError

MAX_POSITIONS = 32_768
DEVIATION = 0.02
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama-like decoder. `label` is the harness's name, if it has one."""

    label: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool = True

    def config(self) -> dict[str, Any]:
        """Returns the content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields every tensor's name and shape; vectors are norms."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        if not self.tied:
            yield "lm_head.weight", (self.vocab_size, hidden)
        yield "model.norm.weight", (hidden,)
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            yield layer + "self_attn.q_proj.weight", (query, hidden)
            yield layer + "self_attn.k_proj.weight", (kv, hidden)
            yield layer + "self_attn.v_proj.weight", (kv, hidden)
            yield layer + "self_attn.o_proj.weight", (hidden, query)
            yield layer + "mlp.gate_proj.weight", (inner, hidden)
            yield layer + "mlp.up_proj.weight", (inner, hidden)
            yield layer + "mlp.down_proj.weight", (hidden, inner)
            yield layer + "input_layernorm.weight", (hidden,)
            yield layer + "post_attention_layernorm.weight", (hidden,)


SHAPES: Mapping[str, Shape] = {
    "S": Shape("S", 32_000, 1024, 12, 3072, 16, 8, 64),
    "M": Shape("M", 151_936, 1024, 28, 3072, 16, 8, 128),
    "8B": Shape("8B", 128_256, 4096, 32, 14_336, 32, 8, 128, tied=False),
    "tiny": Shape("T", 32_000, 256, 2, 512, 4, 2, 64),
}
"""Parameters: 184 M; 596 M as Qwen3-0.6B; 8.0 G as Llama-3-8B; 9.4 M for quick tests."""


def shape_named(name: str) -> Shape:
    if name not in SHAPES:
        raise ConfigError(f"there is no shape {name!r}: use {', '.join(SHAPES)}, or --model FOLDER")
    return SHAPES[name]


def write_model(shape: Shape, folder: Path, seed: int = 0) -> None:
    """Writes the model into the existing `folder`; raises `ConfigError` if the disk fails."""
    try:
        (folder / "config.json").write_text(json.dumps(shape.config(), indent=1), encoding="utf-8")
        with (folder / "model.safetensors").open("wb") as file:
            file.write(_header(shape))
            random = np.random.default_rng(seed)
            for _, extents in shape.tensors():
                _write_tensor(file, extents, random)
    except OSError as error:
        raise ConfigError(f"cannot write a model into {folder}: {error.strerror}") from error


def _header(shape: Shape) -> bytes:
    entries, end = {}, 0
    for name, extents in shape.tensors():
        begin, end = end, end + 2 * int(np.prod(extents))
        entries[name] = {"dtype": "BF16", "shape": list(extents), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: IO[bytes], extents: tuple[int, ...], random: np.random.Generator) -> None:
    left = int(np.prod(extents))
    while left:
        count = min(left, _CHUNK)
        if len(extents) == 1:
            values = np.ones(count, np.float32)
        else:
            values = random.standard_normal(count, dtype=np.float32) * np.float32(DEVIATION)
        file.write(as_bfloat16(values).tobytes())
        left -= count


def as_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Returns the upper halves of finite float32 numbers, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    tie_to_even = (bits >> 16) & 1
    return ((bits + np.uint32(0x7FFF) + tie_to_even) >> 16).astype(np.uint16)
