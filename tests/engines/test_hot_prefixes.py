"""`HotPrefixes`: what stored prompts share comes up while the engine is idle; any request ends that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.types import RequestStatus, Tokens
from sagellm.engines import engine as engine_module
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.manager import hot_prefixes
from sagellm.kvmgr.manager.hot_prefixes import QUIET_S, SEARCH_EVERY_S
from tests.builders import TENANT_A, TENANT_B, check_books, expected_tokens, fake_engine, request, run_all
from tests.engines.kv_scenes import INDEXES, NOBODY, GatedLoads, hints, resident, serve, status

SYSTEM, TOOLS = list(range(16)), list(range(40, 48))
"""Of four blocks and of two. The pool has 32."""


def own(number: int) -> list[int]:
    """Two blocks that no other prompt has, and a token."""
    return [50 + number] * 9


def stored(*prompts: Sequence[int], **options: Any) -> Engine:
    """An engine with prompts in host memory alone, and an empty device."""
    num_blocks = options.pop("num_blocks", 32)
    engine = fake_engine(
        TokenMemoryBackend(num_blocks=num_blocks), host_blocks=200, eviction="lru", **options
    )
    for number, prompt in enumerate(prompts):
        serve(engine, request(f"stored {number}", prompt, 1))
    engine.clear_cache()
    return engine


def shared(count: int = 3, **options: Any) -> Engine:
    """Three prompts begin with SYSTEM."""
    return stored(*([*SYSTEM, *own(number)] for number in range(count)), **options)


def let_pass(engine: Engine, seconds: float) -> None:
    assert isinstance(engine.clock, ManualClock)
    engine.clock.advance(seconds)
    run_all(engine)


def loaded(engine: Engine) -> int:
    assert engine.kv.tiers is not None
    return engine.kv.tiers.states()[0].loaded


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("index", INDEXES)
def test_what_prompts_share_comes_up_when_the_engine_is_idle(index: str, overlap: bool) -> None:
    engine = shared(index=index, overlap=overlap)
    assert engine.idle_s() == QUIET_S
    assert not engine.has_work()
    let_pass(engine, QUIET_S)
    assert resident(engine, SYSTEM) == 4
    assert all(resident(engine, [*SYSTEM, *own(number)]) == 4 for number in range(3)), "only what is shared"
    assert (engine.idle_s(), loaded(engine)) == (None, 4)
    prompt = [*SYSTEM, *own(9)]
    engine.add(request("new", prompt, 3))
    backend: Any = engine.backend
    assert run_all(engine) == {"new": expected_tokens(backend, prompt, 3)}
    assert engine.diagnostics().num_kv_waits == 0
    engine.close()


def test_without_it_a_request_waits_for_its_kv() -> None:
    engine = shared(load_hot=False)
    let_pass(engine, 100.0)
    assert (resident(engine, SYSTEM), engine.idle_s()) == (0, None)
    serve(engine, request("new", [*SYSTEM, *own(9)], 1))
    assert engine.diagnostics().num_kv_waits == 1
    engine.close()


def test_what_most_prompts_share_comes_first_and_half_of_the_free_blocks_stay_free() -> None:
    prompts = [[*SYSTEM, *own(number)] for number in range(4)]
    prompts += [[*TOOLS, *[60 + number] * 40, *own(branch)] for number in range(3) for branch in range(2)]
    engine = stored(*prompts)
    let_pass(engine, QUIET_S)
    assert engine.kv.pool.num_free == 16
    assert (resident(engine, TOOLS), resident(engine, SYSTEM)) == (2, 4), "6 and 4 prompts"
    assert sum(resident(engine, [*TOOLS, *[60 + number] * 40]) for number in range(3)) == 3 * 2 + 10
    assert engine.idle_s() is None
    engine.close()


@pytest.mark.parametrize("num_free", [0, 3, 4])
def test_nothing_is_evicted_for_it(num_free: int) -> None:
    """With less than an eighth of the pool free, nothing is loaded at all."""
    engine = shared()
    tokens = [60 + i % 30 for i in range(4 * (32 - num_free))]
    serve(engine, request("filler", tokens[:40], 1), request("another", tokens[40:][::-1], 1))
    assert engine.kv.pool.num_free == num_free
    evicted = dict(engine.kv.allocator.num_evicted)
    let_pass(engine, 100.0)
    assert resident(engine, SYSTEM) == num_free // 4 * 2
    assert dict(engine.kv.allocator.num_evicted) == evicted
    assert engine.idle_s() is None
    engine.close()


def test_tiers_are_searched_again_when_the_cache_has_changed_and_not_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, num_searches = shared(), 0
    hierarchy: Any = engine.kv.tiers
    search = hierarchy.shared_prefixes

    def counted(count: int) -> Iterator[Any]:
        nonlocal num_searches
        num_searches += 1
        yield from search(count)

    monkeypatch.setattr(hierarchy, "shared_prefixes", counted)
    let_pass(engine, QUIET_S)
    for _ in range(3):
        let_pass(engine, SEARCH_EVERY_S)
    assert num_searches == 1, "nothing has changed"
    engine.clear_cache()
    run_all(engine)
    assert (num_searches, resident(engine, SYSTEM)) == (2, 4)
    engine.clear_cache()
    assert not engine.has_work()
    assert engine.idle_s() == SEARCH_EVERY_S
    let_pass(engine, SEARCH_EVERY_S)
    assert (num_searches, resident(engine, SYSTEM)) == (3, 4)
    engine.close()


def test_a_large_index_is_searched_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a long prefix comes up in parts."""
    monkeypatch.setattr(hot_prefixes, "SLICE_S", 0.0)
    monkeypatch.setattr(hot_prefixes, "MAX_BLOCKS", 3)
    engine, num_pauses = shared(), 0
    while (idle_s := engine.idle_s()) is not None:
        let_pass(engine, idle_s + 1e-6)
        num_pauses += 1
    assert num_pauses > 5
    assert resident(engine, SYSTEM) == 4
    engine.close()


