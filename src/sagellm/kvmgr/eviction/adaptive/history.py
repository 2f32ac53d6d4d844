"""The history of paths that teaches the model of reuse."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sagellm.core.protocols.eviction import Extent
from sagellm.kvmgr.eviction._history import CONTINUED_SHARE, MAX_BRANCHES, PathHistory, PathRecord
from sagellm.kvmgr.eviction.adaptive.reuse_model import Features, Floats, Ints, ReuseModel

FIT_FIRST, FIT_LAST, FIT_SHARE = 64, 4096, 8
"""The model is fitted after 64 new records, later after one in eight of all so far, at most 4096."""
FEWEST_USES = 16
"""No fit before so many paths were used again."""
FEW_KINDS = 256
"""A fit of so many kinds takes 1.3 ms and is done at once, so that a short history is used at once."""
NUM_FEATURES = 7
SHARED = -1
"""The kind of a prefix that many requests share. It has a rate of its own, and does not teach the model."""
CLOSED = -1
"""The kind, and the index, of a record in no column of `OpenRecords`."""


@dataclass(slots=True, eq=False)
class ReuseRecord(PathRecord):
    """A `PathRecord` with what the model knows of it.

    `kind`: the model's row for its `features`, or `SHARED`. `latest_key`: the extent that continued the path
    last. `next_use_s`: when the next use came. `open_index`: its place in `OpenRecords` while it is open.
    """

    features: Features = ()
    kind: int = 0
    latest_key: int | None = None
    next_use_s: float | None = None
    open_index: int = CLOSED


class OpenRecords:
    """All open records in columns: kind, time of use, time of the last count.

    A fit counts the seconds of thousands of open records at once, in numpy. One by one, a fit of 16,000
    records would take 8 ms instead of 2.
    """

    def __init__(self) -> None:
        self._kind = array("q")
        self._used_s, self._counted_s = array("d"), array("d")
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._kind) - len(self._free)

    def open(self, kind: int, used_s: float, counted_s: float) -> int:
        """Returns the record's index, valid until `close`."""
        if self._free:
            index = self._free.pop()
            self._kind[index], self._used_s[index], self._counted_s[index] = kind, used_s, counted_s
            return index
        self._kind.append(kind)
        self._used_s.append(used_s)
        self._counted_s.append(counted_s)
        return len(self._kind) - 1

    def close(self, index: int) -> float:
        """Returns until when the record was counted."""
        self._kind[index] = CLOSED
        self._free.append(index)
        return self._counted_s[index]

    def count(self, now_s: float) -> tuple[Ints, Floats, Floats]:
        """Kinds, ages at the last count, ages now. All records are counted until now then."""
        all_kinds = np.frombuffer(self._kind, dtype=np.int64)
        counted_s = np.frombuffer(self._counted_s)
        open_ = np.flatnonzero(all_kinds != CLOSED)
        used_s = np.frombuffer(self._used_s)[open_]
        from_s = counted_s[open_] - used_s
        counted_s[open_] = now_s
        return all_kinds[open_], from_s, now_s - used_s


