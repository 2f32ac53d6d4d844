"""Instances that change their type: no request is lost, and a start again changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sagellm.control_plane.fleet.served import FleetPolicy
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.router import InstanceType
from tests.builders import expected_tokens, request
from tests.control_plane.fleet.scene import Scene, Separating, is_done

PROMPT = list(range(1, 30))
KINDS = {"i-0": InstanceType.PREFILLING, "i-1": InstanceType.DECODING, "i-2": InstanceType.DECODING}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, 3, exchanges=True, router=Separating(), kinds=KINDS)
    yield made
    made.close()


def kind_of(scene: Scene, name: str) -> InstanceType | None:
    load = scene.front.members[name].load
    return None if load is None else load.kind


def expect(scene: Scene, prompt: list[int], num: int) -> list[int]:
    return expected_tokens(next(iter(scene.backends.values())), prompt, num)


@pytest.mark.parametrize("kind", [InstanceType.HYBRID, InstanceType.PREFILLING, InstanceType.GENERAL])
def test_a_switch_under_load_loses_no_request(scene: Scene, kind: InstanceType) -> None:
    for number in range(8):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 20))
    scene.until(lambda: len(scene.tokens) >= 4)
    scene.front.switch("i-1", kind)
    scene.until(lambda: not scene.front.roles.is_changing("i-1"))
    assert kind_of(scene, "i-1") is kind
    for number in range(8, 12):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 20))
    scene.finish()
    for number in range(12):
        assert scene.tokens[f"r{number}"] == expect(scene, [number + 1, *PROMPT], 20)
        assert is_done(scene.ended[f"r{number}"])
    assert not scene.front.num_retries
    scene.until(lambda: not any(each.hand_overs.has_work for each in scene.servers.values()))  # type: ignore[union-attr]
    scene.check_idle()


def test_what_does_not_end_in_time_goes_on_elsewhere(scene: Scene) -> None:
    for number in range(4):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 100))
    scene.until(lambda: all(len(scene.tokens.get(f"r{number}", ())) > 3 for number in range(4)))
    placed = scene.front.requests.num_on("i-1")
    assert placed
    scene.front.switch("i-1", InstanceType.PREFILLING, drain_timeout_s=0.0)
    scene.until(lambda: kind_of(scene, "i-1") is InstanceType.PREFILLING)
    assert not any(served.service_at("i-1").value == "decode" for served in scene.front.requests.on("i-1"))
    scene.finish()
    for number in range(4):
        assert scene.tokens[f"r{number}"] == expect(scene, [number + 1, *PROMPT], 100)
    assert not scene.front.num_retries  # an operator has wanted it
    scene.check_idle()


def test_a_switched_instance_gets_no_requests_while_it_drains(scene: Scene) -> None:
    for number in range(2):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 60))
    scene.until(lambda: scene.front.requests.num_on("i-1") > 0 and len(scene.tokens) == 2)
    before = scene.front.requests.num_on("i-1")
    scene.front.switch("i-1", InstanceType.PREFILLING)
    for number in range(2, 6):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 2))
    scene.until(lambda: sum(map(is_done, scene.ended.values())) >= 4)
    assert scene.front.requests.num_on("i-1") <= before
    scene.finish()


def test_an_instance_that_is_started_again_is_told_its_type(scene: Scene) -> None:
    scene.front.switch("i-1", InstanceType.HYBRID)
    scene.until(lambda: not scene.front.roles.is_changing("i-1"))
    scene.kill("i-1")
    scene.until(lambda: not scene.front.members["i-1"].is_ready)
    scene.start("i-1")
    scene.until(lambda: kind_of(scene, "i-1") is InstanceType.HYBRID)
    scene.front.switch("i-1", InstanceType.DECODING)  # as in the file
    scene.until(lambda: not scene.front.roles.is_changing("i-1"))
    scene.kill("i-1")
    scene.until(lambda: not scene.front.members["i-1"].is_ready)
    scene.start("i-1")
    scene.until(lambda: kind_of(scene, "i-1") is InstanceType.DECODING)


def test_an_instance_that_dies_while_it_drains(scene: Scene) -> None:
    for number in range(4):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 40))
    scene.until(lambda: all(len(scene.tokens.get(f"r{number}", ())) > 3 for number in range(4)))
    scene.front.switch("i-1", InstanceType.PREFILLING)
    scene.turn()
    scene.kill("i-1")
    scene.finish()
    scene.start("i-1")
    scene.until(lambda: not scene.front.roles.is_changing("i-1"))
    assert kind_of(scene, "i-1") is InstanceType.PREFILLING
    for number in range(4):
        assert scene.tokens[f"r{number}"] == expect(scene, [number + 1, *PROMPT], 40)


def test_a_new_front_finds_the_type_that_an_instance_has(scene: Scene) -> None:
    scene.front.switch("i-1", InstanceType.HYBRID)
    scene.until(lambda: not scene.front.roles.is_changing("i-1"))
    scene.replace_front()
    scene.until(lambda: kind_of(scene, "i-1") is InstanceType.HYBRID)
    scene.kill("i-1")
    scene.until(lambda: not scene.front.members["i-1"].is_ready)
    scene.start("i-1")
    scene.until(lambda: kind_of(scene, "i-1") is InstanceType.HYBRID)


def test_the_only_instance_may_switch(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1, exchanges=True, policy=FleetPolicy(patience_s=5.0))
    scene.front.add(request("r", PROMPT, 40))
    scene.until(lambda: "r" in scene.tokens)
    scene.front.switch("i-0", InstanceType.DECODING)
    scene.front.add(request("s", PROMPT, 40))
    scene.finish()
    assert scene.tokens["r"] == scene.tokens["s"] == expect(scene, PROMPT, 40)
    scene.close()


def test_switches_that_cannot_be(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1)
    with pytest.raises(ConfigError, match="there are i-0"):
        scene.front.switch("x", InstanceType.HYBRID)
    with pytest.raises(ConfigError, match="general, prefilling, decoding, hybrid"):
        scene.front.switch("i-0", InstanceType.EMBEDDING)
    with pytest.raises(ConfigError, match="general alone"):
        scene.front.switch("i-0", InstanceType.HYBRID)
    scene.kill("i-0")
    scene.until(lambda: not scene.front.members["i-0"].is_ready)
    with pytest.raises(ConfigError, match="not connected"):
        scene.front.switch("i-0", InstanceType.GENERAL)
    scene.close()
