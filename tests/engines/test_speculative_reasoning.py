"""Steps of reasoning by a small model: the text is that of a plain loop, whatever else runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.cot.judged_steps import JudgedSteps, StepBounds, likelihood_score
from sagellm.core.clock import ManualClock
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, RequestError, UnsupportedParameterError
from sagellm.core.protocols.cot import (
    MIN_STEP_TOKENS,
    CoTPlan,
    EarlyExit,
    EarlyStop,
    ReasoningStep,
    SpeculativeReasoning,
    StepAction,
)
from sagellm.core.types import FinishReason, SamplingParams, Tokens
from sagellm.engines.build import build_llm, load
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM, Completion, RequestOptions
from sagellm.engines.llm.accelerations import SPECULATIVE_REASONING
from sagellm.engines.llm.drafted_reasoning import MAX_DRAFT_S
from sagellm.engines.llm.next_turns import NextTurn, NextTurns
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.speculation import Speculation
from tests.approximate_memory import ApproximateMemory
from tests.builders import PreemptAtRandom, RandomProposer, check_books, fake_engine
from tests.effort import examples
from tests.engines.test_early_exit import CHAT, END, EOS, LINE, ONE, THINK, TWO, Muses, demo_tokenizer
from tests.scripted_engine import scripted_llm
from tests.tiny_models import save_tiny

CLOSING = {EOS, THINK, END}
BY_LIKELIHOOD = SpeculativeReasoning(0.0, max_step_tokens=8, judge="")


class SmallMuses(Muses):
    """Draws other tokens for the same text."""

    def answer(self, tokens: Tokens) -> int:
        return super().answer(Tokens([*tokens.slice(0), 5]))


class PlainLoop:
    """The slow twin: the models take turns, and nothing else runs."""

    def __init__(self, prompt: Sequence[int], rule: SpeculativeReasoning, most: int) -> None:
        self.prompt, self.rule, self.most = prompt, rule, most
        self.target, self.small, self.policy = Muses(), SmallMuses(), JudgedSteps(rule)
        self.judge = demo_tokenizer().encode(rule.judge).slice(0)
        self.answer: list[int] = []
        self.steps: list[ReasoningStep] = []
        self.num_accepted = 0
        self.inside = prompt[-1] == THINK
        self._run()

    @property
    def has_ended(self) -> bool:
        return len(self.answer) >= self.most or EOS in self.answer[-1:]

    def _run(self) -> None:
        while not self.has_ended:  # up to the first token within reasoning
            self._write_token()
            if self.inside:
                break
        writes = False
        while self.inside and not self.has_ended:
            if writes:
                self._write_step()
                writes = False
                continue
            step, is_closed = self._draft()
            writes = is_closed or not step
            if step:
                plan = self._judged(step)
                if plan.action is StepAction.CONCLUDE:
                    break
                writes = writes or not plan.num_to_start
            elif not is_closed:  # no room
                break
        while not self.has_ended:
            self._write_token()

    def _write_token(self) -> None:
        token_id = self.target.answer(Tokens([*self.prompt, *self.answer]))
        self.answer.append(token_id)
        self.inside = (self.inside or token_id == THINK) and token_id != END

    def _write_step(self) -> None:
        bounds = StepBounds(self.rule.max_step_tokens)
        while not self.has_ended:
            self._write_token()
            if not self.inside or bounds.push(demo_tokenizer().token_bytes(self.answer[-1])):
                return

    def _draft(self) -> tuple[list[int], bool]:
        step, room = list[int](), min(self.rule.max_step_tokens, self.most - len(self.answer) - 1)
        bounds = StepBounds(room)
        while len(step) < room:
            token_id = self.small.answer(Tokens([*self.prompt, *self.answer, *step]))
            if token_id in CLOSING:
                return step, True
            step.append(token_id)
            if bounds.push(demo_tokenizer().token_bytes(token_id)):
                break
        return step, False

    def _judged(self, step: Sequence[int]) -> CoTPlan:
        drawn = self.target.answer(Tokens([*self.prompt, *self.answer, *step, *self.judge]))
        self.steps.append(ReasoningStep(len(self.steps), True, score={ONE: 1.0, TWO: 2.0}.get(drawn)))
        plan = self.policy.accelerate_cot(self.steps)
        if plan.chosen is not None:
            self.num_accepted += 1
            self.answer += step
        return plan


def drafting_llm(
    small: Muses | None = None, clock: ManualClock | None = None, **options: Any
) -> tuple[LLM, Engine, Engine]:
    """An `LLM` over fakes, with the engines of the target and of the small model."""
    target = fake_engine(options.pop("backend", None) or Muses(), clock=clock, **options)
    drafter = fake_engine(small or SmallMuses())
    llm = LLM(target, demo_tokenizer(), model_name="toy", max_model_len=target.max_model_len, drafter=drafter)
    return llm, target, drafter


def check(llm: LLM, *engines: Engine) -> None:
    for engine in engines:
        check_books(engine)
    assert llm._drafts is not None
    llm._drafts.check()


@settings(max_examples=examples(80), deadline=None)
@given(
    length=st.integers(1, 12),
    rule=st.builds(
        SpeculativeReasoning,
        threshold=st.sampled_from([0.0, 1.0, 2.0]),
        max_step_tokens=st.integers(MIN_STEP_TOKENS, 6),
        max_rejected=st.integers(1, 4),
        judge=st.just("\nso "),
    ),
    overlap=st.booleans(),
    proposes=st.booleans(),
    preempt=st.sampled_from([0.0, 0.3]),
    caching=st.booleans(),
    num_requests=st.integers(1, 4),
    num_rows=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 999),
)
def test_the_same_text_whatever_else_runs(
    length: int,
    rule: SpeculativeReasoning,
    overlap: bool,
    proposes: bool,
    preempt: float,
    caching: bool,
    num_requests: int,
    num_rows: int,
    seed: int,
) -> None:
    draw = random.Random(seed)
    prompts = [
        [*(draw.choice((ONE, TWO, LINE)) for _ in range(length)), draw.choice((THINK, ONE))]
        for _ in range(num_requests)
    ]
    backend = Muses(max_num_seqs=num_rows)
    llm, target, drafter = drafting_llm(
        SmallMuses(max_num_seqs=num_rows),
        backend=backend,
        prefix_caching=caching,
        passes=[PreemptAtRandom(seed, preempt, 4)] if preempt else None,
        overlap=overlap,
        speculation=Speculation(RandomProposer(backend, seed), 3) if proposes else None,
    )
    options = RequestOptions(SamplingParams(max_tokens=24, temperature=0.0), speculative_reasoning=rule)
    found = {llm.submit(prompt, options): Completion.empty("", 1) for prompt in prompts}
    while llm.has_work():
        for delta in llm.step():
            found[delta.request_id].add(delta)
        check(llm, target, drafter)
    for prompt, completion in zip(prompts, found.values(), strict=True):
        plain, [choice] = PlainLoop(prompt, rule, 24), completion.choices
        assert choice.token_ids == plain.answer
        assert choice.drafted is not None
        assert (choice.drafted.num_steps, choice.drafted.num_accepted) == (
            len(plain.steps),
            plain.num_accepted,
        )
        assert completion.usage.completion_tokens == len(plain.answer)
    for engine in (target, drafter):
        assert engine.stats().blocks_active == engine.stats().num_waiting == 0
    llm.close()


LONG = SpeculativeReasoning(0.0, max_step_tokens=64, judge="\nso ")


class Endless(SmallMuses):
    """Writes a step that does not end."""

    def answer(self, tokens: Tokens) -> int:
        return ONE


def test_an_aborted_request_ends_its_draft() -> None:
    llm, target, drafter = drafting_llm(Endless())
    options = RequestOptions(SamplingParams(max_tokens=100, n=2), speculative_reasoning=LONG)
    request_id = llm.submit([ONE, THINK], options)
    while drafter.stats().num_running < 2:
        llm.step()
    assert target.stats().num_running == 0
    assert llm.abort(request_id)
    check(llm, target, drafter)
    assert not llm.has_work()
    assert drafter.stats().num_running == drafter.stats().blocks_active == 0


def test_a_draft_that_takes_too_long_is_dropped() -> None:
    clock = ManualClock()
    llm, target, drafter = drafting_llm(Endless(), clock)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm.submit([ONE, THINK], RequestOptions(params, speculative_reasoning=LONG))
    while not drafter.has_work():
        llm.step()
    clock.advance(MAX_DRAFT_S + 1)
    assert not target.has_work()
    llm.step()
    check(llm, target, drafter)
    assert target.has_work()


def test_dropped_drafts_count_as_rejected() -> None:
    clock = ManualClock()
    llm, target, drafter = drafting_llm(Endless(), clock, backend=EndlessTarget())
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    rule = replace(LONG, max_step_tokens=8, max_rejected=2)
    llm.submit([ONE, THINK], RequestOptions(params, speculative_reasoning=rule))
    num_dropped = 0
    while llm.has_work():
        llm.step()
        check(llm, target, drafter)
        if drafter.has_work():
            num_dropped += 1
            clock.advance(MAX_DRAFT_S + 1)
    assert num_dropped == 2, "then the served model writes the rest"


def test_a_small_model_with_a_short_context_leaves_the_rest_to_the_target() -> None:
    llm, target, drafter = drafting_llm(SmallMuses(max_model_len=4))
    options = RequestOptions(SamplingParams(max_tokens=20), speculative_reasoning=LONG)
    [completion] = llm.generate([[ONE, TWO, ONE, TWO, THINK]], options)
    [plain] = llm.generate([[ONE, TWO, ONE, TWO, THINK]], SamplingParams(max_tokens=20))
    assert completion.choices[0].token_ids == plain.choices[0].token_ids
    check(llm, target, drafter)


class EndlessTarget(Muses):
    """Never ends its reasoning."""

    def answer(self, tokens: Tokens) -> int:
        return ONE


WRITES_ALL = SpeculativeReasoning(9.0, max_step_tokens=MIN_STEP_TOKENS, max_rejected=1000, judge="\nso ")


def test_a_choice_that_reaches_its_kv_quota_fails_and_others_go_on() -> None:
    """It ends a step with the last token for which the quota has room."""
    backend = EndlessTarget(num_blocks=16)
    llm, target, drafter = drafting_llm(Endless(), backend=backend, tenant_shares={"a": {"ceiling": 0.25}})
    params = SamplingParams(max_tokens=20)
    found = {
        llm.submit(
            [ONE] * 6 + [THINK], RequestOptions(params, tenant=tenant, speculative_reasoning=WRITES_ALL)
        ): Completion.empty("", 1)
        for tenant in ("a", "b")
    }
    while llm.has_work():
        for delta in llm.step():
            found[delta.request_id].add(delta)
        check(llm, target, drafter)
    first, second = found.values()
    assert first.error is not None
    assert "KV quota" in first.error
    assert first.choices[0].finish_reason is FinishReason.ERROR
    assert first.choices[0].token_ids == [ONE] * 9
    assert second.choices[0].token_ids == [ONE] * 20


@pytest.mark.parametrize(("threshold", "num_steps"), [(0.0, 33), (9.0, 95)])
def test_the_shortest_steps_may_save_steps_of_the_served_model(threshold: float, num_steps: int) -> None:
    """One for each judge; also one for the first and for the last token, and for what is rejected."""
    llm, target, _ = drafting_llm(Endless(), backend=EndlessTarget())
    rule = replace(WRITES_ALL, threshold=threshold)
    options = RequestOptions(SamplingParams(max_tokens=64), speculative_reasoning=rule)
    [completion] = llm.generate([[ONE] * 5 + [THINK]], options)
    assert completion.choices[0].token_ids == [ONE] * 64
    assert target.stats().num_steps == num_steps
    with pytest.raises(RequestError, match=r"must be in \[2, 1024\] \(to judge one token takes"):
        replace(rule, max_step_tokens=1)
    llm.close()


def test_two_outputs_at_once_add_nothing_behind_a_step() -> None:
    """As where a step in flight is waited for, say for another request's branch."""
    rule, num_ended = SpeculativeReasoning(0.0, max_step_tokens=6, judge="\nso "), 0
    for first in range(30, 60):
        llm, target, drafter = drafting_llm(overlap=True)
        options = RequestOptions(SamplingParams(max_tokens=24), speculative_reasoning=rule)
        llm.submit([first, TWO, LINE, ONE], options)
        found = Completion.empty("", 1)
        while llm.has_work():
            for delta in llm.step():
                found.add(delta)
            target.drain()
            check(llm, target, drafter)
        assert found.choices[0].token_ids == PlainLoop([first, TWO, LINE, ONE], rule, 24).answer
        num_ended += found.choices[0].drafted is not None and found.choices[0].drafted.num_steps > 0
        llm.close()
    assert num_ended > 5


