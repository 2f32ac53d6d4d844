"""`verify` on our own server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from sagellm.diagnostics.verify import Preset, verify
from sagellm.diagnostics.verify.page import render
from sagellm.engines.build import load
from tests.serving.live import Live, serving

SMALL = {"kv.num_blocks": 200}
QUICK = Preset(budget_s=60.0, long_tokens=256, max_rounds=1, churn_share=0.02)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(load(None, SMALL), log_requests=False) as running:
        yield running


def test_our_server_is_clean(live: Live) -> None:
    report = asyncio.run(verify(live.url, QUICK, concurrency=4))
    assert (report.outcome, report.findings, report.exit_code) == ("clean", (), 0)
    assert report.server is not None
    assert (report.server.granularity, report.server.smallest_reusable) == (16, 16)
    assert (report.server.cold_by, report.server.hits_from) == ("cache_salt", "usage")
    assert all(family.hits for family in report.families if family.scenarios and family.name != "pressure")
    assert json.loads(report.to_json())["exit_code"] == 0
    assert "No finding" in render(report)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_clean_minutes_have_no_finding(live: Live, seed: int) -> None:
    report = asyncio.run(verify(live.url, "minute", seed=seed))
    assert (report.outcome, report.findings) == ("clean", ())


def test_a_server_that_is_not_there_cannot_be_tested() -> None:
    report = asyncio.run(verify("http://127.0.0.1:9", QUICK))
    assert (report.outcome, report.exit_code) == ("untestable", 2)
    assert "127.0.0.1:9" in report.reason
