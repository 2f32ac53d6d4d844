"""Presets of devices and models, and the KV blocks that a device leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.errors import CapacityError, ConfigError, ModelError
from sagellm.engines.simulator.backend import activation_bytes, num_kv_blocks
from sagellm.engines.simulator.cost_model import CostModel
from sagellm.engines.simulator.devices import DEVICES, GIB, device
from sagellm.engines.simulator.models import MODELS, from_config, model

LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_names_its_source_and_is_plausible(name: str) -> None:
    one = device(name)
    assert one.source
    assert one.memory_bytes / one.bandwidth < 1.0, "all memory is read within a second"
    assert one.bandwidth > one.pcie > one.nvme
    assert one.peak_flops("bfloat16") > one.peak_flops("float32")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX4090", "rtx4090"),
        ("rtx_4090", "rtx4090"),
        ("H100", "h100-80g"),
        ("H100_80G", "h100-80g"),
        ("RTX PRO 6000", "rtx-pro-6000"),
        ("RTXPRO6000", "rtx-pro-6000"),
        ("Ascend 910B", "ascend-910b"),
    ],
)
def test_names_of_devices_are_read_kindly(written: str, name: str) -> None:
    assert device(written).name == name


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"no device 'h100-81g'\. Did you mean 'h100-80g'"):
        device("h100-81g")
    with pytest.raises(ModelError, match=r"no model shape 'llama-3.1-9b'.*Did you mean 'llama-3.1-8b'"):
        model("llama-3.1-9b")
    with pytest.raises(ConfigError, match="'h200' has no peak for float64"):
        device("h200").peak_flops("float64")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.2-1b", 1.236),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.9),
        ("mixtral-8x7b", 46.70),
        ("mistral-7b", 7.248),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-72b", 72.71),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.76),
        ("qwen3-30b-a3b", 30.53),
        ("phi-4", 14.66),
    ],
)
def test_a_shape_has_the_parameters_that_its_model_card_counts(name: str, billions: float) -> None:
    assert MODELS[name].num_params / 1e9 == pytest.approx(billions, rel=2e-3)


def test_active_parameters_of_a_mixture_are_few() -> None:
    sparse = MODELS["qwen3-30b-a3b"]
    active = sparse.always_read_params + sparse.experts_per_token * sparse.expert_params
    assert (active + 2 * sparse.head_params) / 1e9 == pytest.approx(3.35, rel=0.02)


def test_kv_of_a_token() -> None:
    assert MODELS["llama-3.1-8b"].kv_bytes_per_token == 128 * 1024
    assert MODELS["llama-3.1-8b"].kv_schema(16).bytes_per_block == 2 * 2**20


def test_a_config_json_gives_the_preset(tmp_path: Path) -> None:
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert model(folder) == model("meta-llama/Llama-3.1-8B-Instruct") == MODELS["llama-3.1-8b"]


def test_a_config_of_experts_is_read() -> None:
    given = LLAMA | {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "head_dim": 64,
    }
    shape = from_config(given, "mixture")
    assert (shape.num_experts, shape.experts_per_token, shape.intermediate_size) == (128, 8, 768)
    assert shape.head_dim == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"intermediate_size": "wide"}, "config.json lacks intermediate_size"),
        ({"num_key_value_heads": 5}, "32 heads are not shared by 5"),
        ({"torch_dtype": "int3"}, "no number format 'int3'"),
        ({"num_experts": 8}, "a token visits 1 to 8 experts"),
    ],
)
def test_a_config_that_cannot_be_priced_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_config(LLAMA | changes, "broken")


@pytest.mark.parametrize("text", ["[1]", "{", "\xff"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        model(path)


def test_blocks_are_what_memory_leaves() -> None:
    shape, card = MODELS["llama-3.1-8b"], replace(device("h100-80g"), memory_bytes=40 * GIB)
    one = CostModel(card, shape)
    before = num_kv_blocks(one, utilization=0.9)
    more = num_kv_blocks(CostModel(replace(card, memory_bytes=50 * GIB), shape), utilization=0.9)
    assert more - before == pytest.approx(9 * GIB / (2 * 2**20), abs=1)
    assert num_kv_blocks(one, block_size=32) == pytest.approx(before / 2, abs=1)
    assert num_kv_blocks(one, max_num_seqs=64) > before
    assert num_kv_blocks(CostModel(card, shape, tensor_parallel=2)) > 2 * before
    assert activation_bytes(shape, 4096, 256) > activation_bytes(shape, 2048, 256)


def test_a_measured_engine_had_the_blocks_that_are_derived() -> None:
    """As vLLM 0.19 printed for 256 requests and 2048 tokens at most: 2,588 blocks."""
    measured = CostModel(device("rtx4090"), MODELS["llama-3.1-8b"])
    derived = num_kv_blocks(measured, max_num_seqs=256, max_batched_tokens=2048)
    assert derived == pytest.approx(2588, rel=0.02)


def test_a_model_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(CapacityError, match=r"llama-3.1-70b .* leaves no room for KV on rtx4090"):
        num_kv_blocks(CostModel(device("rtx4090"), MODELS["llama-3.1-70b"]))
