"""`sagellm topo`: this machine, recordings of others, and arguments that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.comm.topology.recorded import gpus, spaced_matrix


@pytest.fixture
def host(tmp_path: Path) -> str:
    """A recording of four GPUs in two pairs, each with a NIC."""

    def label(i: int, j: int) -> str:
        if i < 4 and j < 4:
            return "NV4" if i // 2 == j // 2 else "SYS"
        return "PIX" if (i if i < 4 else j) // 2 == (j if j >= 4 else i) - 4 else "SYS"

    file = tmp_path / "topo.txt"
    file.write_text(spaced_matrix([*gpus(4), "NIC0", "NIC1"], label, {"NUMA Affinity": ["0", "0", "1", "1"]}))
    return f"nvidia-smi={file}"


def test_this_machine(cli: Any) -> None:
    result = cli("topo")
    assert result.exit_code == 0, result.output
    assert "cpu:0" in result.stdout


def test_a_recorded_machine(cli: Any, host: str) -> None:
    result = cli("topo", "--recorded", host, "--group", "2", "--route", "cuda:0:nic:NIC1")
    assert result.exit_code == 0, result.output
    assert "cuda:2: nearest NICs: nic:NIC1; host memory: NUMA node 1" in result.stdout
    assert "group of 2: cuda:0, cuda:1:" in result.stdout
    assert "on 1 NUMA node(s)" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("cuda:0 -")


def test_forms(cli: Any, host: str, tmp_path: Path) -> None:
    text = cli("topo", "--recorded", host, "-f", "json").stdout
    assert len(json.loads(text)["devices"]) == 8
    declared = tmp_path / "declared.json"
    declared.write_text(text)
    again = cli("topo", "--recorded", f"declared={declared}", "-f", "json")
    assert json.loads(again.stdout) == json.loads(text)
    assert cli("topo", "--recorded", host, "-f", "dot").stdout.startswith("graph topology {")
    assert "nvidia-smi topo -m (reported)" in cli("topo", "--recorded", host, "-f", "links").stdout


def test_a_picture(cli: Any, host: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "topo.svg"
    assert cli("topo", "--recorded", host, "--picture", str(file)).exit_code == 0
    assert "<svg" in file.read_text()
    wrong = cli("topo", "--recorded", host, "--picture", str(tmp_path / "topo.nothing"))
    assert wrong.exit_code == 2
    assert "nothing" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["-f", "xml"], "matrix, links, json, dot"),
        (["--recorded", "topo.txt"], "NAME=FILE"),
        (["-f", "json", "--group", "2"], "matrix or links"),
        (["--picture", "nosuffix"], "suffix"),
        (["--recorded", "nvidia-smi=nowhere.txt"], "No such file"),
        (["--recorded", "lspci=HOST"], "nvidia-smi, npu-smi"),
        (["--recorded", "hwloc=HOST"], "no XML"),
        (["--recorded", "nvidia-smi=HOST", "--group", "5"], "no 5 accelerators"),
        (["--recorded", "nvidia-smi=HOST", "--group", "0"], "at least 1"),
        (["--recorded", "nvidia-smi=HOST", "--route", "cuda:0"], "name two devices of cpu:0"),
    ],
)
def test_wrong_arguments_say_what_would_work(cli: Any, host: str, arguments: list[str], reason: str) -> None:
    file = host.partition("=")[2]
    result = cli("topo", *(each.replace("HOST", file) for each in arguments))
    assert result.exit_code == 2
    assert reason in result.stderr
