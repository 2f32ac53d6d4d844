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
    """A model's config.json. `label` is the harness's name, if it has one."""

    label: str
    config: Mapping[str, Any]

    def changed(self, **config: Any) -> Shape:
        """The same with other values in config.json."""
        return Shape(self.label, {**self.config, **config})

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields every tensor's name and shape, as the family's checkpoints have them."""
        from sagellm.engines.native.architectures import read_spec
        from sagellm.engines.native.weights import parameters

        seen: set[str] = set()
        for parameter in parameters(read_spec(self.config)):
            for piece in parameter.pieces:
                if piece.name not in seen:
                    seen.add(piece.name)
                    yield piece.name, piece.stored_shape


def _llama_like(
    vocab: int, hidden: int, layers: int, inner: int, heads: int, kv_heads: int, head_dim: int,
    family: str = "llama", name: str = "Llama", *, tied: bool = True, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [f"{name}ForCausalLM"], "model_type": family, "vocab_size": vocab,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
        "tie_word_embeddings": tied, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **more,
    }  # fmt: skip


SHAPES: Mapping[str, Shape] = {
    "S": Shape("S", _llama_like(32_000, 1024, 12, 3072, 16, 8, 64)),
    "M": Shape("M", _llama_like(151_936, 1024, 28, 3072, 16, 8, 128)),
    "8B": Shape("8B", _llama_like(128_256, 4096, 32, 14_336, 32, 8, 128, tied=False)),
    "tiny": Shape("T", _llama_like(32_000, 256, 2, 512, 4, 2, 64)),
    "gemma3": Shape(
        "gemma3",
        _llama_like(
            32_000, 1024, 12, 3072, 8, 4, 128, "gemma3_text", "Gemma3", sliding_window=1024,
            query_pre_attn_scalar=128, hidden_activation="gelu_pytorch_tanh", sliding_window_pattern=6,
        ),
    ),
    "qwen3-moe": Shape(
        "qwen3-moe",
        _llama_like(
            32_000, 768, 12, 2048, 12, 4, 64, "qwen3_moe", "Qwen3Moe", num_experts=32,
            num_experts_per_tok=4, moe_intermediate_size=384, norm_topk_prob=True,
        ),
    ),
    "gpt-oss": Shape(
        "gpt-oss",
        _llama_like(
            32_000, 768, 12, 512, 12, 4, 64, "gpt_oss", "GptOss", tied=False, num_local_experts=16,
            num_experts_per_tok=4, sliding_window=128,
            rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
        ) | {"attention_bias": True},
    ),
}  # fmt: skip
"""Parameters: 184 M; 596 M as Qwen3-0.6B; 8.0 G as Llama-3-8B; 9.4 M for quick tests.
The last three have the wiring of other families: 183 M, 384 M and 293 M."""


def shape_named(name: str) -> Shape:
    if name not in SHAPES:
        raise ConfigError(f"there is no shape {name!r}: use {', '.join(SHAPES)}, or --model FOLDER")
    return SHAPES[name]


def write_model(shape: Shape, folder: Path, seed: int = 0) -> None:
    """Writes the model into the existing `folder`; raises `ConfigError` if the disk fails."""
    try:
        (folder / "config.json").write_text(json.dumps(dict(shape.config), indent=1), encoding="utf-8")
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
