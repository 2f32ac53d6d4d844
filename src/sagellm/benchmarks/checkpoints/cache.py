"""What a hybrid model's cache holds: attention blocks and checkpoints, in bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

from sagellm.benchmarks.checkpoints.groups import KVGroups
from sagellm.benchmarks.checkpoints.tree import Path, Segment
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.checkpoints import Marginal


class HybridCache:
    """Resident blocks and checkpoints in the segments of a trace's tree; implements `CheckpointIndex`.

    A prefix of d blocks can be continued if there is a checkpoint at depth d: its blocks are then resident,
    because a block that is evicted takes the checkpoints behind it along.
    """

    def __init__(self, groups: KVGroups, block_tokens: int) -> None:
        self.groups, self.block_tokens = groups, block_tokens
        self.block_bytes = groups.attention_bytes * block_tokens
        self.used_bytes = self.checkpoint_bytes = self.num_made = 0
        self.checkpoints: dict[int, tuple[Segment, int]] = {}
        self._segments: dict[int, Segment] = {}

    # -- a request

    def reused(self, path: Path) -> int:
        """The deepest checkpoint on a path, 0 without one."""
        for segment in reversed(path.segments):
            if segment.depths:
                return segment.depths[-1]
        return 0

    def resident(self, path: Path) -> int:
        """Leading blocks of a path that are in the cache."""
        depth = 0
        for segment in path.segments:
            if segment.resident > segment.start:
                depth = segment.resident
            if segment.resident < segment.stop:
                break
        return depth

    def known(self, path: Path) -> int:
        """Leading blocks of a path that some request had."""
        for segment in reversed(path.segments):
            if segment.is_known:
                return segment.stop
        return 0

    def insert(self, path: Path, number: int) -> None:
        """Request `number` has computed its prompt: all blocks of the path are resident."""
        for segment in path.segments:
            if segment.resident < segment.stop:
                if segment.resident == segment.start and segment.parent is not None:
                    segment.parent.num_resident_children += 1
                self.used_bytes += (segment.stop - segment.resident) * self.block_bytes
                segment.resident = segment.stop
            if not segment.is_known:
                self._segments[segment.first_key] = segment
            segment.is_known, segment.last_use = True, number

    def make(self, segment: Segment, depth: int) -> int:
        """Keeps the state behind `depth` resident blocks; returns the checkpoint's key."""
        key = segment.key(depth)
        if key in self.checkpoints or depth > segment.resident:
            raise BookkeepingError(f"no second checkpoint, nor one without blocks, at depth {depth}")
        self.checkpoints[key] = (segment, depth)
        insort(segment.depths, depth)
        self.num_made += 1
        size = self.groups.checkpoint_bytes(depth * self.block_tokens)
        self.checkpoint_bytes += size
        self.used_bytes += size
        self._hold(segment)
        return key

    # -- eviction

    def drop(self, key: int) -> None:
        """Drops a checkpoint; its blocks stay."""
        segment, depth = self.checkpoints.pop(key)
        segment.depths.remove(depth)
        size = self.groups.checkpoint_bytes(depth * self.block_tokens)
        self.checkpoint_bytes -= size
        self.used_bytes -= size
        self._release(segment)

    def evict_uncovered(self, segment: Segment | None) -> None:
        """Evicts the blocks that no checkpoint needs, from a segment upwards."""
        while segment is not None:
            needed = segment.depths[-1] if segment.depths else segment.start
            if segment.num_holders > len(segment.depths) or segment.num_resident_children:
                return
            self.evict_blocks(segment, segment.resident - needed)
            if needed > segment.start:
                return
            segment = segment.parent

    def evict_blocks(self, segment: Segment, num_blocks: int) -> list[int]:
        """Evicts the last resident blocks of a segment. Returns the keys of the checkpoints that went too."""
        if not num_blocks:
            return []
        if segment.num_resident_children or num_blocks > segment.resident - segment.start:
            raise BookkeepingError(f"{num_blocks} blocks are not a resident tail of the segment")
        segment.resident -= num_blocks
        self.used_bytes -= num_blocks * self.block_bytes
        if segment.resident == segment.start and segment.parent is not None:
            segment.parent.num_resident_children -= 1
        lost = [segment.key(depth) for depth in segment.depths if depth > segment.resident]
        for key in lost:
            self.drop(key)
        return lost

    def marginal(self, key: int) -> Marginal:
        """What dropping a checkpoint, and the blocks that only it needs, frees and costs."""
        segment, depth = self.checkpoints[key]
        above = self._above(segment, depth)
        size = self.groups.checkpoint_bytes(depth * self.block_tokens)
        return Marginal(
            (depth - (above[1] if above else 0)) * self.block_tokens,
            size + self._only_for(segment, depth) * self.block_bytes,
            above[0].key(above[1]) if above else None,
        )

    def _above(self, segment: Segment | None, depth: int) -> tuple[Segment, int] | None:
        """The next checkpoint in front of a depth."""
        while segment is not None:
            place = bisect_left(segment.depths, depth)
            if place:
                return segment, segment.depths[place - 1]
            segment = segment.parent
        return None

    def _only_for(self, segment: Segment, depth: int) -> int:
        """Blocks that no other checkpoint needs than the one at that depth."""
        if segment.depths[-1] > depth or segment.num_holders > len(segment.depths):
            return 0
        if len(segment.depths) > 1:
            return depth - segment.depths[-2]
        above = segment.parent
        while above is not None and above.num_holders == 1 and not above.depths:
            above = above.parent
        if above is None:
            return depth
        return depth - (above.stop if above.num_holders > len(above.depths) + 1 else _last(above))

    def _hold(self, segment: Segment | None) -> None:
        while segment is not None:
            segment.num_holders += 1
            if segment.num_holders > 1:
                return
            segment = segment.parent

    def _release(self, segment: Segment | None) -> None:
        while segment is not None:
            segment.num_holders -= 1
            if segment.num_holders:
                return
            segment = segment.parent

    def check(self) -> None:
        """Raises `BookkeepingError` where counts and bytes disagree."""
        blocks = sum(segment.resident - segment.start for segment in self._segments.values())
        sizes = sum(self.groups.checkpoint_bytes(d * self.block_tokens) for _, d in self.checkpoints.values())
        if self.checkpoint_bytes != sizes or self.used_bytes != sizes + blocks * self.block_bytes:
            raise BookkeepingError(f"{self.used_bytes} bytes are counted, {blocks} blocks and {sizes} held")
        holders: Counter[int] = Counter()
        resident: Counter[int] = Counter()
        for key in sorted(self._segments, reverse=True):  # children have higher keys than their parents
            segment = self._segments[key]
            held = holders[key] + len(segment.depths)
            if (held, resident[key]) != (segment.num_holders, segment.num_resident_children):
                raise BookkeepingError(f"a segment has {held} holders and counts {segment.num_holders}")
            if any(depth > segment.resident for depth in segment.depths):
                raise BookkeepingError(f"a checkpoint is behind the {segment.resident} resident blocks")
            if segment.parent is not None:
                holders[segment.parent.first_key] += held > 0
                resident[segment.parent.first_key] += segment.resident > segment.start


def _last(segment: Segment) -> int:
    return segment.depths[-1] if segment.depths else segment.start
