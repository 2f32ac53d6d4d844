"""Budgets of reasoning and samples that agree, over a fleet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sagellm.core.errors import UnsupportedParameterError
from sagellm.core.features import REASONING_BUDGETS
from sagellm.core.protocols.cot import EarlyExit, EarlyStop
from sagellm.core.types import CapabilityDescriptor, SamplingParams
from sagellm.engines.build import load_config
from sagellm.engines.llm import LLM, RequestOptions
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.tokenizer_of import tokenizer_of
from sagellm.engines.simulator import TokenMemoryBackend
from tests.builders import expected_tokens, request
from tests.control_plane.fleet.scene import InTurn, Scene, Separating
from tests.engines.test_reasoning_budgets import BUDGETED, THINK, plain_answer

PROMPTS = {f"r{number}": [number, 7, THINK, *range(number)] for number in range(6)}


@pytest.mark.parametrize("router", [InTurn, Separating])
def test_a_budget_is_kept_by_the_instance_that_goes_on(router: type[InTurn], tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3, router=router(), exchanges=router is Separating)
    for budget, (name, prompt) in enumerate(PROMPTS.items()):
        scene.front.add(request(name, prompt, 12, max_reasoning_tokens=budget, **BUDGETED))
    scene.until(lambda: len(scene.tokens.get("r5", ())) >= 2)
    scene.kill("i-2")
    scene.finish()
    for budget, (name, prompt) in enumerate(PROMPTS.items()):
        assert scene.tokens[name] == plain_answer(prompt, budget, 12)
    scene.check_idle()
    scene.close()


def test_a_fleet_refuses_budgets_unless_all_instances_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = TokenMemoryBackend.capability

    def without(backend: TokenMemoryBackend) -> CapabilityDescriptor:
        found = made(backend)
        object.__setattr__(found, "features", found.features - {REASONING_BUDGETS})
        return found

    monkeypatch.setattr(TokenMemoryBackend, "capability", without)
    scene = Scene(tmp_path, 1)
    monkeypatch.undo()
    scene.start("i-1")
    scene.front.know(scene.instances.add("i-1", scene.endpoint("i-1")))
    scene.until(lambda: all(member.is_here for member in scene.front.members.values()))
    with pytest.raises(UnsupportedParameterError, match="max_reasoning_tokens"):
        scene.front.add(request("a", [1], 3, max_reasoning_tokens=3, **BUDGETED))
    scene.close()


@contextmanager
def turning(scene: Scene) -> Iterator[None]:
    """Instances take their turns on another thread."""
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            for server in scene.servers.values():
                server.wake()
                server.turn()

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_samples_are_started_on_instances_as_they_are_needed(tmp_path: Path) -> None:
    scene, prompt = Scene(tmp_path, 2), [5, 6, 7]
    tokenizer = tokenizer_of(load_config(environ={}).config, DEMO_MODEL)
    llm = LLM(scene.front, tokenizer, model_name="m", max_model_len=scene.front.max_model_len)
    answer = expected_tokens(TokenMemoryBackend(), prompt, 8)
    params = SamplingParams(n=8, max_tokens=20, stop_token_ids=(answer[-1],))
    with turning(scene):
        [completion] = llm.generate(prompt, RequestOptions(params, early_stop=EarlyStop(2)))
        whole = llm.generate(
            prompt, RequestOptions(SamplingParams(n=5, max_tokens=4), early_stop=EarlyStop(2))
        )
    found = completion.consensus
    assert found is not None
    assert (found.num_used, found.num_started, found.num_samples) == (2, 2, 8)
    assert len(scene.router.placed) == 2 + 5  # none of the second request has an answer
    assert whole[0].consensus is not None
    assert whole[0].consensus.num_used == 5
    assert not len(scene.front.requests)
    scene.close()


def test_early_exits_are_refused_behind_a_fleet(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1)
    tokenizer = tokenizer_of(load_config(environ={}).config, DEMO_MODEL)
    llm = LLM(scene.front, tokenizer, model_name="m", max_model_len=scene.front.max_model_len)
    with pytest.raises(UnsupportedParameterError, match=r"early_exit: .*not a fleet"):
        llm.submit([5, 6], RequestOptions(SamplingParams(max_tokens=4), early_exit=EarlyExit()))
    assert not len(scene.front.requests)
    scene.close()
