"""The request log, request ids and figures by status, at a live server."""

from __future__ import annotations

import json
import logging
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from sagellm.core.clock import ManualClock
from sagellm.core.log_lines import FIELDS, TextLines
from sagellm.engines.llm import LLM
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.serving.access_log import MAX_REFUSAL_LINES, REFUSAL_INTERVAL_S, RequestLog
from sagellm.serving.server import SageServer
from tests.builders import fake_engine
from tests.scripted_engine import scripted_llm, toy_tokenizer
from tests.serving.live import PATIENCE_S, Live, serving, wait_until

SECRET = "the prompt that no log may hold"
COMPLETIONS = "/v1/completions"


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(scripted_llm("hello"), api_key="k") as server:
        server.http.headers["Authorization"] = "Bearer k"
        yield server


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "sagellm")
    return caplog


def requests(lines: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    """The fields of the request lines, once there are so many: a line follows the answer."""
    wait_until(lambda: sum(one.name == "sagellm.access" for one in lines.records) >= count)
    found = [getattr(one, FIELDS) for one in lines.records if one.name == "sagellm.access"]
    assert len(found) == count
    return found


def cached_llm() -> LLM:
    engine = fake_engine(
        TokenMemoryBackend(vocab_size=512, num_blocks=12), eviction="lru", miss_attribution=True
    )
    return LLM(engine, toy_tokenizer(), model_name="toy", max_model_len=engine.max_model_len)


# -- the log


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_is_a_line_without_its_prompt(
    live: Live, lines: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    body = {"prompt": SECRET, "max_tokens": 3, "cache_salt": "alice", "stream": stream}
    answer = live.http.post(COMPLETIONS, json=body, headers={"x-request-id": "my-1"})
    assert answer.headers["x-request-id"] == "my-1"
    [found] = requests(lines, 1)
    times = {name: found.pop(name) for name in ("ttft_s", "total_s")}
    assert 0 < times["ttft_s"] <= times["total_s"]
    assert found.pop("prompt_tokens") > 10
    assert found == {
        "request_id": "my-1", "tenant": "alice", "method": "POST", "path": COMPLETIONS, "status": 200,
        "output_tokens": 3, "cached_tokens": 0, "finish_reason": "length",
    }  # fmt: skip
    assert SECRET not in "".join(map(TextLines().format, lines.records))


def test_cached_tokens_queue_time_and_miss_causes_are_in_the_line(lines: pytest.LogCaptureFixture) -> None:
    old, filler = [*range(17)], [*range(60, 97)]
    with serving(cached_llm()) as live:
        for prompt in (old, old, filler, old):
            assert live.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1}).status_code == 200
        found = requests(lines, 4)
    assert [one["cached_tokens"] for one in found] == [0, 16, 0, 8]
    assert all(one["queue_s"] >= 0 for one in found)
    missed = [{name: n for name, n in one.items() if name.startswith("missed")} for one in found]
    assert missed == [
        {"missed_blocks_cold": 4}, {}, {"missed_blocks_cold": 9}, {"missed_blocks_premature": 2}
    ]  # fmt: skip


def test_whatever_is_refused_is_a_line_too(live: Live, lines: pytest.LogCaptureFixture) -> None:
    http = live.http
    http.get("/nowhere")
    http.post(COMPLETIONS, content=b"{")
    http.post(COMPLETIONS, json={"prompt": "x"}, headers={"Authorization": "Bearer wrong"})
    http.get(COMPLETIONS)
    assert [one["status"] for one in requests(lines, 4)] == [404, 400, 401, 405]


