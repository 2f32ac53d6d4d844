"""What explanations tell of other tenants, and what they do under load and with odd prompts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sagellm.engines.build import load
from sagellm.engines.llm import LLM
from tests.serving.live import Live, serving
from tests.serving.test_explain import BLOCK, EXPLAIN, complete, explain

SECRET, FILLER = list(range(300, 348)), list(range(400, 570))


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = load(None, {"kv.miss_attribution": True, "kv.num_blocks": 12, "kv.eviction": "lru"})
    with serving(llm) as made:
        yield made


def told(live: Live, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """What an answer says of the cache."""
    body = {"prompt": prompt, "max_tokens": 1, "return_cache_misses": True, **fields}
    answer = live.http.post("/v1/completions", json=body).json()
    return {"details": answer["usage"]["prompt_tokens_details"], "sagellm": answer["sagellm"]}


@pytest.mark.parametrize("is_evicted", [False, True])
def test_a_prompt_of_another_tenant_is_told_of_as_a_new_one(live: Live, *, is_evicted: bool) -> None:
    complete(live, SECRET, cache_salt="alice")
    if is_evicted:
        complete(live, FILLER, cache_salt="alice")
    new = list(range(600, 648))
    assert explain(live, SECRET, cache_salt="bob") == explain(live, new, cache_salt="bob")
    found = told(live, SECRET, cache_salt=f"bob {is_evicted}")
    assert found == told(live, new, cache_salt=f"carol {is_evicted}")
    assert found["details"]["cache_miss_blocks"]["cold"] == 3
    assert set(found["sagellm"].values()) == {0, None}


@pytest.mark.parametrize("by", ["alice", "bob"])
def test_what_went_block_by_block_is_told_at_once(live: Live, by: str) -> None:
    """Growing requests evict a block in a step, and each has its own id."""
    complete(live, SECRET, cache_salt="alice")
    complete(live, FILLER[:100], cache_salt="filler")
    for start in (10, 40, 70):
        complete(live, list(range(start, start + 20)), cache_salt=by, max_tokens=30, ignore_eos=True)
    spans = explain(live, SECRET, cache_salt="alice")["spans"]
    evicted = [span for span in spans if span["state"] == "evicted"]
    assert len({span["evicted_by"] for span in evicted}) == len(evicted)
    assert all(span["evicted_by"] is None for span in evicted) is (by == "bob")
    assert sum(span["stop"] - span["start"] for span in evicted) == len(SECRET)
    found = told(live, SECRET, cache_salt="alice")["sagellm"]
    assert found["evicted_tokens"] == len(SECRET)
    assert found["evicted_by"] == evicted[0]["evicted_by"]
    assert found["gib_needed"] >= max(span["gib_needed"] for span in evicted)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_hears_what_was_evicted(live: Live, *, stream: bool) -> None:
    message: Any = {"role": "user", "content": "What is 17 + 25, and what is 18 + 26, and 19 + 27?"}
    with live.openai() as client:
        given: Any = {
            "model": "sagellm-demo",
            "messages": [message],
            "max_tokens": 1,
            "extra_body": {"return_cache_misses": True, "cache_salt": "chat"},
        }
        client.chat.completions.create(**given)
        complete(live, FILLER, cache_salt="chat")
        if stream:
            options: Any = {"stream": True, "stream_options": {"include_usage": True}}
            *_, answer = client.chat.completions.create(**given, **options)
        else:
            answer = client.chat.completions.create(**given)
    assert answer.model_extra is not None
    found = answer.model_extra["sagellm"]
    assert found["cause"] == "capacity"
    assert found["evicted_tokens"] >= BLOCK


def test_text_of_a_session_is_for_its_salt_alone(live: Live) -> None:
    complete(live, SECRET, cache_salt="alice", session_id="chat")
    other = [*SECRET[:20], 1, *SECRET[21:]]
    assert explain(live, other, cache_salt="alice", session_id="chat")["session"] is not None
    for fields in ({"cache_salt": "bob"}, {"cache_salt": "alice "}, {"cache_salt": ""}, {}):
        assert explain(live, other, session_id="chat", **fields)["session"] is None


@pytest.mark.parametrize("prompt", ["x", "é漢字🙂", "a\0b", "\u202e" * 3, "1 + 1 = 2, " * 9])
def test_short_and_odd_prompts(live: Live, prompt: str) -> None:
    found = live.http.post(EXPLAIN, json={"prompt": prompt, "cache_salt": "漢字", "session_id": "é"}).json()
    assert found["spans"][-1]["stop"] == found["num_tokens"] > 0
    short = [span["state"] for span in found["spans"] if span["stop"] - span["start"] < BLOCK]
    assert set(short) <= {"partial_block"}


@pytest.mark.parametrize("prompt", [[0] * 100_000, "a" * 1_000_000, [768], [-1], [2**70]])
def test_prompts_that_no_request_could_have(live: Live, prompt: Any) -> None:
    assert live.http.post(EXPLAIN, json={"prompt": prompt}).status_code == 400


def test_explanations_during_evictions(live: Live) -> None:
    """Each covers its prompt; `explain` checks that."""
    prompts = [(list(range(100 * number, 100 * number + 150)), str(number % 2)) for number in range(4)]

    def ask(prompt: list[int], salt: str) -> None:
        for _ in range(25):
            explain(live, prompt, cache_salt=salt)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, *prompt) for prompt in prompts]
        for prompt, salt in prompts * 10:
            complete(live, prompt, cache_salt=salt)
        for each in asking:
            each.result()


def test_one_prompt_is_explained_at_a_time(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    true_explain = LLM.explain

    def counting(llm: LLM, *given: Any, **options: Any) -> Any:
        waiting.append(len(live.gateway._calls))
        return true_explain(llm, *given, **options)

    monkeypatch.setattr(LLM, "explain", counting)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: explain(live, SECRET), range(8)))
    assert waiting == [1] * 8


def test_it_needs_the_api_key() -> None:
    with serving(load(None, {"kv.num_blocks": 12, "kv.miss_attribution": True}), api_key="k") as live:
        assert live.http.post(EXPLAIN, json={"prompt": "x"}).status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert live.http.post(EXPLAIN, json={"prompt": "x"}, headers=headers).status_code == 200
