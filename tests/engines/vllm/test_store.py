"""The store in vLLM's real scheduler: right KV, restarts, damage, failures."""

from __future__ import annotations

import errno
import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from sagellm.core.blocks import Tier
from sagellm.core.errors import SageError
from sagellm.engines.vllm.store import SageStoreConnector
from sagellm.engines.vllm.store_stats import StoreMetrics
from tests.engines.vllm.store_world import BLOCK_GB, SLOT_GB, World, conversations, store_config, write_folder

pytestmark = pytest.mark.peer
Made = Callable[..., World]
PROMPTS = [[100 + i] * 4 + list(range(1000 * i, 1000 * i + 36)) for i in range(8)]
"""Ten blocks each: eight of them are twice what forty blocks hold."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_folder(tmp_path / "model")


@pytest.fixture
def world(model: str, tmp_path: Path) -> Iterator[Made]:
    """Makes worlds, and closes those that are still open."""
    made: list[World] = []

    def make(host: int = 0, disk: int = 0, folder: str = model, **options: Any) -> World:
        settings: dict[str, Any] = {"policy": "lru"}
        if host:
            settings |= {"host_gb": host * BLOCK_GB}
        if disk:
            settings |= {"disk_gb": disk * SLOT_GB, "dir": str(tmp_path / "kv")}
        made.append(World(folder, store_config(**settings), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def fill(one: World) -> list[list[int]]:
    """Answers to all prompts, one after the other; each is saved before the next."""
    return [one.ask(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(("host", "disk"), [(200, 0), (0, 200), (200, 200), (30, 200)])
def test_what_was_evicted_comes_back(world: Made, model: str, host: int, disk: int) -> None:
    stock, one = World(model, None), world(host, disk)
    expected = fill(stock)
    assert fill(one) == expected
    assert (one.num_computed, stock.num_computed) == (8 * 42,) * 2
    assert fill(stock) == fill(one) == expected
    loaded = sum(
        one.counts(tier)["loaded"] for tier in (["dram"] if host else []) + (["nvme"] if disk else [])
    )
    assert loaded >= 60
    assert one.num_computed <= 8 * 42 + 8 * (42 - 36)
    assert stock.num_computed == 2 * 8 * 42
    one.check_idle()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("host", "disk"), [(150, 0), (25, 150)])
def test_conversations_at_the_same_time(
    world: Made, host: int, disk: int, seed: int, asynchronous: bool
) -> None:
    """Also with requests that are aborted at any moment, and a tier that damages what it holds."""
    one, rng = world(host, disk, num_blocks=60, asynchronous=asynchronous), random.Random(seed)
    for prompt in conversations(seed, 60):
        one.add(prompt, rng.randrange(1, 6))
        while len(one.engine.requests) > 3:
            one.step()
            if one.engine.requests and rng.random() < 0.1:
                one.abort(rng.choice(list(one.engine.requests)))
        if rng.random() < 0.2:
            damage_host(one, rng.randrange(host))
    one.run()
    one.check_idle()
    assert one.books is not None
    assert sum(tier.num_loaded for tier in one.books.tiers) > 0


def test_ranks_that_do_not_agree(world: Made) -> None:
    """A block is there if each rank has it; one of them damages what it holds."""
    one = world(host=400, disk=400, ranks=2)
    answers = fill(one)
    assert one.books is not None
    assert [tier.tier for tier in one.books.tiers] == [Tier.DRAM, Tier.NVME], "the nearest first"
    for slot in range(5, 80, 10):
        damage_host(one, slot, rank=1)
    assert fill(one) == answers
    assert one.counts("dram")["misses"]["other_tokens"] >= 4
    one.check_idle()
    one.close()
    second = world(disk=400, ranks=2)
    assert fill(second) == answers
    assert second.counts("nvme")["loaded"] == 8 * 9


def damage_host(one: World, slot: int, rank: int = 0) -> None:
    """The slot now has the hash of other tokens."""
    storage = one.storage(Tier.DRAM, rank)
    with storage._lock:
        if storage._hashes[slot] is not None:
            storage._hashes[slot] = bytes(32)


def test_a_restart_is_warm(world: Made) -> None:
    first = world(disk=200)
    answers = fill(first)
    first.close()
    second = world(host=200, disk=200)
    assert fill(second) == answers
    assert second.num_computed <= 8 * (42 - 36)
    assert second.counts("nvme")["loaded"] == 8 * 9


def test_other_weights_find_nothing(world: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = world(disk=200)
    fill(first)
    first.close()
    second = world(disk=200, folder=write_folder(tmp_path / "other", seed=1))
    fill(second)
    assert second.num_computed == 8 * 42
    assert "starts empty" in caplog.text


def test_a_damaged_block_is_computed_again(world: Made, tmp_path: Path) -> None:
    first = world(disk=200)
    answers = fill(first)
    first.close()
    (slab,) = (tmp_path / "kv").rglob("slab*")
    data = bytearray(slab.read_bytes())
    storage = first.storage(Tier.NVME)
    slot_bytes = storage._slab.slot_bytes
    for slot in (3, 17):
        data[slot * slot_bytes + 4096 + 5] ^= 1
    slab.write_bytes(data)
    second = world(disk=200)
    assert fill(second) == answers
    assert second.counts("nvme")["misses"] == {"corrupt": 2}
    assert 8 * 4 < second.num_computed < 8 * 4 + 2 * 42
    second.check_idle()
    third_before = second.num_computed
    assert fill(second) == answers  # the blocks were written anew
    assert second.counts("nvme")["misses"] == {"corrupt": 2}
    assert second.num_computed - third_before <= 8 * (42 - 36)


def test_a_disk_that_fails_is_left_alone(
    world: Made, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = world(disk=200)
    answers = fill(one)

    def fails(*arguments: Any) -> Any:
        raise OSError(errno.EIO, "no such luck")

    storage = one.storage(Tier.NVME)
    monkeypatch.setattr(storage._slab, "read", fails)
    assert fill(one) == answers
    assert "the disk tier is off" in caplog.text
    assert "no such luck" in one.counts("nvme")["fault"]
    assert fill(one) == answers
    one.check_idle()


def test_salts_are_kept_apart(world: Made) -> None:
    one = world(host=200)
    for salt in ("a", "b"):
        one.ask(PROMPTS[0], salt=salt)
    assert one.num_computed == 2 * 42
    assert one.counts("dram")["stored"] == 2 * 10


def test_a_reset_empties_the_store(world: Made) -> None:
    one = world(host=200)
    fill(one)
    assert one.engine.reset_prefix_cache(reset_connector=True)
    assert one.counts("dram")["cached"] == 0
    fill(one)
    assert one.num_computed == 2 * 8 * 42


def test_a_slow_tier_is_not_read(world: Made) -> None:
    """Loading has to be faster than prefill, once both are known."""
    one = world(host=200)
    fill(one)
    assert one.books is not None
    one.books._speed.token_s, one.books._speed.bytes_per_s = 1e-9, {Tier.DRAM: 1e3}
    fill(one)
    assert one.counts("dram")["loaded"] == 0
    one.books._speed.token_s = 1.0
    fill(one)
    assert one.counts("dram")["loaded"] > 0


def test_beside_our_eviction_policy(world: Made, model: str) -> None:
    """As `sagellm vllm serve --sage-mode on --sage-host-gb` composes them."""
    guide = {
        "kv_connector": "SageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"mode": "on"},
    }
    members = [guide, store_config(host_gb=60 * BLOCK_GB)]
    both = store_config(connectors=members) | {"kv_connector": "MultiConnector"}
    one, rng = World(model, both, num_blocks=60), random.Random(0)
    for prompt in conversations(0, 80):
        one.add(prompt, rng.randrange(1, 6))
        while len(one.engine.requests) > 2:
            one.step()
    one.run()
    one.check_idle()
    queue = one.engine.kv_cache_manager.block_pool.free_block_queue
    queue.check()
    assert queue.num_restarts == 0
    assert one.counts("dram")["loaded"] > 0
    one.close()


def test_what_saves_have_no_room_for_is_counted(world: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    one, goes_on = world(host=200), threading.Event()
    assert one.books is not None
    monkeypatch.setattr(one.books, "_most_held", 0)
    data = one.workers[0]._worker._data
    read_blocks = data.read_blocks

    def waits(block_ids: list[int], target: memoryview) -> None:
        assert goes_on.wait(60)
        read_blocks(block_ids, target)

    monkeypatch.setattr(data, "read_blocks", waits)
    names = [one.add(prompt, num_output=9) for prompt in PROMPTS[:3]]
    for _ in range(40):
        one.step()
    assert not set(names) & set(one.engine.requests), "their answers are complete"
    goes_on.set()
    one.run()
    counts = one.counts("dram")
    assert counts["dropped"] == 2 * 2, "the answers of the second and of the third"
    assert counts["stored"] == 3 * 10 + 2
    one.check_idle()


def test_counts_on_metrics(world: Made) -> None:
    one = world(host=60, disk=200)
    fill(one)
    fill(one)
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    shown = StoreMetrics(one.engine.vllm_config, kinds, ["engine"], {0: ["0"]})
    for data in one.counted:
        stats = SageStoreConnector.build_kv_connector_stats(data)
        shown.observe(stats.data)
    for tier in ("dram", "nvme"):
        counts, labels = one.counts(tier), {"engine": "0", "tier": tier}
        for name in ("stored", "loaded", "evicted", "dropped"):
            found = REGISTRY.get_sample_value(f"sagellm_kv_tier_{name}_blocks_total", labels)
            assert found == counts[name]
        assert REGISTRY.get_sample_value("sagellm_kv_tier_cached_blocks", labels) == counts["cached"]
    total = SageStoreConnector.build_kv_connector_stats()
    for data in one.counted:
        total = total.aggregate(SageStoreConnector.build_kv_connector_stats(data))
    assert total.reduce()["nvme stored"] == one.counts("nvme")["stored"] > 0


WRONG = {
    "no size": ({}, {}, "set host_gb, or disk_gb and dir"),
    "no folder": ({"disk_gb": 1}, {}, "belong together"),
    "no block": ({"host_gb": 1e-9}, {}, "hold no block of"),
    "no such policy": ({"host_gb": 1, "policy": "best"}, {}, "adaptive"),
    "unknown": ({"host_gb": 1, "speed": 2}, {}, "use host_gb, disk_gb"),
    "fails requests": ({"host_gb": 1}, {"kv_load_failure_policy": "fail"}, "use recompute"),
    "one direction": ({"host_gb": 1}, {"kv_role": "kv_producer"}, "use kv_both"),
}


@pytest.mark.parametrize(("settings", "changed", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings(model: str, settings: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises((SageError, ValueError), match=message):
        World(model, store_config(**settings) | changed)


def test_a_model_without_files_has_no_store(
    model: str, caplog: pytest.LogCaptureFixture, world: Made
) -> None:
    (Path(model) / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING, "vllm.sagellm"):
        one = world(host=100)
        fill(one)
        fill(one)
    assert one.num_computed == 2 * 8 * 42
    assert caplog.text.count("stores no KV here") == 1
