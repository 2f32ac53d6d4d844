"""`MissAttribution`: why blocks of a prompt had to be computed. The same in a live engine and in replay.

It reads the index's eviction events, which carry the chained hash of each block. So it is exact for any
index. Where it is on, every evicted block is hashed, and every prompt that misses a block; where it is off,
it costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby

from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError
from sagellm.core.events import BlocksRemoved, EventBus, IndexCleared
from sagellm.core.protocols.prefix_cache import Evictor, MissCounts, PrefixReuseIndex, PromptSpan, SpanState
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens
from sagellm.kvmgr.prefix_cache._extents import Ghost, Ghosts
from sagellm.kvmgr.prefix_cache.fingerprint import chain

NOTHING = MissCounts()
FEW_BLOCKS = 16


def _hashes_behind(data: bytes, block_bytes: int, namespace: Namespace, first: int) -> Iterator[bytes]:
    """The hashes of the blocks from `first` on, made as they are asked for.

    Of a prompt that is new, one is asked for.
    """
    start, num_blocks = first * block_bytes, FEW_BLOCKS
    parent = chain(data[:start], block_bytes, namespace)[-1] if first else None
    while piece := chain(data[start : start + num_blocks * block_bytes], block_bytes, namespace, parent):
        yield from piece
        parent, start, num_blocks = piece[-1], start + len(piece) * block_bytes, 2 * num_blocks


class MissAttribution:
    """Implements `MissObserver` for the one index that emits on `events`; `clock` is that index's.

    An eviction is premature if the block is asked for within `premature_s`. The last `max_ghosts` evicted
    blocks are remembered (about 200 bytes each), all with None; a forgotten block counts as cold.
    `across_namespaces`: equal tokens of two namespaces mean the same text; False for traces whose block ids
    have a local scope.
    """

    def __init__(
        self,
        events: EventBus,
        clock: Clock,
        *,
        premature_s: float = 60.0,
        max_ghosts: int | None = 65_536,
        across_namespaces: bool = True,
    ) -> None:
        if not premature_s >= 0 or (max_ghosts is not None and max_ghosts < 1):
            raise ConfigError(
                f"premature_s must not be negative, and max_ghosts at least 1: {premature_s}, {max_ghosts}"
            )
        self._clock = clock
        self._premature_s = premature_s
        self._max_ghosts = max_ghosts
        self._across_namespaces = across_namespaces
        self._ghosts: Ghosts[bytes] = Ghosts(max_ghosts)
        self._sums = NOTHING
        self._num_evicted = 0
        self._evictor: Callable[[], Evictor] = Evictor
        events.subscribe(BlocksRemoved, self._on_removed)
        events.subscribe(IndexCleared, self._on_cleared)

    def observe(
        self,
        index: PrefixReuseIndex,
        tokens: Tokens,
        namespace: Namespace,
        num_hit_blocks: int,
        *,
        preempted: bool = False,
    ) -> MissCounts:
        total = len(tokens) // index.block_size
        if num_hit_blocks >= total:
            return NOTHING
        first = max(num_hit_blocks, index.lookup(tokens, namespace).num_blocks)
        causes: Counter[str] = Counter()
        for digest in _hashes_behind(tokens.tobytes(), index.block_size * TOKEN_BYTES, namespace, first):
            ghost = self._ghosts.get(digest)
            if ghost is None:
                break
            causes[self._cause(ghost, preempted=preempted)] += 1
        reached = first + causes.total()
        elsewhere = 0
        if self._across_namespaces and reached < total:
            elsewhere = max(0, index.explain(tokens, namespace).num_elsewhere - reached)
        found = MissCounts(cold=total - reached - elsewhere, namespace=elsewhere, **causes)
        self._sums = self._sums.plus(found)
        return found

    def snapshot(self) -> MissCounts:
        return self._sums

    def evictions_are_for(self, evictor: Callable[[], Evictor]) -> None:
        self._evictor = evictor

    def explain(self, index: PrefixReuseIndex, tokens: Tokens, namespace: Namespace) -> list[PromptSpan]:
        size, now_s = index.block_size, self._clock.now()
        num_hit = index.lookup(tokens, namespace).num_blocks
        spans = [PromptSpan(0, num_hit * size, SpanState.HIT)] if num_hit else []
        whole = len(tokens) // size
        digests = chain(tokens.tobytes(), size * TOKEN_BYTES, namespace)[num_hit:]
        ghosts = [self._ghosts.get(digest) for digest in digests]
        position = num_hit
        for ghost, group in groupby(ghosts, key=lambda ghost: ghost and (ghost.cause, ghost.evictor)):
            evicted = [each for each in group if each is not None]
            if ghost is None:  # what is behind it was never seen either, or its eviction is forgotten
                break
            oldest = min(evicted, key=lambda ghost: ghost.num_before)
            spans.append(
                PromptSpan(
                    position * size,
                    (position + len(evicted)) * size,
                    SpanState.EVICTED,
                    now_s - oldest.at_s,
                    oldest.cause,
                    oldest.evictor,
                    self._num_evicted - oldest.num_before,
                )
            )
            position += len(evicted)
        if position < whole:
            state = SpanState.UNKNOWN if self._ghosts.has_forgotten else SpanState.NEVER_SEEN
            spans.append(PromptSpan(position * size, whole * size, state))
        if whole * size < len(tokens):
            spans.append(PromptSpan(whole * size, len(tokens), SpanState.PARTIAL_BLOCK))
        return spans

    def _cause(self, ghost: Ghost, *, preempted: bool) -> str:
        """The field of `MissCounts` for a block that was evicted."""
        if preempted:
            return "preemption"
        if ghost.cause == "quota":
            return "quota"
        return "premature" if self._clock.now() - ghost.at_s < self._premature_s else "capacity"

    def _on_removed(self, event: BlocksRemoved) -> None:
        if event.cause == "retracted":  # never computed: an earlier eviction is still the last one
            return
        is_remembered = event.cause != "cleared"
        self._ghosts.has_forgotten |= not is_remembered
        ghost = Ghost(self._clock.now(), event.cause, self._evictor(), self._num_evicted)
        self._num_evicted += len(event.hashes)
        for digest in event.hashes:
            self._ghosts.discard(digest)  # so that its new ghost is the youngest
            if is_remembered:
                self._ghosts.add(digest, ghost)

    def _on_cleared(self, event: IndexCleared) -> None:
        self._ghosts = Ghosts(self._max_ghosts)
        self._ghosts.has_forgotten = True
