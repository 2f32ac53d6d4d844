"""The native engine draws the same tokens under every strategy and every order of passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.registry import registry
from sagellm.core.types import SLO, Namespace, Request, Tokens
from sagellm.kvmgr.scheduler_ir import strategies
from tests.builders import run_all
from tests.engines.native.test_same_tokens import SAMPLING, alone, engine, prompt

NAME = "llama"
ASKS = [(number % 3, 9 + 5 * number % 31, number, 3 + number % 6, number % 5) for number in range(14)]
"""Family of the prompt, its length, its own seed, tokens to draw, sampling."""
OTHERS = sorted(set(registry("pass").names()) - {"vllm_like"})


def check(
    passes: Sequence[SchedulerPass], num_blocks: int = 30, budget: int = 24, *, overlap: bool = False
) -> None:
    """Prompts that share prefixes, come while others run, and do not fit together."""
    busy = engine(NAME, num_blocks, budget, passes, caching=True, overlap=overlap)
    got: dict[str, list[int]] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for number, (family, length, own, max_tokens, sampling) in enumerate(ASKS):
        name, tokens = str(number), prompt(family, length, own)
        expected[name] = alone(NAME, tuple(tokens), max_tokens, sampling, name)
        busy.add(
            Request(
                name,
                Tokens(tokens),
                replace(SAMPLING[sampling], max_tokens=max_tokens),
                arrival_s=busy.clock.now(),
                priority=number % 4,
                slo=SLO(ttft_s=0.5, tpot_s=0.1) if number % 2 else SLO(),
            )
        )
        busy.clock.advance(0.2)  # type: ignore[attr-defined]
        if number % 3 == 2:
            for output in busy.step():
                got.setdefault(output.request_id, []).extend(output.new_token_ids)
    for name, new in run_all(busy).items():
        got.setdefault(name, []).extend(new)
    assert {name: tuple(tokens) for name, tokens in got.items()} == expected


@pytest.mark.parametrize("strategy", strategies.STRATEGIES)
def test_the_same_tokens_with_every_strategy(strategy: str) -> None:
    check(strategies.make(strategy))


@pytest.mark.parametrize("strategy", strategies.STRATEGIES)
def test_the_same_tokens_where_many_are_preempted(strategy: str) -> None:
    check(strategies.make(strategy), 14, 48)


@pytest.mark.parametrize("strategy", strategies.STRATEGIES)
def test_the_same_tokens_where_scheduling_overlaps_execution(strategy: str) -> None:
    check(strategies.make(strategy), 60, overlap=True)


@pytest.mark.parametrize("seed", range(12))
def test_the_same_tokens_with_passes_in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    names = draw.sample(OTHERS, draw.randrange(1, len(OTHERS) + 1))
    check([registry("pass").create(name) for name in names])


def test_strategies_swap_while_requests_run() -> None:
    busy = engine(NAME, 40, 24, strategies.make("fifo"), caching=True)
    draw, expected = random.Random(1), {}
    for number, (family, length, own, max_tokens, _) in enumerate(ASKS):
        tokens = prompt(family, length, own)
        expected[str(number)] = alone(NAME, tuple(tokens), max_tokens, 0, str(number))
        params = replace(SAMPLING[0], max_tokens=max_tokens)
        tenant = Namespace()
        busy.add(Request(str(number), Tokens(tokens), params, namespace=tenant))
    got: dict[str, list[int]] = {}
    while busy.has_work():
        busy.scheduler.use(strategies.make(draw.choice(list(strategies.STRATEGIES))))
        for output in busy.step():
            got.setdefault(output.request_id, []).extend(output.new_token_ids)
        busy.check()
        busy.clock.advance(0.1)  # type: ignore[attr-defined]
    assert {name: tuple(tokens) for name, tokens in got.items()} == expected
