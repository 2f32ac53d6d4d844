"""`sagellm fleet chips` and `sagellm fleet manifests`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FILE = """
fleet:
  groups:
    prefill: {type: prefilling, chips: 0}
    decode: {type: decoding, count: 2, chips: 0}
"""


@pytest.fixture
def fleet_file(tmp_path: Path) -> str:
    file = tmp_path / "fleet.yaml"
    file.write_text(FILE, encoding="utf-8")
    return str(file)


def test_the_chips_of_this_host(cli: Any) -> None:
    result = cli("fleet", "chips")
    assert result.exit_code == 0, result.output
    assert "cpu:0" in result.stdout
    assert "core(s)" in result.stdout


def test_which_instance_gets_which(cli: Any, fleet_file: str) -> None:
    result = cli("fleet", "chips", "--config", fleet_file)
    assert result.exit_code == 0, result.output
    shown = result.stdout.partition("instances, for a model of 8 B parameters")[2].split("\n")
    names = [line.split(":")[0].strip() for line in shown if "core(s)" in line]
    assert names == ["prefill-0", "decode-0", "decode-1"]


def test_what_does_not_fit_is_refused(cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: {groups: {a: {chips: 64}}}", encoding="utf-8")
    result = cli("fleet", "chips", "--config", str(file))
    assert result.exit_code == 2
    assert "a-0 needs 64 chip(s)" in result.stderr


def test_measured_figures_are_saved_and_used(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagellm.engines.native.measure.matrix_flops", lambda device: 3e12)
    monkeypatch.setattr("sagellm.engines.native.measure.read_bandwidth", lambda device: 7e9)
    file = tmp_path / "chips.json"
    result = cli("fleet", "chips", "--measure", "--save", str(file))
    assert result.exit_code == 0, result.output
    assert "(measured: self-benchmark of this machine)" in result.stdout
    assert json.loads(file.read_text(encoding="utf-8"))["cpu:0"]["flops"] > 0
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(f"fleet: {{chips_file: '{file}'}}", encoding="utf-8")
    assert "measured" in cli("fleet", "chips", "--config", str(fleet)).stdout
    assert cli("fleet", "chips", "--save", str(file)).exit_code == 2


def test_manifests_are_written(cli: Any, fleet_file: str, tmp_path: Path) -> None:
    result = cli("fleet", "manifests", fleet_file, "--out", str(tmp_path / "k8s"), "--image", "mine:1")
    assert result.exit_code == 0, result.output
    written = [Path(line).name for line in result.stdout.split()]
    assert written == [
        "configmap.yaml", "front.yaml", "group-prefill.yaml", "group-decode.yaml", "secret.yaml.example",
    ]  # fmt: skip
    assert "mine:1" in (tmp_path / "k8s" / "front.yaml").read_text(encoding="utf-8")
