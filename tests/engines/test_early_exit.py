"""Reasoning that ends once probes know its answer: the text is that of a budget, whatever else runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.cot.answers import answer_of
from sagellm.accel.cot.early_exit import (
    ProbeExit,
    ProbePoints,
    answer_behind,
    completes_answer,
    confidence_of,
)
from sagellm.accel.speculative.suffix import Suffix
from sagellm.core.errors import RequestError, UnsupportedParameterError
from sagellm.core.protocols.cot import EarlyExit, EarlyStop, ReasoningStep, StepAction
from sagellm.core.protocols.tokenizer import Message, TextTokenizer
from sagellm.core.types import FinishReason, SamplingParams, Tokens
from sagellm.engines.build import load, load_config
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM, Completion, RequestOptions
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.native.tokenizer_of import tokenizer_of
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from tests.builders import PreemptAtRandom, RandomProposer, check_books, fake_engine
from tests.effort import examples
from tests.scripted_engine import scripted_llm

EOS, ONE, TWO, LINE, THINK, END = 2, 19, 20, 201, 766, 767
TOKENS = (*[ONE] * 5, TWO, *[LINE] * 5, THINK, END, EOS)
CHAT: list[Message] = [{"role": "user", "content": "What is 123 + 456?"}]
EACH_FOUR = EarlyExit(0.5, every=4, at="token", probe="", max_probe_tokens=8)


@cache
def demo_tokenizer() -> TextTokenizer:
    found = tokenizer_of(load_config(environ={}).config, DEMO_MODEL)
    assert found.reasoning_token_ids == (THINK, END)
    return found


class Muses(TokenMemoryBackend):
    """Draws digits, line ends and markers, by a hash of all tokens so far."""

    def __init__(self, **options: Any) -> None:
        super().__init__(vocab_size=768, **options)

    def answer(self, tokens: Tokens) -> int:
        return TOKENS[super().answer(tokens) % len(TOKENS)]


def plain_answer(prompt: Sequence[int], rule: EarlyExit, most: int) -> tuple[list[int], int | None]:
    """The slow twin: probes one at a time, and nothing else meanwhile.

    Returns the answer, and after how much reasoning that was closed.
    """
    backend, policy, points = Muses(), ProbeExit(rule), ProbePoints(rule)
    answer, steps, inside, count = list[int](), list[ReasoningStep](), prompt[-1] == THINK, 0
    ended_at: int | None = None
    while len(answer) < most:
        token_id = backend.answer(Tokens([*prompt, *answer]))
        if inside and ended_at is not None and count >= ended_at:
            token_id = END
        answer.append(token_id)
        if token_id == EOS:
            break
        reasons = inside and token_id != END
        count += reasons
        inside = (inside or token_id == THINK) and token_id != END
        is_point = points.push(is_reasoning=reasons, ends_line=token_id == LINE)
        if is_point and ended_at is None and len(answer) < most:
            steps.append(probed([*prompt, *answer], rule, len(steps)))
            if policy.accelerate_cot(steps).action is StepAction.CONCLUDE:
                ended_at = count
    return answer, ended_at


def probed(tokens: Sequence[int], rule: EarlyExit, index: int) -> ReasoningStep:
    """The answer of one probe. A log-probability is minus the position."""
    backend, tokenizer = Muses(), demo_tokenizer()
    whole, text, logprobs = [*tokens, END, *tokenizer.encode(rule.probe)], "", list[float]()
    for _ in range(rule.max_probe_tokens):
        token_id = backend.answer(Tokens(whole))
        if token_id != EOS:
            text += tokenizer.decode([token_id])
            logprobs.append(-float(len(whole)))
        whole.append(token_id)
        if completes_answer(rule.probe, text, has_ended=token_id == EOS):
            return ReasoningStep(index, True, answer_behind(rule.probe, text), confidence_of(logprobs))
    return ReasoningStep(index, has_ended=True)


RULES = st.builds(
    EarlyExit,
    threshold=st.sampled_from([1e-18, 1e-14, 1e-10, 0.5]),
    every=st.integers(1, 4),
    at=st.sampled_from(["line", "token"]),
    probe=st.sampled_from(["", "\nso "]),
    max_probe_tokens=st.integers(2, 8),
) | st.builds(
    EarlyExit,
    threshold=st.none(),
    window=st.integers(2, 3),
    every=st.integers(1, 3),
    at=st.just("token"),
    probe=st.just(""),
    max_probe_tokens=st.integers(2, 8),
)


@settings(max_examples=examples(80), deadline=None)
@given(
    length=st.integers(1, 12),
    rule=RULES,
    overlap=st.booleans(),
    proposes=st.booleans(),
    preempt=st.sampled_from([0.0, 0.3]),
    caching=st.booleans(),
    num_requests=st.integers(1, 4),
    num_rows=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 999),
)
def test_the_same_text_however_probes_run(
    length: int,
    rule: EarlyExit,
    overlap: bool,
    proposes: bool,
    preempt: float,
    caching: bool,
    num_requests: int,
    num_rows: int,
    seed: int,
) -> None:
    draw = random.Random(seed)
    prompts = [[*(draw.choice((ONE, TWO, LINE)) for _ in range(length)), THINK] for _ in range(num_requests)]
    backend = Muses(max_num_seqs=num_rows)
    engine = fake_engine(
        backend,
        prefix_caching=caching,
        passes=[PreemptAtRandom(seed, preempt, 4)] if preempt else None,
        overlap=overlap,
        speculation=Speculation(RandomProposer(backend, seed), 3) if proposes else None,
    )
    llm = LLM(engine, demo_tokenizer(), model_name="toy", max_model_len=engine.max_model_len)
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
    options = RequestOptions(params, early_exit=rule)
    found = {llm.submit(prompt, options): Completion.empty("", 1) for prompt in prompts}
    while llm.has_work():
        for delta in llm.step():
            found[delta.request_id].add(delta)
        check_books(engine)
        llm._early_exits.check()
    for prompt, completion in zip(prompts, found.values(), strict=True):
        [choice] = completion.choices
        answer, ended_at = plain_answer(prompt, rule, 24)
        assert choice.token_ids == answer
        assert choice.exit is not None
        assert choice.exit.ended_at == ended_at
        assert completion.usage.completion_tokens == len(answer)
        shown = answer[:-1] if choice.finish_reason is FinishReason.STOP else answer
        assert [entry.token_id for entry in choice.logprobs] == shown
    assert engine.stats().blocks_active == 0
    assert engine.stats().num_waiting == 0
    engine.close()


@pytest.fixture(scope="module")
def demo() -> Any:
    with load(None, {"kv.num_blocks": 96}) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_choice_that_ends_early_is_what_a_budget_of_that_length_gives(
    demo: LLM, temperature: float
) -> None:
    params = demo.sampling_params(temperature=temperature, seed=3, max_tokens=60, n=3)
    [probed_completion] = demo.generate([CHAT], RequestOptions(params, early_exit=EACH_FOUR))
    assert probed_completion.usage.probe_tokens > 0
    for choice in probed_completion.choices:
        assert choice.exit is not None
        assert choice.exit.ended_at is not None
        budget = demo.sampling_params(
            temperature=temperature, seed=3, max_tokens=60, n=3, max_reasoning_tokens=choice.exit.ended_at
        )
        [cut] = demo.generate([CHAT], budget)
        assert cut.choices[choice.index].text == choice.text
        if not temperature:  # a probe is greedy
            assert choice.exit.answer == answer_of(choice.text, "</think>")
    assert isinstance(demo.engine, Engine)
    check_books(demo.engine)
    assert demo.stats().blocks_active == 0


def test_a_rule_that_never_holds_changes_no_token(demo: LLM) -> None:
    params = demo.sampling_params(temperature=1.2, seed=9, max_tokens=60, n=3, logprobs=2)
    [free] = demo.generate([CHAT], params)
    never = EarlyExit(None, 9, every=4, at="token", probe="", max_probe_tokens=8)
    [probed_completion] = demo.generate([CHAT], RequestOptions(params, early_exit=never))
    for ours, whole in zip(probed_completion.choices, free.choices, strict=True):
        assert (ours.text, ours.token_ids, ours.logprobs) == (whole.text, whole.token_ids, whole.logprobs)
        assert ours.exit is not None
        assert ours.exit.ended_at is None
        assert ours.exit.num_probes > 2
    assert probed_completion.usage.reasoning_tokens == free.usage.reasoning_tokens


def test_probes_reuse_the_kv_of_their_request(demo: LLM) -> None:
    demo.clear_cache()
    before = demo.stats().reuse
    params = demo.sampling_params(temperature=0.0, max_tokens=60)
    never = EarlyExit(None, 9, every=8, at="token", probe="")
    [completion] = demo.generate([CHAT], RequestOptions(params, early_exit=never))
    after = demo.stats().reuse
    assert before is not None
    assert after is not None
    [choice] = completion.choices
    assert choice.exit is not None
    asked, hit = after.num_tokens - before.num_tokens, after.num_hit_tokens - before.num_hit_tokens
    # All but the prompt of the request itself, and of each probe the end marker and what shares no block.
    assert asked - hit <= completion.usage.prompt_tokens + choice.exit.num_probes * 3


def test_an_aborted_request_ends_its_probes() -> None:
    with load(None, {"kv.num_blocks": 96}) as llm:
        engine = llm.engine
        assert isinstance(engine, Engine)
        rule = EarlyExit(0.999, every=1, at="token", probe="", max_probe_tokens=64)
        options = RequestOptions(llm.sampling_params(n=2, max_tokens=60), early_exit=rule)
        request_id = llm.submit(CHAT, options)
        while engine.stats().num_running < 4:
            llm.step()
        assert llm.abort(request_id)
        check_books(engine)
        assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)
        assert engine.stats().blocks_active == 0
        assert llm.step() == []
        assert not llm.has_work()


class Breaks(Muses):
    """Draws reasoning that does not end, and what is no token behind `limit` tokens of it."""

    def __init__(self, limit: int, **options: Any) -> None:
        super().__init__(**options)
        self.limit = limit

    def answer(self, tokens: Tokens) -> int:
        return -1 if len(tokens) == self.limit and END not in tokens.slice(0) else ONE


def test_a_choice_that_fails_behind_the_point_of_a_probe_waits_for_it() -> None:
    """The probe runs already. No other request is to run on for a choice that has ended."""
    for limit in range(4, 9):
        engine = fake_engine(Breaks(limit))
        llm = LLM(engine, demo_tokenizer(), model_name="toy", max_model_len=engine.max_model_len)
        params = SamplingParams(max_tokens=24, temperature=0.0)
        [completion] = llm.generate([[ONE, THINK]], RequestOptions(params, early_exit=NEVER_AGREES))
        assert completion.choices[0].finish_reason is FinishReason.ERROR
        assert completion.choices[0].token_ids == [ONE] * (limit - 2)
        assert not llm.has_work()
        llm._early_exits.check()


NEVER_AGREES = EarlyExit(None, 9, every=1, at="token", probe="\nso ", max_probe_tokens=4)


def test_a_fork_of_reasoning_has_no_proposals_and_teaches_none() -> None:
    """A draft model would compute the whole prompt for each probe, and a shared tree keep it."""
    with load(None, {"kv.num_blocks": 96, "speculative.method": "suffix"}) as llm:
        engine = llm.engine
        assert isinstance(engine, Engine)
        assert engine.speculation is not None
        proposer = engine.speculation._proposer
        assert isinstance(proposer, Suffix)
        params = llm.sampling_params(temperature=0.0, max_tokens=60)
        never = EarlyExit(None, 128, every=1, at="token", probe="")
        [completion] = llm.generate([CHAT], RequestOptions(params, early_exit=never))
        exit_ = completion.choices[0].exit
        assert exit_ is not None
        assert exit_.num_probes > 5
        assert [tree.num_tokens for tree in proposer._shared.trees.values()] == [
            len(completion.choices[0].token_ids)
        ]


def test_a_stop_string_in_reasoning_ends_the_choice_and_its_probes(demo: LLM) -> None:
    params = demo.sampling_params(temperature=0.0, max_tokens=60, stop=(": 3",))
    never = EarlyExit(None, 9, every=1, at="token", probe="")
    [completion] = demo.generate([CHAT], RequestOptions(params, early_exit=never))
    assert completion.choices[0].finish_reason is FinishReason.STOP
    assert completion.text == "<think>123+456"
    assert not demo.has_work()


def test_samples_that_vote_may_end_early_too(demo: LLM) -> None:
    params = demo.sampling_params(temperature=1.0, seed=1, max_tokens=60, n=6)
    options = RequestOptions(params, early_stop=EarlyStop(2), early_exit=EACH_FOUR)
    [completion] = demo.generate([CHAT], options)
    assert completion.consensus is not None
    assert completion.consensus.num_used >= 2
    ended = [choice.exit for choice in completion.choices if choice.finish_reason is FinishReason.STOP]
    assert all(each is not None and each.ended_at is not None for each in ended)
    assert not demo.has_work()


def test_what_cannot_be_probed_is_refused() -> None:
    llm = scripted_llm("<think>12345</think>6")
    options = RequestOptions(SamplingParams(), early_exit=EarlyExit())
    with pytest.raises(
        UnsupportedParameterError, match=r"early_exit: .*single server.* leave it out"
    ) as caught:
        llm.submit("x", options)
    assert caught.value.param == "early_exit"
    assert not llm.has_early_exits
    with pytest.raises(RequestError, match="early_exit must be None or of type EarlyExit"):
        RequestOptions(SamplingParams(), early_exit=EarlyStop())  # type: ignore[arg-type]
