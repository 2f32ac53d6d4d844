"""config.json to `ModelSpec`: both forms of the file, the families' defaults, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.errors import ModelError, UnsupportedModelError
from sagellm.engines.native.architectures import read_config, read_spec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def changed(**changes: Any) -> dict[str, Any]:
    return LLAMA | changes


def of(architecture: str, **changes: Any) -> dict[str, Any]:
    return changed(architectures=[architecture], **changes)


def test_both_forms_of_rope_and_dtype_mean_the_same() -> None:
    old = changed(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3_ROPE}, torch_dtype="bfloat16")
    new = changed(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}, dtype="bfloat16")
    assert read_spec(old) == read_spec(new)
    rope = read_spec(new).rope
    assert rope is not None
    assert (rope.theta, rope.factor, rope.original_max) == (5e5, 8.0, 8192)


def test_what_a_config_leaves_out_has_the_default_of_its_family() -> None:
    bare = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    spec = read_spec(bare)
    assert (spec.num_kv_heads, spec.head_dim, spec.tied, spec.dtype) == (4, 16, False, "float32")
    mistral = read_spec({**bare, "architectures": ["MistralForCausalLM"], "num_attention_heads": 16})
    assert (mistral.num_kv_heads, mistral.windows) == (8, (4096,) * 3)
    assert read_spec(of("Qwen3ForCausalLM")).head_dim == 128
    opt = read_spec({"architectures": ["OPTForCausalLM"], "vocab_size": 9, "hidden_size": 8, "ffn_dim": 8,
                     "num_hidden_layers": 1, "num_attention_heads": 2})  # fmt: skip
    assert opt.tied
    assert opt.norm_place == "input"
    assert opt.final_norm
    assert opt.qkv_bias
    assert opt.max_model_len == 2048
    assert read_spec({**LLAMA, "architectures": None}).architecture == "LlamaForCausalLM"


def test_windows_of_qwen2() -> None:
    window = {"sliding_window": 32, "max_window_layers": 1}
    assert read_spec(of("Qwen2ForCausalLM", **window)).windows == (None,) * 3
    used = of("Qwen2ForCausalLM", use_sliding_window=True, **window)
    assert read_spec(used).windows == (None, 32, 32)
    typed = {**used, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    assert read_spec(typed).windows == (32, None, None)
    assert read_spec({**typed, "use_sliding_window": False}).windows == (None,) * 3


def test_a_window_of_zero_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(of("MistralForCausalLM", sliding_window=0)), encoding="utf-8"
    )
    assert read_spec(read_config(tmp_path)).windows == (None,) * 3


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}, 4096),
        ({"rope_type": "llama3", **LLAMA3_ROPE}, 4096),
    ],
)
def test_length_after_stretching(rope: dict[str, Any], length: int) -> None:
    assert read_spec(changed(rope_parameters=rope)).max_model_len == length


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (of("BloomForCausalLM"), "BloomForCausalLM is not native .*: native are Llama, .*OPT, "),
        (of("MixtralForCausalLM", num_experts_per_tok=9), "a token takes 9 experts, but there are only 8"),
        (of("Qwen3MoeForCausalLM", num_experts=0), "count must be positive, got 0"),
        (changed(hidden_act="xielu"), "xielu.*silu"),
        (changed(rope_scaling={"type": "su", "factor": 2.0}), "'su'.*llama3"),
        (changed(rope_scaling={"type": "longrope", "factor": 2.0}), "short_factor, long_factor"),
        (changed(rope_parameters={"rope_type": "default", "mrope_section": [1, 2]}), "mrope"),
        (changed(rope_parameters={"full_attention": {"rope_type": "default"}}), "layer type"),
        (changed(rope_scaling={"type": "llama3", "factor": 8.0}), "low_freq_factor, high_freq_factor"),
        (changed(rope_scaling={"type": "linear"}), "linear.*factor"),
        (changed(partial_rotary_factor=1.5), "partial_rotary_factor"),
        (changed(dtype="float8_e4m3fn"), "float8_e4m3fn.*bfloat16"),
        (changed(num_key_value_heads=3), "4 heads.*3 KV heads"),
        (changed(hidden_size="64", head_dim=16), "hidden_size"),
        (changed(num_hidden_layers=0), "num_layers"),
        (changed(head_dim=15), "even head_dim"),
        ({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "vocab_size"),
        (of("Qwen2ForCausalLM", layer_types=["chunked_attention"] * 3), "chunked_attention"),
        (of("Qwen2ForCausalLM", layer_types=["full_attention"]), "1 layer_types for 3 layers"),
        (of("SmolLM3ForCausalLM", no_rope_layers=[1, 0]), "2 no_rope_layers for 3 layers"),
        (of("GraniteForCausalLM", residual_multiplier=-1.0), "residual_multiplier must be positive"),
        (of("Gemma2ForCausalLM", layer_types=["local"] * 3), "unknown: local"),
        (of("Gemma3ForCausalLM", use_bidirectional_attention=True), "does not generate text"),
        (of("Gemma3ForCausalLM", sliding_window_pattern=2, rope_scaling={"type": "x"}), "'x'.*llama3"),
        (
            of("Gemma3ForCausalLM", rope_parameters={"sliding_attention": {"rope_type": "y"}}),
            "'y'.*llama3",
        ),
        (of("Olmo3ForCausalLM", rope_theta=-1.0), "theta -1.0"),
        (of("Glm4ForCausalLM", partial_rotary_factor=0.01), "even head_dim"),
        (
            of("Phi3ForCausalLM", rope_scaling={"type": "su", "short_factor": [1.0], "long_factor": [1.0]}),
            "short_factor must be 8 positive numbers",
        ),
        (of("DeepseekV3ForCausalLM", n_group=3, first_k_dense_replace=0), "groups must have equally many"),
        (of("DeepseekV3ForCausalLM", n_group=2, topk_group=3, first_k_dense_replace=0), "at most all"),
        (
            of("DeepseekV3ForCausalLM", n_group=128, topk_group=2, first_k_dense_replace=0),
            "2 groups of 2 experts are too few for 8",
        ),
        (of("DeepseekV3ForCausalLM", scoring_func="softmax", first_k_dense_replace=0), "'sigmoid' is"),
        (of("DeepseekV2ForCausalLM", topk_method="noaux_tc"), "'greedy' or 'group_limited_greedy' is"),
        (of("DeepseekV2ForCausalLM", norm_topk_prob=True), "without it is"),
        (of("DeepseekV2ForCausalLM"), "no 'num_experts_per_tok'"),
        (of("OPTForCausalLM", num_attention_heads=5, ffn_dim=8), "64.*5 heads"),
    ],
)
def test_refusals_name_what_is_not_supported(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_spec(config)


def test_folders_without_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelError, match="JSON object"):
        read_config(tmp_path)
