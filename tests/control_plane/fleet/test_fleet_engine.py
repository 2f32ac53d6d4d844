"""`FleetEngine` over `InstanceServer`s: requests, losses, leases, questions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from sagellm.control_plane.fleet import instance_server
from sagellm.control_plane.fleet.client import Instances
from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet.messages import Welcome, encode
from sagellm.control_plane.fleet.served import FleetPolicy
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError, EngineFailedError, RequestError
from sagellm.core.kv_hints import HintStatus, KVHintsEnvelope
from sagellm.core.protocols.fleet import DrainChanged, InstanceLost
from sagellm.core.types import FinishReason, Namespace, Request, Tokens
from tests.builders import expected_tokens, request
from tests.control_plane.fleet.scene import KEY, Scene, is_done

PROMPT = list(range(1, 30))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def expect(scene: Scene, prompt: list[int], num: int) -> list[int]:
    return expected_tokens(next(iter(scene.backends.values())), prompt, num)


def test_requests_are_answered_as_by_one_engine(scene: Scene) -> None:
    for number in range(6):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 5))
    scene.finish()
    for number in range(6):
        assert scene.tokens[f"r{number}"] == expect(scene, [number + 1, *PROMPT], 5)
        assert is_done(scene.ended[f"r{number}"])
    assert set(scene.router.placed) == {"i-0", "i-1"}
    scene.check_idle()


def test_a_lost_instance_loses_no_request(scene: Scene) -> None:
    for number in range(4):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 20))
    scene.until(lambda: all(len(scene.tokens.get(f"r{number}", ())) > 3 for number in range(4)))
    scene.kill("i-0")
    scene.finish()
    for number in range(4):
        assert scene.tokens[f"r{number}"] == expect(scene, [number + 1, *PROMPT], 20)
    assert scene.front.num_retries == 2
    scene.check_idle()


def test_an_instance_that_is_started_again_serves_again(scene: Scene) -> None:
    scene.kill("i-0")
    scene.until(lambda: not scene.front.members["i-0"].is_ready)
    scene.start("i-0")
    scene.until(lambda: scene.front.members["i-0"].is_ready)
    scene.until(lambda: scene.front.members["i-0"].load is not None)
    for number in range(4):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 3))
    scene.finish()
    assert {"i-0", "i-1"} == set(scene.router.placed)


def test_requests_wait_for_an_instance_and_then_fail_with_the_reason(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1, policy=FleetPolicy(patience_s=0.3))
    scene.front.add(request("r", PROMPT, 1000))
    scene.until(lambda: len(scene.tokens.get("r", ())) > 3)
    scene.kill("i-0")
    scene.finish()
    output = scene.ended["r"]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert "0.3 s" in output.error
    assert "i-0 was lost" in output.error
    scene.close()


def test_a_request_is_not_tried_for_ever(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2, policy=FleetPolicy(max_retries=0))
    scene.front.add(request("r", PROMPT, 1000))
    scene.until(lambda: "r" in scene.tokens)
    scene.kill(scene.router.placed[0])
    scene.finish()
    assert "the last" in (scene.ended["r"].error or "")
    scene.close()


def test_an_abort_reaches_the_instance(scene: Scene) -> None:
    scene.front.add(request("r", PROMPT, 1000))
    scene.until(lambda: len(scene.tokens.get("r", ())) > 3)
    assert scene.front.abort("r")
    assert not scene.front.abort("r")
    for _ in range(20):
        scene.turn()
    scene.check_idle()
    assert "r" not in scene.ended


def test_a_front_that_dies_leaves_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1, lease_s=0.3)
    scene.front.add(request("r", PROMPT, 4000))
    scene.until(lambda: "r" in scene.tokens)
    server = scene.servers["i-0"]
    scene.instances.close()
    for _ in range(100_000):
        server.turn()
        if not server.engine.stats().num_running:
            break
    scene.check_idle()
    server.close()


def test_a_front_that_slept_longer_than_its_lease_begins_anew(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2, lease_s=0.3)
    scene.front.add(request("r", PROMPT, 1000))
    scene.until(lambda: "r" in scene.tokens)
    for name in scene.servers:
        scene.until_dropped(name)
    scene.front.add(request("s", PROMPT, 20))
    scene.finish()
    assert scene.tokens["r"] == expect(scene, PROMPT, 1000)
    assert scene.tokens["s"] == expect(scene, PROMPT, 20)
    scene.check_idle()
    scene.close()


def test_a_new_front_takes_over_at_once(scene: Scene) -> None:
    scene.front.add(request("r", PROMPT, 1000))
    scene.until(lambda: "r" in scene.tokens)
    other = Instances(KEY, scene.clock)
    client = other.add("i-0", scene.endpoint("i-0"))
    while client.facts is None:
        other.wait(0.01)
        client.poll()
        scene.servers["i-0"].turn()
    assert scene.engine("i-0").stats().num_running == 0
    other.close()


def test_wrong_key(scene: Scene) -> None:
    strangers = Instances(FleetKey("another key, as long"), scene.clock)
    client = strangers.add("i-0", scene.endpoint("i-0"))
    for _ in range(200):
        strangers.wait(0.01)
        assert not client.poll()
        scene.servers["i-0"].turn()
        if "key" in client.fault:
            break
    assert "another key" in client.fault
    strangers.close()


def test_another_version(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_server, "PROTOCOL", 7)
    others = Instances(KEY, scene.clock)
    client = others.add("i-0", scene.endpoint("i-0"))
    for _ in range(200):
        others.wait(0.01)
        client.poll()
        scene.servers["i-0"].turn()
        if "protocol 7" in client.fault:
            break
    assert "protocol 7" in client.fault
    assert "one version" in client.fault
    others.close()


def test_another_instance_at_the_address(scene: Scene) -> None:
    others = Instances(KEY, scene.clock)
    client = others.add("x", scene.endpoint("i-0"))
    for _ in range(200):
        others.wait(0.01)
        client.poll()
        scene.servers["i-0"].turn()
        if "fleet file" in client.fault:
            break
    assert "'i-0' answers" in client.fault
    others.close()


def test_what_no_front_says_is_passed_over(scene: Scene) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    KEY.secure_client(socket)
    socket.connect(scene.endpoint("i-0"))
    for data in (b"", b"\xc1", encode(Welcome(1)), b"x" * 1000):
        socket.send(data)
    scene.front.add(request("r", PROMPT, 5))
    scene.finish()
    assert is_done(scene.ended["r"])
    socket.close(linger=0)
    context.term()


def test_bad_requests_are_refused_at_once(scene: Scene) -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        scene.front.add(request("r", [10**6]))
    scene.front.add(request("r", PROMPT))
    with pytest.raises(RequestError, match="in use"):
        scene.front.add(request("r", PROMPT))
    scene.finish()


def test_a_drained_instance_gets_no_requests(scene: Scene) -> None:
    scene.front.drain("i-0")
    for number in range(4):
        scene.front.add(request(f"r{number}", PROMPT, 3))
    scene.finish()
    assert set(scene.router.placed) == {"i-1"}
    scene.front.drain("i-0", draining=False)
    scene.front.add(request("s", PROMPT, 3))
    scene.front.add(request("t", PROMPT, 3))
    scene.finish()
    assert "i-0" in scene.router.placed
    with pytest.raises(ConfigError, match="i-0, i-1"):
        scene.front.drain("i-7")


def test_a_new_front_knows_what_is_drained(scene: Scene) -> None:
    scene.front.drain("i-0")
    scene.front.add(request("r", PROMPT, 3))
    scene.finish()
    scene.front.close()
    scene.start_front()
    assert scene.front.members["i-0"].draining
    assert not scene.front.members["i-1"].draining
    scene.front.add(request("s", PROMPT, 3))
    scene.front.add(request("t", PROMPT, 3))
    scene.finish()
    assert set(scene.router.placed) == {"i-1"}


def test_a_drained_instance_that_is_started_again_is_drained(scene: Scene) -> None:
    scene.front.drain("i-0")
    scene.kill("i-0")
    scene.until(lambda: not scene.front.members["i-0"].is_here)
    scene.start("i-0")
    scene.until(lambda: scene.servers["i-0"]._facts.draining)
    scene.until(lambda: scene.front.members["i-0"].is_here)
    assert scene.front.members["i-0"].draining


def test_a_drain_that_ends_while_the_instance_is_away_has_ended(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2, silence_s=1.0)
    scene.front.drain("i-0")
    scene.until(lambda: scene.servers["i-0"]._facts.draining)
    away = scene.servers.pop("i-0")
    scene.until(lambda: not scene.front.members["i-0"].is_ready)
    scene.front.drain("i-0", draining=False)
    scene.servers["i-0"] = away
    scene.until(lambda: scene.front.members["i-0"].is_here and not away._facts.draining)
    assert not scene.front.members["i-0"].draining
    scene.close()


def test_another_front_hears_of_a_drain_and_its_end(scene: Scene) -> None:
    other = Instances(KEY, scene.clock)
    client = other.add("i-0", scene.endpoint("i-0"))
    found: list[bool] = []

    def heard(number: int) -> bool:
        other.wait(0.0)
        found.extend(event.draining for event in client.poll() if isinstance(event, DrainChanged))
        return len(found) == number

    scene.until(lambda: heard(0) and client.facts is not None)
    scene.until(lambda: scene.front.members["i-0"].is_here)  # the other front took over for a moment
    scene.front.drain("i-0")
    scene.until(lambda: heard(1))
    scene.front.drain("i-0", draining=False)
    scene.until(lambda: heard(2))
    assert found == [True, False]
    other.close()


def test_an_instance_counts_from_the_age_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of its host has another beginning than that of the front."""
    scene = Scene(tmp_path, 1)
    server = scene.servers["i-0"]
    taken: list[Request] = []
    server._clock = ManualClock(5e6)
    add = server.engine.add

    def noted(asked: Request) -> None:
        taken.append(asked)
        add(asked)

    monkeypatch.setattr(server.engine, "add", noted)
    arrived = replace(request("r", PROMPT, 3), arrival_s=scene.clock.now() - 7.0)
    scene.front.add(arrived)
    scene.finish()
    age_s = 5e6 - taken[0].arrival_s
    assert 7.0 <= age_s < 7.0 + 60.0
    scene.close()


