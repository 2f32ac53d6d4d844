"""`pip install .` in an environment of its own: what it weighs and what it runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[1]
MOST_MB, MOST_S = 150, 15.0
SPARED = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
"""Part of any environment."""


@pytest.mark.slow
def test_without_torch_in_seconds(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    binaries = tmp_path / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
    began_s = time.monotonic()
    subprocess.run([binaries / "pip", "install", "--quiet", CLONE], check=True)
    spent_s = time.monotonic() - began_s
    [site] = (tmp_path / "venv").glob("**/site-packages")
    files = [
        file
        for file in site.rglob("*")
        if file.is_file() and not file.relative_to(site).parts[0].startswith(SPARED)
    ]
    size_mb = sum(file.stat().st_size for file in files) / 1e6
    print(f"{spent_s:.1f} s, {size_mb:.0f} MB")
    assert size_mb < MOST_MB
    assert spent_s < MOST_S
    assert not (site / "torch").exists()
    for command in ("watch", "verify", "replay", "simulate", "trace"):
        subprocess.run([binaries / "sagellm", command, "--help"], check=True, stdout=subprocess.DEVNULL)
