"""Prompts on one instance and answers on another: tokens, losses, and anything at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sagellm.control_plane.fleet import instance_server
from sagellm.control_plane.fleet.instance_server import InstanceServer
from sagellm.control_plane.fleet.served import FleetPolicy
from sagellm.control_plane.router._what_if import FleetForm
from sagellm.control_plane.router.cost import CostRouter
from sagellm.control_plane.router.separation import SeparateAdaptively
from sagellm.core.protocols.fleet import HandOverState
from sagellm.core.protocols.router import (
    CachedPrefix,
    ExecutionInstance,
    InstanceType,
    Placement,
    RequestMetadata,
)
from sagellm.core.types import SLO, Namespace, Tokens
from sagellm.engines.simulator.token_memory import TokenMemoryBackend
from tests.builders import expected_tokens, fake_engine, request
from tests.control_plane.fleet.scene import KEY, InTurn, Scene, Separating, is_done

PROMPT = list(range(1, 30))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path, 3, exchanges=True, router=Separating())
    yield made
    made.close()


def expect(scene: Scene, prompt: list[int], num: int) -> list[int]:
    return expected_tokens(next(iter(scene.backends.values())), prompt, num)


def test_answers_are_those_of_one_engine(scene: Scene) -> None:
    for number in range(6):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 12))
    scene.finish()
    for number in range(6):
        assert scene.tokens[f"r{number}"] == expect(scene, [number + 1, *PROMPT], 12)
    for name in ("i-1", "i-2"):  # the KV came, and was found
        cached = scene.prefixes.lookup(Tokens([1, *PROMPT]), Namespace(), [name])
        if cached[0].num_tokens:
            break
    else:
        raise AssertionError("no KV has come to a decode instance")
    assert scene.engine("i-0").stats().num_steps < scene.engine("i-1").stats().num_steps
    scene.until(lambda: not scene.servers["i-0"].hand_overs.has_work)  # type: ignore[union-attr]
    scene.check_idle()


class Adapting(InTurn):
    """`cost` with `adaptive` on hybrid instances, one of which computes prompts."""

    def __init__(self) -> None:
        super().__init__()
        policy = {"name": "adaptive", "tokens": 8}
        self.cost = CostRouter(separation=policy, prefill_token_s=1e-6, step_s=1e-6)
        assert isinstance(self.cost._policy, SeparateAdaptively)
        self.parts = self.cost._policy._parts
        self.parts.form = FleetForm(1, True)

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        hybrid = [replace(each, kind=InstanceType.HYBRID) for each in instances]
        goal = replace(request, slo=SLO(60.0, 60.0), slo_slack_s=60.0)
        return self.cost.place(goal, hybrid, cached)


def test_a_fleet_carries_out_the_parts_of_adaptive(tmp_path: Path) -> None:
    router = Adapting()
    scene = Scene(tmp_path, 3, exchanges=True, router=router)
    for number in range(6):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 12))
    [prefill] = [name for name, kind in router.parts.kinds.items() if kind is InstanceType.PREFILLING]
    scene.front.add(request("short", [7, 8, 9], 12))
    short = scene.front.requests.get("short")
    assert short is not None
    assert short.placement is not None
    assert not short.placement.is_separated
    assert prefill not in short.instances
    scene.finish()
    for number in range(6):
        assert scene.tokens[f"r{number}"] == expect(scene, [number + 1, *PROMPT], 12)
    assert scene.front.placements[prefill] == 6
    scene.until(lambda: not scene.servers[prefill].hand_overs.has_work)  # type: ignore[union-attr]
    scene.check_idle()
    scene.close()


def test_a_hybrid_instance_that_exchanges_nothing_serves_whole_requests(tmp_path: Path) -> None:
    engine, endpoint = fake_engine(TokenMemoryBackend()), f"ipc://{tmp_path}/h"
    server = InstanceServer("h", engine, endpoint, KEY, max_model_len=99, kind=InstanceType.HYBRID)
    assert server.kind is InstanceType.GENERAL
    server.close()


def test_a_first_token_that_ends_the_request_is_not_handed_over(scene: Scene) -> None:
    scene.front.add(request("r", PROMPT, 1))
    scene.finish()
    assert scene.tokens["r"] == expect(scene, PROMPT, 1)
    assert is_done(scene.ended["r"])


@pytest.mark.parametrize("victim", ["i-0", "i-1", "i-2"])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_any_instance_may_die_at_any_time(scene: Scene, victim: str, num_tokens: int) -> None:
    for number in range(4):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 20))
    scene.until(lambda: all(len(scene.tokens.get(f"r{n}", ())) >= num_tokens for n in range(4)))
    scene.kill(victim)
    scene.finish()
    for number in range(4):
        assert scene.tokens[f"r{number}"] == expect(scene, [number + 1, *PROMPT], 20)
        assert is_done(scene.ended[f"r{number}"])


def test_reports_tell_the_state_of_a_hand_over(scene: Scene) -> None:
    states: list[HandOverState] = []
    take = scene.front._on_report

    def record(member: object, report: object) -> None:
        states.append(report.state)  # type: ignore[attr-defined]
        take(member, report)  # type: ignore[arg-type]

    scene.front._on_report = record  # type: ignore[method-assign]
    scene.front.add(request("r", PROMPT, 5))
    scene.finish()
    assert HandOverState.READY in states
    assert HandOverState.FAILED not in states


def test_an_abort_in_any_phase_leaves_nothing(scene: Scene) -> None:
    for number in range(30):
        name = f"r{number}"
        scene.front.add(request(name, [number + 1, *PROMPT], 20))
        for _ in range(number % 10):
            scene.turn()
        scene.front.abort(name)
    for _ in range(50):
        scene.turn()
    scene.until(lambda: all(not s.hand_overs.has_work for s in scene.servers.values()))  # type: ignore[union-attr]
    scene.check_idle()
    assert not len(scene.front.requests)


def test_lost_events_make_a_guess_of_what_is_known(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_server, "MAX_CHANGES", 0)
    for number in range(3):
        scene.front.add(request(f"r{number}", [number + 1, *PROMPT], 5))
    scene.finish()
    assert not all(scene.prefixes.is_fresh(name) for name in scene.servers)
    assert scene.tokens["r1"] == expect(scene, [2, *PROMPT], 5)


@pytest.mark.parametrize("seed", range(12))
def test_anything_at_random(tmp_path: Path, seed: int) -> None:  # noqa: C901 - one case for each act
    """Requests, aborts, deaths, starts, drains in any order: every request that is left gets its tokens."""
    rng = random.Random(seed)
    router: InTurn = Separating() if seed % 2 else InTurn()
    scene = Scene(tmp_path, 3, exchanges=True, router=router, policy=FleetPolicy(max_retries=100))
    wanted: dict[str, list[int]] = {}
    names = ["i-0", "i-1", "i-2"]
    for number in range(120):
        match rng.randrange(10):
            case 0 | 1 | 2:
                prompt = [rng.randrange(1, 90) for _ in range(rng.randrange(1, 60))]
                num = rng.randrange(1, 25)
                scene.front.add(request(f"r{number}", prompt, num))
                wanted[f"r{number}"] = expect(scene, prompt, num)
            case 3 if wanted:
                name = rng.choice(list(wanted))
                if scene.front.abort(name):
                    del wanted[name]
            case 4 if len(scene.servers) > 1 and rng.random() < 0.5:
                scene.kill(rng.choice(list(scene.servers)))
            case 5:
                for name in [name for name in names if name not in scene.servers][:1]:
                    scene.start(name)
            case 6:
                name = rng.choice(names)
                scene.front.drain(name, draining=not scene.front.members[name].draining)
            case 7 if rng.random() < 0.3:
                scene.front.move_away(rng.choice(names))
            case _:
                for _ in range(rng.randrange(1, 6)):
                    scene.turn()
    for name in names:
        scene.front.drain(name, draining=False)
        if name not in scene.servers:
            scene.start(name)
    scene.finish()
    for name, tokens in wanted.items():
        assert scene.tokens[name] == tokens
        assert is_done(scene.ended[name])
    scene.until(lambda: all(not s.hand_overs.has_work for s in scene.servers.values()), 60)  # type: ignore[union-attr]
    scene.check_idle()
    scene.close()
