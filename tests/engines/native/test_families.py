"""Families of models: what their config.json leaves out, and what is refused, in words that say what runs."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sagellm.core.errors import ModelError, UnsupportedModelError, WeightShapeError
from sagellm.core.protocols.fusion import KernelSet
from sagellm.core.types import AttentionChunk
from sagellm.engines.native.architectures import read_config, read_spec
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.experts import ExpertSpec
from sagellm.engines.native.latent_spec import LatentSpec
from sagellm.engines.native.layer_spec import LayerInputSpec, TemperatureSpec
from sagellm.engines.native.loading import CheckedModel
from sagellm.engines.native.model_spec import ModelSpec
from tests.tiny_models import save_tiny

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def of(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [f"{architecture}ForCausalLM"], **SHAPE, **changes}


def thetas(spec: ModelSpec) -> list[float | None]:
    return [None if rope is None else rope.theta for rope in spec.ropes]


def test_olmo() -> None:
    two, three = read_spec(of("Olmo2")), read_spec(of("Olmo3", rope_theta=5e5, rope_scaling=YARN))
    assert (two.norm_place, two.norm_eps, two.qk_norm, two.num_kv_heads) == ("output", 1e-5, "all", 4)
    assert three.windows == (4096, 4096, 4096, None)
    assert [rope and rope.variant for rope in three.ropes] == ["default"] * 3 + ["yarn"]
    assert thetas(three) == [5e5] * 4


def test_phi() -> None:
    """What decides between the factors of LongRoPE is the longest sequence of the engine."""
    spec = read_spec(of("Phi3", original_max_position_embeddings=512, rope_scaling=LONG))
    assert spec.max_model_len == 4096
    for length, is_long in ((512, False), (513, True)):
        assert [rope and rope.is_long for rope in spec.for_length(length).ropes] == [is_long] * 4
    partial = read_spec(of("Phi3", partial_rotary_factor=0.5)).ropes[0]
    assert partial is not None
    assert partial.head_order == (0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15)


def test_smollm3() -> None:
    spec = read_spec(of("SmolLM3"))
    assert thetas(spec) == [2e6, 2e6, 2e6, None]
    assert spec.tied
    assert spec.num_kv_heads == 4
    windowed = read_spec(of("SmolLM3", use_sliding_window=True, sliding_window=9, no_rope_layer_interval=2))
    assert windowed.windows == (None, 9, None, 9)


def test_glm() -> None:
    spec = read_spec(of("Glm4"))
    assert (spec.head_dim, spec.num_kv_heads, spec.qkv_bias, spec.out_bias) == (128, 2, True, False)
    rope = spec.ropes[0]
    assert rope is not None
    assert (rope.dim, rope.head_dim) == (64, 128)
    assert rope.head_order[:3] == (0, 2, 4)
    assert sorted(rope.head_order) == list(range(128))


def test_glm_with_experts() -> None:
    spec = read_spec(of("Glm4Moe", num_hidden_layers=2, num_attention_heads=8))
    assert (spec.head_dim, spec.num_kv_heads, spec.qkv_bias, spec.qk_norm) == (8, 8, False, "")
    rope, experts = spec.ropes[0], spec.experts
    assert rope is not None
    assert (rope.dim, rope.head_order) == (4, (0, 1, 4, 5, 2, 3, 6, 7))
    assert experts is not None
    assert (experts.layers, experts.count, experts.per_token, experts.width) == ((False, True), 128, 8, 1408)
    assert (experts.scoring, experts.is_corrected, experts.renormalize, experts.scale) == (
        "sigmoid", True, True, 1.0,
    )  # fmt: skip
    assert (experts.groups, experts.shared_width) == (1, 1408)
    assert read_spec(of("Glm4Moe", first_k_dense_replace=4, num_attention_heads=8)).experts is None
    with pytest.raises(UnsupportedModelError, match="scoring_func 'softmax' is not supported"):
        read_spec(of("Glm4Moe", scoring_func="softmax"))


def test_glm_of_deepseeks_shape() -> None:
    given = {"num_attention_heads": 20, "num_hidden_layers": 3}
    spec = read_spec(of("Glm4MoeLite", **given))
    assert (spec.latent, spec.norm_eps) == (LatentSpec(512, 64, 192, 256, 768, True), 1e-5)
    assert spec.experts is not None
    assert (spec.experts.layers, spec.experts.count, spec.experts.per_token, spec.experts.scale) == (
        (False, True, True), 64, 4, 1.8,
    )  # fmt: skip
    listed = read_spec(of("Glm4MoeLite", **given, mlp_layer_types=["dense", "dense", "sparse"]))
    assert listed.experts is not None
    assert listed.experts.layers == (False, False, True)
    for types in (["dense", "sparse", "dense"], ["dense", "sparse"]):
        with pytest.raises(UnsupportedModelError, match="dense layers and then sparse ones, 3 in all"):
            read_spec(of("Glm4MoeLite", **given, mlp_layer_types=types))


def test_granite() -> None:
    """The multiplier of sublayers' outputs is in that of embeddings and in eps."""
    numbers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 8.0}
    spec = read_spec(of("Granite", attention_multiplier=0.25, rms_norm_eps=1e-5, **numbers))
    assert (spec.embed_scale, spec.norm_eps, spec.logit_scale, spec.attention_scale) == (
        24,
        4e-5,
        0.125,
        0.25,
    )


