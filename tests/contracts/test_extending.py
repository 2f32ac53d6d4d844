"""The eviction policy of docs/extending.md works as it says there, in the user's working directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NAME = "my_policy:Mine"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory that holds the policy of the document, and nothing else."""
    text = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- tested: eviction policy -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found is not None
    (tmp_path / "my_policy.py").write_text(found[1], encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str, **environment: str) -> str:
    """Output of a command in the folder, which is not on the path of modules; fails where it fails."""
    paths = os.pathsep.join(str(REPOSITORY / one) for one in ("src", "tools", "."))
    done = subprocess.run(
        [sys.executable, "-P", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_passes_the_contract_tests(folder: Path) -> None:
    tests = str(REPOSITORY / "tests" / "contracts" / "test_eviction.py")
    shown = run(
        folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", "my_policy", tests,
        SAGELLM_POLICIES=NAME,
    )  # fmt: skip
    assert re.search(r"\b3 passed", shown), shown


def test_replay_takes_it_from_the_working_directory(folder: Path) -> None:
    trace = str(REPOSITORY / "tests" / "golden" / "traces" / "chat.jsonl")
    shown = run(
        folder, "-m", "sagellm", "replay", trace, "--policy", "lru", "--policy", NAME, "--capacity", "10%",
        "--jobs", "2",
    )  # fmt: skip
    lines = {line.split()[0]: line.split()[3] for line in shown.splitlines() if "10%" in line}
    assert abs(float(lines[NAME]) - float(lines["lru"])) < 1.0, shown


def test_a_model_runs_with_it(folder: Path) -> None:
    pytest.importorskip("torch")
    run(folder, "-m", "sagellm", "run", "--set", f"kv.eviction={NAME}", "--max-tokens", "2", "Hello")


def test_a_module_that_is_nowhere_is_named(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sagellm", "run", "--set", "kv.eviction=no_such_module:Mine", "Hello"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode
    assert "there is no module 'no_such_module'" in done.stderr
    assert "Traceback" not in done.stderr
