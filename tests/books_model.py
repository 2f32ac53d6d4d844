"""A slow twin of index, pool, quota and manager together: it knows what each slot of each block should hold.

Each slot of the twin's memory holds the namespace and the whole prefix whose KV would stand there. Whatever a
request is given to read must hold exactly its own prefix: that covers sharing, eviction, copies, compaction
and namespaces at once. What the index should find follows from the same memory, by brute force.
"""

from __future__ import annotations

import itertools
from typing import Any

from sagellm.core.binding import Binding, ChunkBlocks
from sagellm.core.blocks import NO_PAGE
from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.errors import CapacityError
from sagellm.core.plan import BlockCopy, Chunk, Draft, RequestState, StepStart
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import (
    KVGroup,
    Namespace,
    Request,
    RequestStatus,
    Retention,
    Tokens,
    Window,
    first_seen,
)
from sagellm.engines.build_kv import build_kv
from sagellm.kvmgr.kv_pool import as_copies, plan_compaction

BLOCK = 2
TENANTS = ("a", "b", "c", "d")
CLASSES = ("", "batch")
Content = tuple[Namespace, tuple[int, ...]]

QUOTAS: dict[str, Any] = {
    "tenant_shares": {"a": {"guaranteed": 0.25, "ceiling": 0.75}, "b": {"guaranteed": 0.25}},
    "class_shares": {"batch": {"ceiling": 0.75}},
}


APPROXIMATE = -1
"""Behind the tokens of a position whose KV was computed behind dropped blocks."""


class InjectedError(Exception):
    """What a faulty machine raises."""