def test_a_tenant_gets_no_more_than_its_ceiling() -> None:
    """Eight blocks, of which five hold another prompt of the tenant."""
    for tenant, expected in ((TENANT_A, 0), (TENANT_B, 4)):
        engine = shared(0, tenant_shares={"a": {"ceiling": 0.25}})
        for number in range(2):
            serve(engine, request(str(number), [*SYSTEM, *own(number)], 1, namespace=tenant))
        engine.clear_cache()
        serve(engine, request("other", range(60, 81), 1, namespace=tenant))
        assert resident(engine, range(60, 81), tenant) == 5
        let_pass(engine, QUIET_S)
        assert resident(engine, SYSTEM, tenant) == expected
        assert resident(engine, range(60, 81), tenant) == 5
        engine.close()


def test_a_block_that_does_not_verify_ends_its_prefix_alone() -> None:
    prompts = [[*head, *own(number)] for head in (SYSTEM, TOOLS) for number in range(3)]
    engine = stored(*prompts)
    assert isinstance(engine.kv.tiers, HierarchyManager)
    [tier] = engine.kv.tiers.tiers
    tier.storage.forget(tier.index.block_ids(tier.lookup(Tokens(SYSTEM), NOBODY))[1:2])
    let_pass(engine, QUIET_S)
    assert (resident(engine, SYSTEM), resident(engine, TOOLS)) == (1, 2)
    assert engine.idle_s() is None
    engine.close()


# -- giving way


