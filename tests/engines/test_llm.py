"""`LLM` over a scripted engine: text, stop strings, usage, choices, limits, the end of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import ContextLengthError, RequestError
from sagellm.core.types import FinishReason, Namespace, SamplingParams, Tokens
from sagellm.engines.llm import LLM, Prompt, RequestOptions, StopStrings, TextDelta
from sagellm.engines.native.tokenizer import Tokenizer
from tests.scripted_engine import ScriptedEngine, says, scripted_llm, toy_tokenizer
from tests.toy_tokenizers import word_level

TOKENIZER = toy_tokenizer()


def llm_saying(text: str, max_model_len: int = 512, **options: Any) -> tuple[LLM, ScriptedEngine]:
    engine = ScriptedEngine(says(TOKENIZER, text), **options)
    return LLM(engine, TOKENIZER, model_name="toy", max_model_len=max_model_len), engine


def drain(llm: LLM) -> list[TextDelta]:
    deltas = []
    while llm.has_work():
        deltas += llm.step()
    return deltas


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


# -- stop strings


def cut_by_character(text: str, stops: list[str], *, include: bool) -> str:
    """The slow twin of `StopStrings`: look again after each character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - max(map(len, found))]
    return text


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    checker = StopStrings(stops, include=include)
    whole = cut_by_character("".join(pieces), stops, include=include)
    sent = ""
    for piece in pieces:
        sent += checker.push(piece)
        assert whole.startswith(sent)
    assert sent + checker.finish() == whole


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize(("include", "expected"), [(False, "one tw"), (True, "one two th")])
def test_a_stop_string_across_tokens_ends_the_engine_request(
    tokens_per_step: int, include: bool, expected: str
) -> None:
    llm, engine = llm_saying("one two three four", tokens_per_step=tokens_per_step)
    params = SamplingParams(stop=("never", "o th"), include_stop_str_in_output=include)
    request_id = llm.submit("x", params)
    deltas = drain(llm)
    assert text_of(deltas) == expected
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].is_last
    assert engine.aborted == [request_id]
    assert not engine.running
    assert deltas[-1].usage.completion_tokens == sum(len(delta.token_ids) for delta in deltas)


def test_stop_strings_wait_for_min_tokens() -> None:
    llm, _ = llm_saying("a.b.c.d")
    [completion] = llm.generate("x", SamplingParams(stop=(".",), min_tokens=3))
    assert completion.text == "a.b"


def test_held_text_comes_when_the_request_ends() -> None:
    llm, _ = llm_saying("ends with st")
    [completion] = llm.generate("x", SamplingParams(stop=("stop",)))
    assert completion.text == "ends with st"


def test_a_stop_token_is_not_text_unless_asked_for() -> None:
    llm, _ = llm_saying("abc")
    stop = TOKENIZER.encode("c")[0]
    [without] = llm.generate("x", SamplingParams(stop_token_ids=(stop,)))
    [included] = llm.generate("x", SamplingParams(stop_token_ids=(stop,), include_stop_str_in_output=True))
    assert (without.text, included.text) == ("ab", "abc")
    assert without.choices[0].finish_reason is FinishReason.STOP


# -- text and usage


def test_text_is_whole_characters_and_special_tokens_are_hidden() -> None:
    llm, _ = llm_saying("<think>1</think> naïve 你好 🙂")
    llm.submit("x")
    deltas = drain(llm)
    assert text_of(deltas) == "<think>1</think> naïve 你好 🙂"
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_usage_counts_the_prompt_once_and_cached_tokens() -> None:
    llm, engine = llm_saying("hello", num_cached=2)
    [completion] = llm.generate("some prompt", SamplingParams(n=3, seed=5))
    num_prompt = len(TOKENIZER.encode("some prompt"))
    tokens = len(TOKENIZER.encode("hello")) + 1
    assert (completion.usage.prompt_tokens, completion.usage.cached_tokens) == (num_prompt, 2)
    assert completion.usage.completion_tokens == 3 * tokens
    assert [choice.text for choice in completion.choices] == ["hello"] * 3
    assert [request.params.seed for request in engine.added] == [5, 6, 7]
    assert {request.group for request in engine.added} == {completion.request_id}
    ids = [request.request_id for request in engine.added]
    assert ids == [f"{completion.request_id}#{i}" for i in range(3)]


# -- reasoning


@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_usage_counts_tokens_of_reasoning(tokens_per_step: int) -> None:
    llm, _ = llm_saying("a<think>12345</think>6", tokens_per_step=tokens_per_step)
    llm.submit("x", SamplingParams(n=2))
    deltas = drain(llm)
    counts = [delta.usage.reasoning_tokens for delta in deltas]
    assert counts == sorted(counts)
    assert counts[-1] == 2 * len(TOKENIZER.encode("12345"))
    [stopped] = llm.generate("x", SamplingParams(stop=("2",)))
    assert stopped.usage.reasoning_tokens == 2


