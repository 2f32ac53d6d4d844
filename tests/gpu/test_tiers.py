"""KV that goes from the GPU to host memory and comes back: bytes, tokens, and where the memory lies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sagellm.core.blocks import Tier
from sagellm.core.numa import cpus_of_node
from sagellm.engines.native.block_bytes import PoolBytes
from sagellm.kvmgr.kv_pool.tiers.disk_slab import aligned_buffer
from sagellm.kvmgr.kv_pool.tiers.host import HostStorage
from tests.engines.native.test_block_bytes import BLOCK_BYTES, NUM_BLOCKS, expected, random_pools
from tests.engines.native.tiered import ask, engine, hierarchy, prompts
from tests.kvmgr.tiers.test_near_device import NUMA_MAPS, pages_by_node
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]


@pytest.mark.parametrize("locked", [True, False])
def test_blocks_go_and_come(locked: bool) -> None:
    pools = [pool.cuda() for pool in random_pools()]
    data, buffer, ids = PoolBytes(pools), aligned_buffer(NUM_BLOCKS * BLOCK_BYTES), [8, 0, 5, 3, 1]
    if locked:
        data.lock_pages(buffer)
        assert torch.frombuffer(buffer, dtype=torch.uint8).is_pinned()
    target = buffer[: len(ids) * BLOCK_BYTES]
    for _ in range(3):  # what a buffer held before must not come again
        for pool in pools:
            pool.random_(256)
        data.read_blocks(ids, target)
        assert bytes(target) == expected(pools, ids)
    target[:] = os.urandom(len(target))
    data.write_blocks(ids, target)
    assert expected(pools, ids) == bytes(target)


def test_a_buffer_is_unlocked_with_its_device() -> None:
    data, buffer = PoolBytes([pool.cuda() for pool in random_pools()]), aligned_buffer(1 << 20)
    data.lock_pages(buffer)
    del data
    assert not torch.frombuffer(buffer, dtype=torch.uint8).is_pinned()


def test_cuda_refuses_to_lock_twice(caplog: pytest.LogCaptureFixture) -> None:
    """Its error fails no later copy."""
    pools, buffer = [pool.cuda() for pool in random_pools()], aligned_buffer(NUM_BLOCKS * BLOCK_BYTES)
    data = PoolBytes(pools)
    data.lock_pages(buffer)
    data.lock_pages(buffer)
    assert "CUDA locks no" in caplog.text
    data.read_blocks(range(NUM_BLOCKS), buffer)
    assert bytes(buffer) == expected(pools, range(NUM_BLOCKS))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_the_same_tokens_after_eviction(tmp_path: Path, overlap: bool) -> None:
    save_tiny(tmp_path, "llama")
    alone = engine(tmp_path, **{"model.device": "cuda"})
    expected_tokens = [ask(alone, f"r{i}", prompt)[0] for i, prompt in enumerate(prompts())]
    alone.close()
    tiered = engine(tmp_path, **{"model.device": "cuda", "kv.host_gb": 0.05, "engine.overlap": overlap})
    for round_ in range(3):
        for i, prompt in enumerate(prompts()):
            assert ask(tiered, f"{round_}-{i}", prompt)[0] == expected_tokens[i]
    [tier] = hierarchy(tiered).tiers
    assert tier.num_loaded > 60
    assert not tier.misses
    node = PoolBytes([torch.empty(1, 1, dtype=torch.uint8, device="cuda")]).numa_node
    if node is not None and NUMA_MAPS.exists() and cpus_of_node(node) & os.sched_getaffinity(0):
        assert tier.tier is Tier.DRAM
        assert isinstance(tier.storage, HostStorage)
        assert tier.storage._slots is not None
        assert set(pages_by_node(tier.storage._slots.ctypes.data)) == {node}
    tiered.close()