def test_what_a_drained_instance_computes_goes_on_elsewhere(scene: Scene) -> None:
    scene.front.add(request("r", PROMPT, 30))
    scene.until(lambda: len(scene.tokens.get("r", ())) > 3)
    name = scene.router.placed[0]
    scene.front.drain(name)
    scene.front.move_away(name)
    scene.finish()
    assert scene.tokens["r"] == expect(scene, PROMPT, 30)
    assert len(set(scene.router.placed)) == 2
    scene.check_idle()


def test_moves_that_an_operator_wants_are_no_retries(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2, policy=FleetPolicy(max_retries=1))
    scene.front.add(request("r", PROMPT, 200))
    for _number in range(6):
        least = len(scene.tokens.get("r", ())) + 3
        scene.until(lambda least=least: len(scene.tokens.get("r", ())) >= least)  # type: ignore[misc]
        scene.front.move_away(scene.router.placed[-1])
    scene.finish()
    assert scene.tokens["r"] == expect(scene, PROMPT, 200)
    scene.close()


def test_an_engine_that_hangs_is_left(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2, silence_s=1.5)
    for number in range(2):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 40))
    scene.until(lambda: all(len(scene.tokens.get(f"r{number}", ())) > 3 for number in range(2)))
    hung = scene.servers.pop("i-0")  # its socket is open, and ZeroMQ answers for it
    scene.finish()
    for number in range(2):
        assert scene.tokens[f"r{number}"] == expect(scene, [number + 1, *PROMPT], 40)
    assert not scene.front.members["i-0"].is_ready
    scene.servers["i-0"] = hung
    scene.until(lambda: scene.front.members["i-0"].is_ready)
    scene.until(lambda: not scene.engine("i-0").stats().num_running)
    scene.close()


