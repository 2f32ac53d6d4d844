"""The client process of `sagellm bench http`, apart from the server's interpreter:

    python -m sagellm.benchmarks.http.client

It reads an `HttpJob` as JSON from stdin and writes one JSON list of samples to stdout. It uses `http.client`
of the standard library for its small and steady cost. Each thread sends one request at a time.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

TIMEOUT_S = 120.0
_END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class HttpJob:
    """Requests of one kind, `concurrency` at a time. `body` None is a GET, else a POST. With `keep_alive`
    each thread keeps one connection; otherwise each request opens its own."""

    url: str
    path: str
    body: Mapping[str, Any] | None
    num_requests: int
    concurrency: int
    keep_alive: bool
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpSample:
    """Seconds to the first and last byte of one answer, and its events. `began_s` is on the client's
    monotonic clock. `error` says what failed, or is empty."""

    began_s: float
    first_s: float
    total_s: float
    num_events: int
    error: str = ""


def connect(server: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    """Returns a connection that opens with its first request."""
    made = http.client.HTTPSConnection if server.scheme == "https" else http.client.HTTPConnection
    return made(server.hostname or "", server.port, timeout=timeout_s)


class HttpSender:
    """Sends requests over one connection, or over a new one for each."""

    def __init__(self, job: HttpJob) -> None:
        self._job = job
        self._content = None if job.body is None else json.dumps(job.body).encode()
        self._connection: http.client.HTTPConnection | None = None
        self._server = urlsplit(job.url)
        self._path = self._server.path.rstrip("/") + job.path
        self._headers = {**job.headers, **({} if job.keep_alive else {"Connection": "close"})}
        if job.body is not None:
            self._headers["Content-Type"] = "application/json"

    def send(self) -> HttpSample:
        """Sends one request and reads the whole answer; an error is in the sample."""
        began_s = time.perf_counter()
        try:
            first_s, num_events = self._exchange()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            elapsed_s = time.perf_counter() - began_s
            return HttpSample(began_s, elapsed_s, elapsed_s, 0, f"{type(error).__name__}: {error}")
        ended_s = time.perf_counter()
        if not self._job.keep_alive:
            self.close()
        return HttpSample(began_s, first_s - began_s, ended_s - began_s, num_events)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self) -> tuple[float, int]:
        """Returns the time of the first content and the number of events."""
        if self._connection is None:
            self._connection = connect(self._server, TIMEOUT_S)
        method = "GET" if self._content is None else "POST"
        self._connection.request(method, self._path, self._content, self._headers)
        answer = self._connection.getresponse()
        if answer.status != http.client.OK:
            raise ValueError(f"status {answer.status}: {answer.read(300).decode(errors='replace')}")
        if "text/event-stream" not in answer.headers.get("content-type", ""):
            answer.read()
            return time.perf_counter(), 0
        return self._read_events(answer)

    def _read_events(self, answer: http.client.HTTPResponse) -> tuple[float, int]:
        first_s, num_events, last = 0.0, 0, b""
        for line in answer:
            if line.startswith(b"data:"):
                first_s = first_s or time.perf_counter()
                num_events, last = num_events + 1, line
        if not last.startswith(_END):
            raise ValueError(f"the stream ended early: {last[:300].decode(errors='replace')}")
        return first_s, num_events - 1


def run(job: HttpJob) -> list[HttpSample]:
    """Returns all samples in the order in which they ended."""
    samples: list[HttpSample] = []
    numbers = iter(range(job.num_requests))
    lock = threading.Lock()

    def work() -> None:
        sender = HttpSender(job)
        while True:
            with lock:
                if next(numbers, None) is None:
                    break
            samples.append(sender.send())
        sender.close()

    threads = [threading.Thread(target=work) for _ in range(job.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return samples


if __name__ == "__main__":
    print(json.dumps([dataclasses.asdict(sample) for sample in run(HttpJob(**json.load(sys.stdin)))]))
