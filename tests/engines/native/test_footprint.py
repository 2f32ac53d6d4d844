"""What is told of a model before it is loaded, beside what it is once it is loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sagellm.accel.quantization.round_to_nearest import RoundToNearest
from sagellm.accel.quantization.weight_format import weight_format
from sagellm.core.errors import UnsupportedModelError
from sagellm.core.protocols.fusion import KernelSet
from sagellm.engines.native.footprint import Footprint, footprint
from sagellm.engines.native.loading import CheckedModel
from tests.accel.quantization.checkpoints import KINDS
from tests.engines.native.test_quantized_checkpoints import QUICK, save_pair
from tests.tiny_models import make_tiny, save_tiny

CPU = torch.device("cpu")


def _same(kernels: KernelSet, threads: int) -> KernelSet:
    return kernels


def loaded_bytes(folder: Path, kernels: KernelSet, told: Footprint, quantizer: Any = None) -> int:
    """Of a model in memory, in the dtypes that were told."""
    source = CheckedModel.of(folder, "cpu", None, quantizer, weight_format)
    loading = source.loader(told.dtype, told.compute_dtype, kernels, kernels)
    weights = loading.weights(source.plan)
    assert weights.embedding is not None
    held = {id(one): one.nbytes for one in (weights.embedding, *weights.matrices.values())}
    return sum(held.values()) + sum(tensor.nbytes for tensor in weights.tensors.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", ["llama", "llama-head80-tied", "opt-post-norm-projected"])
def test_a_model_takes_what_was_told(
    name: str, bits: int | None, dtype: str, kernels: KernelSet, tmp_path: Path
) -> None:
    made = save_tiny(tmp_path, name)
    quantizer = None if bits is None else RoundToNearest(bits)
    for given in (kernels, KernelSet()):
        told = footprint(tmp_path, dtype=dtype, kernels=partial(_same, given), quantizer=quantizer)
        assert told.num_parameters == made.num_parameters()
        assert loaded_bytes(tmp_path, given, told, quantizer) == pytest.approx(told.weight_bytes, rel=0.01)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(KINDS)]
)
def test_a_quantized_checkpoint_takes_what_was_told(name: str, kernels: KernelSet, tmp_path: Path) -> None:
    kind = KINDS[name]
    save_pair(tmp_path, kind)
    folder = tmp_path / "quantized"
    told = footprint(folder, kernels=partial(_same, kernels), formats=weight_format)
    codes = told.codes[0]
    assert (told.method, codes.bits, told.obstacle) == (kind.config["quant_method"], kind.bits, "")
    assert told.num_parameters == make_tiny("qwen2").num_parameters()
    assert loaded_bytes(folder, kernels, told) == pytest.approx(told.weight_bytes, rel=0.02)
    without = footprint(folder, formats=weight_format)
    assert "no kernel" in without.obstacle
    assert without.weight_bytes == footprint(tmp_path / "plain").weight_bytes > told.weight_bytes
    assert loaded_bytes(folder, KernelSet(), without) == without.weight_bytes


@pytest.mark.parametrize("kind", ["gptq-4-act-order", "pack-4-act-order"])
def test_pieces_in_different_orders_are_told_as_they_are_held(
    kind: str, kernels: KernelSet, tmp_path: Path
) -> None:
    """Gate and up are held dequantized; Q, K and V, in the same order, are not."""
    save_pair(tmp_path, KINDS[kind], model="llama", same_order=False)
    folder = tmp_path / "quantized"
    told = footprint(folder, kernels=partial(_same, kernels), formats=weight_format)
    assert told.obstacle == "its pieces have their inputs in different orders"
    assert loaded_bytes(folder, kernels, told) == pytest.approx(told.weight_bytes, rel=0.01)


def test_an_order_that_is_none_is_refused_as_it_is_when_loading(kernels: KernelSet, tmp_path: Path) -> None:
    save_pair(tmp_path, KINDS["gptq-4"])
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["model.layers.1.mlp.up_proj.g_idx"][0] = 3
    save_file(tensors, path)
    with pytest.raises(UnsupportedModelError, match=r"^model\.layers\.1\.mlp\.up_proj: g_idx does not deal"):
        footprint(path.parent, kernels=partial(_same, kernels), formats=weight_format)
