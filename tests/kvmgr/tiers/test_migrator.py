"""`KVMigrator`: moves end at chunks, are bounded and reported, and wait for none of another source."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from sagellm.core.blocks import Tier
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_tiers import ReadOutcome, TierLookup
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.kv_pool.tiers import saves
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator, MigrationPlan, MigrationReport, MoveTarget
from tests.kvmgr.tiers.drivers import (
    BLOCK_BYTES,
    SIZE,
    FakeDevice,
    FaultyStorage,
    User,
    content,
    hashes_of,
)

NUM_BLOCKS, PER_CHUNK = 6, 2
PATIENCE_S = 20.0
TOKENS = Tokens(range(NUM_BLOCKS * SIZE))
PATH = bytes(TOKENS.slice(0))
HASHES = hashes_of(PATH, Namespace())


class Moves:
    """A migrator over a device with `NUM_BLOCKS` blocks of a path, and two storages, of which one is closed
    by its gate."""

    def __init__(self, max_bytes_per_s: float | None = None) -> None:
        self.device = FakeDevice(2 * NUM_BLOCKS)
        for number, token_hash in enumerate(HASHES):
            self.device.blocks[number] = np.frombuffer(content(token_hash), np.uint8)
        self.host, self.disk = FaultyStorage(NUM_BLOCKS), FaultyStorage(NUM_BLOCKS)
        self.migrator = KVMigrator(
            self.device, {Tier.DRAM: self.host, Tier.NVME: self.disk}, hashes_of, block_size=SIZE,
            chunk_bytes=PER_CHUNK * BLOCK_BYTES, max_bytes_per_s=max_bytes_per_s,
        )  # fmt: skip

    def down(self, *tiers: Tier) -> int:
        every = range(NUM_BLOCKS)
        targets = tuple(MoveTarget(tier, every, every) for tier in tiers)
        return self.migrator.migrate(MigrationPlan(PATH, Namespace(), every, Tier.HBM, every, targets))

    def up(self, tier: Tier) -> int:
        """Into the second half of the device."""
        every = range(NUM_BLOCKS)
        target = MoveTarget(Tier.HBM, every, range(NUM_BLOCKS, 2 * NUM_BLOCKS))
        return self.migrator.migrate(MigrationPlan(PATH, Namespace(), every, tier, every, (target,)))

    def report(self, move_id: int) -> MigrationReport:
        """The next report, which is of this move."""
        assert self.migrator.wait(PATIENCE_S), "nothing is reported"
        [report] = self.migrator.poll()
        assert report.move_id == move_id
        return report


def test_there_and_back() -> None:
    moves = Moves()
    down = moves.report(moves.down(Tier.DRAM, Tier.NVME))
    assert down.num_written == {Tier.DRAM: NUM_BLOCKS, Tier.NVME: NUM_BLOCKS}
    for tier in (Tier.DRAM, Tier.NVME):
        moves.device.blocks[NUM_BLOCKS:] = 0
        up = moves.report(moves.up(tier))
        assert (up.num_read, up.num_written, up.outcome) == (6, {Tier.HBM: 6}, ReadOutcome.OK)
        assert up.num_bytes == NUM_BLOCKS * BLOCK_BYTES
        assert (moves.device.blocks[NUM_BLOCKS:] == moves.device.blocks[:NUM_BLOCKS]).all()
    moves.migrator.close()


def test_a_move_that_is_cancelled_ends_behind_its_chunk() -> None:
    moves = Moves()
    moves.disk.gate.clear()
    move_id = moves.down(Tier.NVME)
    assert moves.disk.called.wait(PATIENCE_S)
    moves.migrator.cancel(move_id)
    moves.migrator.cancel(999)
    assert moves.migrator.poll() == []
    moves.disk.gate.set()
    report = moves.report(move_id)
    assert report.is_cancelled
    assert (report.num_read, report.num_written) == (PER_CHUNK, {Tier.NVME: PER_CHUNK})
    assert len(moves.disk.kept) == PER_CHUNK
    assert moves.migrator.is_idle
    assert moves.migrator.num_pending_bytes == 0
    moves.migrator.close()


def test_what_goes_down_is_bounded() -> None:
    """All bytes take at least their number divided by the bound."""
    num_bytes = NUM_BLOCKS * BLOCK_BYTES
    moves = Moves(max_bytes_per_s=num_bytes / 0.1)
    began_s = time.perf_counter()
    assert moves.report(moves.down(Tier.DRAM)).spent_s > 0.099
    assert time.perf_counter() - began_s > 0.099
    moves.migrator.close()


def test_a_move_that_waits_for_its_bound_can_be_cancelled() -> None:
    """Its next chunk would be due in hours."""
    moves = Moves(max_bytes_per_s=0.01)
    move_id = moves.down(Tier.NVME)
    assert moves.disk.called.wait(PATIENCE_S)
    moves.migrator.cancel(move_id)
    assert moves.report(move_id).num_written == {Tier.NVME: PER_CHUNK}
    moves.migrator.close()


def test_a_device_that_fails_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    moves = Moves()
    moves.report(moves.down(Tier.DRAM))
    moves.device.fault_rate = 1.0
    down = moves.report(moves.down(Tier.NVME))
    assert down.num_written == {}
    assert "the device has failed" in down.errors[Tier.HBM]
    up = moves.report(moves.up(Tier.DRAM))
    assert (up.num_read, up.outcome) == (0, ReadOutcome.OK)  # the tier's blocks are not at fault
    assert "the device has failed" in up.errors[Tier.HBM]
    assert up.num_written == {Tier.HBM: 0}
    assert caplog.text.count("could not be moved") == 1
    moves.migrator.close()


def test_a_storage_that_fails_is_reported_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    moves = Moves()
    moves.host.error_rate = 1.0
    down = moves.report(moves.down(Tier.DRAM, Tier.NVME))
    assert down.num_written == {Tier.DRAM: 0, Tier.NVME: NUM_BLOCKS}
    assert down.errors == {Tier.DRAM: "a mistake in the storage"}
    assert caplog.text.count("the tier dram could not be moved") == 1
    up = moves.report(moves.up(Tier.DRAM))
    assert (up.num_read, up.outcome) == (0, ReadOutcome.IO_ERROR)
    assert moves.report(moves.up(Tier.NVME)).num_read == NUM_BLOCKS
    moves.migrator.close()


def test_no_move_waits_for_one_from_another_source() -> None:
    moves = Moves()
    moves.report(moves.down(Tier.DRAM, Tier.NVME))
    moves.disk.gate.clear()
    slow = moves.up(Tier.NVME)
    behind = moves.up(Tier.NVME)
    assert moves.report(moves.up(Tier.DRAM)).num_read == NUM_BLOCKS
    assert moves.report(moves.down(Tier.DRAM)).num_read == NUM_BLOCKS
    moves.disk.gate.set()
    ended: list[int] = []
    while not moves.migrator.is_idle:
        assert moves.migrator.wait(PATIENCE_S)
        ended += [report.move_id for report in moves.migrator.poll()]
    assert ended == [slow, behind]
    moves.migrator.close()


def test_a_poll_takes_as_many_reports_as_are_asked_for_and_loses_none() -> None:
    """A move that is larger than that is reported alone. While reports are kept, `wait` returns at once."""
    moves = Moves()
    move_ids = [moves.down(Tier.DRAM) for _ in range(5)]
    moves.migrator.close()
    found = []
    for most_blocks, num_reports in ((1, 1), (2 * NUM_BLOCKS + 1, 2), (NUM_BLOCKS, 1)):
        reports = moves.migrator.poll(most_blocks)
        assert len(reports) == num_reports
        found += [report.move_id for report in reports]
        assert moves.migrator.wait(0.0)
        assert not moves.migrator.is_idle
        assert moves.migrator.num_pending_bytes == (5 - len(found)) * NUM_BLOCKS * BLOCK_BYTES
    found += [report.move_id for report in moves.migrator.poll()]
    assert found == move_ids
    assert moves.migrator.is_idle
    assert not moves.migrator.wait(0.0)


def test_what_is_under_way_when_it_is_closed_is_reported() -> None:
    moves = Moves()
    moves.disk.gate.clear()
    move_ids = [moves.down(Tier.NVME), moves.down(Tier.NVME)]
    assert moves.disk.called.wait(PATIENCE_S)
    closes = threading.Thread(target=moves.migrator.close)
    closes.start()
    assert moves.migrator._moves[move_ids[1]].cancelled.wait(PATIENCE_S)
    moves.disk.gate.set()
    closes.join(PATIENCE_S)
    reports = moves.migrator.poll()
    assert [report.move_id for report in reports] == move_ids
    assert all(report.is_cancelled for report in reports)
    assert [report.num_written.get(Tier.NVME, 0) for report in reports] == [PER_CHUNK, 0]
    with pytest.raises(BookkeepingError, match="reported twice"):
        moves.migrator.abandon(move_ids[0])


def test_what_is_beyond_the_pending_bytes_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is saved when it is offered again."""
    monkeypatch.setattr(saves, "MAX_PENDING_BYTES", 6 * BLOCK_BYTES)
    disk = FaultyStorage(32)
    user = User(16, [(Tier.DRAM, FaultyStorage(32)), (Tier.NVME, disk)])
    first, second = Tokens(range(4 * SIZE)), Tokens(range(100, 100 + 4 * SIZE))
    disk.gate.clear()
    user.serve(first, "first")
    assert disk.called.wait(PATIENCE_S)
    user.serve(second, "second")
    disk.gate.set()
    user.settle()
    assert [state.dropped for state in user.hierarchy.states()] == [2, 2]
    assert [state.stored for state in user.hierarchy.states()] == [6, 6]
    assert user.ask(second, "again", Namespace()) is not TierLookup.HIT_PENDING
    user.end(second)
    user.settle()
    assert [state.stored for state in user.hierarchy.states()] == [8, 8]
    assert [state.dropped for state in user.hierarchy.states()] == [2, 2]
    user.check()
    user.hierarchy.close()