def test_a_branch_shares_the_kv_of_what_writes_a_choice_now() -> None:
    llm, target, drafter = drafting_llm(Endless(), backend=EndlessTarget())
    rule = SpeculativeReasoning(9.0, max_step_tokens=2, max_rejected=1, judge="\nso ")
    prompt = [ONE, TWO, THINK]
    parent = llm.submit(prompt, RequestOptions(SamplingParams(max_tokens=40), speculative_reasoning=rule))
    tokens = list(prompt)
    while len(tokens) < 25:
        for delta in llm.step():
            tokens += delta.token_ids
    branch = llm.submit(tokens, RequestOptions(SamplingParams(max_tokens=1), branch_of=(parent, 0)))
    usage = None
    while usage is None:
        usage = next((delta.usage for delta in llm.step() if delta.request_id == branch), None)
        check(llm, target, drafter)
    assert usage.cached_tokens == len(tokens) - 1
    llm.close()


def test_no_next_turn_is_computed_while_the_small_model_writes() -> None:
    llm, target, drafter = drafting_llm(Endless())
    turns = NextTurns(llm, target.clock)
    params = SamplingParams(max_tokens=20)
    llm.submit([ONE, THINK], RequestOptions(params, speculative_reasoning=LONG))
    while not drafter.has_work():
        llm.step()
    assert not target.has_work()
    tokens = Tokens([TWO] * 8)
    turns.add(NextTurn(tokens, tokens, 0, RequestOptions(SamplingParams(max_tokens=0))))
    turns.begin_chunk()
    assert not target.has_work()
    while llm.has_work():
        llm.step()
    turns.begin_chunk()
    assert target.has_work()
    llm.close()


