"""What happened to paths: a record for each use, kept when extents are evicted.

`learned` and `adaptive` (adaptive/history.py) and `predictive` learn from it when a path is used again. They
share how records follow the extents of a prefix tree (`PathHistory`) and which events tell of uses
(`HistoryPolicy`), and differ in what they learn.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sagellm.core.clock import Clock
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import QueuedPolicy, QueueEntry

MAX_STEPS_UP = 16
MAX_BRANCHES = 3
"""An extent with more continuations than this is a prefix that many requests share, not a conversation."""
CONTINUED_SHARE = 0.75
"""A request that uses the first blocks of a path continues that path if they are this share of it."""


@dataclass(slots=True, eq=False)
class PathRecord:
    """One use of a path, until its next use.

    `key`: of the extent at the end of the path; `end`: blocks of the path; `used_s`: when the use ended;
    `turn`: uses in a row; `num_branches`: extents that continued the path. A record is open until the next
    use closes it, which sets `gap_s`, the seconds between the two.
    """

    key: int
    used_s: float
    end: int
    turn: int
    gap_s: float | None = None
    num_branches: int = 0
    is_open: bool = True


R = TypeVar("R", bound=PathRecord)


class PathHistory(ABC, Generic[R]):
    """The latest `max_records` records by key of extent, those of evicted extents included.

    An evicted extent has the same key when it comes back, so that its record shows a use. A record follows
    its path: to the tail when an extent is split, and to the parent when the tail is evicted.
    """

    def __init__(self, max_records: int) -> None:
        self.max_records = max_records
        self._records: OrderedDict[int, R] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R]:
        return iter(self._records.values())

    def get(self, key: int) -> R | None:
        return self._records.get(key)

    def record(self, extent: Extent, now_s: float) -> R:
        """The record of an evictable extent's last use. It may begin now."""
        record = self._records.get(extent.key)
        if record is None:
            return self._begin(extent, self._record_in_front(extent), now_s)
        if self._is_current(record, extent):
            return record
        return self._begin(extent, record, now_s)

    def use(self, key: int, now_s: float) -> None:
        """A request uses the extent: closes its record."""
        record = self._records.get(key)
        if record is not None and record.is_open:
            self._close(record, now_s)

    def split(self, old: int, head: Extent, tail: Extent, now_s: float) -> None:
        """The extent `old` became two.

        A request continues from the head, which keeps the key. Where the head is most of the path, that is a
        use of the path, and the tail is superseded. Otherwise the record moves to the tail.
        """
        record = self._records.get(old)
        if record is None or not record.is_open:
            return
        end = head.first_position + head.num_blocks
        if self._continues(record, end, now_s):
            self._supersede(record, tail, end, now_s)
        else:
            self._move_to_tail(record, tail, now_s)
        record.end = end

    @abstractmethod
    def replace_child(self, parent: Extent, child_key: int, now_s: float) -> None:
        """The parent's last child was evicted: the path ends at the parent."""

    @abstractmethod
    def _begin(self, extent: Extent, before: R | None, now_s: float) -> R:
        """A new record.

        `before`: the last record of the extent, or of the nearest extent in front of it that has one.
        """

    @abstractmethod
    def _close(self, record: R, now_s: float) -> None:
        """The next use of an open record's path: learn from it."""

    @abstractmethod
    def _supersede(self, record: R, tail: Extent, end: int, now_s: float) -> None:
        """Close a record: its first `end` blocks are used. Begin one for the rest."""

    @abstractmethod
    def _move_to_tail(self, record: R, tail: Extent, now_s: float) -> None:
        """Continue an open record under the tail's key."""

    @abstractmethod
    def _forget(self, record: R) -> None:
        """The record is dropped: others have replaced it."""

    def _is_current(self, record: R, extent: Extent) -> bool:
        """Whether the record is of the extent's last use."""
        return record.is_open and record.used_s >= extent.used_s

    def _continues(self, record: R, end: int, now_s: float) -> bool:
        """Whether a use of a path's first `end` blocks continues the path."""
        return end >= CONTINUED_SHARE * record.end

    def _record_in_front(self, extent: Extent) -> R | None:
        """The record of the nearest extent in front that has one."""
        parent = extent.parent
        for _ in range(MAX_STEPS_UP):
            if parent is None or not parent.num_blocks:
                return None
            record = self._records.get(parent.key)
            if record is not None:
                return record
            parent = parent.parent
        return None

    def _store(self, record: R) -> None:
        """Put a record under its key, as the latest. Beyond `max_records`, forget the oldest."""
        records = self._records
        before = records.pop(record.key, None)
        if before is not None:
            self._forget(before)
        records[record.key] = record
        if len(records) > self.max_records:
            self._forget(records.popitem(last=False)[1])


class HistoryPolicy(QueuedPolicy):
    """Base of the policies that learn from a `PathHistory`.

    Time is the clock's, or without one that of the latest use.
    """

    _history: PathHistory[Any]

    def __init__(self, capacity: int | None, clock: Clock | None) -> None:
        super().__init__(capacity)
        self._clock = clock
        self._now_s = 0.0

    def pin(self, key: int) -> None:
        if key in self._held:
            self._history.use(key, self._now())
        super().pin(key)

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        if old in self._held:
            self._history.split(old, head, tail, self._now())
        super().split(old, head, tail)

    def _enqueue_parent(self, parent: Extent, child: QueueEntry) -> None:
        self._enqueue(parent, None)

    def _insert_parent(self, parent: Extent, child: QueueEntry) -> None:
        self._history.replace_child(parent, child.extent.key, self._now())
        super()._insert_parent(parent, child)

    def _now(self) -> float:
        return self._clock.now() if self._clock is not None else self._now_s
