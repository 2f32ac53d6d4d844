"""`Checkpoints`: copies of recurrent states, in blocks of the pool.

A model with recurrent layers can go on from a cached prefix only where the state behind it was kept. Such a
checkpoint takes `state_pages` blocks of the pool, wherever they lie: it is written once, and copied into a
row's working state when a request begins with it. It belongs, in this order, to

    a running request    from the bind of the step that keeps it until its prefix enters the index
    the index            attached to the leading block with which its prefix ends

A prefix enters the index up to its last checkpoint only, since what is behind it could serve no request. A
`CheckpointPolicy` decides which checkpoints are made, and which goes first; with a checkpoint go the blocks
that only it needed.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sagellm.core.binding import Binding
from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import Chunk, RequestState
from sagellm.core.protocols.checkpoints import BlockKeys, CheckpointPolicyFactory, Marginal
from sagellm.core.protocols.eviction import Hint
from sagellm.core.protocols.kv_pool import Allocation, KVPool
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.types import BlockIds, Namespace, Retention, Tokens
from sagellm.kvmgr.manager.tables import INDEX_OWNER, RequestBlocks

NO_LEAD = -1
SEEN_PER_BLOCK = 16
"""Prompts are remembered by the keys of their blocks, so many for each block of the pool."""

MAX_BREAKPOINTS = 4
"""Of the parts of a prompt that a client wants kept, as many as OpenAI's and Anthropic's clients may mark."""

ROLLING_SHARE = 0.25
"""Of the pool, what checkpoints of requests in decode may take: else many such requests empty the cache."""


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """A state behind `leads`, the leading blocks of its prefix, kept in `pages`."""

    key: int
    leads: BlockIds
    pages: BlockIds
    tokens: Tokens
    namespace: Namespace


@dataclass(slots=True, eq=False)
class RequestCheckpoints:
    """Of one running request, whose prompt has `num_prompt_blocks` whole blocks.

    `wanted`: depths in blocks at which checkpoints should be made, ascending. `made`: its own checkpoints by
    depth (`RequestBlocks.kept_states`). `executed`: those that a step has written. `rolling`: the depth of
    the last one that was made in decode, 0 before. `begins_with`: the leading block whose checkpoint it
    begins with, until its first step is executed.
    """

    wanted: list[int]
    begins_with: int
    depth: int
    num_prompt_blocks: int
    made: dict[int, Allocation]
    executed: set[int] = field(default_factory=set)
    rolling: int = 0

    @property
    def is_rolling(self) -> bool:
        """Whether it has a checkpoint of what it has generated."""
        return any(depth > self.num_prompt_blocks for depth in self.made)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """`state_pages`: blocks of the pool that one checkpoint takes.

    In decode one is made every `interval` blocks, in the place of the one before.
    """

    state_pages: int
    interval: int
    policy: CheckpointPolicyFactory
    keys_of: BlockKeys


class Checkpoints:
    """All checkpoints of an index and of running requests. Implements `CheckpointIndex`."""

    def __init__(
        self,
        index: PrefixReuseIndex,
        pool: KVPool,
        config: CheckpointConfig,
        namespace_of: Callable[[Namespace], Namespace],
        now: Callable[[], float],
    ) -> None:
        self.state_pages, self._interval = config.state_pages, max(1, config.interval)
        self.num_made = self.num_evicted = 0
        self.make_room: Callable[[int], None] = lambda num_blocks: None
        self._index, self._pool, self._namespace_of, self._now = index, pool, namespace_of, now
        self._keys_of, self._retention = config.keys_of, config.policy(self)
        self._at: dict[int, KeptPrefix] = {}
        self._by_key: dict[int, KeptPrefix] = {}
        self._needed: Counter[int] = Counter()
        self._num_over: Counter[int] = Counter()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._unneeded: list[tuple[Tokens, Namespace, int]] = []
        self._requests: dict[RequestBlocks, RequestCheckpoints] = {}

    # -- what is resident

    def __len__(self) -> int:
        return len(self._at)

    def counts(self) -> dict[str, int]:
        """Checkpoints in the index now, and made and evicted so far."""
        return {"resident": len(self._at), "made": self.num_made, "evicted": self.num_evicted}

    @property
    def num_evictable_pages(self) -> int:
        """Blocks of checkpoints that can go: no step in flight reads or writes them."""
        pending = sum(len(own.executed) for own in self._requests.values())
        return self.state_pages * (len(self._at) - len(self._needed) + pending)

    def servable(self, leads: Sequence[int]) -> int:
        """The longest prefix of these blocks that ends with a checkpoint."""
        return next((i + 1 for i in reversed(range(len(leads))) if leads[i] in self._at), 0)

    def all_pages(self) -> BlockIds:
        """The blocks of all checkpoints that belong to the index."""
        return array("i", [page for found in self._at.values() for page in found.pages])

    def marginal(self, key: int) -> Marginal:
        """What dropping a checkpoint frees and costs, in blocks."""
        found = self._by_key[key]
        depth, size = len(found.leads), self._pool.block_size
        above, alone = 0, 0
        for i in reversed(range(depth)):
            if i < depth - 1 and found.leads[i] in self._at:
                above = i + 1
                break
            alone += self._num_over[found.leads[i]] == 1
        in_front = self._at[found.leads[above - 1]].key if above else None
        return Marginal((depth - above) * size, self.state_pages + alone, self._ranked(in_front))

    # -- running requests

    def admit(self, blocks: RequestBlocks) -> None:
        """A request begins with its pinned hit."""
        leads, state = blocks.block_ids[: blocks.hit.num_blocks], blocks.state
        lead, num_prompt_blocks = (
            leads[-1] if leads else NO_LEAD,
            state.num_prompt_tokens // self._pool.block_size,
        )
        if state.checkpoint_depths is None:  # one that is admitted again is no second use of its prefix
            keys = self._keys(state, num_prompt_blocks)
            known = self._seen_before(keys)
            places = self._retention.places(keys, known, 0, 0, self._now())
            state.checkpoint_depths = sorted({*places, *self._breakpoints(state)})
        depths = [*state.checkpoint_depths, self._last_of_answer(state)]
        wanted = [depth for depth in depths if depth > len(leads)]
        self._requests[blocks] = RequestCheckpoints(
            wanted, lead, len(leads), num_prompt_blocks, blocks.kept_states
        )
        if leads:
            self.need(lead)

    def _breakpoints(self, state: RequestState) -> set[int]:
        """The depths at which retention ends, the deepest `MAX_BREAKPOINTS`."""
        size, wanted = self._pool.block_size, [bias for bias in state.request.retention if bias.bonus_s]
        stops = {bias.stop // size for bias in wanted if bias.stop and bias.stop <= state.num_prompt_tokens}
        return set(sorted(stops - {0})[-MAX_BREAKPOINTS:])

    def _last_of_answer(self, state: RequestState) -> int:
        """The depth of a preempted request's last checkpoint in decode, or 0.

        Not behind its last token: that one is computed in decode again.
        """
        num_blocks = (len(state.tokens) - 1) // self._pool.block_size
        depth = num_blocks - num_blocks % self._interval
        return depth if depth * self._pool.block_size > state.num_prompt_tokens else 0

    def _seen_before(self, keys: Sequence[int]) -> int:
        """How many of these leading blocks an earlier prompt had. Notes them as seen."""
        seen, known = self._seen, next((i for i, key in enumerate(keys) if key not in self._seen), len(keys))
        for key in reversed(keys):  # a prefix is not forgotten before what is behind it
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > SEEN_PER_BLOCK * self._pool.total_blocks:
            seen.popitem(last=False)
        return known

    def pages_of(self, blocks: RequestBlocks) -> tuple[int, ...]:
        """The checkpoint with which a request begins, until that step is executed."""
        found = self._requests.get(blocks)
        if found is None or found.begins_with == NO_LEAD:
            return ()
        return tuple(self._at[found.begins_with].pages)

    def keep_in_chunk(self, binding: Binding, blocks: RequestBlocks, chunk: Chunk) -> None:
        """Let the step keep states where the chunk passes wanted places."""
        own, size = self._requests[blocks], self._pool.block_size
        for depth in own.wanted:
            if chunk.start < depth * size <= chunk.end and depth not in own.made:
                self._keep(binding, blocks, depth)

    def keep_before_decode(self, binding: Binding, blocks: RequestBlocks, depth: int) -> None:
        """Let the step keep the state of a row that has filled `depth` blocks.

        It takes the place of the row's last one; at least one request has one, however large it is.
        """
        own = self._requests[blocks]
        if depth % self._interval or depth <= own.depth or depth in own.made:
            return
        num_others = sum(other.is_rolling for other in self._requests.values() if other is not own)
        most_blocks = ROLLING_SHARE * self._pool.total_blocks
        if not num_others or (num_others + 1) * self.state_pages <= most_blocks:
            self._keep(binding, blocks, depth)

    def _keep(self, binding: Binding, blocks: RequestBlocks, depth: int) -> None:
        self.make_room(self.state_pages)
        pages = self._pool.allocate(self.state_pages, blocks.state.request_id)
        if pages is None:
            return
        self._requests[blocks].made[depth] = pages
        num_tokens = depth * self._pool.block_size
        binding.kept_states.append((blocks.state, num_tokens, tuple(pages.block_ids)))

    def executed(self, binding: Binding, blocks_of: Callable[[RequestState], RequestBlocks | None]) -> None:
        """The backend has copied the states of the step."""
        for chunk in binding.draft.admitted():
            found = blocks_of(chunk.state)
            if found is not None:
                self._begun(found)
        for state, num_tokens, _ in binding.kept_states:
            blocks = blocks_of(state)
            if blocks is None:
                continue
            own, depth = self._requests[blocks], num_tokens // self._pool.block_size
            if depth not in own.made:
                continue
            own.executed.add(depth)
            if num_tokens > state.num_prompt_tokens:
                if own.rolling in own.made:
                    self._free(own, own.rolling)
                own.rolling = depth

    def undo(
        self, binding: Binding, blocks_of: Callable[[RequestState], RequestBlocks | None], num_before: int
    ) -> None:
        """Undo a bind, or all binds of a step.

        `num_before`: states that were to be kept before it.
        """
        for state, num_tokens, _ in reversed(binding.kept_states[num_before:]):
            blocks, depth = blocks_of(state), num_tokens // self._pool.block_size
            if blocks is not None and depth in self._requests[blocks].made:
                self._free(self._requests[blocks], depth)
        del binding.kept_states[num_before:]

    def deepest(self, blocks: RequestBlocks, num_tokens: int) -> int:
        """How far a prefix may enter the index: its last checkpoint, in tokens."""
        own, size = self._requests[blocks], self._pool.block_size
        depths = [depth for depth in own.executed if depth * size <= num_tokens]
        return max([own.depth, *depths]) * size

    def registered(self, blocks: RequestBlocks) -> None:
        """The first `num_shared` blocks of a request are in the index; attach its checkpoints."""
        own, state, now_s = self._requests[blocks], blocks.state, self._now()
        depths = sorted(depth for depth in own.executed if depth <= blocks.num_shared)
        keys = self._keys(state, depths[-1]) if depths else []
        for depth in depths:
            pages, leads = own.made[depth], blocks.block_ids[:depth]
            if leads[-1] not in self._at and keys[depth - 1] not in self._by_key:
                namespace = self._namespace_of(state.request.namespace)
                ids = self._pool.hand_over(pages, 0, self.state_pages, INDEX_OWNER)
                made = KeptPrefix(keys[depth - 1], leads, ids, state.tokens, namespace)
                self._at[leads[-1]] = self._by_key[made.key] = made
                self._num_over.update(leads)
                self._retention.made(made.key, depth, now_s)
                self.num_made += 1
            self._retain(keys[depth - 1], depth, state.request.retention)
            self._free(own, depth)
        own.depth = max(own.depth, blocks.num_shared)

    def _retain(self, key: int, depth: int, retention: Sequence[Retention]) -> None:
        """Let the settings of a request hold for a checkpoint inside their tokens."""
        size = self._pool.block_size
        for bias in retention:
            if bias.start < depth * size and (bias.stop is None or (depth - 1) * size < bias.stop):
                self._retention.hint(key, Hint(bias.priority, bias.duration_s), self._now())

    def release(self, blocks: RequestBlocks) -> None:
        """The request leaves the batch; its own checkpoints are free."""
        self._begun(blocks)
        blocks.kept_states.clear()
        del self._requests[blocks]
        if blocks.num_shared and not self._num_over[blocks.block_ids[blocks.num_shared - 1]]:
            self._unneeded.append((blocks.state.tokens, blocks.hit.namespace, blocks.num_shared))

    def _begun(self, blocks: RequestBlocks) -> None:
        own = self._requests[blocks]
        if own.begins_with != NO_LEAD:
            lead, own.begins_with = own.begins_with, NO_LEAD
            self.let_go(lead)

    def _free(self, own: RequestCheckpoints, depth: int) -> None:
        """Free what a request still holds of a checkpoint."""
        self._pool.free(own.made[depth])
        del own.made[depth]
        own.executed.discard(depth)
        own.rolling = 0 if own.rolling == depth else own.rolling

    def hint(self, hit: PrefixHit, num_blocks: int, hint: Hint) -> None:
        """A hint for the checkpoints in the last `num_blocks` of a cached prefix."""
        current = self._index.lookup(hit.tokens, hit.namespace, hit.num_tokens)
        for lead in self._index.block_ids(current)[max(0, current.num_blocks - num_blocks) :]:
            if lead in self._at:
                self._retention.hint(self._at[lead].key, hint, self._now())

    # -- memory

    def need(self, lead: int) -> None:
        """The checkpoint of this block cannot go, until `let_go`."""
        if not self._needed[lead]:
            found = self._at[lead]
            self._retention.removed(found.key, self.marginal(found.key).above, self._now())
        self._needed[lead] += 1

    def num_to_need(self, lead: int) -> int:
        """Blocks that `need` takes from those that can go."""
        return 0 if self._needed[lead] else self.state_pages

    def let_go(self, lead: int) -> None:
        """Undo `need`."""
        self._needed[lead] -= 1
        if not self._needed[lead]:
            del self._needed[lead]
            found = self._at[lead]
            self._retention.made(found.key, len(found.leads), self._now())

    @property
    def num_droppable(self) -> int:
        """Checkpoints in the index that no request is about to begin with."""
        return len(self._retention)

    def drop_least(self) -> BlockIds:
        """Drop the checkpoint of least value. Returns its blocks; `evict_unneeded` evicts those behind it."""
        found = self._by_key[self._retention.victim(self._now())]
        self.num_evicted += 1
        return self._remove(found)

    def evict_unneeded(self) -> BlockIds:
        """Evict cached blocks of one prefix that no checkpoint needs any more.

        Empty if there are none.
        """
        gone = array("i")
        while self._unneeded and not gone:
            tokens, namespace, depth = self._unneeded.pop()
            hit = self._index.lookup(tokens, namespace, depth * self._pool.block_size)
            leads = self._index.block_ids(hit)
            count = next((i for i, lead in enumerate(reversed(leads)) if self._num_over[lead]), len(leads))
            gone = self._index.evict_tail(hit, count)
        return gone

    def drop_pending(self, num_blocks: int) -> None:
        """Give up checkpoints that running requests have made, until so many are free."""
        target = self._pool.num_free + num_blocks
        for own in self._requests.values():
            for depth in sorted(own.executed):
                if self._pool.num_free >= target:
                    return
                self._free(own, depth)

    def evicted(self, leads: Iterable[int]) -> BlockIds:
        """These blocks have left the index; returns the blocks of the checkpoints behind them."""
        gone = array("i")
        for lead in leads:
            if lead in self._at:
                gone += self._remove(self._at[lead])
                self.num_evicted += 1
        return gone

    def _remove(self, found: KeptPrefix) -> BlockIds:
        above = self.marginal(found.key).above
        del self._at[found.leads[-1]], self._by_key[found.key]
        self._num_over.subtract(found.leads)
        for lead in found.leads:
            if not self._num_over[lead]:
                del self._num_over[lead]
        if found.leads[-1] not in self._num_over:
            self._unneeded.append((found.tokens, found.namespace, len(found.leads)))
        self._retention.removed(found.key, above, self._now())
        return found.pages

    def clear(self) -> BlockIds:
        """Take out all checkpoints that can go; returns their blocks."""
        gone = array("i")
        for lead in [lead for lead in self._at if lead not in self._needed]:
            gone += self._remove(self._at[lead])
        return gone

    def remap(self, moves: Mapping[int, int]) -> None:
        """After a compaction: block `source` is now block `target`."""

        def moved(blocks: Iterable[int]) -> BlockIds:
            return array("i", [moves.get(block, block) for block in blocks])

        for found in self._by_key.values():
            found.leads, found.pages = moved(found.leads), moved(found.pages)
        self._at = {found.leads[-1]: found for found in self._by_key.values()}
        self._needed = Counter({moves.get(lead, lead): count for lead, count in self._needed.items()})
        self._num_over = Counter({moves.get(lead, lead): count for lead, count in self._num_over.items()})
        for own in self._requests.values():
            own.begins_with = moves.get(own.begins_with, own.begins_with)

    def check(self, running: Iterable[RequestBlocks], held: Sequence[PrefixHit]) -> None:
        """Raise `BookkeepingError` where requests, index and checkpoints disagree.

        Those of the prefixes `held` cannot go either.
        """
        indexed, needed = set(self._index.all_block_ids()), Counter[int]()
        if self._requests.keys() != set(running):
            raise BookkeepingError(f"{len(self._requests)} requests have checkpoints, others run")
        for blocks, own in self._requests.items():
            if own.begins_with != NO_LEAD:
                needed[own.begins_with] += 1
            if not own.executed <= own.made.keys():
                raise BookkeepingError(f"{blocks.state.request_id}: a checkpoint is written and not there")
        for hit in held:
            if hit.num_blocks:
                needed[self._index.block_ids(hit)[-1]] += 1
        over = Counter(lead for found in self._at.values() for lead in found.leads)
        if needed != self._needed or over != self._num_over:
            raise BookkeepingError("the holders or the blocks of checkpoints are counted wrong")
        if not indexed.issuperset(over):
            raise BookkeepingError(
                f"checkpoints need {sorted(over.keys() - indexed)}, which the index has not"
            )
        if len(self._retention) != len(self._at) - len(needed):
            raise BookkeepingError(
                f"{len(self._retention)} checkpoints are ranked, {len(self._at)} are there"
            )
        self._retention.check()

    def _keys(self, state: RequestState, num_blocks: int) -> list[int]:
        """Content keys of the prefixes that end with each of a request's first blocks."""
        return self._keys_of(state.tokens, num_blocks, self._namespace_of(state.request.namespace))

    def _ranked(self, key: int | None) -> int | None:
        """The key, if its checkpoint is one that can go."""
        if key is None or self._needed.get(self._by_key[key].leads[-1]):
            return None
        return key
