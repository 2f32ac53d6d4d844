"""What a fleet asks of Ray, and what it makes of the answers; without Ray."""

from __future__ import annotations

import itertools
import json
import queue
import threading
from typing import Any

import pytest

from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet_instances import FleetInstance, fleet_instances
from sagellm.core.config_layers import Resolved
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.serving.fleet import ray_cluster
from sagellm.serving.fleet.launcher import StartEvents
from sagellm.serving.fleet.ray_cluster import RayCluster
from sagellm.serving.fleet.ray_launcher import RayLauncher, missing_resources
from tests.serving.fleet.ray_stand_in import StandInCluster, resolved_fleet

KEY = FleetKey("a key of sixteen or more")
NODE = {"CPU": 8.0, "GPU": 4.0, "h100": 4.0}
WAIT_S = 20.0


class Process:
    """What is in an actor's process: it serves at another port each time."""

    ports = itertools.count(1)

    def __init__(self, error: str = "") -> None:
        self.error, self.options, self.is_stopped = error, "", False
        self.endpoint = f"tcp://10.0.0.1:{next(self.ports)}"

    def start(self, options: str) -> str:
        self.options = options
        return json.dumps({"error": self.error} if self.error else {"endpoint": self.endpoint})

    def stop(self) -> str:
        self.is_stopped = True
        return ""


