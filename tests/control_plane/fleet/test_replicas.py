"""Hot prefixes that a front has copied from instance to instance, over real sockets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sagellm.control_plane import replication
from sagellm.control_plane.rebalancing import RebalancingOptions
from sagellm.core.protocols.router import ExecutionInstance, Placement
from sagellm.core.types import Namespace, Tokens
from tests.builders import expected_tokens, request
from tests.control_plane.fleet.scene import InTurn, Scene, is_done

PROMPT = list(range(1, 80))
OPTIONS = RebalancingOptions(least_uses_per_s=0.001, payback_s=1e6)


class OnFirst(InTurn):
    """All requests on the first instance, whatever the others do."""

    def place(self, request: Any, instances: Any, cached: Any) -> Placement:
        return Placement(instances[0].instance_id, instances[0].instance_id)


@pytest.fixture(autouse=True)
def _decides_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "DECIDE_S", 0.0)


def busy_on_first(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports say that i-0 computes all the time, and the others never."""
    take = scene.front.requests.as_seen

    def as_seen(load: ExecutionInstance, now_s: float, *, is_fresh: bool) -> ExecutionInstance:
        seen = take(load, now_s, is_fresh=is_fresh)
        return replace(seen, utilization=float(load.instance_id == "i-0"), prefill_token_s=1e-3)

    monkeypatch.setattr(scene.front.requests, "as_seen", as_seen)


def num_cached(scene: Scene, name: str) -> int:
    return scene.prefixes.lookup(Tokens(PROMPT), Namespace(), [name])[0].num_device_tokens


def test_a_hot_prefix_comes_to_a_cold_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, 2, exchanges=True, router=OnFirst(), replication=OPTIONS)
    busy_on_first(scene, monkeypatch)
    for number in range(6):
        scene.front.add(request(f"r{number}", [*PROMPT, 80 + number], 3))
        scene.finish()
    scene.until(lambda: num_cached(scene, "i-1") > 0)
    assert num_cached(scene, "i-1") == num_cached(scene, "i-0")
    assert scene.engine("i-1").stats().num_steps == 0  # nothing was computed there
    scene.until(lambda: scene.front.copies.replicator.num_arrived >= 1)  # type: ignore[union-attr]
    scene.front.drain("i-0")
    scene.front.add(request("there", [*PROMPT, 95], 3))
    scene.finish()
    assert scene.tokens["there"] == expected_tokens(scene.backends["i-0"], [*PROMPT, 95], 3)
    assert scene.ended["there"].num_cached_tokens == num_cached(scene, "i-0")
    scene.until(lambda: not any(each.hand_overs.has_work for each in scene.servers.values()))  # type: ignore[union-attr]
    scene.check_idle()
    scene.close()


@pytest.mark.parametrize("victim", ["i-0", "i-1"])
def test_an_instance_that_goes_ends_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    scene = Scene(tmp_path, 2, exchanges=True, router=OnFirst(), replication=OPTIONS)
    busy_on_first(scene, monkeypatch)
    for number in range(6):  # the index learns of the prefix from the first
        scene.front.add(request(f"r{number}", [*PROMPT, 80 + number], 40))
        scene.until(lambda name=f"r{number}": name in scene.tokens)  # type: ignore[misc]
    replicator = scene.front.copies.replicator
    assert replicator is not None
    scene.until(lambda: replicator.num_copies >= 1)
    scene.kill(victim)
    scene.finish()
    assert all(map(is_done, scene.ended.values()))
    scene.until(lambda: not scene.front.members[victim].is_ready)
    assert not replicator._begun
    scene.start(victim)
    scene.until(lambda: scene.front.members[victim].is_ready)
    scene.until(lambda: not any(each.hand_overs.has_work for each in scene.servers.values()))  # type: ignore[union-attr]
    scene.check_idle()
    scene.close()
