"""Messages from rank to rank through rings of cells in shared memory.

The ring from one rank to another has one writer and one reader. A message is cut into cells. The sender fills
cells while there are free ones, and the receiver empties them, when either submits, polls or waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sagellm.comm.collectives._buffers import Broken
from sagellm.comm.collectives.shared_kernels import Kernel
from sagellm.comm.collectives.shared_region import CELL_HEADER, MOST_CELLS, SharedRegion
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError, CommError
from sagellm.core.protocols.collectives import WorkStatus

_READ_AT = 128
_CELLS_AT = 256
_YIELDS = 200
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3
_ASK_S = 0.02


class _Header(NamedTuple):
    """Of a cell: bytes of the message, its tag, and bytes in this cell."""

    total: int
    tag: int
    size: int


@dataclass(slots=True)
class _Arriving:
    """A message of which some cells have come."""

    tag: int
    memory: torch.Tensor
    num_bytes: int = 0
    claimed_by: MessageWork | None = None


class MessageWork:
    """A send or a receive. `memory` are the bytes of a contiguous tensor."""

    def __init__(
        self, boxes: Mailboxes, peer: int, tag: int, memory: torch.Tensor, finish: Callable[[], object]
    ) -> None:
        self.peer, self.tag, self.memory, self._finish = peer, tag, memory, finish
        self.num_bytes = 0
        self.status = WorkStatus.PENDING
        self._boxes = boxes
        self._error: Exception | None = None

    def poll(self) -> WorkStatus:
        if self.status is WorkStatus.PENDING:
            self._boxes.poll(self)
        return self.status

    def wait(self, timeout_s: float | None = None) -> bool:
        self._boxes.wait(self, timeout_s)
        if self._error is not None:
            raise self._error
        return self.status is WorkStatus.DONE

    def error(self) -> Exception | None:
        return self._error

    def done(self) -> None:
        self._finish()
        self.status = WorkStatus.DONE

    def fail(self, error: Exception) -> None:
        self.status, self._error = WorkStatus.FAILED, error


@dataclass(slots=True)
class _Peer:
    """What is under way to and from one rank."""

    sends: deque[MessageWork] = field(default_factory=deque)
    receives: deque[MessageWork] = field(default_factory=deque)
    arriving: _Arriving | None = None
    unexpected: deque[_Arriving] = field(default_factory=deque)

    def pending(self) -> list[MessageWork]:
        arriving = self.arriving.claimed_by if self.arriving is not None else None
        return [*self.sends, *self.receives, *([arriving] if arriving is not None else [])]


class Mailboxes:
    """All messages of one rank."""

    def __init__(
        self, region: SharedRegion, kernel: Kernel, broken: Broken, timeout_s: float, clock: Clock
    ) -> None:
        self._region, self._kernel, self._broken = region, kernel, broken
        self._timeout_s, self._clock = timeout_s, clock
        self._memory = torch.from_numpy(region.memory)
        self._peers = [_Peer() for _ in range(region.layout.world_size)]
        self.num_pending = 0
        self._moved_s = self._asked_s = clock.now()

    def send(self, work: MessageWork) -> MessageWork:
        self._peers[work.peer].sends.append(work)
        self._begin_work()
        self.progress()
        return work

    def receive(self, work: MessageWork) -> MessageWork:
        peer = self._peers[work.peer]
        self._begin_work()
        for message in peer.unexpected:
            if message.tag == work.tag:
                peer.unexpected.remove(message)
                self._deliver(message.memory, work)
                return work
        arriving = peer.arriving
        if arriving is not None and arriving.claimed_by is None and arriving.tag == work.tag:
            arriving.claimed_by = work
        else:
            peer.receives.append(work)
        self.progress()
        return work

    def progress(self) -> bool:
        """Move what can be moved at once. Returns whether anything moved."""
        moved = False
        for rank, peer in enumerate(self._peers):
            moved |= self._fill_cells(rank, peer)
            moved |= self._empty_cells(rank, peer)
        return moved

    def poll(self, work: MessageWork) -> bool:
        """Move what can be moved. Now and then, see whether the work's peer is there."""
        now_s = self._clock.now()
        if self.progress():
            self._moved_s = now_s
            return True
        if now_s - self._asked_s > _ASK_S:
            self._asked_s = now_s
            self._check_peer(work, now_s - self._moved_s)
        return False

    def wait(self, work: MessageWork, timeout_s: float | None = None) -> None:
        """Move messages until the work has ended, or the timeout has passed."""
        began_s = self._clock.now()
        turns, sleep_s = 0, _SHORTEST_SLEEP_S
        while work.status is WorkStatus.PENDING:
            if self.poll(work):
                turns, sleep_s = 0, _SHORTEST_SLEEP_S
                continue
            if timeout_s is not None and self._clock.now() - began_s >= timeout_s:
                return
            turns += 1
            if turns > _YIELDS:
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            time.sleep(sleep_s if turns > _YIELDS else 0)

    def finish(self) -> None:
        """Wait for all works. Raises the error of one that failed."""
        while self.num_pending:
            work = next(work for peer in self._peers for work in peer.pending())
            self.wait(work)
            if error := work.error():
                raise error

    def fail(self, error: CommError) -> None:
        """End every pending work with this error."""
        for peer in self._peers:
            for work in peer.pending():
                work.fail(error)
            peer.sends.clear()
            peer.receives.clear()
            peer.arriving = None
        self.num_pending = 0

    def _begin_work(self) -> None:
        if not self.num_pending:
            self._moved_s = self._clock.now()
        self.num_pending += 1

    def check(self) -> None:
        """Raise `BookkeepingError` where the counts contradict each other."""
        pending = [work for peer in self._peers for work in peer.pending()]
        if len(pending) != self.num_pending or any(work.status is not WorkStatus.PENDING for work in pending):
            raise BookkeepingError(f"{self.num_pending} messages are said to be pending, {len(pending)} are")
        for rank, peer in enumerate(self._peers):
            message = peer.arriving
            if message is not None and message.num_bytes >= len(message.memory):
                raise BookkeepingError(f"a message from rank {rank} is whole and was not delivered")

    def _check_peer(self, work: MessageWork, waited_s: float) -> None:
        reason = self._region.why_broken() or self._region.why_unable(work.peer)
        if reason is None and waited_s > self._timeout_s:
            reason = f"rank {work.peer} has not answered for {self._timeout_s:g} s"
        if reason is not None and not self.progress():
            self._region.fail()
            self.fail(self._broken.fail(CommError(reason)))

    def _fill_cells(self, rank: int, peer: _Peer) -> bool:
        if not peer.sends:
            return False
        ring = self._region.layout.ring_at(self._region.rank, rank)
        written, moved = self._kernel.load(ring), False
        while peer.sends and (written - self._kernel.load(ring + _READ_AT)) % 2**32 < MOST_CELLS:
            work = peer.sends[0]
            cell = self._cell_at(ring, written)
            part = work.memory[work.num_bytes : work.num_bytes + self._region.layout.cell_bytes]
            self._header(cell)[:] = (len(work.memory), work.tag, len(part))
            self._memory[cell + CELL_HEADER : cell + CELL_HEADER + len(part)] = part
            written = (written + 1) % 2**32
            self._kernel.store(ring, written)
            work.num_bytes += len(part)
            moved = True
            if work.num_bytes == len(work.memory):
                peer.sends.popleft()
                self.num_pending -= 1
                work.done()
        return moved

    def _empty_cells(self, rank: int, peer: _Peer) -> bool:
        ring = self._region.layout.ring_at(rank, self._region.rank)
        read, written = self._kernel.load(ring + _READ_AT), self._kernel.load(ring)
        moved = read != written
        while read != written:
            cell = self._cell_at(ring, read)
            header = _Header(*self._header(cell).tolist())
            message = peer.arriving or self._begin(peer, header)
            start = cell + CELL_HEADER
            message.memory[message.num_bytes : message.num_bytes + header.size] = self._memory[
                start : start + header.size
            ]
            read = (read + 1) % 2**32
            self._kernel.store(ring + _READ_AT, read)
            message.num_bytes += header.size
            if message.num_bytes == len(message.memory):
                peer.arriving = None
                if message.claimed_by is not None:
                    self._deliver(message.memory, message.claimed_by)
                else:
                    peer.unexpected.append(message)
        return moved

    def _begin(self, peer: _Peer, header: _Header) -> _Arriving:
        """The message that begins. It is in the memory of the receive that waits for it, or in its own."""
        claimed = next((work for work in peer.receives if work.tag == header.tag), None)
        if claimed is not None:
            peer.receives.remove(claimed)
        fits = claimed is not None and len(claimed.memory) == header.total
        memory = claimed.memory if claimed and fits else torch.empty(header.total, dtype=torch.uint8)
        peer.arriving = _Arriving(header.tag, memory, claimed_by=claimed)
        return peer.arriving

    def _deliver(self, message: torch.Tensor, work: MessageWork) -> None:
        self.num_pending -= 1
        if len(message) != len(work.memory):
            what = f"rank {work.peer} sent {len(message)} bytes with tag {work.tag}"
            work.fail(ValueError(f"{what}, the buffer has {len(work.memory)}"))
            return
        if message is not work.memory:
            work.memory[:] = message
        work.done()

    def _cell_at(self, ring: int, count: int) -> int:
        return ring + _CELLS_AT + count % MOST_CELLS * (CELL_HEADER + self._region.layout.cell_bytes)

    def _header(self, cell: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self._region.memory[cell : cell + 24].view(np.int64)
