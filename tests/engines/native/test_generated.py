"""An answer that another engine has begun goes on with the same tokens and log-probabilities, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.accel.speculative.prompt_lookup import PromptLookup
from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.types import FinishReason, Request, SamplingParams, TokenLogprob, Tokens
from sagellm.engines.build_kv import build_kv
from sagellm.engines.engine import Engine
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.scheduler_ir import PassPipeline, strategies
from tests.builders import check_books
from tests.effort import examples
from tests.engines.native.test_same_tokens import BLOCK, SAMPLING, backend, engine, prompt

NAMES = ["llama", "mistral-window", "gpt-oss", "granite-hybrid"]
"""KV of all tokens, of a window, in groups, and with recurrent states."""
TOLERANCE = 1e-9
EOS = frozenset({3, 4, 5, 6, 7, 8, 9})


def another(name: str, budget: int, *, overlap: bool, proposes: bool) -> Engine:
    """An engine with an empty cache."""
    made = backend(name, False)
    capability, schema = made.capability(), made.get_kv_schema()
    config = KVConfig(block_size=BLOCK, checkpoint_interval=BLOCK)
    kv = build_kv(
        config,
        128 * schema.num_groups,
        groups=schema.groups,
        state_pages=schema.state_pages,
        window=capability.sliding_window,
        max_chunk=budget,
        clock=ManualClock(),
    )
    return Engine(
        made,
        kv,
        PassPipeline(strategies.make("priority")),
        max_batched_tokens=budget,
        overlap=overlap,
        speculation=Speculation(PromptLookup(2, 1), 4) if proposes and not schema.state_bytes else None,
        clock=ManualClock(),
    )


Answer = tuple[list[int], list[TokenLogprob], FinishReason | None]


def answer(busy: Engine, one: Request) -> Answer:
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    reason = None
    busy.add(one)
    while busy.has_work():
        for output in busy.step():
            assert output.error is None
            assert output.prompt_logprobs is None or not one.generated
            tokens += output.new_token_ids
            logprobs += output.logprobs
            reason = output.finish_reason
        check_books(busy)
    return tokens, logprobs, reason


def params_of(sampling: int, max_tokens: int, min_tokens: int, logprobs: int | None) -> SamplingParams:
    least = min(min_tokens, max_tokens)
    return replace(SAMPLING[sampling], max_tokens=max_tokens, min_tokens=least, logprobs=logprobs)


@cache
def whole_answer(name: str, tokens: tuple[int, ...], *params: Any) -> Answer:
    """The reference: the request alone, in one chunk, with nothing cached."""
    single = engine(name, 128, 1024, [], caching=False, reference=True)
    return answer(single, Request("one", Tokens(tokens), params_of(*params), EOS))


def are_close(found: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]) -> None:
    assert [entry.token_id for entry in found] == [entry.token_id for entry in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)
        assert [value for _, value in mine.top] == pytest.approx(
            [value for _, value in theirs.top], abs=TOLERANCE
        )


@settings(max_examples=examples(60))
@given(
    name=st.sampled_from(NAMES),
    family=st.integers(0, 1),
    length=st.integers(1, 40),
    sampling=st.sampled_from(range(len(SAMPLING))),
    max_tokens=st.sampled_from([2, 7, 16]),
    min_tokens=st.sampled_from([0, 4]),
    logprobs=st.sampled_from([None, 0, 2]),
    proposes=st.booleans(),
    overlap=st.booleans(),
    num_cached=st.sampled_from([0, 1, 2]),
    budget=st.sampled_from([5, 64]),
    share=st.floats(0, 1),
)
def test_the_rest_of_an_answer(
    name: str,
    family: int,
    length: int,
    sampling: int,
    max_tokens: int,
    min_tokens: int,
    logprobs: int | None,
    proposes: bool,
    overlap: bool,
    num_cached: int,
    budget: int,
    share: float,
) -> None:
    """`num_cached`: nothing is cached; the prompt is; the prompt and the answer are."""
    given_params = sampling, max_tokens, min_tokens, logprobs
    tokens, params = tuple(prompt(family, length, length)), params_of(*given_params)
    drawn, scores, reason = whole_answer(name, tokens, *given_params)
    for num in {1, round(share * (len(drawn) - 1)), len(drawn) - 1} - {len(drawn)}:
        busy = another(name, budget, overlap=overlap, proposes=proposes)
        if num_cached:
            before = [*tokens, *drawn[: (num_cached - 1) * num]]
            answer(busy, Request("before", Tokens(before), SamplingParams(temperature=0.0, max_tokens=1)))
        found = answer(busy, Request("one", Tokens(tokens), params, EOS, generated=tuple(drawn[:num])))
        assert found[0] == drawn[num:]
        assert found[2] is reason
        are_close(found[1], scores[num if scores else 0 :])
        assert busy.kv.block_states().active == 0
        if busy._worker is not None:
            busy._worker.shutdown()


def test_log_probabilities_of_its_prompt_are_not_computed_again() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1)
    tokens = prompt(0, 20, 1)
    busy = another("llama", 8, overlap=False, proposes=False)
    busy.add(Request("one", Tokens(tokens), params, generated=(11, 12)))
    while busy.has_work():
        for output in busy.step():
            assert output.prompt_logprobs is None
        assert busy.last_plan is not None
        assert all(join.params.prompt_logprobs is None for join in busy.last_plan.joined)
