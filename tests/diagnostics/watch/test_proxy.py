"""The proxy passes everything on, and adds one field to completions and chats."""

from __future__ import annotations

import json
import socket
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
        body = self._chunks() if self.headers.get("Transfer-Encoding") else self._whole()
        if self.path == "/stream":
            self._stream()
            return
        if self.path == "/slow":
            self.connection.recv(1)  # returns when the client has gone
            self.server.num_streams_ended += 1
            return
        if self.path == "/broken":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
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
        self.send_header("Set-Cookie", "a=1; Path=/")
        self.send_header("Set-Cookie", "b=2; Path=/")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _whole(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

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


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    server = Upstream()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
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
        (b"{}", b'{"vllm_xargs":{"kv_cache_report_mode":"full"}}'),
        (b'{"vllm_xargs": null }', b'{"vllm_xargs":{"kv_cache_report_mode":"full"}}'),
        (b'{"vllm_xargs": {"x": 1}}', b'{"vllm_xargs":{"x":1,"kv_cache_report_mode":"full"}}'),
        (b'{"vllm_xargs": {"kv_cache_report_mode": "incremental"}}', None),
        (b'{"vllm_xargs": [1]}', None),
        (b"[1, 2]", None),
        (b"not json", None),
        (b"", None),
        (b"[" * 100_000, None),
        (b'{"a": ' + b"[" * 100_000, None),
    ],
)
def test_bodies(body: bytes, passed_on: bytes | None) -> None:
    assert with_reported_hits(body) == (body if passed_on is None else passed_on)


@pytest.mark.parametrize("value", ["1e400", "-0.0", "1.10", "12345678901234567890", '"\\u00e9"', '"é"'])
def test_values_keep_their_bytes(value: str) -> None:
    """A server that parses numbers and text in its own way sees what the client wrote."""
    body = with_reported_hits(f'{{"seed": {value}}}'.encode())
    assert body == f'{{"seed":{value},"vllm_xargs":{{"kv_cache_report_mode":"full"}}}}'.encode()


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
    wait_for_end(upstream)


def wait_for_end(upstream: Upstream) -> None:
    end = time.monotonic() + 5
    while not upstream.num_streams_ended:
        assert time.monotonic() < end
        time.sleep(0.02)
    upstream.num_streams_ended = 0


def test_a_client_that_leaves_before_the_first_byte_ends_its_request(
    proxy: ReportingProxy, upstream: Upstream
) -> None:
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{proxy.url}/slow", json={"prompt": "x"}, timeout=0.3)
    wait_for_end(upstream)


def test_users_do_not_get_each_others_cookies(proxy: ReportingProxy) -> None:
    first = httpx2.get(f"{proxy.url}/login")
    assert first.headers.get_list("set-cookie") == ["a=1; Path=/", "b=2; Path=/"]
    assert "cookie" not in httpx2.get(f"{proxy.url}/login").json()["headers"]


def raw_request(proxy: ReportingProxy, head: str, body: bytes = b"") -> bytes:
    """What a plain socket gets for these lines."""
    host, port = proxy.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            (head + "\r\nHost: h\r\nConnection: close, X-Mine\r\nX-Mine: 1\r\n\r\n").encode() + body
        )
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_no_header_is_added(proxy: ReportingProxy, upstream: Upstream) -> None:
    answer = raw_request(proxy, "GET /models/org%2Fname?q=%2F HTTP/1.1")
    head, _, body = answer.partition(b"\r\n\r\n")
    told = json.loads(body)
    assert told["path"] == "/models/org%2Fname?q=%2F"
    assert told["headers"] == {"host": upstream.url.removeprefix("http://")}
    names = [line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
    assert sorted(names) == sorted(
        [b"server", b"date", b"content-length", b"x-request-id", b"set-cookie", b"set-cookie", b"connection"]
    )


@pytest.mark.parametrize("target", ["@elsewhere/", "http://elsewhere/", "*"])
def test_only_one_server_can_be_reached(proxy: ReportingProxy, target: str) -> None:
    assert raw_request(proxy, f"GET {target} HTTP/1.1").startswith(b"HTTP/1.1 400")


def test_chunked_uploads_pass(proxy: ReportingProxy) -> None:
    told = httpx2.post(f"{proxy.url}/upload", content=iter([b"a" * 70_000, b"b"])).json()
    assert len(told["body"]) == 70_001
    assert told["headers"]["transfer-encoding"] == "chunked"
    told = httpx2.post(f"{proxy.url}/v1/completions", content=iter([b'{"prompt":', b"1}"])).json()
    assert json.loads(told["body"])["vllm_xargs"] == {"kv_cache_report_mode": "full"}


def test_a_request_has_one_length(proxy: ReportingProxy) -> None:
    head = "POST /upload HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5"
    told = json.loads(raw_request(proxy, head, b"1\r\na\r\n0\r\n\r\n").partition(b"\r\n\r\n")[2])
    assert told["body"] == "a"
    assert "content-length" not in told["headers"]


def test_an_answer_that_breaks_off_breaks_off(
    proxy: ReportingProxy, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(httpx2.RemoteProtocolError):
        httpx2.get(f"{proxy.url}/broken")
    assert "broke off an answer" in caplog.text
    assert httpx2.get(f"{proxy.url}/next").status_code == 200


@pytest.mark.parametrize(
    ("upstream", "message"),
    [
        ("localhost:1", "write http://host:port"),
        ("tcp://h:1", "write http://host:port"),
        ("http://h:1/v1", "write http://h:1 alone"),
        ("http://h:x", "write http://host:port"),
        ("", "write http://host:port"),
    ],
)
def test_servers_that_are_refused(upstream: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReportingProxy(upstream)


def test_a_server_that_is_gone_is_a_502() -> None:
    with ReportingProxy("http://127.0.0.1:1") as proxy:
        answer = httpx2.post(f"{proxy.url}/v1/completions", json={})
    assert answer.status_code == 502
    assert "cannot reach http://127.0.0.1:1" in answer.json()["error"]["message"]


def test_a_taken_port_is_explained(proxy: ReportingProxy) -> None:
    port = int(proxy.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match="choose another --listen"):
        ReportingProxy("http://127.0.0.1:1", port=port)
