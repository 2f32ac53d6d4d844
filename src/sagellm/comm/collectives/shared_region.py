"""Memory that all ranks on one host have mapped, and which are alive.

The memory is an anonymous file (memfd) that the other ranks open through /proc. It has no name, so the kernel
frees it with the last process that maps it, also after `kill -9`. Each rank locks the byte of the file whose
offset is its rank. The kernel drops the locks of a process that ends, even while its parent has not waited
for it, so a lock that can be had belongs to a dead rank.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import sys
import time
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sagellm.core.clock import Clock
from sagellm.core.errors import CapacityError, CommError
from sagellm.core.protocols.collectives import RendezvousStore

MOST_RANKS = 64
MOST_CELLS = 4
"""Parts of messages that may be under way from one rank to another."""
CELL_HEADER = 64
_PAGE = 4096
_FLAG_BYTES = 256
_RING_BYTES = 256
_KEY = "sagellm/shared_memory"
_POLL_S = 0.0005


class RankState(IntEnum):
    """What a rank has said of itself. `READY_SLOW`: it has joined and has no C++ kernel."""

    ABSENT = 0
    READY = 1
    READY_SLOW = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Where things lie, in bytes from the start.

    First a page of words: the token, whether the group is broken, the state and the process of each rank.
    Then flags, notes, two slots per rank, and a ring of cells from each rank to each.
    """

    world_size: int
    slot_bytes: int
    cell_bytes: int
    one_shot_bytes: int

    @property
    def flags_at(self) -> int:
        return _PAGE

    @property
    def notes_at(self) -> int:
        return self.flags_at + self.world_size * _FLAG_BYTES

    @property
    def note_bytes(self) -> int:
        return 64 + 16 * self.world_size

    @property
    def slots_at(self) -> int:
        return _whole_pages(self.notes_at + 2 * self.world_size * self.note_bytes)

    @property
    def rings_at(self) -> int:
        return self.slots_at + 2 * self.world_size * self.slot_bytes

    @property
    def ring_bytes(self) -> int:
        return _whole_pages(_RING_BYTES + MOST_CELLS * (CELL_HEADER + self.cell_bytes))

    @property
    def total_bytes(self) -> int:
        return self.rings_at + self.world_size**2 * self.ring_bytes

    def ring_at(self, source: int, target: int) -> int:
        return self.rings_at + (source * self.world_size + target) * self.ring_bytes

    def slot_at(self, rank: int, step: int) -> int:
        return self.slots_at + (2 * rank + step % 2) * self.slot_bytes


def _whole_pages(num_bytes: int) -> int:
    return (num_bytes + _PAGE - 1) // _PAGE * _PAGE