def test_gemma() -> None:
    two = read_spec(of("Gemma2"))
    assert (two.windows, two.score_softcap, two.logit_softcap) == ((4096, None) * 2, 50.0, 30.0)
    assert (two.head_dim, two.attention_scale, two.embed_scale, two.tied) == (256, 0.0625, 8.0, True)
    uncapped = read_spec(of("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (uncapped.score_softcap, uncapped.logit_softcap) == (None, None)
    three = read_spec(
        of("Gemma3", sliding_window_pattern=2, rope_scaling={"rope_type": "linear", "factor": 8})
    )
    assert three.windows == (4096, None) * 2
    assert thetas(three) == [1e4, 1e6] * 2
    assert [rope and rope.factor for rope in three.ropes] == [1.0, 8.0] * 2


def test_llama4() -> None:
    """A layer without RoPE sees all; experts in each layer, or in each so many."""
    spec = read_spec(of("Llama4", no_rope_layers=[], num_key_value_heads=2))
    assert spec.windows == (AttentionChunk(8192),) * 3 + (None,)
    assert thetas(spec) == [5e5, 5e5, 5e5, None]
    assert spec.ropes[0] is not None
    assert spec.ropes[0].interleaved
    assert (spec.intermediate_size, spec.qk_norm) == (16_384, "plain")
    assert spec.temperature == TemperatureSpec(8192, 0.1)
    experts = spec.experts
    assert experts is not None
    assert (experts.layers, experts.width, experts.shared_width) == ((True,) * 4, 96, 96)
    other = of(
        "Llama4", num_key_value_heads=2, interleave_moe_layer_step=2, attn_temperature_tuning=0,
        use_qk_norm=False, layer_types=["chunked_attention", "full_attention"] * 2, attention_chunk_size=64,
    )  # fmt: skip
    spec = read_spec(other)
    assert spec.windows == (AttentionChunk(64), None) * 2
    assert spec.experts is not None
    assert spec.experts.layers == (False, True) * 2
    assert (spec.temperature, spec.qk_norm) == (None, "")
    assert read_spec(of("Llama4", moe_layers=[], num_key_value_heads=4)).experts is None


def test_queries_are_scaled_from_the_first_length_on() -> None:
    warm = TemperatureSpec(8, 0.5)
    assert warm.of(torch.arange(7), 6, torch.float32) is None
    found = warm.of(torch.tensor([0, 6, 7, 14, 15, 99]), 99, torch.float64)
    assert found is not None
    expected = [1.0, 1.0, *(1 + 0.5 * math.log1p(n) for n in (1, 1, 2, 12))]
    assert found.flatten().tolist() == pytest.approx(expected)


def test_gemma4() -> None:
    spec = read_spec(of("Gemma4", num_hidden_layers=13, num_kv_shared_layers=4, use_double_wide_mlp=True))
    assert spec.windows == ((512,) * 5 + (None,)) * 2 + (None,)
    assert [shape.kv_source for shape in spec.shapes] == [*range(9), 8, 8, 5, 5]
    assert [shape.intermediate_size for shape in spec.shapes] == [96] * 9 + [192] * 4
    assert spec.kv_windows == spec.windows[:9]
    assert spec.kv_shapes == ((4, 256),) * 5 + ((4, 512),) + ((4, 256),) * 3
    assert [spec.kv_index(layer) for layer in (0, 8, 9, 12)] == [0, 8, 8, 5]
    assert [rope and (rope.variant, rope.dim, rope.num_rotated) for rope in spec.ropes[4:6]] == [
        ("default", 256, 0),
        ("proportional", 512, 64),
    ]
    assert (spec.attention_scale, spec.embed_scale, spec.logit_softcap) == (1.0, 8.0, None)
    assert spec.layer_inputs == LayerInputSpec(256, 262_144, 16.0)


def test_heads_of_gemma4_may_be_given_by_layer() -> None:
    """As transformers writes them from 5.20 on, and as it did before."""
    now = {f"{i:02}": {"head_dim": 64, "num_key_value_heads": 1} for i in (1, 3)}
    types = ["sliding_attention", "full_attention"] * 2
    one = read_spec(of("Gemma4", layer_types=types, per_layer_config=now, attention_k_eq_v=True))
    before = {"global_head_dim": 64, "num_global_key_value_heads": 1}
    two = read_spec(of("Gemma4", layer_types=types, attention_k_eq_v=True, **before))
    assert one == two
    assert [shape.value_is_key for shape in one.shapes] == [False, True] * 2


@pytest.mark.parametrize(
    ("model_type", "name"), [("gemma3_text", "Gemma3ForCausalLM"), ("gemma4_text", "Gemma4ForCausalLM")]
)
def test_a_text_model_without_architectures(model_type: str, name: str) -> None:
    assert read_spec({**SHAPE, "model_type": model_type}).architecture == name


def test_a_gemma_of_the_hub_gives_little_more_than_its_size() -> None:
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240, "sliding_window": 1024}
    spec = read_spec(
        {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": text}
    )
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262_208, 8, 4, 256)
    assert (spec.dtype, spec.windows.count(None), spec.max_model_len) == ("bfloat16", 5, 131_072)
    assert spec.names.root == "language_model.model."


def test_a_qwen3_5_with_experts_of_the_hub_gives_little_more_than_its_size() -> None:
    text = {"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "vocab_size": 248_320}
    spec = read_spec(
        {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "dtype": "bfloat16", "text_config": text}
    )
    assert spec.experts == ExpertSpec((True,) * 40, 256, 8, 512, shared_width=512, shared_gate=True)
    assert (spec.num_kv_heads, spec.head_dim, len(spec.kv_windows)) == (2, 256, 10)
    assert spec.names.root == "model.language_model."


@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3.5-moe-text-part", "qwen3-moe-some-dense"])
def test_experts_of_a_layer_in_one_tensor_are_those_of_many(name: str, tmp_path: Path) -> None:
    for folder, by_expert in ((tmp_path / "one", False), (tmp_path / "many", True)):
        save_tiny(folder, name, save_original_format=by_expert)
    assert any(key.endswith("gate_up_proj") for key in Checkpoint(tmp_path / "one").entries)
    assert not any(key.endswith("gate_up_proj") for key in Checkpoint(tmp_path / "many").entries)
    one, many = (CheckedModel.of(tmp_path / folder, "cpu", None, None, None) for folder in ("one", "many"))
    mine, theirs = (
        found.loader("float32", "float32", KernelSet(), KernelSet()).weights(found.plan)
        for found in (one, many)
    )
    assert mine.matrices.keys() == theirs.matrices.keys()
    for key, matrix in theirs.matrices.items():
        probe = torch.eye(matrix.shape[1])
        assert torch.equal(mine.matrices[key].multiply(probe), matrix.multiply(probe)), key


def test_stacked_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3.5-moe", save_original_format=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts": 9}), encoding="utf-8")
    with pytest.raises(WeightShapeError, match=r"\[9, 96\], the checkpoint has \[8, 96\]"):
        CheckedModel.of(tmp_path, "cpu", None, None, None)


