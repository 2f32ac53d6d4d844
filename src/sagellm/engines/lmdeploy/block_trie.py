"""Our eviction order in LMDeploy's prefix cache, and a repair of its LRU clock.

LMDeploy keeps cached blocks in a `BlockTrie`, which has a reference to each of them. It evicts leaves to
which nothing else refers, by their last use. `GuidedTrie` keeps the same paths in our prefix index beside
that trie; a policy of ours then chooses what `evict` removes. What is a hit, and which references there are,
stays LMDeploy's.

The index has to know what sequences do. An LMDeploy with our patches (third_party/lmdeploy) calls
`GuidedTrie`; without them it wraps four methods of the trie and its block manager:

    match     a sequence found a prefix: its path is held, so that it is not evicted
    allocate  blocks of a sequence entered the trie: they enter the index, and the sequence holds them
    free      the sequence lets go of its blocks; the policy learns how they were used
    evict     the index says which blocks go

If anything is not as expected, LMDeploy gets its own order back, once and for good, with one warning. Its
trie is complete at all times, so nothing is lost then.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.eviction import NO_USE, PolicyFactory, Use
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.prefix_cache.radix import RadixIndex

logger = logging.getLogger("lmdeploy.sagellm")  # below "lmdeploy": LMDeploy sets that logger up
Trie = Any
"""LMDeploy's `BlockTrie`."""
Node = Any
"""LMDeploy's `Node`: one block of the trie."""
Sequence = Any
"""LMDeploy's `SchedulerSequence`: one request, or one turn of a session."""
EvictionCallback = Callable[[list[int]], None]

TRIE_NAMES = (
    "allocator",
    "block_manager",
    "block_size",
    "enable",
    "leaves",
    "match",
    "allocate",
    "evict",
    "_roots",
)
ALLOCATOR_NAMES = ("get_ref_count", "free", "_log_mem")
UNFINISHED = frozenset({"WAITING", "WAITING_MIGRATION"})
"""A sequence that loses its blocks in one of these states was preempted, or cancelled before it ran again."""


class Hold(NamedTuple):
    """The path that a sequence holds, and how many of its blocks were reused."""

    hit: PrefixHit
    num_reused: int


