"""Our patches on a copy of the installed LMDeploy: applied, taken back, and driven by its own scheduler."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.lmdeploy.test_apply_patches import files, run_script

pytestmark = pytest.mark.peer
ROOT = Path(__file__).parents[3]
INSTALLED = Path((importlib.util.find_spec("lmdeploy").submodule_search_locations or [""])[0])  # type: ignore[union-attr]

HITS = """
import sys
from tests.engines.lmdeploy.drivers import Driver, nodes
from tests.engines.lmdeploy.test_block_trie import workload
driver = Driver(60, None)
assert hasattr(driver.trie, "hooks") == (sys.argv[1] == "patched")
print(workload(driver, 3), [(node.block, node.num_matched) for node in nodes(driver.trie)])
"""
ATTACHED = """
from benchmarks.hosts.lmdeploy import scheduler
made = scheduler(50)
assert made.block_trie.hooks is made.block_manager.hooks
print(type(made.block_trie.hooks).__name__, made.block_trie.allocator._log_mem.access_time.dtype)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, without what is compiled."""
    ignored = shutil.ignore_patterns("__pycache__", "lib", "*.so")
    return Path(shutil.copytree(INSTALLED, tmp_path / "lmdeploy", ignore=ignored))


def python(package: Path, *arguments: str, **variables: str) -> str:
    """What a Python that imports this copy prints."""
    path = os.pathsep.join([str(package.parent), str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_apply_twice_and_reverse_twice(package: Path) -> None:
    released = files(package)
    said = [run_script(action, package).stdout.strip() for action in ("status", "apply", "apply", "status")]
    assert said == ["released", "patched", "patched already", "patched"]
    assert {name for name, data in files(package).items() if released.get(name) != data} == {
        line.split()[2] for line in (ROOT / "third_party/lmdeploy/files.sha256").read_text().splitlines()
    }
    said = [run_script(action, package).stdout.strip() for action in ("reverse", "reverse", "status")]
    assert said == ["released", "released already", "released"]
    assert files(package) == released


@pytest.mark.parametrize("action", ["apply", "reverse"])
def test_a_file_that_someone_changed_is_left_alone(action: str, package: Path) -> None:
    if action == "reverse":
        run_script("apply", package)
    with (package / "pytorch/paging/scheduler.py").open("a") as changed:
        changed.write("\n# mine\n")
    before = files(package)
    done = run_script(action, package)
    assert done.returncode == 1
    assert "scheduler.py differs from LMDeploy 0.11.0" in done.stderr
    assert files(package) == before


def test_without_a_plug_in_a_patched_one_does_the_same(package: Path) -> None:
    """The same hits, and the same blocks in the trie at the end."""
    released = python(package, "-c", HITS, "released")
    run_script("apply", package)
    assert python(package, "-c", HITS, "patched") == released


def test_the_plug_in_is_attached_by_its_name(package: Path) -> None:
    run_script("apply", package)
    named = {"LMDEPLOY_KV_PLUGIN": "sagellm.engines.lmdeploy:attach"}
    said = python(package, "-c", ATTACHED, **named).splitlines()
    assert "sageLLM: mode shadow, policy adaptive" in said[0]
    assert said[1] == "LMDeployEngine int64"
    said = python(package, "-c", ATTACHED, **named, SAGELLM_LMDEPLOY='{"mode": "on"}').splitlines()
    assert "sageLLM: mode on, policy adaptive" in said[0]
    assert said[1] == "LMDeployEngine float64"
    said = python(
        package, "-c", ATTACHED, **named, SAGELLM_LMDEPLOY='{"mode": "on", "swap": true}'
    ).splitlines()
    assert "LMDeploy swaps nothing: no CPU blocks: set num_cpu_blocks of PytorchEngineConfig" in said[1]
    assert said[2] == "LMDeployEngine float64"
    for variables, warning in (
        ({**named, "SAGELLM_LMDEPLOY": '{"swap": 1}'}, "swap must be true or false, got 1"),
        ({"LMDEPLOY_KV_PLUGIN": "not_there:attach"}, "no plug-in not_there:attach"),
        ({**named, "SAGELLM_LMDEPLOY": '{"policy": "unknown"}'}, "LMDeploy evicts in its own order"),
    ):
        said = python(package, "-c", ATTACHED, **variables).splitlines()
        assert warning in said[0]
        assert said[-1] == "NoneType int64"


def test_the_other_tests_pass_in_a_patched_one(package: Path) -> None:
    run_script("apply", package)
    options = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "-q"]
    tests = [
        f"tests/engines/lmdeploy/test_{name}.py"
        for name in ("block_trie", "communication", "engine", "order", "swap")
    ]
    said = python(package, "-m", "pytest", *options, *tests, REQUIRE_PATCHED="1")
    assert "tests skipped: 0" in said
