"""A `FleetEngine` over plain servers: no request is lost, whatever becomes of the servers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sagellm.control_plane.fleet.client import Instances
from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.control_plane.fleet.plain_server import PlainServers, PlainTerms
from sagellm.control_plane.fleet.served import FleetPolicy
from sagellm.control_plane.router.prefix_index import PrefixIndex
from sagellm.core.clock import MonotonicClock
from sagellm.core.fleet_config import PlainServerConfig
from sagellm.core.protocols.router import Placement
from sagellm.core.types import FinishReason, Request, RequestOutput, SamplingParams, Tokens
from tests.control_plane.fleet.plain_stand_in import MODEL, VOCAB, StandIn, continued, wait_until
from tests.control_plane.fleet.scene import KEY, InTurn, _check

PROMPT = [5, 9, 11, 13, 400, 3]


class PlainScene:
    """A front, and a stand-in for each kind."""

    def __init__(self, kinds: tuple[str, ...], **settings: Any) -> None:
        clock = MonotonicClock()
        self.servers = [StandIn(kind, **settings) for kind in kinds]
        self.instances = Instances(KEY, clock)
        self.router = InTurn()
        policy = FleetPolicy(patience_s=20.0, max_retries=100)
        self.front = FleetEngine(
            self.instances, self.router, PrefixIndex(clock), _check, clock=clock, policy=policy
        )
        terms = PlainTerms(MODEL, VOCAB, interval_s=0.02, lease_s=20.0)
        self.plain = PlainServers(terms, clock, self.instances.wake)
        for number, server in enumerate(self.servers):
            client = self.plain.add(f"p-{number}", PlainServerConfig(url=server.url))
            self.instances.include(client)
            self.front.know(client)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.front.wait_until_ready(10.0)

    def turn(self) -> None:
        for output in self.front.step():
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output
        self.front.check()

    def until(self, is_so: Callable[[], Any]) -> None:
        def look() -> Any:
            self.turn()
            return is_so()

        wait_until(look)

    def until_drawn(self, num_tokens: int) -> None:
        """Until some answer has more tokens than this."""
        self.until(lambda: any(len(each) > num_tokens for each in self.tokens.values()))

    def finish(self) -> None:
        self.until(lambda: not len(self.front.requests))

    def restart(self, number: int, **settings: Any) -> None:
        former = self.servers[number]
        former.kill()
        self.servers[number] = StandIn(former.kind, port=former.port, **settings)

    def close(self) -> None:
        self.front.close()
        self.plain.close()
        for server in self.servers:
            server.kill()


@pytest.fixture
def scene() -> Iterator[PlainScene]:
    made = PlainScene(("vllm", "sglang"), delay_s=0.005)
    yield made
    made.close()


def request(name: str, num: int, first: int = 1, **params: Any) -> Request:
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": num, **params})
    return Request(name, Tokens([first, *PROMPT]), chosen)


def test_requests_are_answered_by_both(scene: PlainScene) -> None:
    for number in range(8):
        scene.front.add(request(f"r{number}", 6, number))
    scene.finish()
    for number in range(8):
        assert scene.tokens[f"r{number}"] == continued([number, *PROMPT], 6)
        assert scene.ended[f"r{number}"].finish_reason is FinishReason.LENGTH
    assert set(scene.router.placed) == {"p-0", "p-1"}
    assert scene.front.clear_cache() == 0
    assert scene.front.diagnostics().num_pinned_blocks == 0


def test_no_request_is_lost_when_servers_die(scene: PlainScene) -> None:
    draw = random.Random(3)
    for number in range(12):
        scene.front.add(request(f"r{number}", 60, number))
    for victim in (0, 1, 0, 1):
        scene.until_drawn(draw.randrange(4, 40))
        scene.restart(victim, delay_s=0.005)
    scene.finish()
    for number in range(12):
        assert scene.tokens[f"r{number}"] == continued([number, *PROMPT], 60)
        assert scene.ended[f"r{number}"].finish_reason is FinishReason.LENGTH
    assert scene.front.num_retries > 0
    wait_until(lambda: not any(server.num_running for server in scene.servers))


def test_cut_streams_go_on_elsewhere(scene: PlainScene) -> None:
    for server in scene.servers:
        server.cut_after = 5
    for number in range(6):
        scene.front.add(request(f"r{number}", 20, number))
    scene.finish()
    for number in range(6):
        assert scene.tokens[f"r{number}"] == continued([number, *PROMPT], 20)
    assert scene.front.num_retries == 2
    assert all(not member.num_lost for member in scene.front.members.values())


def test_a_made_up_seed_is_not_sent(scene: PlainScene) -> None:
    scene.front.add(request("r", 5, temperature=1.0))
    scene.front.add(request("s", 5, temperature=1.0))
    scene.finish()
    assert all(scene.ended[name].finish_reason is FinishReason.LENGTH for name in "rs")
    bodies = [body for server in scene.servers for body in server.bodies]
    assert not any("seed" in body or "sampling_seed" in body.get("sampling_params", {}) for body in bodies)


def test_a_server_that_draws_by_position_gets_the_same_seed_each_time() -> None:
    scene = PlainScene(("sglang",), delay_s=0.005, info={"enable_deterministic_inference": True}, cut_after=3)
    scene.front.add(request("r", 9, temperature=1.0))
    scene.finish()
    bodies = scene.servers[0].bodies
    seeds = {body["sampling_params"]["sampling_seed"] for body in bodies}
    assert (len(bodies), len(seeds)) == (2, 1)
    assert len(scene.tokens["r"]) == 9
    scene.close()


def test_a_client_that_gave_a_seed_is_told(scene: PlainScene) -> None:
    scene.servers[0].cut_after = 3
    scene.front.add(request("r", 9, temperature=1.0, seed=1))
    scene.finish()
    assert "random numbers of the seed" in (scene.ended["r"].error or "")


def test_nothing_is_handed_over_between_plain_servers(
    scene: PlainScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(*_: object) -> Placement:
        return Placement("p-0", "p-1", fetch_from="p-1")

    monkeypatch.setattr(scene.router, "place", place)
    scene.front.add(request("r", 9))
    scene.finish()
    assert scene.tokens["r"] == continued([1, *PROMPT], 9)
    assert not scene.servers[0].bodies


def test_an_abort_reaches_the_server(scene: PlainScene) -> None:
    scene.front.add(request("r", 200))
    scene.until(lambda: len(scene.tokens.get("r", ())) > 3)
    assert scene.front.abort("r")
    wait_until(lambda: sum(server.num_aborted for server in scene.servers) == 1)
    assert not len(scene.front.requests)
