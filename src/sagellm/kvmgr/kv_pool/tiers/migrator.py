"""`KVMigrator`: carries out migration plans on worker threads, beside the engine's steps.

    migrator.migrate(plan)               returns at once
    for report in migrator.poll(): ...   never blocks

A plan moves blocks of one path from one tier to others, in pieces of about `chunk_bytes`. What is read from a
lower tier is verified there; at the first block that is not right the move ends, and the report says how many
blocks were moved before it. Each tier that blocks come from has a thread, so a request does not wait for what
is saved, nor for another request whose blocks come from a slower tier.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from sagellm.core.blocks import Tier
from sagellm.core.errors import BookkeepingError
from sagellm.core.numa import stay_on_node
from sagellm.core.protocols.kv_tiers import BlockBytes, BlockStorage, ReadOutcome, StoredBlock
from sagellm.core.types import TOKEN_BYTES, Namespace
from sagellm.kvmgr.kv_pool.tiers.admission import AdmissionFilter
from sagellm.kvmgr.kv_pool.tiers.disk_slab import aligned_buffer

log = logging.getLogger("sagellm.tiers")
CHUNK_BYTES = 8 << 20
"""About twenty blocks of a small model: with fewer, gathering them from the layers and the disk are slow."""
HashesOf = Callable[[bytes, Namespace], Sequence[bytes]]
"""Chained hashes of the whole blocks of a path, given as int32 bytes from its first token on."""


@dataclass(frozen=True, slots=True)
class MoveTarget:
    """Where blocks of a plan go.

    `offsets`: ascending indices into the plan's `positions`; `block_ids`: the block or slot for each.
    """

    tier: Tier
    offsets: Sequence[int]
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Moves the blocks at `positions` of a path from one tier to others.

    `positions` ascend. `path`: int32 bytes of the path's tokens, from the first token up to the last block
    that is moved. `source_ids`: the block or slot of each position in `source`. `ends`: its request
    leaves the batch (see `AdmissionFilter`). `is_awaited`: the engine waits for the end of the move.
    """

    path: bytes
    namespace: Namespace
    positions: Sequence[int]
    source: Tier
    source_ids: Sequence[int]
    targets: tuple[MoveTarget, ...]
    ends: bool = False
    is_awaited: bool = False


@dataclass(slots=True)
class MigrationReport:
    """What became of a plan.

    `num_read`: leading positions that were read and verified; `outcome`: of the first one that was not.
    `num_admitted`: by tier with a filter, how many of the leading blocks of its target may be written;
    `num_written`: by tier, how many were. `errors`: by tier, why the others were not.
    `num_bytes` were read; `spent_s` is the time of the whole move, writes included.
    """

    move_id: int
    plan: MigrationPlan
    num_read: int = 0
    outcome: ReadOutcome = ReadOutcome.OK
    num_admitted: dict[Tier, int] = field(default_factory=dict)
    num_written: dict[Tier, int] = field(default_factory=dict)
    errors: dict[Tier, str] = field(default_factory=dict)
    num_bytes: int = 0
    spent_s: float = 0.0
    is_cancelled: bool = False


