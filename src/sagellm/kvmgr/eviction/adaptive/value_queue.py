"""Extents in order of value, which depends on kind and age alone."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._base import FEW, MAX_STALE, ExtentQueue, QueueEntry
from sagellm.kvmgr.eviction.adaptive.reuse_model import AGE_ENDS_S, NUM_AGES, age_bin

Values = Sequence[Sequence[float]]
"""[kinds][ages], uses per second of memory; may grow."""


class ValueRow(deque[QueueEntry]):
    """Extents of one kind and age, oldest first. `number`: kind x `NUM_AGES` + age."""

    __slots__ = ("age", "number")

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.age = number, number % NUM_AGES


class ValueQueue(ExtentQueue):
    """The extent of the least value is first. A rank is an unshared `ReuseRecord`.

    Extents of one kind and age have the same value and stand in one row. So new values cost time by row, not
    by extent, and as time passes only the heads of rows must be looked at: `first` moves the head that it
    would return to its present row, `sweep` those that have been too old for their row for longest. Until
    then an extent counts as younger than it is. The owner sets `now_s`.
    """

    __slots__ = ("_due", "_order", "_row_of", "_values", "now_s")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._values: Values = ()
        self._row_of: dict[int, ValueRow] = {}
        self._order: list[tuple[float, int, ValueRow]] = []  # a heap by value
        self._due: list[
            tuple[float, int, ValueRow]
        ] = []  # a heap by when a head, past or present, is too old

    def renew(self, values: Values) -> None:
        """Take over new values of all kinds."""
        self._values = values
        rows = [row for row in self._row_of.values() if row]
        self._row_of, self._order, self._due = {row.number: row for row in rows}, [], []
        for row in rows:
            self._order_row(row)

    @property
    def least(self) -> float:
        """The value of the first extent; the queue must not be empty."""
        self.first()
        return self._order[0][0]

    def push(self, rank: Any, extent: Extent, size: int) -> None:
        self.live[extent.key] = entry = QueueEntry(rank, 0, extent, size, self)
        self.num_blocks += extent.num_blocks
        self._join_row(entry)

    def first(self) -> QueueEntry:
        live, order, now_s = self.live, self._order, self.now_s
        while True:
            _, _, row = order[0]
            while row:
                entry = row[0]
                if live.get(entry.extent.key) is not entry:
                    row.popleft()
                elif now_s - entry.rank.used_s < AGE_ENDS_S[row.age]:
                    return entry
                else:
                    row.popleft()
                    self._join_row(entry)
                    break  # in its present row it may be the first of all
            else:
                heapq.heappop(order)
                self._drop(row)

    def drop_first(self, entry: QueueEntry) -> None:
        _, _, row = self._order[0]
        row.popleft()
        del self.live[entry.extent.key]
        self.num_blocks -= entry.extent.num_blocks

    def sweep(self, count: int) -> None:
        """Move extents that are too old for their row. At most `count` extents and rows."""
        if len(self._order) > FEW and len(self._order) > MAX_STALE * len(self._row_of):
            self.renew(self._values)
        due, now_s = self._due, self.now_s
        while count > 0 and due and due[0][0] <= now_s:
            _, serial, row = heapq.heappop(due)
            count -= 1 + self._move_on(row, count)
            if row:
                heapq.heappush(due, (row[0].rank.used_s + AGE_ENDS_S[row.age], serial, row))
            else:
                self._drop(row)

    # -- inside

    def _check_places(self) -> None:
        known = ({id(row) for _, _, row in self._order}, {id(row) for _, _, row in self._due})
        row_of = {id(entry): row for row in self._row_of.values() for entry in row}
        for key, entry in self.live.items():
            row = row_of.get(id(entry))
            if row is None or row.number // NUM_AGES != entry.rank.kind or entry.extent.key != key:
                raise BookkeepingError(f"extent {key:x} is not in a row of its kind")
            if id(row) not in known[0] or (row.age < NUM_AGES - 1 and id(row) not in known[1]):
                raise BookkeepingError(f"row {row.number} is not in order")

    def _join_row(self, entry: QueueEntry) -> None:
        """Put an entry into the row of its kind and present age."""
        record = entry.rank
        number = record.kind * NUM_AGES + age_bin(self.now_s - record.used_s)
        row = self._row_of.get(number)
        if row is None:
            self._add_row(number, entry)
        else:
            _insert_by_age(row, entry)

    def _add_row(self, number: int, head: QueueEntry) -> ValueRow:
        row = self._row_of[number] = ValueRow(number)
        row.append(head)
        self._order_row(row)
        return row

    def _order_row(self, row: ValueRow) -> None:
        """Put a row with an entry into both heaps."""
        kind, age = divmod(row.number, NUM_AGES)
        serial = next(self._serial)
        heapq.heappush(self._order, (self._values[kind][age], serial, row))
        if age < NUM_AGES - 1:
            heapq.heappush(self._due, (row[0].rank.used_s + AGE_ENDS_S[age], serial, row))

    def _drop(self, row: ValueRow) -> None:
        """Forget an empty row; the heaps may keep it until they reach it."""
        if self._row_of.get(row.number) is row:
            del self._row_of[row.number]

    def _move_on(self, row: ValueRow, count: int) -> int:
        """Move up to `count` entries too old for their row; returns how many."""
        live, now_s = self.live, self.now_s
        first_number = row.number - row.age
        end_s = AGE_ENDS_S[row.age]
        oldest_s, target, moved = -math.inf, row, 0  # entries used until `oldest_s` belong into the target
        while row and moved < count:
            entry = row[0]
            used_s = entry.rank.used_s
            if used_s + end_s > now_s:
                break
            row.popleft()
            if live.get(entry.extent.key) is not entry:
                continue
            moved += 1
            if used_s <= oldest_s:
                target.append(entry)
                continue
            age = max(row.age + 1, age_bin(now_s - used_s))
            oldest_s = now_s - AGE_ENDS_S[age - 1]
            found = self._row_of.get(first_number + age)
            if found is None:
                target = self._add_row(first_number + age, entry)
            else:
                target = found
                if not _insert_by_age(target, entry):
                    oldest_s = -math.inf
        return moved

    def _compact(self) -> None:
        live = self.live
        for row in self._row_of.values():
            alive = [entry for entry in row if live.get(entry.extent.key) is entry]
            row.clear()
            row.extend(alive)
        self._num_stale = 0


def _insert_by_age(row: ValueRow, entry: QueueEntry) -> bool:
    """Insert an entry into its row; returns whether it is the last one now.

    Nearly all are, but not a parent that became a leaf, for example.
    """
    used_s = entry.rank.used_s
    is_last = not row or row[-1].rank.used_s <= used_s
    if is_last:
        row.append(entry)
    else:
        row.insert(bisect_right(row, used_s, key=attrgetter("rank.used_s")), entry)
    return is_last
