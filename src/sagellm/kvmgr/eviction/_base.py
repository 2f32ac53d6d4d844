"""The shared base of the policies: queues, ghosts, hints and the eviction loop.

A policy is one file with a subclass of `QueuedPolicy`. It says into which of its queues an extent goes and at
which rank (`_enqueue`), and which queue gives up its first extent next (`_next_queue`). The methods stand in
the same order in each file: `__init__`, events, `_enqueue`, `_enqueue_parent`, `_next_queue`, `_remember`,
`_evicted`, `check`; a helper stands below its first caller.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp, Hint

FEW = 64
"""Collections shorter than this are never compacted."""
MAX_STALE = 3
"""A queue is compacted when it has more stale entries than this times the live ones."""
MAX_ROWS = 4
MIN_REMEMBERED = 64


@dataclass(slots=True, eq=False)
class QueueEntry:
    """An extent's place in a queue, remembered while the extent is away from it.

    Lower ranks are evicted first, of equal ranks the lower `serial`. `size`: the extent's blocks when it
    entered the policy, for the ghost that it may leave.

    An extent is away while it is pinned, has children, or stands in a queue of hints. `num_uses`: 1 if a
    request took it away, else 0. `state`: what the policy's `_remember` returned then.
    """

    rank: Any
    serial: int
    extent: Extent
    size: int
    queue: ExtentQueue
    num_uses: int = 0
    state: Any = None


class ExtentQueue:
    """Extents in order of rank. Of equal ranks, the one that came first is first.

    Ranks of one queue must be comparable. `live` maps keys to entries; only this class changes it. Entries
    are deleted lazily: a stale one is not the entry that `live` has under its key.

    Nearly all extents come in order of rank and are appended to a row (a deque). Old ranks that return, and
    counts of uses, go to one of a few further rows; what fits none goes to a heap. With a heap alone,
    evictions take 10 to 20 % longer (`sagellm bench micro eviction`, row `slo`).
    """

    __slots__ = ("_heap", "_keys_in_turn", "_num_stale", "_rows", "_serial", "live", "num_blocks")

    def __init__(self) -> None:
        self.live: dict[int, QueueEntry] = {}
        self.num_blocks = 0
        self._rows: list[deque[QueueEntry]] = []
        self._heap: list[tuple[Any, int, QueueEntry]] = []
        self._num_stale = 0  # an upper bound: stale entries that reached the front are gone
        self._serial = itertools.count()
        self._keys_in_turn: list[int] = []

    def push(self, rank: Any, extent: Extent, size: int) -> None:
        """Add an extent; it had `size` blocks when it entered the policy."""
        entry = QueueEntry(rank, next(self._serial), extent, size, self)
        self.live[extent.key] = entry
        self.num_blocks += extent.num_blocks
        for row in self._rows:
            if not row or rank >= row[-1].rank:
                row.append(entry)
                return
        if len(self._rows) < MAX_ROWS:
            self._rows.append(deque((entry,)))
        else:
            heapq.heappush(self._heap, (rank, entry.serial, entry))

    def first(self) -> QueueEntry:
        """The entry of the lowest rank; the queue must not be empty."""
        rows, heap, live = self._rows, self._heap, self.live
        if len(rows) == 1 and not heap:  # the usual case: everything came in order
            row = rows[0]
            while live.get((entry := row[0]).extent.key) is not entry:
                row.popleft()
            return entry
        while heap and live.get(heap[0][-1].extent.key) is not heap[0][-1]:
            heapq.heappop(heap)
        first = heap[0] if heap else None
        for row in rows:
            while row:
                entry = row[0]
                if live.get(entry.extent.key) is entry:
                    candidate = (entry.rank, entry.serial, entry)
                    if first is None or candidate < first:
                        first = candidate
                    break
                row.popleft()
        assert first is not None
        return first[-1]

    def drop_first(self, entry: QueueEntry) -> None:
        """Remove the entry that `first` just returned."""
        for row in self._rows:
            if row and row[0] is entry:
                row.popleft()
                break
        else:
            heapq.heappop(self._heap)
        del self.live[entry.extent.key]
        self.num_blocks -= entry.extent.num_blocks

    def take(self, key: int, num_blocks: int | None = None) -> QueueEntry:
        """Remove an extent. `num_blocks`: what it counts as here, if not its blocks now."""
        entry = self.live.pop(key)
        self.num_blocks -= entry.extent.num_blocks if num_blocks is None else num_blocks
        self._num_stale += 1
        if self._num_stale > FEW and self._num_stale > MAX_STALE * len(self.live):
            self._compact()
        return entry

    def in_turn(self, count: int) -> Iterator[QueueEntry]:
        """The next few entries, which may be moved meanwhile. All are given before one is given again."""
        live, keys = self.live, self._keys_in_turn
        for _ in range(count):
            if not keys:
                keys.extend(live)
            entry = live.get(keys.pop()) if keys else None
            if entry is not None:
                yield entry

    def check(self) -> None:
        """Raises `BookkeepingError` where the count of blocks, the keys and the rows disagree."""
        blocks = sum(entry.extent.num_blocks for entry in self.live.values())
        if blocks != self.num_blocks:
            raise BookkeepingError(f"a queue counts {self.num_blocks} blocks, its extents hold {blocks}")
        self._check_places()

    def _compact(self) -> None:
        """Drop the stale entries."""
        self._rows = [deque(sorted(self.live.values(), key=attrgetter("rank", "serial")))]
        self._heap = []
        self._num_stale = 0

    def _check_places(self) -> None:
        queued = {id(entry) for row in self._rows for entry in row} | {id(item[-1]) for item in self._heap}
        for key, entry in self.live.items():
            if id(entry) not in queued or entry.extent.key != key:
                raise BookkeepingError(f"extent {key:x} is not in its queue")


def recency(extent: Extent) -> tuple[float, int, int]:
    """The rank of LRU: last use plus retention, count of uses, minus the depth."""
    return (extent.used_s + extent.bonus_s, extent.last_use, -extent.first_position)


class GhostQueue:
    """Keys and sizes of evicted extents, oldest first. They show what should have been kept."""

    # An OrderedDict: deleting from the front of a plain dict takes time in proportion to what was deleted.

    __slots__ = ("_sizes", "num_blocks")

    def __init__(self) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self.num_blocks = 0

    def __contains__(self, key: int) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, key: int, num_blocks: int) -> None:
        """Add the youngest ghost; it replaces a ghost of the same key."""
        self.num_blocks += num_blocks - self._sizes.pop(key, 0)
        self._sizes[key] = num_blocks

    def size(self, key: int) -> int:
        """Blocks of a ghost that must exist."""
        return self._sizes[key]

    def pop(self, key: int) -> int:
        """Remove a ghost; returns its blocks, 0 if there is none."""
        size = self._sizes.pop(key, 0)
        self.num_blocks -= size
        return size

    def trim(self, max_blocks: float) -> None:
        """Forget the oldest ghosts until the others have at most `max_blocks` blocks."""
        while self.num_blocks > max_blocks:
            self.num_blocks -= self._sizes.popitem(last=False)[1]

    def check(self, max_blocks: float) -> None:
        """Raises `BookkeepingError` where the count of blocks is wrong or too large."""
        if self.num_blocks != sum(self._sizes.values()) or self.num_blocks > max_blocks:
            raise BookkeepingError(
                f"{len(self._sizes)} ghosts count {self.num_blocks} blocks, their sizes say "
                f"{sum(self._sizes.values())}, at most {max_blocks} may stay"
            )


class QueuedPolicy(ABC):
    """An `EvictionPolicy` whose extents stand in queues; a subclass decides queue, rank and order.

    `_held` maps the key of each evictable extent to its queue. `_away` keeps the place of each extent that is
    pinned or has children, so that it returns there; it is bounded by the capacity. A parent without such a
    place goes where its last child was.

    Hints move extents out of the policy's order: `_ended` (the session ended, or the history was edited) is
    evicted before everything else, `_wanted` (a waiting request is about to use it) after everything else.
    `_own_place` has their place in the policy's order. `_num_waiting`: requests that wait for an extent, by
    key; each use takes one away.

    `capacity` is in blocks; None: the most blocks evictable at once so
    far. Raises `ConfigError` for a capacity below 1.
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ConfigError(f"capacity must be at least 1 block, or None to learn it, not {capacity}")
        self._given_capacity = capacity
        self._capacity = capacity or 0
        self._num_blocks = 0
        self._held: dict[int, ExtentQueue] = {}
        self._away: OrderedDict[int, QueueEntry] = OrderedDict()
        self._ended, self._wanted = ExtentQueue(), ExtentQueue()
        self._own_place: dict[int, QueueEntry] = {}
        self._num_waiting: OrderedDict[int, int] = OrderedDict()

    # -- what a policy decides

    @abstractmethod
    def _enqueue(self, extent: Extent, former: QueueEntry | None) -> None:
        """Put an extent into a queue with `_push`. `former`: its place before, if remembered."""

    def _enqueue_parent(self, parent: Extent, child: QueueEntry) -> None:
        """Put a parent that has no former place into a queue. `child`: its last child."""
        self._push(parent, child.queue, child.rank)

    @abstractmethod
    def _next_queue(self) -> ExtentQueue | None:
        """The queue whose first extent is evicted next; None if all are empty."""

    def _max_blocks(self, queue: ExtentQueue, extent: Extent, wanted: int) -> int:
        """How many of an extent's last `wanted` blocks may go, at least 1."""
        return wanted

    def _remember(self, key: int, extent: Extent) -> Any:
        """Drop the policy's own state of an extent that leaves its queue.

        Returns it for `QueueEntry.state`. After a split `extent` may be the tail already: `key` says which
        extent leaves.
        """
        return None

    def _evicted(self, entry: QueueEntry) -> None:  # noqa: B027 - most need nothing
        """The extent at `entry` was chosen and is evicted whole."""

    def fresh(self) -> Self:
        """Another policy of the same options that has seen nothing.

        Each option is kept in an attribute of its name, `capacity` in `_given_capacity`.
        """
        names = [name for name in inspect.signature(type(self)).parameters if name != "capacity"]
        options = {name: getattr(self, f"_{name}") for name in names}
        return type(self)(capacity=self._given_capacity, **options)

    def _queues(self) -> Sequence[ExtentQueue]:
        """All queues of the policy: those in its attributes."""
        return [value for value in vars(self).values() if isinstance(value, ExtentQueue)]

    # -- events

    @property
    def num_evictable(self) -> int:
        return self._num_blocks

    def insert(self, extent: Extent) -> None:
        key = extent.key
        if key in self._held:
            self.remove(key)
        self._enqueue(extent, self._away.pop(key, None))
        if key in self._num_waiting:
            self._move_to(self._wanted, key)
        if extent.hint is not None:
            self.hint(key, extent.hint)

    def unpin(self, extent: Extent) -> None:
        self.insert(extent)

    def pin(self, key: int) -> None:
        if self._num_waiting:
            num_waiting = self._num_waiting.pop(key, 0)
            if num_waiting > 1:
                self._num_waiting[key] = num_waiting - 1
        if key in self._held:
            self._take_out(key, 1)

    def remove(self, key: int) -> None:
        if key in self._held:
            self._take_out(key, 0)

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        missing = num_blocks
        while missing:
            queue = self._ended if self._ended.live else self._next_queue()
            if queue is None:
                if not self._wanted.live:
                    break
                queue = self._wanted
            entry = queue.first()
            extent = entry.extent
            held = extent.num_blocks
            portion = self._max_blocks(queue, extent, min(missing, held))
            missing -= portion
            self._num_blocks -= portion
            if portion < held:
                queue.num_blocks -= portion
                give_up(extent, portion)
                continue
            queue.drop_first(entry)
            entry = self._forget_chosen(entry)
            parent = give_up(extent, held)
            if parent is not None:
                self._insert_parent(parent, entry)
        return num_blocks - missing

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        queue = self._held.get(old)
        if queue is None:
            return
        former = self._take_out(old, 0, head.num_blocks + tail.num_blocks)
        self._away.pop(tail.key, None)  # of an earlier extent with the same content
        self._enqueue(tail, former)
        if queue is self._ended or queue is self._wanted:
            self._move_to(queue, tail.key)

    def hint(self, key: int, hint: Hint) -> None:
        queue, wanted = self._held.get(key), hint.wanted
        if wanted is not None and (queue is not None or key in self._away):
            self._num_waiting.pop(key, None)
            if wanted > 0:
                self._num_waiting[key] = wanted
                if len(self._num_waiting) > self._max_remembered:
                    self._num_waiting.popitem(last=False)
        if queue is None:
            return
        if key in self._num_waiting:
            self._move_to(self._wanted, key)
        elif hint.ended or hint.superseded:
            self._move_to(self._ended, key)
        elif queue is self._wanted:
            self._move_back(key)

    def check(self) -> None:
        """Raises `BookkeepingError` where counts and queues disagree, or grow beyond their bounds."""
        queues = self._queues()
        for queue in queues:
            queue.check()
        blocks = sum(queue.num_blocks for queue in queues)
        if blocks != self._num_blocks:
            raise BookkeepingError(f"{self._num_blocks} blocks counted, the queues hold {blocks}")
        if sum(len(queue.live) for queue in queues) != len(self._held):
            raise BookkeepingError(f"{len(self._held)} extents are known, the queues hold others")
        for key, queue in self._held.items():
            if key not in queue.live or key in self._away:
                raise BookkeepingError(f"extent {key:x} is not where it should be")
        if len(self._away) > self._max_remembered:
            raise BookkeepingError(f"{len(self._away)} notes are kept, at most {self._max_remembered} may be")
        if self._own_place.keys() != self._ended.live.keys() | self._wanted.live.keys():
            raise BookkeepingError("an extent that a hint took out of the order has no place to return to")
        if len(self._num_waiting) > self._max_remembered:
            waits, most = len(self._num_waiting), self._max_remembered
            raise BookkeepingError(f"{waits} wishes are remembered, at most {most} may be")

    # -- for subclasses

    def _push(self, extent: Extent, queue: ExtentQueue, rank: Any) -> None:
        """Put an extent that is in no queue into one."""
        num_blocks = extent.num_blocks
        queue.push(rank, extent, num_blocks)
        self._held[extent.key] = queue
        self._num_blocks += num_blocks
        if self._num_blocks > self._capacity and self._given_capacity is None:
            self._capacity = self._num_blocks

    def _requeue(self, extent: Extent, source: ExtentQueue, target: ExtentQueue, rank: Any) -> None:
        """Move an extent to another queue or rank."""
        entry = source.take(extent.key)
        target.push(rank, extent, entry.size)
        self._held[extent.key] = target

    def _requeue_first(self, entry: QueueEntry, source: ExtentQueue, target: ExtentQueue, rank: Any) -> None:
        """Move the entry that `source.first()` just returned."""
        source.drop_first(entry)
        target.push(rank, entry.extent, entry.size)
        self._held[entry.extent.key] = target

    def _take_out(self, key: int, num_uses: int, num_blocks: int | None = None) -> QueueEntry:
        """Take an extent out of its queue and remember its place there.

        `num_blocks`: what it counts as in the queue, if not its blocks now.
        """
        queue = self._held.pop(key)
        entry = queue.take(key, num_blocks)
        extent = entry.extent
        self._num_blocks -= extent.num_blocks if num_blocks is None else num_blocks
        if self._own_place:
            entry = self._own_place.pop(key, entry)
        entry.num_uses, entry.state = num_uses, self._remember(key, extent)
        away = self._away
        away[key] = entry
        if len(away) > MIN_REMEMBERED and len(away) > self._capacity:
            away.popitem(last=False)
        return entry

    # -- inside

    @property
    def _max_remembered(self) -> int:
        """Bound on the keys that are remembered of extents in no queue."""
        return max(MIN_REMEMBERED, self._capacity)

    def _forget_chosen(self, entry: QueueEntry) -> QueueEntry:
        """Drop a chosen extent; returns its place in the policy's own order."""
        key = entry.extent.key
        del self._held[key]
        if self._num_waiting:
            self._num_waiting.pop(key, None)
        place = self._own_place.pop(key, entry) if self._own_place else entry
        if entry.queue is self._ended:  # the policy did not choose it and does not expect it back: no ghost
            self._remember(key, entry.extent)
        else:
            self._evicted(place)
        return place

    def _insert_parent(self, parent: Extent, child: QueueEntry) -> None:
        """The child at that place is gone, and its parent became an evictable leaf."""
        former = self._away.pop(parent.key, None)
        if former is None:
            self._enqueue_parent(parent, child)
        else:
            self._enqueue(parent, former)
        if parent.key in self._num_waiting:
            self._move_to(self._wanted, parent.key)
        if parent.hint is not None:
            self.hint(parent.key, parent.hint)

    def _move_to(self, target: ExtentQueue, key: int) -> None:
        """Move an extent into one of the two queues of hints."""
        queue = self._held[key]
        if queue is not target:
            entry = queue.live[key]
            self._own_place.setdefault(key, entry)
            self._requeue(entry.extent, queue, target, recency(entry.extent))

    def _move_back(self, key: int) -> None:
        """Return an extent from a queue of hints to its own place."""
        queue, place = self._held[key], self._own_place.pop(key)
        self._requeue(queue.live[key].extent, queue, place.queue, place.rank)
