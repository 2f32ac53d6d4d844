"""Models whose checkpoint stores matrices quantized: the same logits as of the values that the codes mean."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.fusion.cpu.linear import PackedMatrix
from sagellm.accel.quantization.round_to_nearest import RoundToNearest
from sagellm.accel.quantization.weight_format import weight_format
from sagellm.core.errors import ConfigError, MissingWeightsError, UnsupportedModelError, WeightShapeError
from sagellm.core.protocols.fusion import KernelSet
from sagellm.engines.native.matrices import Dense, PackedQuantizedMatrix
from tests.accel.quantization.checkpoints import KINDS, Kind, made_for
from tests.engines.native.driver import Driver, RecordingBackend, attention_of, mlp_of, native_model
from tests.tiny_models import VOCAB, make_tiny

LINEAR = re.compile(r"(self_attn|mlp)\.\w+_proj$")


def save_pair(folder: Path, kind: Kind, *, model: str = "qwen2", same_order: bool = True) -> None:
    """`folder`/plain has what the codes of `folder`/quantized mean."""
    made = make_tiny(model)
    plain, quantized = {}, {}
    for name, tensor in made.state_dict().items():
        module = name.removesuffix(".weight")
        if not (name.endswith(".weight") and LINEAR.search(module)):
            plain[name] = quantized[name] = tensor.clone()
            continue
        # The order of inputs comes from the seed: projections of the same input have the same.
        seed = len(module) if not same_order else 7
        numbers = made_for(kind, tensor.shape[0], tensor.shape[1], seed)
        plain[name] = numbers.values()
        quantized |= {f"{module}.{key}": one for key, one in kind.write(numbers).items()}
    config = json.loads(made.config.to_json_string()) | {"dtype": "float32"}
    for part, tensors, extra in (
        ("plain", plain, {}),
        ("quantized", quantized, {"quantization_config": kind.config}),
    ):
        (folder / part).mkdir()
        save_file(tensors, folder / part / "model.safetensors")
        (folder / part / "config.json").write_text(json.dumps(config | extra))


def backend(folder: Path, kernels: KernelSet | None = None, **options: Any) -> RecordingBackend:
    return RecordingBackend(
        folder, num_blocks=64, max_num_seqs=4, block_size=8, threads=1, formats=weight_format,
        kernels=None if kernels is None else lambda _: kernels, **options,
    )  # fmt: skip


def logits(made: RecordingBackend) -> torch.Tensor:
    driver = Driver(made)
    generator = torch.Generator().manual_seed(1)
    done = [driver.add(torch.randint(3, VOCAB, (n,), generator=generator).tolist(), 3) for n in (5, 33)]
    driver.run()
    return torch.stack([one.logits[0] for one in done])


QUICK = {"awq", "gptq-4-act-order", "pack-4", "w8a8"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(KINDS)]
)
def test_logits_are_those_of_the_values(name: str, tmp_path: Path) -> None:
    """Without a kernel to the bit, with it but for the rounding of activations to 8 bits."""
    save_pair(tmp_path, KINDS[name])
    plain = logits(backend(tmp_path / "plain"))
    assert torch.equal(logits(backend(tmp_path / "quantized")), plain)
    kernels = cpu_kernels(1)
    if kernels.quantized is None:
        pytest.skip("no C++ compiler")
    made = backend(tmp_path / "quantized", kernels)
    layer = native_model(made)._layers[0]
    attention = attention_of(layer)
    for one in (attention.qkv, attention.output, mlp_of(layer).up, mlp_of(layer).down):
        assert isinstance(one.matrix, PackedQuantizedMatrix)
    found = logits(made)
    assert 0 < (found - plain).norm() < 0.1 * plain.norm()


@pytest.mark.parametrize("kind", ["awq", "w8a8"])
def test_heads_are_reordered_as_those_of_values_are(kind: str, tmp_path: Path) -> None:
    """GLM-4 rotates neighbours in half of each head."""
    save_pair(tmp_path, KINDS[kind], model="glm")
    plain = logits(backend(tmp_path / "plain"))
    assert torch.equal(logits(backend(tmp_path / "quantized")), plain)


def test_pieces_in_different_orders_are_held_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = cpu_kernels(1)
    if kernels.quantized is None:
        pytest.skip("no C++ compiler")
    save_pair(tmp_path, KINDS["gptq-4-act-order"], model="llama", same_order=False)
    with caplog.at_level(logging.WARNING):
        made = backend(tmp_path / "quantized", kernels)
    assert (
        "held dequantized (layers.0.up.weight, the first): its pieces have their inputs in different orders"
        in caplog.text
    )
    assert isinstance(mlp_of(native_model(made)._layers[0]).up.matrix, PackedMatrix | Dense)
    plain = logits(backend(tmp_path / "plain"))
    assert (logits(made) - plain).norm() < 0.1 * plain.norm()


def test_pieces_that_are_not_quantized_beside_others_that_are(tmp_path: Path) -> None:
    kind = KINDS["awq"]
    save_pair(tmp_path, kind)
    folder = tmp_path / "quantized"
    tensors = _tensors(folder)
    plain = _tensors(tmp_path / "plain")
    module = "model.layers.1.self_attn.v_proj"
    for key in ("qweight", "qzeros", "scales"):
        del tensors[f"{module}.{key}"]
    tensors[f"{module}.weight"] = plain[f"{module}.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(backend(folder)), logits(backend(tmp_path / "plain")))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return {name: tensor.clone() for name, tensor in found.items()}


def test_what_is_missing_or_of_another_shape_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    save_pair(tmp_path, KINDS["gptq-4"])
    folder = tmp_path / "quantized"
    tensors = _tensors(folder)
    name = "model.layers.2.mlp.down_proj.qzeros"
    kept = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(MissingWeightsError, match=name):
        backend(folder)
    save_file({**tensors, name: kept[:2].contiguous()}, folder / "model.safetensors")
    with pytest.raises(WeightShapeError, match=rf"{name}: config.json implies shape \[4, 16\]"):
        backend(folder)


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [("gptq-4", "qweight"), ("awq", "qweight"), ("pack-4", "weight_packed"), ("pack-4", "weight_scale"),
     ("int-8-channel", "weight"), ("int-8-channel", "weight_scale")],
)  # fmt: skip
def test_what_is_missing_is_named_as_the_format_does(kind: str, tensor: str, tmp_path: Path) -> None:
    save_pair(tmp_path, KINDS[kind])
    folder = tmp_path / "quantized"
    tensors = _tensors(folder)
    del tensors[f"model.layers.1.self_attn.q_proj.{tensor}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(MissingWeightsError, match=rf"lacks model\.layers\.1\.self_attn\.q_proj\.{tensor}$"):
        backend(folder)


def test_a_shape_that_is_stored_is_that_of_config_json(tmp_path: Path) -> None:
    """1 to 7 inputs less are packed into as many words."""
    save_pair(tmp_path, KINDS["pack-4"])
    folder = tmp_path / "quantized"
    tensors = _tensors(folder)
    name = "model.layers.2.mlp.up_proj.weight_shape"
    tensors[name] = torch.tensor([112, 125])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightShapeError, match=rf"{name}: config.json implies \[112, 128\].*\[112, 125\]"):
        backend(folder)


def test_zero_biases_of_modules_without_one_are_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As GPTQ's writers leave them."""
    save_pair(tmp_path, KINDS["gptq-4"])
    folder = tmp_path / "quantized"
    save_file(
        {**_tensors(folder), "model.layers.0.mlp.down_proj.bias": torch.zeros(128)},
        folder / "model.safetensors",
    )
    assert torch.equal(logits(backend(folder)), logits(backend(tmp_path / "plain")))
    assert "not used" not in caplog.text


