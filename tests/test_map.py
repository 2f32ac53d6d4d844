"""The walks of docs/map.md name files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "docs/map.md").read_text(encoding="utf-8")
WALKS = dict(re.findall(r"^### (Walk [^\n]+)\n.*?^```\n(.*?)^```", MAP, re.DOTALL | re.MULTILINE))
STEP = re.compile(r"(?P<file>[\w/]+\.py):(?P<name>[\w.]+)")


def test_there_are_three_walks() -> None:
    assert len(WALKS) == 3


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_fits_on_a_page_and_names_what_exists(walk: str) -> None:
    steps = WALKS[walk].splitlines()
    assert len(steps) <= 16
    for step in steps:
        found = STEP.match(step.strip())
        assert found, f"not `file:function`: {step!r}"
        path = ROOT / "src/sagellm" / found["file"]
        assert found["name"] in _definitions(path), f"{found['file']} has no {found['name']}"


def test_every_named_file_exists() -> None:
    table = MAP[MAP.index("## Where is") :]
    known = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()]
    for name in re.findall(r"`([\w/]+\.(?:py|h|cpp))`", table):
        assert any(path.endswith(f"/{name}") for path in known), (
            f"docs/map.md names {name}, which is not there"
        )


def _definitions(path: Path) -> set[str]:
    """Functions, classes, and methods as `Class.method`, of one file."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            names |= {
                f"{node.name}.{inner.name}"
                for inner in ast.walk(node)
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
    return names