class TrieIndex:
    """The paths of a `BlockTrie` in a prefix index, held as sequences hold them."""

    def __init__(self, trie: Trie, policy_factory: PolicyFactory, clock: Clock) -> None:
        self._trie, self._size = trie, int(trie.block_size)
        self.index = RadixIndex(self._size, clock=clock, policy_factory=policy_factory)
        self._nodes: dict[int, Node] = {}
        self._holds: dict[int, Hold] = {}
        self.on_evict: Callable[[list[Node]], None] | None = None
        """Called with nodes that leave the trie, children first, before anything is changed there."""

    def matched(self, sequence: Sequence) -> None:
        """A sequence found blocks and refers to them."""
        num_tokens = sequence.logical_blocks.last_shared_node.num_matched
        former = self._holds.get(sequence.seq_id)
        if num_tokens == (former.hit.num_tokens if former else 0):
            return
        hit = self.index.pin(self.index.lookup(*sequence_path(sequence, num_tokens)))
        if hit.num_tokens != num_tokens:
            raise BookkeepingError(f"LMDeploy found {num_tokens} tokens, the index {hit.num_tokens}")
        self._hold(sequence, Hold(hit, hit.num_blocks))

    def allocated(self, sequence: Sequence) -> None:
        """Blocks of a sequence are in the trie now, its own or equal ones."""
        blocks = sequence.logical_blocks
        node = getattr(blocks, "last_shared_node", None)
        former = self._holds.get(sequence.seq_id)
        if node is None or node.num_matched == (former.hit.num_tokens if former else 0):
            return
        tokens, namespace = sequence_path(sequence, node.num_matched)
        block_ids = array("i", blocks[: node.num_matched // self._size].tolist())
        result = self.index.insert(tokens, block_ids, namespace, pin=True)
        self._hold(sequence, Hold(result.hit, former.num_reused if former else 0))
        for block_id in reversed(block_ids[result.num_existing :]):
            if node.block != block_id:
                raise BookkeepingError(f"block {block_id} is {node.block} in LMDeploy's trie")
            self._nodes[block_id], node = node, node.parent

    def _hold(self, sequence: Sequence, hold: Hold) -> None:
        former = self._holds.get(sequence.seq_id)
        self._holds[sequence.seq_id] = hold
        if former is not None:
            self.index.unpin(former.hit)

    def released(self, sequence: Sequence) -> None:
        """A sequence no longer refers to any block: it has ended, or was preempted."""
        hold = self._holds.pop(sequence.seq_id, None)
        if hold is None:
            return
        use = NO_USE
        if sequence.status.name not in UNFINISHED:
            use = Use(sequence.num_new_tokens, hold.num_reused)
        self.index.unpin(hold.hit, use)

    def evict(self, num_blocks: int) -> list[int]:
        """Remove blocks from the trie and free them; returns them, at most `num_blocks`."""
        block_ids = self.index.evict(min(num_blocks, self.index.num_evictable))
        if not block_ids:
            return []
        blocks = np.array(block_ids)
        if (self._trie.allocator.get_ref_count(blocks) != 1).any():
            raise BookkeepingError("something refers to blocks that no sequence holds")
        nodes = [self._nodes[block_id] for block_id in block_ids]
        if self.on_evict is not None:
            self.on_evict(nodes)
        for block_id in block_ids:
            del self._nodes[block_id]
        parents = {node.parent for node in nodes} - set(nodes)
        for node in nodes:
            node.parent = None
            self._trie.leaves.discard(node)
        self._trie.leaves |= {node for node in parents if node.parent is not None and not node.children}
        self._trie.allocator.free(blocks)
        return list(block_ids)

    def take_out(self, node: Node) -> None:
        """A leaf that no sequence holds leaves the index. Raises `BookkeepingError` for another node."""
        hit = self.index.lookup(*node_path(self._trie, node))
        if list(self.index.evict_tail(hit, 1)) != [node.block]:
            raise BookkeepingError(f"block {node.block} is held, or others continue it")
        del self._nodes[node.block]

    def put_in(self, node: Node) -> None:
        """A node that has just been added to the trie enters the index."""
        block_ids, last = array("i"), node
        while last.parent is not None:
            block_ids.append(last.block)
            last = last.parent
        tokens, namespace = node_path(self._trie, node)
        self.index.insert(tokens, block_ids[::-1], namespace)
        self._nodes[node.block] = node

    def num_cached(self, sequence: Sequence) -> int:
        """Leading tokens of a sequence that are cached; at least one token is not."""
        num_tokens = (sequence.num_all_ids - 1) // self._size * self._size
        return self.index.lookup(*sequence_path(sequence, num_tokens)).num_tokens

    def check(self) -> None:
        """Raise `BookkeepingError` where the index and LMDeploy's trie disagree."""
        self.index.check()
        nodes = cached_blocks(self._trie)
        if nodes != self._nodes or sorted(nodes) != sorted(self.index.all_block_ids()):
            raise BookkeepingError(
                f"LMDeploy's trie has {len(nodes)} blocks, the index {self.index.num_cached}"
            )
        leaves = {node for node in nodes.values() if not node.children}
        if leaves != self._trie.leaves:
            raise BookkeepingError("the trie's leaves are noted wrong")
        held = np.zeros(1 + max(nodes, default=0), dtype=np.int64)
        for hold in self._holds.values():
            np.add.at(held, np.array(self.index.block_ids(hold.hit), dtype=np.int64), 1)
        counts = self._trie.allocator.get_ref_count(np.array(sorted(nodes), dtype=np.int64))
        if (counts != held[sorted(nodes)] + 1).any():
            raise BookkeepingError("what sequences hold is not what refers to the blocks")


class GuidedTrie:
    """A `BlockTrie` in which a policy chooses what is evicted, until `give_back`.

    Raises `AttributeError` naming what this version of LMDeploy lacks, and `ValueError` if the trie is not
    empty or switched off, before anything is changed. Not `decides`: it only passes evictions on.
    """

    def __init__(
        self, trie: Trie, policy_factory: PolicyFactory, clock: Clock, *, decides: bool = True
    ) -> None:
        _require(trie, TRIE_NAMES)
        _require(trie.allocator, ALLOCATOR_NAMES)
        _require(trie.block_manager, ("free",))
        if not trie.enable:
            raise ValueError("prefix caching is switched off: start LMDeploy with enable_prefix_caching")
        if trie.leaves:
            raise ValueError("blocks are cached already: take the order over before the first request")
        self.trie, self.is_guided = trie, decides
        self.paths = TrieIndex(trie, policy_factory, clock)
        self._callbacks: list[EvictionCallback] = []
        self.is_patched = hasattr(trie, "hooks") and hasattr(trie.block_manager, "hooks")
        if self.is_patched:
            trie.hooks = trie.block_manager.hooks = self
        else:
            self._wrap()

    def register_eviction_callback(self, callback: EvictionCallback) -> None:
        """Call it after each eviction, with the blocks that are free now.

        After `give_back` it is called with our patches only: without them LMDeploy says how many, not which.
        """
        self._callbacks.append(callback)

    # -- what LMDeploy calls: by our patches, or by the methods that `_wrap` sets

    def matching(self, sequence: Sequence) -> bool:
        """Whether to look a sequence up.

        `_schedule_migration` of 0.11.0 passes a list of other sequences here; nothing is found then. A
        preempted sequence that still has blocks behind its last cached one is not looked up either: 0.11.0
        would append what it finds behind them, where other tokens belong.
        """
        return not isinstance(sequence, list) and not has_own_blocks(sequence, int(self.trie.block_size))

    def matched(self, sequence: Sequence) -> None:
        """After `match`."""
        self._told(self.paths.matched, sequence)

    def allocated(self, sequence: Sequence) -> None:
        """After `allocate`."""
        self._told(self.paths.allocated, sequence)

    def releasing(self, sequence: Sequence) -> None:
        """Before the block manager's `free`; nothing to do."""

    def released(self, sequence: Sequence) -> None:
        """After the block manager's `free`."""
        self._told(self.paths.released, sequence)

    def evict(self, num_blocks: int) -> int | None:
        """In place of `evict`; returns None where LMDeploy has to do it."""
        if not self.is_guided:
            return None
        try:
            blocks = self.paths.evict(num_blocks)
        except Exception as error:
            logger.debug("sageLLM: no choice of blocks", exc_info=True)
            self.give_back(f"{type(error).__name__}: {error}")
            return None
        self.evicted(blocks)
        return len(blocks)

    def evicted(self, blocks: list[int]) -> None:
        """After an eviction."""
        for callback in list(self._callbacks) if blocks else ():
            try:
                callback(blocks)
            except Exception as error:  # noqa: BLE001 - a listener may fail in any way; the server goes on
                self._callbacks.remove(callback)
                logger.warning("sageLLM: a callback of evictions is left out from now on: %r", error)

    def take_out(self, node: Node) -> None:
        """Remove a leaf from the trie. The trie's reference to its block belongs to the caller then."""
        if self.is_guided:
            self.paths.take_out(node)
        parent, node.parent = node.parent, None
        self.trie.leaves.discard(node)
        if parent.parent is not None and not parent.children:
            self.trie.leaves.add(parent)

    def put_in(self, node: Node, parent: Node) -> None:
        """Add a node to the trie. The caller's reference to its block belongs to the trie then."""
        node.parent = parent
        self.trie.leaves.discard(parent)
        self.trie.leaves.add(node)
        if self.is_guided:
            self.paths.put_in(node)

    def _wrap(self) -> None:
        trie, manager = self.trie, self.trie.block_manager
        match, allocate, evict, free = trie.match, trie.allocate, trie.evict, manager.free

        def match_and_hold(seq: Sequence) -> None:
            if self.matching(seq):
                match(seq)
                self.matched(seq)

        def allocate_and_hold(seq: Sequence) -> None:
            allocate(seq)
            self.allocated(seq)

        def free_and_release(msg: Sequence) -> None:
            free(msg)
            self.released(msg)

        def evict_by_policy(max_num_blocks: int) -> int:
            num_evicted = self.evict(max_num_blocks)
            return int(evict(max_num_blocks)) if num_evicted is None else num_evicted

        trie.match, trie.allocate, trie.evict = match_and_hold, allocate_and_hold, evict_by_policy
        manager.free = free_and_release

    def _told(self, listener: Callable[[Sequence], None], sequence: Sequence) -> None:
        """Tell the index while it guides; an error gives LMDeploy's own order back."""
        if not self.is_guided:
            return
        try:
            listener(sequence)
        except Exception as error:
            logger.debug("sageLLM: %s failed", listener.__name__, exc_info=True)
            self.give_back(f"{type(error).__name__}: {error}")

    def give_back(self, reason: str) -> None:
        """LMDeploy's own order from now on. What is cached stays cached."""
        if not self.is_guided:
            return
        self.is_guided = False
        if not self.is_patched:
            for name in ("match", "allocate", "evict"):
                del self.trie.__dict__[name]
            del self.trie.block_manager.__dict__["free"]
        logger.warning("sageLLM: LMDeploy evicts in its own order from now on: %s", reason)


def repair_clock(trie: Trie) -> None:
    """Let LMDeploy's LRU tell uses in the same second apart.

    Its clock is `perf_counter`, in fractions of a second; 0.11.0 stores it in an array of integers.
    """
    memory = trie.allocator._log_mem
    memory.access_time = memory.access_time.astype(np.float64)


def sequence_path(sequence: Sequence, num_tokens: int) -> tuple[Tokens, Namespace]:
    """The first tokens of a sequence; sequences of different adapters share nothing."""
    data = sequence.history_cache[:num_tokens].astype(np.int32).tobytes()
    return Tokens.frombytes(data), Namespace(adapter=sequence.adapter_name or "")


def has_own_blocks(sequence: Sequence, block_size: int) -> bool:
    """Whether a sequence has blocks behind the last that the trie has too."""
    blocks = sequence.logical_blocks
    node = blocks.last_shared_node
    return len(blocks) * block_size > (0 if node is None else node.num_matched)


def node_path(trie: Trie, node: Node) -> tuple[Tokens, Namespace]:
    """The tokens up to a node's end, and the namespace of its adapter."""
    parts: list[bytes] = []
    while node.parent is not None:
        parts.append(np.asarray(node.tokens).astype(np.int32).tobytes())
        node = node.parent
    adapter = next(name for name, root in trie._roots.items() if root is node)
    return Tokens.frombytes(b"".join(reversed(parts))), Namespace(adapter=adapter or "")


def cached_blocks(trie: Trie) -> dict[int, Node]:
    """The blocks of a trie, by their logical ids."""
    return {node.block: node for root in trie._roots.values() for node in _below(root)}


def _below(root: Node) -> Iterable[Node]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _require(found: Any, names: Iterable[str]) -> None:
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise AttributeError(f"{type(found).__name__} of this LMDeploy has no {', '.join(missing)}")
