"""`watch` beside real servers: "now" is their own count, and double memory is what they hit with it.

vLLM runs in an environment of its own, which `SAGELLM_PEER_VLLM` names; it has to have vLLM's CPU build.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from sagellm.control_plane.kv_events.publisher import WallClock
from sagellm.diagnostics.watch.endpoints import ServerAddress
from sagellm.diagnostics.watch.report import WatchReport
from sagellm.diagnostics.watch.watcher import Watcher
from sagellm.engines.native import DEMO_MODEL
from tests.serving.live import LOCALHOST, free_port, wait_until
from tests.serving.test_lifecycle import answers

Prompts: TypeAlias = list[list[int]]
Start: TypeAlias = Callable[[int], AbstractContextManager[tuple[str, str]]]
"""Starts a server of so many KV blocks; gives its URL and the endpoint of its events."""


def conversations(count: int, seed: int) -> Prompts:
    """Prompts of 60 conversations that grow, begin again, and share four system prompts."""
    draw = random.Random(seed)

    def text(length: int) -> list[int]:
        return [draw.randrange(20, 700) for _ in range(length)]

    def begun() -> list[int]:
        return systems[draw.randrange(4)] + text(draw.randrange(16, 80))

    systems = [text(96) for _ in range(4)]
    open_ones, prompts = [begun() for _ in range(60)], []
    for _ in range(count):
        which = min(int(draw.expovariate(1 / 14)), 59)
        longer = open_ones[which] + text(draw.randrange(8, 40))
        open_ones[which] = longer if len(longer) < 440 else begun()
        prompts.append(open_ones[which])
    return prompts


def ask_all(url: str, prompts: Prompts) -> float:
    """Sends them four at a time; returns the share of their tokens that was cached."""
    with httpx.Client(base_url=url, timeout=120) as http, ThreadPoolExecutor(4) as pool:
        model = http.get("/v1/models").json()["data"][0]["id"]

        def ask(prompt: list[int]) -> int:
            body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body).raise_for_status().json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)

        return sum(pool.map(ask, prompts)) / sum(map(len, prompts))


def watched(start: Start, num_blocks: int, prompts: Prompts) -> tuple[WatchReport, float]:
    with start(num_blocks) as (url, events):
        watcher = Watcher([ServerAddress.parse(f"{events},{url}")], wall_clock=WallClock())
        cached = ask_all(url, prompts)
        watcher.close()
        return watcher.report(with_replays=False), cached


def check_forecast(start: Start, num_blocks: int, count: int) -> None:
    prompts = conversations(count, seed=7)
    report, cached = watched(start, num_blocks, prompts)
    _, cached_with_double = watched(start, 2 * num_blocks, prompts)
    ratios = {(rung.policy, rung.capacity): rung.hit_ratio for rung in report.ladder}
    assert ratios["server", 1.0] == pytest.approx(cached, abs=0.005)
    assert cached_with_double > cached + 0.02
    assert ratios["lru", 2.0] == pytest.approx(cached_with_double, abs=0.02)


@contextmanager
def running(command: list[str], port: int, environment: Mapping[str, str]) -> Iterator[str]:
    """A server in a process; gives its URL once it is ready."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=os.environ | environment, **quiet) as process:
        try:
            url = f"http://{LOCALHOST}:{port}"
            wait_until(lambda: process.poll() is not None or answers(f"{url}/health"), timeout_s=240)
            assert process.poll() is None, f"{command[:3]} has ended"
            yield url
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def our_server(num_blocks: int) -> Iterator[tuple[str, str]]:
    port, events = free_port(), f"tcp://{LOCALHOST}:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "sagellm",
        "serve",
        "--port",
        str(port),
        "--set",
        f"events.endpoint={events}",
    ]
    command += ["--set", f"kv.num_blocks={num_blocks}", "--set", "kv.eviction=lru"]
    with running(command, port, {}) as url:
        yield url, events


@contextmanager
def vllm_server(python: str, num_blocks: int) -> Iterator[tuple[str, str]]:
    port, events_port = free_port(), free_port()
    publish = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events_port}"}
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL)]
    command += ["--port", str(port), "--block-size", "32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--enable-prompt-tokens-details", "--num-gpu-blocks-override", str(num_blocks)]
    command += ["--kv-events-config", json.dumps(publish)]
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with running(command, port, {**small, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}) as url:
        yield url, f"tcp://{LOCALHOST}:{events_port}"


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [200, 320, 480])
def test_our_server(num_blocks: int) -> None:
    check_forecast(our_server, num_blocks, count=500)


@pytest.mark.peer
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_blocks", [100, 160, 240])
def test_vllm(num_blocks: int) -> None:
    python = os.environ.get("SAGELLM_PEER_VLLM")
    if python is None or not Path(python).exists():
        pytest.skip("SAGELLM_PEER_VLLM names no interpreter")
    check_forecast(lambda blocks: vllm_server(python, blocks), num_blocks, count=500)
