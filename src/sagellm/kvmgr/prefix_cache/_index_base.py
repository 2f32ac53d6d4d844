"""What both prefix indexes do alike: evict across accounts, apply hints, explain a match."""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.events import BlocksStored, EventBus, IndexCleared
from sagellm.core.protocols.eviction import NO_USE, EvictionPolicy, Hint, PolicyFactory, Use
from sagellm.core.protocols.prefix_cache import (
    Branch,
    EvictedPath,
    IndexNode,
    MatchEnd,
    MatchReport,
    PrefixHit,
    ReusedPrefix,
    SharedPrefix,
)
from sagellm.core.types import TOKEN_BYTES, Account, BlockIds, Namespace, Tokens
from sagellm.kvmgr.prefix_cache._extents import AccountShare, EvictableLeaves, ExtentType, Ghost
from sagellm.kvmgr.prefix_cache.fingerprint import chain

DEFAULT_NAMESPACE = Namespace()
FIRST_PORTION = 4
"""Blocks that `evict_paths` evicts before it looks how long their paths are; then twice as many, and on."""


@dataclass(slots=True)
class _Visit(Generic[ExtentType]):
    """An extent whose children are being read; None: those at the beginning of prompts.

    `num_leaves` and `last_use` are of the `num_branches` children that were read.
    """

    extent: ExtentType | None
    unseen: Iterator[ExtentType]
    num_branches: int = 0
    num_leaves: int = 0
    last_use: int = 0

    def add(self, num_leaves: int, last_use: int) -> None:
        self.num_branches += 1
        self.num_leaves += num_leaves
        self.last_use = max(self.last_use, last_use)