class ApproximateMuses(Muses, ApproximateMemory):
    """Its engine allows approximate reuse."""


def test_a_small_model_drafts_where_the_target_copies_kv() -> None:
    llm, _, _ = drafting_llm(backend=ApproximateMuses(), recompute_tokens=1)
    params = SamplingParams(max_tokens=20, temperature=0.0)
    options = RequestOptions(params, speculative_reasoning=LONG, approximate_reuse=True)
    [completion] = llm.generate([[ONE, THINK]], options)
    assert completion.choices[0].drafted is not None
    assert completion.choices[0].drafted.num_steps > 0


def test_switched_off_the_target_writes_all() -> None:
    llm, _, drafter = drafting_llm()
    options = RequestOptions(SamplingParams(max_tokens=20), speculative_reasoning=LONG)
    llm.accelerations.switch(SPECULATIVE_REASONING, on=False)
    [completion] = llm.generate([[ONE, THINK]], options)
    assert completion.choices[0].drafted is None
    assert drafter.stats().num_steps == 0
    llm.accelerations.switch(SPECULATIVE_REASONING, on=True)
    [completion] = llm.generate([[ONE, THINK]], options)
    steps = completion.choices[0].drafted
    assert steps is not None
    report = llm.accelerations.report()[-1]
    assert (report.name, report.is_exact) == (SPECULATIVE_REASONING, False)
    assert report.saved == {"tokens": steps.num_accepted_tokens}
    in_vain = steps.num_draft_tokens - steps.num_accepted_tokens
    assert report.spent == {"rejected tokens": in_vain, "judge tokens": steps.num_judge_tokens}


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    """The demo model, and the same one as its small model."""
    with load(None, {"kv.num_blocks": 96, "speculative.reasoning_model": str(DEMO_MODEL)}) as llm:
        yield llm


