"""SGLang's HiCache on our storage: its real tree, controller, threads, host pools and factory, on a CPU."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory

from benchmarks.hosts.sglang_hicache import STORAGE, Pages, hicache
from sagellm.core.errors import ConfigError, KVDataError, MissingExtraError, SageError
from sagellm.engines.sglang.hicache import SageHiCache
from sagellm.engines.sglang.hicache_format import HiCacheSettings
from sagellm.kvmgr.kv_pool.tiers.disk_slab import ALIGNMENT, aligned
from tests.engines.sglang import hicache_writer

pytestmark = pytest.mark.peer
TOKENS = list(range(40))
OTHERS = [900, *range(39)]
DEMO = Path(__file__).parents[3] / "src/sagellm/engines/native/demo_model"


def config(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "dir": str(folder),
        "disk_gb": 0.001,
        "weights_id": "w",
        "interface_v1": 1,
        "prefetch_threshold": 4,
    } | more


def stored(folder: Path, seed: int = 1, tokens: list[int] = TOKENS, **options: Any) -> list[torch.Tensor]:
    """Store a prompt of 10 pages in a server of its own; returns the bytes of the pages."""
    with hicache(config(folder, **options.pop("storage", {})), **options) as cache:
        pages = Pages(cache)
        indices = pages.alloc(10)
        made = pages.fill(indices, seed)
        assert pages.back_up(tokens, indices) == 40
        return made


def loaded(cache: Any, expected: list[torch.Tensor], tokens: list[int] = TOKENS) -> int:
    """How many tokens of a prompt are loaded, into pages that held others; each must be the expected one."""
    pages = Pages(cache)
    other = pages.alloc(10)
    pages.fill(other, 99)
    cache.cache_controller.mem_pool_host.free(other)
    num_tokens, indices = pages.prefetch(tokens)
    found = pages.read(indices[:num_tokens])
    cache.cache_controller.mem_pool_host.free(indices)
    assert all(torch.equal(*pair) for pair in zip(found, expected[: len(found)], strict=True))
    return num_tokens


def flip(folder: Path, slot: int, page_bytes: int) -> None:
    """Change a bit of the page in a slot, on the disk."""
    slab = next(folder.glob("*/kv/slab"))
    with slab.open("r+b") as file:
        file.seek(slot * (ALIGNMENT + aligned(page_bytes)) + ALIGNMENT + 5)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))


# -- round trips


@pytest.mark.parametrize("interface_v1", [0, 1])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pages_come_back_after_a_restart(tmp_path: Path, layout: str, interface_v1: int) -> None:
    """Through SGLang's prefetch and backup threads, in each layout and both forms of its calls."""
    expected = stored(tmp_path, layout=layout, storage={"interface_v1": interface_v1})
    with hicache(config(tmp_path, interface_v1=interface_v1), layout=layout) as cache:
        assert loaded(cache, expected) == 40
        assert loaded(cache, expected[:5], [*TOKENS[:20], *OTHERS]) == 20
        assert loaded(cache, [], OTHERS) == 0
        assert not cache.cache_controller.storage_backend.misses()["kv"]


@pytest.mark.parametrize("first", [0, 1])
def test_both_forms_of_calls_read_each_others_pages(tmp_path: Path, first: int) -> None:
    expected = stored(tmp_path, layout="layer_first", storage={"interface_v1": first})
    with hicache(config(tmp_path, interface_v1=1 - first), layout="layer_first") as cache:
        assert loaded(cache, expected) == 40


@pytest.mark.parametrize(
    "options",
    [
        {"is_mla": True}, {"dtype": torch.bfloat16}, {"dtype": torch.uint8}, {"page_size": 1},
        {"heads": 1, "head_dim": 512},
    ],
)  # fmt: skip
def test_other_pools(tmp_path: Path, options: dict[str, Any]) -> None:
    size = options.get("page_size", 4)
    tokens = TOKENS[: 10 * size]
    with hicache(config(tmp_path), **options) as cache:
        pages = Pages(cache)
        indices = pages.alloc(10)
        expected = pages.fill(indices, 3)
        assert pages.back_up(tokens, indices) == len(tokens)
    with hicache(config(tmp_path), **options) as cache:
        assert loaded(cache, expected, tokens) == len(tokens)


