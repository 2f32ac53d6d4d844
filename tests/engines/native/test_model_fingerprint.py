"""The fingerprint of a model: what changes it, what does not, and what it may miss."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.checkpoint import SINGLE_FILE, Checkpoint
from sagellm.engines.native.model_fingerprint import LINE_BYTES, PAGE_BYTES, WHOLE_BYTES, model_fingerprint
from tests.effort import examples


def fingerprint(folder: Path, dtype: str = "float32") -> str:
    return model_fingerprint(folder, Checkpoint(folder), dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def test_every_key_of_config_json_counts(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    seen = {fingerprint(folder)}
    for key in (*config, "a_new_key"):
        path.write_text(json.dumps({**config, key: "changed"}), encoding="utf-8")
        seen.add(fingerprint(folder))
    assert len(seen) == len(config) + 2


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"])
def test_the_tokenizer_counts_and_the_chat_template_does_not(folder: Path, file: str) -> None:
    before = fingerprint(folder)
    (folder / "chat_template.jinja").write_text("x")
    (folder / "generation_config.json").write_text("{}")
    assert fingerprint(folder) == before
    with (folder / file).open("a") as opened:
        opened.write(" ")
    assert fingerprint(folder) != before


def change_one_value(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name].view(-1)[len(tensors[name].view(-1)) // 2] += 0.5


def test_one_value_of_any_small_tensor_counts(folder: Path) -> None:
    before, stored = fingerprint(folder), load_file(folder / SINGLE_FILE)
    small = [name for name, tensor in stored.items() if tensor.nbytes <= WHOLE_BYTES]
    assert any("norm" in name for name in small)
    for name in small:
        tensors = {key: tensor.clone() for key, tensor in stored.items()}
        change_one_value(tensors, name)
        save_file(tensors, folder / SINGLE_FILE)
        assert fingerprint(folder) != before, name


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "name": lambda tensors: tensors.update(other=tensors.pop("large")),
    "shape": lambda tensors: tensors.update(large=tensors["large"].view(512, -1)),
    "dtype": lambda tensors: tensors.update(large=tensors["large"].view(torch.int32)),
    "the sign of all": lambda tensors: tensors["large"].neg_(),
    "a row": lambda tensors: tensors["large"][417].add_(1),
    "a column of lines": lambda tensors: tensors["large"][:, 16:32].add_(1),
    "the end": lambda tensors: tensors["large"][-1, -1:].add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_fine_tune_of_one_matrix_changes_is_seen(folder: Path, change: str) -> None:
    """Rows of 8 KiB, and a last part of a page, which is read whole."""
    rows, columns = 1024, PAGE_BYTES // 2
    base = torch.arange(rows * columns + 7, dtype=torch.float32)
    tensors = {"large": base[:-7].view(rows, columns).clone()}
    if change == "the end":
        tensors = {"large": base[None].clone()}
    save_file(tensors, folder / SINGLE_FILE)
    before = fingerprint(folder)
    CHANGES[change](tensors)
    save_file(tensors, folder / SINGLE_FILE)
    assert fingerprint(folder) != before


def test_a_few_values_are_missed_as_often_as_is_said(folder: Path) -> None:
    count, changed = 1 << 18, 100
    values = torch.zeros(count, dtype=torch.float16)
    draw, missed, trials = np.random.default_rng(3), 0, examples(400)
    save_file({"large": values}, folder / SINGLE_FILE)
    before = fingerprint(folder)
    for _ in range(trials):
        some = values.clone()
        some[torch.from_numpy(draw.integers(0, count, changed))] = 1
        save_file({"large": some}, folder / SINGLE_FILE)
        missed += fingerprint(folder) == before
    expected = trials * (63 / 64) ** changed
    assert abs(missed - expected) < 5 * expected**0.5


def test_many_tensors_count_in_order_of_their_names(folder: Path) -> None:
    """They are hashed side by side: the same every time, and another one where two are exchanged."""
    tensors = {f"large {i}": torch.full((WHOLE_BYTES,), i, dtype=torch.int16) for i in range(16)}
    save_file(tensors, folder / SINGLE_FILE)
    assert len({fingerprint(folder) for _ in range(8)}) == 1
    before = fingerprint(folder)
    tensors["large 3"], tensors["large 4"] = tensors["large 4"], tensors["large 3"]
    save_file(tensors, folder / SINGLE_FILE)
    assert fingerprint(folder) != before


def test_dtype_and_quantization_count(folder: Path) -> None:
    assert len({fingerprint(folder, dtype) for dtype in ("float32", "bfloat16", "float16")}) == 3
    made = {
        NativeBackend(folder, num_blocks=1, threads=1, dtype=dtype).get_kv_schema().model_fingerprint
        for dtype in ("float32", "bfloat16")
    }
    assert len(made) == 2


def test_lines_are_those_of_a_plain_reading(folder: Path) -> None:
    values = torch.arange(WHOLE_BYTES, dtype=torch.int32)[: WHOLE_BYTES // 4 + 3000]
    save_file({"large": values}, folder / SINGLE_FILE)
    raw, digest = values.numpy().tobytes(), hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little") + data)

    add(b"float32")
    for name in ("config.json", "tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"):
        add((folder / name).read_bytes() if (folder / name).exists() else b"")
    add(f"large I32 {tuple(values.shape)}".encode())
    of_values, pages = hashlib.sha256(), len(raw) // PAGE_BYTES
    for page, line in enumerate(np.random.default_rng(len(raw)).integers(0, 64, pages, np.uint8)):
        begin = page * PAGE_BYTES + int(line) * LINE_BYTES
        of_values.update(raw[begin : begin + LINE_BYTES])
    of_values.update(raw[pages * PAGE_BYTES :])
    digest.update(of_values.digest())
    assert fingerprint(folder) == digest.hexdigest()[:32]
