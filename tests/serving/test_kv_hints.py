"""KV hints over HTTP, by the `openai` client: what they do to the cache, what is refused, who may speak."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from sagellm.core.kv_hints import HintOutcome, HintStatus
from sagellm.engines.build import load
from sagellm.engines.llm import LLM
from sagellm.engines.native import DEMO_MODEL
from sagellm.engines.simulator import TokenMemoryBackend
from tests.builders import fake_engine
from tests.scripted_engine import ScriptedEngine, scripted_llm, toy_tokenizer
from tests.serving.live import Live, serving

BLOCK = 16
NUM_BLOCKS = 12
FULL = 4 * BLOCK
"""Tokens of a prompt of `prompt_of` that can be found again: all but its last one."""

HINTS = "/v1/kv/hints"


def prompt_of(name: int, num_blocks: int = 4) -> list[int]:
    """Whole blocks and one token more; prompts of different names share nothing."""
    return [100 + 10 * name] + [20 + i % 50 for i in range(num_blocks * BLOCK)]


OLD, YOUNG, FILLER = prompt_of(0), prompt_of(1), prompt_of(2, num_blocks=7)


def simulated(eviction: str = "lru", **options: Any) -> LLM:
    tokenizer = toy_tokenizer()
    size: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK, "max_model_len": 256}
    backend = TokenMemoryBackend(vocab_size=tokenizer.vocab_size, **size)
    engine = fake_engine(backend, max_batched_tokens=256, eviction=eviction, **options)
    return LLM(engine, tokenizer, model_name="toy", max_model_len=192)


def native() -> LLM:
    if not (DEMO_MODEL / "config.json").is_file():
        pytest.skip("the demo model is not built")
    return load(settings={"kv.num_blocks": NUM_BLOCKS, "kv.block_size": BLOCK, "engine.threads": 1})


@pytest.fixture(params=["lru", "adaptive", "native"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    """A server with room for two sessions of four blocks, and four blocks free."""
    with serving(native() if request.param == "native" else simulated(request.param)) as running:
        yield running


def cached(client: OpenAI, prompt: list[int], **fields: Any) -> int:
    """Send a prompt; how many tokens of it were found in the cache."""
    answer = client.completions.create(
        model=client.models.list().data[0].id, prompt=prompt, max_tokens=1, extra_body=fields
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def envelope(*actions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    numbered = [
        {"action_id": f"a{i}", "action_type": kind, "payload": payload}
        for i, (kind, payload) in enumerate(actions)
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": numbered}


def hinted(live: Live, *actions: tuple[str, dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    response = live.http.post(HINTS, json={"kv_hints": envelope(*actions)} | fields)
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"outcomes"}
    return list(response.json()["outcomes"])


def statuses(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    return [outcome["status"] for outcome in outcomes]


# -- what hints do


def test_without_hints_the_older_goes_first(live: Live) -> None:
    with live.openai() as client:
        for prompt in (OLD, YOUNG, FILLER):
            cached(client, prompt)
        assert cached(client, YOUNG) == FULL
        assert cached(client, OLD) == 0


@pytest.mark.parametrize("kind", ["session.end", "session.supersede"])
def test_the_blocks_of_an_ended_session_go_first(live: Live, kind: str) -> None:
    with live.openai() as client:
        cached(client, OLD, session_id="old")
        cached(client, YOUNG, session_id="young")
        [outcome] = hinted(live, (kind, {"session_id": "young"}))
        assert outcome == {"action_id": "a0", "status": "applied", "num_blocks": 4, "reason": ""}
        cached(client, FILLER)
        assert cached(client, OLD) == FULL
        assert cached(client, YOUNG) == 0


@pytest.mark.parametrize(
    "action",
    [
        ("kv.retain", {"token_ids": OLD, "priority": 100, "duration_s": 3600}),
        ("kv.retain", {"session_id": "old", "priority": 100, "duration_s": 3600}),
        ("kv.expect", {"session_id": "old"}),
        ("kv.expect", {"token_ids": OLD}),
    ],
    ids=lambda action: f"{action[0]}-{next(iter(action[1]))}",
)
def test_what_is_retained_or_expected_stays(live: Live, action: tuple[str, dict[str, Any]]) -> None:
    with live.openai() as client:
        cached(client, OLD, session_id="old")
        cached(client, YOUNG, session_id="young")
        outcomes = hinted(live, action)
        assert [(one["status"], one["num_blocks"]) for one in outcomes] == [("applied", 4)]
        cached(client, FILLER)
        assert cached(client, OLD) == FULL
        assert cached(client, YOUNG) == 0


def test_the_session_of_the_nearest_embedding_stays(live: Live) -> None:
    with live.openai() as client:
        cached(client, OLD, session_id="old")
        cached(client, YOUNG, session_id="young")
        outcomes = hinted(
            live,
            ("session.describe", {"session_id": "old", "embedding": [0.9, -0.1]}),
            ("session.describe", {"session_id": "young", "embedding": [-0.1, 0.9]}),
            ("kv.expect", {"embedding": [0.8, 0.0]}),
            ("kv.expect", {"embedding": []}),
        )
        assert statuses(outcomes) == ["applied", "applied", "applied", "invalid"]
        cached(client, FILLER)
        assert cached(client, OLD) == FULL
        assert cached(client, YOUNG) == 0


def test_a_request_brings_its_own_hints(live: Live) -> None:
    """An action without a target means the request that it came with, its answer included."""
    with live.openai() as client:
        cached(client, OLD)
        cached(client, YOUNG, kv_hints=envelope(("session.end", {})))
        cached(client, FILLER)
        assert cached(client, OLD) == FULL
        assert cached(client, YOUNG) == 0


def test_a_chat_is_a_session_too() -> None:
    with serving(scripted_llm("hello")) as live, live.openai() as client:
        fields = {"session_id": "s", "kv_hints": envelope(("session.end", {}))}
        client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "hi"}], extra_body=fields
        )
        [request] = engine_of(live).added
        assert request.session_id == "s"
        assert request.kv_hints is not None
        assert request.kv_hints.actions[0].action_type == "session.end"


def test_of_several_choices_one_does_the_hints() -> None:
    with serving(scripted_llm("hello")) as live, live.openai() as client:
        fields = {"session_id": "s", "kv_hints": envelope(("session.end", {}))}
        client.completions.create(model="toy", prompt="hi", n=3, extra_body=fields)
        added = engine_of(live).added
        assert [request.session_id for request in added] == ["s"] * 3
        assert [request.kv_hints is not None for request in added] == [True, False, False]


def test_hints_while_a_request_runs() -> None:
    with serving(scripted_llm("on and on " * 20, step_s=0.01)) as live, live.openai() as client:
        with client.completions.create(model="toy", prompt="hi", stream=True, max_tokens=200) as chunks:
            next(iter(chunks))
            assert statuses(hinted(live, ("session.end", {"session_id": "s"}))) == ["not_found"]
        assert engine_of(live).hinted[0][1].tenant == ""


# -- who may speak


def test_nobody_speaks_of_another_tenants_session(live: Live) -> None:
    alice, bob = "salt of alice", "salt of bob"
    with live.openai() as client:
        cached(client, OLD, session_id="s", cache_salt=alice)
        actions: list[tuple[str, dict[str, Any]]] = [
            ("session.end", {"session_id": "s"}),
            ("session.end", {"session_id": "s", "cache_salt": alice, "tenant": alice}),
            ("session.end", {"token_ids": OLD}),
        ]
        for salt in (bob, "", None):
            assert statuses(hinted(live, *actions, cache_salt=salt)) == ["not_found"] * 3
        cached(client, YOUNG, kv_hints=envelope(*actions), cache_salt=bob)
        cached(client, FILLER, cache_salt=bob)
        assert statuses(hinted(live, *actions, cache_salt=bob)) == ["not_found"] * 3


def test_tenants_may_give_their_sessions_the_same_name(live: Live) -> None:
    with live.openai() as client:
        for salt, prompt in (("a", OLD), ("b", YOUNG)):
            cached(client, prompt, session_id="s", cache_salt=salt)
        assert statuses(hinted(live, ("session.end", {"session_id": "s"}), cache_salt="b")) == ["applied"]
        cached(client, FILLER)
        assert cached(client, OLD, cache_salt="a") == FULL
        assert cached(client, YOUNG, cache_salt="b") == 0


def test_no_salt_opens_a_sharing_group() -> None:
    """Inside, a group of tenants has a name that begins with NUL, which no request may have."""
    with serving(simulated(sharing_groups={"team": ["a", "b"]})) as live, live.openai() as client:
        cached(client, OLD, cache_salt="a")
        action = ("session.end", {"token_ids": OLD})
        body = {"kv_hints": envelope(action), "cache_salt": "\0group:team"}
        response = live.http.post(HINTS, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "cache_salt"
        assert statuses(hinted(live, action, cache_salt="group:team")) == ["not_found"]
        assert statuses(hinted(live, action, cache_salt="b")) == ["applied"]


def test_hints_want_the_key() -> None:
    with serving(scripted_llm("hello"), api_key="secret") as live:
        body = {"kv_hints": envelope(("session.end", {}))}
        assert live.http.post(HINTS, json=body).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert live.http.post(HINTS, json=body, headers=headers).status_code == 200


# -- what is refused, and what is answered


def test_actions_are_answered_one_by_one(live: Live) -> None:
    with live.openai() as client:
        cached(client, OLD, session_id="s")
    outcomes = hinted(
        live,
        ("kv.dance", {"session_id": "s"}),
        ("kv.retain", {"session_id": "s", "priority": 101}),
        ("kv.retain", {"session_id": "s", "duration_s": "long"}),
        ("session.end", {"session_id": 7}),
        ("session.end", {"token_ids": ["x"]}),
        ("session.end", {"token_ids": [2**40]}),
        ("session.end", {"session_id": "unheard of"}),
        ("session.end", {}),
        ("session.end", {"session_id": "s"}),
    )
    expected = ["unsupported", *["invalid"] * 5, "not_found", "not_found", "applied"]
    assert statuses(outcomes) == expected
    assert [outcome["action_id"] for outcome in outcomes] == [f"a{i}" for i in range(9)]
    assert [bool(outcome["reason"]) for outcome in outcomes] == [True] * 8 + [False]
    assert "kv.dance@1.0" in outcomes[0]["reason"]
    assert "priority must be a number from 0 to 100" in outcomes[1]["reason"]


def test_an_action_of_a_later_version_is_unsupported() -> None:
    with serving(scripted_llm("hello")) as live:
        message = envelope(("session.end", {}))
        message["actions"][0]["action_version"] = "2.0"
        answer = live.http.post(HINTS, json={"kv_hints": message}).json()
        assert statuses(answer["outcomes"]) == ["unsupported"]


MALFORMED: list[tuple[Any, str]] = [
    ("end it", "kv_hints must be an object"),
    ([], "kv_hints must be an object"),
    ({"protocol_version": "7.0"}, "kv_hints.protocol_version"),
    ({"protocol_version": 1}, "kv_hints.protocol_version"),
    ({"message_id": 1}, "kv_hints.message_id"),
    ({"actions": "x"}, "kv_hints.actions must be a list"),
    ({"actions": [{}] * 65}, "at most 64"),
    ({"actions": [{}]}, r"kv_hints.actions[0].action_type"),
    ({"actions": [{"action_type": "session.end"}, 3]}, r"kv_hints.actions[1] must be an object"),
    ({"actions": [{"action_type": "session.end", "payload": []}]}, r"kv_hints.actions[0].payload"),
]


@pytest.mark.parametrize(("message", "named"), MALFORMED, ids=[named for _, named in MALFORMED])
def test_what_is_no_envelope_is_refused_everywhere(message: Any, named: str) -> None:
    with serving(scripted_llm("hello")) as live, live.openai() as client:
        response = live.http.post(HINTS, json={"kv_hints": message})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], named in error["message"]) == ("kv_hints", True), error
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model="toy", prompt="hi", extra_body={"kv_hints": message})
        assert caught.value.param == "kv_hints"
        assert named in str(caught.value)
        assert engine_of(live).added == []


@pytest.mark.parametrize("session_id", ["", "x" * 257, 7])
def test_a_session_has_a_short_name(session_id: Any) -> None:
    with serving(scripted_llm("hello")) as live, live.openai() as client:
        with pytest.raises(BadRequestError) as caught:
            client.completions.create(model="toy", prompt="hi", extra_body={"session_id": session_id})
        assert caught.value.param == "session_id"
        client.completions.create(model="toy", prompt="hi", extra_body={"session_id": "x" * 256})


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "kv_hints"),
        ({"kv_hints": None}, 400, "kv_hints"),
        ({"kv_hints": {}, "cache_salt": 3}, 400, "cache_salt"),
        ({"kv_hints": {}, "tenant": "a"}, 400, "tenant"),
        ({"kv_hints": {}, "model": "other"}, 404, "model"),
    ],
)
def test_what_the_endpoint_refuses(fields: dict[str, Any], status: int, param: str) -> None:
    with serving(scripted_llm("hello")) as live:
        response = live.http.post(HINTS, json=fields)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
        assert live.http.post(HINTS, json={"kv_hints": {}, "user": "me"}).json() == {"outcomes": []}


# -- the loop


def test_a_hint_that_fails_fails_alone() -> None:
    with serving(scripted_llm("hello", fail_next=RuntimeError("broken"))) as live:
        body = {"kv_hints": envelope(("session.end", {}))}
        assert [live.http.post(HINTS, json=body).status_code for _ in range(2)] == [500, 200]
        assert live.http.get("/health").status_code == 200


def test_a_server_that_stops_takes_no_hints() -> None:
    with serving(scripted_llm("hello")) as live:
        live.gateway.refuse_new()
        assert live.http.post(HINTS, json={"kv_hints": {}}).status_code == 503


def test_waiting_envelopes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, entered, go_on = scripted_llm("hello"), threading.Event(), threading.Event()

    def slow(*_args: Any, **_options: Any) -> list[HintOutcome]:
        entered.set()
        assert go_on.wait(10)
        return [HintOutcome("a0", HintStatus.NOT_FOUND)]

    monkeypatch.setattr(llm, "hint", slow)
    with serving(llm, max_waiting=1) as live, ThreadPoolExecutor(1) as pool:
        first = pool.submit(hinted, live, ("session.end", {}))
        assert entered.wait(10)
        assert live.http.post(HINTS, json={"kv_hints": {}}).status_code == 429
        go_on.set()
        assert statuses(first.result(10)) == ["not_found"]


# -- figures


def test_misses_are_counted_by_cause() -> None:
    with serving(simulated("lru", miss_attribution=True)) as live, live.openai() as client:
        for prompt in (OLD, YOUNG, FILLER, YOUNG, OLD):
            cached(client, prompt)
        cached(client, YOUNG, cache_salt="a")
        counted = {
            cause: live.metric("sagellm_kv_misses_total", cause=cause)
            for cause in ("cold", "capacity", "premature", "quota", "preemption", "namespace")
        }
        own_room = 1  # of YOUNG's four blocks one gave way to the request that asks for them in vain
        cold = 4 + 4 + 7 + own_room
        assert counted == {
            "cold": cold, "capacity": 0, "premature": 4, "quota": 0, "preemption": 0,
            "namespace": 4 - own_room,
        }  # fmt: skip


def test_nobody_counts_misses_unasked() -> None:
    with serving(simulated("lru")) as live, live.openai() as client:
        cached(client, OLD)
        with pytest.raises(KeyError):
            live.metric("sagellm_kv_misses_total", cause="cold")


def engine_of(live: Live) -> ScriptedEngine:
    engine = live.llm._engine
    assert isinstance(engine, ScriptedEngine)
    return engine
