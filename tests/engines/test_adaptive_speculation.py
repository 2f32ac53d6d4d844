"""An engine verifies proposed tokens where that is faster: its step times are those of a scripted clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from sagellm.accel.speculative.lengths import LEAST_ASKED, PLAIN_STEPS, ChainLengths
from sagellm.core.clock import ManualClock
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.core.types import Request, Tokens
from sagellm.engines.overlap import InFlightStep, PlannedStep
from sagellm.engines.planner import Planner
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


class Slow(OftenRight):
    """Takes as long as a step."""

    def __init__(self, clock: ManualClock, answer: list[int], wrong: float) -> None:
        super().__init__(5, answer, wrong)
        self.clock, self.num_calls = clock, 0

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        self.num_calls += 1
        self.clock.advance(0.01)
        return super().propose_one(request, tokens, num_tokens)


class Keeping:
    """A drafter, as far as it rests; a request that joins makes it ready."""

    keeping_s = 0.001

    def __init__(self) -> None:
        self.rests, self.is_ready, self.changes = False, True, list[str]()

    def rest(self) -> None:
        self.rests, self.is_ready = True, False
        self.changes.append("rest")

    def wake(self) -> None:
        if self.rests:
            self.changes.append("wake")
        self.rests = False

    def draft(self, asked: Sequence[Asked], min_probability: float) -> Sequence[Proposal]:
        raise AssertionError("the proposer is another")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_slow_proposer_without_success_costs_little(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hardly asked, its drafter rests, and steps are planned ahead again."""
    right, clock, drafter = (
        expected_tokens(TokenMemoryBackend(max_model_len=640), range(5), 600),
        ManualClock(),
        Keeping(),
    )
    proposer = Slow(clock, right, 1.0)
    speculation = Speculation(proposer, 4, ChainLengths(), clock, drafter)
    backend = TimedMemory(clock, 0.01, 0.0)
    engine = fake_engine(backend, speculation=speculation, clock=clock, overlap=overlap)
    ahead: list[PlannedStep | None] = []
    plan_ahead = Planner.plan_ahead

    def noted(planner: Planner, in_flight: InFlightStep, view: SchedulingView) -> PlannedStep | None:
        ahead.append(plan_ahead(planner, in_flight, view))
        return ahead[-1]

    monkeypatch.setattr(Planner, "plan_ahead", noted)
    for name in ("a", "b"):
        engine.add(request(name, range(5), 600))
        assert run_all(engine)[name] == right
        drafter.is_ready = not drafter.rests  # the next request has joined
    assert LEAST_ASKED <= proposer.num_calls <= 30
    assert drafter.changes[:2] == ["rest", "wake"], "awake for a trial, which needs another request"
    if overlap:
        assert sum(planned is not None for planned in ahead) > 1000
    engine.close()


