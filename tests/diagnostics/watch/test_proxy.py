"""The proxy passes everything on, and adds one field to completions and chats."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from sagellm.core.errors import ConfigError
from sagellm.diagnostics.watch.proxy import ReportingProxy, with_reported_hits


class Upstream(ThreadingHTTPServer):
    """Echoes a request as JSON; `/stream` sends events until the client has gone."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Echo)
        self.num_streams_ended = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


class Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def _echo(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/stream":
            self._stream()
            return
        text = json.dumps(
            {
                "method": self.command,
                "path": self.path,
                "headers": {name.lower(): value for name, value in self.headers.items()},
                "body": body.decode("latin-1"),
            }
        ).encode()
        self.send_response(429 if self.path == "/busy" else 200)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("X-Request-Id", "r1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _echo  # noqa: N815 - the server's names

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for number in range(1000):
                self.wfile.write(f"data: {number}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.02)
        except OSError:
            pass
        self.server.num_streams_ended += 1

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def proxy(upstream: Upstream) -> Iterator[ReportingProxy]:
    with ReportingProxy(upstream.url) as made:
        yield made


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_completions_ask_for_reports(proxy: ReportingProxy, path: str) -> None:
    answer = httpx2.post(f"{proxy.url}{path}?a=1", json={"prompt": "x", "stream": False}).json()
    assert answer["path"] == f"{path}?a=1"
    assert json.loads(answer["body"]) == {
        "prompt": "x",
        "stream": False,
        "vllm_xargs": {"kv_cache_report_mode": "full"},
    }


@pytest.mark.parametrize(
    ("body", "passed_on"),
    [
        (b'{"a": 1}', b'{"a": 1, "vllm_xargs": {"kv_cache_report_mode": "full"}}'),
        (b'{"vllm_xargs": null}', b'{"vllm_xargs": {"kv_cache_report_mode": "full"}}'),
        (b'{"vllm_xargs": {"x": 1}}', b'{"vllm_xargs": {"kv_cache_report_mode": "full", "x": 1}}'),
        (b'{"vllm_xargs": {"kv_cache_report_mode": "incremental"}}', None),
        (b'{"vllm_xargs": [1]}', None),
        (b"[1, 2]", None),
        (b"not json", None),
        (b"", None),
        (b"[" * 100_000, None),
        (b'{"a": "\xff"}', None),
    ],
)
def test_bodies(body: bytes, passed_on: bytes | None) -> None:
    assert with_reported_hits(body) == (body if passed_on is None else passed_on)


def test_all_else_passes_as_it_is(proxy: ReportingProxy) -> None:
    body = bytes(range(256))
    answer = httpx2.put(
        f"{proxy.url}/other/%C3%A9?q=%20", content=body, headers={"Authorization": "Bearer k"}
    )
    told = answer.json()
    assert (told["method"], told["path"]) == ("PUT", "/other/%C3%A9?q=%20")
    assert told["body"].encode("latin-1") == body
    assert told["headers"]["authorization"] == "Bearer k"
    assert answer.headers["x-request-id"] == "r1"
    assert httpx2.get(f"{proxy.url}/busy").status_code == 429
    assert httpx2.head(f"{proxy.url}/v1/models").status_code == 200


def test_streams_come_as_they_are_sent_and_end_with_their_client(
    proxy: ReportingProxy, upstream: Upstream
) -> None:
    began_s = time.monotonic()
    with httpx2.stream("POST", f"{proxy.url}/stream") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert next(answer.iter_lines()) == "data: 0"
    assert time.monotonic() - began_s < 10  # the whole stream takes twenty seconds
    end = time.monotonic() + 5
    while not upstream.num_streams_ended:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_server_that_is_gone_is_a_502() -> None:
    with ReportingProxy("http://127.0.0.1:1") as proxy:
        answer = httpx2.post(f"{proxy.url}/v1/completions", json={})
    assert answer.status_code == 502
    assert "cannot reach http://127.0.0.1:1" in answer.json()["error"]["message"]


def test_a_taken_port_is_explained(proxy: ReportingProxy) -> None:
    port = int(proxy.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match="choose another --listen"):
        ReportingProxy("http://127.0.0.1:1", port=port)
