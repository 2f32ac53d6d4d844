"""`sagellm doctor`: what is here, what is missing, what would fit."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from sagellm.cli import doctor
from sagellm.cli._machine import Device, as_text, devices, read_meminfo
from sagellm.cli._model_size import size_of
from sagellm.core.errors import ModelError

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def write_weights(folder: Path, shapes: dict[str, list[int]]) -> None:
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    data = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)


def test_a_whole_installation_exits_0(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(model, {"a": [10, 3], "b": [7]})
    monkeypatch.setattr(doctor, "demo_model_folder", lambda: model)
    result = cli("doctor", "--port", "0")
    assert result.exit_code == 0, result.stdout
    assert result.stdout.endswith("ready to serve\n")
    assert "0.0 M parameters" in result.stdout
    assert "384 bytes of KV per token" in result.stdout


@pytest.mark.parametrize("package", ["torch", "fastapi"])
def test_a_missing_package_exits_1_and_says_what_to_install(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    write_weights(model, {"a": [1]})
    monkeypatch.setattr(doctor, "demo_model_folder", lambda: model)
    monkeypatch.setattr(doctor, "_version_of", lambda name: None if name == package else "1.0")
    result = cli("doctor", "--port", "0")
    assert result.exit_code == 1
    assert f"cannot serve: missing {package}; pip install '{doctor.REQUIRED[package]}'" in result.stdout


def test_a_missing_demo_model_exits_1(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "demo_model_folder", lambda: tmp_path)
    result = cli("doctor", "--port", "0")
    assert result.exit_code == 1
    assert "missing the demo model" in result.stdout


def test_a_taken_port_is_said_and_is_no_failure(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights(model, {"a": [1]})
    monkeypatch.setattr(doctor, "demo_model_folder", lambda: model)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = cli("doctor", "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 0
    assert "choose another with --host and --port" in result.stdout


@pytest.mark.parametrize("host", ["no such host", "x" * 300])
def test_a_host_that_is_none_is_said(
    cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    write_weights(model, {"a": [1]})
    monkeypatch.setattr(doctor, "demo_model_folder", lambda: model)
    assert "choose another with --host" in cli("doctor", "--host", host).stdout


@pytest.mark.parametrize("name", ["/nonexistent", "./here", "a/b/c", "~/nowhere", ""])
def test_a_model_that_is_none_exits_2(
    cli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_weights(model, {"a": [1]})
    monkeypatch.setattr(doctor, "demo_model_folder", lambda: model)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = cli("doctor", name or str(empty), "--port", "0")
    assert (result.exit_code, "ready" in result.stdout) == (2, False)
    assert result.stderr.startswith(f"sagellm: cannot serve {name or empty}: ")
    assert result.stderr.count("\n") == 1


def test_a_model_of_the_hub_may_come(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(model, {"a": [1]})
    monkeypatch.setattr(doctor, "demo_model_folder", lambda: model)
    assert cli("doctor", "Qwen/Qwen3-0.6B", "--port", "0").exit_code == 0


def test_size_from_the_shape_alone(model: Path) -> None:
    size = size_of(model)
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    assert size.num_parameters == 3 * layer + 100 * 64
    assert size.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert (size.weight_bytes, size.dtype) == (size.num_parameters * 2, "bfloat16")
    assert size_of(model, "float32").kv_bytes_per_token == 2 * size.kv_bytes_per_token


def test_size_from_the_weight_files(model: Path) -> None:
    write_weights(model, {"a": [10, 3], "b": [7]})
    assert size_of(model).num_parameters == 37


def test_a_folder_without_a_shape_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        size_of(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(ModelError, match="does not describe a decoder"):
        size_of(tmp_path)


def test_what_fits_counts_tokens_in_the_share(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = size_of(model)
    free = size.weight_bytes + 6000 * size.kv_bytes_per_token
    monkeypatch.setattr(doctor, "demo_model_folder", lambda: model)
    monkeypatch.setattr(doctor, "devices", lambda **_: [Device("cpu", "a CPU", 2 * free, free)])
    told = cli("doctor", "--port", "0").stdout
    assert "384 bytes of KV per token: 1500 tokens, 576.0 kB of 576.0 kB (25% of what is free)" in told
    assert "room for 2 requests of 512 tokens at once" in told
    assert "48 tokens" in cli("doctor", "--port", "0", "--num-blocks", "3").stdout
    assert (
        "256 tokens"
        in cli("doctor", "--port", "0", "--set", "scheduler.max_num_seqs=1", "--max-model-len", "256").stdout
    )
    small = [Device("cpu", "a CPU", 10, 10)]
    monkeypatch.setattr(doctor, "devices", lambda **_: small)
    assert "does not fit" in cli("doctor", "--port", "0").stdout


def test_there_is_always_a_cpu() -> None:
    cpu = devices(torch_here=False)[-1]
    assert cpu.name == "cpu"
    assert 0 < cpu.free_bytes <= cpu.total_bytes


def test_meminfo_is_read_in_bytes() -> None:
    assert read_meminfo("MemTotal:  2 kB\nHugePages_Total:  0\n") == {"MemTotal": 2048}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (2_500_000, "2.5 MB"), (80 * 10**9, "80.0 GB")],
)
def test_bytes_as_text(num_bytes: int, text: str) -> None:
    assert as_text(num_bytes) == text
