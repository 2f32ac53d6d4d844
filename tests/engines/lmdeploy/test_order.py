"""`SequenceOrder` in LMDeploy's real scheduler, with our patches: `test_patches.py` runs these in a copy."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sagellm.engines.guests.settings import SchedulingSettings
from sagellm.engines.lmdeploy.order import SequenceOrder
from tests.engines.lmdeploy.drivers import SIZE, Driver

pytestmark = pytest.mark.peer


def ordered(driver: Driver, **given: Any) -> SequenceOrder:
    """Let a strategy order a driver's sequences; skips where LMDeploy is not patched."""
    if not hasattr(driver.scheduler, "order"):
        pytest.skip("needs patch 0003")
    return SequenceOrder(driver.scheduler, SchedulingSettings.of(given), driver.guided)


def cached(driver: Driver, prompt: list[int]) -> None:
    number = driver.add(prompt)
    driver.prefill(5)
    driver.decode(6)
    driver.end(number)


def test_what_is_cached_goes_first() -> None:
    driver = Driver(60, "lru")
    ordered(driver, strategy="priority")
    driver.scheduler.scheduler_config.max_batches = 1
    prompt = [1] * (8 * SIZE)
    cached(driver, prompt)
    new, again = driver.add([2] * (8 * SIZE)), driver.add([*prompt, 3, 4])
    assert driver.prefill(7) == [again]
    assert driver.hits[again] == 8
    driver.end(again)
    assert driver.prefill(7) == [new]


def test_in_order_of_arrival_every_step_is_that_of_lmdeploy() -> None:
    """The passes of `fifo` change nothing, with memory for all and without."""
    for num_blocks in (30, 60):
        hits = []
        for with_passes in (False, True):
            driver, rng = Driver(num_blocks, "lru"), random.Random(num_blocks)
            if with_passes:
                order = ordered(driver, strategy="fifo")
            for step in range(200):
                if rng.random() < 0.3:
                    driver.add([rng.randrange(3)] * rng.randrange(4, 40) + [100 + step])
                driver.prefill(1000 + step)
                driver.decode(5000 + step)
                if driver.sequences and rng.random() < 0.25:
                    number = rng.choice(sorted(driver.sequences))
                    driver.stop(number)
                    driver.end(number)
            hits.append(driver.hits)
            if with_passes:
                assert driver.scheduler.order is order
        assert hits[0] == hits[1]
        assert hits[0]


def test_a_pass_that_fails_gives_the_order_back(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(60, "lru")
    order = ordered(driver, strategy="fifo")

    def fails(draft: Any, view: Any) -> None:
        raise RuntimeError("no idea")

    order.passes.passes = [fails]  # type: ignore[list-item]
    first, second = driver.add([1] * 9), driver.add([2] * 9)
    assert driver.prefill(7) == [first, second]
    assert driver.scheduler.order is None
    assert "LMDeploy schedules in its own order from now on: RuntimeError('no idea')" in caplog.text


def test_without_the_patch_it_says_so() -> None:
    driver = Driver(10, "lru")
    vars(driver.scheduler).pop("order", None)
    with pytest.raises(AttributeError, match="no patch 0003"):
        SequenceOrder(driver.scheduler, SchedulingSettings(), driver.guided)
