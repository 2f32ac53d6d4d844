"""`sagellm config show`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.config_layers import KEYS


def rows(result: Any) -> dict[str, list[str]]:
    assert result.exit_code == 0, result.stderr
    return {line.split()[0]: line.split(None, 2)[1:] for line in result.stdout.splitlines()}


def test_every_key_in_order(cli: Any) -> None:
    shown = rows(cli("config", "show"))
    assert tuple(shown) == KEYS
    assert shown["kv.block_size"] == ["16"]
    assert shown["model.name"] == ["none"]
    assert shown["kv.prefix_caching"] == ["true"]


def test_origin_names_the_layer(cli: Any, tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "sage.yaml"
    file.write_text("kv:\n  block_size: 32\n  num_blocks: 100\n")
    monkeypatch.setenv("SAGELLM_KV_NUM_BLOCKS", "200")
    options = ["--config", str(file), "--preset", "low_latency", "--port", "0", "--model", "m"]
    shown = rows(cli("config", "show", "--origin", *options))
    assert shown["kv.block_size"] == ["32", str(file)]
    assert shown["kv.num_blocks"] == ["200", "environment SAGELLM_KV_NUM_BLOCKS"]
    assert shown["scheduler.max_num_seqs"] == ["16", "preset low_latency"]
    assert shown["server.port"] == ["0", "command line"]
    assert shown["model.name"] == ["m", "command line"]
    assert shown["kv.index"] == ["radix", "default"]


def test_the_file_and_the_preset_come_from_the_environment_too(
    cli: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    file = tmp_path / "sage.yaml"
    file.write_text("kv: {block_size: 8}\n")
    monkeypatch.setenv("SAGELLM_CONFIG", str(file))
    monkeypatch.setenv("SAGELLM_PRESET", "throughput")
    shown = rows(cli("config", "show"))
    assert (shown["kv.block_size"], shown["scheduler.max_num_seqs"]) == (["8"], ["256"])


def test_a_key_of_the_file_that_does_not_exist_names_the_file(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "sage.yaml"
    file.write_text("kv: {blocksize: 8}\n")
    result = cli("config", "show", "--config", str(file))
    assert result.exit_code == 2
    assert f"unknown key 'kv.blocksize' in {file}" in result.stderr.replace("\n", "")
    assert "kv.block_size" in result.stderr


def test_the_api_key_is_never_shown(cli: Any) -> None:
    result = cli("config", "show", "--api-key", "hush-hush")
    assert "hush-hush" not in result.stdout
    assert rows(result)["server.api_key"] == ["********"]


def test_meaning(cli: Any) -> None:
    assert "tokens per block" in cli("config", "show", "--meaning").stdout


def test_a_key_given_twice_names_both_lines(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "sage.yaml"
    for text, where in (
        ("kv:\n  block_size: 8\nkv:\n  num_blocks: 9\n", "'kv' is given twice, in line 1 and in line 3"),
        ("kv: {block_size: 8, block_size: 9}\n", "'block_size' is given twice, in line 1 and in line 1"),
        ("kv.block_size: 8\nkv: {block_size: 9}\n", "kv.block_size is given twice"),
        ("kv: {block_size: 2024-99-99}\n", "cannot read the configuration file"),
        ("[" * 10_000, "cannot read the configuration file"),
    ):
        file.write_text(text)
        result = cli("config", "show", "--config", str(file))
        assert result.exit_code == 2
        assert where in result.stderr
        assert str(file) in result.stderr


def test_merges_of_yaml_still_work(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "sage.yaml"
    file.write_text("kv: {<<: {block_size: 8, num_blocks: 1}, num_blocks: 9}\n")
    shown = rows(cli("config", "show", "--config", str(file)))
    assert (shown["kv.block_size"], shown["kv.num_blocks"]) == (["8"], ["9"])


def test_aliases_that_make_a_small_file_large_are_refused(cli: Any, tmp_path: Path) -> None:
    """Ten names, each nine times in the next one: 3.5 billion values."""
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 11)]
    texts = {
        "\n".join(lines): "its aliases make more than 10000 values",
        "kv: &a\n  pool: [*a]\n": "its aliases make more than 10000 values",
        "kv: {index: radix}\n" + "# text\n" * 40_000: "larger than 262144 bytes",
    }
    for text, why in texts.items():
        (tmp_path / "sage.yaml").write_text(text)
        result = cli("config", "show", "--config", str(tmp_path / "sage.yaml"))
        assert (result.exit_code, why in result.stderr) == (2, True), result.output


def test_aliases_of_a_usual_file_work(cli: Any, tmp_path: Path) -> None:
    shares = "tenant_shares: {a: &half {guaranteed: 0.5}, b: *half}"
    (tmp_path / "sage.yaml").write_text(f"kv: {{{shares}}}\n")
    assert "kv.tenant_shares" in rows(cli("config", "show", "--config", str(tmp_path / "sage.yaml")))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_configuration_that_is_no_file_is_refused_at_once(cli: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero"):
        result = cli("config", "show", "--config", name)
        assert result.exit_code == 2
        assert "it is a pipe or a device, not a file" in result.stderr
