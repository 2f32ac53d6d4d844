"""`make demo` as the user runs it: a process that ends by itself and says how it went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagellm.engines.native import DEMO_MODEL

ROOT = Path(__file__).parents[2]


def run_demo(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "demo.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"} | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="the demo model is not built")
def test_the_demo_ends_by_itself_with_what_it_promises() -> None:
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    for promised in ("TTFT", "tokens/s", "cached", "10 requests at once", "active", "free", "Done"):
        assert promised in done.stdout


def test_a_demo_that_fails_shows_the_servers_last_lines() -> None:
    done = run_demo(SAGELLM_MODEL_NAME="./no-such-folder")
    assert done.returncode == 1
    assert "the demo failed" in done.stdout
    assert "no-such-folder" in done.stdout
