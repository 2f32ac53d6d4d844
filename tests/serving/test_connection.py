"""Connections that make no progress, too many of them, and bytes that are not quite HTTP: on real sockets."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import h11
import pytest

from sagellm.core.clock import ManualClock
from sagellm.serving.connection import MAX_CHUNKS, MAX_HEAD_BYTES, RateLimitedLog, StrictConnection
from tests.scripted_engine import ScriptedEngine, scripted_llm
from tests.serving.live import LOCALHOST, PATIENCE_S, Live, free_port, serving, wait_until

ROOT = Path(__file__).parents[2]
LONG_S = 1000.0
"""A limit that no test reaches."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def limits(**changed: Any) -> dict[str, Any]:
    """Settings that no test reaches, but for those that are given."""
    patient = dict.fromkeys(("header_timeout_s", "send_timeout_s", "keep_alive_timeout_s"), LONG_S)
    return patient | changed


def connected(live: Live) -> socket.socket:
    return socket.create_connection(live.address, timeout=PATIENCE_S)


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes; a reset counts as closed."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := client.recv(2**16):
            received += piece
    return received


def one_answer(received: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON body of the only answer of a connection that the server closed."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"application/json" in head, received
    assert b"connection: close" in head.lower(), received
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(scripted_llm(), **limits()) as running:
        yield running


@pytest.mark.parametrize(
    ("request_bytes", "status", "reason"),
    [
        (b"GET /version HTTP/1.1\nHost: x\n\n", 400, "line end"),
        (b"GET /version HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", 400, "line end"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\n\n", 400, "line end"),
        (b"GET /version HTTP/1.1\r\nHost: x\rA: b\r\n\r\n", 400, "line end"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n", 400, "NUL"),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nA:" + b" " * 60_000 + b"\0\r\n\r\n", 400, "NUL"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431, "headers"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "line"),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            + GET,
            400,
            "both",
        ),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "HTTP/1.1"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400, ""),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, ""),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400, ""),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501, ""),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET /version HTTP/2.0\r\nHost: x\r\n\r\n", 505, "HTTP/1.1"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "HTTP/2.0"),
        (b"GET /version HTTP/0.9\r\nHost: x\r\n\r\n", 505, "HTTP/0.9"),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else None,
)
def test_what_is_no_strict_http_is_refused(
    live: Live, request_bytes: bytes, status: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(live) as client:
        client.sendall(request_bytes)
        got_status, error = one_answer(rest(client))
    assert not caplog.records
    assert got_status == status
    assert error["code"] == "invalid_http"
    assert reason in error["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"5\nabcde\r\n0\r\n\r\n", 400),
        (b"5;" + b" " * 100_000 + b"\n\r\nabcde\r\n0\r\n\r\n", 400),
        (b"5\r\nabcdefgh\r\n0\r\n\r\n", 400),
        (b"x\r\n", 400),
        (b"1\r\na\r\n" * (MAX_CHUNKS + 1), 413),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else None,
)
def test_a_malformed_chunked_body_is_refused(live: Live, body: bytes, status: int) -> None:
    with connected(live) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body
        )
        assert one_answer(rest(client))[0] == status


def test_an_answer_that_has_been_given_is_not_followed_by_another(live: Live) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(live) as client:
        client.sendall(head)
        received = client.recv(2**16)
        client.sendall(b"no chunk\r\n")
        received += rest(client)
    assert received.startswith(b"HTTP/1.1 404")
    assert received.count(b"HTTP/1.1") == 1


