"""Steps in which rows compute chains of proposed tokens: the outputs are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sagellm.core.errors import CapacityError, PlanError, RequestError
from sagellm.core.plan import Chain, Draft, ExecutionPlan, StepResult
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.protocols.speculative import Proposal
from sagellm.core.types import FinishReason, Request, SamplingParams, TokenLogprob, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.scheduler_ir.explain import ScheduleLog
from tests.builders import (
    OneByOne,
    RandomProposer,
    check_books,
    expected_tokens,
    fake_engine,
    request,
    run_all,
)


@dataclass
class Scripted(OneByOne):
    """Proposes the same tokens to every request, and keeps what it is told."""

    token_ids: Sequence[int]
    accepted: list[tuple[str, int]] = field(default_factory=list)
    forgotten: list[tuple[str, list[int]]] = field(default_factory=list)

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        return Proposal(tuple(self.token_ids))

    def observe(self, request_id: str, num_accepted: int) -> None:
        self.accepted.append((request_id, num_accepted))

    def forget(self, request: Request, tokens: Tokens) -> None:
        self.forgotten.append((request.request_id, tokens.tolist()))


def right_tokens(prompt: Iterable[int], count: int) -> list[int]:
    return expected_tokens(TokenMemoryBackend(), prompt, count)


@dataclass
class Answer:
    """All that an engine said of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    parts: list[int] = field(default_factory=list)


