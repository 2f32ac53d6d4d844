"""`kv.remote_url` in a fleet file: all instances share one store, so a prefix of one is found by another."""

from __future__ import annotations

import random
import time
from pathlib import Path

import httpx2
import pytest

from tests.redis_server import running_redis
from tests.serving.fleet_processes import Fleet, running_fleet

ADMIN = {"Authorization": "Bearer an admin key"}
PROMPT = random.Random(1).choices(range(1, 400), k=1500)
WITHIN_S = 60.0


def operate(fleet: Fleet, path: str, name: str) -> None:
    url = f"{fleet.url}/v1/admin/fleet/{path}"
    httpx2.post(url, json={"name": name}, headers=ADMIN, timeout=60).raise_for_status()


def blocks(fleet: Fleet, what: str) -> float:
    """Blocks that all instances together have stored in tiers, or loaded from there."""
    lines = fleet.client.get(f"{fleet.url}/metrics", timeout=20.0).text.splitlines()
    name = f"sagellm_kv_tier_{what}_blocks_total"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.slow  # two instances that load torch
def test_a_prefix_of_one_instance_is_loaded_by_another(tmp_path: Path) -> None:
    with running_redis(tmp_path) as path:
        file = tmp_path / "fleet.yaml"
        file.write_text(
            f"kv: {{remote_url: 'unix://{path}', remote_gb: 0.05, num_blocks: 300}}\n"
            "server: {admin_key: an admin key}\n"
            "fleet: {groups: {a: {count: 2, chips: 0, cores: 1}}}\n",
            encoding="utf-8",
        )
        with running_fleet("--config", str(file)) as fleet:
            fleet.wait_until_healthy(WITHIN_S)
            operate(fleet, "drain", "a-1")
            first = fleet.complete(PROMPT, 8)
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            until_s = time.monotonic() + WITHIN_S
            while blocks(fleet, "stored") < len(PROMPT) // 16:
                assert time.monotonic() < until_s, "a-0 has not stored what it has computed"
                time.sleep(0.05)
            operate(fleet, "resume", "a-1")
            operate(fleet, "drain", "a-0")
            second = fleet.complete(PROMPT, 8)
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert blocks(fleet, "loaded") > 0
            assert second["choices"][0]["text"] == first["choices"][0]["text"]
