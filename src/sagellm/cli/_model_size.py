"""How large a model is, from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.core.errors import ModelError
from sagellm.core.types import KVCacheSchema

BYTES_OF = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Memory of weights and of one token's KV, both in `dtype`."""

    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    dtype: str


def size_of(folder: Path, dtype: str = "auto") -> ModelSize:
    """Read config.json, and the weight files' sizes where they lie beside it.

    Raises `ModelError` where there is no such folder, or no shape in it.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError("no such folder here; a model of the hub is sized once it has been loaded")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return _size(config, _chosen_dtype(config, dtype), folder)
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{path} does not describe a decoder: {error}") from error


def _size(config: dict[str, Any], dtype: str, folder: Path) -> ModelSize:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    schema = KVCacheSchema(config["num_hidden_layers"], kv_heads, head_dim, dtype, block_size=1, layout="any")
    parameters = _stored_parameters(folder) or _parameters(config, heads * head_dim, kv_heads * head_dim)
    return ModelSize(
        num_parameters=parameters,
        weight_bytes=parameters * BYTES_OF[dtype],
        kv_bytes_per_token=schema.bytes_per_token,
        max_model_len=config["max_position_embeddings"],
        dtype=dtype,
    )


def _chosen_dtype(config: dict[str, Any], asked: str) -> str:
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    return stored if asked == "auto" else asked


def _parameters(config: dict[str, Any], q_width: int, kv_width: int) -> int:
    """Parameters of a decoder with gated feed-forward layers, up to norms and biases."""
    hidden, inner = config["hidden_size"], config.get("intermediate_size") or config["ffn_dim"]
    matrices = 3 if "intermediate_size" in config else 2
    layer = hidden * (2 * q_width + 2 * kv_width) + matrices * hidden * inner
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(config["num_hidden_layers"] * layer + embeddings)


def _stored_parameters(folder: Path) -> int:
    """Parameters in the folder's safetensors files, counted from their headers; 0 where there are none."""
    return sum(_parameters_in(path) for path in folder.glob("*.safetensors"))


def _parameters_in(path: Path) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
    return sum(_product(shape) for shape in shapes)


def _product(shape: list[int]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product