def answers(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    found = {one.request_id: Answer() for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work():
        for output in engine.step():
            answer = found[output.request_id]
            answer.tokens += output.new_token_ids
            answer.logprobs += output.logprobs
            answer.parts.append(len(output.new_token_ids))
            assert output.num_output_tokens == len(answer.tokens)
            answer.reason = output.finish_reason
        check_books(engine)
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_stop_tokens_and_lengths_inside_a_chain(seed: int, overlap: bool) -> None:
    """Requests that end by a stop token, an EOS, the length of the answer or of the model.

    Every second case has trees.
    """
    draw = random.Random(seed)
    requests = []
    for name in "abcdef":
        prompt = [draw.randrange(97) for _ in range(draw.randrange(1, 12))]
        own = right_tokens(prompt, 30)
        max_tokens = draw.choice([1, 2, 7, 30, None])
        requests.append(
            request(
                name,
                prompt,
                max_tokens,  # type: ignore[arg-type]
                min_tokens=draw.randrange(max_tokens or 9) if draw.random() < 0.5 else 0,
                stop_token_ids=tuple(draw.sample(own, draw.randrange(3))),
                eos_token_ids=frozenset(draw.sample(own, draw.randrange(3))),
                ignore_eos=draw.random() < 0.3,
                logprobs=draw.choice([None, 0]),
            )
        )
    plain = answers(fake_engine(TokenMemoryBackend(max_model_len=48)), requests)
    backend = TokenMemoryBackend(max_model_len=48)
    speculation = Speculation(RandomProposer(backend, seed, trees=bool(seed % 2)), 5)
    engine = fake_engine(backend, speculation=speculation, overlap=overlap)
    proposed = answers(engine, requests)
    engine.close()
    for name, answer in plain.items():
        other = proposed[name]
        assert (other.tokens, other.logprobs, other.reason) == (answer.tokens, answer.logprobs, answer.reason)
    assert speculation.num_accepted


def test_accepted_tokens_come_in_one_step() -> None:
    right = right_tokens(range(5), 12)
    wrong = (right[5] + 1) % 97
    proposer = Scripted(())
    engine = fake_engine(speculation=Speculation(proposer, 4))
    engine.add(request("a", range(5), 12))
    assert [out.new_token_ids for out in engine.step()] == [(right[0],)]
    for proposed, drawn in (
        (right[1:5], right[1:6]),
        ([wrong, *right[7:9]], right[6:7]),
        ([right[7], wrong, right[9]], right[7:9]),
        ([], right[9:10]),
        (right[10:], right[10:12]),
    ):
        proposer.token_ids = proposed
        assert [out.new_token_ids for out in engine.step()] == [tuple(drawn)]
    assert not engine.has_work()
    assert proposer.accepted == [("a", 4), ("a", 0), ("a", 1), ("a", 1)]
    assert proposer.forgotten == [("a", [*range(5), *right])]
    speculation = engine.speculation
    assert speculation is not None
    assert (speculation.num_proposed, speculation.num_accepted) == (4 + 3 + 3 + 1, 6)


def test_no_more_than_the_request_may_still_draw_is_proposed() -> None:
    engine = fake_engine(speculation=Speculation(Scripted([1] * 9), 9))
    engine.add(request("a", range(5), 4))
    lengths = []
    while engine.has_work():
        engine.step()
        assert engine.last_plan is not None
        lengths += [len(chain.token_ids) for chain in engine.last_plan.chains]
    assert lengths == [2, 1]


def test_a_request_says_how_many_tokens_may_be_proposed_for_it() -> None:
    """None, none at all, fewer than the engine, more than the engine."""
    proposer = Scripted([1] * 9)
    engine = fake_engine(speculation=Speculation(proposer, 4))
    for name, most in (("a", None), ("b", 0), ("c", 2), ("d", 64)):
        engine.add(request(name, range(5), 9, num_speculative_tokens=most))
    engine.step()
    engine.step()
    plan = engine.last_plan
    assert plan is not None
    assert [len(chain.token_ids) for chain in plan.chains] == [4, 2, 4]
    assert plan.decode_rows[1] not in {chain.row for chain in plan.chains}
    for tokens in run_all(engine).values():
        assert tokens == right_tokens(range(5), 9)[-len(tokens) :]
    assert {name for name, _ in proposer.accepted} == {"a", "c", "d"}


@pytest.mark.parametrize("number", [-1, 65, 1.5, True, "4"])
def test_a_wrong_number_of_tokens_is_refused(number: Any) -> None:
    with pytest.raises(RequestError, match="num_speculative_tokens must be") as caught:
        SamplingParams(num_speculative_tokens=number)
    assert caught.value.param == "num_speculative_tokens"


def test_proposed_tokens_take_what_is_left_of_the_budget() -> None:
    engine = fake_engine(max_batched_tokens=8, speculation=Speculation(Scripted([1] * 9), 4))
    for name in "abc":
        engine.add(request(name, [1, 2], 9))
    engine.step()
    engine.step()
    assert engine.last_plan is not None
    assert [len(chain.token_ids) for chain in engine.last_plan.chains] == [4, 1]
    assert engine.last_plan.num_tokens == 8
    engine.add(request("d", range(20), 2))
    engine.step()
    assert engine.last_plan.num_prefill_tokens == 5
    assert engine.last_plan.chains == ()


class AtMostTwo:
    """A pass of a user."""

    name = "at_most_two"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        draft.num_draft_tokens = min(2, draft.num_draft_tokens)


def test_a_pass_may_lower_how_many_tokens_are_proposed() -> None:
    engine = fake_engine(passes=[AtMostTwo()], speculation=Speculation(Scripted([1] * 9), 4))
    engine.add(request("a", range(5), 9))
    engine.step()
    engine.step()
    assert engine.last_plan is not None
    assert engine.last_plan.num_draft_tokens == 2
    assert engine.last_plan.chains == (Chain(engine.last_plan.decode_rows[0], (1, 1)),)


@pytest.mark.parametrize(("num_blocks", "lengths"), [(4, [2, 2]), (5, [6, 2]), (6, [6, 6])])
def test_proposed_tokens_leave_a_block_for_each_request(num_blocks: int, lengths: list[int]) -> None:
    """Both have a block of four, of which the second token is computed, and would need one more."""
    engine = fake_engine(TokenMemoryBackend(num_blocks), speculation=Speculation(Scripted([1] * 9), 6))
    engine.add(request("a", range(5, 6), 12))
    engine.add(request("b", range(40, 41), 12))
    engine.step()
    engine.step()
    assert engine.last_plan is not None
    assert [len(chain.token_ids) for chain in engine.last_plan.chains] == lengths
    run_all(engine)


class Failing(TokenMemoryBackend):
    """Cannot compute chains."""

    error: Exception = RuntimeError("no chains")

    def execute(self, plan: ExecutionPlan) -> StepResult:
        if plan.chains:
            raise self.error
        return super().execute(plan)


@pytest.mark.parametrize("error", [RuntimeError("no chains"), CapacityError("no memory for chains")])
def test_requests_of_a_step_that_fails_with_chains_go_on_without(error: Exception) -> None:
    backend = Failing()
    backend.error = error
    engine = fake_engine(backend, speculation=Speculation(RandomProposer(backend, 1), 3))
    for name in "AB":
        engine.add(request(name, [3, ord(name)], 6))
    assert run_all(engine) == {name: right_tokens([3, ord(name)], 6) for name in "AB"}


def test_an_abort_while_a_step_with_chains_is_in_flight() -> None:
    backend = TokenMemoryBackend()
    engine = fake_engine(backend, overlap=True, speculation=Speculation(RandomProposer(backend, 5), 3))
    tokens: dict[str, list[int]] = {name: [] for name in "ABC"}
    for name in "ABC":
        engine.add(request(name, [3, ord(name)], 12))
    for _ in range(2):
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    flying = engine._begin_step()
    assert len(flying.plan.chains) > 1
    engine.abort("A")
    for name, more in run_all(engine).items():
        tokens[name] += more
    assert tokens["B"] == right_tokens([3, ord("B")], 12)
    assert tokens["C"] == right_tokens([3, ord("C")], 12)
    engine.close()


@pytest.mark.parametrize("token_ids", [[97], [-1], [1, 200]])
def test_a_proposed_token_outside_the_vocabulary_is_refused(token_ids: list[int]) -> None:
    engine = fake_engine(speculation=Speculation(Scripted(token_ids), 3))
    engine.add(request("a", range(5), 9))
    engine.step()
    with pytest.raises(PlanError, match=r"a has proposed tokens .* tokens are 0 to 96"):
        engine.step()
    engine.kv.check()


def test_the_error_of_a_proposer_is_raised_and_nothing_stays_bound() -> None:
    class Broken(Scripted):
        def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
            if request.request_id == "b":
                raise RuntimeError("no idea")
            return Proposal((1, 2, 3, 4))

    proposer = Broken(())
    engine = fake_engine(speculation=Speculation(proposer, 4))
    for name in "ab":
        engine.add(request(name, [3, ord(name) - 90], 9))
    engine.step()
    with pytest.raises(RuntimeError, match="no idea"):
        engine.step()
    check_books(engine)
    engine.abort("b")
    assert len(run_all(engine)["a"]) == 8


class NotFinite(TokenMemoryBackend):
    """The logits of request b are no numbers at position 9."""

    def answer(self, tokens: Tokens) -> int:
        return -1 if tokens[0] == 40 and len(tokens) >= 9 else super().answer(tokens)


def test_logits_that_are_no_numbers_end_their_request_alone() -> None:
    backend = NotFinite()
    proposer = RandomProposer(TokenMemoryBackend(), 3)
    engine = fake_engine(backend, speculation=Speculation(proposer, 4))
    requests = [request("a", range(5), 9), request("b", [40, 1, 2], 20), request("c", range(7, 9), 9)]
    found = answers(engine, requests)
    assert found["b"].reason is FinishReason.ERROR
    for one in (requests[0], requests[2]):
        assert found[one.request_id].tokens == right_tokens(one.tokens, 9)
        assert found[one.request_id].reason is FinishReason.LENGTH


def test_the_story_of_a_request_names_proposed_tokens() -> None:
    right = right_tokens(range(5), 9)
    engine, log = fake_engine(speculation=Speculation(Scripted(right[1:4]), 3)), ScheduleLog()
    engine.add(request("a", range(5), 9))
    while engine.has_work():
        outputs = engine.step()
        assert engine.last_plan is not None
        log.record(engine.last_plan, 0.0, (), outputs)
    assert "        decodes, with 3 proposed tokens" in log.story("a")
    positions = [position for step in log.steps for position in step.plan.decode_positions]
    assert positions == [5, 9, 10, 11, 12]
    assert [step.before[0].num_tokens for step in log.steps[1:]] == [p + 1 for p in positions]


def test_at_least_one_token_is_proposed() -> None:
    with pytest.raises(ValueError, match="leave the proposer out"):
        Speculation(Scripted(()), 0)


def test_a_result_answers_every_chain() -> None:
    plan = ExecutionPlan(0, decode_rows=(1, 2), decode_positions=(3, 4), chains=(Chain(2, (5, 6)),))
    assert StepResult(0, (7, 5, 8), num_accepted=(1,)).num_drawn(plan) == [1, 2]
    with pytest.raises(PlanError, match="1 chains were planned, 0 are answered"):
        StepResult(0, (7, 5)).num_drawn(plan)