def test_a_stream_is_not_followed_by_plain_text() -> None:
    """A body that turns out malformed while an answer runs ends the connection, and nothing more."""
    llm = scripted_llm("a b c ", step_s=0.01)
    body = json.dumps({"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}).encode()
    with serving(llm, **limits()) as live, connected(live) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        client.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        received = client.recv(2**16)
        client.sendall(b"\n\n\n no HTTP at all")
        received += rest(client)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in received
    assert received.count(b"HTTP/1.1") == 2  # the second request's own answer, after the first one's end
    assert one_answer(received[received.rindex(b"HTTP/1.1") :])[0] == 400


def heads(rng: random.Random) -> bytes:
    """A valid request with headers of odd spaces and bytes."""
    values = [b"", b" ", b"a", b"a  b", b"\t", b"\x80\xff", b"x" * 50, b",,", b"close"]
    lines = [
        b"A%d:" % number + b" " * rng.randrange(3) + rng.choice(values) for number in range(rng.randrange(5))
    ]
    body = bytes(rng.choices(b"\r\n\0abc", k=rng.randrange(10)))
    chunked = rng.random() < 0.5
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    sent = b"%x;ext\r\n%s\r\n0\r\nT: 1\r\n\r\n" % (len(body), body) if chunked and body else body
    if chunked and not body:
        sent = b"0\r\n\r\n"
    return b"\r\n".join([b"POST /a?b HTTP/1.1", b"Host: x", *lines, length, b"", b""]) + sent


def events(connection: h11.Connection, pieces: list[bytes]) -> list[tuple[str, Any]]:
    """Kinds and contents of what a connection reads; data is joined, since pieces cut it anywhere."""
    found: list[tuple[str, Any]] = []
    data = b""
    for piece in pieces:
        connection.receive_data(piece)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Data):
                data += bytes(event.data)
            elif isinstance(event, h11.Request | h11.EndOfMessage):
                target = event.target if isinstance(event, h11.Request) else None
                found.append((type(event).__name__, (target, list(event.headers))))
    return [*found, ("Data", data)]


@pytest.mark.parametrize("num_requests", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_strict_http_is_read_as_h11_reads_it(num_requests: int) -> None:
    rng = random.Random(7)
    for _ in range(num_requests):
        request = heads(rng)
        cuts = sorted(rng.choices(range(len(request) + 1), k=rng.randrange(6)))
        pieces = [request[a:b] for a, b in zip([0, *cuts], [*cuts, len(request)], strict=True) if a < b]
        assert events(StrictConnection(), pieces) == events(h11.Connection(h11.SERVER), [request])


@pytest.mark.parametrize("byte", [b"\n", b"\r", b"\0", b"\v", b"\f"])
def test_no_line_of_a_head_holds_a_forbidden_byte(byte: bytes) -> None:
    request = b"GET /version HTTP/1.1\r\nHost: x\r\nA: b\r\n\r\n"
    for place in range(1, len(request) - 1):
        connection = StrictConnection()
        connection.receive_data(request[:place] + byte + request[place:])
        if byte in b"\r\n" and request[place - 1 : place + 1] == b"\r\n":
            continue  # a CR before CRLF or an LF after it may stand at the edge of a line; others are tested
        with pytest.raises(h11.RemoteProtocolError):
            connection.next_event()


@pytest.mark.parametrize(
    ("start", "filler", "end"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\na:", b" ", b"\0\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: x\r\na:", b" ", b"\v\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: x\r\na:", b" b", b"\0\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: x\r\na:", b" ", b"\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: b", b"\r\n ", b"\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", b"a:\r\n", b"\r\n"),
        (b"GET ", b"/", b" \0\r\n\r\n"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;", b" ", b"\nx\r\n"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5", b" ", b"x\r\n"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"0", b"x\r\n"),
    ],
    ids=repr,
)
def test_reading_a_head_costs_linear_time(start: bytes, filler: bytes, end: bytes) -> None:
    """h11's own patterns backtrack: 256 KiB of spaces before a NUL would take it two minutes."""

    def seconds(size: int) -> float:
        connection = StrictConnection()
        connection.receive_data(start + filler * (size // len(filler)) + end)
        began = time.thread_time()
        with suppress(h11.RemoteProtocolError):
            while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
                pass
        return time.thread_time() - began

    small = min(seconds(2**11) for _ in range(5))
    assert min(seconds(2**15) for _ in range(3)) < 80 * max(small, 2e-5)


def test_a_connection_that_sends_nothing_is_closed() -> None:
    with serving(scripted_llm(), **limits(header_timeout_s=0.2)) as live, connected(live) as client:
        assert rest(client) == b""


def test_headers_that_come_byte_by_byte_are_answered_408() -> None:
    with serving(scripted_llm(), **limits(header_timeout_s=0.3)) as live, connected(live) as client:
        client.settimeout(0.02)
        received = b""
        for byte in b"GET /version HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 2000:
            with suppress(TimeoutError):
                client.sendall(bytes([byte]))
                if received := client.recv(2**16):
                    break
        client.settimeout(PATIENCE_S)
        status, error = one_answer(received + rest(client))
    assert status == 408
    assert "server.header_timeout_s" in error["message"]


def test_the_limit_for_headers_holds_for_the_next_request_too() -> None:
    with serving(scripted_llm(), **limits(header_timeout_s=0.3)) as live, connected(live) as client:
        client.sendall(GET)
        assert client.recv(2**16).startswith(b"HTTP/1.1 200")
        time.sleep(0.6)  # idle between requests is no slow header
        client.sendall(GET[:10])
        assert one_answer(rest(client))[0] == 408


def test_a_body_that_does_not_arrive_is_answered_408() -> None:
    llm = scripted_llm()
    with serving(llm, **limits(), body_timeout_s=0.3) as live, connected(live) as client:
        client.sendall(HEAD + b'{"prompt"')
        status, error = one_answer(rest(client))
        assert live.http.get("/health").status_code == 200
    assert status == 408
    assert "server.body_timeout_s" in error["message"]


def test_the_rest_of_a_body_that_nobody_reads_is_not_awaited_for_ever() -> None:
    head = HEAD.replace(b"/v1/completions", b"/nowhere")
    with serving(scripted_llm(), **limits(header_timeout_s=0.3)) as live, connected(live) as client:
        client.sendall(head + b"a")
        received = client.recv(2**16)
        client.sendall(b"a")
        received += rest(client)
    assert received.startswith(b"HTTP/1.1 404")


def test_an_idle_connection_is_closed() -> None:
    with serving(scripted_llm(), **limits(keep_alive_timeout_s=0.2)) as live, connected(live) as client:
        client.sendall(GET)
        received = rest(client)
        assert received.count(b"HTTP/1.1 200") == 1
        with connected(live) as other:  # also where the body of the request before was not read
            other.sendall(HEAD.replace(b"/v1/completions", b"/nowhere"))
            received = other.recv(2**16)
            other.sendall(b"a" * 100)
            received += rest(other)
        assert received.count(b"HTTP/1.1 404") == 1


def test_a_slow_but_steady_client_is_served() -> None:
    body = json.dumps({"prompt": "x"}).ljust(100).encode()
    with (
        serving(scripted_llm(), **limits(header_timeout_s=9), body_timeout_s=9) as live,
        connected(live) as client,
    ):
        for piece in (HEAD[:20], HEAD[20:], body[:50], body[50:]):
            client.sendall(piece)
            time.sleep(0.1)
        assert client.recv(2**16).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    llm = scripted_llm("a b c d e f ", max_model_len=10**6)
    engine = llm._engine
    assert isinstance(engine, ScriptedEngine)
    body = {"prompt": "x", "max_tokens": 10**5, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 8}
    content = json.dumps(body).encode()
    with serving(llm, **limits(send_timeout_s=0.3)) as live, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(live.address)
        client.sendall(HEAD.replace(b"100", b"%d" % len(content)) + content)
        wait_until(lambda: bool(engine.added))
        wait_until(lambda: not live.server.server_state.connections, timeout_s=60)
        wait_until(lambda: not engine.running)


def test_connections_beyond_the_limit_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(scripted_llm(), **limits(max_connections=4)) as live,
        ExitStack() as clients,
    ):
        idle = [clients.enter_context(connected(live)) for _ in range(4)]
        wait_until(lambda: len(live.server.server_state.connections) == 4)
        for _ in range(20):
            with connected(live) as client:
                client.sendall(GET)
                status, error = one_answer(rest(client))
                assert (status, error["code"]) == (503, "too_many_connections")
                assert "server.max_connections" in error["message"]
        idle[0].close()
        wait_until(lambda: len(live.server.server_state.connections) < 4)
        assert live.http.get("/version").status_code == 200
    assert caplog.text.count("refused a connection") == 1


def test_a_client_that_leaves_during_its_upload_is_no_error(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "sagellm.serving"):
        for _ in range(20):
            with connected(live) as client:
                client.sendall(HEAD + b"abc")
        wait_until(lambda: caplog.text.count("left during its upload") == 20)
    assert not [one for one in caplog.records if one.levelno > logging.DEBUG or one.exc_info]


def test_what_is_refused_before_the_application_is_counted() -> None:
    with serving(scripted_llm(), **limits()) as live:
        for _ in range(3):
            with connected(live) as client:
                client.sendall(b"no HTTP\r\n\r\n")
                assert one_answer(rest(client))[0] == 400
        assert live.metric("sagellm_http_requests_total", status="400") == 3


def test_a_line_that_would_repeat_is_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    lines = RateLimitedLog(10.0, clock)
    for _ in range(1000):
        lines.warning("full")
    clock.advance(10.0)
    lines.warning("full")
    first, second = [record.message for record in caplog.records]
    assert first == "full"
    assert "1000 times" in second


FEW_DESCRIPTORS = """
import resource, sys
from sagellm.core.config import ServerConfig
from sagellm.serving import serve
from tests.scripted_engine import scripted_llm
resource.setrlimit(resource.RLIMIT_NOFILE, (140, 140))
serve(scripted_llm(), ServerConfig(port=int(sys.argv[1])), log_level="warning")
"""


def test_out_of_descriptors_the_log_gets_one_line_and_the_server_recovers(tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "log"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with log.open("w") as out, ExitStack() as clients:
        process = subprocess.Popen(
            [sys.executable, "-c", FEW_DESCRIPTORS, str(port)], env=environment, stderr=out
        )
        try:
            wait_until(lambda: is_open(port))
            for _ in range(400):
                clients.enter_context(socket.create_connection((LOCALHOST, port), timeout=PATIENCE_S))
            wait_until(lambda: "cannot accept" in log.read_text())
            clients.close()
            wait_until(lambda: version_of(port).startswith(b"HTTP/1.1 200"))
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE_S)
    text = log.read_text()
    assert "Traceback" not in text
    assert len(re.findall("cannot accept connections", text)) == 1
    assert len(text) < 2000


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection((LOCALHOST, port), timeout=1):
        return True
    return False


def version_of(port: int) -> bytes:
    with suppress(OSError), socket.create_connection((LOCALHOST, port), timeout=1) as client:
        client.sendall(GET)
        return client.recv(2**16)
    return b""
