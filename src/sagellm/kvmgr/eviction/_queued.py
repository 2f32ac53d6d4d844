"""What all policies made of queues share: the events, the walk of an eviction, hints and bounded memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Self

from sagellm.core.errors import BookkeepingError, ConfigError
from sagellm.core.protocols.eviction import Extent, GiveUp, Hint
from sagellm.kvmgr.eviction._hints import HintLanes
from sagellm.kvmgr.eviction._queue import Entry, ExtentQueue

Note = tuple[Any, ...]
"""What a policy remembers of an extent that is pinned or inner: its queue, its rank, its uses since, ..."""
MIN_MEMORY = 64


class QueuedPolicy(ABC):
    """An `EvictionPolicy` whose extents stand in queues; a policy says which queue, which rank, whose turn.

    An extent that is pinned, or got a child, leaves a note, so that it comes back as who it was. A parent
    that nobody remembers takes the place of its last child. Notes are bounded by the capacity; `capacity` in
    blocks, None: the largest number of blocks that were evictable at once.
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ConfigError(f"capacity must be at least 1 block, or None to learn it, not {capacity}")
        self._given_capacity = capacity
        self._capacity = capacity or 0
        self._num_blocks = 0
        self._held: dict[int, ExtentQueue] = {}
        self._away: OrderedDict[int, Note] = OrderedDict()
        self._lanes = HintLanes()

    # -- what a policy decides

    @abstractmethod
    def _admit(self, extent: Extent, note: Note | None) -> None:
        """Put an extent into a queue with `_put`; without a note nobody remembers it."""

    @abstractmethod
    def _choose(self) -> ExtentQueue | None:
        """The queue whose first extent is to go, None if all are empty."""

    @abstractmethod
    def fresh(self) -> Self:
        """An empty policy with the same options."""

    @abstractmethod
    def _queues(self) -> Sequence[ExtentQueue]:
        """All queues of the policy, for `check`."""

    def _note(self, key: int, entry: Entry, queue: ExtentQueue, used: int) -> Note:
        """What to remember of an extent that leaves for a while; `used`: 1 if this is a use.

        After a split the entry's extent may be the tail already, so `key` alone says which one left.
        """
        return (queue, entry[0], used)

    def _portion(self, queue: ExtentQueue, extent: Extent, wanted: int) -> int:
        """How many of the `wanted` last blocks of the extent chosen from `queue` may go now; at least 1."""
        return wanted

    def _evicted(self, entry: Entry, queue: ExtentQueue) -> None:  # noqa: B027 - most policies need not know
        """An extent of the queue was chosen, and is gone whole."""

    def _follow(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        """Put a parent that nobody remembers where its last child, at `entry` of the queue, just went."""
        self._put(parent, queue, entry[0])

    # -- events

    @property
    def num_evictable(self) -> int:
        return self._num_blocks

    def insert(self, extent: Extent) -> None:
        key = extent.key
        if key in self._held:
            self.remove(key)
        self._admit(extent, self._away.pop(key, None))
        if key in self._lanes.wanted_by:
            self._move_to(self._lanes.wanted, key)
        if extent.hint is not None:
            self.hint(key, extent.hint)

    def unpin(self, extent: Extent) -> None:
        self.insert(extent)

    def pin(self, key: int) -> None:
        lanes = self._lanes
        if lanes.wanted_by:
            lanes.used(key)
        if key in self._held:
            self._depart(key, 1)

    def remove(self, key: int) -> None:
        if key in self._held:
            self._depart(key, 0)

    def evict(self, num_blocks: int, give_up: GiveUp) -> int:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        missing = num_blocks
        while missing:
            queue = self._turn()
            if queue is None:
                break
            entry = queue.first()
            extent = entry[2]
            held = extent.num_blocks
            portion = self._portion(queue, extent, min(missing, held))
            if portion < held:
                missing -= portion
                queue.num_blocks -= portion
                self._num_blocks -= portion
                give_up(extent, portion)
                continue
            queue.drop_first(entry, held)
            missing -= held
            self._num_blocks -= held
            entry, queue = self._gone(entry, queue)
            parent = give_up(extent, held)
            if parent is not None:
                self._succeed(parent, entry, queue)
        return num_blocks - missing

    def split(self, old: int, head: Extent, tail: Extent) -> None:
        lane = self._held.get(old)
        if lane is None:
            return
        note = self._depart(old, 0, head.num_blocks + tail.num_blocks)
        self._away.pop(tail.key, None)  # of an extent of the same content that went before
        self._admit(tail, note)
        lanes = self._lanes
        if lane is lanes.ended or lane is lanes.wanted:
            self._move_to(lane, tail.key)

    def hint(self, key: int, hint: Hint) -> None:
        lanes = self._lanes
        if key in self._held or key in self._away:
            lanes.note(key, hint, self._memory)
        held_in = self._held.get(key)
        if held_in is None:
            return
        lane = lanes.lane(key, hint)
        if lane is not None and lane is not held_in:
            self._move_to(lane, key)
        elif lane is None and held_in is lanes.wanted:
            self._move_home(key)

    # -- consistency

    def check(self) -> None:
        """Raise `BookkeepingError` where the books do not balance, or grow beyond their bounds."""
        queues = (*self._queues(), self._lanes.ended, self._lanes.wanted)
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
        if len(self._away) > self._memory:
            raise BookkeepingError(f"{len(self._away)} notes are kept, at most {self._memory} may be")
        self._lanes.check(self._memory)

    # -- inside

    @property
    def _memory(self) -> int:
        """How many keys may be remembered of extents that are alive, but not in the policy's hands."""
        return max(MIN_MEMORY, self._capacity)

    def _put(self, extent: Extent, queue: ExtentQueue, rank: Any) -> None:
        num_blocks = extent.num_blocks
        queue.push(rank, extent, num_blocks, num_blocks)
        self._held[extent.key] = queue
        self._num_blocks += num_blocks
        if self._num_blocks > self._capacity and self._given_capacity is None:
            self._capacity = self._num_blocks

    def _requeue(self, extent: Extent, source: ExtentQueue, target: ExtentQueue, rank: Any) -> None:
        """Move an extent between queues of the policy; the sum of blocks stays."""
        num_blocks = extent.num_blocks
        entry = source.take(extent.key, num_blocks)
        target.push(rank, extent, num_blocks, entry[3])
        self._held[extent.key] = target

    def _requeue_first(self, entry: Entry, source: ExtentQueue, target: ExtentQueue, rank: Any) -> None:
        """Move what `source.first()` just answered."""
        extent = entry[2]
        num_blocks = extent.num_blocks
        source.drop_first(entry, num_blocks)
        target.push(rank, extent, num_blocks, entry[3])
        self._held[extent.key] = target

    def _turn(self) -> ExtentQueue | None:
        lanes = self._lanes
        if lanes.ended.live:
            return lanes.ended
        return self._choose() or (lanes.wanted if lanes.wanted.live else None)

    def _depart(self, key: int, used: int, num_blocks: int | None = None) -> Note:
        """Take an extent out of its queue (it counted as `num_blocks` there), and remember it."""
        queue = self._held.pop(key)
        extent = queue.live[key][2]
        blocks = extent.num_blocks if num_blocks is None else num_blocks
        entry = queue.take(key, blocks)
        self._num_blocks -= blocks
        home = self._lanes.home.pop(key, None) if self._lanes.home else None
        if home is not None:
            queue, entry = home[0], (home[1], *entry[1:])
        note = self._away[key] = self._note(key, entry, queue, used)
        if len(self._away) > self._memory:
            self._away.popitem(last=False)
        return note

    def _gone(self, entry: Entry, queue: ExtentQueue) -> tuple[Entry, ExtentQueue]:
        """The books after an extent was chosen; returns its place in the policy's own order."""
        key = entry[2].key
        del self._held[key]
        lanes = self._lanes
        if lanes.wanted_by:
            lanes.wanted_by.pop(key, None)
        home = lanes.home.pop(key, None) if lanes.home else None
        if home is None:
            self._evicted(entry, queue)
            return entry, queue
        ended = queue is lanes.ended
        queue, entry = home[0], (home[1], *entry[1:])
        if ended:  # its policy neither chose it nor expects it back: no ghost, no ageing
            self._note(key, entry, queue, 0)
        else:
            self._evicted(entry, queue)
        return entry, queue

    def _succeed(self, parent: Extent, entry: Entry, queue: ExtentQueue) -> None:
        """The child at `entry` is gone, and its parent became an evictable leaf."""
        note = self._away.pop(parent.key, None)
        if note is None:
            self._follow(parent, entry, queue)
        else:
            self._admit(parent, note)
        if parent.key in self._lanes.wanted_by:
            self._move_to(self._lanes.wanted, parent.key)
        if parent.hint is not None:
            self.hint(parent.key, parent.hint)

    def _move_to(self, lane: ExtentQueue, key: int) -> None:
        """Out of the policy's order into a lane, or from one lane to the other."""
        queue = self._held[key]
        extent = queue.live[key][2]
        entry = queue.take(key, extent.num_blocks)
        home = self._lanes.home.get(key, (queue, entry[0]))
        self._lanes.enter(lane, extent, home, entry[3])
        self._held[key] = lane

    def _move_home(self, key: int) -> None:
        lane = self._held[key]
        extent = lane.live[key][2]
        queue, rank = self._lanes.home.pop(key)
        self._requeue(extent, lane, queue, rank)
