"""POST /v1/kv/explain: every state of a span, who may know what, and the session's difference."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from sagellm.engines.build import load
from tests.serving.live import Live, serving

EXPLAIN = "/v1/kv/explain"
BLOCK = 16


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    llm = load(None, {"kv.miss_attribution": True, "kv.num_blocks": 12, "kv.eviction": "lru"})
    with serving(llm) as made:
        yield made


def complete(live: Live, prompt: list[int], **fields: Any) -> str:
    answer = live.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def explain(live: Live, prompt: list[int], **fields: Any) -> dict[str, Any]:
    answer = live.http.post(EXPLAIN, json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    stops = [0, *(span["stop"] for span in found["spans"])]
    assert [span["start"] for span in found["spans"]] == stops[:-1]
    assert stops[-1] == found["num_tokens"] == len(prompt)
    return found


def states(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(span["state"], span["stop"] - span["start"]) for span in found["spans"]]


def test_spans_of_a_prompt(live: Live) -> None:
    first = list(range(100, 140))
    complete(live, first)
    found = explain(live, [*first[:32], *range(200, 220)])
    assert states(found) == [("hit", 32), ("never_seen", 16), ("partial_block", 4)]
    assert found["spans"][0]["tier"] == "device"
    assert found["block_size"] == BLOCK


def test_an_eviction_names_its_request_to_its_own_tenant_only(live: Live) -> None:
    old = list(range(300, 348))
    complete(live, old, cache_salt="a")
    blames = complete(live, list(range(400, 570)), cache_salt="a")
    span = evicted(explain(live, old, cache_salt="a"))
    assert span["cause"] == "capacity"
    assert f"cmpl-{span['evicted_by']}" == blames
    assert span["seconds_ago"] >= 0
    assert span["blocks_needed"] >= (span["stop"] - span["start"]) // BLOCK
    assert span["gib_needed"] == pytest.approx(span["blocks_needed"] * bytes_per_block(live) / 2**30)
    complete(live, list(range(590, 760)), cache_salt="b")
    assert evicted(explain(live, list(range(400, 570)), cache_salt="a"))["evicted_by"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_what_was_evicted_of_its_prompt(live: Live, *, stream: bool) -> None:
    old = list(range(300, 348))
    complete(live, old, cache_salt="c")
    blames = complete(live, list(range(400, 570)), cache_salt="c")
    before = time.time()
    asked: dict[str, Any] = {"return_cache_misses": True, "cache_salt": "c", "prompt": old}
    with live.openai() as client:
        given: Any = {"model": "sagellm-demo", "prompt": "", "max_tokens": 1, "extra_body": asked}
        if stream:
            options: Any = {"stream": True, "stream_options": {"include_usage": True}}
            *_, answer = client.completions.create(**given, **options)
        else:
            answer = client.completions.create(**given)
    assert answer.model_extra is not None
    found = answer.model_extra["sagellm"]
    assert f"cmpl-{found['evicted_by']}" == blames
    assert found["evicted_tokens"] in (16, 32, 48)
    assert found["cause"] == "capacity"
    assert before - 30 < found["evicted_at"] <= time.time()
    assert found["gib_needed"] >= bytes_per_block(live) / 2**30
    complete(live, list(range(590, 760)), cache_salt="d")
    other = live.http.post("/v1/completions", json={**asked, "max_tokens": 1}).json()["sagellm"]
    assert (other["evicted_tokens"] > 0, other["evicted_by"]) == (True, None)


def test_an_answer_whose_prompt_is_new_or_cached_names_no_eviction(live: Live) -> None:
    body = {"prompt": list(range(640, 690)), "max_tokens": 1, "return_cache_misses": True, "cache_salt": "e"}
    for _ in range(2):
        answer = live.http.post("/v1/completions", json=body).json()
        assert answer["sagellm"]["evicted_tokens"] == 0
        assert set(answer["sagellm"].values()) == {0, None}
    assert (
        "sagellm" not in live.http.post("/v1/completions", json={**body, "return_cache_misses": None}).json()
    )


def evicted(found: dict[str, Any]) -> dict[str, Any]:
    span: dict[str, Any] = next(span for span in found["spans"] if span["state"] == "evicted")
    return span


def bytes_per_block(live: Live) -> int:
    return live.llm.explain([1, 2, 3]).bytes_per_block


def test_nothing_is_told_of_other_tenants(live: Live) -> None:
    secret = list(range(500, 548))
    complete(live, secret, cache_salt="alice")
    assert states(explain(live, secret, cache_salt="alice"))[0][0] == "hit"
    for fields in ({"cache_salt": "bob"}, {}):
        assert states(explain(live, secret, **fields)) == [("never_seen", 48)]


def test_where_a_prompt_leaves_its_session(live: Live) -> None:
    complete(live, list(range(100, 140)), session_id="s", cache_salt="t")
    now = [*range(100, 120), 55, *range(121, 140)]
    session = explain(live, now, session_id="s", cache_salt="t")["session"]
    assert session["token"] == 20
    assert session["now"] != session["then"]
    assert session["before"]
    assert explain(live, list(range(100, 130)), session_id="s", cache_salt="t")["session"] is None
    assert explain(live, now, session_id="s", cache_salt="u")["session"] is None  # another tenant's
    assert explain(live, now, session_id="unknown", cache_salt="t")["session"] is None


def test_text_of_a_session_is_shown_under_a_salt_only(live: Live) -> None:
    """All requests without a salt are one tenant's: anybody could ask for the session of another."""
    complete(live, list(range(100, 140)), session_id="open")
    assert explain(live, [1, *range(101, 140)], session_id="open")["session"] is None


def test_messages_are_prompted_as_in_a_chat(live: Live) -> None:
    messages = [{"role": "user", "content": "What is 17 + 25? Say it in words, and then in figures."}]
    answer = live.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    found = live.http.post(EXPLAIN, json={"messages": messages}).json()
    assert found["num_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["spans"][0]["state"] == "hit"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "either prompt or messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "not both"),
        ({"prompt": "x", "session_id": ""}, "session_id"),
        ({"prompt": "x", "cache_salt": "a\0"}, "NUL"),
        ({"prompt": "x", "tokens": []}, "tokens"),
    ],
)
def test_bad_requests(live: Live, body: dict[str, Any], message: str) -> None:
    answer = live.http.post(EXPLAIN, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_without_attribution_it_says_how_to_get_it() -> None:
    with serving(load(None, {"kv.num_blocks": 12})) as live:
        answer = live.http.post(EXPLAIN, json={"prompt": "x"})
    assert answer.status_code == 400
    assert "--set kv.miss_attribution=true" in answer.json()["error"]["message"]
