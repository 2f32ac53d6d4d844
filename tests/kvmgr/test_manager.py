"""The manager's books: what a request holds, what stays behind, and that nothing is lost when something
fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sagellm.core.binding import Binding, BindingStage
from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.plan import Chunk, Draft, RequestState, StepStart
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import NO_ACCOUNT, Account, Request, RequestStatus, Tokens
from sagellm.engines.build_kv import build_kv
from sagellm.kvmgr.eviction import LRUPolicy
from sagellm.kvmgr.kv_pool import FreeListPool, QuotaManager, Share
from sagellm.kvmgr.manager import BlockAllocator, KVCacheManager
from sagellm.kvmgr.manager.tables import INDEX_OWNER
from sagellm.kvmgr.prefix_cache import RadixIndex
from sagellm.kvmgr.prefix_cache.metrics import PrefixReuseMetrics

BLOCK = 4


def manager(num_blocks: int = 16) -> KVCacheManager:
    return build_kv(KVConfig(block_size=BLOCK), num_blocks)


def state(name: str, tokens: Sequence[int]) -> RequestState:
    return RequestState.of(Request(name, Tokens(tokens)))


def binding(*chunks: Chunk) -> Binding:
    return Binding(
        Draft(StepStart(0, 0.0), 1000, [], [], {chunk.state.request_id: chunk for chunk in chunks})
    )


def blocks_of(bound: Binding, name: str) -> tuple[int, tuple[int, ...]]:
    return bound.chunks[name].first_block, bound.chunks[name].block_ids


def admit(kv: KVCacheManager, request: RequestState, num_tokens: int | None = None) -> Chunk:
    hit = kv.quotes.match(request)
    take = len(request.tokens) - hit.num_tokens if num_tokens is None else num_tokens
    chunk = Chunk(request, hit.num_tokens, take, hit)
    kv.bind(binding(chunk))
    request.status, request.num_prefilled = RequestStatus.RUNNING, chunk.start
    return chunk


def compute(kv: KVCacheManager, request: RequestState, up_to: int) -> None:
    request.num_prefilled = up_to
    kv.commit(request)
    kv.check()


def test_a_prompt_enters_the_index_when_it_is_whole() -> None:
    kv = KVCacheManager(RadixIndex(block_size=BLOCK), FreeListPool(16, BLOCK))  # no option is needed
    first = state("first", range(10))
    admit(kv, first, 6)
    compute(kv, first, 6)
    assert kv.index.num_cached == 0
    kv.bind(binding(Chunk(first, 6, 4)))
    compute(kv, first, 10)
    assert (kv.index.num_cached, kv.index.num_evictable) == (2, 0)
    assert kv.quotes.match(state("other", range(10))).num_tokens == 8
    assert kv.quotes.match(state("same but whole", range(8))).num_tokens == 4


def test_a_request_with_duplicates_goes_on_with_the_blocks_of_the_index() -> None:
    kv = manager()
    first, second = state("a", range(12)), state("b", [*range(12), 7])
    for request in (first, second):
        admit(kv, request)
    own = list(kv.block_table("b"))
    compute(kv, first, 12)
    compute(kv, second, 13)
    assert kv.block_table("b").tolist() == [*kv.block_table("a"), own[3]]
    assert kv.block_states() == (4, 0, 12)  # the three duplicates are free again
    second.tokens.append(8)
    chunk = Chunk(second, 13, 1)
    step = binding(chunk)
    kv.bind(step)
    assert blocks_of(step, "b") == (0, ())  # the backend is sent the whole table
    kv.rollback(step)
    step = binding(chunk)
    kv.bind(step)
    assert blocks_of(step, "b")[0] == 0  # a failed step has sent it nothing
    kv.executed(step)
    compute(kv, second, 14)
    second.tokens.append(9)
    chunk = Chunk(second, 14, 1)
    step = binding(chunk)
    kv.bind(step)
    assert blocks_of(step, "b")[0] == 4
    for request in (first, second):
        kv.release(request)
        kv.check()
    assert kv.block_states() == (0, 3, 13)


def test_a_change_after_a_bind_is_not_sent_by_that_step() -> None:
    """A step may be bound while the one before it computes."""
    kv = manager()
    first, second = state("a", range(12)), state("b", [*range(12), 7])
    steps = []
    for request in (first, second):
        chunk = Chunk(request, 0, len(request.tokens), kv.quotes.match(request))
        steps.append(binding(chunk))
        kv.bind(steps[-1])
        request.status, request.num_prefilled = RequestStatus.RUNNING, 0
    kv.executed(steps[0])
    compute(kv, first, 12)
    second.tokens.append(8)
    ahead = binding(Chunk(second, 13, 1))
    kv.bind(ahead)
    assert blocks_of(ahead, "b") == (4, ()), "nothing has changed so far"
    kv.executed(steps[1])
    compute(kv, second, 13)  # the duplicates leave its table
    kv.executed(ahead)
    compute(kv, second, 14)
    second.tokens.append(9)
    step = binding(Chunk(second, 14, 1))
    kv.bind(step)
    assert blocks_of(step, "b")[0] == 0


def test_what_is_foreseen_can_be_reused_and_taken_back() -> None:
    kv = manager()
    first = state("a", range(12))
    chunk = Chunk(first, 0, 12, kv.quotes.match(first))
    step = binding(chunk)
    kv.bind(step)
    before = kv.block_states()
    kv.foresee([chunk])
    kv.check()
    other = state("b", range(20))
    assert kv.quotes.match(other).num_tokens == 12
    ahead = binding(Chunk(other, 12, 8, kv.quotes.match(other)))
    kv.bind(ahead)
    kv.rollback(ahead)
    assert kv.quotes.match(other).num_tokens == 12, "the step that computes it stands"
    kv.rollback(step)
    kv.check()
    assert kv.quotes.match(other).num_tokens == 0
    assert before.active == 3
    assert kv.block_states().free == kv.quotes.num_blocks


def test_a_part_of_a_prompt_is_not_foreseen() -> None:
    kv = manager()
    first = state("a", range(12))
    chunk = Chunk(first, 0, 8, kv.quotes.match(first))
    kv.bind(binding(chunk))
    kv.foresee([chunk])
    assert kv.quotes.match(state("b", range(12))).num_tokens == 0


def test_check_compares_tables_with_what_requests_hold() -> None:
    kv = manager()
    running = state("a", range(9))
    admit(kv, running)
    compute(kv, running, 9)
    kv.block_table("a").reverse()
    with pytest.raises(BookkeepingError, match="a: the table"):
        kv.check()
    kv.block_table("a").reverse()


def test_growth_takes_a_block_only_at_a_border() -> None:
    kv = manager()
    request = state("r", range(3))
    admit(kv, request)
    compute(kv, request, 3)
    taken = []
    for _ in range(6):
        request.tokens.append(7)
        price = kv.quotes.blocks_to_append(request, 1)
        step = binding(Chunk(request, request.num_computed, 1))
        kv.bind(step)
        assert price == len(blocks_of(step, "r")[1])
        taken.append(price)
        compute(kv, request, request.num_prefilled + 1)
    assert taken == [0, 1, 0, 0, 0, 1]


def test_prices_and_gains_are_what_happens() -> None:
    kv = manager(8)
    first = state("first", range(13))
    before = kv.quotes.available_blocks()
    price = kv.quotes.blocks_to_admit(kv.quotes.match(first), 13)
    admit(kv, first)
    assert before - kv.quotes.available_blocks() == price == 4
    compute(kv, first, 13)
    gain = kv.quotes.blocks_freed_by_preempting(first)
    available = kv.quotes.available_blocks()
    kv.release(first)
    assert kv.quotes.available_blocks() - available == gain == 4
    second = state("second", [*range(12), 5, 5])
    hit = kv.quotes.match(second)
    price = kv.quotes.blocks_to_admit(hit, 2)
    available = kv.quotes.available_blocks()
    admit(kv, second)
    assert available - kv.quotes.available_blocks() == price == 4


def test_what_is_missing_is_evicted_and_exactly_that() -> None:
    kv = manager(6)
    for name in "ab":
        request = state(name, [ord(name)] * 8)
        admit(kv, request)
        compute(kv, request, 8)
        kv.release(request)
    assert kv.block_states() == (0, 4, 2)
    admit(kv, state("c", range(12)))
    assert kv.block_states() == (3, 3, 0)
    kv.check()


def test_a_bind_that_fails_changes_nothing() -> None:
    kv = manager(6)
    holder = state("holder", range(9))
    admit(kv, holder)
    compute(kv, holder, 9)
    before = kv.block_states()
    fits, does_not = state("fits", range(11)), state("does not", range(50, 70))
    chunks = [
        Chunk(r, h.num_tokens, len(r.tokens) - h.num_tokens, h)
        for r in (fits, does_not)
        for h in [kv.quotes.match(r)]
    ]
    with pytest.raises(CapacityError, match="5 blocks asked for"):
        kv.bind(binding(*chunks))
    kv.check()
    assert kv.block_states() == before


class FailingPool(FreeListPool):
    """Raises at the n-th operation."""

    countdown = -1

    def _tick(self) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            raise RuntimeError("injected")

    def allocate(self, *given):  # type: ignore[no-untyped-def]
        self._tick()
        return super().allocate(*given)

    def append_blocks(self, *given):  # type: ignore[no-untyped-def]
        self._tick()
        return super().append_blocks(*given)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_an_exception_in_the_middle_of_bind_is_undone(at: int) -> None:
    pool = FailingPool(total_blocks=16, block_size=BLOCK)
    kv = KVCacheManager(RadixIndex(block_size=BLOCK), pool)
    running = state("running", range(4))
    admit(kv, running)
    compute(kv, running, 4)
    running.tokens.append(1)
    before = kv.block_states()
    new = [state("a", range(20, 29)), state("b", range(6))]
    chunks = [
        Chunk(running, 4, 1),
        *(Chunk(r, h.num_tokens, 4, h) for r in new for h in [kv.quotes.match(r)]),
    ]
    pool.countdown = at
    with pytest.raises(RuntimeError, match="injected"):
        kv.bind(binding(*chunks))
    kv.check()
    assert kv.block_states() == before
    assert len(kv.block_table("running")) == 1


def test_rollback_undoes_a_bind() -> None:
    kv = manager()
    seed = state("seed", range(8))
    admit(kv, seed)
    compute(kv, seed, 8)
    kv.release(seed)
    before = kv.block_states()
    request = state("r", [*range(8), 1, 2])
    hit = kv.quotes.match(request)
    bound = binding(Chunk(request, 8, 2, hit))
    kv.bind(bound)
    assert kv.block_states() != before
    kv.rollback(bound)
    kv.check()
    assert kv.block_states() == before


def test_calls_out_of_order_name_the_right_call() -> None:
    kv = manager()
    request = state("r", range(6))
    step = binding(Chunk(request, 0, 6, kv.quotes.match(request)))
    with pytest.raises(BookkeepingError, match="executed of step 0: call bind first"):
        kv.executed(step)
    kv.bind(step)
    kv.executed(step)
    assert step.stage is BindingStage.EXECUTED
    for call in (kv.bind, kv.rollback):
        with pytest.raises(BookkeepingError, match="of step 0: it was executed: commit its requests"):
            call(step)
    compute(kv, request, 6)


def test_a_hit_that_shrank_before_bind_is_an_error() -> None:
    kv = manager(4)
    seed = state("seed", range(8))
    admit(kv, seed)
    compute(kv, seed, 8)
    kv.release(seed)
    request = state("r", [*range(8), 1])
    hit = kv.quotes.match(request)
    kv.allocator.make_room(3, NO_ACCOUNT)
    with pytest.raises(BookkeepingError, match="shrank"):
        kv.bind(binding(Chunk(request, 8, 1, hit)))
    kv.check()


def test_without_prefix_caching_nothing_stays() -> None:
    kv = build_kv(KVConfig(block_size=BLOCK, prefix_caching=False), 8)
    request = state("r", range(9))
    admit(kv, request)
    compute(kv, request, 9)
    assert kv.quotes.match(state("again", range(9))).num_tokens == 0
    kv.release(request)
    assert kv.block_states() == (0, 0, 8)


def test_the_time_of_a_look_up_is_recorded() -> None:
    clock, metrics = ManualClock(), PrefixReuseMetrics()

    class Slow(RadixIndex):
        def lookup(self, *args: Any) -> PrefixHit:
            clock.advance(0.5)
            return super().lookup(*args)

    clock.advance(100.0)
    kv = KVCacheManager(Slow(block_size=BLOCK), FreeListPool(16, BLOCK), metrics=metrics, clock=clock)
    kv.quotes.match(state("r", range(9)))
    assert metrics.snapshot().match_sum_s == 0.5


def test_without_a_quota_there_is_no_ceiling_to_make_room_below() -> None:
    kv = manager()
    cached = state("cached", range(9))
    admit(kv, cached)
    compute(kv, cached, 9)
    kv.release(cached)
    assert not kv.make_room_below_ceilings(state("r", range(9)), 3)
    assert kv.index.num_cached == 2


def test_no_version_comes_twice() -> None:
    """Who kept an answer of the books looks whether their version is still the same."""
    kv = manager()
    versions = [kv.quotes.version]
    for start in (0, 20):
        request = state(f"from {start}", range(start, start + 9))
        admit(kv, request)
        compute(kv, request, 9)
        versions.append(kv.quotes.version)
        kv.release(request)
        versions.append(kv.quotes.version)
    kv.remap({0: 15})
    versions.append(kv.quotes.version)
    kv.clear_cache()
    versions.append(kv.quotes.version)
    assert versions == sorted(set(versions))


def test_block_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="block sizes differ"):
        KVCacheManager(RadixIndex(block_size=4), FreeListPool(4, 8))


def test_blocks_that_keep_a_borrower_from_giving_go_and_no_more_than_are_missing() -> None:
    """The head of a prompt is borrowed, and leads to blocks that are guaranteed: one of these has to go, of
    the account that has most."""
    a, b, c = Account("a"), Account("b"), Account("c")
    quota = QuotaManager(5, {"b": Share(2), "c": Share(1)})
    index = RadixIndex(block_size=BLOCK, policy_factory=LRUPolicy)
    pool = FreeListPool(5, BLOCK, quota=quota)
    allocator = BlockAllocator(index, pool, quota)
    head = list(range(2 * BLOCK))
    for account, tail, num_new in ((a, [], 2), (b, [50] * 2 * BLOCK, 2), (c, [60] * BLOCK, 1)):
        tokens = Tokens([*head, *tail])
        own = pool.allocate(num_new, "request", account)
        assert own is not None
        index.insert(tokens, [*index.block_ids(index.lookup(tokens)), *own.block_ids], account=account)
        pool.hand_over(own, 0, num_new, INDEX_OWNER)
        pool.free(own)
    allocator.make_room(1, Account("other"))
    assert pool.num_free == 1
    assert dict(index.evictable_by_account()) == {NO_ACCOUNT: 0, a: 2, b: 1, c: 1}
    pool.check({INDEX_OWNER: allocator.blocks_of_index()})