@pytest.mark.parametrize("wrong", [0.0, 0.5, 1.0])
def test_behind_a_step_with_chains_nothing_is_planned_ahead(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the proposer is not asked for the next one: how many tokens count is not known yet."""
    asks = itertools.cycle([True, True, False, False])
    monkeypatch.setattr(Speculation, "should_ask", lambda *_: next(asks))
    right = expected_tokens(TokenMemoryBackend(), range(5), 100)
    speculation = Speculation(OftenRight(5, right, wrong), 4)
    engine = fake_engine(TokenMemoryBackend(), speculation=speculation, overlap=True)
    for name in ("a", "b"):
        engine.add(request(name, range(5), 100))
    assert run_all(engine) == {"a": right, "b": right}
    assert speculation.num_proposed > 0
    engine.close()


class MostlyKnowing(Slow):
    """Knows what one request draws; each tenth call finds nothing. Takes a tenth of a step."""

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        self.num_calls += 1
        self.clock.advance(0.001)
        if request.request_id != "long" or self.num_calls % 10 == 0:
            return Proposal()
        return OftenRight.propose_one(self, request, tokens, num_tokens)


def test_prompts_in_each_step_do_not_keep_a_slow_proposer_from_being_asked() -> None:
    """Steps with prompts are not those that chains are compared with: that none was plain changes nothing."""
    right, clock = expected_tokens(TokenMemoryBackend(max_model_len=640), range(5), 300), ManualClock()
    proposer = MostlyKnowing(clock, right, 0.0)
    speculation = Speculation(proposer, 1, ChainLengths(), clock)
    backend = TimedMemory(clock, 0.01, 0.0)
    engine = fake_engine(backend, speculation=speculation, clock=clock, overlap=True)
    engine.add(request("long", range(5), 300))
    num_steps = 0
    while engine.find("long") is not None:
        engine.add(request(f"short {num_steps}", range(10, 20), 1))
        engine.step()
        num_steps += 1
    assert proposer.num_calls > 0.9 * num_steps
    run_all(engine)
    engine.close()


def test_prompts_alone_are_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposer is asked about requests in decode: it waits for no prompt."""
    ahead: list[bool] = []
    plan_ahead = Planner.plan_ahead

    def noted(planner: Planner, in_flight: InFlightStep, view: SchedulingView) -> PlannedStep | None:
        planned = plan_ahead(planner, in_flight, view)
        ahead.append(planned is not None)
        return planned

    monkeypatch.setattr(Planner, "plan_ahead", noted)
    speculation = Speculation(OftenRight(64, [], 0.0), 4)
    engine = fake_engine(speculation=speculation, max_batched_tokens=16, overlap=True)
    engine.add(request("a", range(64), 2))
    run_all(engine)
    assert ahead[:4] == [True, True, True, False], "the last chunk draws a token, which the proposer sees"
    engine.close()


class FailsOnce(TimedMemory):
    """The first step with chains fails."""

    has_failed = False

    def execute(self, plan: ExecutionPlan) -> StepResult:
        if plan.chains and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("no chains")
        return super().execute(plan)


def test_the_proposal_of_a_step_that_fails_counts_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps behind it ask nobody, until each request has taken one alone."""
    right, clock = expected_tokens(TokenMemoryBackend(max_model_len=640), range(5), 60), ManualClock()
    proposer, lengths = Slow(clock, right, 0.0), ChainLengths()
    backend = FailsOnce(clock, 0.01, 0.0)
    gave, took = list[int](), list[float]()
    step_took = lengths.step_took

    def noted(num_rows: int, num_prompt_tokens: int, num_proposed: int, seconds: float) -> None:
        took.append(seconds)
        step_took(num_rows, num_prompt_tokens, num_proposed, seconds)

    monkeypatch.setattr(lengths, "step_took", noted)
    monkeypatch.setattr(lengths, "asking_gave", lambda num_rows, *_: gave.append(num_rows))
    engine = fake_engine(backend, speculation=Speculation(proposer, 4, lengths, clock), clock=clock)
    for name in "ab":
        engine.add(request(name, range(5), 60))
    calls = 0
    while not backend.has_failed:
        calls = proposer.num_calls
        engine.step()
    observed = len(gave)
    for _ in range(2):
        engine.step()
    assert proposer.num_calls == calls + 2, "asked about both, in the step that has failed"
    assert len(gave) == observed
    assert took[-2:] == pytest.approx([0.01, 0.01])
    assert run_all(engine).keys() == {"a", "b"}


def test_counts_are_by_position() -> None:
    right = expected_tokens(TokenMemoryBackend(), range(5), 40)
    speculation = Speculation(OftenRight(5, right, 0.0), 3, ChainLengths(), ManualClock())
    engine = fake_engine(speculation=speculation)
    engine.add(request("a", range(5), 40))
    run_all(engine)
    counts = engine.diagnostics().speculation
    assert counts.proposed == counts.accepted
    assert sum(counts.proposed) == speculation.num_proposed == speculation.num_accepted
    num_steps = 1 + PLAIN_STEPS + 9
    assert list(counts.proposed) == [9, 9, 9], f"{num_steps} steps for 40 tokens"
