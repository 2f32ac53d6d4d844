"""Tiers behind the native engine: a prompt that was evicted comes back, and its tokens are the same."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.blocks import Tier
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.eviction import Extent
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.engine import Engine
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from tests.builders import split_loads
from tests.tiny_models import save_tiny

BLOCK, NUM_BLOCKS, LENGTH = 4, 20, 61
KINDS = ["llama", "mixtral", "deepseek2-lite", "gemma3"]


@pytest.fixture(params=[("host_gb", None), ("disk_gb", None)], ids=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    name, _ = request.param
    return {f"kv.{name}": 0.05, **({"kv.dir": str(tmp_path / "kv")} if name == "disk_gb" else {})}


def engine(folder: Path, **settings: Any) -> Engine:
    given = {
        "model.name": str(folder), "model.dtype": "float32", "kv.block_size": BLOCK,
        "kv.num_blocks": NUM_BLOCKS, "engine.threads": 1, **settings,
    }  # fmt: skip
    made = build_engine(load_config(cli=given, environ={}).config)
    if made.kv.tiers is not None:
        hierarchy(made)._costs = Costly()
    return made


def prompts(seed: int = 0, count: int = 4) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 90) for _ in range(LENGTH)] for _ in range(count)]


def ask(asked: Engine, name: str, prompt: list[int]) -> tuple[list[int], int]:
    """The greedy tokens, and how many tokens of the prompt were reused."""
    asked.add(Request(name, Tokens(prompt), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
    drawn: list[int] = []
    num_cached = 0
    while asked.has_work():
        for output in asked.step():
            drawn += output.new_token_ids
            num_cached = max(num_cached, output.num_cached_tokens or 0)
            assert output.error is None
        asked.check()
    return drawn, num_cached


class Costly:
    """Computing takes longer than any load: these models are so small that it would not."""

    def recompute_s(self, extent: Extent) -> float:
        return 1e9

    def transfer_s(self, extent: Extent, tier: str) -> float:
        return 0.0


def hierarchy(asked: Engine) -> HierarchyManager:
    assert isinstance(asked.kv.tiers, HierarchyManager)
    return asked.kv.tiers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_the_same_tokens_after_eviction(
    tmp_path: Path, kind: str, overlap: bool, tier: dict[str, Any]
) -> None:
    save_tiny(tmp_path / "model", kind)
    alone = engine(tmp_path / "model")
    expected = [ask(alone, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    alone.close()
    tiered = engine(tmp_path / "model", **tier, **{"engine.overlap": overlap})
    for round_ in range(3):
        for i, prompt in enumerate(prompts()):
            drawn, num_cached = ask(tiered, f"{round_}-{i}", prompt)
            assert drawn == expected[i]
            assert num_cached == (0 if not round_ else LENGTH // BLOCK * BLOCK)
    [state] = hierarchy(tiered).states()
    assert state.loaded > 60
    assert not state.misses
    tiered.close()


@pytest.mark.parametrize("kind", ["llama", "deepseek2-lite"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_the_same_tokens_where_the_head_is_computed_and_the_tail_loaded(
    tmp_path: Path, kind: str, overlap: bool, tier: dict[str, Any]
) -> None:
    save_tiny(tmp_path / "model", kind)
    alone = engine(tmp_path / "model")
    expected = [ask(alone, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts(count=2))]
    alone.close()
    room = {"kv.num_blocks": 40, "scheduler.max_batched_tokens": 16, "scheduler.max_num_seqs": 4}
    tiered = engine(tmp_path / "model", **tier, **room, **{"engine.overlap": overlap})
    assert [ask(tiered, f"0-{i}", prompt)[0] for i, prompt in enumerate(prompts(count=2))] == expected
    tiered.clear_cache()
    split_loads(tiered.kv)
    for i, prompt in enumerate(prompts(count=2)):
        drawn, num_cached = ask(tiered, f"1-{i}", prompt)
        assert drawn == expected[i]
        assert 0 < num_cached < LENGTH // BLOCK * BLOCK
    assert tiered._kv_waits is not None
    assert tiered._kv_waits.num_tails == 2
    tiered.close()


def test_a_restart_hits_and_other_weights_miss(tmp_path: Path) -> None:
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv")}
    save_tiny(tmp_path / "model", "llama")
    first = engine(tmp_path / "model", **disk)
    expected = [ask(first, f"r{i}", prompt) for i, prompt in enumerate(prompts())]
    first.close()
    again = engine(tmp_path / "model", **disk)
    for i, prompt in enumerate(prompts()):
        assert ask(again, f"r{i}", prompt) == (expected[i][0], LENGTH // BLOCK * BLOCK)
    again.close()
    save_tiny(tmp_path / "other", "llama", seed=1)
    other = engine(tmp_path / "other", **disk)
    assert [ask(other, f"r{i}", prompt)[1] for i, prompt in enumerate(prompts())] == [0] * 4
    other.close()


@pytest.mark.parametrize("codec", ["zstd", "int8"])
def test_codecs_on_the_way_down(tmp_path: Path, codec: str) -> None:
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv"), "kv.codec": codec}
    save_tiny(tmp_path / "model", "llama")
    tiered = engine(tmp_path / "model", **disk)
    expected = [ask(tiered, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    again = [ask(tiered, f"again {i}", prompt) for i, prompt in enumerate(prompts())]
    assert [num_cached for _, num_cached in again] == [LENGTH // BLOCK * BLOCK] * 4
    if codec == "zstd":
        assert [drawn for drawn, _ in again] == expected
    [state] = hierarchy(tiered).states()
    assert not state.misses
    tiered.close()


def test_damaged_bytes_on_disk_are_computed_again(tmp_path: Path) -> None:
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv")}
    save_tiny(tmp_path / "model", "llama")
    first = engine(tmp_path / "model", **disk)
    expected = [ask(first, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    first.close()
    [slab] = [path for path in (tmp_path / "kv").iterdir() if path.stat().st_size > 1 << 20]
    data = bytearray(slab.read_bytes())
    for offset in range(1 << 13, 1 << 20, 1 << 13):
        data[offset] ^= 1
    slab.write_bytes(data)
    again = engine(tmp_path / "model", **disk)
    for i, prompt in enumerate(prompts()):
        assert ask(again, f"r{i}", prompt)[0] == expected[i]
    [state] = hierarchy(again).states()
    assert state.misses.keys() <= {"corrupt", "absent"}
    assert state.misses["corrupt"] > 0
    again.close()


def test_both_tiers_and_their_counts(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    disk = {"kv.disk_gb": 0.05, "kv.dir": str(tmp_path / "kv")}
    probe = engine(tmp_path / "model")
    block_gb = probe.backend.get_kv_schema().bytes_per_block / 2**30
    probe.close()
    tiered = engine(tmp_path / "model", **disk, **{"kv.host_gb": 24.5 * block_gb})
    for round_ in range(2):
        for i, prompt in enumerate(prompts(count=6)):
            ask(tiered, f"{round_}-{i}", prompt)
    host, nvme = tiered.diagnostics().tiers
    assert (host.tier, nvme.tier) == (Tier.DRAM, Tier.NVME)
    assert host.total == 24
    assert nvme.loaded > host.loaded
    assert host.evicted > 0
    assert tiered.stats().tier_faults == []
    tiered.close()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or not shutil.which("mount") or os.system(f"mount -t tmpfs -o size=3m tmpfs {folder}"):
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    os.system(f"umount -l {folder}")


def test_a_full_disk_is_said_once_and_served_around(
    tmp_path: Path, full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path / "model", "llama")
    tiered = engine(tmp_path / "model", **{"kv.disk_gb": 0.05, "kv.dir": str(full_disk / "kv")})
    for i, prompt in enumerate(prompts(count=40)):
        ask(tiered, f"r{i}", prompt)
    faults = tiered.stats().tier_faults
    assert len(faults) <= 1
    assert caplog.text.count("the disk tier is off") == len(faults)
    tiered.close()


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mistral-window", {"kv.host_gb": 1.0}, "sliding windows"),
        ("qwen3-next", {"kv.host_gb": 1.0}, "recurrent states"),
        ("llama", {"kv.host_gb": 1.0, "kv.prefix_caching": False}, "nothing to keep"),
        ("llama", {"kv.host_gb": 1e-9}, "hold no block"),
        ("llama", {"kv.disk_gb": 1.0}, "set kv.dir"),
        ("llama", {"kv.disk_gb": 1.0, "kv.dir": "kv", "kv.codec": "zip"}, "zstd"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str
) -> None:
    save_tiny(tmp_path, kind)
    with pytest.raises((ConfigError, UnknownNameError), match=reason):
        engine(tmp_path, **settings)
