"""The GGUF file of a draft pair has its weights, in llama.cpp's order, and its tokenizer."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demo_net import load_net, rotate
from sagellm.engines.native import DEMO_MODEL

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
peers_gguf = pytest.importorskip("benchmarks.peers_gguf")


def written(folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["peers_gguf.py", str(folder), str(out), "--float32"])
    peers_gguf.main()
    return gguf.GGUFReader(out)


def test_the_file_has_weights_and_tokens_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = written(DEMO_MODEL, tmp_path / "demo.gguf", monkeypatch)
    weights = dict(load_net(DEMO_MODEL).state_dict())
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert np.array_equal(found["token_embd.weight"], weights["model.embed_tokens.weight"].numpy())
    name = "model.layers.2.self_attn.v_proj.weight"
    assert np.array_equal(found["blk.2.attn_v.weight"], weights[name].numpy())
    assert len(found) == len(weights)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    vocabulary = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert {token: i for i, token in enumerate(tokens)} == {**vocabulary, "<think>": 766, "</think>": 767}
    assert reader.fields["tokenizer.ggml.eos_token_id"].contents() == 2


def test_turned_neighbours_give_the_scores_of_turned_halves() -> None:
    generator, dim, angles = torch.Generator().manual_seed(0), 8, torch.arange(4) * 0.3 + 0.1
    cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)

    def neighbours(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[0::2], x[1::2]
        c, s = cos[: dim // 2], sin[: dim // 2]
        return torch.stack([even * c - odd * s, even * s + odd * c], dim=1).flatten()

    query, key = torch.randn(2, dim, 1, generator=generator)
    swapped = [torch.from_numpy(peers_gguf.with_neighbours(x.numpy(), dim))[:, 0] for x in (query, key)]
    own = torch.dot(rotate(query[:, 0], cos, sin), key[:, 0])
    assert torch.allclose(torch.dot(neighbours(swapped[0]), swapped[1]), own)


def test_another_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path / "other"))
    other = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    other["pre_tokenizer"] = {"type": "ByteLevel"}
    (folder / "tokenizer.json").write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(ValueError, match="not the demo model's tokenizer"):
        written(folder, tmp_path / "other.gguf", monkeypatch)
