"""Our eviction order in vLLM's GPU block pool.

vLLM keeps its free blocks in one queue: those without a hash in front, then cached ones by their last use. It
takes new blocks from the front. `GuidedQueue` stands in the place of that queue. It keeps cached blocks as
paths in our prefix index, and a policy of ours decides which of them go first. Reference counts, hashes and
what is a hit stay vLLM's.

The queue has to know what requests do; `GuidedPool` wraps four calls of the pool to tell it:

    touch           a request found a prefix: its path is pinned, so that it is not evicted
    get_new_blocks  the next call after that is for the same request; its first block stands for the request
    free_blocks     the request lets go: its path enters the index, or is used once more
    reset_prefix_cache

If anything is not as expected, the pool gets its own queue back, once and for good, with one warning.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import NO_USE, PolicyFactory, Use
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import BlockIds, Namespace, Tokens
from sagellm.engines.guests.paths import index_of_digests, path_of
from sagellm.engines.guests.request_hints import NO_HINTS, HintedIndex, RequestHints

logger = logging.getLogger("vllm.sagellm")  # below "vllm": vLLM sets that logger up
Block = Any
"""vLLM's `KVCacheBlock`."""
Pool = Any
"""vLLM's `BlockPool`."""

POOL_NAMES = (
    "blocks",
    "free_block_queue",
    "hash_block_size",
    "touch",
    "get_new_blocks",
    "free_blocks",
    "reset_prefix_cache",
)
QUEUE_NAMES = ("num_free_blocks", "popleft_n", "remove", "append_n", "prepend_n", "get_all_free_blocks")
BLOCK_NAMES = ("block_id", "ref_cnt", "is_null", "block_hash", "block_hash_num_tokens", "pool")


class RequestEnd(NamedTuple):
    """What is known of a request that is about to free its blocks. `namespace` has its tenant."""

    use: Use = NO_USE
    said: RequestHints = NO_HINTS
    namespace: Namespace = Namespace()


UNKNOWN = RequestEnd()


