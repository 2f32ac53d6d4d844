"""`sagellm overlap`: what it prints and draws, and how it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


def shown(cli: Any, *arguments: str) -> str:
    result = cli("overlap", *arguments)
    assert result.exit_code == 0, result.stderr
    text: str = result.stdout
    return text


def milliseconds(text: str) -> tuple[float, float]:
    found = re.search(r"without overlap ([\d.,]+) ms, with overlap ([\d.,]+) ms", text)
    assert found
    alone, overlapped = (float(number.replace(",", "")) for number in found.groups())
    return alone, overlapped


def test_kv_is_sent_while_it_is_computed(cli: Any) -> None:
    text = shown(cli, "kv-send", "--tokens", "5000", "--network", "25", "--width", "40")
    assert text.startswith("llama-3.1-8b on h100-80g: KV of 5000 tokens sent at 25 GB/s")
    alone, overlapped = milliseconds(text)
    assert overlapped < alone
    assert [len(line.split("|")[1]) for line in text.splitlines() if "|" in line] == [40, 40]
    assert "% hidden" in text


def test_cached_kv_is_loaded_while_the_rest_is_computed(cli: Any) -> None:
    alone, overlapped = milliseconds(shown(cli, "kv-load", "--cached", "16384", "--tokens", "3000"))
    assert overlapped < alone


def test_micro_batches_hide_collectives_and_read_the_weights_twice(cli: Any) -> None:
    many = milliseconds(shown(cli, "micro-batches", "--tensor-parallel", "4", "--tokens", "8192"))
    few = milliseconds(
        shown(cli, "micro-batches", "--tensor-parallel", "4", "--tokens", "64", "--chunk", "64")
    )
    assert many[1] < many[0]
    assert few[1] > few[0]


def test_micro_batches_hide_collectives_alone(cli: Any) -> None:
    """The second half of a chunk attends to the first, too: no computation goes away."""
    arguments = ("--tensor-parallel", "4", "--tokens", "131072", "--chunk", "131072")
    alone, overlapped = milliseconds(shown(cli, "micro-batches", *arguments))
    assert 0.85 * alone < overlapped < alone


def test_the_picture(cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = shown(cli, "kv-send", "--tokens", "256", "--plots", str(tmp_path))
    assert text.splitlines()[-1] == str(tmp_path / "overlap.png")
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["kv-sned"], "no pattern 'kv-sned'. Did you mean 'kv-send'?"),
        (["micro-batches"], "give --tensor-parallel 2 or more"),
        (["kv-send", "--tokens", "0"], "at least 1 token"),
        (["kv-send", "--network", "0"], "1 byte per second or more"),
        (["kv-send", "--width", "0"], "at least one column"),
        (["kv-send", "--device", "h1000"], "no device 'h1000'"),
        (["kv-send", "--plots", "/nowhere/at/all"], "there is no folder"),
    ],
)
def test_what_cannot_be_planned_is_refused(cli: Any, arguments: list[str], reason: str) -> None:
    result = cli("overlap", *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
