"""Failure of the engine loop, shutdown with streams in flight, and the server as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sagellm.core.errors import BookkeepingError
from sagellm.engines.llm import LLM
from tests.scripted_engine import ScriptedEngine, scripted_llm
from tests.serving.live import LOCALHOST, Live, serving, wait_until

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


def test_a_failed_loop_ends_streams_and_turns_health_to_503() -> None:
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
    with serving(llm, grace_s=10) as live, live.http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        live.server.should_exit = True
        *_, last = lines
    assert last == "data: [DONE]"


def test_a_shutdown_ends_streams_in_bounded_time() -> None:
    llm, engine = slow_llm()
    with serving(llm, grace_s=0.2) as live, open_stream(live) as lines:
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
    with serving(llm, grace_s=0.1, stop_timeout_s=0.2) as live, open_stream(live) as lines:
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


SERVE = """
import sys
from sagellm.serving import serve
from tests.scripted_engine import scripted_llm
serve(scripted_llm("a b c ", step_s=0.01), port=int(sys.argv[1]), grace_s=0.2, log_level="warning")
print("closed")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_process_ends_cleanly_on_signals(number: signal.Signals) -> None:
    port = free_port()
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(port)], env=environment, stdout=subprocess.PIPE, text=True
    )
    url = f"http://{LOCALHOST}:{port}"
    try:
        wait_until(lambda: answers(f"{url}/ready"), timeout_s=30)
        lines: list[str] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=20) as response:
            stream = response.iter_lines()
            next(stream)
            process.send_signal(number)
            lines += [line for line in stream if line]
        assert "shutting down" in lines[-1]
        output, _ = process.communicate(timeout=10)
        assert (process.returncode, output) == (0, "closed\n")
    finally:
        process.kill()
        process.wait()


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
        assert entry.generation._items == []
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
