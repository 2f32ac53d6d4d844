"""`CPUCache`: blocks that leave LMDeploy's GPU cache stay cached on the CPU.

LMDeploy's `BlockTrie` and its sequences refer to GPU blocks only, at all times. What the policy evicts from
the trie, and what a preempted sequence had computed beyond the trie, moves to the CPU under a digest of the
tokens that lead to it. When a sequence is admitted whose next tokens are there, the blocks move back and
become its own, and it computes the rest. Whatever finds no room is dropped and computed again, as without us.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import BookkeepingError, CapacityError, PlanError
from sagellm.engines.lmdeploy.block_moves import BlockMoves, DeviceMove
from sagellm.engines.lmdeploy.block_trie import GuidedTrie, Node, cached_blocks

Digest = bytes
DIGEST_BYTES = 16
LMSequence = Any
"""LMDeploy's `SchedulerSequence`."""


class CPUBlock(NamedTuple):
    """A logical block on the CPU, its tokens, and the digest before it."""

    block_id: int
    tokens: npt.NDArray[np.int64]
    parent: Digest


class CPUCache:
    """Cached blocks on the CPU, the least recently used first. It has one reference to each.

    Raises `ValueError` where swapping would not be sound in this LMDeploy, and says what would.
    """

    def __init__(self, scheduler: Any, guided: GuidedTrie) -> None:
        _require_soundness(scheduler)
        self._manager, self._trie, self._guided = scheduler.block_manager, scheduler.block_trie, guided
        self._size = int(self._trie.block_size)
        self.moves = scheduler.swaps = BlockMoves(scheduler)
        self._blocks: OrderedDict[Digest, CPUBlock] = OrderedDict()
        self._digests: WeakKeyDictionary[Node, Digest] = WeakKeyDictionary()
        self.num_reused = self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._blocks)

    # -- what happens in LMDeploy

    def evicted(self, nodes: Sequence[Node]) -> None:
        """Before nodes leave the trie: keep their blocks, the deepest first."""
        nodes = sorted(nodes, key=lambda node: -int(node.num_matched))
        found = [(self._digest(node), self._digest(node.parent)) for node in nodes]
        for node, (digest, parent) in zip(nodes, found, strict=True):
            self._keep(digest, CPUBlock(int(node.block), np.asarray(node.tokens, np.int64), parent))

    def preempted(self, sequence: LMSequence) -> None:
        """Before a preempted sequence frees its blocks: keep the full unshared ones."""
        if sequence.status.name != "WAITING" or not _has_tokens_only(sequence):
            return
        node = _shared_node(self._trie, sequence)
        first, last = node.num_matched // self._size, int(sequence.num_history_ids) // self._size
        block_ids = sequence.logical_blocks[first:last]
        is_shared = self._manager.allocator.get_ref_count(block_ids) != 1
        if is_shared.any():
            block_ids = block_ids[: int(is_shared.argmax())]
        kept, digest = [], self._digest(node)
        for index, block_id in enumerate(block_ids.tolist(), start=first):
            tokens, parent = self._tokens(sequence, index), digest
            digest = _digest_of(parent, tokens)
            kept.append((digest, CPUBlock(block_id, tokens, parent)))
        for digest, block in reversed(kept):
            self._keep(digest, block)

    def admitting(self, sequence: LMSequence) -> None:
        """After `match`: move the blocks that continue it to the GPU.

        Nothing moves for a sequence that cannot be admitted without the blocks of others.
        """
        blocks = sequence.logical_blocks
        num_tokens = len(blocks) * self._size
        if not self._blocks or not _has_tokens_only(sequence) or num_tokens != sequence.num_history_ids:
            return
        found = self._found(sequence, len(blocks))
        if not found or not self._is_room(sequence):
            return
        taken = [self._blocks.pop(digest) for digest in found]
        num_missing = int(self._manager.num_required_blocks(sequence)) - self.moves.num_free_gpu
        if num_missing > 0:
            self._trie.evict(num_missing)
        taken, left = taken[: self.moves.num_free_gpu], taken[self.moves.num_free_gpu :]
        for block in left:
            self._drop(block)
        for block in taken:
            self.moves.to_gpu(block.block_id)
        if taken:
            blocks.append(np.array([block.block_id for block in taken]))
            sequence.set_step(num_tokens + len(taken) * self._size)
        self.num_reused += len(taken)

    def _found(self, sequence: LMSequence, first: int) -> list[Digest]:
        """The digests of cached blocks from block `first` on. At least one token is left to compute."""
        found, digest = [], self._digest(_shared_node(self._trie, sequence))
        for index in range(first, (int(sequence.num_valid_ids) - 1) // self._size):
            digest = _digest_of(digest, self._tokens(sequence, index))
            if digest not in self._blocks:
                break
            found.append(digest)
        return found

    def _is_room(self, sequence: LMSequence) -> bool:
        """Whether all blocks of a sequence fit without taking those of other sequences."""
        num_missing = int(self._manager.num_required_blocks(sequence)) - self.moves.num_free_gpu
        return num_missing <= 0 or num_missing <= self._num_evictable()

    def _num_evictable(self) -> int:
        if self._guided.is_guided:
            return int(self._guided.paths.index.num_evictable)
        block_ids = np.array(list(cached_blocks(self._trie)), dtype=np.int64)
        return int((self._manager.allocator.get_ref_count(block_ids) == 1).sum())

    def _keep(self, digest: Digest, block: CPUBlock) -> None:
        """Refer to a block and move it.

        Not where the same tokens are here already, or no room can be made.
        """
        if digest in self._blocks:
            self._blocks.move_to_end(digest)
            return
        while not self.moves.num_free_cpu and self._blocks:
            self._drop(self._blocks.popitem(last=False)[1])
        if not self.moves.num_free_cpu and self.moves.device(block.block_id) == "gpu":
            return
        self._manager.allocator.add_ref_count(np.array([block.block_id]), 1)
        self.moves.to_cpu(block.block_id)
        self._blocks[digest] = block

    def _drop(self, block: CPUBlock) -> None:
        self.moves.drop(block.block_id)
        self.num_dropped += 1

    def close(self) -> None:
        """Free all blocks. Moves that were promised are still carried out."""
        while self._blocks:
            self._drop(self._blocks.popitem()[1])

    # -- moves by plan

    def migrate(self, plan: Sequence[DeviceMove]) -> None:
        """Carry out a plan or nothing of it; see `LMDeployEngine.migrate_blocks`."""
        nodes, entering = _Check(self, plan).moves()
        for node in nodes:
            digest = self._digest(node)
            block = CPUBlock(int(node.block), np.asarray(node.tokens, np.int64), self._digest(node.parent))
            if former := self._blocks.pop(digest, None):
                self._drop(former)
            moved = set(entering)
            while not self.moves.num_free_cpu:
                oldest = next(each for each in self._blocks if each not in moved)
                self._drop(self._blocks.pop(oldest))
            self._guided.take_out(node)
            self.moves.to_cpu(block.block_id)  # the trie's reference is ours now
            self._blocks[digest] = block
        for digest in entering:
            block = self._blocks.pop(digest)
            self.moves.to_gpu(block.block_id)
            parent = self.nodes()[block.parent]
            made = type(parent)(
                hash_key=hash(("random", tuple(block.tokens))), block=block.block_id, tokens=block.tokens,
                num_matched=parent.num_matched + self._size,
            )  # fmt: skip
            self._guided.put_in(made, parent)

    def nodes(self) -> dict[Digest, Node]:
        """All nodes of the trie by their digests, roots too. Not for hot paths."""
        nodes = [*self._trie._roots.values(), *cached_blocks(self._trie).values()]
        return {self._digest(node): node for node in nodes}

    def blocks(self) -> dict[int, Digest]:
        """The digests of the logical blocks on the CPU."""
        return {block.block_id: digest for digest, block in self._blocks.items()}

    def parent_of(self, digest: Digest) -> Digest:
        """The digest of the path before a cached block."""
        return self._blocks[digest].parent

    # -- digests

    def _digest(self, node: Node) -> Digest:
        """The digest of the adapter and of the tokens up to a node's end."""
        path = []
        while node not in self._digests and node.parent is not None:
            path.append(node)
            node = node.parent
        if node not in self._digests:
            name = next(name for name, root in self._trie._roots.items() if root is node)
            self._digests[node] = blake2b(repr(name).encode(), digest_size=DIGEST_BYTES).digest()
        digest = self._digests[node]
        for node in reversed(path):
            digest = self._digests[node] = _digest_of(digest, node.tokens)
        return digest

    def _tokens(self, sequence: LMSequence, index: int) -> npt.NDArray[np.int64]:
        tokens = sequence.history_cache[index * self._size : (index + 1) * self._size]
        return np.array(tokens, dtype=np.int64)

    def check(self) -> None:
        """Raise `BookkeepingError` for a block on the wrong device or with another owner."""
        self.moves.check()
        allocator, block_ids = self._manager.allocator, [block.block_id for block in self._blocks.values()]
        if (allocator.get_ref_count(np.array(block_ids, dtype=np.int64)) != 1).any():
            raise BookkeepingError("something else refers to blocks that are cached on the CPU")
        cached = list(cached_blocks(self._trie))
        if set(cached) & set(block_ids):
            raise BookkeepingError("a block is cached on the GPU and on the CPU")
        if any(self.moves.device(block_id) != "cpu" for block_id in block_ids):
            raise BookkeepingError("a block of the CPU cache is on the GPU")
        if any(self.moves.device(block_id) != "gpu" for block_id in cached):
            raise BookkeepingError("LMDeploy's trie refers to a block on the CPU")
        for digest, block in self._blocks.items():
            if _digest_of(block.parent, block.tokens) != digest:
                raise BookkeepingError(f"block {block.block_id} has other tokens than its digest")


class _Check:
    """A plan against the state of a cache; nothing is changed."""

    def __init__(self, cache: CPUCache, plan: Sequence[DeviceMove]) -> None:
        self._cache, self._plan = cache, plan
        self._nodes = cache.nodes()
        self._digests = {
            int(node.block): digest for digest, node in self._nodes.items() if node.parent is not None
        }
        self._on_cpu = cache.blocks()

    def moves(self) -> tuple[list[Node], list[Digest]]:
        """Nodes that leave the GPU, the deepest first; digests that enter it, parents first.

        Raises `PlanError` or `CapacityError` for a plan that cannot be carried out whole.
        """
        block_ids = [move.block_id for move in self._plan]
        if twice := sorted({each for each in block_ids if block_ids.count(each) > 1}):
            raise PlanError(f"block {twice[0]} is in the plan twice: give each block one move")
        leaving = [self._leaving(move.block_id) for move in self._plan if move.source == "gpu"]
        entering = [self._entering(move.block_id) for move in self._plan if move.source == "cpu"]
        self._check_paths(leaving, entering)
        self._check_room(len(leaving), len(entering))
        leaving.sort(key=lambda node: -int(node.num_matched))
        return leaving, self._parents_first(entering)

    def _leaving(self, block_id: int) -> Node:
        digest = self._digests.get(block_id)
        if digest is None:
            where = "on the CPU already" if block_id in self._on_cpu else "not in LMDeploy's prefix cache"
            raise PlanError(
                f"block {block_id} is {where}: cached blocks that no sequence uses can move to the CPU"
            )
        num_references = int(self._cache._manager.allocator.get_ref_count(np.array([block_id]))[0])
        if num_references != 1:
            raise PlanError(
                f"{num_references - 1} sequences use block {block_id}: it can move when they have ended"
            )
        return self._nodes[digest]

    def _entering(self, block_id: int) -> Digest:
        digest = self._on_cpu.get(block_id)
        if digest is None:
            where = "on the GPU already" if block_id in self._digests else "not cached on the CPU"
            known = ", ".join(map(str, sorted(self._on_cpu)[:8])) or "none"
            raise PlanError(f"block {block_id} is {where}; cached on the CPU: {known}")
        if digest in self._nodes:
            raise PlanError(
                f"block {block_id} has the tokens of block {self._nodes[digest].block}, which is on the GPU: "
                "leave it out"
            )
        return digest

    def _check_paths(self, leaving: list[Node], entering: list[Digest]) -> None:
        """On the GPU a block needs all blocks before it."""
        gone = {node.block for node in leaving}
        for node in leaving:
            behind = sorted(int(child.block) for child in node.children.values() if child.block not in gone)
            if behind:
                raise PlanError(f"blocks {behind} continue block {int(node.block)}: add them to the plan")
        by_digest = {digest: block_id for block_id, digest in self._on_cpu.items()}
        for digest in entering:
            parent = self._cache.parent_of(digest)
            node = self._nodes.get(parent)
            if parent not in entering and (node is None or node.block in gone):
                missing = by_digest.get(parent)
                advice = "compute it again first" if missing is None else f"add block {missing} to the plan"
                raise PlanError(f"the block before block {by_digest[digest]} is not on the GPU: {advice}")

    def _check_room(self, num_leaving: int, num_entering: int) -> None:
        moves = self._cache.moves
        room = moves.num_free_cpu + len(self._on_cpu) - num_entering
        if num_leaving > room:
            raise CapacityError(
                f"{num_leaving} blocks are to move to the CPU, which has room for {room}: "
                "move fewer, or raise num_cpu_blocks of PytorchEngineConfig"
            )
        if num_entering > moves.num_free_gpu + num_leaving:
            raise CapacityError(
                f"{num_entering} blocks are to move to the GPU, where {moves.num_free_gpu} are free: "
                "move others to the CPU in the same plan"
            )

    def _parents_first(self, entering: list[Digest]) -> list[Digest]:
        left, ordered = set(entering), list[Digest]()
        while left:
            ready = {digest for digest in left if self._cache.parent_of(digest) not in left}
            ordered += sorted(ready)
            left -= ready
        return ordered


def _digest_of(parent: Digest, tokens: Iterable[int]) -> Digest:
    data = parent + np.asarray(tokens, dtype=np.int64).tobytes()
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _shared_node(trie: Any, sequence: LMSequence) -> Node:
    """The last node that a sequence refers to; a root if there is none."""
    node = sequence.logical_blocks.last_shared_node
    return trie.get_root(sequence.adapter_name) if node is None else node


def _has_tokens_only(sequence: LMSequence) -> bool:
    """Whether tokens alone determine the KV, and nothing is recorded beside them."""
    has_others = len(sequence.history_embeddings) or sequence.history_multimodals.multimodals
    return not (has_others or sequence.return_routed_experts)


def _require_soundness(scheduler: Any) -> None:
    """Raise `ValueError` for what cannot be swapped."""
    if not hasattr(scheduler, "swaps"):
        raise AttributeError("this LMDeploy has no patch 0003-scheduler-ir-integration with swap maps")
    config, strategy = scheduler.cache_config, type(scheduler.seq_manager.seq_meta.strategy).__name__
    if not config.num_cpu_blocks:
        raise ValueError("no CPU blocks: set num_cpu_blocks of PytorchEngineConfig, whose default is 0")
    if config.role.name != "Hybrid":
        raise ValueError(f"role {config.role.name}: another instance reads GPU blocks; use role Hybrid")
    if scheduler.is_ssm:
        raise ValueError("the model has recurrent state, which LMDeploy does not swap: leave swap out")
    if strategy != "ARSequenceStrategy":
        raise ValueError(f"{strategy}: swap needs plain decoding, without a draft model or diffusion")