def test_full_instances_are_waited_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1, policy=FleetPolicy(patience_s=0.2))
    for number in range(40):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 150))
    began_s = scene.clock.now()
    scene.finish()
    assert scene.clock.now() - began_s > 0.2
    assert all(is_done(output) for output in scene.ended.values())
    scene.close()


def test_a_pin_does_not_release_that_of_another_process(scene: Scene) -> None:
    for number in range(2):
        scene.front.add(request(f"r{number}", PROMPT, 3))
    scene.finish()
    scene.front.drain("i-1")
    pinned = asked(scene, lambda: scene.front.pin_prefix(Tokens(PROMPT), Namespace()))
    [name] = [name for name in scene.servers if scene.engine(name).diagnostics().num_pinned_prefixes]
    scene.kill(name)
    scene.until(lambda: not scene.front.members[name].is_ready)
    scene.start(name)
    scene.until(lambda: scene.front.members[name].load is not None)
    scene.front.drain(next(iter(set(scene.servers) - {name})))
    scene.front.drain(name, draining=False)
    scene.front.add(request("again", PROMPT, 3))
    scene.finish()
    asked(scene, lambda: scene.front.pin_prefix(Tokens(PROMPT), Namespace()))
    pinned.release()
    for _ in range(20):
        scene.turn()
    assert sum(scene.engine(each).diagnostics().num_pinned_prefixes for each in scene.servers) == 1


