"""A request computes the head of its prompt while a tier loads the tail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from sagellm.core.blocks import Tier
from sagellm.core.plan import ExecutionPlan, RequestState, StepResult
from sagellm.core.protocols.kv_tiers import BlockStorage, ReadOutcome
from sagellm.core.types import RequestStatus
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from tests.builders import check_books, expected_tokens, fake_engine, request, run_all, split_loads

PROMPT = list(range(43))
"""Ten whole blocks, all of which may be reused: five are computed, five are loaded."""
BOTH = pytest.mark.parametrize("overlap", [False, True])


class SlowStorage:
    """Reads wait for `may_read`; the block `bad` of a read is damaged."""

    def __init__(self, storage: BlockStorage) -> None:
        self.storage, self.may_read, self.bad = storage, threading.Event(), -1

    def read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> list[ReadOutcome]:
        assert self.may_read.wait(10)
        outcomes = list(self.storage.read(slots, token_hashes, target))
        if 0 <= self.bad < len(outcomes):
            good = self.bad * len(target) // len(slots)
            target[good:] = bytes(len(target) - good)
            outcomes[self.bad] = ReadOutcome.CORRUPT
        return outcomes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)


def tiers_of(engine: Engine) -> HierarchyManager:
    assert isinstance(engine.kv.tiers, HierarchyManager)
    return engine.kv.tiers


def slow_engine(*, num_blocks: int = 64, overlap: bool = False, **options: Any) -> tuple[Engine, SlowStorage]:
    """An engine whose host tier has the KV of `PROMPT`, the device none of it."""
    backend = TokenMemoryBackend(num_blocks=num_blocks)
    engine = fake_engine(backend, host_blocks=40, overlap=overlap, max_batched_tokens=8, **options)
    engine.add(request("before", PROMPT, 1))
    run_all(engine)
    engine.clear_cache()
    split_loads(engine.kv)
    migrator: Any = tiers_of(engine)._migrator
    slow = migrator._storages[Tier.DRAM] = SlowStorage(migrator._storages[Tier.DRAM])
    return engine, slow


def begin(engine: Engine, name: str = "a", **options: Any) -> RequestState:
    engine.add(request(name, PROMPT, 5, **options))
    return engine._request_table.states[name]


def compute_head(engine: Engine, state: RequestState, num_steps: int = 12) -> None:
    """Step until the request stands at its limit, and beyond."""
    for _ in range(num_steps):
        engine.step()
        check_books(engine)
    assert (state.status, state.num_computed, state.compute_until) == (RequestStatus.RUNNING, 20, 20)


def finish(engine: Engine, name: str = "a") -> list[int]:
    found = run_all(engine)[name]
    check_books(engine)
    assert tiers_of(engine).arrivals.num_blocks == 0
    assert not engine._request_table.limited
    return found


EXPECTED = expected_tokens(TokenMemoryBackend(), PROMPT, 5)


@BOTH
def test_the_head_is_computed_while_the_tail_comes(overlap: bool) -> None:
    engine, slow = slow_engine(overlap=overlap)
    state = begin(engine)
    compute_head(engine, state)
    assert tiers_of(engine).arrivals.num_blocks == 5
    slow.may_read.set()
    assert finish(engine) == EXPECTED
    assert tiers_of(engine).tiers[0].num_loaded == 5
    assert state.num_cached == 20
    assert engine._kv_waits is not None
    assert (engine._kv_waits.num_tails, engine._kv_waits.num_waits) == (1, 0)
    assert engine.kv.index.lookup(state.tokens).num_blocks == 11, "what came is cached like what was computed"
    engine.close()


@BOTH
def test_others_run_meanwhile(overlap: bool) -> None:
    engine, slow = slow_engine(overlap=overlap)
    engine.add(request("other", range(50, 60), 9))
    engine.step()
    engine.step()
    engine.step()
    state = begin(engine)
    engine.step()
    engine.step()
    engine.add(request("same", PROMPT, 5))  # computes all that is not cached, beside the tail
    compute_head(engine, state, 20)
    assert "other" not in engine._request_table.states
    slow.may_read.set()
    assert finish(engine) == EXPECTED
    engine.close()


@BOTH
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_a_damaged_block_ends_the_tail(overlap: bool, bad: int) -> None:
    engine, slow = slow_engine(overlap=overlap)
    slow.bad = bad
    state = begin(engine)
    compute_head(engine, state)
    slow.may_read.set()
    assert finish(engine) == EXPECTED
    assert state.num_cached == 4 * bad
    assert tiers_of(engine).tiers[0].misses == {ReadOutcome.CORRUPT: 1}
    engine.close()


@BOTH
def test_a_request_that_is_aborted_leaves_no_blocks_behind(overlap: bool) -> None:
    """They are freed when the thread has stopped writing."""
    engine, slow = slow_engine(overlap=overlap)
    compute_head(engine, begin(engine))
    engine.abort("a")
    assert tiers_of(engine).arrivals.num_blocks == 5
    assert engine.has_work()
    slow.may_read.set()
    assert run_all(engine) == {}
    assert tiers_of(engine).arrivals.num_blocks == 0
    assert engine.kv.block_states().active == 0
    engine.close()


@BOTH
def test_a_request_that_is_preempted_begins_anew(overlap: bool) -> None:
    engine, slow = slow_engine(overlap=overlap)
    state = begin(engine)
    compute_head(engine, state)
    engine.drain()
    slow.may_read.set()
    assert engine._kv_waits is not None
    engine._kv_waits.give_way()
    engine._preempt(state)
    assert state.compute_until is None
    assert finish(engine) == EXPECTED
    engine.close()


def test_a_tail_that_gave_way_is_computed() -> None:
    engine, slow = slow_engine()
    state = begin(engine)
    compute_head(engine, state)
    slow.may_read.set()
    slow.bad = 0
    assert engine._kv_waits is not None
    assert engine._kv_waits.give_way()
    assert (state.compute_until, tiers_of(engine).arrivals.num_blocks) == (None, 0)
    assert finish(engine) == EXPECTED
    assert state.num_cached == 0
    engine.close()


def test_where_a_tail_is_in_the_way_it_is_given_up() -> None:
    """A request in decode needs blocks while the tail has come and the head is not computed."""
    engine, slow = slow_engine(num_blocks=33)
    slow.may_read.set()
    for number in range(3):
        engine.add(request(f"d{number}", range(60 + number, 64 + number), 30))
    for _ in range(5):
        engine.step()
    begin(engine)
    found = run_all(engine)
    assert found["a"] == EXPECTED
    for number in range(3):
        prompt = range(60 + number, 64 + number)
        expected = expected_tokens(TokenMemoryBackend(), prompt, 30)
        assert found[f"d{number}"] == expected[-len(found[f"d{number}"]) :]
    engine.close()


def test_where_the_device_has_no_room_for_both_all_of_it_is_loaded() -> None:
    engine, slow = slow_engine(num_blocks=12)  # those of the request
    slow.may_read.set()
    begin(engine)
    assert finish(engine) == EXPECTED
    assert engine._kv_waits is not None
    assert (engine._kv_waits.num_tails, engine._kv_waits.num_waits) == (0, 1)
    engine.close()


def test_a_burst_waits_for_its_kv() -> None:
    """The device computes other prompts meanwhile."""
    engine, slow = slow_engine()
    slow.may_read.set()
    for name in ("x", "y"):
        engine.add(request(name, [90, *PROMPT], 5))
    begin(engine)
    assert finish(engine) == EXPECTED
    assert engine._kv_waits is not None
    assert engine._kv_waits.num_tails == 0
    engine.close()


def test_a_request_that_is_not_admitted_waits_for_all_of_its_kv() -> None:
    engine, slow = slow_engine()
    slow.may_read.set()
    for number in range(8):  # all rows
        engine.add(request(f"d{number}", [70 + number], 30))
    for _ in range(3):
        engine.step()
    state = begin(engine)
    for _ in range(3):
        engine.step()
    assert engine.kv.tiers is not None
    engine.kv.tiers.wait(1.0)
    engine.step()
    assert state.status is RequestStatus.WAITING
    assert engine.kv.index.lookup(state.tokens).num_blocks == 10
    assert finish(engine) == EXPECTED
    engine.close()


class FailsOnce(TokenMemoryBackend):
    fails = False

    def execute(self, plan: ExecutionPlan) -> StepResult:
        if self.fails:
            self.fails = False
            raise RuntimeError("once")
        return super().execute(plan)


@BOTH
def test_a_failed_step_ends_the_limit(overlap: bool) -> None:
    engine, slow = slow_engine(overlap=overlap)
    slow.may_read.set()
    backend: Any = engine.backend
    backend.__class__ = FailsOnce
    engine.add(request("other", range(50, 60), 9))
    for _ in range(3):
        engine.step()
    state = begin(engine)
    while not engine._request_table.limited:
        engine.step()
    backend.fails = True
    assert finish(engine) == EXPECTED
    assert state.compute_until is None
    engine.close()


@BOTH
def test_closing_and_compaction_while_a_tail_comes(overlap: bool) -> None:
    engine, slow = slow_engine(overlap=overlap)
    state = begin(engine)
    compute_head(engine, state)
    slow.may_read.set()
    engine.compact()
    check_books(engine)
    assert finish(engine) == EXPECTED
    engine.clear_cache()
    slow.may_read.clear()
    compute_head(engine, begin(engine, "b"))
    slow.may_read.set()
    engine.close()
    assert tiers_of(engine).arrivals.num_blocks == 0
