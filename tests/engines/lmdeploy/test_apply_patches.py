"""`apply_patches.sh` leaves alone what it does not know. Runs without LMDeploy."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "third_party" / "lmdeploy" / "apply_patches.sh"

pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="needs the program patch")


def run_script(action: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, action, folder], capture_output=True, text=True, check=False)


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("action", ["apply", "reverse", "status"])
def test_another_version_is_refused(action: str, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text("__version__ = '0.12.1'\n")
    done = run_script(action, tmp_path)
    assert done.returncode == 1
    assert f"the patches are for LMDeploy 0.11.0, {tmp_path} is 0.12.1" in done.stderr
    assert list(files(tmp_path)) == ["version.py"]


def test_files_that_are_not_the_released_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text("__version__ = '0.11.0'\n")
    done = run_script("apply", tmp_path)
    assert done.returncode == 1
    assert "base_block_manager.py differs from LMDeploy 0.11.0" in done.stderr
    assert list(files(tmp_path)) == ["version.py"]


def test_what_is_no_package_and_an_unknown_action_are_refused(tmp_path: Path) -> None:
    assert "is no lmdeploy package" in run_script("apply", tmp_path).stderr
    assert "use apply, reverse or status" in run_script("install", tmp_path).stderr


def test_the_patches_add_lines_only() -> None:
    """Of the host's code there is nothing here, not as context either."""
    patches = sorted((SCRIPT.parent / "patches").glob("*.patch"))
    assert patches
    for patch in patches:
        heads = {line[:2] for line in patch.read_text().splitlines() if not line.startswith("+")}
        assert heads <= {"--", "@@"}
