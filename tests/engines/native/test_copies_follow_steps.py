"""`PoolBytes`: copies come behind what steps have queued. On a GPU: `tests/gpu/test_block_bytes.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sagellm.core.blocks import Tier
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.native.block_bytes import PoolBytes
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator, MigrationPlan, MoveTarget
from tests.kvmgr.tiers.drivers import SIZE, FakeDevice, FaultyStorage, hashes_of


class FakeStream:
    """Notes the streams that it waits for."""

    def __init__(self) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, stream: object) -> None:
        self.waited_for.append(stream)


def test_copies_wait_for_the_stream_of_the_thread_that_begins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """That thread hands steps to the device, or shares its stream with the one that does."""
    pool, stream = PoolBytes([torch.zeros(2, 4, dtype=torch.uint8)]), FakeStream()
    pool.follow_steps()
    assert stream.waited_for == []
    monkeypatch.setattr(pool, "_stream", stream)
    monkeypatch.setattr(pool, "_module", torch.cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of steps", device))
    pool.follow_steps()
    assert stream.waited_for == [("stream of steps", torch.device("cpu"))]


class Noting(FakeDevice):
    def __init__(self) -> None:
        super().__init__(4)
        self.calls: list[str] = []

    def follow_steps(self) -> None:
        self.calls.append("follow_steps")

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        self.calls.append("read")
        super().read_blocks(block_ids, target)

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        self.calls.append("write")
        super().write_blocks(block_ids, data)


@pytest.mark.parametrize("is_save", [True, False])
def test_a_move_follows_the_steps_once(is_save: bool) -> None:
    """Once for all its chunks: each wait may take as long as a step."""
    device, path = Noting(), Tokens(range(3 * SIZE)).tobytes()
    storage = FaultyStorage(4)
    migrator = KVMigrator(device, {Tier.DRAM: storage}, hashes_of, block_size=SIZE, chunk_bytes=1)
    ends = (Tier.HBM, Tier.DRAM)
    for source, target in (ends,) if is_save else (ends, ends[::-1]):
        device.calls.clear()
        plan = MigrationPlan(
            path, Namespace(), range(3), source, range(3), (MoveTarget(target, range(3), range(3)),)
        )
        migrator.migrate(plan)
        while not migrator.is_idle:
            migrator.wait(1.0)
            [report] = migrator.poll()
        assert report.num_written == {target: 3}
    assert device.calls == ["follow_steps", *[("read" if is_save else "write")] * 3]
    migrator.close()
