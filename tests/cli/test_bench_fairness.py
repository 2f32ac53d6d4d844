"""`sagellm bench fairness`: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_help(cli: Any) -> None:
    result = cli("bench", "fairness", "--help")
    assert result.exit_code == 0
    assert "three tenants" in result.stdout


def test_it_prints_a_table_and_writes_json(cli: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = ("--seed", "3", "--policy", "fifo", "--capacity", "100")
    result = cli("bench", "fairness", *given, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    values = json.loads(out.read_text())
    assert values["settings"] == {"seed": 3, "policies": ["fifo"], "capacities": ["100"]}
    cases = [(one["policy"], one["capacity"]) for one in values["outcomes"]]
    assert cases == [("lru", "100"), ("fifo", "100")]
    assert values["trace"]["name"] in result.stdout
    for one in values["outcomes"]:
        [line] = [
            line
            for line in result.stdout.splitlines()
            if line.split()[:2] == [one["capacity"], one["policy"]]
        ]
        assert f"{one['jain']:.3f}" in line
        assert f"{one['hit_ratio']:.2%}" in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policy", "nope"], "unknown policy 'nope'"),
        (["--capacity", "0%"], "capacity '0%': write blocks from 1 on"),
        (["--out", "no/such/folder/out.json"], "name a file in a folder that exists"),
    ],
)
def test_it_explains_what_it_refuses(cli: Any, arguments: list[str], text: str) -> None:
    result = cli("bench", "fairness", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout
