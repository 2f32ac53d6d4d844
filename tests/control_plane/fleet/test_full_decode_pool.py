"""Decode instances without room for what prefill instances hand over: all is computed, nothing stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from sagellm.control_plane.fleet.served import FleetPolicy
from sagellm.core.protocols.fleet import FailurePolicy
from sagellm.core.types import FinishReason
from tests.builders import expected_tokens, request
from tests.control_plane.fleet.scene import Scene, Separating, is_done

PROMPT = list(range(1, 60))
NUM = 12
TOKENS = 40


def full_scene(folder: Path, policy: FleetPolicy) -> Scene:
    """The pool of i-1, where all answers are computed, holds about two requests."""
    blocks = -(-(len(PROMPT) + 1 + TOKENS) // block_size_of(folder))
    return Scene(
        folder, 2, exchanges=True, router=Separating(), policy=policy, num_blocks={"i-1": 2 * blocks + 1}
    )


def block_size_of(folder: Path) -> int:
    scene = Scene(folder, 1)
    size = scene.engine("i-0").kv.block_size
    scene.close()
    return size


def submit(scene: Scene) -> dict[str, list[int]]:
    """The expected tokens of each request."""
    backend = scene.backends["i-0"]
    expected = {}
    for number in range(NUM):
        prompt = [number + 1, *PROMPT]
        scene.front.add(request(f"r{number}", prompt, TOKENS))
        expected[f"r{number}"] = expected_tokens(backend, prompt, TOKENS)
    return expected


def check_nothing_stays(scene: Scene) -> None:
    scene.until(lambda: not any(each.hand_overs.has_work for each in scene.servers.values()))  # type: ignore[union-attr]
    scene.check_idle()
    assert not len(scene.front.requests)


def test_requests_wait_or_are_computed_where_they_are(tmp_path: Path) -> None:
    policy = FleetPolicy(hand_over_lease_s=0.5, on_failure=FailurePolicy.RECOMPUTE)
    scene = full_scene(tmp_path, policy)
    expected = submit(scene)
    scene.finish()
    assert scene.tokens == expected
    assert all(map(is_done, scene.ended.values()))
    assert not scene.front.num_retries
    check_nothing_stays(scene)
    scene.close()


def test_with_the_policy_fail_each_is_answered_or_ends_with_the_reason(tmp_path: Path) -> None:
    scene = full_scene(tmp_path, FleetPolicy(hand_over_lease_s=0.3, on_failure=FailurePolicy.FAIL))
    expected = submit(scene)
    scene.finish()
    assert scene.ended.keys() == expected.keys()
    for name, output in scene.ended.items():
        if output.finish_reason is FinishReason.ERROR:
            assert "its KV did not come from i-0" in (output.error or "")
            assert scene.tokens[name] == expected[name][:1]
        else:
            assert scene.tokens[name] == expected[name]
    assert any(map(is_done, scene.ended.values()))
    check_nothing_stays(scene)
    scene.close()


@pytest.mark.parametrize("num_turns", [0, 3, 10])
def test_a_decode_instance_that_dies_full_loses_nothing(tmp_path: Path, num_turns: int) -> None:
    scene = full_scene(tmp_path, FleetPolicy(hand_over_lease_s=0.5))
    expected = submit(scene)
    scene.until(lambda: len(scene.tokens) >= 4)
    for _ in range(num_turns):
        scene.turn()
    scene.kill("i-1")
    scene.until(lambda: not scene.front.members["i-1"].is_ready)
    scene.start("i-1")
    scene.finish()
    assert scene.tokens == expected
    check_nothing_stays(scene)
    scene.close()


def test_clients_that_leave_while_their_requests_wait_for_room(tmp_path: Path) -> None:
    scene = full_scene(tmp_path, FleetPolicy(hand_over_lease_s=0.5))
    expected = submit(scene)
    scene.until(lambda: len(scene.tokens) >= 6)
    for number in range(0, NUM, 2):
        scene.front.abort(f"r{number}")
    scene.finish()
    for number in range(1, NUM, 2):
        assert scene.tokens[f"r{number}"] == expected[f"r{number}"]
    check_nothing_stays(scene)
    scene.close()
