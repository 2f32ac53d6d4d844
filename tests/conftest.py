"""What every test may use: the traces, a settled hypothesis profile, and a count of what was skipped."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from sagellm.kvmgr.manager import KVCacheManager

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers: tables would be cut there
# Torch's threads sleep while they wait. Those of several workers on few cores would spin for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile(
    "sagellm",
    max_examples=50,
    deadline=None,  # shared machines: a slow example is no failure
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
_CALM = settings.get_profile("sagellm")
settings.register_profile("slow", parent=_CALM, max_examples=100)
settings.register_profile("explore", parent=_CALM, derandomize=False, max_examples=1000)
settings.register_profile("mutants", parent=_CALM, phases=(Phase.explicit, Phase.generate))  # shrinks nothing
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "sagellm"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end: no garbage collection looks through them, now or in a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def sagellm_traces() -> Path:
    """The folder of traces that `SAGELLM_TRACES` names; without it the test is skipped, and counted."""
    named = os.environ.get("SAGELLM_TRACES")
    if not named:
        pytest.skip("SAGELLM_TRACES is not set")
    folder = Path(named)
    assert folder.is_dir(), f"SAGELLM_TRACES names {folder}, which is no folder"
    return folder


@pytest.fixture(autouse=True)
def conserved_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test: free + cached + active = total in each pool that the test made, and every book
    balances."""
    made: list[KVCacheManager] = []
    build = KVCacheManager.__init__

    def remember(self: KVCacheManager, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(KVCacheManager, "__init__", remember)
    yield
    for manager in made:
        manager.check()
        assert sum(manager.block_states()) == manager.pool.total_blocks


@pytest.fixture
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """For benchmarks whose times nobody reads: each timed row collects garbage first, here that of all
    tests."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line that `.ci/run` repeats: how many tests did not run, and why."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(_reason(report) for report in skipped)
    why = "".join(f"; {count} x {reason}" for reason, count in reasons.most_common())
    terminalreporter.write_line(f"tests skipped: {len(skipped)}{why}")


def _reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")