class Events:
    """What was reported, in order."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        put = lambda word: lambda text: self.told.put((word, text))  # noqa: E731
        self.events = StartEvents(put("endpoint"), put("end"), put("refusal"))

    def next(self) -> tuple[str, str]:
        return self.told.get(timeout=WAIT_S)


def launched(
    groups: dict[str, Any], cluster: StandInCluster | None = None, /, **keys: Any
) -> tuple[RayLauncher, StandInCluster, tuple[FleetInstance, ...]]:
    resolved = resolved_fleet(groups, **keys)
    used = cluster or StandInCluster([NODE], lambda _name: Process())
    launcher, instances = RayLauncher(resolved, KEY, used), fleet_instances(resolved.config.fleet)
    launcher.reserve(instances)
    return launcher, used, instances


def test_what_a_group_asks_for() -> None:
    groups = {
        "one": {"type": "prefilling", "chips": 2, "cores": 3, "ray_resources": {"h100": 2}},
        "two": {"type": "decoding", "count": 2},
        "three": {"chips": 0, "memory_gb": 1.5},
        "four": {"ray_resources": {"GPU": 0.5, "CPU": 0.25}},
    }
    strategy: dict[str, Any] = {"fleet.ray_strategy": "spread"}
    _, cluster, _ = launched(groups, **strategy)
    assert cluster.groups == {
        "group 0": (
            [
                {"CPU": 3.0, "GPU": 2.0, "h100": 2.0},
                {"CPU": 1.0, "GPU": 1.0},
                {"CPU": 1.0, "GPU": 1.0},
                {"CPU": 1.0, "memory": 1.5 * (1 << 30)},
                {"CPU": 0.25, "GPU": 0.5},
            ],
            "spread",
        )
    }


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"CPU": 4.0}, {"CPU": 1.0}),
        ({"CPU": 4.0, "NPU": 8.0}, {"CPU": 1.0, "NPU": 2.0}),
        ({"CPU": 4.0, "NPU": 8.0, "GPU": 8.0}, {"CPU": 1.0, "GPU": 2.0}),
    ],
)
def test_chips_by_rank_where_nodes_have_some(node: dict[str, float], expected: dict[str, float]) -> None:
    cluster = StandInCluster([node], lambda _name: Process())
    launched({"a": {"settings": {"parallel.tensor": 2}}}, cluster)
    assert cluster.groups["group 0"][0] == [expected]


def test_groups_that_are_scaled_give_their_places_back() -> None:
    launcher, cluster, _ = launched({"a": {"count": 2}, "b": {"count": 2, "max_count": 4}})
    assert [len(bundles) for bundles, _ in cluster.groups.values()] == [1, 1, 2]
    launcher.release("b-1")
    assert [len(bundles) for bundles, _ in cluster.groups.values()] == [1, 2]
    launcher.release("a-1")  # its bundle stays, for the next of its group
    assert len(cluster.groups) == 2
    launcher.reserve([FleetInstance("a-1", "a", launcher_type(launcher, "a"))])
    assert len(cluster.groups) == 2
    launcher.reserve([FleetInstance("a-2", "a", launcher_type(launcher, "a"))])
    assert len(cluster.groups) == 3
    for name in ("a-0", "a-1", "a-2", "b-0"):
        launcher.release(name)
    assert not cluster.groups


def launcher_type(launcher: RayLauncher, group: str) -> Any:
    return launcher._resolved.config.fleet.groups[group].type


def test_a_process_that_dies_is_started_again_by_ray_and_has_another_address() -> None:
    cluster = StandInCluster([NODE], lambda _name: Process(), num_away=3)
    launcher, _, [instance] = launched({"a": {"chips": 1, "cores": 4}}, cluster)
    assert launcher.endpoint("a-0") == ""
    events = Events()
    launcher.start(instance, events.events)
    what, first = events.next()
    assert what == "endpoint"
    [actor] = cluster.actors["a-0"]
    options = json.loads(actor.process.options)
    assert options["key"] == KEY.text
    assert options["config"]["engine"]["threads"] == 4
    assert options["environment"] == {}
    actor.kill(for_good=False)
    assert events.next()[0] == "end"
    running = launcher.start(instance, events.events)
    what, second = events.next()
    assert what == "endpoint"
    assert second != first
    assert cluster.actors["a-0"] == [actor]
    assert actor.num_starts == 2
    process = actor.process
    running.close()
    assert process.is_stopped
    assert actor.is_gone
    assert events.told.empty()
    launcher.start(instance, events.events)  # as by `sagellm fleet restart`: another actor, in the same place
    assert events.next()[0] == "endpoint"
    assert len(cluster.actors["a-0"]) == 2
    assert len(cluster.groups) == 1
    launcher.close()
    assert all(each.is_gone for each in cluster.actors["a-0"])
    assert not cluster.groups
    assert cluster.is_closed


def test_an_instance_that_cannot_start_says_why_and_gets_a_new_process() -> None:
    cluster = StandInCluster([NODE], lambda _name: Process("there is no folder /models/x"))
    launcher, _, [instance] = launched({"a": {"chips": 0}}, cluster)
    events = Events()
    launcher.start(instance, events.events)
    assert events.next() == ("end", "there is no folder /models/x")
    [actor] = cluster.actors["a-0"]
    assert actor.num_starts == 2
    assert json.loads(actor.process.options or "{}") == {}
    launcher.close()


def test_an_actor_that_ray_gives_up_is_made_anew() -> None:
    launcher, cluster, [instance] = launched({"a": {}})
    events = Events()
    launcher.start(instance, events.events)
    assert events.next()[0] == "endpoint"
    cluster.actors["a-0"][0].kill(for_good=True)
    assert events.next()[0] == "end"
    launcher.start(instance, events.events)
    assert events.next()[0] == "endpoint"
    assert len(cluster.actors["a-0"]) == 2
    launcher.close()


def test_a_cluster_without_room_says_what_is_missing() -> None:
    cluster = StandInCluster([{"CPU": 2.0}], lambda _name: Process(), has_room=False)
    groups = {"a": {"chips": 8, "ray_resources": {"h100": 8}}}
    launcher, _, [instance] = launched(groups, cluster, **{"fleet.ray_timeout_s": 0.01})
    events = Events()
    launcher.start(instance, events.events)
    what, text = events.next()
    assert what == "refusal"
    assert "no room for a-0 within 0.01 s" in text
    assert "GPU 8 asked, the cluster has GPU 0; h100 8 asked, the cluster has h100 0" in text
    assert not cluster.actors
    launcher.close()


def test_a_start_that_waits_for_room_is_ended_at_once() -> None:
    cluster = StandInCluster([NODE], lambda _name: Process(), has_room=False)
    launcher, _, [instance] = launched({"a": {}}, cluster)
    events = Events()
    running = launcher.start(instance, events.events)
    ended = threading.Thread(target=running.close)
    ended.start()
    ended.join(WAIT_S)
    assert not ended.is_alive()
    assert events.told.empty()
    launcher.close()


@pytest.mark.parametrize(
    ("asked", "nodes", "strategy", "words"),
    [
        ({"a-0": {"CPU": 4.0}}, [{"CPU": 2.0}], "pack", "CPU 4 asked, the cluster has CPU 2"),
        ({"a-0": {"CPU": 3.0}, "a-1": {"CPU": 3.0}}, [{"CPU": 4.0}], "pack", "CPU 6 asked"),
        ({"a-0": {"CPU": 3.0}}, [{"CPU": 2.0}, {"CPU": 2.0}], "pack", "a-0 asks for CPU 3, and no node has"),
        (
            {"a-0": {"memory": float(3 << 30)}},
            [{}],
            "pack",
            "memory 3 GiB asked, the cluster has memory 0 GiB",
        ),
        ({"a-0": {"CPU": 1.0}}, [{"CPU": 2.0}], "pack", "free now: CPU 0.5"),
        (
            {"a-0": {"CPU": 1.0}, "a-1": {"CPU": 1.0}},
            [{"CPU": 4.0}],
            "strict_spread",
            "2 nodes, the cluster has 1",
        ),
    ],
)
def test_what_is_missing(
    asked: dict[str, dict[str, float]], nodes: list[dict[str, float]], strategy: str, words: str
) -> None:
    assert words in missing_resources(asked, nodes, {"CPU": 0.5}, strategy)


@pytest.mark.parametrize(
    "group", [{"chip_names": ["cuda:0"]}, {"shares_chips": True, "memory_gb": 10.0}], ids=["names", "shares"]
)
def test_keys_of_one_host_are_refused(group: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="with --ray use ray_resources"):
        launched({"a": group})


@pytest.mark.parametrize("resources", [{"h100": 0}, {"": 1}, {"h100": "many"}])
def test_amounts_that_cannot_be(resources: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ray_resources"):
        resolved_fleet({"a": {"ray_resources": resources}})


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"--ray needs .*\[ray\]"):
        RayCluster(logs=False)


def test_a_fleet_file_for_one_host_has_the_same_keys() -> None:
    resolved: Resolved = resolved_fleet({"a": {"ray_resources": {"h100": 1}}})
    assert resolved.config.fleet.groups["a"].ray_resources == {"h100": 1.0}
    with pytest.raises(ConfigError, match="only for instances that are started here"):
        resolved_fleet({"a": {"servers": [{"url": "http://h"}], "ray_resources": {"h100": 1}}})
