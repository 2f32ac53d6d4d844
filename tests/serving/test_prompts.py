"""What cannot fit is refused before it is encoded; what may fit is encoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from sagellm.core.errors import ContextLengthError
from sagellm.engines.llm import LLM
from sagellm.serving.prompts import PromptEncoder
from tests.scripted_engine import scripted_llm, toy_tokenizer
from tests.serving.live import serving

MAX_LEN = 64


@pytest.fixture
def llm() -> LLM:
    return scripted_llm(max_model_len=MAX_LEN)


@pytest.fixture
def encoder(llm: LLM) -> PromptEncoder:
    return PromptEncoder(llm)


def never_encode(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def encode(*_: Any, **__: Any) -> None:
        raise AssertionError("encoded")

    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(llm.tokenizer, name, encode)


def test_the_bound_is_the_context_times_the_longest_token(encoder: PromptEncoder) -> None:
    tokenizer = toy_tokenizer()
    longest = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
    assert encoder.max_text_bytes == MAX_LEN * longest
    assert len(encoder.text("x" * encoder.max_text_bytes))
    with pytest.raises(ContextLengthError, match=str(encoder.max_text_bytes)):
        encoder.text("x" * (encoder.max_text_bytes + 1))
    with pytest.raises(ContextLengthError):
        encoder.text("é" * (encoder.max_text_bytes // 2 + 1))


@pytest.mark.parametrize(
    "prompt", ["x" * 100_000, [1] * MAX_LEN, [1] * 100_000], ids=["text", "ids, no room left", "many ids"]
)
def test_a_prompt_that_cannot_fit_is_not_encoded(
    encoder: PromptEncoder, llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt: str | Sequence[int]
) -> None:
    never_encode(monkeypatch, llm)
    with pytest.raises(ContextLengthError) as refused:
        encoder.prompt(prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x" * 60_000}, {"role": "user", "content": "x" * 60_000}],
        [{"role": "user", "content": [{"type": "text", "text": "x" * 100_000}]}],
        [{"role": "user", "content": ""}] * (MAX_LEN + 1),
    ],
    ids=["texts", "parts", "messages"],
)
def test_a_chat_that_cannot_fit_is_not_rendered(
    encoder: PromptEncoder, llm: LLM, monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]]
) -> None:
    never_encode(monkeypatch, llm)
    with pytest.raises(ContextLengthError) as refused:
        encoder.chat(messages, None)
    assert refused.value.param == "messages"


def test_over_http_a_long_text_and_too_many_prompts_are_400(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_encode(monkeypatch, llm)
    with serving(llm, max_waiting=4) as live:
        long, several = "context_length_exceeded", "invalid_value"
        for path, body, code, param in (
            ("/v1/completions", {"prompt": "x" * 100_000}, long, "prompt"),
            ("/v1/completions", {"prompt": "x" * 100_000, "stream": True}, long, "prompt"),
            ("/tokenize", {"prompt": "x" * 100_000}, long, "prompt"),
            ("/detokenize", {"tokens": [1] * (MAX_LEN + 1)}, long, "tokens"),
            ("/v1/completions", {"prompt": ["x"] * 5}, several, "prompt"),
            ("/v1/completions", {"prompt": ["x", "y"], "n": 3}, several, "prompt"),
            ("/v1/completions", {"prompt": "x", "n": 5}, several, "n"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 5}, several, "n"),
        ):
            response = live.http.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, code, param), body.keys()
            assert ("maximum context length" in error["message"]) == (code == long)
            assert "retry-after" not in response.headers


def test_other_threads_run_while_a_text_is_encoded() -> None:
    tokenizer = toy_tokenizer()
    text = "some words to encode, " * 20_000
    longest_s, done = 0.0, threading.Event()

    def beat() -> None:
        nonlocal longest_s
        while not done.is_set():
            before = time.perf_counter()
            time.sleep(0.001)
            longest_s = max(longest_s, time.perf_counter() - before)

    thread = threading.Thread(target=beat)
    thread.start()
    began = time.perf_counter()
    tokenizer.encode(text)
    took_s = time.perf_counter() - began
    done.set()
    thread.join()
    assert longest_s < max(0.5 * took_s, 0.1)
