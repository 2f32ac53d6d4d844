"""An engine verifies proposed tokens where that is faster: its step times are those of a scripted clock."""

from __future__ import annotations

import random

import pytest

from sagellm.accel.speculative.lengths import PLAIN_STEPS, ChainLengths
from sagellm.core.clock import ManualClock
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.speculative import Proposal
from sagellm.core.types import Request, Tokens
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from tests.builders import OneByOne, expected_tokens, fake_engine, request, run_all


class TimedMemory(TokenMemoryBackend):
    """A step takes `fixed_s` and `token_s` for each position."""

    def __init__(self, clock: ManualClock, fixed_s: float, token_s: float) -> None:
        super().__init__(num_blocks=400, max_model_len=640)
        self._clock, self._fixed_s, self._token_s = clock, fixed_s, token_s

    def execute(self, plan: ExecutionPlan) -> StepResult:
        self._clock.advance(self._fixed_s + self._token_s * plan.num_tokens)
        return super().execute(plan)


class OftenRight(OneByOne):
    """Proposes what the model will draw, each token wrong with a chance."""

    def __init__(self, num_prompt: int, answer: list[int], wrong: float) -> None:
        self._num_prompt, self._answer, self._wrong, self._draw = num_prompt, answer, wrong, random.Random(1)

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        drawn = len(tokens) - self._num_prompt
        right = self._answer[drawn : drawn + num_tokens]
        return Proposal(tuple((t + (self._draw.random() < self._wrong)) % 97 for t in right))

    def observe(self, request_id: str, num_accepted: int) -> None: ...

    def forget(self, request: Request, tokens: Tokens) -> None: ...


@pytest.mark.parametrize(
    ("fixed_s", "token_s", "wrong", "faster"),
    [(0.01, 0.0, 0.1, 2.4), (0.01, 0.0, 1.0, 0.97), (0.0, 0.01, 0.1, 0.97), (0.01, 0.0005, 0.4, 1.2)],
    ids=["bound by memory", "always wrong", "bound by computing", "in between"],
)
def test_a_generation_is_faster_or_as_fast(
    fixed_s: float, token_s: float, wrong: float, faster: float
) -> None:
    right = expected_tokens(TokenMemoryBackend(max_model_len=640), range(5), 600)
    spent = {}
    for name, lengths in (("plain", None), ("adaptive", ChainLengths())):
        clock = ManualClock()
        proposer = OftenRight(5, right, wrong) if lengths else OftenRight(5, [], wrong)
        speculation = Speculation(proposer, 4, lengths, clock)
        engine = fake_engine(TimedMemory(clock, fixed_s, token_s), speculation=speculation, clock=clock)
        engine.add(request("a", range(5), 600))
        assert run_all(engine)["a"] == right
        spent[name] = clock.now()
        if lengths:
            saved_s = engine.diagnostics().speculation.saved_s
            assert saved_s == pytest.approx(spent["plain"] - spent["adaptive"], abs=0.1 * spent["plain"])
    assert spent["plain"] / spent["adaptive"] >= faster


def test_counts_are_by_position() -> None:
    right = expected_tokens(TokenMemoryBackend(), range(5), 40)
    speculation = Speculation(OftenRight(5, right, 0.0), 3, ChainLengths())
    engine = fake_engine(speculation=speculation)
    engine.add(request("a", range(5), 40))
    run_all(engine)
    counts = engine.diagnostics().speculation
    assert counts.proposed == counts.accepted
    assert sum(counts.proposed) == speculation.num_proposed == speculation.num_accepted
    num_steps = 1 + PLAIN_STEPS + 9
    assert list(counts.proposed) == [9, 9, 9], f"{num_steps} steps for 40 tokens"