def test_with_zstd(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    expected = stored(tmp_path, storage={"codec": "zstd"})
    with hicache(config(tmp_path, codec="zstd")) as cache:
        assert loaded(cache, expected) == 40


def test_the_tree_finds_a_prompt_after_a_restart(tmp_path: Path) -> None:
    """What SGLang's scheduler calls for a waiting request, on its real tree."""
    expected = stored(tmp_path)
    with hicache(config(tmp_path)) as cache:
        prompt = array("q", [*TOKENS, 77, 78, 79])
        before = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        assert before.host_hit_length == 0
        request = CacheRequestHandle("request", 0)
        cache.prefetch_from_storage(request, before.last_host_node, prompt)
        end_s = time.monotonic() + 30
        while not cache.check_prefetch_progress(request):
            assert time.monotonic() < end_s
            time.sleep(0.01)
            cache.check_hicache_events()
        assert cache.pop_prefetch_loaded_span(request) == (40, 0)
        after = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        assert after.host_hit_length == 40
        spec = cache.tree_core.build_storage_backup_spec(after.last_host_node, True)
        found = Pages(cache).read(spec.host_value)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_all_forms_of_calls(tmp_path: Path) -> None:
    with hicache(config(tmp_path, interface_v1=0)) as cache:
        pages = Pages(cache)
        storage, keys = pages.storage, pages.hashes(TOKENS)
        made = pages.fill(pages.alloc(10), 1)
        tensors = [page.view(torch.float16) for page in made]
        assert storage.set(keys[0], tensors[0])
        assert storage.batch_set(keys[1:4], tensors[1:4])
        assert storage.batch_set(keys[1:4], tensors[1:4]), "again"
        assert [storage.exists(key) for key in keys[:5]] == [True] * 4 + [False]
        assert storage.batch_exists(keys) == 4
        assert storage.batch_exists(keys[2:]) == 2
        assert storage.batch_exists([]) == 0
        assert torch.equal(storage.get(keys[2]).view(torch.uint8), made[2])
        targets = [torch.zeros_like(tensors[0]) for _ in range(6)]
        found = storage.batch_get(keys[:6], targets)
        assert [page is target for page, target in zip(found[:4], targets, strict=False)] == [True] * 4
        assert found[4:] == [None, None]
        assert all(
            torch.equal(page.view(torch.uint8), own) for page, own in zip(found[:4], made, strict=False)
        )
        assert storage.set("a name that is no hash", tensors[5])
        assert torch.equal(storage.get("a name that is no hash", targets[5]).view(torch.uint8), made[5])
        assert storage.batch_set(keys[4:6], None) is False
        with pytest.raises(KVDataError, match="768 bytes, got 384 bytes"):
            storage.set(keys[6], tensors[6][: 4 * 3 * 2 * 8])
        with pytest.raises(KVDataError, match="got NoneType"):
            storage.set(keys[6])
        short = pages.alloc(1)
        assert storage.batch_get_v1(keys[:2], short) == [False, False]
        assert storage.batch_set_v1(keys[:2], short) == [False, False]
        storage.clear()
        assert storage.batch_exists(keys) == 0


def test_a_page_that_is_missing_ends_the_prefix(tmp_path: Path) -> None:
    with hicache(config(tmp_path)) as cache:
        pages = Pages(cache)
        keys, indices = pages.hashes(TOKENS), pages.alloc(10)
        pages.fill(indices, 1)
        kept = [0, 1, 3, 4]
        slots = torch.cat([indices[4 * i : 4 * i + 4] for i in kept])
        assert pages.storage.batch_set_v1([keys[i] for i in kept], slots) == [True] * 4
        assert pages.storage.batch_exists(keys) == 2
        assert pages.storage.batch_get_v1(keys[:6], indices[:24]) == [True, True, False, True, True, False]


# -- several pools


@contextmanager
def two_storages(folder: Path) -> Iterator[tuple[Any, Any, Pages]]:
    """Ours and SGLang's `file`, each with the pools KV, MAMBA and INDEXER."""
    with hicache(config(folder / "ours")) as cache:
        pages = Pages(cache)
        twin = HiCacheFile(replace(pages.storage.config, extra_config={}), str(folder / "files"))
        twin.register_mem_pool_host(pages.pool)
        for storage in (pages.storage, twin):
            for name in (PoolName.KV, PoolName.MAMBA, PoolName.INDEXER):
                storage.register_mem_host_pool_v2(pages.pool, name)
        yield pages.storage, twin, pages


PLACES = st.sets(st.integers(0, 7))
POLICIES = st.sampled_from([PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pools_hit_as_in_sglangs_own_storage(two: tuple[Any, Any, Pages], data: st.DataObject) -> None:
    ours, twin, pages = two
    ours.clear()
    twin.clear()
    keys, indices = pages.hashes(TOKENS)[:8], pages.indices  # type: ignore[attr-defined]
    for name in (PoolName.KV, PoolName.MAMBA, PoolName.INDEXER):
        chosen = sorted(data.draw(PLACES))
        slots = torch.cat([indices[:0], *(indices[4 * i : 4 * i + 4] for i in chosen)])
        transfer = PoolTransfer(name, host_indices=slots, keys=[keys[i] for i in chosen])
        assert ours.batch_set_v2([transfer]) == twin.batch_set_v2([transfer])
    wanted = [
        PoolTransfer(name, keys=keys[: data.draw(st.integers(0, 3))], hit_policy=data.draw(POLICIES))
        for name in data.draw(st.permutations([PoolName.MAMBA, PoolName.INDEXER]))[
            : data.draw(st.integers(0, 2))
        ]
    ]
    found, expected = (storage.batch_exists_v2(keys, wanted) for storage in (ours, twin))
    assert found.kv_hit_pages == expected.kv_hit_pages
    assert found.restorable_prefix_pages == expected.restorable_prefix_pages
    transfers = [PoolTransfer(each.name, host_indices=indices[:32], keys=keys) for each in wanted]
    assert ours.batch_get_v2(transfers) == twin.batch_get_v2(transfers)
    if not expected.kv_hit_pages:  # the twin stops at the first pool that allows no prefix
        assert found.extra_pool_hit_pages.items() >= {**expected.extra_pool_hit_pages}.items()
    else:
        assert found.extra_pool_hit_pages == expected.extra_pool_hit_pages


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Pages]]:
    with two_storages(tmp_path_factory.mktemp("pools")) as (ours, twin, pages):
        pages.indices = pages.alloc(8)  # type: ignore[attr-defined]
        pages.fill(pages.indices, 5)  # type: ignore[attr-defined]
        yield ours, twin, pages


def test_pools_share_the_limit_and_keep_their_own_pages(tmp_path: Path) -> None:
    with two_storages(tmp_path) as (ours, _, pages):
        keys, indices = pages.hashes(TOKENS), pages.alloc(10)
        made = pages.fill(indices, 1)
        transfer = PoolTransfer(PoolName.MAMBA, host_indices=indices, keys=keys)
        assert ours.batch_set_v2([transfer]) == {PoolName.MAMBA: [True] * 10}
        assert ours.batch_exists(keys) == 0
        pages.fill(indices, 2)
        assert ours.batch_get_v2([transfer]) == {PoolName.MAMBA: [True] * 10}
        assert all(torch.equal(*pair) for pair in zip(pages.read(indices), made, strict=True))
        unknown = PoolTransfer(PoolName.SWA, host_indices=indices, keys=keys)
        assert ours.batch_set_v2([unknown]) == ours.batch_get_v2([unknown]) == {PoolName.SWA: [False] * 10}
        assert ours.batch_exists_v2(keys, [unknown]).kv_hit_pages == 0
        no_slots = PoolTransfer(PoolName.MAMBA, keys=keys[:1])
        assert ours.batch_set_v2([no_slots]) == {PoolName.MAMBA: [False]}
        groups = PoolTransfer(PoolName.MAMBA, keys=keys, hit_policy=PoolHitPolicy.BLOCK_GROUPS)
        with pytest.raises(ValueError, match="BLOCK_GROUPS"):
            ours.batch_exists_v2(keys, [groups])
        slabs = list((tmp_path / "ours").glob("*/*/slab"))
        assert len(slabs) == 3
        assert sum(slab.stat().st_size for slab in slabs) <= 0.001 * 2**30


# -- never a wrong page


def test_a_flipped_bit_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = stored(tmp_path)
    flip(tmp_path, 6, expected[0].nbytes)
    with caplog.at_level(logging.WARNING, "sagellm.sglang"), hicache(config(tmp_path)) as cache:
        storage = cache.cache_controller.storage_backend
        assert loaded(cache, expected) == 24, "SGLang ends at the first page that was not read"
        assert storage.misses() == {"kv": {"corrupt": 1}}
        keys = Pages(cache).hashes(TOKENS)
        assert storage.batch_exists(keys) == 6
        assert storage.batch_exists(keys[7:]) == 3
        assert storage.batch_set(keys[6:7], [expected[6].view(torch.float16)])
        assert loaded(cache, expected) == 40
    assert "{'corrupt': 1}" in caplog.text


OTHER_MODELS: list[dict[str, Any]] = [
    {"storage": {"weights_id": "other"}}, {"served_model_name": "other"}, {"dtype": torch.bfloat16},
    {"layout": "page_first_direct"}, {"layout": "layer_first"}, {"page_size": 8}, {"layers": 2},
    {"heads": 4, "head_dim": 4},
    {"kv_cache_dtype": "fp8_e5m2"}, {"quantization": "fp8"}, {"tp": (0, 2)}, {"is_mla": True},
    {"json_model_override_args": '{"rope_theta": 1}'},
]  # fmt: skip


@pytest.mark.parametrize("options", OTHER_MODELS, ids=str)
def test_of_another_model_or_layout_nothing_is_found(tmp_path: Path, options: dict[str, Any]) -> None:
    stored(tmp_path)
    options = dict(options)
    with hicache(config(tmp_path, **options.pop("storage", {})), **options) as cache:
        pages = Pages(cache)
        assert pages.storage.batch_exists(pages.hashes(TOKENS)) == 0


def test_ranks_have_folders_of_their_own(tmp_path: Path) -> None:
    expected = stored(tmp_path, tp=(0, 2))
    stored(tmp_path, seed=2, tp=(1, 2))
    with hicache(config(tmp_path), tp=(0, 2)) as cache:
        assert loaded(cache, expected) == 40


def test_weights_are_told_apart_by_their_files(tmp_path: Path) -> None:
    """Without a `weights_id`: the same files are found again anywhere, changed ones are not."""
    folder, model = tmp_path / "kv", tmp_path / "model"
    shutil.copytree(DEMO, model)
    expected = stored(folder, model=str(model), storage={"weights_id": ""})
    moved = tmp_path / "moved"
    model.rename(moved)
    with hicache(config(folder, weights_id=""), model=str(moved)) as cache:
        assert loaded(cache, expected) == 40
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-8192:] = bytes(8192)
    (moved / "model.safetensors").write_bytes(weights)
    with hicache(config(folder, weights_id=""), model=str(moved)) as cache:
        pages = Pages(cache)
        assert pages.storage.batch_exists(pages.hashes(TOKENS)) == 0