def test_what_a_module_makes_no_matrix_of_is_named(tmp_path: Path) -> None:
    save_pair(tmp_path, KINDS["gptq-4"])
    folder = tmp_path / "quantized"
    tensors = _tensors(folder)
    tensors["model.layers.1.mlp.up_proj.scales"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"model\.layers\.1\.mlp\.up_proj: scales that are not finite"
    ):
        backend(folder)


def test_quantizing_it_again_is_refused(tmp_path: Path) -> None:
    save_pair(tmp_path, KINDS["gptq-4"])
    with pytest.raises(ConfigError, match="int8: the checkpoint is quantized already; leave it out"):
        backend(tmp_path / "quantized", quantizer=RoundToNearest(8))


def test_whole_numbers_without_a_word_in_the_configuration_are_refused(tmp_path: Path) -> None:
    save_pair(tmp_path, KINDS["int-8-channel"])
    folder = tmp_path / "quantized"
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"implies F64 or .*, the checkpoint has I8; only"):
        backend(folder)


def test_a_backend_without_formats_refuses(tmp_path: Path) -> None:
    save_pair(tmp_path, KINDS["awq"])
    with pytest.raises(UnsupportedModelError, match=r"'awq'.*cannot be read here"):
        RecordingBackend(tmp_path / "quantized", num_blocks=4)
