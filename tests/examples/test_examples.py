"""Each example runs by itself, without a GPU, and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

PROMISED = {
    "01_integration.py": (
        r"request-2: 4 blocks reused, 5 new",
        r"request-4: 5 blocks asked for, 0 of 16 free\n +evicted the answers of request-1",
        r"released: \d+ blocks free, \d+ cached",
    ),
    "02_simulate.py": (
        r"vllm-like: [\d.]+ requests/s, \d+% of the requests met the goal",
        r"adaptive: [\d.]+ requests/s, [1-9]\d*% of the requests met the goal",
    ),
}
"""Patterns that stand in what an example prints, in this order."""


def scripts() -> list[str]:
    return sorted(path.name for path in EXAMPLES.glob("*.py"))


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In another folder and a process of its own, as a user would."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SAGELLM_")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("script", scripts())
def test_it_runs_and_prints_what_it_promises(script: str, tmp_path: Path) -> None:
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    place = 0
    for pattern in PROMISED[script]:
        found = re.compile(pattern).search(done.stdout, place)
        assert found, f"{script} printed no {pattern!r} after character {place}:\n{done.stdout}"
        place = found.end()
    assert not any(tmp_path.iterdir()), "an example leaves nothing behind"


def test_every_example_is_numbered_promised_and_listed() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`(.+?)`\]", readme, re.MULTILINE)
    assert scripts() == listed == sorted(PROMISED)
    for number, script in enumerate(scripts(), 1):
        assert script.startswith(f"{number:02}_")