def test_reasoning_ends_at_its_budget() -> None:
    llm, engine = llm_saying("<think>12345</think>6")
    [completion] = llm.generate("x", llm.sampling_params(max_reasoning_tokens=2))
    assert completion.text == "<think>12</think>45</think>6"
    assert completion.usage.reasoning_tokens == 2
    assert engine.added[0].params.reasoning_token_ids == TOKENIZER.reasoning_token_ids
    [other] = llm.generate("x<think>", SamplingParams(max_reasoning_tokens=0, max_tokens=1))
    assert other.text == "</think>"
    own = (TOKENIZER.encode("3")[0], TOKENIZER.encode("5")[0])
    [marked] = llm.generate(
        "x", SamplingParams(max_reasoning_tokens=0, reasoning_token_ids=own, max_tokens=6)
    )
    assert (marked.text, marked.usage.reasoning_tokens) == ("<think>12355", 0)


def test_a_model_without_markers_has_no_budget() -> None:
    tokenizer = Tokenizer(word_level(), special_tokens={"eos_token": "</s>"})
    engine = ScriptedEngine(says(tokenizer, "hello world"))
    llm = LLM(engine, tokenizer, model_name="toy", max_model_len=64)
    assert not llm.has_reasoning_budgets
    with pytest.raises(
        RequestError, match="max_reasoning_tokens: this model has no tokens like <think>"
    ) as caught:
        llm.submit("hello", SamplingParams(max_reasoning_tokens=4))
    assert caught.value.param == "max_reasoning_tokens"
    assert not engine.added
    [completion] = llm.generate("hello", SamplingParams())
    assert completion.usage.reasoning_tokens == 0


def test_logprobs_carry_text_bytes_and_offsets() -> None:
    llm, _ = llm_saying("ab🙂")
    [completion] = llm.generate("x", SamplingParams(logprobs=2, max_tokens=6))
    entries = completion.choices[0].logprobs
    assert b"".join(entry.data for entry in entries) == "ab🙂".encode()
    assert [entry.offset for entry in entries[:3]] == [0, 1, 2]
    assert all(len(entry.top) == 2 and entry.top[0].logprob == -0.5 for entry in entries)
    [plain] = llm.generate("x")
    assert plain.choices[0].logprobs == []


def test_several_prompts_and_chat() -> None:
    llm, engine = llm_saying("yes")
    prompts: list[Prompt] = ["a", "b", [5, 6]]
    assert [one.text for one in llm.generate(prompts)] == ["yes"] * 3
    assert llm.chat([{"role": "user", "content": "hi"}]).text == "yes"
    rendered = TOKENIZER.decode(engine.added[-1].tokens, skip_special_tokens=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert llm.generate([]) == []


def test_defaults_fill_what_is_not_given() -> None:
    engine = ScriptedEngine(says(TOKENIZER, "a"))
    llm = LLM(engine, TOKENIZER, model_name="m", max_model_len=64, defaults={"top_k": 7})
    assert llm.sampling_params(temperature=0.5) == SamplingParams(top_k=7, temperature=0.5)
    assert llm.sampling_params(top_k=0).top_k == 0


# -- limits


def test_max_tokens_default_to_the_rest_of_the_context() -> None:
    llm, engine = llm_saying("word " * 100, max_model_len=20)
    [completion] = llm.generate([1, 2, 3, 4])
    assert completion.choices[0].finish_reason is FinishReason.LENGTH
    assert engine.added[0].params.max_tokens == 16


def test_a_prompt_that_is_too_long_names_both_lengths() -> None:
    llm, engine = llm_saying("a", max_model_len=8)
    with pytest.raises(ContextLengthError, match=r"maximum context length is 8 tokens.*prompt has 8"):
        llm.submit([1] * 8)
    with pytest.raises(RequestError, match="at most 4") as refusal:
        llm.submit([1] * 4, SamplingParams(max_tokens=5))
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    assert not engine.added


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([], {}),
        ([-1], {}),
        ([10**9], {}),
        ([2**40], {}),
        ("x", {"logit_bias": {10**6: 1.0}}),
        ("x", {"seed": -1}),
        ("x", {"seed": -2, "n": 2}),
    ],
)
def test_a_refused_request_leaves_nothing(prompt: Any, params: dict[str, Any]) -> None:
    llm, engine = llm_saying("a")
    with pytest.raises(RequestError):
        llm.submit(prompt, SamplingParams(**params), request_id="r")
    assert not engine.running
    llm.submit("x", request_id="r")
    with pytest.raises(RequestError, match="is running"):
        llm.submit("x", request_id="r")


