"""Readers of quantized checkpoints against writers that have nothing in common with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.quantization.weight_format import weight_format
from sagellm.core.errors import UnsupportedModelError
from tests.accel.quantization.checkpoints import AWQ_CONFIG, KINDS, compressed, made_for


@settings(max_examples=120)
@given(
    name=st.sampled_from(sorted(KINDS)), eights=st.integers(1, 5), words=st.integers(1, 12),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_value_is_the_one_that_was_written(name: str, eights: int, words: int, seed: int) -> None:
    """To the bit; also where the last group is short."""
    kind = KINDS[name]
    outputs, inputs = 8 * eights, 16 * words
    made = made_for(kind, outputs, inputs, seed)
    stored = kind.write(made)
    reader = weight_format(kind.config)
    asked = reader.tensors(outputs, inputs)
    assert {key for key, one in asked.items() if not one.optional} <= stored.keys()
    read = {key: stored[key] for key in asked if key in stored}
    assert {key: tuple(tensor.shape) for key, tensor in read.items()} == {
        key: asked[key].shape for key in read
    }
    matrix = reader.matrix(read, outputs, inputs)
    assert matrix.bits == kind.bits
    assert torch.equal(matrix.values(), made.values())


def test_a_missing_g_idx_means_groups_in_order() -> None:
    kind = KINDS["gptq-4"]
    made = made_for(kind, 16, 64)
    stored = kind.write(made)
    del stored["g_idx"]
    matrix = weight_format(kind.config).matrix(stored, 16, 64)
    assert matrix.order is None
    assert torch.equal(matrix.values(), made.values())


def test_groups_of_uneven_size_are_refused() -> None:
    kind = KINDS["gptq-4-act-order"]
    stored = kind.write(made_for(kind, 16, 64))
    stored["g_idx"][:40] = 0
    with pytest.raises(UnsupportedModelError, match="g_idx does not deal 64 inputs into groups of 32"):
        weight_format(kind.config).matrix(stored, 16, 64)


def test_scales_that_are_not_finite_are_refused() -> None:
    kind = KINDS["awq"]
    stored = kind.write(made_for(kind, 16, 64))
    stored["scales"][0, 0] = torch.inf
    with pytest.raises(UnsupportedModelError, match="scales that are not finite"):
        weight_format(kind.config).matrix(stored, 16, 64)


STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "bitsandbytes"},
        r"\(bitsandbytes\).*awq, compressed-tensors, gptq.*model.quantization",
    ),
    ({}, r"\(unknown\)"),
    ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits.*use .* 4 or 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'.*gptq_v2"),
    (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}, "+:.*up.*": {"bits": 8}}},
        "differ by module",
    ),
    (AWQ_CONFIG | {"version": "gemv"}, "version 'gemv'.*gemm"),
    (AWQ_CONFIG | {"bits": 8}, "AWQ with 8 bits"),
    (compressed("float-quantized", 8, None, weights={"type": "float"}), "float8 weights by channel: use"),
    (compressed("nvfp4-pack-quantized", 4, 16), "'nvfp4-pack-quantized'"),
    (compressed("pack-quantized", 4, 32, weights={"strategy": "block"}), "by block: use"),
    (compressed("int-quantized", 8, None, input_activations=STATIC), "not dynamic int8"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "0 different groups"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_cannot_be_read_is_refused_with_what_could(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        weight_format(config)


def test_a_checkpoint_cannot_name_code_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for method in ("evil:F", "evil", "logging.config:dictConfig", "_packing"):
        with pytest.raises(UnsupportedModelError, match="use one by awq, compressed-tensors, gptq"):
            weight_format({"quant_method": method})


@pytest.mark.parametrize("size", [0, -5, "abc", [32], True, 1.5])
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_group_size_that_is_none_is_named(method: str, size: object) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
    groups = {"config_groups": {"group_0": {"weights": weights}}, "format": "pack-quantized"}
    with pytest.raises(UnsupportedModelError, match="use -1 or a positive number"):
        weight_format({"quant_method": method, "bits": 4, "group_size": size, **groups})


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "dynamic": 5},
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": ["gptq"]},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": "W8A8"}},
    ],
)
def test_a_configuration_of_other_types_is_one_line(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="quantization_config is none that"):
        weight_format(config)


def test_what_reorders_inputs_needs_its_order() -> None:
    gptq = weight_format({"quant_method": "gptq", "bits": 4, "desc_act": True}).tensors(32, 256)
    assert not gptq["g_idx"].optional
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"}
    config = {"config_groups": {"group_0": {"weights": weights}}, "format": "pack-quantized"}
    packed = weight_format({"quant_method": "compressed-tensors", **config})
    assert not packed.tensors(32, 256)["weight_g_idx"].optional
    with pytest.raises(UnsupportedModelError, match="without them"):
        weight_format({"quant_method": "compressed-tensors", **config, "transform_config": {"R4": {}}})
