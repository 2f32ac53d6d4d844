"""Where the migrator's memory lies: its threads and buffers, and the slots that they fill."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sagellm.core.blocks import Tier
from sagellm.core.numa import cpus_of_node, stay_on_node
from sagellm.core.protocols.kv_tiers import BlockFormat, Buffer
from sagellm.core.types import TOKEN_BYTES, Namespace
from sagellm.kvmgr.kv_pool.tiers import migrator
from sagellm.kvmgr.kv_pool.tiers.host import HostStorage
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator, MigrationPlan, MoveTarget
from tests.kvmgr.tiers.drivers import BLOCK_BYTES, SIZE, FakeDevice, hashes_of

NUM_BLOCKS = 4096  # 256 KB: pages enough that chance does not put them all on one node
NUMA_MAPS = Path("/proc/self/numa_maps")
NODES = [node for node in range(64) if cpus_of_node(node)]


class Watched(FakeDevice):
    """Notes the CPUs of the threads that read and write blocks."""

    def __init__(self, numa_node: int | None) -> None:
        super().__init__(NUM_BLOCKS, numa_node=numa_node)
        self.cpus: list[set[int]] = []

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        self.cpus.append(os.sched_getaffinity(0))
        super().read_blocks(block_ids, target)

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        self.cpus.append(os.sched_getaffinity(0))
        super().write_blocks(block_ids, data)


def round_trip(device: Watched) -> HostStorage:
    """All blocks go to a host tier and come back; the tier is returned open."""
    random = np.random.default_rng(3)
    sent = device.blocks[:] = random.integers(0, 256, device.blocks.shape, np.uint8)
    storage = HostStorage(NUM_BLOCKS, BlockFormat(bytes(16), BLOCK_BYTES))
    moves = KVMigrator(device, {Tier.DRAM: storage}, hashes_of, block_size=SIZE, chunk_bytes=64 * BLOCK_BYTES)
    path, ids = bytes(NUM_BLOCKS * SIZE * TOKEN_BYTES), range(NUM_BLOCKS)
    for source, target in ((Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.HBM)):
        moves.migrate(MigrationPlan(path, Namespace(), ids, source, ids, (MoveTarget(target, ids, ids),)))
        assert moves.wait(60.0)
        [report] = moves.poll()
        assert report.num_written == {target: NUM_BLOCKS}
        if target is Tier.DRAM:
            sent, device.blocks = sent.copy(), np.zeros_like(sent)
    moves.close()
    assert np.array_equal(device.blocks, sent)
    return storage


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads stay nowhere")
def test_threads_stay_near_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    folder = tmp_path / "sys/devices/system/node/node5"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{max(allowed)}\n")
    monkeypatch.setattr(migrator, "stay_on_node", partial(stay_on_node, root=tmp_path))
    for node, cpus in ((5, {max(allowed)}), (None, allowed)):
        device = Watched(node)
        round_trip(device).close()
        assert all(seen == cpus for seen in device.cpus)
        assert len({id(buffer.obj) for buffer in device.locked}) == 2  # a buffer of each thread
        assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize("node", NODES)
def test_a_host_tier_lies_on_the_devices_node(node: int) -> None:
    if not NUMA_MAPS.exists() or not cpus_of_node(node) & os.sched_getaffinity(0):
        pytest.skip("this system does not say, or lets this process not run there")
    storage = round_trip(Watched(node))
    assert storage._slots is not None
    pages = pages_by_node(storage._slots.ctypes.data)
    storage.close()
    assert set(pages) == {node}


def pages_by_node(address: int) -> dict[int, int]:
    """Resident pages of the mapping that begins at an address."""
    for line in NUMA_MAPS.read_text().splitlines():
        start, *facts = line.split()
        if int(start, 16) == address:
            counts = (fact[1:].split("=") for fact in facts if fact[0] == "N")
            return {int(node): int(count) for node, count in counts}
    raise AssertionError(f"no mapping begins at {address:#x}")
