"""What an operator may change over HTTP, who may not, and what a request may ask of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sagellm.core.config import ServerConfig
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.prefix_cache import MissCounts
from sagellm.core.registry import registry
from sagellm.core.types import SLO, Retention
from sagellm.engines.build import load_config
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.serving import create_app
from sagellm.serving.admin import SchedulingInUse
from sagellm.serving.answers import CurrentPolicy, CurrentStrategy
from tests.builders import check_books, expected_tokens, fake_engine
from tests.scripted_engine import ScriptedEngine, scripted_llm, toy_tokenizer
from tests.serving.live import Live, serving

PINS, POLICY, STRATEGY = "/v1/admin/pins", "/v1/admin/eviction_policy", "/v1/admin/scheduling_strategy"
COMPLETIONS = "/v1/completions"
ADMIN = {"Authorization": "Bearer admin"}
OLD, FILLER = [*range(17)], [*range(60, 97)]
EVERY_CHANGE: list[tuple[str, str, Any]] = [
    ("POST", PINS, {"prompt": OLD}),
    ("GET", PINS, None),
    ("DELETE", f"{PINS}/pin-1", None),
    ("GET", POLICY, None),
    ("PUT", POLICY, {"policy": "lru"}),
    ("GET", STRATEGY, None),
    ("PUT", STRATEGY, {"strategy": "fifo"}),
    ("POST", "/reset_prefix_cache", None),
    ("POST", "/flush_cache", None),
]


def simulated(num_blocks: int = 12, **options: Any) -> LLM:
    """Room for two prompts of four blocks, four blocks free."""
    backend = TokenMemoryBackend(vocab_size=512, num_blocks=num_blocks)
    engine = fake_engine(backend, **{"eviction": "lru", **options})
    return LLM(engine, toy_tokenizer(), model_name="toy", max_model_len=engine.max_model_len)


def engine_of(live: Live) -> Engine:
    engine = live.llm.engine
    assert isinstance(engine, Engine)
    return engine


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(simulated(miss_attribution=True, max_pinned_share=0.5), admin_key="admin") as server:
        server.http.headers.update(ADMIN)
        yield server
        check_books(engine_of(server))


def complete(live: Live, prompt: list[int], **fields: Any) -> dict[str, Any]:
    answer = live.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def cached(live: Live, prompt: list[int], **fields: Any) -> int:
    count: int = complete(live, prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def refusal(answer: Any) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


# -- who may


@pytest.mark.parametrize(("method", "path", "body"), EVERY_CHANGE)
def test_without_an_admin_key_nothing_can_be_changed(method: str, path: str, body: Any) -> None:
    with serving(simulated(), api_key="k") as live:
        for headers in ({}, {"Authorization": "Bearer k"}, ADMIN):
            answer = live.http.request(method, path, json=body, headers=headers)
            assert answer.status_code == 403
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("permission_error", "admin_disabled")
            assert "server.admin_key" in error["message"]


@pytest.mark.parametrize(("method", "path", "body"), EVERY_CHANGE)
def test_another_key_is_refused(method: str, path: str, body: Any) -> None:
    with serving(simulated(), api_key="k", admin_key="admin") as live:
        for headers in ({}, {"Authorization": "Bearer k"}, {"Authorization": "Basic admin"}):
            answer = live.http.request(method, path, json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert live.http.post(COMPLETIONS, json={"prompt": "x"}, headers=ADMIN).status_code == 401


def test_an_admin_key_that_every_client_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose another"):
        create_app(scripted_llm(), ServerConfig(api_key="k", admin_key="k"))
    with pytest.raises(ConfigError, match="admin_key is empty"):
        create_app(scripted_llm(), ServerConfig(admin_key=" "))


# -- pins


def test_a_pinned_prompt_stays_until_it_is_deleted(live: Live) -> None:
    pin = live.http.post(PINS, json={"prompt": OLD}).json()
    assert pin == {"id": "pin-1", "cache_salt": "", "num_tokens": 16, "num_blocks": 4}
    assert live.metric("sagellm_kv_pinned_blocks") == 4
    for start in (100, 200, 300):
        cached(live, [*range(start, start + 25)])
    assert cached(live, OLD) == 16
    assert live.http.get(PINS).json() == {"object": "list", "data": [pin]}
    assert live.http.delete(f"{PINS}/pin-1").json() == {"id": "pin-1", "deleted": True}
    assert live.metric("sagellm_kv_pinned_blocks") == 0
    assert live.http.get(PINS).json()["data"] == []
    for start in (100, 200, 300):
        cached(live, [*range(start, start + 25)])
    assert cached(live, OLD) == 0
    assert refusal(live.http.delete(f"{PINS}/pin-1"))[:2] == (404, "pin_id")


def test_messages_and_texts_are_pinned_for_their_tenant() -> None:
    llm = simulated(100, max_pinned_share=1.0)
    with serving(llm, admin_key="admin") as live:
        live.http.headers.update(ADMIN)
        messages = [{"role": "system", "content": "You are brief."}]
        for body in ({"messages": messages}, {"prompt": "a text of some length"}):
            pin = live.http.post(PINS, json={**body, "cache_salt": "alice"}).json()
            assert pin["cache_salt"] == "alice"
            assert pin["num_blocks"] > 2
        chat = {"messages": [*messages, {"role": "user", "content": "hi"}], "max_tokens": 1}
        found = []
        for salt in ("alice", "bob"):
            answer = live.http.post("/v1/chat/completions", json={**chat, "cache_salt": salt}).json()
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert found[0] > 8
        assert found[1] == 0


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "", "messages": []}, 400, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ({"prompt": [1]}, 400, "prompt"),
        ({"prompt": [9999] * 17}, 400, "prompt"),
        ({"prompt": [*range(200)]}, 400, "prompt"),
        ({"prompt": OLD, "cache_salt": "a\0b"}, 400, "cache_salt"),
        ({"prompt": OLD, "tenant": "a"}, 400, "tenant"),
        ({"prompt": OLD, "model": "other"}, 404, "model"),
        ({"prompt": [*range(30)]}, 409, None),
    ],
)
def test_what_cannot_be_pinned_is_explained(live: Live, body: Any, status: int, param: str | None) -> None:
    assert refusal(live.http.post(PINS, json=body))[:2] == (status, param)
    assert live.http.get(PINS).json()["data"] == []


# -- the cache


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
def test_the_cache_is_cleared_of_what_nothing_holds(live: Live, path: str) -> None:
    live.http.post(PINS, json={"prompt": OLD[:9]})
    cached(live, OLD)
    assert live.http.post(path).json() == {"num_blocks": 2}
    assert cached(live, OLD) == 8
    assert live.metric("sagellm_kv_evicted_blocks_total", cause="cleared") == 2


def test_reset_external_is_true_or_false(live: Live) -> None:
    assert live.http.post("/reset_prefix_cache?reset_external=true").json() == {"num_blocks": 0}
    refused = live.http.post("/reset_prefix_cache?reset_external=1")
    assert refusal(refused)[:2] == (400, "reset_external")


# -- policies and strategies


@pytest.mark.parametrize(
    ("path", "name", "names"),
    [(POLICY, "policy", registry("policy").names()), (STRATEGY, "strategy", sorted(strategies.STRATEGIES))],
)
def test_every_one_takes_over(live: Live, path: str, name: str, names: list[str]) -> None:
    backend = TokenMemoryBackend(vocab_size=512)
    for one in names:
        answer = live.http.put(path, json={name: one})
        assert (answer.status_code, answer.json()) == (200, {name: one, "options": {}}), answer.text
        for prompt in (OLD, FILLER):
            complete(live, prompt)
    assert expected_tokens(backend, OLD, 1)


def test_what_is_in_use_can_be_asked() -> None:
    chosen = {"kv.eviction": "sieve", "scheduler.pass_options": {"prefix_cache_aware": {"max_wait_s": 3.0}}}
    config = load_config(cli=chosen, environ={}).config
    with serving(simulated(), admin_key="admin", config=config) as live:
        live.http.headers.update(ADMIN)
        assert live.http.get(POLICY).json() == {"policy": "sieve", "options": {}}
        found = live.http.get(STRATEGY).json()
        assert (found["strategy"], found["options"]) == ("priority", chosen["scheduler.pass_options"])
        assert found["passes"][:2] == ["prefix_cache_aware", "priority_based"]
        changed = {"policy": "adaptive", "options": {"max_regret": 0.1}}
        assert live.http.put(POLICY, json=changed).json() == live.http.get(POLICY).json() == changed
        assert live.http.put(POLICY, json={"policy": "nope"}).status_code == 400
        assert live.http.get(POLICY).json() == changed
        assert live.http.put(STRATEGY, json={"strategy": "fifo"}).status_code == 200
        closing = ["chunked_prefill", "memory_aware_preemption"]
        assert live.http.get(STRATEGY).json() == {"strategy": "fifo", "passes": closing, "options": {}}


def test_passes_that_are_listed_are_no_strategy() -> None:
    config = load_config(cli={"scheduler.passes": ["vllm_like"]}, environ={}).config
    assert SchedulingInUse.of(config).strategy == CurrentStrategy(passes=["vllm_like"])
    assert SchedulingInUse.of(None).policy == CurrentPolicy()


def test_requests_go_on_while_everything_is_replaced() -> None:
    prompts = [[number, *range(100, 115)] for number in range(12)]
    backend = TokenMemoryBackend(vocab_size=512, num_blocks=64)
    engine = fake_engine(backend)
    llm = LLM(engine, toy_tokenizer(), model_name="toy", max_model_len=engine.max_model_len)
    with serving(llm, admin_key="admin") as live, ThreadPoolExecutor(4) as pool:
        body = {"max_tokens": 30, "ignore_eos": True, "logprobs": 0}
        answers = [pool.submit(live.http.post, COMPLETIONS, json={"prompt": p, **body}) for p in prompts]
        changes = [
            ("PUT", POLICY, {"policy": "sieve"}),
            ("PUT", STRATEGY, {"strategy": "fair"}),
            ("POST", "/flush_cache", None),
            ("PUT", POLICY, {"policy": "adaptive", "options": {"max_regret": 0.1}}),
            ("PUT", STRATEGY, {"strategy": "slo", "options": {"slo_aware": {"ttft_s": 1}}}),
        ]
        while not all(one.done() for one in answers):
            for method, path, content in changes:
                changed = live.http.request(method, path, json=content, headers=ADMIN)
                assert changed.status_code == 200, changed.text
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = llm.tokenizer.decode(expected_tokens(backend, prompt, 30))
            assert answer.result().json()["choices"][0]["text"] == expected
    check_books(engine)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (POLICY, {"policy": "lruu"}, "policy", "known are adaptive, arc"),
        (POLICY, {"policy": "os:abort"}, "policy", "known are"),
        (POLICY, {"policy": "lru", "options": {"nope": 1}}, "policy", "no option 'nope'"),
        (POLICY, {"policy": "lru", "options": {"name": "x"}}, "policy", "no option 'name'"),
        (POLICY, {"policy": "lru", "options": {"capacity": 1}}, "policy", "given by the engine"),
        (POLICY, {"policy": "adaptive", "options": {"max_regret": "x"}}, "policy", "max_regret"),
        (POLICY, {"policy": "adaptive", "options": {"max_regret": 7}}, "policy", "max_regret"),
        (POLICY, {}, "policy", "required"),
        (POLICY, {"policy": "lru", "strategy": "x"}, "strategy", "unknown field"),
        (POLICY, {"policy": "lru", "model": None}, "model", "unknown field 'model'. Known: options, policy."),
        (POLICY, {"policy": "lru", "user": "x"}, "user", "unknown field"),
        (STRATEGY, {"strategy": "fifoo"}, "strategy", "known are adaptive, fair, fifo"),
        (STRATEGY, {"strategy": "fifo", "options": {"fairness": {}}}, "strategy", "no pass 'fairness'"),
        (STRATEGY, {"strategy": "fair", "options": {"fairness": {"quantum": "x"}}}, "strategy", "quantum"),
        (STRATEGY, {"strategy": "fair", "options": {"fairness": {"x": "os:abort"}}}, "options", "may name"),
        (
            STRATEGY,
            {"strategy": "fair", "options": {"fairness": {"x": [{"y": "a:b"}]}}},
            "options",
            "name other",
        ),
        (STRATEGY, {"strategy": "fair", "options": {"fairness": 3}}, "options", "dictionary"),
    ],
)
def test_what_cannot_take_over_changes_nothing(
    live: Live, path: str, body: Any, param: str, words: str
) -> None:
    before = [one.name for one in engine_of(live).scheduler.passes]
    status, named, message = refusal(live.http.put(path, json=body))
    assert (status, named) == (400, param), message
    assert words in message
    assert [one.name for one in engine_of(live).scheduler.passes] == before
    complete(live, OLD)


@pytest.mark.parametrize(
    ("broken", "method", "path", "body"),
    [
        ("clear_cache", "POST", "/reset_prefix_cache", None),
        ("pin_prefix", "POST", PINS, {"prompt": OLD}),
        ("set_policy", "PUT", POLICY, {"policy": "lru"}),
        ("set_passes", "PUT", STRATEGY, {"strategy": "fifo"}),
        ("hint", "POST", "/v1/kv/hints", {"kv_hints": {"actions": []}}),
    ],
)
def test_a_plug_in_that_breaks_fails_the_call_and_not_the_engine(
    live: Live,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
    method: str,
    path: str,
    body: Any,
) -> None:
    def broken_call(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(engine_of(live), broken, broken_call)
    status, _, message = refusal(live.http.request(method, path, json=body))
    assert status == 500
    assert "RuntimeError within the engine, which goes on" in message
    assert "secret" not in message
    assert caplog.text.count("RuntimeError: secret detail") == 1  # with its traceback, once
    complete(live, OLD)
    assert live.http.get("/health").status_code == 200


def test_health_names_tiers_that_fail_or_work_again_while_the_engine_is_idle(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[str] = []
    monkeypatch.setattr(engine_of(live), "tier_faults", lambda: faults)
    for now in (["remote: no answer"], []):
        faults[:] = now
        assert live.http.get("/health").json().get("kv_tier_faults", []) == now


def test_metrics_do_not_need_diagnostics(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError

    monkeypatch.setattr(engine_of(live), "diagnostics", broken)
    for _ in range(2):
        assert live.metric("sagellm_requests_running") == 0
    complete(live, OLD)


# -- what a request may ask of the cache


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_hears_why_its_blocks_were_computed(live: Live, *, stream: bool) -> None:
    for prompt in (OLD, FILLER):
        complete(live, prompt)
    with live.openai() as client:
        asked = {"return_cache_misses": True, "prompt": [*OLD, *range(200, 208)]}
        if stream:
            options: Any = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
            *_, last = client.completions.create(model="toy", prompt="", extra_body=asked, **options)
            usage: Any = last.usage
        else:
            usage = client.completions.create(model="toy", max_tokens=2, prompt="", extra_body=asked).usage
    found = usage.prompt_tokens_details.model_dump(exclude_none=True)
    assert found["cache_miss_blocks"] == MissCounts(premature=2, cold=2)._asdict()
    assert found["cached_tokens"] == 8
    assert "cache_miss_blocks" not in complete(live, OLD)["usage"]["prompt_tokens_details"]


def test_misses_that_nobody_attributes_cannot_be_returned() -> None:
    with serving(simulated()) as live:
        answer = live.http.post(COMPLETIONS, json={"prompt": OLD, "return_cache_misses": True})
        status, param, message = refusal(answer)
        assert (status, param) == (400, "return_cache_misses")
        assert "kv.miss_attribution" in message


def test_goals_and_retention_reach_the_engine() -> None:
    with serving(scripted_llm("hello")) as live:
        fields = {
            "slo": {"ttft_s": 1, "tpot_s": 0.05},
            "retention": [{"start": 4, "stop": 8, "priority": 90, "duration_s": 60}, {}],
        }
        complete(live, OLD, **fields)
        complete(live, OLD, slo={}, retention=[])
        complete(live, OLD, slo=None, retention=None)
        engine = live.llm.engine
        assert isinstance(engine, ScriptedEngine)
        first, *others = engine.added
        assert first.slo == SLO(1.0, 0.05)
        assert first.retention == (Retention(4, 8, 90, 60.0), Retention())
        assert [(one.slo, one.retention) for one in others] == [(SLO(), ())] * 2


def test_what_is_retained_stays() -> None:
    with serving(simulated()) as live:
        cached(live, OLD, retention=[{"priority": 100, "duration_s": 3600}])
        cached(live, [*range(20, 37)])
        cached(live, [*range(60, 89)])
        assert cached(live, OLD) == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"slo": {"ttft_s": -1}}, "slo"),
        ({"slo": {"ttft": 1}}, "slo"),
        ({"slo": 3}, "slo"),
        ({"retention": {}}, "retention"),
        ({"retention": [{}] * 65}, "retention"),
        ({"retention": [{"start": 5, "stop": 5}]}, "retention"),
        ({"retention": [{"priority": 101}]}, "retention[0]"),
        ({"retention": [{"duration_s": 1e9}]}, "retention[0]"),
        ({"retention": [{"from": 1}]}, "retention[0]"),
        ({"return_cache_misses": 1}, "return_cache_misses"),
    ],
)
def test_wrong_goals_and_ranges_name_the_field(fields: dict[str, Any], param: str) -> None:
    with serving(scripted_llm("hello")) as live:
        answer = live.http.post(COMPLETIONS, json={"prompt": "x", **fields})
        assert refusal(answer)[:2] == (400, param), answer.text


# -- the document


def test_the_admin_routes_are_in_the_document(live: Live) -> None:
    paths = live.http.get("/openapi.json").json()["paths"]
    for method, path, _ in EVERY_CHANGE:
        template = path.replace("pin-1", "{pin_id}")
        assert method.lower() in paths[template], template


def test_the_document_names_policies_and_strategies_and_no_other_fields(live: Live) -> None:
    schemas = live.http.get("/openapi.json").json()["components"]["schemas"]
    policy, strategy = (schemas[name]["properties"] for name in ("PolicyRequest", "StrategyRequest"))
    assert policy["policy"]["enum"] == sorted(registry("policy").names())
    assert strategy["strategy"]["enum"] == sorted(strategies.STRATEGIES)
    assert (set(policy), set(strategy)) == ({"policy", "options"}, {"strategy", "options"})
    pin = schemas["PinRequest"]
    assert [one["required"] for one in pin["oneOf"]] == [["prompt"], ["messages"]]
    assert [
        one.get("minLength", one.get("minItems")) for one in pin["properties"]["prompt"]["anyOf"][:2]
    ] == [1, 1]