def test_draft_models_are_told_apart_by_their_files(tmp_path: Path) -> None:
    """The KV of another draft model is not found, and that of the target is."""
    folder, draft = tmp_path / "kv", tmp_path / "draft"
    shutil.copytree(DEMO, draft)
    options: dict[str, Any] = {"model": str(DEMO), "speculative_draft_model_path": str(draft)}

    def with_draft(cache: Any) -> Any:
        storage = cache.cache_controller.storage_backend
        storage.register_mem_host_pool_v2(Pages(cache).pool, PoolName.DRAFT)
        return storage

    with hicache(config(folder, weights_id=""), **options) as cache:
        pages = Pages(cache)
        storage = with_draft(cache)
        keys, indices = pages.hashes(TOKENS), pages.alloc(10)
        expected = pages.fill(indices, 1)
        assert pages.back_up(TOKENS, indices) == 40
        of_draft = PoolTransfer(PoolName.DRAFT, host_indices=indices, keys=keys)
        assert storage.batch_set_v2([of_draft]) == {PoolName.DRAFT: [True] * 10}
    with hicache(config(folder, weights_id=""), **options) as cache:
        storage = with_draft(cache)
        assert storage.batch_exists_v2(keys, [of_draft]).kv_hit_pages == 10
    weights = bytearray((draft / "model.safetensors").read_bytes())
    weights[-8192:] = bytes(8192)
    (draft / "model.safetensors").write_bytes(weights)
    with hicache(config(folder, weights_id=""), **options) as cache:
        storage = with_draft(cache)
        assert storage.batch_get_v2([of_draft]) == {PoolName.DRAFT: [False] * 10}
        assert loaded(cache, expected) == 40