def test_two_fronts_do_not_destroy_each_other(scene: Scene) -> None:
    other = Instances(KEY, scene.clock)
    client = other.add("i-0", scene.endpoint("i-0"))
    until_s, num_lost = scene.clock.now() + 1.5, 0
    while scene.clock.now() < until_s:
        other.wait(0.0)
        num_lost += sum(isinstance(event, InstanceLost) for event in client.poll())
        scene.turn()
    assert num_lost + scene.front.members["i-0"].num_lost <= 1
    assert client.facts is not None
    assert scene.front.members["i-0"].is_ready
    other.close()


def test_an_instance_that_leaves_the_fleet(scene: Scene) -> None:
    scene.front.add(request("r", PROMPT, 30))
    scene.until(lambda: len(scene.tokens.get("r", ())) > 3)
    name = scene.router.placed[0]
    scene.front.forget(name)
    scene.instances.remove(name)
    scene.finish()
    assert scene.tokens["r"] == expect(scene, PROMPT, 30)


def test_an_instance_that_moves_to_another_endpoint(scene: Scene) -> None:
    scene.front.add(request("r", PROMPT, 30))
    scene.until(lambda: len(scene.tokens.get("r", ())) > 3)
    name = scene.router.placed[0]
    scene.front.know(scene.instances.add(name, scene.endpoint("elsewhere")))
    scene.finish()
    assert scene.tokens["r"] == expect(scene, PROMPT, 30)


def asked(scene: Scene, ask: Any) -> Any:
    """What `ask` returns, which waits for instances in a thread of its own: front and instances turn."""
    import threading

    found: list[Any] = []

    def run() -> None:
        try:
            found.append(ask())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        scene.turn()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def test_questions_are_answered_for_all(scene: Scene) -> None:
    for number in range(2):
        scene.front.add(request(f"r{number}", PROMPT, 5))
    scene.finish()
    scene.until(lambda: all(member.diagnostics for member in scene.front.members.values()))
    assert scene.front.diagnostics().pass_time_s
    scene.until(lambda: all(member.stats for member in scene.front.members.values()))
    stats = scene.front.stats()
    assert stats.num_running == stats.num_waiting == 0
    blocks = stats.blocks_active + stats.blocks_cached + stats.blocks_free
    assert blocks == 2 * scene.engine("i-0").capability().num_blocks
    envelope = KVHintsEnvelope.parse(
        {
            "protocol_version": "0.1",
            "message_id": "m",
            "actions": [
                {
                    "action_id": "a",
                    "action_type": "kv.retain",
                    "payload": {"token_ids": PROMPT, "priority": 9},
                },
                {"action_id": "b", "action_type": "unknown", "payload": {}},
            ],
        }
    )
    outcomes = asked(scene, lambda: scene.front.hint(envelope, Namespace()))
    assert [outcome.status for outcome in outcomes] == [HintStatus.APPLIED, HintStatus.UNSUPPORTED]
    pinned = asked(scene, lambda: scene.front.pin_prefix(Tokens(PROMPT), Namespace()))
    assert pinned.num_blocks
    assert sum(scene.engine(name).diagnostics().num_pinned_prefixes for name in scene.servers) == 1
    pinned.release()
    for _ in range(10):
        scene.turn()
    assert not any(scene.engine(name).diagnostics().num_pinned_prefixes for name in scene.servers)
    with pytest.raises(RequestError, match="miss_attribution"):
        asked(scene, lambda: scene.front.explain(Tokens(PROMPT), Namespace()))
    assert asked(scene, scene.front.clear_cache) > 0
    assert asked(scene, scene.front.clear_cache) == 0


