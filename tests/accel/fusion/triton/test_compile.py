"""Every kernel compiles to machine code, which needs no GPU; and without Triton there are no kernels."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagellm.accel.fusion import triton as package
from sagellm.core.protocols.fusion import KernelSet

SCRIPT = Path(__file__).parent / "compile_kernels.py"


def compile_for(folder: Path, *capabilities: int) -> list[str]:
    pytest.importorskip("triton", reason="triton is not installed")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, capabilities)],
        env=env | {"TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    assert len(compile_for(tmp_path, 90)) == 17


@pytest.mark.slow
def test_kernels_compile_for_every_generation(tmp_path: Path) -> None:
    assert len(compile_for(tmp_path, 80, 86, 89, 90, 100)) == 5 * 30


def test_without_triton_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.startswith("sagellm.accel.fusion.triton.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING, "sagellm.kernels"):
        assert package.triton_kernels() == KernelSet()
    assert "pip install triton" in caplog.text
