"""Requests of `n` samples that end once their answers agree: what starts, what is aborted, what is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sagellm.core.errors import RequestError
from sagellm.core.protocols.cot import EarlyStop
from sagellm.core.types import FinishReason, Request, SamplingParams
from sagellm.engines.build import load
from sagellm.engines.llm import LLM, Completion, RequestOptions, TextDelta
from tests.scripted_engine import ScriptedEngine, toy_tokenizer

TOKENIZER = toy_tokenizer()
ABORT, LENGTH, STOP = FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP


class NoRoomError(RequestError):
    status = 429


def index_of(request: Request) -> int:
    return int(request.request_id.rpartition("#")[2])


def llm_of(texts: Sequence[str], **options: Any) -> tuple[LLM, ScriptedEngine]:
    """Sample i says `texts[i]`; tests that start more samples than have a text fail."""

    def script(request: Request) -> list[int]:
        return [*TOKENIZER.encode(texts[index_of(request)]), *TOKENIZER.eos_token_ids]

    engine = ScriptedEngine(script, **options)
    return LLM(engine, TOKENIZER, model_name="toy", max_model_len=512), engine


def vote(llm: LLM, n: int, rule: EarlyStop | None = None, **params: Any) -> Completion:
    options = RequestOptions(SamplingParams(n=n, **params), early_stop=rule or EarlyStop())
    [completion] = llm.generate("x", options)
    assert not llm.has_work()
    assert llm.step() == []
    return completion


def reasons(completion: Completion) -> list[FinishReason | None]:
    return [choice.finish_reason for choice in completion.choices]


def test_a_window_that_agrees_starts_no_other() -> None:
    llm, engine = llm_of(["it is 7", "7", "so 7.0", "= 7"])
    completion = vote(llm, 16)
    assert [choice.text for choice in completion.choices] == ["it is 7", "7", "so 7.0", "= 7"]
    assert reasons(completion) == [STOP] * 4
    found = completion.consensus
    assert found is not None
    assert (found.num_samples, found.num_started, found.num_used, found.num_votes) == (16, 4, 4, 4)
    assert (found.majority_index, found.answer) == (0, "7")
    assert (len(engine.added), engine.aborted) == (4, [])
    assert completion.usage.completion_tokens == sum(len(choice.token_ids) for choice in completion.choices)


def test_windows_follow_each_other_until_one_agrees() -> None:
    llm, engine = llm_of(["1", "2", *["3"] * 2])
    completion = vote(llm, 8, EarlyStop(2), seed=10)
    assert completion.consensus is not None
    assert completion.consensus.answer == "3"
    assert completion.consensus.majority_index == 2
    assert [request.params.seed for request in engine.added] == [10, 11, 12, 13]
    assert {request.group for request in engine.added} == {completion.request_id}


def test_samples_that_run_when_the_vote_is_over_are_aborted() -> None:
    llm, engine = llm_of(["1 1 1 1 1 1 1 1 1 1 1", "2", "5", "6", *["3"] * 4])
    completion = vote(llm, 16)
    assert completion.consensus is not None
    assert (completion.consensus.num_started, completion.consensus.num_used) == (8, 7)
    assert reasons(completion) == [ABORT, *[STOP] * 7]
    assert engine.aborted == [f"{completion.request_id}#0"]
    assert not engine.running
    assert completion.choices[0].text
    assert completion.usage.completion_tokens == sum(len(choice.token_ids) for choice in completion.choices)


def test_an_answer_that_none_can_reach_is_enough() -> None:
    llm, engine = llm_of(["2", "1 2", "2 2", "2 1 2 1 2 1", "2 1 2 1 2 1 2"])
    completion = vote(llm, 5, EarlyStop(5))
    assert completion.consensus is not None
    assert (completion.consensus.num_used, completion.consensus.answer) == (3, "2")
    assert "no other answer can reach 3 votes" in completion.consensus.reason
    assert [name.rpartition("#")[2] for name in engine.aborted] == ["3", "4"]


def test_confidence_keeps_so_many_samples_running() -> None:
    llm, engine = llm_of(["4"] * 8)
    completion = vote(llm, 32, EarlyStop(2, confidence=0.95))
    assert completion.consensus is not None
    assert completion.consensus.num_used == 4
    assert len(engine.added) == 4
    assert "0.9688" in completion.consensus.reason


def test_reasoning_and_what_was_cut_are_no_answers() -> None:
    llm, _ = llm_of(["<think>1</think>9", "<think>2</think>9", "<think>9</think>8", "<think>3</think>9"])
    completion = vote(llm, 4)
    assert completion.consensus is not None
    assert (completion.consensus.answer, completion.consensus.num_votes) == ("9", 3)
    llm, _ = llm_of(["<think>9"] * 3)
    completion = vote(llm, 3)
    assert completion.consensus is not None
    assert (completion.consensus.num_used, completion.consensus.answer) == (3, None)
    llm, _ = llm_of(["12"] * 6)
    completion = vote(llm, 6, EarlyStop(2), max_tokens=1)
    assert reasons(completion) == [LENGTH] * 6
    assert completion.consensus is not None
    assert (completion.consensus.majority_index, completion.consensus.answer) == (None, None)
    assert (completion.consensus.num_used, completion.consensus.num_votes) == (6, 0)


def test_a_stop_string_ends_a_sample_with_an_answer() -> None:
    llm, _ = llm_of(["3;4", "3;5", "3;6", "3"])
    completion = vote(llm, 9, stop=(";",))
    assert completion.consensus is not None
    assert (completion.consensus.answer, completion.consensus.num_votes) == ("3", 4)


def test_the_last_delta_alone_is_last_and_has_the_result() -> None:
    llm, _ = llm_of(["1 1 1 1 1 1 1", "2", "4", *["3"] * 3])
    options = RequestOptions(SamplingParams(n=9), early_stop=EarlyStop(3))
    deltas = list(llm.stream("x", options))
    assert [delta.is_last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [delta.consensus is not None for delta in deltas] == [delta.is_last for delta in deltas]
    assert deltas[-1].finish_reason is ABORT


def test_several_prompts_vote_each_for_itself() -> None:
    texts: Mapping[str, str] = {"req-1": "5", "req-2": "6"}

    def script(request: Request) -> list[int]:
        name, _, index = request.request_id.partition("#")
        text = texts[name] if name == "req-1" or int(index) > 1 else index
        return [*TOKENIZER.encode(text), *TOKENIZER.eos_token_ids]

    engine = ScriptedEngine(script)
    llm = LLM(engine, TOKENIZER, model_name="toy", max_model_len=512)
    options = RequestOptions(SamplingParams(n=6), early_stop=EarlyStop(2))
    first, second = llm.generate(["x", "y"], options)
    assert first.consensus is not None
    assert second.consensus is not None
    assert (first.consensus.answer, first.consensus.num_used) == ("5", 2)
    assert (second.consensus.answer, second.consensus.num_used) == ("6", 4)


def test_a_request_that_is_aborted_starts_nothing_more() -> None:
    llm, engine = llm_of(["1", "2", "3", "4"])
    request_id = llm.submit("x", RequestOptions(SamplingParams(n=8), early_stop=EarlyStop(2)))
    llm.step()
    assert llm.abort(request_id)
    assert not llm.has_work()
    assert len(engine.added) == 2
    assert not llm.abort(request_id)
    assert llm.submit("x", RequestOptions(SamplingParams(n=2), early_stop=EarlyStop()), request_id=request_id)


def test_an_engine_that_takes_no_more_samples_ends_the_request_with_its_error() -> None:
    llm, engine = llm_of(["1", "2 2 2 2 2", "3"])
    add = engine.add

    def refuse(request: Request) -> None:
        if index_of(request) == 3:
            raise NoRoomError("no room: try again later")
        add(request)

    engine.add = refuse  # type: ignore[method-assign]
    completion = vote(llm, 8, EarlyStop(2))
    assert completion.error == "no room: try again later"
    assert completion.consensus is None
    assert not engine.running
    deltas: list[TextDelta] = list(
        llm.stream("x", RequestOptions(SamplingParams(n=8), early_stop=EarlyStop(2)))
    )
    assert (deltas[-1].error_status, deltas[-1].is_last) == (429, True)


def test_one_sample_has_nothing_to_agree_with() -> None:
    with pytest.raises(RequestError, match="early_stop needs n of at least 2") as caught:
        RequestOptions(SamplingParams(), early_stop=EarlyStop())
    assert caught.value.param == "early_stop"


@pytest.mark.parametrize("wrong", [True, {"window": 4}, 4])
def test_what_is_no_rule_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="early_stop must be None or of type EarlyStop"):
        RequestOptions(SamplingParams(n=4), early_stop=wrong)


def test_a_sample_is_the_same_whether_the_others_are_started_or_not() -> None:
    """On the engine itself: windows share the prompt's KV, and what they say is what `n` alone gives."""
    prompt: list[Any] = [{"role": "user", "content": "What is 123 + 456?"}]
    with load(None, {"kv.num_blocks": 96}) as llm:
        params = llm.sampling_params(n=6, temperature=1.3, seed=3, max_tokens=60)
        [full] = llm.generate([prompt], params)
        [voted] = llm.generate([prompt], RequestOptions(params, early_stop=EarlyStop(2)))
        assert voted.consensus is not None
        assert voted.consensus.num_used <= 6
        for ours, whole in zip(voted.choices, full.choices, strict=False):
            assert whole.text.startswith(ours.text)
            assert ours.finish_reason in (ABORT, whole.finish_reason)
        assert voted.usage.cached_tokens > 0
        assert llm.stats().blocks_active == 0