class ReuseHistory(PathHistory[ReuseRecord]):
    """Records that teach `model` how soon paths are used again, kept or evicted.

    `changed`: keys of records whose value changed without a call for that extent. The policy ranks these
    extents anew and empties the list.
    """

    def __init__(self, model: ReuseModel, max_records: int) -> None:
        super().__init__(max_records)
        self.model = model
        self.changed: list[int] = []
        self._open = OpenRecords()
        self._num_begun = self._num_begun_at_fit = self._num_used = 0
        self._fit: Iterator[None] | None = None

    def replace_child(self, parent: Extent, child_key: int, now_s: float) -> None:
        """The child was evicted. Its path ends at the parent; its record moves there."""
        above = self._records.get(parent.key)
        if above is not None and above.is_open:
            return
        latest = None if above is None or above.latest_key is None else self._records.get(above.latest_key)
        candidates = (latest, self._records.get(child_key))
        records = [record for record in candidates if record is not None and record.is_open]
        if not records:
            return
        record = max(records, key=lambda record: record.used_s)
        del self._records[record.key]
        if above is not None:
            record.num_branches = max(0, above.num_branches - 1)
        record.key, record.latest_key = parent.key, None
        self._store(record)

    def learn(self, now_s: float) -> bool:
        """Fit the model if enough records are new.

        Returns whether it has new values. A fit of more than `FEW_KINDS` takes several calls, so that none
        holds up the engine.
        """
        if self._fit is not None:
            if next(self._fit, "ended") is None:
                return False
            self._fit = None
            return True
        num_new = self._num_begun - self._num_begun_at_fit
        due = min(FIT_LAST, max(FIT_FIRST, self._num_begun // FIT_SHARE))
        if num_new < due or self._num_used < FEWEST_USES:
            return False
        self._num_begun_at_fit = self._num_begun
        self.model.all_at_risk(*self._open.count(now_s))
        if len(self.model) > FEW_KINDS:
            self._fit = self.model.fit_in_parts(num_new)
            return False
        self.model.fit(num_new)
        return True

    # -- the rules of PathHistory

    def _is_current(self, record: ReuseRecord, extent: Extent) -> bool:
        return record.used_s >= extent.used_s and (record.is_open or record.kind == SHARED)

    def _begin(self, extent: Extent, before: ReuseRecord | None, now_s: float) -> ReuseRecord:
        end = extent.first_position + extent.num_blocks
        turn, gap_s, num_branches, start = 1, None, 0, 0
        if before is not None:
            self._supersede_latest(before, extent, now_s)
            if before.is_open:
                self._close(before, now_s)
            start = min(before.end, end)
            if before.key != extent.key:
                num_branches = before.num_branches
                before.num_branches += 1
                before.latest_key = extent.key
            if num_branches <= MAX_BRANCHES:
                turn, gap_s = before.turn + 1, before.gap_s
            else:
                self._make_shared(before, now_s)
        features = (
            min(4, turn.bit_length()),
            0 if gap_s is None else _level(int(min(4 * gap_s, 1e9)), 6),
            _level(num_branches, 2),
            _level(8 * (end - start), 5),
            _level(8 * end, 6),
            _level(extent.use.num_output_tokens // 16, 5),
            0,
        )
        record = ReuseRecord(
            extent.key, extent.used_s, end, turn, features=features, kind=self.model.kind(features)
        )
        if before is not None and before.key == extent.key:
            record.num_branches = before.num_branches
        self._store_open(record, record.used_s)
        self._num_begun += 1
        return record

    def _supersede_latest(self, before: ReuseRecord, extent: Extent, now_s: float) -> None:
        """The extent may continue the path that continued `before` last.

        That is so if that path has few blocks of its own, as the end of a prompt that the next turn does not
        repeat. Its turn and gap pass to `before`, and what is left of it is superseded.
        """
        latest = self._records.get(before.latest_key) if before.latest_key is not None else None
        if latest is None or not latest.is_open or latest.key == extent.key:
            return
        if before.num_branches > MAX_BRANCHES or before.is_open or before.end < CONTINUED_SHARE * latest.end:
            return
        self._supersede_at(latest, latest.key, before.end, now_s)
        self.changed.append(latest.key)
        before.num_branches -= 1
        before.turn, before.gap_s, before.next_use_s = latest.turn, latest.gap_s, now_s

    def _supersede(self, record: ReuseRecord, tail: Extent, end: int, now_s: float) -> None:
        self._supersede_at(record, tail.key, end, now_s)

    def _supersede_at(self, record: ReuseRecord, rest_key: int, end: int, now_s: float) -> None:
        """Supersede a record. The use counts by its share of the path; the last feature marks the rest."""
        features = (*record.features[:-1], 1)
        self._close(record, now_s, end / record.end)
        kind = self.model.kind(features)
        rest = ReuseRecord(rest_key, record.used_s, record.end, record.turn, features=features, kind=kind)
        self._store_open(rest, now_s)

    def _move_to_tail(self, record: ReuseRecord, tail: Extent, now_s: float) -> None:
        rest = ReuseRecord(
            tail.key,
            record.used_s,
            record.end,
            record.turn,
            record.gap_s,
            features=record.features,
            kind=record.kind,
        )
        self._store_open(rest, self._end_count(record))
        record.num_branches += 1

    def _make_shared(self, record: ReuseRecord, now_s: float) -> None:
        """A prefix that many requests share was used: its gap is a running mean."""
        gap_s = now_s - record.used_s
        if record.kind == SHARED and record.gap_s is not None:
            gap_s = 0.9 * record.gap_s + 0.1 * gap_s
        record.gap_s = gap_s
        record.used_s, record.next_use_s, record.kind = now_s, None, SHARED
        self.changed.append(record.key)

    def _close(self, record: ReuseRecord, now_s: float, share: float = 1.0) -> None:
        age_s = now_s - record.used_s
        self.model.at_risk(record.kind, self._end_count(record) - record.used_s, age_s)
        self.model.used(record.kind, age_s, share)
        self._num_used += 1
        record.gap_s, record.next_use_s = age_s, now_s

    def _forget(self, record: ReuseRecord) -> None:
        if record.is_open:
            self._end_count(record)

    def _store_open(self, record: ReuseRecord, counted_s: float) -> None:
        """Store an open record; its seconds since `counted_s` are still to be counted."""
        record.open_index = self._open.open(record.kind, record.used_s, counted_s)
        self._store(record)

    def _end_count(self, record: ReuseRecord) -> float:
        """The record is no longer open; returns until when its seconds were counted."""
        index, record.is_open, record.open_index = record.open_index, False, CLOSED
        return self._open.close(index)


def _level(value: int, most: int) -> int:
    """0 below 1, then one more for each factor of 4, at most `most`."""
    level = (value.bit_length() + 1) // 2
    return min(most, level)
