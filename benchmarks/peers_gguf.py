"""Writes models of `sagellm bench engine --shape` and a draft pair as GGUF.

    PEER_PYTHON benchmarks/peers_gguf.py FOLDER OUT.gguf          # gguf and numpy are enough

For the shapes gemma3, qwen3-moe and gpt-oss, and for the demo model and its target (`draft_pair.py`), in
bfloat16; norms, biases and sinks in float32, as llama.cpp's own converter has them. A folder without
tokenizer.json gets a list of names: prompts are token ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np

Array = np.ndarray[Any, Any]
_ARCHITECTURES = {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "llama": "llama"}
_OF_MODEL = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
_NORMS_OF = {
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "qwen3moe": {},
    "llama": {},
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_ANY_LETTERS = "bloom"
"""Of llama.cpp's pre-tokenizers, one that never cuts between letters. The demo model's merges join letters
alone, so that any such one gives its tokens."""


def tensors_of(path: Path) -> dict[str, Array]:
    """The bfloat16 tensors of one safetensors file, as their upper 16 bits."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    found = {}
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(data[begin:end].tobytes(), np.uint16).reshape(entry["shape"])
    return found


def add_description(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write what config.json says."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    count = config.get("num_experts") or config.get("num_local_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size", config["intermediate_size"])
        )


def add_names(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Write a vocabulary of names."""
    names = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256))]
    names += [b"tok%d" % i for i in range(vocab_size - len(names))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * len(names))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(names) - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Write the demo model's tokenizer. Raises ValueError for another, whose pre-tokenizer may differ."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    splits = [part.get("pattern") for part in tokenizer["pre_tokenizer"].get("pretokenizers", ())]
    if splits != [{"Regex": r"\p{L}+|[^\p{L}]"}, None]:
        raise ValueError(f"{folder / 'tokenizer.json'} is not the demo model's tokenizer, nor grown with it")
    names = {token: (index, _NORMAL) for token, index in tokenizer["model"]["vocab"].items()}
    for token in tokenizer["added_tokens"]:
        names[token["content"]] = token["id"], _CONTROL if token["special"] else _USER_DEFINED
    ordered = sorted((index, token, kind) for token, (index, kind) in names.items())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_ANY_LETTERS)
    writer.add_token_list([token for _, token, _ in ordered])
    writer.add_token_types([kind for _, _, kind in ordered])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    writer.add_chat_template(settings["chat_template"])


def add(writer: gguf.GGUFWriter, name: str, values: Array, *, wide: bool = False) -> None:
    """Write one tensor: vectors, and what is `wide`, in float32."""
    if wide or values.ndim == 1:
        offset = np.float32(writer.arch == "gemma3" and "norm" in name)  # Gemma scales by 1 + weight
        writer.add_tensor(name, (values.astype(np.uint32) << 16).view(np.float32) + offset)
    else:
        raw = np.ascontiguousarray(values).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def with_neighbours(values: Array, head_dim: int) -> Array:
    """Rows of queries or keys in llama.cpp's order: [heads * head_dim, in].

    For this architecture it turns neighbours by a position; a checkpoint turns the halves of a head.
    """
    halves = values.reshape(-1, 2, head_dim // 2, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


def add_layer(
    writer: gguf.GGUFWriter, number: int, own: dict[str, Array], head_dim: int, *, wide: bool
) -> None:
    """Write the tensors of one layer, by their names below it.

    `wide`: all in float32.
    """
    architecture = writer.arch
    place, names = f"blk.{number}.", _OF_LAYER | _NORMS_OF[architecture]
    experts: dict[str, list[tuple[int, Array]]] = {}
    for name, values in own.items():
        stem, _, kind = name.rpartition(".")
        if name == "self_attn.sinks":
            add(writer, place + "attn_sinks.weight", values)
        elif name.startswith("mlp.experts.gate_up_proj"):  # gpt-oss: gate and up alternate, [expert, in, out]
            bias = name.endswith("bias")
            for offset, part in enumerate(("gate", "up")):
                half = values[..., offset::2]
                place_of = f"{place}ffn_{part}_exps.{'bias' if bias else 'weight'}"
                add(writer, place_of, half if bias else half.swapaxes(1, 2), wide=wide or bias)
        elif name.startswith("mlp.experts.down_proj"):
            bias = name.endswith("bias")
            place_of = f"{place}ffn_down_exps.{'bias' if bias else 'weight'}"
            add(writer, place_of, values if bias else values.swapaxes(1, 2), wide=wide or bias)
        elif stem.startswith("mlp.experts."):
            _, _, expert, part = stem.split(".")
            experts.setdefault(part.removesuffix("_proj"), []).append((int(expert), values))
        else:
            if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
                values = with_neighbours(values, head_dim)
            add(writer, f"{place}{names[stem]}.{kind}", values, wide=wide or names[stem] == "ffn_gate_inp")
    for part, found in experts.items():
        stacked = np.stack([values for _, values in sorted(found, key=lambda pair: pair[0])])
        add(writer, f"{place}ffn_{part}_exps.weight", stacked, wide=wide)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--float32", action="store_true", help="matrices in float32 too")
    arguments = parser.parse_args()
    config = json.loads((arguments.folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in _ARCHITECTURES:
        parser.error(f"model_type {config['model_type']!r}: use one of {', '.join(_ARCHITECTURES)}")
    architecture = _ARCHITECTURES[config["model_type"]]
    tensors = tensors_of(arguments.folder / "model.safetensors")
    writer = gguf.GGUFWriter(arguments.out, architecture)
    add_description(writer, config)
    if (arguments.folder / "tokenizer.json").exists():
        add_tokenizer(writer, arguments.folder, config)
    else:
        add_names(writer, config["vocab_size"])
    for name, ours in _OF_MODEL.items():
        add(writer, f"{ours}.weight", tensors.pop(name), wide=arguments.float32)
    if "lm_head.weight" in tensors:
        add(writer, "output.weight", tensors.pop("lm_head.weight"), wide=arguments.float32)
    layers: dict[int, dict[str, Array]] = {}
    for name, values in tensors.items():
        number, _, own = name.removeprefix("model.layers.").partition(".")
        layers.setdefault(int(number), {})[own] = values
    for place, layer in sorted(layers.items()):
        add_layer(writer, place, layer, config["head_dim"], wide=arguments.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
