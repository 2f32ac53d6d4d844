"""The status of a fleet and of one instance, from instances over sockets in each state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sagellm.control_plane.kv_events import BlockStored, KVEventSubscriber, ReceivedBatch
from sagellm.serving.fleet.status import InstanceStatus, fleet_status, instance_detail, look
from tests.builders import request
from tests.control_plane.fleet.scene import Scene, Separating

PROMPT = list(range(1, 30))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, 3, exchanges=True, router=Separating(), publishes=True)
    yield made
    made.close()


def status_of(scene: Scene, name: str) -> InstanceStatus:
    status = fleet_status(scene.front, "demo", 0.0)
    [found] = [each for each in status.instances if each.name == name]
    return found


def serve(scene: Scene, num: int, max_tokens: int = 8) -> None:
    for number in range(num):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], max_tokens))


def test_what_an_operator_sees_of_a_fleet_that_serves(scene: Scene) -> None:
    serve(scene, 6)
    scene.until(lambda: status_of(scene, "i-1").num_hand_overs + status_of(scene, "i-2").num_hand_overs > 0)
    scene.finish()
    first = status_of(scene, "i-0")
    assert (first.state, first.version, first.fault) == ("ready", "sageLLM 1", "")
    assert first.uptime_s is not None
    assert first.connected_s is not None
    assert first.uptime_s >= first.connected_s > 0
    assert first.num_prompt_tokens == 6 * 30
    assert sum(status_of(scene, f"i-{number}").num_output_tokens for number in range(3)) == 48
    scene.until(lambda: sum(status_of(scene, name).num_handed_over for name in ("i-1", "i-2")) == 6)
    scene.until(lambda: status_of(scene, "i-1").num_hand_overs == 0)
    scene.until(lambda: (status_of(scene, "i-0").kv_cached or 0.0) > 0.0)  # its statistics come each second
    assert first.num_blocks == 1200
    assert first.reported_s_ago is not None


def test_each_state(scene: Scene) -> None:
    scene.front.drain("i-1")
    assert status_of(scene, "i-1").state == "drained"
    scene.front.know(scene.instances.add("i-9", scene.endpoint("i-9")))
    scene.kill("i-2")
    scene.until(lambda: scene.front.members["i-2"].facts is None)
    scene.until(lambda: "nothing listens" in status_of(scene, "i-9").fault)
    lost, starting = status_of(scene, "i-2"), status_of(scene, "i-9")
    assert (lost.state, starting.state) == ("lost", "starting")
    assert lost.fault
    assert lost.last_failure.startswith("lost: ")
    assert lost.last_failure_s_ago is not None
    assert (lost.uptime_s, lost.reported_s_ago, lost.num_lost) == (None, None, 1)
    assert starting.last_failure == ""


def test_a_request_that_waits_says_why(scene: Scene) -> None:
    for name in scene.servers:
        scene.front.drain(name)
    serve(scene, 1)
    scene.turn()
    status = fleet_status(scene.front, "demo", 0.0)
    assert (status.num_requests, status.num_queued) == (1, 1)
    assert status.queued_s > 0.0


def test_the_detail_of_an_instance_comes_from_itself(scene: Scene) -> None:
    assert instance_detail(scene.front, "i-0").asked_s_ago is None
    serve(scene, 4)
    scene.finish()
    assert look(scene.front, "i-0")
    scene.until(lambda: instance_detail(scene.front, "i-0").asked_s_ago is not None)
    stats = scene.engine("i-0").stats()
    assert stats.reuse is not None
    num_tokens = stats.reuse.num_tokens
    scene.until(lambda: instance_detail(scene.front, "i-0").num_prompt_tokens == num_tokens)
    detail = instance_detail(scene.front, "i-0")
    assert detail.blocks == {
        "active": stats.blocks_active, "cached": stats.blocks_cached, "free": stats.blocks_free,
    }  # fmt: skip
    scene.until(lambda: instance_detail(scene.front, "i-0").has_diagnostics)
    scene.front.add(request("again", [1, *PROMPT], 2))
    scene.finish()
    assert look(scene.front, "i-0")
    scene.until(lambda: bool(instance_detail(scene.front, "i-0").hot_prefixes))


def test_a_reader_outside_learns_what_each_instance_has(scene: Scene) -> None:
    ends = [status_of(scene, f"i-{number}") for number in range(3)]
    assert len({each.kv_events for each in ends}) == 3
    readers = [KVEventSubscriber(each.kv_events, each.kv_replay, topic=each.name) for each in ends]
    try:
        serve(scene, 6)
        scene.finish()
        for number, reader in enumerate(readers):
            while not isinstance(item := reader.poll(10.0), ReceivedBatch) or not item.batch.events:
                assert item is not None, f"i-{number} has published nothing"
            assert isinstance(item.batch.events[0], BlockStored)
            assert item.batch.data_parallel_rank == number
    finally:
        for reader in readers:
            reader.close()