def answer_to(live: Live, sent: bytes) -> tuple[int, str, dict[str, Any]]:
    """Status, request id and body of a refusal before the application, after which the server closes."""
    with socket.create_connection(live.address, timeout=PATIENCE_S) as client:
        client.sendall(sent)
        received = b"".join(iter(lambda: client.recv(2**16), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().splitlines()[1:])
    return int(head.split()[1]), headers["x-request-id"], json.loads(body)


CHUNKED = (
    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nx-request-id: my-1\r\n\r\n"
).encode()


@pytest.mark.parametrize(
    ("sent", "status", "fields"),
    [
        (b"no HTTP\r\n\r\n", 400, {"error": "invalid_http"}),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n", 431, {"error": "invalid_http"}),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505, {"error": "invalid_http"}),
        (CHUNKED + b"no chunk\r\n", 400, {"request_id": "my-1", "method": "POST", "path": COMPLETIONS}),
    ],
)
def test_what_the_connection_refuses_is_a_line_with_an_id(
    live: Live, lines: pytest.LogCaptureFixture, sent: bytes, status: int, fields: dict[str, str]
) -> None:
    got, request_id, body = answer_to(live, sent)
    assert (got, body["request_id"]) == (status, request_id)
    [found] = requests(lines, 1)
    assert found.items() >= {"status": status, "request_id": request_id, **fields}.items()
    assert live.metric("sagellm_http_requests_total", status=str(status)) == 1


def test_a_body_that_turns_out_malformed_later_is_one_line(
    live: Live, lines: pytest.LogCaptureFixture
) -> None:
    """The application has begun by then: its line has the status that the client has got."""
    with socket.create_connection(live.address, timeout=PATIENCE_S) as client:
        client.sendall(CHUNKED.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer k\r\n\r\n"))
        client.sendall(b"1\r\n{\r\n")
        wait_until(lambda: bool(live.server.server_state.tasks))
        client.sendall(b"no chunk\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 400")
    [found] = requests(lines, 1)
    assert (found["status"], found["request_id"], found["path"]) == (400, "my-1", COMPLETIONS)
    assert live.metric("sagellm_http_requests_total", status="400", endpoint=COMPLETIONS) == 1


def test_connections_beyond_the_limit_are_lines(lines: pytest.LogCaptureFixture) -> None:
    with (
        serving(scripted_llm(), max_connections=1) as live,
        socket.create_connection(live.address),
    ):
        wait_until(lambda: bool(live.server.server_state.connections))
        status, request_id, _ = answer_to(live, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
    [found] = requests(lines, 1)
    assert found == {"request_id": request_id, "status": status, "error": "too_many_connections"}
    assert status == 503


def test_a_flood_of_refusals_is_counted_whole_and_logged_in_part(lines: pytest.LogCaptureFixture) -> None:
    clock, counted = ManualClock(), Counter[int]()
    refusals = RequestLog(clock, lambda _path, _method, status: counted.update([status]), enabled=True)
    for i in range(1000):
        refusals.refuse(f"a{i}", 400, "invalid_http")
    refusals.refuse("b", 503, "too_many_connections")
    clock.advance(REFUSAL_INTERVAL_S)
    for i in range(2):
        refusals.refuse(f"c{i}", 400, "invalid_http")
    assert counted == {400: 1002, 503: 1}
    found = requests(lines, MAX_REFUSAL_LINES + 3)
    assert [one["request_id"] for one in found[-4:]] == ["a19", "b", "c0", "c1"]
    assert [one.get("lines_left_out") for one in found[-3:]] == [None, 1000 - MAX_REFUSAL_LINES, None]


def test_a_client_that_leaves_is_status_499(lines: pytest.LogCaptureFixture) -> None:
    with serving(scripted_llm("on and on " * 20, step_s=0.02)) as live:
        body = json.dumps({"prompt": "x", "max_tokens": 200})
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(live.address) as client:
            client.sendall(f"{head}{body}".encode())
            wait_until(lambda: live.metric("sagellm_generation_tokens_total") > 2)
        [found] = requests(lines, 1)
    assert (found["status"], found["finish_reason"]) == (499, "abort")


def test_probes_are_no_lines_while_they_succeed(live: Live, lines: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert live.http.get(path).status_code == 200
    live.gateway.refuse_new()
    assert live.http.get("/ready").status_code == 503
    [found] = requests(lines, 1)
    assert (found["path"], found["status"]) == ("/ready", 503)


def test_the_log_of_requests_can_be_switched_off(lines: pytest.LogCaptureFixture) -> None:
    with serving(scripted_llm("hello"), log_requests=False) as live:
        assert live.http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
        assert answer_to(live, b"no HTTP\r\n\r\n")[0] == 400
        assert live.metric("sagellm_http_requests_total", status="200", endpoint=COMPLETIONS) == 1
    assert not [one for one in lines.records if one.name == "sagellm.access"]


def test_no_client_forges_a_line(live: Live, lines: pytest.LogCaptureFixture) -> None:
    forged = "\n2026-11-22T16:27:26.123Z INFO sagellm.access: request status=200"
    live.http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, "cache_salt": forged + "x" * 9999})
    live.http.get("/v1/models/%0A" + forged.strip().replace(" ", "%20") + "%1b[31m" + "x" * 500)
    requests(lines, 2)
    for one in lines.records:
        shown = TextLines().format(one)
        assert len(shown.splitlines()) == 1
        assert len(shown) < 600


# -- ids


@pytest.mark.parametrize("given", ["a", "x" * 128, "0af7651916cd43dd8448eb211c80319c", "a.b~c:d/e+f=g@h_i-j"])
def test_a_clients_id_is_kept(live: Live, given: str) -> None:
    assert live.http.get("/version", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", 'a"b', "a\tb", "\u00e9".encode("latin-1"), "a;b"])
def test_an_id_that_could_do_harm_is_replaced(live: Live, given: str | bytes) -> None:
    value = given if isinstance(given, bytes) else given.encode()
    made = live.http.get("/version", headers=[(b"x-request-id", value)]).headers["x-request-id"]
    assert len(made) == 32
    assert int(made, 16)


def test_ids_that_are_made_differ(live: Live) -> None:
    assert len({live.http.get("/version").headers["x-request-id"] for _ in range(20)}) == 20


def test_errors_name_the_request(live: Live, lines: pytest.LogCaptureFixture) -> None:
    headers = {"x-request-id": "r-7"}
    for answer in (
        live.http.get("/nowhere", headers=headers),
        live.http.post(COMPLETIONS, content=b"{", headers=headers),
        live.http.post(COMPLETIONS, json={}, headers=headers | {"Authorization": ""}),
    ):
        assert answer.status_code >= 400
        assert (answer.headers["x-request-id"], answer.json()["request_id"]) == ("r-7", "r-7")


def test_a_bug_names_the_request_in_the_answer_and_in_the_log(
    live: Live, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: Any, **_options: Any) -> None:
        raise KeyError("oh")

    monkeypatch.setattr(live.gateway, "check_room", broken)
    answer = live.http.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "r-8"})
    assert answer.status_code == 500
    assert "r-8" in answer.json()["error"]["message"]
    assert any(one.exc_info and "r-8" in one.getMessage() for one in lines.records)


def test_an_error_within_a_stream_names_the_request() -> None:
    with serving(scripted_llm("hello", error_for="http-0")) as live:
        body = {"prompt": "x", "stream": True, "max_tokens": 3}
        answer = live.http.post(COMPLETIONS, json=body, headers={"x-request-id": "r-9"})
        assert '"request_id":"r-9"' in answer.text


def test_a_page_of_another_origin_may_read_the_id() -> None:
    with serving(scripted_llm("hello"), cors_origins=["https://a.example"]) as live:
        answer = live.http.get("/version", headers={"Origin": "https://a.example"})
        assert "x-request-id" in answer.headers["access-control-expose-headers"].split(", ")


def test_the_openai_client_shows_the_id(live: Live) -> None:
    with live.openai("k") as client:
        answer = client.completions.create(model="toy", prompt="x", extra_headers={"x-request-id": "mine"})
    assert answer._request_id == "mine"


# -- figures


def test_requests_are_counted_by_endpoint_method_and_status(live: Live) -> None:
    http = live.http
    http.get("/nowhere/1")
    http.get("/nowhere/2")
    http.request("BREW", "/version")
    http.post(COMPLETIONS, content=b"{")
    http.post(COMPLETIONS, json={"prompt": "x"}, headers={"Authorization": "Bearer wrong"})
    http.get("/v1/models/a")
    http.get("/v1/models/b")

    def count(endpoint: str, method: str, status: str) -> float:
        return live.metric("sagellm_http_requests_total", endpoint=endpoint, method=method, status=status)

    assert count("other", "GET", "404") == 2
    assert count("/version", "other", "405") == 1
    assert count(COMPLETIONS, "POST", "400") == 1
    assert count(COMPLETIONS, "POST", "401") == 1
    assert count("/v1/models/{model:path}", "GET", "404") == 2


def test_429_is_counted() -> None:
    with serving(scripted_llm("on and on " * 9, step_s=0.05), max_waiting=1) as live:
        live.gateway.load.num_waiting = 1
        assert live.http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 429
        assert live.metric("sagellm_http_requests_total", status="429", endpoint=COMPLETIONS) == 1


def test_figures_of_the_engine_are_in_the_metrics() -> None:
    old, filler = [*range(17)], [*range(60, 97)]
    with serving(cached_llm()) as live:
        assert live.metric("sagellm_kv_evicted_blocks_total", cause="capacity") == 0
        for prompt in (old, old, filler, old):
            live.http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, "cache_salt": "made up"})
        assert live.metric("sagellm_kv_evicted_blocks_total", cause="capacity") > 0
        assert live.metric("sagellm_kv_cache_usage_ratio") == 0
        assert live.metric("sagellm_kv_fragmentation_ratio", kind="internal") == 0
        assert 0 <= live.metric("sagellm_kv_fragmentation_ratio", kind="external") < 1
        assert live.metric("sagellm_kv_pinned_blocks") == live.metric("sagellm_kv_pinned_prefixes") == 0
        assert "chunked_prefill" in live.http.get("/metrics").text
        assert live.metric("sagellm_request_queue_time_seconds_count") == 4
        assert live.metric("sagellm_tenant_prefix_cache_queries_total", tenant="(other)") == 17 * 3 + 37
        assert live.metric("sagellm_tenant_prefix_cache_hits_total", tenant="(other)") == 16 + 8
        assert "made up" not in live.http.get("/metrics").text
        assert live.metric("sagellm_build_info", device="none", dtype="int8") == 1


def test_a_scrape_does_not_wait_for_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagellm.serving.gateway.DIAGNOSTICS_TIMEOUT_S", 0.05)
    with serving(scripted_llm("hello", step_s=1.0)) as live, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.http.post, COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
        wait_until(live.llm.has_work)
        assert live.metric("sagellm_kv_pinned_blocks") == 0
        assert not answer.done()
        assert answer.result().status_code == 200


def test_metrics_are_there_after_the_engine_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SageServer, "on_tick", uvicorn.Server.on_tick)  # which does not end the server
    with serving(scripted_llm("hello", fail_next=RuntimeError("broken"))) as live:
        live.http.post(COMPLETIONS, json={"prompt": "x"})
        assert live.metric("sagellm_http_requests_total", status="503") == 1


def test_every_metric_is_in_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    with serving(cached_llm()) as live:
        live.http.post(COMPLETIONS, json={"prompt": [*range(17)], "max_tokens": 1})
        shown = live.http.get("/metrics").text
    families = [line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE")]
    names = {name.removeprefix("sagellm_") for name in families if not name.endswith("_created")}
    assert len(names) > 20
    assert not [name for name in sorted(names) if f"`{name}`" not in text]
