"""Extents in order of what their lives are worth, which depends on kind and age alone."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Any

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._exposure import AGE_ENDS_S, NUM_AGES, age_bin
from sagellm.kvmgr.eviction._queue import FEW, MAX_STALE, Entry, ExtentQueue

Values = Sequence[Sequence[float]]
"""By kind, one per age; may grow."""


class Row(deque[Entry]):
    """Extents of one kind and age; `number` says which. An empty one that was given up is not used again."""

    __slots__ = ("age", "number")

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.age = number, number % NUM_AGES


class ValueQueue(ExtentQueue):
    """The extent whose life is worth least is first; a rank is a `Life`, of a kind from 0 on.

    Extents of one kind and age are worth the same and stand in one row, the oldest at its head. So new values
    cost by row, not by extent, and the passing of time concerns the heads of rows alone: `first` looks at the
    one that it answers with, `sweep` at those that have been too old for their row for longest. Until then an
    extent counts as younger than it is. `now_s` is for the owner to set.
    """

    __slots__ = ("_due", "_order", "_row_of", "_values", "now_s")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._values: Values = ()
        self._row_of: dict[int, Row] = {}
        self._order: list[tuple[float, int, Row]] = []  # a heap: value, serial number, row
        self._due: list[tuple[float, int, Row]] = []  # the same: when a head, past or present, gets too old

    def renew(self, values: Values) -> None:
        """Kinds are worth something else from now on."""
        self._values = values
        rows = [row for row in self._row_of.values() if row]
        self._row_of, self._order, self._due = {row.number: row for row in rows}, [], []
        for row in rows:
            self._announce(row)

    @property
    def least(self) -> float:
        """What the first one is worth; the queue must not be empty."""
        self.first()
        return self._order[0][0]

    def push(self, rank: Any, extent: Extent, num_blocks: int, size: int) -> None:
        key = extent.key
        self.live[key] = entry = (rank, key, extent, size)
        self.num_blocks += num_blocks
        self._stand(entry)

    def first(self) -> Entry:
        live, order, now_s = self.live, self._order, self.now_s
        while True:
            row = order[0][2]
            while row:
                entry = row[0]
                if live.get(entry[1]) is not entry:
                    row.popleft()
                elif now_s - entry[0].born_s < AGE_ENDS_S[row.age]:
                    return entry
                else:
                    row.popleft()
                    self._stand(entry)
                    break  # it may be the first of all where it stands now
            else:
                heapq.heappop(order)
                self._drop(row)

    def drop_first(self, entry: Entry, num_blocks: int) -> None:
        self._order[0][2].popleft()
        del self.live[entry[1]]
        self.num_blocks -= num_blocks

    def take(self, key: int, num_blocks: int) -> Entry:
        entry = self.live.pop(key)
        self.num_blocks -= num_blocks
        self._num_stale += 1
        if self._num_stale > FEW and self._num_stale > MAX_STALE * len(self.live):
            self._compact()
        return entry

    def sweep(self, count: int) -> None:
        """Move on what has grown too old for its row: so many extents and rows at most."""
        if len(self._order) > FEW and len(self._order) > MAX_STALE * len(self._row_of):
            self.renew(self._values)
        due, now_s = self._due, self.now_s
        while count > 0 and due and due[0][0] <= now_s:
            _, serial, row = heapq.heappop(due)
            count -= 1 + self._move_on(row, count)
            if row:
                heapq.heappush(due, (row[0][0].born_s + AGE_ENDS_S[row.age], serial, row))
            else:
                self._drop(row)

    def check(self) -> None:
        blocks = sum(entry[2].num_blocks for entry in self.live.values())
        if blocks != self.num_blocks:
            raise BookkeepingError(f"a queue counts {self.num_blocks} blocks, its extents hold {blocks}")
        known = ({id(row) for _, _, row in self._order}, {id(row) for _, _, row in self._due})
        row_of = {id(entry): row for row in self._row_of.values() for entry in row}
        for key, entry in self.live.items():
            row = row_of.get(id(entry))
            if row is None or row.number // NUM_AGES != entry[0].kind or entry[2].key != key:
                raise BookkeepingError(f"extent {key:x} is not in a row of its kind")
            if id(row) not in known[0] or (row.age < NUM_AGES - 1 and id(row) not in known[1]):
                raise BookkeepingError(f"row {row.number} is not in order")

    # -- inside

    def _stand(self, entry: Entry) -> None:
        """In the row of its kind and age."""
        life = entry[0]
        number = life.kind * NUM_AGES + age_bin(self.now_s - life.born_s)
        row = self._row_of.get(number)
        if row is None:
            self._open(number, entry)
        else:
            _join(row, entry)

    def _open(self, number: int, head: Entry) -> Row:
        row = self._row_of[number] = Row(number)
        row.append(head)
        self._announce(row)
        return row

    def _announce(self, row: Row) -> None:
        kind, age = divmod(row.number, NUM_AGES)
        serial = next(self._serial)
        heapq.heappush(self._order, (self._values[kind][age], serial, row))
        if age < NUM_AGES - 1:
            heapq.heappush(self._due, (row[0][0].born_s + AGE_ENDS_S[age], serial, row))

    def _drop(self, row: Row) -> None:
        """An empty one; where it is still in order, nobody minds."""
        if self._row_of.get(row.number) is row:
            del self._row_of[row.number]

    def _move_on(self, row: Row, count: int) -> int:
        """Move the heads of a row that are too old for it, `count` of them at most; returns how many."""
        live, now_s = self.live, self.now_s
        first_number = row.number - row.age
        end_s = AGE_ENDS_S[row.age]
        next_s, target, moved = -math.inf, row, 0  # births after `next_s` are too late for the target
        while row and moved < count:
            entry = row[0]
            born_s = entry[0].born_s
            if born_s + end_s > now_s:
                break
            row.popleft()
            if live.get(entry[1]) is not entry:
                continue
            moved += 1
            if born_s <= next_s:
                target.append(entry)
                continue
            age = max(row.age + 1, age_bin(now_s - born_s))
            next_s = now_s - AGE_ENDS_S[age - 1]
            found = self._row_of.get(first_number + age)
            if found is None:
                target = self._open(first_number + age, entry)
            else:
                target = found
                if not _join(target, entry):
                    next_s = -math.inf
        return moved

    def _compact(self) -> None:
        live = self.live
        for row in self._row_of.values():
            alive = [entry for entry in row if live.get(entry[1]) is entry]
            row.clear()
            row.extend(alive)
        self._num_stale = 0


def _join(row: Row, entry: Entry) -> bool:
    """Nearly all stand at the end then, but not one that comes late, as a parent that became a leaf does;
    answers whether."""
    born_s = entry[0].born_s
    at_end = not row or row[-1][0].born_s <= born_s
    if at_end:
        row.append(entry)
    else:
        row.insert(bisect_right(row, born_s, key=_born_s), entry)
    return at_end


def _born_s(entry: Entry) -> float:
    born_s: float = entry[0].born_s
    return born_s
