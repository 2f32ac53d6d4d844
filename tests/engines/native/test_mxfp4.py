"""gpt-oss checkpoints as they are published: experts of all layers in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sagellm.accel.fusion.cpu import cpu_kernels
from sagellm.accel.quantization.formats import mxfp4
from sagellm.accel.quantization.weight_format import weight_format
from sagellm.core.errors import MissingWeightsError, WeightShapeError
from sagellm.core.protocols.fusion import KernelSource
from sagellm.engines.native.footprint import footprint
from tests.engines.native.driver import Driver, RecordingBackend
from tests.tiny_models import save_tiny

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def published(folder: Path) -> dict[str, torch.Tensor]:
    """Rewrites a plain folder with experts in MXFP4, and as their values in another; returns those."""
    generator = torch.Generator().manual_seed(0)
    file = folder / "model.safetensors"
    plain: dict[str, torch.Tensor] = load_file(file)
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = plain[name].shape
        codes = torch.randint(0, 16, (count, outputs, inputs), generator=generator)
        scales = torch.randint(122, 125, (count, outputs, inputs // 32), generator=generator)
        signs = torch.where(codes > 7, -1.0, 1.0)
        values = torch.tensor(VALUES)[codes % 8] * signs * 2.0 ** (scales - 127).repeat_interleave(32, dim=-1)
        plain[name] = values.transpose(1, 2).contiguous()
        del packed[name]
        packed[name + "_blocks"] = (
            (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(count, outputs, inputs // 32, 16)
        )
        packed[name + "_scales"] = scales.to(torch.uint8)
    save_file(packed, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return plain


def answer(folder: Path, kernels: KernelSource | None = None) -> tuple[list[int], list[torch.Tensor]]:
    backend = RecordingBackend(
        folder, num_blocks=64, block_size=8, threads=1, formats=weight_format, kernels=kernels
    )
    driver = Driver(backend)
    request = driver.add(range(3, 50), 12)
    driver.run()
    backend.close()
    return request.outputs, request.logits


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The same weights plain and published."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder in (plain, packed):
        save_tiny(folder, "gpt-oss")
    save_file(published(packed), plain / "model.safetensors", {"format": "pt"})
    return plain, packed


def test_published_experts_give_the_tokens_of_their_values(folders: tuple[Path, Path]) -> None:
    (expected, logits), (tokens, ours) = (answer(folder) for folder in folders)
    assert tokens == expected
    for one, other in zip(ours, logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_on_the_cpu_kernels_they_are_held_in_8_bits(folders: tuple[Path, Path]) -> None:
    kernels = cpu_kernels(1)
    if kernels.quantized is None:
        pytest.skip("no compiler")
    expected, logits = answer(folders[0])
    tokens, ours = answer(folders[1], cpu_kernels)
    assert tokens == expected
    for one, other in zip(ours, logits, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0)
    held, values = (
        footprint(folder, kernels=cpu_kernels, formats=weight_format).weight_bytes for folder in folders[::-1]
    )
    assert held < 0.75 * values


def test_every_number() -> None:
    blocks = torch.arange(16, dtype=torch.uint8) * 17  # every code twice
    made = mxfp4.expert(blocks.view(1, 1, 16), torch.tensor([[130]], dtype=torch.uint8)).values()
    expected = torch.tensor([sign * 8.0 * value for sign in (1, -1) for value in VALUES])
    assert made.view(16, 2).equal(expected[:, None].expand(16, 2))


def test_damaged_experts_are_refused(folders: tuple[Path, Path]) -> None:
    file = folders[1] / "model.safetensors"
    whole = load_file(file)
    name = next(name for name in whole if name.endswith("_scales"))
    save_file({key: value for key, value in whole.items() if key != name}, file)
    with pytest.raises(MissingWeightsError, match=name):
        answer(folders[1])
    save_file(whole | {name: whole[name][:2].contiguous()}, file)
    with pytest.raises(WeightShapeError, match=name):
        answer(folders[1])
