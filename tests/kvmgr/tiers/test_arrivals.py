"""`PrefixArrivals`: blocks that come enter the index at their own positions, whatever happens meanwhile."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import Allocation
from sagellm.core.protocols.kv_tiers import Arrival
from sagellm.core.protocols.prefix_cache import InsertResult
from sagellm.core.registry import registry
from sagellm.core.types import BlockIds, Namespace, Tokens
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals
from tests.effort import examples

SIZE, INDEX, SPACE = 2, "prefix index", Namespace()
INDEXES = registry("index").names()
prompts = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=6).map(
    lambda blocks: [token for one in blocks for token in (one, one)]
)


class Published(NamedTuple):
    """Blocks of a request that are in the index, and may still be retracted."""

    result: InsertResult
    own: Allocation
    entered: BlockIds


class World:
    """An index and its pool. A block of the twin holds the prefix whose KV it has."""

    def __init__(self, index: str, num_blocks: int = 24) -> None:
        self.index = registry("index").create(index, block_size=SIZE)
        self.pool = FreeListPool(num_blocks, SIZE)
        self.arrivals = PrefixArrivals(self.index, self.pool)
        self.arrivals.serve(self._make_room, INDEX)
        self.cells: list[tuple[int, ...] | None] = [None] * num_blocks
        self.published: list[Published] = []
        self.open: list[Arrival] = []

    def _make_room(self, num_blocks: int, account: object) -> None:
        missing = min(num_blocks - self.pool.num_free, self.index.num_evictable)
        if missing > 0:
            self.pool.take_back(INDEX, self.index.evict(missing))

    def publish(self, tokens: list[int]) -> None:
        """As a request does whose prompt the step in flight computes."""
        there = self.index.block_ids(self.index.lookup(Tokens(tokens)))
        num_new = len(tokens) // SIZE - len(there)
        own = self.pool.allocate(num_new, "request")
        if own is None:
            return
        entered = own.block_ids[:]
        result = self.index.insert(Tokens(tokens), there + entered, pin=True)
        self.pool.hand_over(own, 0, num_new, INDEX)
        self._fill(tokens, len(there), entered)
        self.published.append(Published(result, own, entered))

    def confirm(self, number: int) -> None:
        result, own, _ = self.published.pop(number)
        self.index.unpin(result.hit)
        self.pool.free(own)

    def retract(self, number: int) -> bool:
        """The step has failed; False where others use its blocks."""
        result, own, entered = self.published[number]
        try:
            self.index.retract(result)
        except BookkeepingError:
            return False
        del self.published[number]
        self.pool.hand_back(INDEX, entered, own, 0)
        self.pool.free(own)
        return True

    def begin(self, tokens: list[int]) -> None:
        arrival = self.arrivals.begin_receive(Tokens(tokens), SPACE, len(tokens) // SIZE)
        if arrival is not None:
            self.open.append(arrival)

    def end(self, number: int, num_blocks: int) -> None:
        arrival = self.open.pop(number)
        filled = arrival.block_ids[:num_blocks]
        self._fill(arrival.tokens.tolist(), arrival.first, filled)
        self.arrivals.publish(arrival, len(filled))

    def _fill(self, tokens: list[int], first: int, block_ids: BlockIds) -> None:
        for position, block in enumerate(block_ids, first + 1):
            self.cells[block] = tuple(tokens[: position * SIZE])

    def check(self, tokens: list[int]) -> None:
        """Assert that the books balance, and that a prompt finds only its own KV."""
        self.index.check()
        self.arrivals.check()
        self.pool.check({INDEX: self.index.all_block_ids()})
        found = self.index.block_ids(self.index.lookup(Tokens(tokens)))
        ends = range(SIZE, len(found) * SIZE + 1, SIZE)
        assert [self.cells[block] for block in found] == [tuple(tokens[:end]) for end in ends]


class ArrivalsMachine(RuleBasedStateMachine):
    index = "radix"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.index)
        self.tokens = [[0] * 12]

    def one_of(self, data: st.DataObject, these: list[Any]) -> int:
        return int(data.draw(st.integers(0, len(these) - 1)))

    @rule(tokens=prompts)
    def publish(self, tokens: list[int]) -> None:
        self.tokens.append(tokens)
        self.world.publish(tokens)

    @rule(tokens=prompts)
    def begin(self, tokens: list[int]) -> None:
        self.tokens.append(tokens)
        self.world.begin(tokens)

    @precondition(lambda self: self.world.published)
    @rule(data=st.data(), works=st.booleans())
    def step(self, data: st.DataObject, works: bool) -> None:
        number = self.one_of(data, self.world.published)
        if works:
            self.world.confirm(number)
        else:
            self.world.retract(number)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), num_blocks=st.integers(0, 6))
    def end(self, data: st.DataObject, num_blocks: int) -> None:
        self.world.end(self.one_of(data, self.world.open), num_blocks)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.arrivals.abort(self.world.open.pop(self.one_of(data, self.world.open)))

    @invariant()
    def nothing_wrong_is_served(self) -> None:
        for tokens in self.tokens[-20:]:
            self.world.check(tokens)


@pytest.mark.parametrize("index", INDEXES)
def test_blocks_that_come_beside_steps_that_fail(index: str) -> None:
    machine: Any = type(f"Arrivals_{index}", (ArrivalsMachine,), {"index": index})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(60), stateful_step_count=30))


@pytest.mark.parametrize("index", INDEXES)
def test_a_prefix_that_an_arrival_continues_is_not_retracted(index: str) -> None:
    """Ten blocks are published before they are computed; the arrival begins with the first three."""
    world, first, second = World(index), [0] * 20, [0] * 6 + [1] * 10
    world.publish(first)
    world.begin(second)
    assert not world.retract(0)
    world.end(0, 5)
    assert world.index.lookup(Tokens(second)).num_blocks == 8
    assert world.retract(0) is False, "others went on from there"
    for tokens in (first, second):
        world.check(tokens)


def test_blocks_whose_prefix_is_gone_are_dropped() -> None:
    world, tokens = World("radix"), [0] * 12
    world.publish(tokens[:6])
    world.begin(tokens)
    block_ids = world.index.block_ids
    world.index.block_ids = lambda hit: block_ids(hit)[:1]
    assert world.arrivals.publish(world.open.pop(), 3) == 0
    world.index.block_ids = block_ids
    assert world.index.num_cached == 3
    world.check(tokens)
