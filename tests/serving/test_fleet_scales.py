"""A fleet of real processes that grows with its load, and shrinks by drain."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.serving.fleet_processes import Fleet, running_fleet

FILE = """
engine: {backend: "tests.slow_tokens:SlowTokens"}
fleet:
  autoscaling: "on"
  autoscaling_options: {up_after_s: 1.0, down_after_s: 3.0, cooldown_s: 1.0, rows: 0.05}
  groups: {a: {chips: 0, max_count: 2}}
"""


def test_a_fleet_grows_and_shrinks_and_loses_no_request(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FILE, encoding="utf-8")
    with running_fleet("--config", str(file)) as fleet, ThreadPoolExecutor(12) as pool:
        stop = False

        def ask() -> int:
            number = 0
            while not stop:
                assert fleet.complete(range(1, 60), 60, ignore_eos=True)["status"] == 200
                number += 1
            return number

        asked = [pool.submit(ask) for _ in range(12)]
        _wait_for(fleet, {"a-0", "a-1"})
        stop = True
        assert sum(each.result() for each in asked) > 0
        _wait_for(fleet, {"a-0"})
        assert fleet.complete(range(1, 60), 5)["status"] == 200


def _wait_for(fleet: Fleet, names: set[str], within_s: float = 120.0) -> None:
    until_s = time.monotonic() + within_s
    while {each["name"] for each in fleet.status()["instances"] if each["state"] == "ready"} != names:
        assert time.monotonic() < until_s, "\n".join(fleet.log[-30:])
        time.sleep(0.1)