class SharedRegion:
    """One rank's mapping, from `__init__` to `close`. The layout is that of rank 0.

    The constructor returns when all ranks have mapped the memory. Raises `CommError` where they do not within
    `timeout_s`, or where this rank cannot open the memory of rank 0.
    """

    def __init__(
        self, rank: int, store: RendezvousStore, layout: RegionLayout, timeout_s: float, clock: Clock
    ) -> None:
        self.rank, self._clock = rank, clock
        self._fd, token, self.layout = (
            _created(store, layout) if rank == 0 else _opened(store, layout.world_size)
        )
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, rank)
            memory = mmap.mmap(self._fd, self.layout.total_bytes)
            if int.from_bytes(memory[:8], sys.byteorder) != token:
                raise CommError("rank 0 runs on another host: collectives in shared memory need one host")
        except BaseException:
            os.close(self._fd)
            raise
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        words = self.memory[:_PAGE].view(np.uint32)
        self._broken = words[2:3]
        flags = self.memory[self.layout.flags_at : self.layout.notes_at].view(np.uint32)
        self._flags = flags.reshape(self.layout.world_size, -1)
        self._states, self._pids = words[8 : 8 + MOST_RANKS], words[8 + MOST_RANKS : 8 + 2 * MOST_RANKS]
        self._timeout_s = timeout_s

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def join(self, *, has_kernel: bool) -> bool:
        """Wait for all ranks. Returns whether all of them have the C++ kernel.

        Raises `CommError` where one that has joined dies or leaves before all have, or after `timeout_s`.
        """
        self._pids[self.rank] = os.getpid()
        self._states[self.rank] = RankState.READY if has_kernel else RankState.READY_SLOW
        states = self._states[: self.layout.world_size]
        deadline_s = self._clock.now() + self._timeout_s
        while not states.all():
            if self._clock.now() > deadline_s:
                missing = ", ".join(str(rank) for rank in np.flatnonzero(states == 0))
                raise CommError(f"no sign of rank {missing} of the group within {self._timeout_s:g} s")
            for rank in np.flatnonzero(states.copy()).tolist():  # others write to it
                reason = self.why_unable(rank)
                if reason is not None and not states.all():  # else it may have done its part
                    raise CommError(f"{reason} before all ranks had joined")
            time.sleep(_POLL_S)
        return bool((states != RankState.READY_SLOW).all())

    def why_unable(self, rank: int) -> str | None:
        """Why this rank will do nothing more for the group; None if it may."""
        if self._states[rank] == RankState.LEFT:
            return f"rank {rank} has left the group"
        if self._pids[rank] == os.getpid():
            return None  # a thread of this process, which shares its locks
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return None
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, rank)
        return f"rank {rank} has died"

    def progress_of(self, rank: int) -> int:
        """A number that changes when a rank publishes."""
        return int(self._flags[rank, :: _FLAG_BYTES // 8].sum())  # without the counts of sleepers

    def why_broken(self) -> str | None:
        """Why the group is broken on another rank. None if it is not known to be."""
        code = int(self._broken[0])
        return f"rank {code - 1} has found the group broken" if code else None

    def fail(self) -> None:
        """Let the others know that this rank cannot go on."""
        if not self._broken[0]:
            self._broken[0] = self.rank + 1

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._states[self.rank] = RankState.LEFT
            os.close(fd)  # drops the lock; the mapping goes with the last array


def _created(store: RendezvousStore, layout: RegionLayout) -> tuple[int, int, RegionLayout]:
    token, fd = secrets.randbits(63), -1
    try:
        fd = os.memfd_create("sagellm-collectives", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.total_bytes)
        os.posix_fallocate(fd, 0, layout.rings_at)  # rings that are never used take no memory
        os.pwrite(fd, token.to_bytes(8, sys.byteorder), 0)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        reason = (
            f"no {layout.total_bytes >> 20} MB of shared memory for collectives ({error}): "
            "take smaller slots or fewer ranks"
        )
        store.set(_KEY, json.dumps({"error": reason}))
        raise CapacityError(reason) from error
    value = {"path": f"/proc/{os.getpid()}/fd/{fd}", "token": token, "sizes": _sizes(layout)}
    store.set(_KEY, json.dumps(value))
    return fd, token, layout


def _opened(store: RendezvousStore, world_size: int) -> tuple[int, int, RegionLayout]:
    try:
        value = json.loads(store.get(_KEY))
    except RuntimeError as error:
        raise CommError(f"no sign of rank 0 of the group: {error}") from error
    if "error" in value:
        raise CommError(f"rank 0: {value['error']}")
    layout = RegionLayout(*value["sizes"])
    if layout.world_size != world_size:
        raise ValueError(f"world_size is {layout.world_size} on rank 0 and {world_size} here")
    try:
        fd = os.open(value["path"], os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CommError(
            f"the memory of rank 0 cannot be opened ({error}): all ranks must run on one host, in one "
            "container, as one user"
        ) from error
    if os.fstat(fd).st_size != layout.total_bytes:
        os.close(fd)
        raise CommError("rank 0 runs on another host: collectives in shared memory need one host")
    return fd, int(value["token"]), layout


def _sizes(layout: RegionLayout) -> list[int]:
    return [layout.world_size, layout.slot_bytes, layout.cell_bytes, layout.one_shot_bytes]