def test_replaced_weights_turn_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in reinforcement learning. Pages from before stay for the old weights."""
    expected = stored(tmp_path)
    monkeypatch.setattr(SageHiCache, "weights_changed", False)
    with hicache(config(tmp_path)) as cache:
        pages = Pages(cache)
        updater = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
        updater.metrics_collector = None
        updater.tp_worker = updater.draft_worker = None
        assert loaded(cache, expected) == 40
        with caplog.at_level(logging.WARNING), pytest.raises(AttributeError):
            updater.update_weights_from_ipc(None)  # begins, and has no worker here
        with caplog.at_level(logging.WARNING):
            assert loaded(cache, expected) == 0
            assert pages.back_up(OTHERS, pages.alloc(10)) == 0
        assert [record.getMessage() for record in caplog.records if record.name == "sagellm.sglang"] == [
            "sageLLM: the HiCache storage is off: the model's weights were replaced"
        ]
        assert cache.detach_storage_backend()[0]
        assert not cache.attach_storage_backend("dynamic", None)[0]
    with pytest.raises(ConfigError, match="restart SGLang"):
        SageHiCache(plain_config(tmp_path))
    monkeypatch.setattr(SageHiCache, "weights_changed", False)
    with hicache(config(tmp_path)) as cache:
        assert loaded(cache, expected) == 40


# -- limits and faults


def test_the_size_limit(tmp_path: Path) -> None:
    """Prompts that were used last stay, their first pages longest; the files keep their size."""
    with hicache(config(tmp_path, policy="lru"), num_tokens=512) as cache:
        pages = Pages(cache)
        indices = pages.alloc(10)
        for number in range(40):
            pages.fill(indices, number)
            assert pages.back_up([1000 + number, *range(39)], indices) == 40
        counts = [pages.storage.batch_exists(pages.hashes([1000 + n, *range(39)])) for n in range(40)]
        num_slots = sum(counts)
        assert counts[-12:] == [10] * 12
        assert counts[:26] == [0] * 26
        assert 120 < num_slots <= 131
        slab = next(tmp_path.glob("*/kv/slab"))
        assert slab.stat().st_size <= 0.001 * 2**30
        assert loaded(cache, pages.fill(indices, 39), [1039, *range(39)]) == 40


def test_pages_in_nearer_memory_count_as_used(tmp_path: Path) -> None:
    """With the hashes in front, asking for the end of a prompt keeps its beginning."""
    with hicache(config(tmp_path, policy="lru"), num_tokens=512) as cache:
        pages = Pages(cache)
        indices = pages.alloc(10)
        keys = pages.hashes(TOKENS)
        for number in range(14):
            prompt = TOKENS if number == 0 else [1000 + number, *range(39)]
            pages.back_up(prompt, indices)
            pages.storage.batch_exists(keys[5:], HiCacheStorageExtraInfo(prefix_keys=keys[:5]))
        assert pages.storage.batch_exists(keys) == 5


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """SGLang goes on without it, and our log says so once."""
    expected = stored(tmp_path)

    def fails(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    with caplog.at_level(logging.WARNING, "sagellm"), hicache(config(tmp_path)) as cache:
        pages = Pages(cache)
        assert loaded(cache, expected) == 40
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", fails)
            assert pages.back_up(OTHERS, pages.alloc(10)) == 0
        assert loaded(cache, expected) == 0
        assert pages.back_up(OTHERS, pages.alloc(10)) == 0
    assert len([record for record in caplog.records if record.name.startswith("sagellm")]) == 1
    with hicache(config(tmp_path)) as cache:
        assert loaded(cache, expected) == 40


def test_two_servers_on_one_folder(tmp_path: Path) -> None:
    with hicache(config(tmp_path)) as cache:
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            SageHiCache(plain_config(tmp_path))
        assert cache.detach_storage_backend()[0]
        SageHiCache(plain_config(tmp_path)).close()


def test_attach_and_detach_while_the_server_runs(tmp_path: Path) -> None:
    import json

    expected = stored(tmp_path)
    with hicache(None) as cache:
        text = json.dumps(STORAGE | config(tmp_path))
        ok, message = cache.attach_storage_backend("dynamic", text, "model")
        assert ok, message
        assert loaded(cache, expected) == 40
        assert cache.clear_storage_backend()
        assert loaded(cache, expected) == 0
        assert cache.detach_storage_backend()[0]
        ok, message = cache.attach_storage_backend("dynamic", json.dumps(STORAGE | {"dir": "x"}), "model")
        assert (ok, "disk_gb" in message) == (False, True)


def test_sglangs_own_fault_injection(tmp_path: Path) -> None:
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3):
        rounds = 12
        with hicache(config(tmp_path), num_tokens=512, host_ratio=3.0) as cache:
            pages = Pages(cache)
            indices = pages.alloc(10)
            expected = pages.fill(indices, 1)
            stored_tokens = [pages.back_up(TOKENS, indices) for _ in range(rounds)]
            loaded_tokens = []
            for _ in range(rounds):
                num_tokens, slots = pages.prefetch(TOKENS)
                loaded_tokens.append(num_tokens)
                found = pages.read(slots[:num_tokens])
                assert all(map(torch.equal, found, expected))
                pages.controller.mem_pool_host.free(slots)
            assert set(stored_tokens) == set(loaded_tokens) == {0, 40}


def test_threads(tmp_path: Path) -> None:
    """Readers and writers of the same prompts at the same time, on fewer slots than pages."""
    failures: list[BaseException] = []
    with hicache(config(tmp_path, disk_gb=0.0005), num_tokens=1024) as cache:
        pages = Pages(cache)
        prompts = [[2000 + n, *range(39)] for n in range(12)]
        source = [pages.alloc(10) for _ in prompts]
        expected = [pages.fill(indices, n) for n, indices in enumerate(source)]
        counts = [0, 0]

        def work(seed: int) -> None:
            rng, target = random.Random(seed), pages.alloc(10)
            try:
                for _ in range(60):
                    n = rng.randrange(len(prompts))
                    keys = pages.hashes(prompts[n])
                    if seed % 2:
                        counts[0] += sum(pages.storage.batch_set_v1(keys, source[n]))
                        continue
                    pages.storage.batch_exists(keys)
                    found = pages.storage.batch_get_v1(keys, target)
                    counts[1] += sum(found)
                    for is_found, page, own in zip(found, pages.read(target), expected[n], strict=True):
                        assert not is_found or torch.equal(page, own)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert min(counts) > 100
        assert not pages.storage.misses()["kv"]
        pages.storage._stores[PoolName.KV].check()


@pytest.fixture(scope="module")
def writers() -> Iterator[subprocess.Popen[str]]:
    """Makes processes that store pages."""
    command = [sys.executable, "-m", hicache_writer.__name__]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        yield process


def killed(writers: subprocess.Popen[str], folder: Path, first: int, seconds: float) -> list[int]:
    """Store prompts until kill -9; returns those that were stored."""
    assert writers.stdin is not None
    assert writers.stdout is not None
    print(folder, first, file=writers.stdin, flush=True)
    ready = writers.stdout.readline().split()
    assert ready[0] == "ready"
    threading.Timer(seconds, os.kill, [int(ready[1]), signal.SIGKILL]).start()
    finished = []
    while (line := writers.stdout.readline()) != "ended\n":
        assert line.startswith("stored ")
        finished.append(int(line.split()[1]))
    return finished


@pytest.mark.parametrize("num_kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_while_it_writes(tmp_path: Path, writers: subprocess.Popen[str], num_kills: int) -> None:
    """What was stored is found by the next server, and every page that is found is right."""
    rng, num_stored = random.Random(num_kills), 0
    for number in range(num_kills):
        first = 10_000 * number
        finished = killed(writers, tmp_path, first, 0.02 + 0.3 * rng.random())
        num_stored += len(finished)
        with hicache(config(tmp_path), num_tokens=1024) as cache:
            pages = Pages(cache)
            indices, target = pages.alloc(6), pages.alloc(6)
            for each in range(max(first, first + len(finished) - 20), first + len(finished) + 2):
                found = pages.storage.batch_get_v1(pages.hashes(hicache_writer.prompt(each)), target)
                read, expected = pages.read(target), pages.fill(indices, each)
                assert all(torch.equal(read[i], expected[i]) for i, is_found in enumerate(found) if is_found)
                if each in finished[-10:]:
                    assert all(found)
            assert not pages.storage.misses()["kv"]
    assert num_stored > num_kills


# -- settings


def plain_config(folder: Path, **more: Any) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="model",
        extra_config=STORAGE | config(folder) | more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, 'either "dir" and "disk_gb", or "remote_url"'),
        ({"dir": "d"}, '"disk_gb" must be above 0 GiB'),
        ({"dir": "d", "disk_gb": -1}, '"disk_gb" must be above 0 GiB'),
        ({"dir": "d", "disk_gb": "9"}, '"disk_gb" must be a number'),
        ({"dir": "d", "disk_gb": True}, '"disk_gb" must be a number'),
        ({"dir": 7, "disk_gb": 1}, '"dir" must be a text'),
        ({"dir": "d", "disk_gb": 1, "remote_url": "redis://h"}, "either"),
        ({"dir": "d", "disc_gb": 1}, "Did you mean 'disk_gb'"),
        ({"dir": "d", "disk_gb": 1, "codec": "int8"}, '"codec" must be raw or zstd'),
        ({"dir": "d", "disk_gb": 1, "policy": "lur"}, "lru"),
        ({"dir": "d", "disk_gb": 1, "options": [1]}, '"options" must be a mapping'),
        ({"dir": "d", "disk_gb": 1, "options": {"capacity": 3}}, "leave it out"),
        ({"remote_url": "redis://h", "remote_gb": 0}, '"remote_gb" must be above 0'),
    ],
)
def test_wrong_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SageError, match=message):
        HiCacheSettings.of(STORAGE | given)


def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="hold no two pages of 8,192 bytes"),
        hicache(config(tmp_path, disk_gb=1e-9)),
    ):
        pass
    with pytest.raises(ConfigError, match='"weights_id"'), hicache(config(tmp_path, weights_id="")):
        pass
    with pytest.raises(ConfigError, match='"remote_url" in place of "dir"'):
        SageHiCache(replace(plain_config(tmp_path), is_mla_model=True, tp_size=2))
    with pytest.raises((ConfigError, MissingExtraError), match=r"the scheme must be|redis"):
        SageHiCache(
            replace(plain_config(tmp_path), extra_config={"remote_url": "http://h", "weights_id": "w"})
        )
    open_to_all = tmp_path / "open" / "dp0-pp0-cp0-tp0"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        SageHiCache(plain_config(tmp_path / "open"))
    (tmp_path / "link").symlink_to(tmp_path)
    SageHiCache(plain_config(tmp_path)).close()


def test_off_by_default(tmp_path: Path) -> None:
    with hicache(None) as cache:
        assert cache.cache_controller.storage_backend is None


def test_the_factory_makes_it(tmp_path: Path) -> None:
    made = StorageBackendFactory.create_backend("dynamic", plain_config(tmp_path), None)
    assert isinstance(made, SageHiCache)
    assert made.batch_exists(["00" * 32]) == 0, "no pool is registered yet"
    made.close()


def test_metrics(tmp_path: Path) -> None:
    with hicache(config(tmp_path)) as cache:
        pages = Pages(cache)
        storage = pages.storage
        storage.config.enable_storage_metrics = True
        indices = pages.alloc(10)
        pages.back_up(TOKENS, indices)
        pages.prefetch(TOKENS)
        stats = storage.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([10], [10])
        assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
        assert storage.get_stats().backup_pgs == []


def test_the_shared_store(tmp_path: Path) -> None:
    """Two servers with one store: an MLA model on two ranks, of which the first writes."""
    pytest.importorskip("redis")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    address = tmp_path / "socket"
    command = [program, "--port", "0", "--unixsocket", str(address), "--save", "", "--dir", str(tmp_path)]
    remote = {"remote_url": f"unix://{address}", "weights_id": "w", "interface_v1": 1}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            end_s = time.monotonic() + 10
            while not address.exists():
                assert time.monotonic() < end_s
                time.sleep(0.01)
            with hicache(remote, is_mla=True, tp=(0, 2)) as cache:
                pages = Pages(cache)
                indices = pages.alloc(10)
                expected = pages.fill(indices, 1)
                assert pages.back_up(TOKENS, indices) == 40
            with hicache(remote, is_mla=True, tp=(1, 2)) as cache:
                assert loaded(cache, expected) == 40
                assert not cache.clear_storage_backend()
                server.kill()
                server.wait()
                assert loaded(cache, expected) == 0
        finally:
            server.kill()