def test_pins_of_a_front_that_dies_are_released(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1, lease_s=0.2)
    scene.front.add(request("r", PROMPT, 3))
    scene.finish()
    asked(scene, lambda: scene.front.pin_prefix(Tokens(PROMPT), Namespace()))
    scene.instances.close()
    server = scene.servers["i-0"]
    for _ in range(20):
        server.turn()
    assert not scene.engine("i-0").diagnostics().num_pinned_prefixes
    server.close()


def test_a_fleet_that_does_not_start_says_which_instance(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1)
    scene.front.know(scene.instances.add("never", scene.endpoint("never")))
    with pytest.raises(EngineFailedError, match="never"):
        scene.front.wait_until_ready(0.2)
    scene.close()


def test_what_caches_hold_is_known_with_the_tokens(scene: Scene) -> None:
    scene.front.add(request("r", PROMPT, 3))
    scene.finish()
    [name] = scene.router.placed
    names = ["i-0", "i-1"]
    cached = scene.prefixes.lookup(Tokens(PROMPT), Namespace(), names)
    assert cached[names.index(name)].num_device_tokens == len(PROMPT) // 4 * 4
    assert cached[1 - names.index(name)].num_tokens == 0
    scene.kill(name)
    scene.until(lambda: not scene.front.members[name].is_ready)
    assert all(not each.num_tokens for each in scene.prefixes.lookup(Tokens(PROMPT), Namespace(), names))


@pytest.mark.parametrize("prefix", [PROMPT, [7] * 30], ids=["cached by both", "cached by none"])
def test_of_instances_with_as_much_of_a_prompt_one_idle_one_is_enough(
    scene: Scene, prefix: list[int]
) -> None:
    def is_idle() -> bool:
        return scene.front.is_idle(Tokens(prefix), Namespace())

    for name in scene.servers:
        scene.front.add(request(f"r on {name}", PROMPT, 3))
    scene.finish()
    scene.until(is_idle)
    for busy, other in (("i-0", "i-1"), ("i-1", "i-0")):
        for number, name in enumerate((busy, other)):
            assert is_idle(), f"{other} has no request"
            request_id = f"{number} beside {busy}"
            scene.router.turn = list(scene.servers).index(name)
            scene.front.add(request(request_id, [5] * 9, 2000))
            scene.until(lambda request_id=request_id: request_id in scene.tokens)  # type: ignore[misc]
            assert scene.router.placed[-1] == name
        assert not is_idle()
        for number in range(2):
            scene.front.abort(f"{number} beside {busy}")
        scene.until(
            lambda: all(each.load and not each.load.num_requests for each in scene.front.members.values())
        )


def test_an_instance_that_is_started_at_another_address(tmp_path: Path) -> None:
    """As an actor that Ray has started again: the front goes there, and what the old one had begins anew."""
    scene = Scene(tmp_path, 2)
    scene.front.drain("i-1")
    scene.front.add(request("r", PROMPT, 60))
    scene.until(lambda: len(scene.tokens.get("r", ())) > 3)
    former = scene.servers.pop("i-0")  # it has not ended yet, and nobody has noticed
    member = scene.front.members["i-0"]
    (tmp_path / "elsewhere").mkdir()
    scene.folder = tmp_path / "elsewhere"
    scene.start("i-0")
    scene.instances.add("i-0", scene.endpoint("i-0"))
    scene.finish()
    assert scene.tokens["r"] == expect(scene, PROMPT, 60)
    assert scene.front.members["i-0"] is member
    assert member.num_lost == 1
    assert scene.router.placed == ["i-0", "i-0"]
    former.close()
    scene.close()


def test_an_instance_whose_address_is_not_known_yet(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1)
    scene.front.know(scene.instances.add("i-1", ""))
    scene.front.add(request("r", PROMPT, 20))
    scene.finish()
    assert not scene.front.members["i-1"].is_ready
    scene.start("i-1")
    scene.instances.add("i-1", scene.endpoint("i-1"))
    scene.until(lambda: scene.front.members["i-1"].is_ready)
    assert scene.front.members["i-1"].num_lost == 0
    scene.close()
