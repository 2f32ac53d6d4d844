"""Failure of the engine loop, shutdown with streams in flight, and the server as a process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from sagellm.core.errors import BookkeepingError
from sagellm.engines.llm import LLM
from sagellm.serving.server import SageServer
from tests.scripted_engine import ScriptedEngine, scripted_llm
from tests.serving.live import LOCALHOST, Live, free_port, serving, wait_until

ROOT = Path(__file__).parents[2]
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}


def slow_llm() -> tuple[LLM, ScriptedEngine]:
    llm = scripted_llm("a b c d e f ", step_s=0.01)
    engine = llm._engine
    assert isinstance(engine, ScriptedEngine)
    return llm, engine


@contextmanager
def open_stream(live: Live) -> Iterator[Iterator[str]]:
    """The data lines of a long stream that has begun."""
    with live.http.stream("POST", "/v1/completions", json=BODY) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        yield lines


def test_a_failed_loop_ends_streams_and_turns_health_to_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SageServer, "on_tick", uvicorn.Server.on_tick)  # which does not end the server
    llm, engine = slow_llm()
    with serving(llm) as live:
        with open_stream(live) as lines:
            engine.fail_next = BookkeepingError("the books do not balance")
            *_, last = lines
        error = json.loads(last)["error"]
        assert "the books do not balance" in error["message"]
        assert live.http.get("/health").status_code == 503
        assert live.http.get("/ready").status_code == 503
        response = live.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        assert "the books do not balance" in response.json()["error"]["message"]
        assert live.http.get("/metrics").status_code == 200


def test_a_failed_engine_ends_the_server() -> None:
    llm, engine = slow_llm()
    with serving(llm) as live, open_stream(live) as lines:
        engine.fail_next = BookkeepingError("the books do not balance")
        *_, last = lines
        live.thread.join(10)
        assert not live.thread.is_alive()
    assert "the books do not balance" in json.loads(last)["error"]["message"]


def test_the_client_library_raises_what_ends_a_stream() -> None:
    llm, engine = slow_llm()
    with serving(llm) as live, live.openai() as client:
        options: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(model="toy", stream=True, **options)
        next(stream)
        engine.fail_next = BookkeepingError("broken")
        with pytest.raises(openai.APIError, match="broken"):
            list(stream)


def test_a_request_may_end_during_the_grace_period() -> None:
    llm, _ = slow_llm()
    body = BODY | {"max_tokens": 40}
    with (
        serving(llm, shutdown_grace_s=10) as live,
        live.http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        live.server.should_exit = True
        *_, last = lines
    assert last == "data: [DONE]"


def test_while_a_request_ends_new_ones_are_answered_503() -> None:
    llm, _ = slow_llm()
    with serving(llm, shutdown_grace_s=10) as live, httpx.Client(base_url=live.url, timeout=20) as other:
        body = BODY | {"max_tokens": 100}
        with live.http.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            live.server.should_exit = True
            wait_until(lambda: not live.gateway.ready)
            for _ in range(5):
                assert other.get("/ready").status_code == 503
                assert other.get("/health").status_code == 200
                refused = other.post("/v1/completions", json=BODY)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "service_unavailable"
                assert int(refused.headers["retry-after"]) > 0
                assert refused.headers["connection"] == "close"
            *_, last = lines
    assert last == "data: [DONE]"


def test_a_client_that_uploads_does_not_hold_the_shutdown() -> None:
    llm, _ = slow_llm()
    with serving(llm) as live, socket.create_connection(live.address, timeout=20) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        wait_until(lambda: bool(live.server.server_state.tasks))
        live.server.should_exit = True
        live.thread.join(10)
        assert not live.thread.is_alive()


def test_a_shutdown_ends_streams_in_bounded_time() -> None:
    llm, engine = slow_llm()
    with serving(llm, shutdown_grace_s=0.2) as live, open_stream(live) as lines:
        began = time.monotonic()
        live.server.should_exit = True
        *_, last = lines
        live.thread.join(10)
        assert time.monotonic() - began < 5
    assert "shutting down" in json.loads(last)["error"]["message"]
    assert not engine.running
    assert engine.closed


def test_a_step_that_hangs_does_not_hold_the_server() -> None:
    llm, engine = slow_llm()
    with serving(llm, shutdown_grace_s=0.1, stop_timeout_s=0.2) as live, open_stream(live) as lines:
        engine.step_s = 3.0
        time.sleep(0.1)
        live.server.should_exit = True
        *_, last = lines
        live.thread.join(2)
        assert not live.thread.is_alive()
        assert not live.gateway.stopped
    assert "shutting down" in json.loads(last)["error"]["message"]
    engine.step_s = 0.0
    wait_until(lambda: live.gateway.stopped)


RUNNING = r"(?m)^sagellm_requests_running\b.* 1\.0$"
SERVE = """
import sys, threading
from sagellm import cli
from sagellm.cli import serve
from tests.scripted_engine import scripted_llm

