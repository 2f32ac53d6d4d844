"""`verify` on servers that answer wrongly: what they say is reported, and ends no run with a traceback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from sagellm.diagnostics.verify import Preset, VerifyReport, verify
from sagellm.diagnostics.verify.page import render
from tests.diagnostics.verify.fake_server import FakeServer, Tokens
from tests.effort import usual

QUICK = Preset(budget_s=20.0, long_tokens=128, max_rounds=1, repeats=2, churn_share=0.0)
"""Takes two seconds. The budget leaves a slow machine the time for all scenarios."""

Body = dict[str, Any]
Change = Callable[[int, Body, Response], Response]


class Liar(FakeServer):
    """Changes every answer: `change` gets its number, the request and the answer that is right."""

    change: Change

    async def _answer(self, body: Body, tokens: Tokens, *, chat: bool) -> Response:
        answer = await super()._answer(body, tokens, chat=chat)
        return self.change(self.num_asked, body, answer)


def report_of(change: Change, **options: Any) -> VerifyReport:
    fake = Liar(**options)
    fake.change = change
    with fake.running():
        report = asyncio.run(verify(fake.url, QUICK, concurrency=4))
    render(report).encode()
    report.to_json().encode()
    return report


def rewritten(change: Callable[[Any], object]) -> Change:
    def written(_: int, body: Body, answer: Response) -> Response:
        if not isinstance(answer, JSONResponse) or answer.status_code != 200:
            return answer
        data = json.loads(bytes(answer.body))
        change(data)
        return Response(json.dumps(data), media_type="application/json")

    return written


def counted(count: Callable[[int], Any]) -> Change:
    def change(data: Any) -> None:
        details = data["usage"]["prompt_tokens_details"]
        details["cached_tokens"] = count(details["cached_tokens"])

    return rewritten(change)


COUNTS: dict[str, Callable[[int], Any]] = {
    "negative": lambda cached: -5,
    "huge": lambda cached: cached * 10**15,
    "in turns": lambda cached: 10**6 if cached % 32 else -cached,
}


@pytest.mark.parametrize("name", usual(["huge"], COUNTS))
def test_impossible_counts_are_findings(name: str) -> None:
    report = report_of(counted(COUNTS[name]))
    assert "accounting" in {finding.kind for finding in report.findings}
    assert name != "negative" or {finding.kind for finding in report.findings} == {"accounting"}


@pytest.mark.parametrize("count", usual([str], [str, float, lambda cached: None, lambda cached: [cached]]))
def test_counts_that_are_no_integers_are_not_told(count: Callable[[int], Any]) -> None:
    report = report_of(counted(count))
    assert report.server is not None
    assert report.server.hits_from == "nothing"
    assert any("does not tell cached tokens" in limit for limit in report.limits)


def _scores(value: float | None) -> Change:
    def change(data: Any) -> None:
        logprobs = data["choices"][0]["logprobs"]
        if logprobs:
            logprobs["token_logprobs"] = [value] * len(logprobs["tokens"])
            logprobs["top_logprobs"] = [dict.fromkeys(top, value) for top in logprobs["top_logprobs"]]

    return rewritten(change)


@pytest.mark.parametrize("value", usual([None], [None, float("nan"), float("-inf")]))
def test_log_probabilities_that_are_no_numbers_are_none(value: float | None) -> None:
    report = report_of(_scores(value), corrupt=1.0)
    assert report.server is not None
    assert not report.server.logprobs
    assert {finding.kind for finding in report.findings} - {"timing"} == {"answers"}  # times are real


def test_tokens_that_are_no_unicode_can_be_written() -> None:
    def change(data: Any) -> None:
        logprobs = data["choices"][0]["logprobs"]
        if logprobs:
            logprobs["tokens"] = ["\ud800" + token for token in logprobs["tokens"]]

    report = report_of(rewritten(change), corrupt=1.0)
    assert report.findings
    assert report.findings[0].evidence is not None
    assert report.findings[0].evidence.cold[0].startswith("\\ud800")


def test_a_hit_of_a_request_that_was_sent_again_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagellm.diagnostics.verify.target.RETRY_S", 0.001)

    def busy(number: int, _: Body, answer: Response) -> Response:
        return PlainTextResponse("busy", 503) if number > 100 and number % 37 == 0 else answer

    report = report_of(busy)
    assert (report.outcome, report.findings) == ("clean", ())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (PlainTextResponse("wrong key", 401), "give --api-key: POST /v1/completions: HTTP 401: wrong key"),
        (RedirectResponse("https://elsewhere/v1/completions"), "leads to https://elsewhere/v1/completions"),
        (PlainTextResponse("<html>"), "POST /v1/completions: the answer is no JSON, but b'<html>'"),
        (Response(b'{"choices": "\xff"}'), "is this an OpenAI-compatible server?"),
        (JSONResponse([1]), "no JSON object"),
        (JSONResponse({"choices": []}), "not the form of OpenAI's API"),
    ],
)
def test_what_is_no_answer_says_what_would_be(answer: Response, reason: str) -> None:
    report = report_of(lambda *_: answer)
    assert report.outcome == "untestable"
    assert reason in report.reason


def test_a_server_that_stays_busy_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagellm.diagnostics.verify.target.RETRY_S", 0.001)
    report = report_of(lambda number, _, answer: PlainTextResponse("", 429) if number > 100 else answer)
    assert (report.outcome, report.findings) == ("untestable", ())
    assert "stays busy" in report.reason


def test_an_answer_that_never_ends_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sagellm.diagnostics.verify.target.REQUEST_TIMEOUT_S", 0.5)
    report = report_of(lambda number, _, answer: answer, seconds_per_token=0.2)
    assert report.outcome == "untestable"
    assert "no whole answer within" in report.reason