class Gated(GatedLoads):
    """With `begins` the prefix SYSTEM is on its way up."""

    def __init__(self, *prompts: Sequence[int], overlap: bool = False, begins: bool = True) -> None:
        systems = [[*SYSTEM, *own(number)] for number in range(3)]
        super().__init__(stored(*systems, *prompts, overlap=overlap))
        assert isinstance(self.engine.clock, ManualClock)
        self.engine.clock.advance(QUIET_S)
        if begins:
            self.step_until(lambda: self.num_reads)

    def is_there(self, name: str) -> bool:
        return name in self.engine._request_table.states

    def end(self) -> dict[str, list[int]]:
        """Open the gate; the tokens of all requests until all have ended."""
        self.open()
        return run_all(self.engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_does_not_wait_for_it_and_ends_it(overlap: bool) -> None:
    gated = Gated(overlap=overlap)
    prompt = range(20, 37)
    gated.engine.add(request("new", prompt, 4))
    assert gated.step_until(lambda: not gated.is_there("new")) == {"new": gated.expected(prompt, 4)}
    assert gated.num_reads == 1, "the load stands at the gate all the time"
    gated.end()
    assert gated.num_reads == 1
    assert resident(gated.engine, SYSTEM) <= 1
    let_pass(gated.engine, QUIET_S)
    assert resident(gated.engine, SYSTEM) == 4, "it goes on when the engine is idle again"
    gated.engine.close()


def test_a_command_ends_the_wait_of_an_idle_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new request is queued by another thread, which wakes the engine."""
    gated = Gated(begins=False)
    monkeypatch.setattr(engine_module, "MOST_IDLE_S", 20.0)
    waker = threading.Timer(0.05, gated.engine.wake)
    waker.start()
    began_s = time.monotonic()
    gated.engine.step()
    assert time.monotonic() - began_s < 15, "it waited for KV"
    waker.join()
    monkeypatch.undo()
    gated.end()
    gated.engine.close()


def test_for_a_request_that_lacks_it_the_load_goes_on() -> None:
    gated = Gated()
    prompt = [*SYSTEM, *own(9)]
    gated.engine.add(request("new", prompt, 3))
    gated.engine.step()
    assert gated.engine._request_table.states["new"].status is RequestStatus.WAITING_FOR_KV
    assert gated.end() == {"new": gated.expected(prompt, 3)}
    assert gated.num_reads == loaded(gated.engine) == 4
    gated.engine.close()


def test_a_request_whose_blocks_it_has_gets_them_and_loads() -> None:
    """More than half of the pool would be loaded at once. The request waits, and need not compute."""
    prompt = [*range(60, 90), *range(60, 90)]  # 15 blocks
    gated = Gated(prompt)
    engine = gated.engine
    engine.add(request("new", prompt, 3))
    gated.step_until(lambda: gated.hierarchy.arrivals.num_changes == engine_stopped(engine))
    assert engine._request_table.states["new"].status is RequestStatus.WAITING_FOR_KV
    assert gated.end() == {"new": gated.expected(prompt, 3)}
    assert loaded(engine) >= 14
    engine.close()


def engine_stopped(engine: Engine) -> int:
    waits: Any = engine._kv_waits
    stopped: int = waits._hot._stopped_at
    return stopped


def test_what_a_client_expects_comes_first() -> None:
    other = list(range(70, 87))
    gated = Gated(other)
    assert status(gated.engine, hints("kv.expect", token_ids=other)) == ("applied", 4)
    gated.engine.step()
    gated.end()
    assert resident(gated.engine, other) == 4
    assert resident(gated.engine, SYSTEM) <= 1
    let_pass(gated.engine, QUIET_S)
    assert resident(gated.engine, SYSTEM) == 4
    gated.engine.close()


@pytest.mark.parametrize("tiers", [False, True])
def test_clearing_the_cache_in_the_middle(tiers: bool) -> None:
    gated = Gated()
    gated.open()
    gated.engine.clear_cache(tiers=tiers)
    check_books(gated.engine)
    run_all(gated.engine)
    assert resident(gated.engine, SYSTEM) == (0 if tiers else 4)
    gated.engine.close()


def test_compaction_in_the_middle() -> None:
    gated = Gated()
    gated.open()
    gated.engine.compact()
    check_books(gated.engine)
    run_all(gated.engine)
    assert resident(gated.engine, SYSTEM) == 4
    gated.engine.close()
