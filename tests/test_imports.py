"""`import sagellm` is light, and so is the command until it runs something."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ["torch", "numpy", "fastapi", "uvicorn", "transformers", "tokenizers", "yaml"]


@pytest.mark.parametrize(
    "module", ["sagellm", "sagellm.core.config_layers", "sagellm.core.registry", "sagellm.cli"]
)
def test_nothing_heavy_is_loaded(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
