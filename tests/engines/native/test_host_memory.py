"""Host memory of the native backend: what it holds, what starting with it costs nobody, wrong sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sagellm.core.errors import CapacityError, ConfigError, PlanError
from sagellm.core.plan import BlockCopy
from sagellm.engines.native.backend import NativeBackend
from sagellm.engines.native.kv_cache import PagedKV
from tests.tiny_models import save_tiny

NAME = "llama"
GIB = 2**30


def backend(folder: Path, host_memory_bytes: int) -> NativeBackend:
    if not (folder / "config.json").exists():
        save_tiny(folder, NAME)
    return NativeBackend(
        folder, device="cpu", dtype="float32", block_size=4, num_blocks=16, max_num_seqs=2, threads=1,
        host_memory_bytes=host_memory_bytes,
    )  # fmt: skip


def test_it_knows_what_coming_back_takes(tmp_path: Path) -> None:
    capability = backend(tmp_path, 1 << 16).capability()
    assert capability.kv_schema is not None
    assert capability.num_host_blocks == (1 << 16) // capability.kv_schema.bytes_per_block
    assert 0 < capability.host_copy_s < 0.1
    assert 0 < capability.prefill_token_s < 1
    nothing = backend(tmp_path, 0).capability()
    assert (nothing.num_host_blocks, nothing.host_copy_s, nothing.prefill_token_s) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("size", "error", "text"),
    [
        (-5, ConfigError, "kv.swap_space_gb must not be negative"),
        (1 << 50, CapacityError, r"kv.swap_space_gb: 1048576.0 GiB are asked for, .* are there"),
    ],
)
def test_wrong_sizes_are_refused_before_anything_is_taken(
    tmp_path: Path, size: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        backend(tmp_path, size)


@pytest.mark.parametrize("value_dim", [None, 5])
def test_blocks_go_there_and_come_back_as_they_were(value_dim: int | None) -> None:
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    kv = PagedKV(2, 4, 4, 2, 8, cpu, torch.float32, num_host_blocks=2, value_dim=value_dim)
    for pool in (*kv.keys, *kv.values):
        pool.normal_()
    before = [pool.clone() for pool in (*kv.keys, *kv.values)]
    kv.copy_blocks([BlockCopy("hbm", 1, "dram", 0), BlockCopy("hbm", 3, "dram", 1)])
    kv.clear_blocks([1, 3])
    kv.copy_blocks([BlockCopy("dram", 1, "hbm", 0), BlockCopy("dram", 0, "hbm", 1)])
    for pool, old in zip((*kv.keys, *kv.values), before, strict=True):
        torch.testing.assert_close(pool[0], old[3])
        torch.testing.assert_close(pool[1:3], old[1:3])
        assert not pool[3].any()


@pytest.mark.parametrize(
    ("copy", "text"),
    [
        (BlockCopy("hbm", 0, "nvme", 0), "the native backend has the tiers hbm, dram"),
        (BlockCopy("hbm", 0, "dram", 2), "there are 2 blocks in dram"),
        (BlockCopy("dram", 0, "hbm", -1), "there are 4 blocks in hbm"),
    ],
)
def test_a_block_that_is_not_there(copy: BlockCopy, text: str) -> None:
    kv = PagedKV(1, 4, 4, 1, 8, torch.device("cpu"), torch.float32, num_host_blocks=2)
    kv.keys[0].fill_(1.0)
    with pytest.raises(PlanError, match=text):
        kv.copy_blocks([BlockCopy("hbm", 0, "dram", 0), copy])