class IndexBase(ABC, Generic[ExtentType]):
    """A `PrefixReuseIndex` without its structure: a subclass says how blocks are found and removed.

    `evict` gives up what `policy` chooses; without one, what was used longest ago, deeper blocks first. With
    `policy_factory` each account has a policy of its own. `max_ghosts` bounds how many evictions `explain`
    remembers. Not thread-safe: one engine thread owns it.
    """

    _extent_type: type[ExtentType]
    _leaves: EvictableLeaves[ExtentType]

    def __init__(
        self,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        events: EventBus | None = None,
        clock: Clock | None = None,
        policy_factory: PolicyFactory | None = None,
        max_ghosts: int = 4096,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._events = events or EventBus()
        self._clock = clock or MonotonicClock()
        self._num_touches = 0
        self._notes: list[EvictedPath] | None = None
        self._noted: set[ExtentType] = set()
        self._create(policy, policy_factory, max_ghosts)

    @abstractmethod
    def _create(
        self, policy: EvictionPolicy | None, policy_factory: PolicyFactory | None, max_ghosts: int
    ) -> None:
        """Make the empty index, `_leaves` included."""

    @property
    @abstractmethod
    def num_evictable(self) -> int: ...

    @abstractmethod
    def lookup(
        self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE, max_tokens: int | None = None
    ) -> PrefixHit: ...

    @abstractmethod
    def _current(self, hit: PrefixHit) -> PrefixHit:
        """The hit, or a new look-up of it if the index has changed since."""

    @abstractmethod
    def num_unpinned_on_path(self, hit: PrefixHit) -> int: ...

    @abstractmethod
    def _pin(self, last: ExtentType, num_blocks: int, *, is_use: bool = True) -> ExtentType:
        """Add one to the reference counts of a path. Returns its last extent, which may be new."""

    @abstractmethod
    def _unpin(self, last: ExtentType) -> None:
        """Take one from the reference counts of a path."""

    @abstractmethod
    def _evict_of(
        self, share: AccountShare, num_blocks: int, cause: str, last: ExtentType | None = None
    ) -> BlockIds:
        """Free `num_blocks` blocks of one account, or all that its policy can give up.

        With `last`, those at the end of the path to this evictable leaf.
        """

    @abstractmethod
    def _namespaces(self, first_block: bytes) -> Iterable[Namespace]:
        """Those with a prompt that begins with this block."""

    @abstractmethod
    def _ghost_behind(self, hit: PrefixHit, next_block: bytes) -> Ghost | None:
        """The record of the eviction of `next_block` behind a match."""

    @abstractmethod
    def _first_extents(self) -> Iterable[ExtentType]:
        """Those at the beginning of prompts."""

    @abstractmethod
    def _uses(self, order: Sequence[ExtentType]) -> Mapping[int, int]:
        """How often each extent was used, by its `id`. `order`: all, parents before children."""

    @abstractmethod
    def _blocks_behind(self, hit: PrefixHit) -> Iterable[bytes]:
        """The tokens of the resident blocks that follow a match."""

    def _hit(
        self, tokens: Tokens, namespace: Namespace, node: IndexNode | None, num_blocks: int
    ) -> PrefixHit:
        return PrefixHit(num_blocks * self.block_size, num_blocks, tokens, namespace, node)

    def _path_of(self, hit: PrefixHit) -> Iterator[ExtentType]:
        """The extents of a current hit, the deepest first."""
        return hit.node.path() if isinstance(hit.node, self._extent_type) else iter(())

    # -- pins: the reference counts

    def pin(self, hit: PrefixHit, *, is_use: bool = True) -> PrefixHit:
        hit = self._current(hit)
        last = hit.node
        if not hit.num_blocks or not isinstance(last, self._extent_type):
            return hit
        listener = last.share.listener if is_use else None
        num_held = hit.num_blocks - self.num_unpinned_on_path(hit) if listener is not None else 0
        last = self._pin(last, hit.num_blocks, is_use=is_use)
        if listener is not None:
            listener.found(last, num_held)
        return self._hit(hit.tokens, hit.namespace, last, hit.num_blocks)

    def unpin(self, hit: PrefixHit, use: Use = NO_USE, *, is_use: bool = True) -> None:
        last = hit.node
        if not hit.num_blocks or not isinstance(last, self._extent_type):
            return
        if not last.num_ends or last.end_block != hit.num_blocks:
            raise BookkeepingError(f"unpin of a prefix of {hit.num_blocks} blocks that is not pinned")
        if is_use:
            self._touch(last)
            last.use = use
        self._unpin(last)
        if use is not NO_USE and last.share.listener is not None:
            last.share.listener.used(last)

    def _check_extension(self, data: bytes, block_ids: Sequence[int], *, is_there: bool) -> None:
        """Raise `BookkeepingError` for what `extend` does not take."""
        if not block_ids or len(data) != len(block_ids) * self._block_bytes:
            raise BookkeepingError(f"{len(data) // TOKEN_BYTES} tokens for {len(block_ids)} blocks")
        if is_there:
            raise BookkeepingError("an extension whose first block is resident: insert the whole path")

    def _touch(self, extent: ExtentType) -> None:
        """Set the time of last use."""
        self._num_touches += 1
        extent.last_use = self._num_touches
        extent.used_s = self._clock.now()

    # -- eviction

    def evictable_by_account(self) -> Mapping[Account, int]:
        return {account: share.num_evictable for account, share in self._leaves.shares.items()}

    def evict(self, num_blocks: int, cause: str = "capacity") -> BlockIds | None:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        if num_blocks > self.num_evictable:
            return None
        if len(self._leaves.shares) == 1:
            freed = self._evict_of(self._leaves.default_share, num_blocks, cause)
        else:
            freed = array("i")
            # An evicted leaf may expose a parent of another account: repeat while blocks are freed.
            before = -1
            while before < len(freed) < num_blocks:
                before = len(freed)
                for share in sorted(self._leaves.shares.values(), key=lambda share: -share.num_evictable):
                    freed += self._evict_of(share, num_blocks - len(freed), cause)
        if len(freed) != num_blocks:
            raise BookkeepingError(f"the eviction policy gave {len(freed)} blocks, asked for {num_blocks}")
        return freed

    def evict_from(self, account: Account, num_blocks: int, cause: str = "capacity") -> BlockIds:
        if num_blocks < 0:
            raise BookkeepingError(f"cannot evict {num_blocks} blocks")
        share = self._leaves.shares.get(account)
        if share is None:
            return array("i")
        return self._evict_of(share, min(num_blocks, share.num_evictable), cause)

    def evict_paths(
        self,
        num_blocks: int,
        account: Account | None = None,
        cause: str = "capacity",
        max_path_blocks: float = math.inf,
    ) -> tuple[BlockIds, Sequence[EvictedPath]]:
        notes, freed = list[EvictedPath](), array("i")
        self._notes, portion = notes, FIRST_PORTION
        try:
            while True:
                asked = min(num_blocks - len(freed), portion)
                if account is None:
                    part = self.evict(min(asked, self.num_evictable), cause)
                else:
                    part = self.evict_from(account, asked, cause)
                assert part is not None
                freed += part
                if len(part) < portion or sum(len(path.block_ids) for path in notes) >= max_path_blocks:
                    return freed, notes
                portion *= 2
        finally:
            self._notes = None
            self._noted.clear()

    def _note(self, leaf: ExtentType) -> None:
        """Note the path to a leaf whose last blocks go now.

        Not if it is a part of a noted one. Heads go after tails, so all blocks of the path are still there.
        """
        hint = leaf.hint
        if self._notes is None or leaf in self._noted or (hint and (hint.ended or hint.superseded)):
            return
        path = list(leaf.path())
        tokens = Tokens.frombytes(b"".join([extent.content for extent in reversed(path)]))
        hit = self._hit(tokens, leaf.namespace, leaf, leaf.end_block)
        account = leaf.share.account
        self._notes.append(EvictedPath(tokens, leaf.namespace, self.block_ids(hit), account, leaf.use))
        self._noted.update(itertools.takewhile(lambda extent: extent not in self._noted, path))

    def evict_tail(self, hit: PrefixHit, num_blocks: int, cause: str = "capacity") -> BlockIds:
        hit = self._current(hit)
        last = hit.node
        if not num_blocks or not hit.num_blocks or not isinstance(last, self._extent_type):
            return array("i")
        if last.end_block > hit.num_blocks or self._leaves.by_key.get(last.key) is not last:
            return array("i")
        return self._evict_of(last.share, num_blocks, cause, last)

    def clear(self) -> BlockIds:
        freed = self.evict(self.num_evictable, "cleared")
        assert freed is not None
        num_cached = 0
        for share in self._leaves.shares.values():
            num_cached += share.num_cached
            if share.listener is not None:
                share.listener.cleared(share.num_cached)
        if not num_cached and self._events.wants(IndexCleared):
            self._events.emit(IndexCleared())
        return freed

    def set_policy(self, factory: PolicyFactory) -> None:
        self._leaves.set_policy(factory)

    def hint(self, hit: PrefixHit, hint: Hint) -> int:
        hit = self._current(hit)
        num_blocks, now_s = 0, self._clock.now()
        for extent in self._path_of(hit):
            is_last = extent is hit.node
            if is_last and (hint.ended or hint.superseded):
                if extent.children or extent.end_block > hit.num_blocks:
                    return 0  # another request continued from there
            elif not is_last and len(extent.children) > 1:
                break
            num_blocks += extent.num_blocks
            if hint.duration_s is not None or hint.over(extent.hint) != extent.hint:
                self._leaves.hint(extent, hint, now_s)
        return num_blocks

    # -- off the hot path: where a match ends and why, and what is near it

    def verify(self, hit: PrefixHit) -> bool:
        limit = hit.num_blocks * self.block_size
        return self.lookup(hit.tokens, hit.namespace, limit).num_blocks == hit.num_blocks

    def branches(self, tokens: Tokens, k: int, namespace: Namespace = DEFAULT_NAMESPACE) -> list[Branch]:
        longest = self.lookup(tokens, namespace)
        found: list[Branch] = []
        below: ExtentType | None = None
        for extent in self._path_of(longest):
            if len(found) >= k:
                break
            hit = self._hit(tokens, namespace, extent, min(longest.num_blocks, extent.end_block))
            leaves = heapq.nlargest(k - len(found), extent.leaves(below), key=lambda leaf: leaf.last_use)
            found += [Branch(hit, leaf.end_block, leaf.used_s) for leaf in leaves]
            below = extent
        return found

    def hot_prefixes(self, count: int) -> list[ReusedPrefix]:
        order, stack = list[ExtentType](), list(self._first_extents())
        while stack:
            order.append(stack.pop())
            stack += order[-1].children.values()
        uses, lengths = self._uses(order), dict[int, int]()
        for extent in order:
            above, length = extent.parent, extent.num_blocks
            is_alone = above is not None and id(above) in lengths and len(above.children) == 1
            if is_alone and uses[id(above)] == uses[id(extent)]:
                length += lengths.pop(id(above))
            lengths[id(extent)] = length
        used_s = {id(extent): extent.used_s for extent in order}
        for extent in reversed(order):  # of an extent with children, only these know their last use
            if id(extent.parent) in used_s:
                used_s[id(extent.parent)] = max(used_s[id(extent.parent)], used_s[id(extent)])
        again = [extent for extent in order if id(extent) in lengths and uses[id(extent)] > 1]
        best = heapq.nlargest(count, again, key=lambda each: (uses[id(each)] - 1) * lengths[id(each)])
        now_s = self._clock.now()
        return [
            ReusedPrefix(
                f"{each.key:016x}", each.end_block * self.block_size, lengths[id(each)], uses[id(each)],
                now_s - used_s[id(each)],
            )
            for each in best
        ]  # fmt: skip

    def shared_prefixes(self, count: int) -> Iterator[SharedPrefix | None]:
        best: list[tuple[int, int, int, ExtentType]] = []  # the worst first
        open_ = [_Visit(None, iter(self._first_extents()))]
        num_visits = 0
        while open_:
            visit, num_visits = open_[-1], num_visits + 1
            child = next(visit.unseen, None)
            if child is None:
                open_.pop()
                if open_:
                    open_[-1].add(visit.num_leaves, visit.last_use)
                if visit.extent is not None and visit.num_branches > 1:
                    entry = visit.num_leaves, visit.last_use, num_visits, visit.extent
                    (heapq.heappush if len(best) < count else heapq.heappushpop)(best, entry)
            elif child.children:
                open_.append(_Visit(child, iter(list(child.children.values()))))
            else:
                visit.add(1, child.last_use)
            yield None
        for num_prompts, _, _, extent in sorted(best, reverse=True):
            content = b"".join(reversed([above.content for above in extent.path()]))
            yield SharedPrefix(Tokens.frombytes(content), extent.namespace, num_prompts)

    @abstractmethod
    def block_ids(self, hit: PrefixHit) -> BlockIds: ...

    def report_hit(self, hit: PrefixHit) -> None:
        if not hit.num_blocks or not self._events.wants(BlocksStored):
            return
        data = hit.tokens.tobytes()[: hit.num_blocks * self._block_bytes]
        hashes = tuple(chain(data, self._block_bytes, hit.namespace))
        self._events.emit(BlocksStored(tuple(self.block_ids(hit)), 0, hashes, None, data, hit.namespace))

    def explain(self, tokens: Tokens, namespace: Namespace = DEFAULT_NAMESPACE) -> MatchReport:
        hit = self.lookup(tokens, namespace)
        start = hit.num_blocks * self._block_bytes
        next_block = tokens.tobytes()[start : start + self._block_bytes]
        if len(next_block) < self._block_bytes:
            return MatchReport(hit.num_tokens, hit.num_blocks, MatchEnd.COMPLETE)
        namespaces = self._namespaces(tokens.tobytes()[: self._block_bytes])
        others = (self.lookup(tokens, other) for other in namespaces if other != namespace)
        longest = max((other.num_blocks for other in others), default=0)
        elsewhere = longest if longest > hit.num_blocks else 0
        ghost = self._ghost_behind(hit, next_block)
        at_s, cause = (ghost.at_s, ghost.cause) if ghost is not None else (None, None)
        end = MatchEnd.NEVER_SEEN
        if ghost is not None:
            end = MatchEnd.EVICTED
        elif elsewhere:
            end = MatchEnd.OTHER_NAMESPACE
        elif any(block.startswith(next_block[:TOKEN_BYTES]) for block in self._blocks_behind(hit)):
            end = MatchEnd.NOT_ALIGNED
        return MatchReport(hit.num_tokens, hit.num_blocks, end, at_s, cause, elsewhere)
