"""The real `openai` client over HTTP, against every engine that a fixture builds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from tests.engine_choice import ENGINES, llm_of
from tests.serving.live import Live, serving, wait_until

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture(scope="module", params=ENGINES)
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    with serving(llm_of(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[OpenAI]:
    with live.openai() as made:
        yield made


@pytest.fixture
def model(live: Live) -> str:
    return live.llm.model_name


def streamed(client: OpenAI, model: str, **options: Any) -> list[ChatCompletionChunk]:
    defaults: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 20}
    return list(client.chat.completions.create(model=model, stream=True, **(defaults | options)))


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


# -- chat


def test_chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=20)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == model
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 20
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_chat_stream_says_what_the_whole_says(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=20)
    chunks = streamed(client, model)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert [chunk.choices[0].delta.role for chunk in chunks[1:]] == [None] * (len(chunks) - 1)
    assert text_of(chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_wire_form_of_a_stream(live: Live, model: str) -> None:
    body = {"model": model, "messages": QUESTION, "stream": True, "max_tokens": 3}
    with live.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_in_a_stream(client: OpenAI, model: str) -> None:
    chunks = streamed(client, model, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk.usage for chunk in streamed(client, model, stream_options=options)]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages)
    assert counts == sorted(counts)
    assert counts[-1] == chunks[-1].usage.completion_tokens


def test_two_choices(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"messages": QUESTION, "max_tokens": 8, "n": 2, "seed": 1}
    answer = client.chat.completions.create(model=model, **options)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    one = client.chat.completions.create(model=model, **(options | {"n": 1}))
    assert one.usage is not None
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert one.choices[0].message.content == answer.choices[0].message.content
    chunks = list(client.chat.completions.create(model=model, stream=True, **options))
    for index in range(2):
        assert text_of(chunks, index) == answer.choices[index].message.content


def test_content_parts_are_text(client: OpenAI, model: str) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}]}]
    answers = [
        client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=5)
        for messages in (QUESTION, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_chat_logprobs(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"messages": QUESTION, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    options["extra_body"] = {"ignore_eos": True}
    answer = client.chat.completions.create(model=model, temperature=0, **options)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes or ()).decode("utf-8", "replace") == entry.token
    chunks = streamed(client, model, **options)
    per_chunk = [chunk.choices[0].logprobs for chunk in chunks]
    assert sum(len(one.content or ()) for one in per_chunk if one is not None) == 6


# -- completions


def test_completions(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="1 + 2 =", temperature=0, max_tokens=8)
    assert answer.object == "text_completion"
    chunks = list(
        client.completions.create(model=model, prompt="1 + 2 =", temperature=0, max_tokens=8, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_completions_take_texts_and_token_ids(live: Live, client: OpenAI, model: str) -> None:
    ids = live.http.post("/tokenize", json={"prompt": "1 + 2 ="}).json()["tokens"]
    forms: list[Any] = ["1 + 2 =", ["1 + 2 =", "1 + 2 ="], ids, [ids, ids]]
    texts = []
    for prompt in forms:
        answer = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=6)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        texts += [choice.text for choice in answer.choices]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids) * len(answer.choices)
    assert len(texts) == 6
    assert len(set(texts)) == 1


def test_several_prompts_and_choices_stream_by_index(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"prompt": ["1 +", "2 +"], "n": 2, "max_tokens": 4, "seed": 3, "echo": True}
    answer = client.completions.create(model=model, **options)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(model=model, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in answer.choices}
    assert [text[:3] for text in texts.values()] == ["1 +", "1 +", "2 +", "2 +"]


def test_completion_logprobs_and_offsets(client: OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt="1 + 2 =",
        max_tokens=5,
        temperature=0,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs) == 5
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_a_stop_string_across_tokens(client: OpenAI, model: str) -> None:
    """Any two characters of a text, given as a stop string, cut the same text before them."""
    options: dict[str, Any] = {"prompt": "1 + 2 =", "temperature": 2, "seed": 7, "max_tokens": 24}
    options["extra_body"] = {"ignore_eos": True}
    text = client.completions.create(model=model, **options).choices[0].text
    cut = next(i for i in range(2, len(text) - 1) if text.find(text[i : i + 2]) == i)
    stop = text[cut : cut + 2]
    stops = ["\0never", stop]
    whole = client.completions.create(model=model, stop=stops, **options)
    chunks = list(client.completions.create(model=model, stop=stops, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == text[:cut]
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    options["extra_body"] = {"ignore_eos": True, "include_stop_str_in_output": True}
    included = client.completions.create(model=model, stop=stop, **options)
    assert included.choices[0].text == text[: cut + 2]


# -- many clients, and clients that leave


def test_fifty_streams_at_once(live: Live, client: OpenAI, model: str) -> None:
    def ask(number: int) -> str:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"What is {number} + 1?"}]
        chunks = streamed(client, model, messages=messages, max_tokens=12, extra_body={"ignore_eos": True})
        assert chunks[-1].choices[0].finish_reason == "length"
        return text_of(chunks)

    alone = [ask(number) for number in range(3)]
    with ThreadPoolExecutor(50) as pool:
        together = list(pool.map(ask, range(50)))
    assert together[:3] == alone
    wait_until(lambda: live.metric("sagellm_kv_blocks", state="active") == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(live: Live, model: str, stream: bool) -> None:
    before = live.metric("sagellm_kv_blocks", state="active")
    total = sum(live.metric("sagellm_kv_blocks", state=state) for state in ("active", "cached", "free"))
    aborted = abort_count(live)
    body = {
        "model": model,
        "messages": QUESTION,
        "stream": stream,
        "ignore_eos": True,
        "max_tokens": live.llm.max_model_len - 100,
    }
    connection = HTTPConnection(*live.address)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    wait_until(lambda: live.metric("sagellm_kv_blocks", state="active") > before)
    connection.close()
    wait_until(lambda: abort_count(live) == aborted + 1)
    wait_until(lambda: live.metric("sagellm_kv_blocks", state="active") == before)
    now = sum(live.metric("sagellm_kv_blocks", state=state) for state in ("active", "cached", "free"))
    assert now == total
    assert live.metric("sagellm_requests_running") == 0


def abort_count(live: Live) -> float:
    try:
        return live.metric("sagellm_requests_total", finish_reason="abort")
    except KeyError:
        return 0.0


# -- the rest of the API


def test_models(live: Live, client: OpenAI, model: str) -> None:
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    card = live.http.get(f"/v1/models/{model}").json()
    assert card["max_model_len"] == live.llm.max_model_len


def test_tokenize_and_back(live: Live, model: str) -> None:
    answer = live.http.post("/tokenize", json={"model": model, "prompt": "naïve 1 + 2"}).json()
    assert answer["count"] == len(answer["tokens"]) > 0
    assert answer["max_model_len"] == live.llm.max_model_len
    back = live.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back["prompt"].endswith("naïve 1 + 2")
    chat = live.http.post("/tokenize", json={"messages": QUESTION, "return_token_strs": True}).json()
    text = live.http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert "".join(chat["token_strs"]) == text
    assert "What is 1 + 2?" in text
    used = live.openai().chat.completions.create(model=model, messages=QUESTION, max_tokens=1).usage
    assert used is not None
    assert used.prompt_tokens == chat["count"]


def test_probes_and_metrics(live: Live, model: str) -> None:
    assert live.http.get("/health").status_code == 200
    assert live.http.get("/ready").status_code == 200
    assert live.http.get("/version").json()["version"]
    live.openai().chat.completions.create(model=model, messages=QUESTION, max_tokens=4)
    text = live.http.get("/metrics").text
    for name in (
        "sagellm_requests_total",
        "sagellm_prompt_tokens_total",
        "sagellm_generation_tokens_total",
        "sagellm_cached_tokens_total",
        "sagellm_time_to_first_token_seconds_bucket",
        "sagellm_inter_token_latency_seconds_bucket",
        "sagellm_e2e_request_latency_seconds_sum",
        "sagellm_requests_running",
        "sagellm_requests_waiting",
        "sagellm_preemptions_total",
    ):
        assert f"\n{name}{{" in text, name
    assert all(live.metric("sagellm_kv_blocks", state=state) >= 0 for state in ("active", "cached", "free"))
