"""A server whose disk tier fails: the same answers, and the failure is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sagellm.core.blocks import Tier
from sagellm.engines.build import load
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.kv_pool.tiers.disk import DiskStorage
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from tests.kvmgr.tiers.storages.stored_blocks import FaultyIO
from tests.serving.live import Live, serving, wait_until

PROMPTS = ["".join(f"{first} + {more} = {first + more}, " for more in range(1, 9)) for first in range(1, 7)]
SMALL = {"kv.block_size": 4, "kv.num_blocks": 40}
"""Fewer blocks than three of these prompts have."""


def disk_of(llm: LLM) -> DiskStorage:
    engine = llm._engine
    assert isinstance(engine, Engine)
    tiers = engine.kv.tiers
    assert isinstance(tiers, HierarchyManager)
    tiers._costs = PrefillCostModel(4, seconds_per_token=1.0)  # loading is always worth it
    storage = tiers.tiers[0].storage
    assert isinstance(storage, DiskStorage)
    return storage


def answers(live: Live) -> list[str]:
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    found = [live.http.post("/v1/completions", json={"prompt": prompt, **body}) for prompt in PROMPTS]
    return [each.raise_for_status().json()["choices"][0]["text"] for each in found]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with serving(load(None, SMALL)) as live:
        return answers(live)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails(
    tmp_path: Path, expected: list[str], call: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = load(None, {**SMALL, "kv.disk_gb": 0.01, "kv.dir": str(tmp_path / "kv")})
    storage, io = disk_of(llm), FaultyIO()
    storage._slab._io = io
    with serving(llm) as live:
        if call == "preadv":
            assert answers(live) == expected
            wait_until(lambda: live.metric("sagellm_kv_tier_stored_blocks_total", tier="nvme") > 40)
            assert live.metric("sagellm_kv_tier_fault", tier="nvme") == 0
            assert live.http.get("/health").json() == {"status": "ok"}
        io.arm(0)
        assert answers(live) == expected
        wait_until(lambda: live.metric("sagellm_kv_tier_fault", tier="nvme") == 1)
        health = live.http.get("/health")
        assert health.status_code == 200
        [fault] = health.json()["kv_tier_faults"]
        doing = "write" if call == "pwritev" else "read"
        assert fault.startswith(f"{Tier.NVME}: {doing} in {tmp_path / 'kv'}")
        assert "Input/output error" in fault
        assert answers(live) == expected
        if call == "preadv":
            assert live.metric("sagellm_kv_tier_misses_total", tier="nvme", cause="io_error") == 1
    said = [record.getMessage() for record in caplog.records if "tier" in record.getMessage()]
    assert said == [f"the disk tier is off: {storage.fault}"]