def test_images_are_not_read_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path, "gemma3-text-part")
    with caplog.at_level(logging.WARNING):
        CheckedModel.of(tmp_path, "cpu", None, None, None)
    [record] = [record for record in caplog.records if record.name == "sagellm.weights"]
    assert record.getMessage().startswith("images are not read")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (of("Olmo2", hidden_act="xielu"), "xielu.*silu"),
        (of("Olmo3", layer_types=["full_attention"] * 3), "3 layer_types for 4 layers"),
        (of("Olmo3", layer_types=["linear_attention"] * 4), "linear_attention.*sliding_attention"),
        (of("Olmo3", rope_parameters={"full_attention": {"rope_type": "spiral"}}), "spiral.*yarn"),
        (of("Phi3", rope_scaling={**LONG, "long_factor": None}), "longrope.*needs long_factor"),
        (of("Phi3", rope_scaling={**LONG, "short_factor": [1.0]}), "short_factor must be 8 positive numbers"),
        (of("Phi3", partial_rotary_factor=1.2), "partial_rotary_factor.*at most 1"),
        (of("Phi3", partial_rotary_factor=0.2), "even head_dim.*3 of 16"),
        (of("SmolLM3", no_rope_layers=[1]), "1 no_rope_layers for 4 layers"),
        (of("Llama4", no_rope_layers=[1]), "1 no_rope_layers for 4 layers"),
        (of("Llama4", layer_types=["sliding_attention"] * 4), "sliding_attention.*chunked_attention"),
        (of("Llama4", moe_layers=[1, 4]), r"moe_layers \[4\]; layers are 0 to 3"),
        (
            of("Llama4", num_local_experts=2, num_experts_per_tok=3),
            "a token takes 3 experts, but there are only 2",
        ),
        (of("Glm", head_dim=30), "even head_dim"),
        (of("Granite", residual_multiplier=0.0), "residual_multiplier must be positive"),
        (of("Granite", logits_scaling=-2.0), "logit_scale must be positive"),
        (of("Gemma2", hidden_activation="swiglu"), "swiglu.*gelu"),
        (of("Gemma3", use_bidirectional_attention=True), "does not generate text"),
        (of("Gemma3", sliding_window_pattern=2, rope_scaling={"type": "spiral"}), "spiral.*linear"),
        (
            of("Qwen3_5Moe", num_experts=2, num_experts_per_tok=3),
            "a token takes 3 experts, but there are only 2",
        ),
        (of("Qwen3_5Moe", moe_intermediate_size=0), "width must be positive, got 0"),
        (of("Gemma3n"), "Gemma3nForCausalLM is not native .*Gemma3, "),
        (of("Gemma4", use_bidirectional_attention="all"), "does not generate text"),
        (of("Gemma4", num_kv_shared_layers=4), "num_kv_shared_layers 4 of 4 layers"),
        (
            of("Gemma4", num_kv_shared_layers=1),
            "num_kv_shared_layers 1 of 4 layers leaves no full_attention",
        ),
        (of("Gemma4", vocab_size_per_layer_input=99), "vocab_size_per_layer_input 99 is less than"),
        (of("Gemma4", num_key_value_heads=3), "4 heads, not a multiple of 3 KV heads"),
        (
            of("Gemma4", attention_k_eq_v=True, num_global_key_value_heads=3),
            "4 heads, not a multiple of 3 KV heads",
        ),
        (of("Gemma4", per_layer_config={"1": {"head_dim": 64}}), "per_layer_config differs among layers"),
        (of("Gemma4", per_layer_config={"4": {"head_dim": 64}}), "per_layer_config of 4; layers are 0 to 3"),
        (of("Gemma4", per_layer_config={"x": {"head_dim": 64}}), "per_layer_config of x"),
        (of("Gemma4", rope_parameters={"full_attention": {"rope_theta": 10.0}}), "has no sliding_attention"),
        (of("Gemma4", global_head_dim=31), "even head_dim"),
        (of("Gemma4", enable_moe_block=True, num_experts=8), "needs top_k_experts, moe_intermediate_size"),
        (
            of("Gemma4", enable_moe_block=True, num_experts=2, top_k_experts=3, moe_intermediate_size=8),
            "a token takes 3 experts, but there are only 2",
        ),
    ],
)
def test_refusals(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_spec(config)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_scaling": {"type": "longrope", "long_factor": "long"}},
        {"rope_parameters": {"full_attention": {"rope_theta": "1e6"}}},
        {"text_config": {"hidden_size": "2560"}},
        {"query_pre_attn_scalar": -1},
        {"no_rope_layers": 3},
        {"attention_chunk_size": 0},
        {"floor_scale": 0},
        {"residual_multiplier": 0},
        {"per_layer_config": {"3": {"sliding_window": 7}}},
        {"num_kv_shared_layers": -1},
        {"global_head_dim": "512"},
    ],
)
def test_values_of_the_wrong_kind_are_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(of("Llama", **wrong)), encoding="utf-8")
    with pytest.raises(ModelError, match=next(iter(wrong))):
        read_config(tmp_path)
