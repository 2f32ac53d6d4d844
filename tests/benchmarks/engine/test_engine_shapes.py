"""Models of random weights: what is written is what the native engine loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sagellm.benchmarks.engine.shapes import SHAPES, as_bfloat16, shape_named, write_model
from sagellm.core.errors import ConfigError
from sagellm.engines.native.architectures import read_config, read_spec
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.weights import check, parameters

SMALL = SHAPES["tiny"].changed(vocab_size=1000, hidden_size=64)


@pytest.mark.parametrize("tied", [True, False])
def test_the_engine_finds_every_tensor(tmp_path: Path, tied: bool) -> None:
    write_model(SMALL.changed(tie_word_embeddings=tied), tmp_path)
    spec, checkpoint = read_spec(read_config(tmp_path)), Checkpoint(tmp_path)
    check(parameters(spec), checkpoint)
    assert (spec.vocab_size, spec.num_layers, spec.tied, spec.dtype) == (1000, 2, tied, "bfloat16")
    assert {entry.dtype for entry in checkpoint.entries.values()} == {"BF16"}


def test_weights_are_normal_and_norms_are_one(tmp_path: Path) -> None:
    write_model(SMALL, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) == 2 + 9 * SMALL.config["num_hidden_layers"]
    embed = stored["model.embed_tokens.weight"].float()
    assert embed.shape == (1000, 64)
    assert embed.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(embed.mean().item()) < 0.001
    assert bool((stored["model.norm.weight"] == 1).all())


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        write_model(SMALL, tmp_path / name, seed)
    first, second, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == second != other


@pytest.mark.parametrize(
    ("name", "parameters_m"),
    [("S", 184), ("M", 596), ("tiny", 9.4), ("gemma3", 183), ("qwen3-moe", 384), ("gpt-oss", 293)],
)
def test_sizes_are_what_they_are_called(name: str, parameters_m: float) -> None:
    count = sum(int(np.prod(extents)) for _, extents in SHAPES[name].tensors())
    assert count / 1e6 == pytest.approx(parameters_m, rel=0.02)
    assert json.dumps(dict(SHAPES[name].config))


def test_rounding_is_torchs() -> None:
    values = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)
    values[:5] = [0.0, -0.0, 1.00390625, 1.01171875, 3.0e38]  # ties to even, both ways, and a large one
    ours = torch.from_numpy(as_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).to(torch.bfloat16))


def test_an_unknown_shape() -> None:
    with pytest.raises(ConfigError, match="no shape 'XL': use S, M, 8B, tiny, gemma3"):
        shape_named("XL")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write a model into .*none"):
        write_model(SMALL, tmp_path / "none")
