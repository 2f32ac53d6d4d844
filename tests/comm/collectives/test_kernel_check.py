"""The C++ kernel under sanitizers, with threads as ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sagellm.comm.collectives.shared_kernels import SOURCE
from sagellm.core.native_code import find_compiler


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    program, check = tmp_path / "check", Path(__file__).parent / "shared_memory_check.cpp"
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    source = ["-w", f"-I{SOURCE.parent}", str(check), "-o", str(program)]
    subprocess.run([*find_compiler().command, *flags, *source], check=True, capture_output=True, timeout=200)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1600 operations compared" in done.stdout
