"""`verify` on fake servers: noise gives no finding, broken caches do."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from sagellm.core.errors import RequestError
from sagellm.diagnostics.verify import Preset, VerifyReport, verify
from sagellm.diagnostics.verify.page import render
from tests.diagnostics.verify.fake_server import FakeServer
from tests.effort import usual

QUICK = Preset(budget_s=10.0, long_tokens=128, max_rounds=1, repeats=6, churn_share=0.0)


def report_of(fake: FakeServer, seed: int = 0, **options: Any) -> VerifyReport:
    with fake.running():
        return asyncio.run(verify(fake.url, QUICK, seed=seed, concurrency=4, **options))


def kinds(report: VerifyReport) -> set[str]:
    return {finding.kind for finding in report.findings}


NOISES: dict[str, Any] = {
    "none": {},
    "float32": {"noise": 1e-6},
    "bfloat16": {"noise": 0.02},
    "flips": {"noise": 0.3},
    "heavy tails": {"noise": 0.01, "outliers": 0.03, "outlier_noise": 1.5},
}


@pytest.mark.parametrize("seed", usual([0], range(20)))
@pytest.mark.parametrize("noise", usual(["flips"], NOISES))
def test_noise_is_no_finding(noise: str, seed: int) -> None:
    report = report_of(FakeServer(seed=seed, **NOISES[noise]), seed=seed)
    assert (report.outcome, report.findings) == ("clean", ())


def test_noise_flips_tokens_and_is_still_no_finding() -> None:
    report = report_of(FakeServer(noise=0.3))
    assert report.noise is not None
    assert report.noise.divergences > 0
    assert sum(family.divergences for family in report.families) > 0
    assert report.findings == ()


@pytest.mark.parametrize("noise", usual(["bfloat16"], NOISES))
def test_a_wrong_hit_is_found_beside_noise(noise: str) -> None:
    report = report_of(FakeServer(corrupt=1.0, **NOISES[noise]))
    assert (report.outcome, report.exit_code) == ("findings", 1)
    assert kinds(report) == {"answers"}
    finding = max(report.findings, key=lambda finding: finding.evidence.size if finding.evidence else 0)
    assert finding.p_value is not None
    assert finding.p_value < 1e-3
    assert finding.evidence is not None
    assert finding.evidence.cached_tokens


def test_a_rare_wrong_hit_is_found_where_answers_repeat() -> None:
    assert kinds(report_of(FakeServer(corrupt=0.1, noise=1e-5))) == {"answers"}


def test_a_small_systematic_error_is_found() -> None:
    assert kinds(report_of(FakeServer(corrupt_shift=0.02, noise=1e-5))) == {"answers"}


WEAK = {
    "timings": (FakeServer(tell="timings"), "cache_salt", "timings"),
    "metrics": (FakeServer(tell="metrics"), "cache_salt", "metrics"),
    "nothing told": (FakeServer(tell=None, seconds_per_token=2e-4), "cache_salt", "nothing"),
    "no logprobs": (FakeServer(logprobs=False), "cache_salt", "usage"),
    "texts": (FakeServer(token_prompts=False), "cache_salt", "usage"),
    "chats": (FakeServer(completions=False), "cache_salt", "usage"),
    "no salts": (FakeServer(salts=False), "unique prompts", "usage"),
    "little": (FakeServer(salts=False, token_prompts=False, logprobs=False), "unique prompts", "usage"),
}


@pytest.mark.parametrize("name", usual(["no logprobs", "chats", "little"], WEAK))
@pytest.mark.parametrize("corrupt", usual([0.0], [0.0, 1.0]))
def test_weak_servers_are_tested_as_far_as_they_can_be(name: str, corrupt: float) -> None:
    fake, cold_by, hits_from = WEAK[name]
    report = report_of(dataclasses.replace(fake, corrupt=corrupt))
    assert report.server is not None
    assert (report.server.cold_by, report.server.hits_from) == (cold_by, hits_from)
    assert report.exit_code == (1 if corrupt else 0), report.findings or report.reason
    assert report.limits


@pytest.mark.parametrize("block_size", usual([7], [1, 7, 32]))
def test_the_granularity_is_measured(block_size: int) -> None:
    report = report_of(FakeServer(block_size=block_size))
    assert report.server is not None
    assert (report.server.granularity, report.server.smallest_reusable) == (block_size, block_size)
    assert report.findings == ()


def test_salts_that_share_are_a_finding() -> None:
    assert "isolation" in kinds(report_of(FakeServer(leaking_salts=True)))


def test_a_hit_of_another_salt_that_only_time_tells_is_a_finding() -> None:
    report = report_of(FakeServer(leaking_salts=True, tell=None, seconds_per_token=2e-4))
    assert kinds(report) == {"timing"}
    assert report.timing is not None
    assert report.timing.other_salt_s is not None


@pytest.mark.parametrize("wrong", usual([16], [3, 16, 1000, -1000]))
def test_wrong_counts_are_findings(wrong: int) -> None:
    assert kinds(report_of(FakeServer(wrong_count=wrong))) == {"accounting"}


def test_without_a_cache_nothing_can_be_tested() -> None:
    report = report_of(FakeServer(block_size=100_000))
    assert (report.outcome, report.exit_code) == ("untestable", 2)
    assert "no hit was seen" in report.reason


def test_options_out_of_range_say_what_works() -> None:
    with pytest.raises(RequestError, match="minute, hour"):
        asyncio.run(verify("http://127.0.0.1:9", "second"))
    with pytest.raises(RequestError, match="1 to 256"):
        asyncio.run(verify("http://127.0.0.1:9", concurrency=0))


def test_a_server_that_dies_in_the_run_is_no_clean_one() -> None:
    report = report_of(FakeServer(dies_after=150))
    assert (report.outcome, report.exit_code) == ("untestable", 2)
    assert "ended early" in report.reason
    assert report.families


def test_what_was_found_before_the_server_died_is_reported() -> None:
    report = report_of(FakeServer(dies_after=300, corrupt=1.0))
    assert (report.outcome, kinds(report)) == ("findings", {"answers"})
    assert "ended early" in report.reason


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://[::1", "http://\u2603.invalid\n", ""])
def test_what_is_no_address_is_explained(url: str) -> None:
    report = asyncio.run(verify(url, QUICK))
    assert (report.outcome, report.exit_code) == ("untestable", 2)
    assert report.reason


def test_the_page_escapes_what_the_server_says() -> None:
    report = report_of(FakeServer(corrupt=1.0, model="<script>alert(1)</script>"))
    shown = render(report)
    assert "<script>" not in shown
    assert "First diverging generated token" in shown
    assert json.loads(report.to_json())["outcome"] == "findings"