class Migrator(Protocol):
    """Carries out migration plans beside the steps. For one thread.

    `num_pending_bytes`: of the moves that have not been reported.
    """

    num_pending_bytes: int

    @property
    def is_idle(self) -> bool:
        """Whether every report has been polled."""

    def migrate(self, plan: MigrationPlan) -> int:
        """Begin to carry out a plan; returns the id that its report will have."""

    def cancel(self, move_id: int) -> None:
        """Stop a move at its next chunk. Its report still comes. Unknown ids are ignored."""

    def abandon(self, move_id: int) -> MigrationReport:
        """End a move now; returns its report, which `poll` does not return any more."""

    def stuck(self, limit_s: float) -> Mapping[Tier, Tier]:
        """Sources whose thread has been in one call for longer.

        With the tier whose storage it called.
        """

    def replace_thread(self, source: Tier) -> None:
        """Later moves from a source do not wait for its thread, which is stuck."""

    def poll(self, most_blocks: float = math.inf) -> list[MigrationReport]:
        """The reports since the last call; each ends its move. Never waits.

        Those that would be of more than `most_blocks` blocks together are kept for the next call, but for
        the first one.
        """

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to poll, or `wake` was called; False after `timeout_s`."""

    def wake(self) -> None:
        """End a `wait`. For any thread."""

    def close(self) -> None:
        """Cancel what is under way, and wait for its end. The reports can be polled."""


@dataclass(slots=True)
class _Move:
    """A plan under way. Its thread fills the report, and sets `began_s`."""

    report: MigrationReport
    cancelled: threading.Event = field(default_factory=threading.Event)
    began_s: float = math.inf


class KVMigrator:
    """Implements `Migrator`: owns the worker threads and their buffers.

    `device` has the blocks of tier 'hbm', `storages` those of the others. `max_bytes_per_s` bounds what goes
    down, so that it leaves memory bandwidth to the engine; None: no bound, nor for what is awaited.
    `filters`: of tiers that do not take every block.

    The threads stay on the NUMA node of the device. They are the first to write to their buffers and to the
    slots of a host tier, so both lie there.
    """

    def __init__(
        self,
        device: BlockBytes,
        storages: Mapping[Tier, BlockStorage],
        hashes_of: HashesOf,
        *,
        block_size: int,
        chunk_bytes: int = CHUNK_BYTES,
        max_bytes_per_s: float | None = None,
        filters: Mapping[Tier, AdmissionFilter] | None = None,
    ) -> None:
        self._device, self._storages, self._hashes_of = device, dict(storages), hashes_of
        self._block_bytes, self._token_bytes = device.bytes_per_block, block_size * TOKEN_BYTES
        self._blocks_per_chunk = max(1, chunk_bytes // self._block_bytes)
        self._max_bytes_per_s, self._filters = max_bytes_per_s, dict(filters or {})
        self._threads = {source: self._thread(source) for source in (Tier.HBM, *storages)}
        # Held while blocks of the device are written, or read, and while a move is abandoned.
        self._writing, self._reading = threading.Lock(), threading.Lock()
        self._calls: dict[Tier, tuple[Tier, float]] = {}
        self._failures: set[tuple[Tier, type[Exception]]] = set()
        self._buffers = threading.local()
        self._moves: dict[int, _Move] = {}
        self._abandoned: set[int] = set()
        self._done: deque[MigrationReport] = deque()
        self._has_done = threading.Event()
        self._num_moves = 0
        self.num_pending_bytes = 0

    def _thread(self, source: Tier) -> ThreadPoolExecutor:
        node = self._device.numa_node
        return ThreadPoolExecutor(1, f"sagellm-kv-from-{source}", initializer=stay_on_node, initargs=(node,))

    @property
    def is_idle(self) -> bool:
        return not self._moves

    def migrate(self, plan: MigrationPlan) -> int:
        self._device.follow_steps()  # once for all chunks: a wait may take as long as a step
        self._num_moves += 1
        move_id = self._num_moves
        move = self._moves[move_id] = _Move(MigrationReport(move_id, plan))
        self.num_pending_bytes += len(plan.positions) * self._block_bytes
        self._threads[plan.source].submit(self._run, move)
        return move_id

    def cancel(self, move_id: int) -> None:
        if move_id in self._moves:
            self._moves[move_id].cancelled.set()

    def abandon(self, move_id: int) -> MigrationReport:
        """End a move now, and return its report. Its thread may still call a storage.

        From now on the thread reads and writes no block of the device, and `poll` does not report the move.
        """
        with self._writing, self._reading:
            move = self._end(move_id)
            move.cancelled.set()
            self._abandoned.add(move_id)
            report = replace(move.report, num_written=dict(move.report.num_written), is_cancelled=True)
        report.outcome = ReadOutcome.OK  # another one is of a block that the thread has not counted yet
        report.spent_s = max(0.0, time.perf_counter() - move.began_s)
        return report

    def stuck(self, limit_s: float) -> dict[Tier, Tier]:
        before_s = time.perf_counter() - limit_s
        return {source: tier for source, (tier, began_s) in self._calls.copy().items() if began_s < before_s}

    def replace_thread(self, source: Tier) -> None:
        """See `Migrator`. The old thread ends when its call returns."""
        self._threads[source].shutdown(wait=False, cancel_futures=False)
        self._threads[source] = self._thread(source)
        self._calls.pop(source, None)

    def poll(self, most_blocks: float = math.inf) -> list[MigrationReport]:
        self._has_done.clear()
        reports, num_blocks = list[MigrationReport](), 0
        while self._done:
            num_blocks += len(self._done[0].plan.positions)
            if reports and num_blocks > most_blocks:
                self._has_done.set()
                break
            report = self._done.popleft()
            if report.move_id in self._abandoned:
                self._abandoned.remove(report.move_id)
                continue
            self._end(report.move_id)
            reports.append(report)
        return reports

    def _end(self, move_id: int) -> _Move:
        move = self._moves.pop(move_id, None)
        if move is None:
            raise BookkeepingError(f"move {move_id} was reported twice")
        self.num_pending_bytes -= len(move.report.plan.positions) * self._block_bytes
        return move

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a report, or `wake` was called; False after `timeout_s`."""
        return self._has_done.wait(timeout_s)

    def wake(self) -> None:
        """End a `wait`. For any thread."""
        self._has_done.set()

    def close(self) -> None:
        for move in self._moves.values():
            move.cancelled.set()
        for thread in self._threads.values():
            thread.shutdown(wait=True)

    # -- on worker threads

    def _run(self, move: _Move) -> None:
        report, plan = move.report, move.report.plan
        began_s = move.began_s = time.perf_counter()
        try:
            self._move(plan, report, move.cancelled)
        except Exception as error:  # noqa: BLE001 - of the device; without a report its blocks are held for ever
            self._log_once(error, Tier.HBM)
            report.errors[Tier.HBM] = repr(error)
        report.spent_s = time.perf_counter() - began_s
        self._done.append(report)
        self._has_done.set()

    def _move(self, plan: MigrationPlan, report: MigrationReport, cancelled: threading.Event) -> None:
        hashes = self._hashes_of(plan.path, plan.namespace)
        began_s, end = time.perf_counter(), self._admit(plan, hashes, report)
        for start in range(0, end, self._blocks_per_chunk):
            if cancelled.is_set():
                report.is_cancelled = True
                return
            stop = min(start + self._blocks_per_chunk, end)
            chunk = self._buffer()[: (stop - start) * self._block_bytes]
            num_read = self._read(plan, hashes, start, stop, chunk, report)
            with nullcontext() if plan.source is Tier.HBM else self._writing:
                if report.move_id in self._abandoned:
                    return
                for target in plan.targets:
                    self._write(plan, hashes, target, start, start + num_read, chunk, report)
                report.num_read += num_read
                report.num_bytes += num_read * self._block_bytes
            if report.outcome is not ReadOutcome.OK:
                return
            if plan.source is Tier.HBM and self._max_bytes_per_s and not plan.is_awaited:
                due_s = began_s + report.num_bytes / self._max_bytes_per_s
                cancelled.wait(max(0.0, due_s - time.perf_counter()))

    def _admit(self, plan: MigrationPlan, hashes: Sequence[bytes], report: MigrationReport) -> int:
        """Ask the filters; returns how many of the leading positions have to be read."""
        end = 0
        for target in plan.targets:
            num_wanted = len(target.offsets)
            if target.tier in self._filters:
                wanted = [hashes[plan.positions[offset]] for offset in target.offsets]
                num_wanted = self._filters[target.tier].num_admitted(wanted, ends=plan.ends)
                report.num_admitted[target.tier] = num_wanted
            if num_wanted:
                end = max(end, target.offsets[num_wanted - 1] + 1)
        return end

    def _read(
        self, plan: MigrationPlan, hashes: Sequence[bytes], start: int, stop: int, chunk: memoryview,
        report: MigrationReport,
    ) -> int:  # fmt: skip
        """Read a chunk; returns how many leading blocks are right."""
        ids = plan.source_ids[start:stop]
        if plan.source is Tier.HBM:
            with self._reading:
                if report.move_id in self._abandoned:
                    return 0
                self._device.read_blocks(ids, chunk)
            return stop - start
        expected = [hashes[position] for position in plan.positions[start:stop]]
        try:
            with self._call(plan.source, plan.source):
                outcomes = self._storages[plan.source].read(ids, expected, chunk)
        except Exception as error:  # noqa: BLE001 - of this tier
            self._log_once(error, plan.source)
            report.outcome, report.errors[plan.source] = ReadOutcome.IO_ERROR, repr(error)
            return 0
        for number, outcome in enumerate(outcomes):
            if outcome is not ReadOutcome.OK:
                report.outcome = outcome
                return number
        return stop - start

    def _write(
        self, plan: MigrationPlan, hashes: Sequence[bytes], target: MoveTarget, start: int, stop: int,
        chunk: memoryview, report: MigrationReport,
    ) -> None:  # fmt: skip
        """Write the blocks of a chunk that belong to a target."""
        done = report.num_written.setdefault(target.tier, 0)
        last, most = done, report.num_admitted.get(target.tier, len(target.offsets))
        while last < most and target.offsets[last] < stop:
            last += 1
        if last == done or target.tier in report.errors or report.move_id in self._abandoned:
            return
        offsets, ids = target.offsets[done:last], target.block_ids[done:last]
        data = self._pieces(chunk, [offset - start for offset in offsets])
        if target.tier is Tier.HBM:
            self._device.write_blocks(ids, data)
        else:
            blocks = [
                self._stored(plan, hashes, offset, slot) for offset, slot in zip(offsets, ids, strict=True)
            ]
            try:
                with self._call(plan.source, target.tier):
                    self._storages[target.tier].write(blocks, data)
            except Exception as error:  # noqa: BLE001 - of this tier alone
                if not isinstance(error, OSError):
                    self._log_once(error, target.tier)
                report.errors[target.tier] = str(error) or repr(error)
                return
        report.num_written[target.tier] = last

    @contextmanager
    def _call(self, source: Tier, tier: Tier) -> Iterator[None]:
        """The thread of a source calls the storage of a tier."""
        self._calls[source] = call = tier, time.perf_counter()
        try:
            yield
        finally:
            if self._calls.get(source) is call:  # else another thread has taken its place
                del self._calls[source]

    def _log_once(self, error: Exception, tier: Tier) -> None:
        """Log the first error of a kind that no medium raises, with its traceback."""
        kind = tier, type(error)
        if kind not in self._failures:
            self._failures.add(kind)
            log.error("KV blocks of the tier %s could not be moved", tier, exc_info=error)

    def _stored(self, plan: MigrationPlan, hashes: Sequence[bytes], offset: int, slot: int) -> StoredBlock:
        position, size = plan.positions[offset], self._token_bytes
        parent = hashes[position - 1] if position else b""
        tokens = plan.path[position * size : (position + 1) * size]
        return StoredBlock(slot, hashes[position], parent, plan.namespace, tokens, time.time())

    def _pieces(self, chunk: memoryview, numbers: Sequence[int]) -> memoryview:
        """The blocks of a chunk with these numbers, one behind the other."""
        size = self._block_bytes
        if numbers[-1] - numbers[0] + 1 == len(numbers):
            return chunk[numbers[0] * size : (numbers[-1] + 1) * size]
        return memoryview(bytearray().join([chunk[n * size : (n + 1) * size] for n in numbers]))

    def _buffer(self) -> memoryview:
        """This thread's buffer of one chunk, near the device."""
        if not hasattr(self._buffers, "chunk"):
            self._buffers.chunk = aligned_buffer(self._blocks_per_chunk * self._block_bytes)
            self._device.lock_pages(self._buffers.chunk)
        chunk: memoryview = self._buffers.chunk
        return chunk