def test_with_the_same_model_twice_the_text_is_that_of_one(demo: LLM) -> None:
    """Greedy, so that steps of any length and origin are the same."""
    params = demo.sampling_params(temperature=0.0, max_tokens=60)
    [free] = demo.generate([CHAT], params)
    [drafted] = demo.generate([CHAT], RequestOptions(params, speculative_reasoning=BY_LIKELIHOOD))
    assert drafted.choices[0].token_ids == free.choices[0].token_ids
    steps = drafted.choices[0].drafted
    assert steps is not None
    assert steps.num_accepted == steps.num_steps > 2
    assert steps.num_accepted_tokens > drafted.usage.reasoning_tokens / 2


def test_a_judge_computes_the_step_and_reuses_the_rest(demo: LLM) -> None:
    demo.clear_cache()
    params = demo.sampling_params(temperature=0.0, max_tokens=60)
    [completion] = demo.generate([CHAT], RequestOptions(params, speculative_reasoning=BY_LIKELIHOOD))
    steps = completion.choices[0].drafted
    assert steps is not None
    block_size = 16
    assert steps.num_judge_tokens <= steps.num_accepted_tokens + steps.num_steps * (block_size + 1)


def test_a_score_by_probabilities_is_that_of_a_scored_prompt(demo: LLM) -> None:
    """Of one step: there is no room for a second one."""
    params = demo.sampling_params(temperature=0.0, max_tokens=9)
    [completion] = demo.generate([CHAT], RequestOptions(params, speculative_reasoning=BY_LIKELIHOOD))
    [choice] = completion.choices
    assert choice.drafted is not None
    assert (choice.drafted.num_steps, choice.drafted.num_accepted_tokens) == (1, 7)
    prompt = [*demo.encode(CHAT).slice(0), *choice.token_ids[:8]]
    [scored] = demo.generate([prompt], demo.sampling_params(max_tokens=0, prompt_logprobs=0))
    entries = [entry.logprob for entry in scored.choices[0].prompt_logprobs[-7:]]
    score = likelihood_score([value for value in entries if value is not None])
    assert choice.drafted.reason == f"a step has score {score:.2f}"


