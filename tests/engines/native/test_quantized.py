"""The engine with its matrices in 8 and 4 bits: quantized when they are loaded, or stored so."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
import torch

from sagellm.accel.quantization.round_to_nearest import RoundToNearest
from sagellm.core.config import Config
from sagellm.core.errors import ModelError
from sagellm.core.protocols.fusion import KernelSet
from sagellm.engines.build import build_backend, load_config
from sagellm.engines.native.matrices import PackedQuantizedMatrix
from tests.engines.native.driver import Driver, RecordingBackend, Running, attention_of, mlp_of, native_model
from tests.tiny_models import VOCAB, save_tiny

MODELS = ("llama-head80-tied", "llama-biases", "mistral-window", "qwen3", "opt-post-norm-projected")


def backend(
    folder: Path, bits: int | None, kernels: KernelSet | None, dtype: str = "float32"
) -> RecordingBackend:
    return RecordingBackend(
        folder, num_blocks=128, max_num_seqs=8, block_size=8, threads=1, dtype=dtype,
        kernels=None if kernels is None else lambda _: kernels,
        quantizer=None if bits is None else RoundToNearest(bits),
    )  # fmt: skip


def prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCAB) for _ in range(length)]


def answers(made: RecordingBackend, *, chunks: tuple[int, ...] = (10_000,), gap: int = 0) -> list[Running]:
    """Three prompts of 5, 21 and 40 tokens, `gap` steps apart."""
    driver, done = Driver(made, chunks), []
    for length in (5, 21, 40):
        done.append(driver.add(prompt(length, length), 12))
        for _ in range(gap):
            driver.step()
    driver.run()
    return done


@pytest.mark.parametrize(("bits", "allowed"), [(8, 0.05), (4, 0.5)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model_within_what_bits_cost(
    name: str, bits: int, allowed: float, kernels: KernelSet, tmp_path: Path
) -> None:
    """The first token's, of three prompts: relative L2."""
    save_tiny(tmp_path, name)
    plain = torch.stack([one.logits[0] for one in answers(backend(tmp_path, None, None))])
    made = backend(tmp_path, bits, kernels)
    assert len(_packed(made)) == 4 * len(native_model(made)._layers) + 1
    found = torch.stack([one.logits[0] for one in answers(made)])
    assert 0 < (found - plain).norm() < allowed * plain.norm()


def _packed(made: RecordingBackend) -> list[PackedQuantizedMatrix]:
    layers = [
        layer
        for one in native_model(made)._layers
        for layer in (attention_of(one).qkv, attention_of(one).output, mlp_of(one).up, mlp_of(one).down)
    ]
    matrices = (*(part.matrix for part in layers), native_model(made)._head)
    return [matrix for matrix in matrices if isinstance(matrix, PackedQuantizedMatrix)]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_kernel_and_its_absence_are_the_same_model(bits: int, kernels: KernelSet, tmp_path: Path) -> None:
    """Without a kernel the codes' values are multiplied by activations that are not rounded."""
    save_tiny(tmp_path, "llama-biases")
    with_kernel, without = backend(tmp_path, bits, kernels), backend(tmp_path, bits, None)
    for mine, theirs in zip(answers(with_kernel), answers(without), strict=True):
        assert (mine.logits[0] - theirs.logits[0]).norm() < 0.05 * theirs.logits[0].norm()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens_in_any_batch(name: str, bits: int, kernels: KernelSet, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    alone = []
    made = backend(tmp_path, bits, kernels)
    for length in (5, 21, 40):
        driver = Driver(made)
        alone.append(driver.add(prompt(length, length), 12))
        driver.run()
    for gap in (0, 1, 3):
        together = answers(made, gap=gap)
        assert [one.outputs for one in together] == [one.outputs for one in alone]


def test_in_chunks_too(kernels: KernelSet, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3")
    made = backend(tmp_path, 8, kernels)
    whole = [one.outputs for one in answers(made)]
    assert [one.outputs for one in answers(made, chunks=(1, 7, 16), gap=1)] == whole


def test_what_is_held_takes_less(kernels: KernelSet, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama-biases")
    made = backend(tmp_path, 4, kernels)
    layer = native_model(made)._layers[0]
    up = mlp_of(layer).up
    assert isinstance(up.matrix, PackedQuantizedMatrix)
    assert up.matrix.packed.codes.numel() == 2 * 112 * 96 // 2
    assert up.bias is not None
    assert up.bias.dtype == torch.float32
    embedding = native_model(made)._embed
    assert embedding is not None
    assert embedding.dtype == torch.float32
    assert made.get_kv_schema().model_fingerprint.endswith("-int4")


def test_a_tied_head_is_quantized_and_the_embedding_is_not(kernels: KernelSet, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama-head80-tied")
    made = backend(tmp_path, 4, kernels)
    embedding = native_model(made)._embed
    assert embedding is not None
    assert embedding.dtype == torch.float32
    head = native_model(made)._head
    assert isinstance(head, PackedQuantizedMatrix)
    assert head.packed.bits == 8


def test_without_a_kernel_it_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path, "llama-biases")
    with caplog.at_level(logging.WARNING):
        backend(tmp_path, 8, None)
    assert [record.name for record in caplog.records] == ["sagellm.quantization"]
    assert "the first): there is no kernel" in caplog.text


def test_double_precision_has_no_kernel(
    kernels: KernelSet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama-biases")
    assert not _packed(backend(tmp_path, 8, kernels, "float64"))
    assert "no kernel for torch.float64" in caplog.text


def test_a_weight_that_is_not_finite_is_named(kernels: KernelSet, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama-biases")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"layers\.1\.down\.weight holds values that are not finite"):
        backend(tmp_path, 8, kernels)


def test_the_setting() -> None:
    made = build_backend(settings("int8"))
    schema = made.capability().kv_schema
    assert schema is not None
    assert schema.model_fingerprint.endswith("-int8")
    made.close()


def settings(quantization: str) -> Config:
    small = {"kv.num_blocks": 8, "model.max_model_len": 64, "engine.threads": 1}
    given = {"model.quantization": quantization, **small}
    return load_config(cli=given, environ={}).config
