"""`LMDeployEngine` in LMDeploy's real scheduler, with our patches: `test_patches.py` runs these in a copy."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.engines.guests import comparison
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from tests.engines.lmdeploy.drivers import SIZE, Driver, nodes
from tests.engines.lmdeploy.test_block_trie import finished, workload

pytestmark = pytest.mark.peer


def attached(num_blocks: int, **given: Any) -> tuple[Driver, LMDeployEngine]:
    """A driver with an engine; skips where LMDeploy is not patched."""
    driver = Driver(num_blocks, None)
    if not hasattr(driver.trie, "hooks"):
        pytest.skip("needs our patches")
    made = LMDeployEngine(driver.scheduler, GuestSettings.of(given), driver.clock)
    driver.guided = made.guided
    return driver, made


def test_without_the_patches_it_says_so() -> None:
    driver = Driver(10, None)
    vars(driver.trie).pop("hooks", None)
    with pytest.raises(AttributeError, match="no patch 0001"):
        LMDeployEngine(driver.scheduler, GuestSettings(), driver.clock)


@pytest.mark.parametrize("mode", ["shadow", "on"])
def test_it_counts_and_a_shadow_changes_nothing(mode: str) -> None:
    expected = workload(Driver(80, None), 2)
    driver, engine = attached(80, mode=mode, policy="adaptive", report_s=0)
    hits = workload(driver, 2)
    for shadow in engine.comparison.shadows.values():
        shadow.check()
    if mode == "shadow":
        assert hits == expected
        assert set(engine.comparison.shadows) == {"lru", "adaptive"}
        assert not engine.guided.is_guided
    assert engine.comparison.reuse.num_hits == sum(hits)
    assert abs(engine.comparison.shadows["lru"].reuse.num_hits - sum(expected)) < 0.1 * sum(expected)


def test_a_policy_that_loses_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, engine = attached(60, mode="on", policy="s3fifo")
    monkeypatch.setattr(comparison, "JUDGED_TOKENS", 20 * SIZE)
    finished(driver, [1] * (12 * SIZE))
    engine.comparison.shadows["lru"].reuse.num_hits += 5
    finished(driver, [2] * (12 * SIZE))
    assert engine.guided.is_guided is False
    assert "s3fifo reuses 5 of 24 blocks fewer than LRU would" in caplog.text
    finished(driver, [3] * (30 * SIZE))
    assert engine.comparison.reuse.num_blocks == 54


def test_what_is_known_of_blocks() -> None:
    driver, engine = attached(20, mode="on")
    number = driver.add([1] * (2 * SIZE) + [2])
    driver.prefill(5)
    driver.decode(6)
    first = nodes(driver.trie)[0].block
    assert engine.get_block_info(first)[1:] == (2, True)
    gone: list[int] = []
    engine.register_eviction_callback(gone.extend)
    driver.end(number)
    assert engine.get_block_info(first)[1:] == (1, True)
    assert driver.trie.evict(9) == 2
    assert first in gone
    assert engine.get_block_info(first)[1:] == (0, False)
    with pytest.raises(IndexError):
        engine.get_block_info(99)


def test_a_report(caplog: pytest.LogCaptureFixture) -> None:
    driver, engine = attached(20, mode="on", policy="s3fifo")
    caplog.set_level("INFO", "lmdeploy.sagellm")
    for _ in range(2):
        finished(driver, [1] * (2 * SIZE) + [2])
    engine.comparison.report()
    assert "order of eviction: s3fifo; 50.00 % of 4 blocks of prompts were reused" in caplog.text
    assert "with lru 50.00%" in caplog.text


def test_cancelled_requests_are_let_go() -> None:
    """Preempted and then cancelled, or cancelled before they ran: the shadow holds nothing of them."""
    driver, engine = attached(11, mode="on", policy="lru")
    first, second = driver.add([1] * (4 * SIZE)), driver.add([2] * (4 * SIZE))
    driver.prefill(5)
    for step in range(9):
        driver.decode(1000 + step)
    assert driver.status(second) == "WAITING"
    waiting = driver.add([3] * (2 * SIZE))
    driver.prefill(6)
    for number in (second, waiting, first):
        driver.end(number)
    finished(driver, [4] * (2 * SIZE))
    assert not engine._found
    assert not engine._admitted
    for shadow in engine.comparison.shadows.values():
        shadow.check()
        assert not shadow._held


def test_an_error_of_the_counts_ends_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("no idea")

    driver, engine = attached(20, mode="on", policy="lru")
    monkeypatch.setattr(engine.comparison.shadows["lru"], "admit", fails)
    assert [finished(driver, [1] * (2 * SIZE) + [2]) for _ in range(2)] == [0, 2]
    assert caplog.text.count("reuse is not counted any more: RuntimeError('no idea')") == 1
    assert engine.guided.is_guided
