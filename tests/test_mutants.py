"""The parts of `tools/mutants.py` on which its figures rest."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

import mutants


@pytest.mark.parametrize(
    "path", ["engines/planner.py", "kvmgr/prefix_cache/_tree.py", "kvmgr/manager/tables.py"]
)
def test_the_statement_of_each_mutant_is_noted_when_it_is_executed(path: str) -> None:
    marks = set(re.findall(rf"_executed\.add\('({path}:\d+)'\)", mutants.with_marks(path)))
    statements = {one.statement for one in mutants.mutants(path)}
    assert statements - {0}
    assert {f"{path}:{line}" for line in statements - {0}} <= marks


def test_marks_change_nothing_but_note_what_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "kvmgr/prefix_cache/_tree.py"
    source = mutants.with_marks(path).replace("from mutants_plugin import EXECUTED as _executed", "")
    executed: set[str] = set()
    scope: dict[str, object] = {"_executed": executed, "__name__": "sagellm.kvmgr.prefix_cache._marked"}
    exec(compile(source, path, "exec"), scope)
    common_blocks = scope["common_blocks"]
    assert callable(common_blocks)
    executed.clear()
    assert common_blocks(b"aabbcc", b"xaabbdd", 1, 7, 2) == 2
    first, *_ = sorted(int(line.rpartition(":")[2]) for line in executed)
    text = (mutants.PACKAGE / path).read_text(encoding="utf-8").splitlines()
    assert text[first - 1].strip().startswith("low, high =")


@pytest.mark.parametrize("path", ["engines/planner.py", "kvmgr/kv_pool/pool_base.py"])
def test_each_mutant_is_another_source_under_another_name(path: str) -> None:
    every = list(mutants.mutants(path))
    unchanged = ast.unparse(ast.parse((mutants.PACKAGE / path).read_text(encoding="utf-8")))
    assert len({one.name for one in every}) == len(every)
    assert len({unchanged, *(one.source for one in every)}) == len(every) + 1


def test_first_failure_names_the_test_that_fails(tmp_path: Path) -> None:
    package = shutil.copytree(mutants.PACKAGE, tmp_path / "sagellm")
    assert mutants.first_failure(tmp_path, ["tests/kvmgr/test_radix.py"], 60) == ""
    with (package / "kvmgr/prefix_cache/_tree.py").open("a", encoding="utf-8") as file:
        file.write("\n\ndef common_blocks(*_: object) -> int:\n    return 0\n")
    failed = mutants.first_failure(tmp_path, ["tests/kvmgr/test_radix.py"], 60)
    assert failed.startswith("tests/kvmgr/test_radix.py::test_")
    assert " " not in failed


def test_each_listed_mutant_exists() -> None:
    """A name changes with its function: then it has to be judged again."""
    listed = set(mutants.equivalent())
    paths = {name.partition("::")[0] for name in listed}
    assert listed <= {one.name for path in paths for one in mutants.mutants(path)}
