"""`sagellm vllm serve`: a real vLLM server on a CPU with our policy and passes, under parallel requests."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from sagellm.benchmarks.engine.shapes import shape_named, write_model
from tests.serving.live import free_port

pytestmark = [
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU build"),
]
NUM_REQUESTS = 150


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[tuple[str, Path]]:
    """A server of a tiny model; gives its address and the file of its log."""
    write_model(shape_named("tiny"), folder)
    port, log = free_port(), folder / "server.log"
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    try:
        version("vllm")
    except (
        PackageNotFoundError
    ):  # a rebuild for CPUs under another name, which vLLM's own command does not find
        record = folder / "names" / "vllm-0.32.0.dist-info" / "METADATA"
        record.parent.mkdir(parents=True)
        record.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        settings["PYTHONPATH"] = os.pathsep.join([str(folder / "names"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "sagellm", "vllm", "serve", str(folder), "--skip-tokenizer-init"]
    command += ["--enforce-eager", "--port", str(port), "--block-size", "32", "--max-model-len", "1024"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--num-gpu-blocks-override", "60", *flags],
            env=os.environ | settings, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(240):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield url, log
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def ask(url: str, model: Path, prompt: list[int], tenant: str) -> int:
    """Complete a prompt; returns the number of new tokens."""
    body = {"model": str(model), "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    body["vllm_xargs"] = {"sage_tenant": tenant}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


@pytest.mark.parametrize(
    ("flags", "order"),
    [((), "vLLM's own"), (("--sage-mode", "on", "--sage-strategy", "fair"), "adaptive")],
    ids=["shadow", "on"],
)
def test_parallel_sessions_are_served(tmp_path: Path, flags: tuple[str, ...], order: str) -> None:
    rng = random.Random(0)
    sessions = [[5 + i] * 96 for i in range(20)]
    prompts = []
    for _ in range(NUM_REQUESTS):
        session = rng.choice(sessions)
        session += [rng.randrange(10, 200) for _ in range(20)]
        prompts.append(list(session))
    with server(tmp_path, *flags, "--sage-report-s", "0.5") as (url, log), ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(ask, url, tmp_path, prompt, f"t{i % 3}") for i, prompt in enumerate(prompts)]
        assert [job.result() for job in jobs] == [8] * NUM_REQUESTS
        text = log.read_text()
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
    assert f"order of eviction: {order};" in text
    assert "vLLM evicts in its own order" not in text
    assert "EngineDeadError" not in text
    for name in ("sagellm_prompt_blocks", "sagellm_reused_blocks", "sagellm_kv_misses"):
        found = re.findall(rf"^{name}_total\{{.*\}} ([0-9.]+)$", metrics, re.MULTILINE)
        assert sum(map(float, found)) > 0, name
