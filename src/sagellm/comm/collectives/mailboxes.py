"""Messages from rank to rank through rings of cells in shared memory.

The ring from one rank to another has one writer and one reader. A message is cut into cells. The sender fills
cells while there are free ones, and the receiver empties them, when either submits, polls or waits. Messages
that no receive asks for are held up to a limit; then the next one stays in the ring, and its sender waits.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from sagellm.comm.collectives._buffers import Broken, Finish
from sagellm.comm.collectives.shared_kernels import Kernel
from sagellm.comm.collectives.shared_region import CELL_HEADER, MOST_CELLS, SharedRegion
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError, CommError
from sagellm.core.protocols.collectives import WorkStatus

MOST_HELD_BYTES = 64 << 20
"""Of the messages from one rank that no receive has asked for."""
_HELD_COST = 512
"""Bytes that holding a message costs beside its own."""
_READ_AT = 128
_CELLS_AT = 256
_YIELDS = 200
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3
_ASK_S = 0.02
_T = TypeVar("_T")


class _Header(NamedTuple):
    """Of a cell: bytes of the message, its tag, and bytes in this cell."""

    total: int
    tag: int
    size: int


class MessageWork:
    """A send, or with `finish` a receive. `memory` are the bytes of a contiguous tensor."""

    def __init__(
        self, boxes: Mailboxes, peer: int, tag: int, memory: torch.Tensor, finish: Finish | None = None
    ) -> None:
        self.peer, self.tag, self.memory, self.finish = peer, tag, memory, finish
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

    def end(self, error: Exception | None = None) -> None:
        """The first end counts."""
        if self.status is WorkStatus.PENDING:
            self.status, self._error = WorkStatus.FAILED if error else WorkStatus.DONE, error


@dataclass(slots=True)
class _Message:
    """A message that has begun to arrive, or is whole and held.

    `memory`: where its bytes go; None where the receive has another size, so they are dropped. `held_bytes`:
    what it counts for among the held ones; 0 if a receive asked for it before it began.
    """

    total: int
    tag: int
    memory: torch.Tensor | None
    held_bytes: int = 0
    num_bytes: int = 0
    claimed_by: MessageWork | None = None


_Queues = dict[int, deque[_T]]
"""By tag, in order. No queue is empty."""


@dataclass(slots=True)
class _Peer:
    """What is under way to and from one rank. `moved_s`: when a cell was last moved, or work began."""

    moved_s: float
    num_cells: int = 0
    num_pending: int = 0
    sends: deque[MessageWork] = field(default_factory=deque)
    receives: _Queues[MessageWork] = field(default_factory=dict)
    arriving: _Message | None = None
    held: _Queues[_Message] = field(default_factory=dict)
    held_bytes: int = 0
    is_full: bool = False
    """Whether the next message stays in the ring, since no receive asks for it and too many are held."""


class Mailboxes:
    """All messages of one rank.

    What raises while messages are moved (the handler of a signal, say) leaves one of them half moved, so it
    breaks the group for good.
    """

    def __init__(
        self,
        region: SharedRegion,
        kernel: Kernel,
        broken: Broken,
        timeout_s: float,
        clock: Clock,
        most_held_bytes: int = MOST_HELD_BYTES,
    ) -> None:
        self._region, self._kernel, self._broken = region, kernel, broken
        self._timeout_s, self._clock, self._most_held_bytes = timeout_s, clock, most_held_bytes
        self._memory = torch.from_numpy(region.memory)
        self._asked_s = clock.now()
        self._peers = [_Peer(self._asked_s) for _ in range(region.layout.world_size)]
        self.pending: dict[MessageWork, None] = {}
        self._is_moving = False
        broken.on_failure.append(self.fail)

    def submit(self, work: MessageWork) -> MessageWork:
        self.progress(work)
        return work

    def progress(self, submitted: MessageWork | None = None) -> bool:
        """Move what can be moved at once. Returns whether anything moved."""
        if self._is_moving:  # by a signal's handler or another thread, or what interrupted it came too early
            self._broken.fail(CommError(f"rank {self._region.rank} was interrupted within a message"))
            self._broken.check()
        self._is_moving = True
        try:
            if submitted is not None:
                self._enqueue(submitted)
            moved = False
            for rank, peer in enumerate(self._peers):
                num_cells = self._fill_cells(rank, peer) + self._empty_cells(rank, peer)
                if num_cells:
                    peer.num_cells, peer.moved_s = peer.num_cells + num_cells, self._clock.now()
                    moved = True
        except BaseException as error:
            reason = f"rank {self._region.rank} was interrupted within a message: {error!r}"
            self._broken.fail(CommError(reason))
            raise
        self._is_moving = False
        return moved

    def poll(self, work: MessageWork) -> bool:
        """Move what can be moved. Now and then, see whether the work's peer is there."""
        moved = self.progress()
        now_s = self._clock.now()
        if now_s - self._asked_s > _ASK_S:
            self._asked_s = now_s
            self._check_peer(work)
        return moved

    def wait(self, work: MessageWork, timeout_s: float | None = None) -> None:
        """Move messages until the work has ended, or the timeout has passed."""
        began_s = self._clock.now()
        turns, sleep_s = 0, _SHORTEST_SLEEP_S
        while work.status is WorkStatus.PENDING:
            if self.poll(work):
                turns, sleep_s = 0, _SHORTEST_SLEEP_S
                continue
            if timeout_s is None and work.finish is not None and self._peers[work.peer].is_full:
                self._broken.fail(
                    CommError(
                        f"rank {work.peer} has sent {self._most_held_bytes >> 20} MB that no receive asks "
                        "for, and what this receive waits for is behind them: receive in the order of sends"
                    )
                )
            if timeout_s is not None and self._clock.now() - began_s >= timeout_s:
                return
            turns += 1
            if turns > _YIELDS:
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)
            time.sleep(sleep_s if turns > _YIELDS else 0)

    def finish(self) -> None:
        """Wait for all works. What fails is said by its own `wait`."""
        while self.pending:
            for work in list(self.pending):
                self.wait(work)

    def fail(self, error: CommError) -> None:
        """End every pending work with this error."""
        for work in self.pending:
            work.end(error)
        self.pending.clear()
        for peer in self._peers:
            peer.sends.clear()
            peer.receives.clear()
            peer.held.clear()
            peer.arriving, peer.held_bytes, peer.num_pending = None, 0, 0

    def check(self) -> None:
        """Raise `BookkeepingError` where the counts contradict each other."""
        found = 0
        for rank, peer in enumerate(self._peers):
            arriving, held = peer.arriving, [message for queue in peer.held.values() for message in queue]
            works = [*peer.sends, *(work for queue in peer.receives.values() for work in queue)]
            if arriving is not None:
                held.append(arriving)
                works += [arriving.claimed_by] if arriving.claimed_by is not None else []
                if arriving.num_bytes >= arriving.total:
                    raise BookkeepingError(f"a message from rank {rank} is whole and was not delivered")
            if not self.pending.keys() >= set(works) or len(works) != peer.num_pending:
                raise BookkeepingError(f"rank {rank}: {peer.num_pending} messages are said to be pending")
            held_bytes = sum(message.held_bytes for message in held)
            if held_bytes != peer.held_bytes or held_bytes > self._most_held_bytes:
                raise BookkeepingError(f"{peer.held_bytes} bytes of rank {rank} are said to be held")
            if not peer.receives.keys().isdisjoint(peer.held):
                raise BookkeepingError(f"a receive from rank {rank} waits for a message that is held")
            found += len(works)
        if found != len(self.pending) or any(work.status is not WorkStatus.PENDING for work in self.pending):
            raise BookkeepingError(f"{len(self.pending)} messages are said to be pending, {found} are")

    def _enqueue(self, work: MessageWork) -> None:
        peer = self._peers[work.peer]
        if not peer.num_pending:
            peer.moved_s = self._clock.now()
        self.pending[work] = None
        peer.num_pending += 1
        if work.finish is None:
            peer.sends.append(work)
        elif held := _popped(peer.held, work.tag):
            self._deliver(peer, held, work)
        elif (arriving := peer.arriving) and arriving.claimed_by is None and arriving.tag == work.tag:
            arriving.claimed_by = work
        else:
            peer.receives.setdefault(work.tag, deque()).append(work)

    def _check_peer(self, work: MessageWork) -> None:
        """Break the group if the work's peer will do nothing more for it."""
        peer = self._peers[work.peer]
        reason = self._broken.elsewhere() or self._region.why_unable(work.peer)
        if reason is None and self._clock.now() - peer.moved_s > self._timeout_s:
            reason = f"rank {work.peer} has not answered for {self._timeout_s:g} s"
        if reason is not None:
            num_cells = peer.num_cells
            self.progress()  # the peer may have done its part before it left
            if work.status is WorkStatus.PENDING and peer.num_cells == num_cells:
                self._broken.fail(CommError(reason))

    def _fill_cells(self, rank: int, peer: _Peer) -> int:
        """Fill free cells of the ring to a rank. Returns how many."""
        if not peer.sends:
            return 0
        ring, num_cells = self._region.layout.ring_at(self._region.rank, rank), 0
        written = self._kernel.load(ring)
        while peer.sends and (written - self._kernel.load(ring + _READ_AT)) % 2**32 < MOST_CELLS:
            work = peer.sends[0]
            cell = self._cell_at(ring, written)
            part = work.memory[work.num_bytes : work.num_bytes + self._region.layout.cell_bytes]
            self._header(cell)[:] = (len(work.memory), work.tag, len(part))
            self._memory[cell + CELL_HEADER : cell + CELL_HEADER + len(part)] = part
            written = (written + 1) % 2**32
            self._kernel.store(ring, written)
            work.num_bytes += len(part)
            num_cells += 1
            if work.num_bytes == len(work.memory):
                peer.sends.popleft()
                self._end(peer, work)
        return num_cells

    def _empty_cells(self, rank: int, peer: _Peer) -> int:
        """Empty the ring from a rank up to a message that must wait. Returns how many cells."""
        ring, num_cells = self._region.layout.ring_at(rank, self._region.rank), 0
        read, written = self._kernel.load(ring + _READ_AT), self._kernel.load(ring)
        peer.is_full = False
        while read != written:
            cell = self._cell_at(ring, read)
            header = _Header(*self._header(cell).tolist())
            message = peer.arriving or self._begun(peer, header)
            if message is None:
                peer.is_full = True
                break
            start, place = cell + CELL_HEADER, message.num_bytes
            if message.memory is not None:
                message.memory[place : place + header.size] = self._memory[start : start + header.size]
            read = (read + 1) % 2**32
            self._kernel.store(ring + _READ_AT, read)
            message.num_bytes += header.size
            num_cells += 1
            if message.num_bytes == message.total:
                peer.arriving = None
                if message.claimed_by is not None:
                    self._deliver(peer, message, message.claimed_by)
                else:
                    peer.held.setdefault(message.tag, deque()).append(message)
        return num_cells

    def _begun(self, peer: _Peer, header: _Header) -> _Message | None:
        """The message that begins. None if it must wait in the ring.

        Its bytes go to the memory of the receive that asks for it, else to its own.
        """
        work = _popped(peer.receives, header.tag)
        if work is not None:
            memory = work.memory if len(work.memory) == header.total else None
            message = _Message(header.total, header.tag, memory, claimed_by=work)
        else:
            cost = header.total + _HELD_COST
            if peer.held_bytes + cost > self._most_held_bytes:
                return None
            message = _Message(header.total, header.tag, torch.empty(header.total, dtype=torch.uint8), cost)
            peer.held_bytes += cost
        peer.arriving = message
        return message

    def _deliver(self, peer: _Peer, message: _Message, work: MessageWork) -> None:
        peer.held_bytes -= message.held_bytes
        if message.total != len(work.memory):
            what = f"rank {work.peer} sent {message.total} bytes with tag {work.tag}"
            self._end(peer, work, ValueError(f"{what}, the buffer has {len(work.memory)}"))
            return
        if message.memory is not None and message.memory is not work.memory:
            work.memory[:] = message.memory
        if work.finish is not None:
            work.finish()
        self._end(peer, work)

    def _end(self, peer: _Peer, work: MessageWork, error: Exception | None = None) -> None:
        peer.num_pending -= 1
        self.pending.pop(work, None)
        work.end(error)

    def _cell_at(self, ring: int, count: int) -> int:
        return ring + _CELLS_AT + count % MOST_CELLS * (CELL_HEADER + self._region.layout.cell_bytes)

    def _header(self, cell: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self._region.memory[cell : cell + 24].view(np.int64)


def _popped(queues: _Queues[_T], tag: int) -> _T | None:
    """The first of the tag's queue, taken off it. None if there is none."""
    queue = queues.get(tag)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[tag]
    return first
