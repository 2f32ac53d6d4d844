"""/v1/completions with `echo` and `logprobs`: the prompt's tokens are scored, as evaluations want it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sagellm.engines.build import load
from sagellm.engines.native import DEMO_MODEL
from sagellm.serving import gateway
from tests.scripted_engine import scripted_llm
from tests.serving.live import Live, serving

COMPLETIONS = "/v1/completions"
PROMPT = "User: 17 + 25 = 42\nAssistant: ä"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(load(str(DEMO_MODEL))) as running:
        yield running


def choices(live: Live, **fields: Any) -> list[dict[str, Any]]:
    """Of an answer in one piece; that of a stream, put together, must be the same."""
    body = {"prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 2} | fields
    response = live.http.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    whole: list[dict[str, Any]] = answer["choices"]
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    streamed, usage = joined(live.http.post(COMPLETIONS, json=asked).text, len(whole))
    assert streamed == whole
    for key in ("prompt_tokens", "completion_tokens"):
        assert usage[key] == answer["usage"][key]
    return whole


def joined(text: str, count: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    found: list[dict[str, Any]] = [{"index": index, "text": "", "logprobs": None} for index in range(count)]
    usage: dict[str, int] = {}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = found[part["index"]]
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            _extend(choice, part["logprobs"])
    return found, usage


def _extend(choice: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
    if choice["logprobs"] is None:
        choice["logprobs"] = logprobs
        return
    for name, values in (logprobs or {}).items():
        if choice["logprobs"][name] is not None:
            choice["logprobs"][name] = choice["logprobs"][name] + values


def ids_of(live: Live, text: str) -> list[int]:
    ids: list[int] = live.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_the_prompt_is_scored_before_the_answer(live: Live, max_tokens: int) -> None:
    [choice] = choices(live, max_tokens=max_tokens, ignore_eos=True)
    [plain] = choices(live, max_tokens=max_tokens, ignore_eos=True, logprobs=None)
    assert choice["text"] == plain["text"]
    assert (choice["text"] == PROMPT) == (max_tokens == 0)
    assert choice["text"].startswith(PROMPT)
    logprobs, num_prompt = choice["logprobs"], len(ids_of(live, PROMPT))
    assert {len(values) for values in logprobs.values()} == {num_prompt + max_tokens}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert choice["finish_reason"] == "length"
    for own, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert own in top.values()
        assert 2 <= len(top) <= 3
    pieces = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    assert all(choice["text"][offset:].startswith(token) for offset, token in pieces if "\ufffd" not in token)
    if max_tokens:
        generated = logprobs["token_logprobs"][num_prompt:]
        [alone] = choices(live, max_tokens=max_tokens, ignore_eos=True, echo=False)
        assert generated == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)


def test_a_prompt_scored_before_is_scored_again_with_the_same_result(live: Live) -> None:
    """Its blocks are in the prefix cache then, whose tokens have no logits."""
    text = "a prompt that is long enough for some blocks of the cache: " + "1 + 1 = 2, " * 8
    first, second = (choices(live, prompt=text, max_tokens=0) for _ in range(2))
    assert first == second
    usage = live.http.post(COMPLETIONS, json={"prompt": text, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_texts_token_ids_and_batches_have_the_same_scores(live: Live) -> None:
    ids, other = ids_of(live, PROMPT), ids_of(live, "1 + 2 = 3")
    [text] = choices(live, max_tokens=0)
    batch = choices(live, prompt=[ids, other, ids], max_tokens=0, n=2)
    assert [choice["index"] for choice in batch] == list(range(6))
    for choice in (batch[0], batch[1], batch[4], batch[5]):
        assert choice["logprobs"]["tokens"] == text["logprobs"]["tokens"]
        pairs = zip(
            choice["logprobs"]["token_logprobs"][1:], text["logprobs"]["token_logprobs"][1:], strict=True
        )
        assert all(a == pytest.approx(b, abs=1e-4) for a, b in pairs)
    assert len(batch[2]["logprobs"]["tokens"]) == len(other)
    [one] = choices(live, prompt=ids[:1], max_tokens=0)
    assert one["logprobs"]["token_logprobs"] == [None]


def test_usage_counts_nothing_where_nothing_was_generated(live: Live) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 0}
    answer = live.http.post(COMPLETIONS, json=body | {"logprobs": 0}).json()
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["logprobs"]["top_logprobs"] is None
    assert live.http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == PROMPT


def test_the_token_that_ends_the_answer_has_its_entry() -> None:
    """lm-evaluation-harness asks for one token and drops the last entry, so there must be one for EOS too."""
    with serving(scripted_llm("")) as live:
        [choice] = choices(live, prompt="abc", max_tokens=1)
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == "abc"
    assert len(choice["logprobs"]["tokens"]) == 4


def test_a_long_prompts_scores_are_no_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "MAX_UNREAD_BYTES", 4096)
    with serving(scripted_llm("x", max_model_len=512)) as live:
        [choice] = choices(live, prompt=[20] * 400, max_tokens=1)
        assert len(choice["logprobs"]["tokens"]) == 401