class GuidedQueue:
    """vLLM's free blocks in the order of a policy, in place of a `FreeKVCacheBlockQueue`.

    A free block is in one of four places: without a hash (`_uncached`, first to go), cached but not in the
    index, since the index has another block with the same tokens (`_spare`), in the index, or released while
    something may still read it (`_last`, last to go). `num_free_blocks` counts them all.
    """

    def __init__(
        self,
        pool: Pool,
        policy_factory: PolicyFactory,
        clock: Clock,
        surrender: Callable[[str], None],
        hint_kinds: Collection[str] = (),
    ) -> None:
        self._pool, self._blocks, self._block_tokens = pool, pool.blocks, pool.hash_block_size
        self._policy_factory, self._clock, self._surrender = policy_factory, clock, surrender
        self._hint_kinds = hint_kinds
        self.num_restarts = 0
        self._start(pool.free_block_queue.get_all_free_blocks())

    def _start(self, free: Iterable[Block]) -> None:
        self.index = index_of_digests(self._policy_factory, self._clock)
        self._hinted = HintedIndex(self.index, self._clock, self._hint_kinds, lambda _: Namespace())
        self._uncached: deque[Block] = deque()
        self._spare: dict[int, Block] = {}
        self._last: deque[Block] = deque()
        self._indexed = bytearray(len(self._blocks))
        self._pins: dict[int, PrefixHit] = {}
        self._unclaimed: dict[int, PrefixHit] = {}
        self._touched: PrefixHit | None = None
        self._finishing: dict[int, RequestEnd] = {}
        self.num_free_blocks = 0
        for block in free:
            self.num_free_blocks += 1
            if block.block_hash is None:
                self._uncached.append(block)
            else:
                self._spare[block.block_id] = block

    def __getattr__(self, name: str) -> Any:
        """Not known here, but to vLLM's queue: the pool gets that queue back."""
        if name.startswith("_"):
            raise AttributeError(name)
        self._surrender(f"a part of vLLM reads {name} of the queue of free blocks")
        return getattr(self._pool.free_block_queue, name)

    # -- what vLLM calls

    def popleft(self) -> Block:
        """The block that goes first."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        """The `n` blocks that go first. Raises `ValueError` if there are fewer."""
        if n > self.num_free_blocks:
            raise ValueError(f"no {n} free blocks, only {self.num_free_blocks}")
        try:
            taken = self._take(n)
        except Exception as error:
            logger.debug("sageLLM: no choice of blocks", exc_info=True)
            self._surrender(f"{type(error).__name__}: {error}")
            return list(self._pool.free_block_queue.popleft_n(n))
        self.num_free_blocks -= n
        return taken

    def _take(self, n: int) -> list[Block]:
        taken = [self._uncached.popleft() for _ in range(min(n, len(self._uncached)))]
        while len(taken) < n and self._spare:
            taken.append(self._spare.pop(next(iter(self._spare))))
        while len(taken) < n and self.index.num_evictable:
            taken += self._evict(min(n - len(taken), self.index.num_evictable))
        while len(taken) < n and self._last:
            taken.append(self._last.popleft())
        if len(taken) < n:
            taken += self._restart(n - len(taken), taken)
        return taken

    def _evict(self, num_blocks: int) -> list[Block]:
        """Evict from the index; returns those that nothing refers to."""
        blocks = [self._blocks[block_id] for block_id in self.index.evict(num_blocks) or ()]
        for block in blocks:
            self._indexed[block.block_id] = False
        return [block for block in blocks if not block.ref_cnt]

    def _restart(self, num_blocks: int, taken: list[Block]) -> list[Block]:
        """The index held free blocks back: forget all paths, begin with what is free."""
        self.num_restarts += 1
        gone = {block.block_id for block in taken}
        self._start(
            block
            for block in self._blocks
            if not block.ref_cnt and not block.is_null and block.block_id not in gone
        )
        self.num_free_blocks += len(gone)
        if self.num_restarts == 1:
            logger.warning(
                "sageLLM: free blocks were still pinned by requests that are gone; the order of eviction"
                " begins anew"
            )
        rest = [self._uncached.popleft() for _ in range(min(num_blocks, len(self._uncached)))]
        while len(rest) < num_blocks:
            rest.append(self._spare.pop(next(iter(self._spare))))
        return rest

    def remove(self, block: Block) -> None:
        """A request uses a free block again."""
        if not self._indexed[block.block_id] and self._spare.pop(block.block_id, None) is None:
            place = self._last if block in self._last else self._uncached
            place.remove(block)
        self.num_free_blocks -= 1

    def append(self, block: Block) -> None:
        """One block is free, and goes late."""
        self.append_n([block])

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Blocks are free; cached ones, or ones that are still read."""
        for block in blocks:
            if self._indexed[block.block_id]:
                continue
            if block.block_hash is None:
                self._last.append(block)
            else:
                self._spare[block.block_id] = block
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Blocks are free, and go first."""
        self._uncached.extendleft(block for block in reversed(blocks) if not self._indexed[block.block_id])
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[Block]:
        """All free blocks. Cached ones are in no particular order."""
        resident = [self._blocks[block_id] for block_id in self.index.all_block_ids()]
        cached = [block for block in resident if not block.ref_cnt]
        return [*self._uncached, *self._spare.values(), *cached, *self._last]

    # -- what requests do

    def touched(self, blocks: Sequence[Block]) -> None:
        """A request found these blocks; pin them if they are a prompt's first ones."""
        path = self._path(blocks)
        if path is None:
            return
        if self._touched is not None:
            self._keep_unclaimed(self._touched)
        block_ids = array("i", [block.block_id for block in blocks])
        hit = self.index.pin(self.index.lookup(path))
        known = self.index.block_ids(hit)
        if known != block_ids[: hit.num_blocks]:
            self._exchange(hit, known, block_ids)
        if hit.num_blocks < len(blocks):
            longer = self._insert(path, block_ids)
            self.index.unpin(hit)
            hit = longer
        self._touched = hit

    def claimed(self, blocks: Sequence[Block]) -> None:
        """New blocks; the first one after `touched` stands for the request that found those."""
        if self._touched is not None and blocks:
            self._pins[blocks[0].block_id], self._touched = self._touched, None

    def finished(self, block_ids: Sequence[int], finish: RequestEnd) -> None:
        """A request is about to free these blocks."""
        if block_ids:
            self._finishing[block_ids[-1]] = finish

    def released(self, blocks: Sequence[Block]) -> None:
        """A request lets go of its blocks, the last one first."""
        if not blocks:
            return
        finish = self._finishing.pop(blocks[0].block_id, UNKNOWN)
        cached = [block for block in reversed(blocks) if block.block_hash is not None]
        path = self._path(cached)
        if path is not None:  # else nothing is cached, or another connector lets go of single blocks
            self._unpin(blocks, self._insert(path, array("i", [b.block_id for b in cached])), finish.use)
        if finish.said is not NO_HINTS:
            self._hinted.ended(finish.said, Tokens() if path is None else path, finish.namespace)

    def _unpin(self, blocks: Sequence[Block], hit: PrefixHit, use: Use) -> None:
        """Unpin the path of a request, and the prefix that it found."""
        pin = self._pin_of(blocks)
        if pin is not None:
            self.index.unpin(pin)
            use = use if use is NO_USE else use._replace(num_reused_blocks=pin.num_blocks)
        self.index.unpin(hit, use)

    def cleared(self) -> None:
        """The pool has emptied its cache."""
        self._start(block for block in self._blocks if not block.ref_cnt and not block.is_null)

    def in_order(self) -> list[Block]:
        """Take out all free blocks, in the order in which they would go."""
        free = self.num_free_blocks
        cached = self._evict(self.index.num_evictable)
        found = [*self._uncached, *self._spare.values(), *cached, *self._last]
        if len(found) != free:
            raise BookkeepingError(f"{len(found)} of {free} free blocks are there")
        return found

    # -- inside

    def _path(self, blocks: Sequence[Block]) -> Tokens | None:
        """The path of a prompt's first blocks; None for blocks of its middle."""
        size = self._block_tokens
        if not blocks or blocks[0].is_null or blocks[0].block_hash_num_tokens != size:
            return None
        if any(block.block_hash is None for block in blocks):
            return None
        if blocks[-1].block_hash_num_tokens != size * len(blocks):
            return None
        return path_of([block.block_hash for block in blocks])

    def _insert(self, path: Tokens, block_ids: BlockIds) -> PrefixHit:
        """Pin a path. Where it was not in the index, it is in these blocks."""
        result = self.index.insert(path, block_ids, pin=True)
        for block_id in block_ids[result.num_existing :]:
            self._indexed[block_id] = True
            self._spare.pop(block_id, None)
        return result.hit

    def _exchange(self, hit: PrefixHit, known: BlockIds, block_ids: BlockIds) -> None:
        """A request found other blocks than the index has; they replace free ones."""
        kept = array("i", known)
        for position, (old, new) in enumerate(zip(known, block_ids, strict=False)):
            if old != new and not self._blocks[old].ref_cnt and not self._indexed[new]:
                kept[position] = new
                self._indexed[old], self._indexed[new] = False, True
                self._spare[old] = self._blocks[old]
        self.index.replace_blocks(hit, kept)

    def _keep_unclaimed(self, hit: PrefixHit) -> None:
        last = self.index.block_ids(hit)[-1]
        former = self._unclaimed.pop(last, None)
        if former is not None:
            self.index.unpin(former)
        self._unclaimed[last] = hit

    def _pin_of(self, blocks: Sequence[Block]) -> PrefixHit | None:
        """The pin of the request that lets go of these blocks.

        A request's own first block lies behind those that it found, so the deepest one that stands for a
        request stands for this one.
        """
        for block in blocks:
            if block.block_id in self._pins:
                return self._pins.pop(block.block_id)
        return self._unclaimed.pop(blocks[0].block_id, None)

    def check(self) -> None:
        """Raise `BookkeepingError` where the books and vLLM's blocks disagree."""
        self.index.check()
        free = [block for block in self._blocks if not block.ref_cnt and not block.is_null]
        listed = self.get_all_free_blocks()
        if len(free) != self.num_free_blocks or {block.block_id for block in listed} != {
            block.block_id for block in free
        }:
            raise BookkeepingError(
                f"{len(free)} blocks are free, {len(listed)} are listed, {self.num_free_blocks} counted"
            )
        if sorted(self.index.all_block_ids()) != [i for i, there in enumerate(self._indexed) if there]:
            raise BookkeepingError("the blocks of the index are noted wrong")