class Books:
    """The real manager, and what must be true of it after every step."""

    def __init__(
        self,
        index: str = "radix",
        pool: str = "free_list",
        num_blocks: int = 24,
        *,
        quotas: bool = False,
        window: int | None = None,
        windows: tuple[Window | None, ...] = (),
        early: bool = False,
        state_pages: int = 0,
    ) -> None:
        """`windows`: those of the KV groups, if there are several; each has `num_blocks` blocks then.

        `state_pages`: blocks of a checkpoint of recurrent states, where the model has any.
        """
        shares = QUOTAS if quotas else {}
        config = KVConfig(
            block_size=BLOCK,
            index=index,
            pool=pool,
            sharing_groups={"friends": ("c", "d")},
            index_as_computed=early,
            checkpoint_interval=BLOCK,
            **shares,
        )
        self.clock = ManualClock()
        self.window, self.windows = window, windows or (window,)
        groups = tuple(KVGroup((i,), one) for i, one in enumerate(windows))
        num_blocks *= len(self.windows)
        self.state_pages = state_pages
        self.kv: Any = build_kv(
            config, num_blocks, window=window, groups=groups, state_pages=state_pages, max_chunk=14,
            clock=self.clock,
        )  # fmt: skip
        self.cells: list[list[Content | None]] = [[None] * BLOCK for _ in range(num_blocks)]
        self.waiting: dict[str, RequestState] = {}
        self.running: dict[str, RequestState] = {}
        self.pinned: list[PrefixHit] = []
        self.approximate_from: dict[str, int] = {}
        self.ids = itertools.count()
        self.num_steps = 0

    # -- what callers do

    def arrive(
        self, tokens: list[int], tenant: str, service_class: str, group: str | None, retained: int = 0
    ) -> None:
        request = Request(
            f"r{next(self.ids)}",
            Tokens(tokens),
            namespace=Namespace(tenant=tenant),
            group=group,
            service_class=service_class,
            retention=(Retention(0, retained, 100, 50.0),) if retained else (),
        )
        self.waiting[request.request_id] = RequestState.of(request)

    def admit(self, name: str, num_tokens: int, *, fail: str = "") -> None:
        state = self.waiting[name]
        hit = self.kv.quotes.match(state)
        self.check_match(state, hit)
        left = len(state.tokens) - hit.num_tokens
        self.step(Chunk(state, hit.num_tokens, min(num_tokens, left), hit), fail)

    def go_on(self, name: str, num_tokens: int, *, fail: str = "") -> None:
        state = self.running[name]
        self.step(Chunk(state, state.num_computed, min(num_tokens, state.num_uncomputed)), fail)

    def step(self, chunk: Chunk, fail: str = "") -> None:
        """One request's chunk through bind, execute and commit; `fail` says where it breaks off."""
        self.clock.advance(1.0)
        binding = Binding(Draft(StepStart(0, 0.0), 1000, [], [], {chunk.state.request_id: chunk}))
        before = self.kv.block_states(), self.kv.index.num_cached
        try:
            self.kv.bind(binding)
        except CapacityError:
            assert binding.copies == []
            self.check_unbound(before)
            return
        self.check_evicted(before, binding.chunks[chunk.state.request_id])
        if fail == "rollback":
            self.kv.rollback(binding)
            self.check_unbound(before)
            return
        self.execute(binding, 0, 0, chunk)
        self.kv.executed(binding)
        self.commit(chunk)

    def admit_together(self, names: list[str], num_tokens: int, *, fail: str = "") -> None:
        """Several requests in one step, each bound before the next is looked up, as a pass may have it."""
        self.clock.advance(1.0)
        draft = Draft(StepStart(0, 0.0), 1000, [], [], {})
        binding = Binding(draft)
        before = self.kv.block_states(), self.kv.index.num_cached
        for name in names:
            state, num_copies, num_kept = (
                self.waiting[name],
                len(binding.copies),
                len(binding.kept_states),
            )
            hit = self.kv.quotes.match(state)
            self.check_match(state, hit)
            left = len(state.tokens) - hit.num_tokens
            draft.chunks[name] = Chunk(state, hit.num_tokens, min(num_tokens, left), hit)
            try:
                self.kv.bind(binding, early=True)
            except CapacityError:
                del draft.chunks[name]
                break
            self.execute(binding, num_copies, num_kept, draft.chunks[name])
        assert list(binding.chunks) == list(draft.chunks)
        if fail == "rollback":
            self.kv.rollback(binding)
            assert not binding.chunks
            self.check_unbound(before)
            return
        self.kv.executed(binding)
        for chunk in draft.chunks.values():
            self.commit(chunk)

    def execute(self, binding: Binding, num_copies: int, num_kept: int, chunk: Chunk) -> None:
        """What a backend would do, but for copies and kept states that are done.

        Copies, then reads of all before the chunk, then writes of the chunk, then states that are kept.
        """
        self.copy(binding.copies[num_copies:])
        state, table = chunk.state, self.kv.block_table(chunk.state.request_id)
        if chunk.admits:
            pages = self.kv.state_pages(state.request_id)
            assert len(pages) == (self.state_pages if chunk.start else 0)
            for page in pages:
                assert self.cells[page] == [self.content(state, chunk.start - 1)] * BLOCK, "wrong state"
        for group, window in enumerate(self.windows):
            blocks = table[group :: len(self.windows)]
            for position in range(first_seen(window, chunk.start), chunk.start):
                if blocks[position // BLOCK] == NO_PAGE:
                    assert position < self.approximate_from[state.request_id]
                    continue
                found = self.cells[blocks[position // BLOCK]][position % BLOCK]
                assert found == self.content(state, position), f"{state.request_id}: wrong KV at {position}"
            for position in range(chunk.start, chunk.end):
                self.cells[blocks[position // BLOCK]][position % BLOCK] = self.content(state, position)
        for kept, num_tokens, pages in binding.kept_states[num_kept:]:
            assert kept is state
            assert chunk.start < num_tokens <= chunk.end
            for page in pages:
                self.cells[page] = [self.content(state, num_tokens - 1)] * BLOCK

    def copy(self, copies: list[BlockCopy]) -> None:
        for one in copies:
            self.cells[one.target] = list(self.cells[one.source])

    def commit(self, chunk: Chunk) -> None:
        state = chunk.state
        if chunk.admits:
            del self.waiting[state.request_id]
            self.running[state.request_id] = state
            state.status = RequestStatus.RUNNING
            state.scheduled_s = self.clock.now()
        state.num_prefilled = chunk.end
        self.kv.commit(state)

    def draw(self, name: str, token: int) -> None:
        """A token was sampled for a request that has computed all it has."""
        state = self.running[name]
        if not state.num_uncomputed:
            state.tokens.append(token)

    def finish(self, name: str, *, keep: bool = True) -> None:
        self.clock.advance(1.0)
        self.approximate_from.pop(name, None)
        self.kv.release(self.running[name], keep=keep)
        del self.running[name]

    def preempt(self, name: str) -> None:
        state = self.running[name]
        self.finish(name)
        state.status, state.num_prefilled = RequestStatus.WAITING, 0
        self.waiting[name] = state

    def drop(self, name: str, first: int, count: int) -> None:
        """Blocks out of the middle of a running request go; what it computes from now on is approximate."""
        state, num_free = self.running[name], self.kv.pool.num_free
        places = self.kv.dropped.droppable(state, first)[:count]
        if places:
            self.kv.dropped.drop(state, places)
            self.approximate_from.setdefault(name, state.num_computed)
        assert self.kv.pool.num_free == num_free + len(places)

    def fork(self, name: str) -> None:
        """A child that goes on from where a running request stands."""
        parent = self.running[name]
        group = parent.request.group or f"fork of {name}"
        request = parent.request
        self.arrive(parent.tokens.tolist(), request.namespace.tenant, request.service_class, group)
        self.kv.fork(parent, group)

    def pin(self, tokens: list[int], tenant: str) -> None:
        try:
            self.pinned.append(self.kv.pin_prefix(Tokens(tokens), Namespace(tenant=tenant)))
        except CapacityError:
            held = {block for hit in self.pinned for block in self.kv.index.block_ids(hit)}
            assert len(held) <= len(self.cells) // 4

    def unpin(self, place: int) -> None:
        self.kv.unpin_prefix(self.pinned.pop(place))

    def clear(self) -> None:
        cached = self.kv.block_states().cached
        assert self.kv.clear_cache() == cached

    def compact(self) -> None:
        moves = plan_compaction(self.kv.pool.block_info, len(self.cells))
        self.kv.remap(moves)
        self.copy(as_copies(moves))
        assert self.kv.fragmentation().external == 0.0

    # -- what must hold

    def content(self, state: RequestState, position: int) -> Content:
        space, tokens = self.kv.namespace_of(state.request.namespace), state.tokens.slice(0, position + 1)
        if position >= self.approximate_from.get(state.request_id, position + 1):
            return space, (*tokens, APPROXIMATE)
        return space, tuple(tokens)

    def resident(self) -> dict[Content, int]:
        """What stands in the index, by the content of each block's last slot."""
        found: dict[Content, int] = {}
        for block in self.kv.index.all_block_ids():
            content = self.cells[block][-1]
            assert content is not None, f"block {block} is in the index, and not computed"
            assert content not in found, f"blocks {block} and {found[content]} of the index hold the same"
            found[content] = block
        return found

    def longest(self, space: Namespace, tokens: tuple[int, ...]) -> list[int]:
        """The blocks of the longest resident prefix, by brute force."""
        resident, blocks = self.resident(), []
        for stop in range(BLOCK, len(tokens) + 1, BLOCK):
            block = resident.get((space, tokens[:stop]))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def check_match(self, state: RequestState, hit: PrefixHit) -> None:
        space = self.kv.namespace_of(state.request.namespace)
        blocks = self.longest(space, tuple(state.tokens)[:-1])
        self.check_longest(space, state, blocks, hit)
        if len(self.windows) > 1 or self.state_pages:  # at most: windows and states must be there, too
            blocks = blocks[: hit.num_blocks]
        assert self.kv.index.block_ids(hit).tolist() == blocks
        tail = 0 if hit.tail is None else hit.tail.num_tokens
        assert hit.num_tokens == len(blocks) * BLOCK + tail < len(state.tokens)
        assert self.kv.index.verify(hit)

    def check_longest(self, space: Namespace, state: RequestState, blocks: list[int], hit: PrefixHit) -> None:
        """A hit reaches the deepest checkpoint, or is not used since there is no room beside it."""
        checkpoints = self.kv.checkpoints
        if checkpoints is None or len(self.windows) > 1:
            return
        behind = {self.cells[page][0] for page in checkpoints.all_pages()}
        depths = range(len(blocks), 0, -1)
        content = ((space, tuple(state.tokens)[: depth * BLOCK]) for depth in depths)
        deepest = next((depth for depth, end in zip(depths, content, strict=True) if end in behind), 0)
        assert hit.num_blocks in {0, deepest}

    def check_unbound(self, before: tuple[Any, int]) -> None:
        """A bind that failed or was undone has changed nothing but that cached blocks may be free."""
        (active, cached, free), _ = before
        now = self.kv.block_states()
        if self.window is None and len(self.windows) == 1 and not self.state_pages:
            assert now.active == active
        assert now.cached <= cached
        assert now.free >= free

    def check_evicted(self, before: tuple[Any, int], bound: ChunkBlocks) -> None:
        """Exactly what was missing is gone, where nothing but the index can give it."""
        if self.window is not None or self.kv.quota is not None or len(self.windows) > 1 or self.state_pages:
            return
        missing = max(0, len(bound.block_ids) - before[0].free)
        assert before[1] - self.kv.index.num_cached == missing

    def check(self) -> None:
        self.num_steps += 1
        self.kv.check()
        if self.kv.quota is not None:
            self.kv.quota.check()
        assert sum(self.kv.block_states()) == len(self.cells)
        self.resident()
        for hit in self.pinned:
            for position, block in enumerate(self.kv.index.block_ids(hit)):
                tokens = tuple(hit.tokens)[: (position + 1) * BLOCK]
                assert self.cells[block][-1] == (hit.namespace, tokens), "a pinned prefix was overwritten"