def test_rejected_steps_leave_the_text_of_the_target(demo: LLM) -> None:
    params = demo.sampling_params(temperature=0.0, max_tokens=60)
    [free] = demo.generate([CHAT], params)
    for most in (1, 3, 9):
        rule = SpeculativeReasoning(9.0, max_step_tokens=8, max_rejected=most, judge="Score: ")
        [completion] = demo.generate([CHAT], RequestOptions(params, speculative_reasoning=rule))
        steps = completion.choices[0].drafted
        assert steps is not None
        assert (steps.num_accepted, completion.text) == (0, free.text)
        assert 1 <= steps.num_steps <= most


def test_budgets_samples_and_stop_strings_hold(demo: LLM) -> None:
    params = demo.sampling_params(temperature=1.0, seed=5, max_tokens=60, n=4, max_reasoning_tokens=11)
    options = RequestOptions(params, speculative_reasoning=BY_LIKELIHOOD, early_stop=EarlyStop(2))
    [completion] = demo.generate([CHAT], options)
    assert completion.consensus is not None
    ended = [choice for choice in completion.choices if choice.finish_reason is FinishReason.STOP]
    assert ended
    for choice in ended:
        reasoning = choice.token_ids[1 : choice.token_ids.index(END)]
        assert len(reasoning) <= 11
    params = demo.sampling_params(temperature=0.0, max_tokens=60, stop=(": 3",))
    [completion] = demo.generate([CHAT], RequestOptions(params, speculative_reasoning=BY_LIKELIHOOD))
    assert completion.text == "<think>123+456"
    assert not demo.has_work()
    params = demo.sampling_params(temperature=0.0, max_tokens=9)
    [completion] = demo.generate([CHAT], RequestOptions(params, speculative_reasoning=BY_LIKELIHOOD))
    assert len(completion.choices[0].token_ids) == 9
    assert completion.choices[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"logprobs": 0}, {}),
        ({"prompt_logprobs": 0}, {}),
        ({}, {"early_exit": EarlyExit()}),
        ({}, {"kv_hints": {}}),
    ],
)
def test_what_does_not_go_together_is_refused(params: dict[str, int], options: dict[str, Any]) -> None:
    name = next(iter({**params, **options}))
    with pytest.raises(RequestError, match=f"speculative_reasoning cannot go with {name}") as caught:
        RequestOptions(SamplingParams(**params), speculative_reasoning=LONG, **options)  # type: ignore[arg-type]
    assert caught.value.param == "speculative_reasoning"


def test_a_server_without_a_small_model_says_so(demo: LLM) -> None:
    llm = scripted_llm("<think>12345</think>6")
    with pytest.raises(UnsupportedParameterError, match=r"set speculative\.reasoning_model .* leave it out"):
        llm.submit("x", RequestOptions(SamplingParams(), speculative_reasoning=LONG))
    assert not llm.has_reasoning_drafts
    assert demo.has_reasoning_drafts
    fakes, _, _ = drafting_llm()
    with pytest.raises(UnsupportedParameterError, match="send a judge"):
        fakes.submit([ONE], RequestOptions(SamplingParams(), speculative_reasoning=BY_LIKELIHOOD))


def test_a_small_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    settings = {"speculative": {"reasoning_model": str(tmp_path)}, "kv": {"num_blocks": 16}}
    with pytest.raises(ConfigError, match=r"speculative\.reasoning_model .* tokens, the served model 768"):
        build_llm(Config.model_validate(settings))