class GuidedPool:
    """A `BlockPool` of vLLM in which a policy orders the free blocks, until `give_back`.

    Raises `AttributeError` naming what this version of vLLM lacks, before anything is changed.
    """

    def __init__(
        self, pool: Pool, policy_factory: PolicyFactory, clock: Clock, hint_kinds: Collection[str] = ()
    ) -> None:
        _require(pool, POOL_NAMES)
        _require(pool.free_block_queue, QUEUE_NAMES)
        _require(pool.blocks[0], BLOCK_NAMES)
        self.pool = pool
        self._stock_queue = type(pool.free_block_queue)
        self.queue = GuidedQueue(pool, policy_factory, clock, self.give_back, hint_kinds)
        self.is_guided = True
        pool.free_block_queue = self.queue
        self._wrap()

    def _wrap(self) -> None:
        pool, queue = self.pool, self.queue
        touch, get_new_blocks, free_blocks = pool.touch, pool.get_new_blocks, pool.free_blocks
        reset_prefix_cache = pool.reset_prefix_cache

        def touch_and_pin(blocks: Sequence[Block]) -> None:
            touch(blocks)
            self._told(queue.touched, blocks)

        def get_and_claim(num_blocks: int) -> list[Block]:
            blocks: list[Block] = get_new_blocks(num_blocks)
            queue.claimed(blocks)
            return blocks

        def release_and_free(ordered_blocks: Iterable[Block]) -> None:
            blocks = list(ordered_blocks)
            self._told(
                queue.released, [block for block in blocks if block.pool is None or block.pool is pool]
            )
            free_blocks(blocks)

        def reset_and_clear() -> bool:
            done: bool = reset_prefix_cache()
            if done:
                self._told(queue.cleared)
            return done

        pool.touch, pool.get_new_blocks = touch_and_pin, get_and_claim
        pool.free_blocks, pool.reset_prefix_cache = release_and_free, reset_and_clear

    def _told(self, listener: Callable[..., None], *arguments: Any) -> None:
        """Tell the queue while it guides; an error gives vLLM's own back."""
        if not self.is_guided:
            return
        try:
            listener(*arguments)
        except Exception as error:
            logger.debug("sageLLM: %s failed", listener.__name__, exc_info=True)
            self.give_back(f"{type(error).__name__}: {error}")

    def finished(self, block_ids: Sequence[int], finish: RequestEnd) -> None:
        """A request is about to free these blocks."""
        self._told(self.queue.finished, block_ids, finish)

    def give_back(self, reason: str) -> None:
        """VLLM's own order from now on. Cached blocks stay; they go in the order that they have now."""
        if not self.is_guided:
            return
        self.is_guided = False
        pool = self.pool
        for name in ("touch", "get_new_blocks", "free_blocks", "reset_prefix_cache"):
            del pool.__dict__[name]
        free = [block for block in pool.blocks if not block.ref_cnt and not block.is_null]
        try:
            ordered = self.queue.in_order()
        except Exception:  # noqa: BLE001 - a policy may fail in any way; the pool must work on
            ordered = sorted(free, key=lambda block: block.block_hash is not None)
        for block in free:
            block.prev_free_block = block.next_free_block = None
        pool.free_block_queue = self._stock_queue(ordered)
        logger.warning("sageLLM: vLLM evicts in its own order from now on: %s", reason)


def _require(found: Any, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise AttributeError(f"{type(found).__name__} of this vLLM has no {', '.join(missing)}")
