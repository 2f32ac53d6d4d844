"""`sagellm bench http`: its client against a live server, its figures, and what it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sagellm.benchmarks.http import client
from sagellm.benchmarks.http.client import HttpJob, HttpSample
from sagellm.benchmarks.http.run import (
    KINDS,
    HttpBenchPlan,
    HttpBenchReport,
    HttpRun,
    HttpTarget,
    measure,
    our_server,
    run,
    served_model,
)
from sagellm.benchmarks.reporting import environment
from sagellm.core.errors import ConfigError, SageError
from tests.scripted_engine import scripted_llm
from tests.serving.live import Live, serving, wait_until


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(scripted_llm("a b c d ")) as running:
        yield running


def target_of(live: Live) -> HttpTarget:
    return HttpTarget("sagellm", live.url, "toy")


@pytest.mark.parametrize("keep_alive", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_client_gets_every_answer(live: Live, kind: str, *, keep_alive: bool) -> None:
    plan = HttpBenchPlan(num_requests=24, stream_tokens=5)
    job = plan.job(kind, 3, keep_alive=keep_alive, target=target_of(live))
    samples = client.run(job)
    assert [sample.error for sample in samples] == [""] * (3 if kind == "stream" else 24)
    assert all(0 < sample.first_s <= sample.total_s for sample in samples)
    if kind == "stream":
        assert all(1 <= sample.num_events <= 6 for sample in samples)  # tokens may come together


def test_kept_connections_are_kept(live: Live) -> None:
    """As many connections as threads, or as requests. Each thread waits before its first request until the
    other has one: a quick thread could send all of them."""
    for keep_alive, expected in ((True, 2), (False, 12)):
        plan = HttpBenchPlan(num_requests=12)
        seen: set[Any] = set()
        state = live.server.server_state
        wait_until(lambda: not state.tasks)  # noqa: B023 - requests of other tests are counted when they end
        expected_in_all = state.total_requests + 12
        job = plan.job("list", 2, keep_alive=keep_alive, target=target_of(live))
        original = client.HttpSender._exchange
        both_began, began = threading.Barrier(2, timeout=30), threading.local()

        def noted(sender: client.HttpSender, original: Any = original, seen: set[Any] = seen) -> Any:
            if not hasattr(began, "yet"):  # noqa: B023 - called before the next turn
                began.yet = True  # noqa: B023
                both_began.wait()  # noqa: B023
            found = original(sender)
            seen.add(sender._connection)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client.HttpSender, "_exchange", noted)
            client.run(job)
        assert len(seen) == expected
        wait_until(lambda: state.total_requests == expected_in_all)  # noqa: B023 - called at once


def test_a_report_has_every_case_and_no_key(live: Live) -> None:
    target = HttpTarget("sagellm", live.url, "toy", {"Authorization": "Bearer secret"})
    plan = HttpBenchPlan(KINDS, (1, 2), num_requests=8, stream_tokens=3, repeats=2)
    report = HttpBenchReport(plan, target, environment(datetime.now(UTC)))
    heard: list[str] = []
    run(report, on_run=heard.append)
    assert len(report.cases()) == len(heard) == len(KINDS) * 2 * 2
    assert all(len(runs) == 2 for runs in report.cases().values())
    text = json.dumps(report.as_json())
    assert "secret" not in text
    [table] = report.tables()
    assert len(table.rows) == len(report.cases())


def test_the_figures_of_a_run() -> None:
    job = HttpJob("http://x", "/", None, 4, 2, keep_alive=True, headers={})
    samples = [HttpSample(float(number), 0.1, 0.2 + number / 10, 5) for number in range(4)]
    found = HttpRun.of("stream", job, samples)
    assert (found.median_ms, found.p99_ms, found.first_ms) == (350.0, 500.0, 100.0)
    assert found.requests_per_s == round(4 / 3.5, 2)
    assert found.events_per_s == round(20 / 3.5, 1)


def test_a_failed_request_ends_the_measurement(live: Live) -> None:
    job = HttpBenchPlan(num_requests=4).job(
        "one-token", 1, keep_alive=True, target=HttpTarget("x", live.url, "nope")
    )
    with pytest.raises(SageError, match=r"4 of 4 requests failed: ValueError: status 404.*model_not_found"):
        measure(job)


def test_a_stream_that_ends_early_is_an_error(live: Live) -> None:
    live.llm._engine.error_for = None  # type: ignore[attr-defined]
    body = {"prompt": "x", "stream": True, "max_tokens": 0, "seed": -1}
    job = HttpJob(live.url, "/v1/completions", body, 1, 1, keep_alive=True, headers={})
    [sample] = client.run(job)
    assert sample.error


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no server answers"):
        served_model("http://127.0.0.1:9", {})
    for url in ("127.0.0.1:80", "ftp://x", "http://"):
        with pytest.raises(ConfigError, match="write the address of a server"):
            served_model(url, {})


def test_another_server_is_named(live: Live) -> None:
    assert served_model(live.url, {}) == "toy"


def test_our_server_explains_why_it_does_not_start(tmp_path: Path) -> None:
    with (
        pytest.raises(SageError, match="the server did not start: sagellm: "),
        our_server(["--model", str(tmp_path)]),
    ):
        raise AssertionError("it started")


@pytest.mark.parametrize(
    "wrong",
    [{"kinds": ["nope"]}, {"kinds": []}, {"concurrencies": []}, {"concurrencies": [0]}, {"num_requests": 0},
     {"stream_tokens": 0}, {"repeats": 0}, {"concurrencies": [2000]}],
)  # fmt: skip
def test_plans_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HttpBenchPlan(**wrong)
