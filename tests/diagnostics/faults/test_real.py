"""Each planted fault is real: a client gets other answers than from the clean engine, over HTTP alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.diagnostics.faults.planted import FAULTS, Plant, WindowModel, WrongAdapter
from tests.effort import usual
from tests.serving.live import Live, serving

BLOCK = 16
Prompt = list[int]
Answers = list[list[float]]


class Client:
    """Asks in one order with seeded prompts, so that two servers get the same requests."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._rng = random.Random(5)

    def prompt(self, length: int) -> Prompt:
        return [self._rng.randrange(10, 700) for _ in range(length)]

    def ask(
        self, prompt: Prompt, *, salt: str = "a", model: str = "sagellm-demo", tokens: int = 4
    ) -> list[float]:
        """The logprobs of the generated tokens."""
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"cache_salt": salt, "logprobs": 1, "ignore_eos": True}
        answer = self._live.http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return list(answer.json()["choices"][0]["logprobs"]["token_logprobs"])

    def together(self, prompts: list[Prompt], tokens: int) -> Answers:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, tokens=tokens), prompts))


def twice(client: Client) -> Answers:
    prompt = client.prompt(8 * BLOCK + 5)
    return [client.ask(prompt), client.ask(prompt)]


def after_eviction(client: Client) -> Answers:
    prompt = client.prompt(4 * BLOCK + 3)
    client.ask(prompt)
    for _ in range(8):
        client.ask(client.prompt(40 * BLOCK))
    return [client.ask(prompt)]


def one_over_the_border(client: Client) -> Answers:
    prompt = client.prompt(2 * BLOCK + 1)
    return [client.ask(prompt), client.ask(prompt)]


def other_half_of_a_block(client: Client) -> Answers:
    prompt = client.prompt(3 * BLOCK)
    other = prompt[: BLOCK + BLOCK // 2] + client.prompt(2 * BLOCK)
    return [client.ask(prompt), client.ask(other)]


def under_pressure(client: Client) -> Answers:
    """More than the memory holds: some are preempted, and return from host memory."""
    return client.together([client.prompt(4 * BLOCK) for _ in range(32)], tokens=96)


def right_after_one_another(client: Client) -> Answers:
    prompt = client.prompt(6 * BLOCK + 3)
    return [client.ask(prompt, tokens=1), client.ask(prompt)]


def of_two_models(client: Client) -> Answers:
    prompt = client.prompt(4 * BLOCK + 3)
    return [client.ask(prompt), client.ask(prompt, model="lora")]


Scenario = Callable[[Client], Answers]
SCENARIOS: dict[str, Scenario] = {
    "stale block after eviction": after_eviction,
    "off by one at a border": one_over_the_border,
    "wrong position": twice,
    "swapped layers": twice,
    "dropped window block": twice,
    "bit flip on return from host": under_pressure,
    "wrong adapter namespace": of_two_models,
    "partial block reused": other_half_of_a_block,
    "late write": right_after_one_another,
}
CLEAN: dict[str, Callable[[], Plant]] = {
    "wrong adapter namespace": partial(WrongAdapter, right=True),
    "dropped window block": WindowModel,
}
FAR = 5e-3
"""Nats; the noise of our server is 1e-5."""


def answers(plant: Plant, scenario: Scenario, folder: Path) -> Answers:
    with pytest.MonkeyPatch.context() as patch:
        plant.install(patch)
        with serving(plant.load(folder), model_name="sagellm-demo", log_requests=False) as live:
            return scenario(Client(live))


def distance(left: Answers, right: Answers) -> float:
    pairs = zip(left, right, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", usual(["off by one at a border"], SCENARIOS))
def test_a_fault_changes_answers(name: str, tmp_path: Path) -> None:
    scenario, clean = SCENARIOS[name], CLEAN.get(name, Plant)()
    assert distance(answers(FAULTS[name](), scenario, tmp_path), answers(clean, scenario, tmp_path)) > FAR


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_clean_engine_gives_the_same_answers_twice(name: str, tmp_path: Path) -> None:
    clean = CLEAN.get(name, Plant)
    first, second = (answers(clean(), SCENARIOS[name], tmp_path) for _ in range(2))
    assert distance(first, second) < FAR


@pytest.mark.parametrize(("plant", "hit"), [(Plant, False), (FAULTS["cross-salt hit"], True)])
def test_a_cross_salt_hit_is_counted(plant: type[Plant], hit: bool, tmp_path: Path) -> None:
    """Its answers are right; what another tenant asked is what leaks."""
    with pytest.MonkeyPatch.context() as patch:
        planted = plant()
        planted.install(patch)
        with serving(planted.load(tmp_path), log_requests=False) as live:
            client = Client(live)
            prompt = client.prompt(4 * BLOCK + 3)
            client.ask(prompt, salt="a")
            before = live.metric("sagellm_prefix_cache_hits_total")
            client.ask(prompt, salt="b")
            assert (live.metric("sagellm_prefix_cache_hits_total") > before) is hit
