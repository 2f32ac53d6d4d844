"""A server whose model is divided: however it stops, no rank is left, not even one that hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from sagellm.core.processes import child_environment
from sagellm.engines.build import load
from sagellm.engines.llm import LLM
from sagellm.serving import gateway
from tests.effort import usual
from tests.serving.live import LOCALHOST, PATIENCE_S, free_port, serving, wait_until
from tests.tiny_models import save_tiny
from tests.toy_tokenizers import byte_level

SETTINGS: dict[str, Any] = {
    "parallel.tensor": 2,
    "model.dtype": "float32",
    "kv.num_blocks": 64,
    "kv.block_size": 8,
    "engine.threads": 1,
}
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "ignore_eos": True, "stream": True}
SERVE = """
from sagellm import cli
from sagellm.cli import serve

load = serve.load_llm

def load_and_tell(*given, **options):
    llm = load(*given, **options)
    print(*llm.engine.backend._ranks._processes.pids, flush=True)
    return llm

serve.load_llm = load_and_tell
cli.main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    byte_level().save(str(folder / "tokenizer.json"))
    return folder


def rank_of(llm: LLM) -> int:
    """The process of the other rank."""
    engine: Any = llm.engine
    [pid] = engine.backend._ranks._processes.pids
    return int(pid)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextmanager
def open_stream(url: str) -> Iterator[Iterator[str]]:
    """The data lines of a stream that has begun."""
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=PATIENCE_S) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        yield lines


@pytest.mark.parametrize("overlap", usual({False}, [False, True]))
def test_a_rank_that_hangs_does_not_hold_the_server(
    model: Path, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "RANKS_END_S", 0.5)
    llm = load(str(model), SETTINGS | {"engine.overlap": overlap})
    pid = rank_of(llm)
    try:
        with (
            serving(llm, shutdown_grace_s=0.1, stop_timeout_s=0.3) as live,
            open_stream(live.url) as lines,
        ):
            os.kill(pid, signal.SIGSTOP)
            live.server.should_exit = True
            *_, last = lines
            live.thread.join(PATIENCE_S)
            assert not live.thread.is_alive()
            assert not is_there(pid)
            wait_until(lambda: live.gateway.stopped)
            assert live.gateway.failure is None
        assert "shutting down" in json.loads(last)["error"]["message"]
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_second_ctrl_c_leaves_no_rank_that_hangs(model: Path) -> None:
    url = f"http://{LOCALHOST}:{(port := free_port())}"
    given = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", str(model), f"--port={port}", *given],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pid = 0
    with process:
        try:
            pid = int(process.stdout.readline())
            wait_until(lambda: process.poll() is not None or is_ready(url))
            with open_stream(url) as lines, suppress(httpx.RemoteProtocolError):
                os.kill(pid, signal.SIGSTOP)
                process.send_signal(signal.SIGINT)
                wait_until(lambda: not is_ready(url))
                process.send_signal(signal.SIGINT)
                list(lines)
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert not is_there(pid)
        finally:
            process.kill()
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "Traceback" not in errors


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