llm = scripted_llm("a b c ", step_s=0.01)

commands = {"fail": {"fail_next": ValueError("broken")}, "hang": {"step_s": 60.0}}

def obey():
    for line in sys.stdin:
        vars(llm._engine).update(commands[line.strip()])

threading.Thread(target=obey, daemon=True).start()
serve.load_llm = lambda *args, **options: llm
sys.argv = ["sagellm", "serve", "--port", sys.argv[1], "--set", f"server.shutdown_grace_s={sys.argv[2]}"]
cli.main()
"""


@dataclass
class Served:
    """`sagellm serve` in a process of its own, on a scripted engine."""

    process: subprocess.Popen[str]
    url: str

    @contextmanager
    def stream(self) -> Iterator[Iterator[str]]:
        with httpx.stream("POST", f"{self.url}/v1/completions", json=BODY, timeout=20) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            yield lines

    def command(self, text: str) -> None:
        """To the engine: `fail` or `hang` in the next step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Exit status and stderr."""
        _, errors = self.process.communicate(timeout=10)
        return self.process.returncode, errors


@contextmanager
def served(grace_s: float) -> Iterator[Served]:
    port = free_port()
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(port), str(grace_s)],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            url = f"http://{LOCALHOST}:{port}"
            wait_until(lambda: process.poll() is not None or answers(f"{url}/ready"), timeout_s=30)
            yield Served(process, url)
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_process_ends_cleanly_on_signals(number: signal.Signals) -> None:
    with served(grace_s=0.2) as server:
        with server.stream() as lines:
            server.process.send_signal(number)
            *_, last = lines
        assert "shutting down" in last
        status, errors = server.end()
    assert status == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize("step", ["usual", "hang"])
def test_a_second_ctrl_c_ends_the_process_at_once(step: str) -> None:
    with served(grace_s=1000) as server:
        with server.stream() as lines, suppress(httpx.RemoteProtocolError):
            if step == "hang":
                server.command("hang")
                time.sleep(0.1)
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: not answers(f"{server.url}/ready"))
            server.process.send_signal(signal.SIGINT)
            *_, last = lines
            assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        status, errors = server.end()
    assert status == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("sagellm: ended at once")
    assert len(errors.splitlines()) < 15


def test_a_whole_answer_that_is_cut_off_is_json() -> None:
    with served(grace_s=1000) as server, ThreadPoolExecutor() as pool:
        body = BODY | {"stream": False}
        answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=20)
        wait_until(lambda: re.search(RUNNING, httpx.get(f"{server.url}/metrics").text) is not None)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: not answers(f"{server.url}/ready"))
        server.process.send_signal(signal.SIGINT)
        response = answer.result(timeout=10)
        assert server.end()[0] == 130
    assert response.status_code == 503
    assert "shutting down" in response.json()["error"]["message"]


def test_a_failed_engine_ends_the_process_with_an_error() -> None:
    with served(grace_s=0.2) as server:
        with server.stream() as lines:
            server.command("fail")
            *_, last = lines
        assert "broken" in last
        status, errors = server.end()
    assert status == 2
    assert errors.splitlines()[-1] == "sagellm: the engine has failed, restart the server: broken"


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_a_client_that_does_not_read_is_cut_off() -> None:
    llm = scripted_llm("a b c d e f ", max_model_len=10**6)
    engine = llm._engine
    assert isinstance(engine, ScriptedEngine)
    body = json.dumps(BODY | {"max_tokens": 10**5, "logprobs": 20, "n": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving(llm) as live, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(live.address)
        client.sendall(head + body)
        wait_until(lambda: bool(engine.added))
        [entry] = live.gateway._open.values()
        wait_until(lambda: not engine.running, timeout_s=60)
        assert entry.generation._unread == []
        assert live.metric("sagellm_requests_total", finish_reason="abort") == 1
        received = b""
        client.settimeout(20)
        while not received.endswith(b"0\r\n\r\n"):
            received = (received + client.recv(2**16))[-4096:]
    assert b'"code":"slow_client"' in received
    assert b"[DONE]" not in received


def test_many_disconnects_leave_nothing() -> None:
    llm, engine = slow_llm()
    with serving(llm) as live:

        def leave() -> None:
            with open_stream(live):
                return

        threads = [threading.Thread(target=leave) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: not engine.running)
        wait_until(lambda: live.metric("sagellm_kv_blocks", state="active") == 0)
        assert live.metric("sagellm_requests_total", finish_reason="abort") == 20