# -- the end of requests


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda llm: llm.generate("x", 5), "llm.sampling_params(temperature"),
        (lambda llm: llm.generate("x", {"max_tokens": 5}), "params must be SamplingParams"),
        (lambda llm: next(llm.stream("x", 5)), "params must be SamplingParams"),
        (lambda llm: llm.chat("x", 5), "params must be SamplingParams"),
        (lambda llm: llm.sampling_params(max_token=3), "'max_token'. Did you mean 'max_tokens'?"),
        (lambda llm: llm.sampling_params(temperature="hot"), "temperature must be a number"),
        (lambda llm: llm.generate(5), "a prompt is a text, a list of messages or of token ids, got 5 (int)"),
        (lambda llm: llm.generate(None), "a prompt is a text"),
        (lambda llm: llm.generate(b"x"), "a prompt is a text"),
        (lambda llm: llm.generate(["a", 5]), "a prompt is a text"),
        (lambda llm: llm.generate([1.5]), "a prompt is a text"),
        (lambda llm: llm.generate([[1, "b"]]), "a prompt is a text"),
        (lambda llm: llm.generate({"role": "user", "content": "x"}), "a prompt is a text"),
        (lambda llm: llm.pin_prompt(5), "a prompt is a text"),
        (lambda llm: llm.chat(5), "messages must be a text or a list"),
        (lambda llm: llm.chat([5]), "messages must be a text or a list"),
    ],
)
def test_what_has_another_type_is_explained(wrong: Callable[[LLM], object], words: str) -> None:
    llm = scripted_llm()
    with pytest.raises(RequestError) as caught:
        wrong(llm)
    assert words in str(caught.value)
    assert not llm.has_work()


def test_tenants_priority_and_slo_reach_the_engine() -> None:
    llm, engine = llm_saying("a")
    llm.submit(Tokens([1, 2]), RequestOptions(llm.sampling_params(), priority=3, tenant="salt"))
    assert engine.added[0].namespace == Namespace(tenant="salt")
    assert engine.added[0].priority == 3


def test_abort_drops_all_choices_and_no_delta_follows() -> None:
    llm, engine = llm_saying("a long answer")
    request_id = llm.submit("x", SamplingParams(n=2))
    llm.step()
    assert llm.abort(request_id)
    assert not llm.abort(request_id)
    assert sorted(engine.aborted) == [f"{request_id}#0", f"{request_id}#1"]
    assert drain(llm) == []


def test_leaving_a_stream_aborts_it_and_others_lose_nothing() -> None:
    llm, engine = llm_saying("a long answer")
    other = llm.submit("other")
    stream = llm.stream("mine")
    first = next(stream)
    stream.close()
    assert engine.aborted == [first.request_id]
    assert text_of([delta for delta in drain(llm) if delta.request_id == other]) == "a long answer"


def test_two_streams_side_by_side() -> None:
    llm, _ = llm_saying("interleaved text")
    pairs = list(zip(llm.stream("a"), llm.stream("b"), strict=True))
    sides = zip(*pairs, strict=True)
    assert [text_of(list(side)) for side in sides] == ["interleaved text"] * 2


def test_an_engine_error_is_told() -> None:
    llm, _ = llm_saying("abc", error_for="req-1")
    [completion] = llm.generate("x")
    assert completion.choices[0].finish_reason is FinishReason.ERROR
    assert completion.error == "scripted error"


def test_close_aborts_and_closes() -> None:
    llm, engine = llm_saying("abc")
    llm.submit("x", request_id="r")
    llm.close()
    assert (engine.aborted, engine.closed) == (["r"], True)
    assert scripted_llm().generate("x")[0].text == "Hello, wörld 🙂!"


def test_a_prompt_that_is_refused_leaves_none_of_its_companions_behind() -> None:
    llm, engine = llm_saying("abc")
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["hello", "hello you", ""])
    assert not engine.running
    assert not llm.has_work()
    assert [completion.text for completion in llm.generate("again", SamplingParams())] == ["abc"]


def test_at_the_end_of_a_block_it_is_closed() -> None:
    llm, engine = llm_saying("hello")
    with llm as same:
        assert same is llm
        llm.submit("x", SamplingParams(max_tokens=4))
        assert llm.has_work()
    assert not llm.has_work()
    assert engine.closed
    with pytest.raises(RequestError, match="this LLM is closed"):
        llm.generate("x")


def test_it_says_what_it_is() -> None:
    llm, _ = llm_saying("hello")
    assert repr(llm) == "<LLM 'toy', context of 512 tokens>"
