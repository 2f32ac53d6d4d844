"""Measures an HTTP server, ours or another, and reports JSON and tables."""

from __future__ import annotations

import dataclasses
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from statistics import median
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import urlsplit

from sagellm.benchmarks.http.client import HttpJob, HttpSample, connect
from sagellm.benchmarks.process import run_module
from sagellm.benchmarks.reporting import Environment, Table, format_number
from sagellm.core.errors import ConfigError, SageError
from sagellm.core.ports import SagePorts
from sagellm.core.processes import child_environment

FORMAT = "sagellm.bench.http/1"
COLUMNS = (
    "answer", "connection", "at a time", "ms median", "ms p99", "first ms", "requests/s", "events/s",
)  # fmt: skip
PROMPT = "17 + 25 ="
MS = 1e3
CONNECTIONS = {True: "kept", False: "new"}
KINDS = ("list", "one-token", "stream")
LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class HttpBenchPlan:
    """What to measure: kinds of answers, requests at a time, kept and new connections. Each of `repeats`
    runs sends `num_requests` short answers, or a `STREAM_SHARE`-th as many streams of `stream_tokens`
    tokens."""

    kinds: Sequence[str] = KINDS
    concurrencies: Sequence[int] = (1, 8, 32)
    num_requests: int = 400
    stream_tokens: int = 64
    repeats: int = 3

    STREAM_SHARE = 8

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ConfigError(f"there is no answer {''.join(unknown[:1])!r}; there are {', '.join(KINDS)}")
        for name in ("num_requests", "stream_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', ' ')} must be at least 1, got {getattr(self, name)}")
        if not self.concurrencies or min(self.concurrencies) < 1 or max(self.concurrencies) > 1024:
            raise ConfigError("the requests at a time must be from 1 to 1024, for example 1,8,32")

    def job(self, kind: str, concurrency: int, *, keep_alive: bool, target: HttpTarget) -> HttpJob:
        """Returns the requests of one run."""
        body: dict[str, Any] | None = None
        path, count = "/v1/models", self.num_requests
        if kind != "list":
            path = "/v1/completions"
            body = {"model": target.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
            if kind == "stream":
                body |= {"max_tokens": self.stream_tokens, "stream": True, "ignore_eos": True}
                count = max(concurrency, count // self.STREAM_SHARE)
        return HttpJob(target.url, path, body, count, concurrency, keep_alive, target.headers)


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """A running server. `headers` go with every request and are not in the report."""

    name: str
    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpRun:
    """One run of one case. Latencies are in ms over its requests, rates over the time from the first
    request to the last answer."""

    kind: str
    keep_alive: bool
    concurrency: int
    num_requests: int
    median_ms: float
    p99_ms: float
    first_ms: float
    requests_per_s: float
    events_per_s: float

    @classmethod
    def of(cls, kind: str, job: HttpJob, samples: Sequence[HttpSample]) -> HttpRun:
        totals = sorted(sample.total_s for sample in samples)
        begin_s = min(sample.began_s for sample in samples)
        span_s = max(sample.began_s + sample.total_s for sample in samples) - begin_s
        return cls(
            kind,
            job.keep_alive,
            job.concurrency,
            len(samples),
            median_ms=round(MS * median(totals), 3),
            p99_ms=round(MS * totals[min(len(totals) - 1, int(0.99 * len(totals)))], 3),
            first_ms=round(MS * median(sample.first_s for sample in samples), 3),
            requests_per_s=round(len(samples) / span_s, 2),
            events_per_s=round(sum(sample.num_events for sample in samples) / span_s, 1),
        )


@dataclass(slots=True)
class HttpBenchReport:
    """All runs so far."""

    plan: HttpBenchPlan
    target: HttpTarget
    environment: Environment
    runs: list[HttpRun] = field(default_factory=list)

    def cases(self) -> dict[tuple[str, bool, int], list[HttpRun]]:
        groups: dict[tuple[str, bool, int], list[HttpRun]] = {}
        for run in self.runs:
            groups.setdefault((run.kind, run.keep_alive, run.concurrency), []).append(run)
        return groups

    def as_json(self) -> dict[str, Any]:
        """Returns the report as JSON values of form `FORMAT`."""
        return {
            "format": FORMAT,
            "environment": dataclasses.asdict(self.environment),
            "server": self.target.name,
            "model": self.target.model,
            "plan": dataclasses.asdict(self.plan),
            "runs": [dataclasses.asdict(run) for run in self.runs],
        }

    def tables(self) -> Iterator[Table]:
        repeats = "one run" if self.plan.repeats == 1 else f"medians of {self.plan.repeats} runs"
        title = f"{self.target.name}, model {self.target.model}: {repeats}"
        rows = []
        for (kind, keep_alive, concurrency), runs in self.cases().items():
            names = ("median_ms", "p99_ms", "first_ms", "requests_per_s", "events_per_s")
            figures = [format_number(median(getattr(run, name) for run in runs)) for name in names]
            if kind != "stream":
                figures[-1] = ""
            rows.append([kind, CONNECTIONS[keep_alive], str(concurrency), *figures])
        yield Table(title, COLUMNS, rows, num_names=3)


def run(report: HttpBenchReport, *, on_run: Callable[[str], None] = lambda what: None) -> None:
    """Measures into `report`; runs before an error are kept. Each case warms up once."""
    plan = report.plan
    for kind in plan.kinds:
        for concurrency in plan.concurrencies:
            for keep_alive in (True, False):
                job = plan.job(kind, concurrency, keep_alive=keep_alive, target=report.target)
                on_run(f"{kind}, {concurrency} at a time, {CONNECTIONS[keep_alive]} connections")
                measure(dataclasses.replace(job, num_requests=2 * concurrency))
                for _ in range(plan.repeats):
                    report.runs.append(HttpRun.of(kind, job, measure(job)))


def measure(job: HttpJob) -> list[HttpSample]:
    """Returns the samples of one job, taken in a child process. Raises `SageError` if a request failed."""
    answer = run_module("sagellm.benchmarks.http.client", dataclasses.asdict(job), "the client")
    samples = [HttpSample(**values) for values in answer]
    failed = [sample.error for sample in samples if sample.error]
    if failed:
        raise SageError(f"{len(failed)} of {len(samples)} requests failed: {failed[0]}")
    return samples


@contextmanager
def our_server(arguments: Sequence[str]) -> Iterator[str]:
    """Runs `sagellm serve` on a free port of loopback. Yields its URL and stops it afterwards. Raises
    `SageError` with the server's last line if it does not start."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sagellm", "serve", "--host", LOOPBACK, "--port", str(port), *arguments]
    url = f"http://{LOOPBACK}:{port}"
    with TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=child_environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            problem = _why_not_ready(process, url)
            if problem is not None:
                log.seek(0)
                last = log.read().strip().splitlines()[-1:]
                raise SageError(f"the server did not start: {' '.join(last) or problem}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _why_not_ready(process: subprocess.Popen[bytes], url: str) -> str | None:
    """Waits until the server is ready. Returns why it is not, if its process ends or takes too long."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            return f"exit status {process.returncode}"
        try:
            get(url, "/ready", {})
        except (OSError, http.client.HTTPException, ConfigError):
            time.sleep(0.1)
        else:
            return None
    return f"not ready after {START_TIMEOUT_S:g} s"


def get(url: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Returns the body of one GET. Raises `ConfigError` for another status than 200, else as `http.client`
    does."""
    parts = urlsplit(url)
    with closing(connect(parts, timeout_s=10)) as connection:
        connection.request("GET", parts.path.rstrip("/") + path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read()
    if answer.status != http.client.OK:
        raise ConfigError(f"{url}{path} answers {answer.status}: {body[:300].decode(errors='replace')}")
    return body


def served_model(url: str, headers: Mapping[str, str]) -> str:
    """Returns the first model that a server lists. Raises `ConfigError` if no server with OpenAI's API
    answers there."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        example = f"http://{LOOPBACK}:{int(SagePorts.HTTP)}"
        raise ConfigError(f"--url {url!r}: write the address of a server, for example {example}")
    try:
        return str(json.loads(get(url, "/v1/models", headers))["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"no server answers at {url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url}/v1/models lists no model: is it an OpenAI-compatible server?") from error
