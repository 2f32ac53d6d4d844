"""KV tiers of a simulated device: blocks move in simulated time, without bytes.

`HierarchyManager`, tiers, indices and eviction policies are the real ones. `SimulatedMigrator` stands in for
the threads of `KVMigrator`, and `SimulatedStorage` remembers only which block is in which slot.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sagellm.core.blocks import Tier
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_tiers import BlockStorage, Buffer, ReadOutcome, StoredBlock
from sagellm.kvmgr.kv_pool.tiers.migrator import CHUNK_BYTES, HashesOf, MigrationPlan, MigrationReport
from sagellm.kvmgr.kv_pool.tiers.speeds import LATENCY_S


class SimulatedStorage:
    """Implements `BlockStorage` without bytes: a slot has the hash of its block."""

    fault: str | None = None

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._hashes: dict[int, bytes] = {}

    def write(self, blocks: Sequence[StoredBlock], data: Buffer) -> None:
        self._hashes.update((block.slot, block.token_hash) for block in blocks)

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> Sequence[ReadOutcome]:
        return list(map(self._outcome, slots, token_hashes))

    def _outcome(self, slot: int, token_hash: bytes) -> ReadOutcome:
        held = self._hashes.get(slot)
        if held is None:
            return ReadOutcome.ABSENT
        return ReadOutcome.OK if held == token_hash else ReadOutcome.OTHER_TOKENS

    def forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._hashes.pop(slot, None)

    def touch(self, slots: Iterable[int]) -> None:
        """Does nothing: the time of last use is for a restart."""

    def sync(self) -> None:
        """Does nothing: see `touch`."""

    def recover(self) -> Sequence[StoredBlock]:
        return ()

    def close(self) -> None:
        self._hashes.clear()


@dataclass(slots=True)
class _Move:
    """A plan under way, in simulated seconds.

    `num_blocks`: how many of its positions are moved, fewer than all once it was cancelled. While others are
    before it in its queue, both times are infinite.
    """

    report: MigrationReport
    num_blocks: int
    began_s: float = math.inf
    ends_s: float = math.inf


class SimulatedMigrator:
    """Implements `Migrator` on a simulated clock, which `wait` moves.

    Like `KVMigrator`'s threads, each tier that blocks come from has a queue: one leads down from the device,
    one up from each tier below it. A move takes `LATENCY_S` and then the time of the slowest link that its
    blocks cross: `pcie` next to the device, `nvme` between host memory and the disk, in bytes per second.
    Moves of different queues do not slow each other, nor a step.
    """

    def __init__(
        self,
        storages: Mapping[Tier, BlockStorage],
        hashes_of: HashesOf,
        clock: ManualClock,
        *,
        bytes_per_block: int,
        pcie: float,
        nvme: float,
    ) -> None:
        self._storages, self._hashes_of, self._clock = storages, hashes_of, clock
        self._block_bytes, self._pcie, self._nvme = bytes_per_block, pcie, nvme
        self._blocks_per_chunk = max(1, CHUNK_BYTES // bytes_per_block)
        self._queues: dict[Tier, deque[_Move]] = {source: deque() for source in (Tier.HBM, *storages)}
        self._done: list[_Move] = []
        self._moves: dict[int, _Move] = {}
        self._num_moves = 0
        self.num_pending_bytes = 0

    @property
    def is_idle(self) -> bool:
        return not self._moves

    @property
    def next_report_s(self) -> float:
        """When the next move ends or has ended; infinite without any."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        return min((move.ends_s for move in (*heads, *self._done)), default=math.inf)

    def migrate(self, plan: MigrationPlan) -> int:
        self._finish_due()
        self._num_moves += 1
        move = _Move(MigrationReport(self._num_moves, plan), len(plan.positions))
        self._moves[self._num_moves] = move
        self.num_pending_bytes += len(plan.positions) * self._block_bytes
        queue = self._queues[plan.source]
        queue.append(move)
        if queue[0] is move:
            self._begin(move, self._clock.now())
        return self._num_moves

    def cancel(self, move_id: int) -> None:
        self._finish_due()
        move, now_s = self._moves.get(move_id), self._clock.now()
        if move is None or move.ends_s <= now_s:
            return
        plan, num_blocks = move.report.plan, 0
        while move.began_s < now_s and move.began_s + self._seconds(plan, num_blocks) < now_s:
            num_blocks += self._blocks_per_chunk
        if num_blocks < move.num_blocks:
            move.num_blocks, move.report.is_cancelled = num_blocks, True
            if move.began_s < math.inf:
                self._begin(move, move.began_s)
                move.ends_s = max(move.ends_s, now_s)

    def abandon(self, move_id: int) -> MigrationReport:
        raise BookkeepingError(f"move {move_id}: only loads from a shared store are abandoned, not simulated")

    def stuck(self, limit_s: float) -> Mapping[Tier, Tier]:
        return {}

    def replace_thread(self, source: Tier) -> None:
        raise BookkeepingError(f"{source}: no thread is stuck, it is simulated")

    def poll(self, most_blocks: float = math.inf) -> list[MigrationReport]:
        self._finish_due()
        self._done.sort(key=lambda move: (move.ends_s, move.report.move_id))
        num_blocks = list(accumulate(len(move.report.plan.positions) for move in self._done))
        num_taken = max(1, bisect_right(num_blocks, most_blocks))
        taken, self._done = self._done[:num_taken], self._done[num_taken:]
        return [self._report(move) for move in taken]

    def wait(self, timeout_s: float) -> bool:
        """Let time pass until the next move ends; False after `timeout_s`."""
        self._clock.advance_to(min(self.next_report_s, self._clock.now() + timeout_s))
        self._finish_due()
        return bool(self._done)

    def wake(self) -> None:
        """Does nothing: `wait` takes no time."""

    def close(self) -> None:
        for move_id in self._moves:
            self.cancel(move_id)
        while any(self._queues.values()):
            self._clock.advance_to(min(queue[0].ends_s for queue in self._queues.values() if queue))
            self._finish_due()

    def check(self) -> None:
        """Raise `BookkeepingError` where moves, queues and pending bytes disagree."""
        queued = [move for queue in self._queues.values() for move in queue]
        known = sorted(move.report.move_id for move in (*queued, *self._done))
        if known != sorted(self._moves):
            raise BookkeepingError(f"moves {sorted(self._moves)} are under way, {known} in queues or done")
        begun = [move for move in queued if move.began_s < math.inf]
        if begun != [queue[0] for queue in self._queues.values() if queue]:
            raise BookkeepingError(
                "a move has begun that is not the first of its queue, or the first has not"
            )
        num_bytes = sum(len(move.report.plan.positions) for move in self._moves.values()) * self._block_bytes
        if num_bytes != self.num_pending_bytes:
            raise BookkeepingError(f"{num_bytes} bytes are under way, {self.num_pending_bytes} are counted")

    # -- inside

    def _begin(self, move: _Move, now_s: float) -> None:
        move.began_s = now_s
        move.ends_s = now_s + self._seconds(move.report.plan, move.num_blocks)

    def _seconds(self, plan: MigrationPlan, num_blocks: int) -> float:
        """Of the first `num_blocks` blocks of a plan."""
        if not num_blocks:
            return 0.0
        on_disk = num_blocks if plan.source is Tier.NVME else 0
        on_disk += sum(bisect_left(to.offsets, num_blocks) for to in plan.targets if to.tier is Tier.NVME)
        return LATENCY_S + self._block_bytes * max(num_blocks / self._pcie, on_disk / self._nvme)

    def _finish_due(self) -> None:
        """Move what has ended from the queues to `_done`; the next ones begin."""
        now_s = self._clock.now()
        for queue in self._queues.values():
            while queue and queue[0].ends_s <= now_s:
                ended = queue.popleft()
                self._done.append(ended)
                if queue:
                    self._begin(queue[0], ended.ends_s)

    def _report(self, move: _Move) -> MigrationReport:
        """End a move: fill its slots, verify what it read."""
        report, plan = move.report, move.report.plan
        del self._moves[report.move_id]
        self.num_pending_bytes -= len(plan.positions) * self._block_bytes
        chained = self._hashes_of(plan.path, plan.namespace)
        hashes = [chained[position] for position in plan.positions[: move.num_blocks]]
        report.num_read = move.num_blocks
        if plan.source is not Tier.HBM:
            slots, nothing = plan.source_ids[: move.num_blocks], memoryview(b"")
            outcomes = self._storages[plan.source].read(slots, hashes, nothing)
            wrong = [number for number, found in enumerate(outcomes) if found is not ReadOutcome.OK]
            if wrong:
                report.num_read, report.outcome = wrong[0], outcomes[wrong[0]]
        for target in plan.targets:
            num_written = report.num_written[target.tier] = bisect_left(target.offsets, report.num_read)
            if target.tier is not Tier.HBM:
                pairs = zip(target.offsets[:num_written], target.block_ids, strict=False)
                self._storages[target.tier].write(
                    [StoredBlock(slot, hashes[at], b"", plan.namespace, b"", 0.0) for at, slot in pairs], b""
                )
        report.num_bytes = report.num_read * self._block_bytes
        report.spent_s = move.ends_s - move.began_s
        return report
