"""`KVWaits`: no request waits for KV that does not come, alone and in an engine whose loads are held up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_tiers import TierLookup
from sagellm.core.types import RequestStatus
from sagellm.engines import kv_waits
from sagellm.engines.kv_waits import MOST_LOADED_BLOCKS, KVWaits
from sagellm.engines.request_table import RequestTable
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import DecodeBatch
from tests.builders import check_books, expected_tokens, fake_engine, request, run_all
from tests.engines.kv_scenes import OLD, YOUNG, GatedLoads, resident, serve


class Tiers:
    """Tiers that bring up one request at a time; with `is_deep` there is always more."""

    is_idle, load_hot = True, False

    def __init__(self) -> None:
        self.loading: list[str] = []
        self.came: list[str] = []
        self.whole: set[str] = set()
        self.is_deep = False
        self.loads: Any = self
        self.writes: Any = self
        self.awaits_copies = self.is_write_back = False
        self.arrivals, self.num_blocks = self, 0

    def bring_up(self, state: RequestState, **options: object) -> TierLookup:
        if state.request_id in self.whole:
            return TierLookup.MISS
        if self.loading:
            return TierLookup.RETRY
        self.loading.append(state.request_id)
        return TierLookup.HIT_PENDING

    def poll(self) -> list[str]:
        came, self.came = self.came, []
        if not self.is_deep:
            self.whole.update(came)
        return came

    def start_loads(self) -> None: ...

    def advance(self) -> None: ...

    def cancel(self, request_id: str) -> None:
        if request_id in self.loading:
            self.loading.remove(request_id)


def waiting(*names: str) -> tuple[KVWaits, Tiers, dict[str, RequestState]]:
    table, tiers = RequestTable(4, DecodeBatch(97, 4), 64), Tiers()
    found: Any = tiers
    waits, states = KVWaits(table, found, found, time.monotonic), {}
    for name in names:
        states[name] = RequestState.of(request(name, list(range(20)), 4))
        table.add(states[name])
        waits.add(states[name])
    waits.advance(start=True)
    return waits, tiers, states


def test_a_request_without_room_is_asked_again_when_a_load_ends() -> None:
    waits, tiers, states = waiting("a", "b")
    assert [state.status for state in states.values()] == [RequestStatus.WAITING_FOR_KV] * 2
    tiers.loading, tiers.came = [], ["a"]
    waits.advance(start=True)
    assert states["a"].status is RequestStatus.WAITING
    assert tiers.loading == ["b"]


def test_a_further_tier_may_bring_more() -> None:
    """And after memory was given back, nothing more is brought."""
    for again in (True, False):
        waits, tiers, states = waiting("a")
        tiers.loading, tiers.came, tiers.is_deep = [], ["a"], True
        waits.advance(start=True, again=again)
        expected = RequestStatus.WAITING_FOR_KV if again else RequestStatus.WAITING
        assert states["a"].status is expected
        assert tiers.loading == (["a"] if again else [])


def test_memory_that_was_given_back_goes_to_no_other_load() -> None:
    waits, tiers, states = waiting("a", "b")
    tiers.loading, tiers.came = [], ["a"]
    waits.advance(start=True, again=False)
    assert states["a"].status is RequestStatus.WAITING
    assert tiers.loading == []
    waits.advance(start=True)
    assert tiers.loading == ["b"]


def test_large_loads_begin_in_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, tiers, _ = waiting()
    begun: list[str] = []

    def bring_up(state: RequestState, **options: object) -> TierLookup:
        begun.append(state.request_id)
        tiers.num_blocks += MOST_LOADED_BLOCKS // 2 + (state.request_id == "large") * MOST_LOADED_BLOCKS
        return TierLookup.HIT_PENDING

    monkeypatch.setattr(tiers, "bring_up", bring_up)
    for name in ("a", "b", "large", "c"):
        waits.add(RequestState.of(request(name, list(range(20)), 4)))
    for num_begun in (2, 3, 4, 4):
        assert waits.is_settled == (num_begun == len(begun) == 4)
        waits.advance(start=True)
        assert len(begun) == num_begun


def test_a_cancelled_load_leaves_no_request_behind() -> None:
    waits, tiers, states = waiting("a", "b")
    waits.forget(states["a"])
    waits.advance(start=True)
    assert tiers.loading == ["b"]
    tiers.loading, tiers.came = [], ["b"]
    waits.advance(start=True)
    assert states["b"].status is RequestStatus.WAITING


def test_what_the_manager_answers() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=8), host_blocks=40)
    for number in range(4):
        engine.add(request(str(number), [10 * number + i for i in range(12)], 1))
        run_all(engine)

    def asked(first: int, num_tokens: int = 13, *, admits: bool = False) -> TierLookup:
        state = RequestState.of(request("asks", range(first, first + num_tokens), 4))
        assert engine.kv.loads is not None
        answer = engine.kv.loads.bring_up(state, start=True, admits=admits)
        assert engine.kv.tiers is not None
        engine.kv.tiers.cancel("asks")
        return answer

    assert asked(30, 12) is TierLookup.HIT
    assert asked(30, 3) is TierLookup.MISS, "no whole block"
    assert asked(70) is TierLookup.MISS
    assert asked(0) is TierLookup.HIT_PENDING
    engine.add(request("runs", range(60, 89), 2))
    engine.step()
    assert [asked(0, admits=admits) for admits in (False, True)] == [TierLookup.RETRY] * 2
    run_all(engine)
    engine.close()


# -- an engine


class Gated(GatedLoads):
    """It has the prompt OLD in its host tier alone."""

    def __init__(self, max_num_seqs: int, *, overlap: bool) -> None:
        self.backend = TokenMemoryBackend(num_blocks=16, max_num_seqs=max_num_seqs)
        engine = fake_engine(self.backend, eviction="lru", host_blocks=60, overlap=overlap)
        serve(engine, request("old", OLD, 1), request("filler", range(36, 97), 1))
        assert resident(engine, OLD) == 0
        super().__init__(engine)

    def state(self, request_id: str) -> RequestState:
        return self.engine._request_table.states[request_id]


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def is_overlapped(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def gated(request: pytest.FixtureRequest, is_overlapped: bool) -> Iterator[Gated]:
    """Parameter: how many requests may run."""
    made = Gated(getattr(request, "param", 8), overlap=is_overlapped)
    yield made
    made.open()
    made.engine.close()


def test_another_request_is_answered_while_one_waits_for_its_kv(gated: Gated) -> None:
    engine = gated.engine
    engine.add(request("a", OLD, 4))
    engine.add(request("b", YOUNG, 4))
    tokens = gated.step_until(lambda: "b" not in engine._request_table.states)
    assert tokens == {"b": gated.expected(YOUNG, 4)}
    assert gated.state("a").status is RequestStatus.WAITING_FOR_KV
    gated.open()
    assert run_all(engine) == {"a": gated.expected(OLD, 4)}
    assert gated.hierarchy.states()[0].loaded == 4
    assert engine.diagnostics().num_kv_waits == 1


@pytest.mark.parametrize("gated", [1], indirect=True)
def test_kv_comes_while_a_request_waits_for_a_row(gated: Gated) -> None:
    engine = gated.engine
    engine.add(request("runs", range(20, 23), 30))
    engine.step()
    engine.add(request("queued", OLD, 4))
    gated.step_until(lambda: gated.num_reads)
    assert gated.state("queued").status is RequestStatus.WAITING_FOR_KV
    gated.open()
    gated.step_until(lambda: gated.state("queued").status is RequestStatus.WAITING)
    assert gated.state("runs").status is RequestStatus.RUNNING
    assert resident(engine, OLD) == 4
    outputs = run_all(engine)
    assert outputs["queued"] == gated.expected(OLD, 4)
    assert gated.hierarchy.states()[0].loaded == 4


def test_loads_that_end_together_are_taken_in_one_by_one_while_nothing_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = TokenMemoryBackend(num_blocks=16)
    engine = fake_engine(backend, eviction="lru", host_blocks=60)
    prompts = {"a": OLD, "b": YOUNG}
    serve(engine, request("old", OLD, 1), request("young", YOUNG, 1), request("filler", range(36, 97), 1))
    assert not any(resident(engine, tokens) for tokens in prompts.values())
    hierarchy: Any = engine.kv.tiers
    hierarchy.most_polled_blocks = 1

    def wait_for_both(timeout_s: float) -> bool:
        until_s = time.monotonic() + 20
        while len(hierarchy._migrator._done) < 2:
            assert time.monotonic() < until_s
            time.sleep(0.001)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(hierarchy, "poll", list)
        patch.setattr(hierarchy, "wait", wait_for_both)
        for name, tokens in prompts.items():
            engine.add(request(name, tokens, 4))
        engine.step()
    [output] = engine.step()
    states = engine._request_table.states
    assert [states[name].status is RequestStatus.WAITING_FOR_KV for name in prompts] == [False, True]
    check_books(engine)
    answers = run_all(engine)
    answers["a"] = [*output.new_token_ids, *answers["a"]]
    assert answers == {name: expected_tokens(backend, prompt, 4) for name, prompt in prompts.items()}
    assert not engine.has_work()
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_loads_of_requests_that_would_be_admitted_begin_in_steps_of_their_own(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without KV in a tier runs at once."""
    monkeypatch.setattr(kv_waits, "MOST_LOADED_BLOCKS", 1)
    backend = TokenMemoryBackend(num_blocks=24)
    engine = fake_engine(backend, eviction="lru", host_blocks=100, overlap=overlap, max_batched_tokens=64)
    prompts = {str(first): range(first, first + 9) for first in (0, 10, 20)}
    olds = [request(f"old {name}", tokens, 1) for name, tokens in prompts.items()]
    serve(engine, *olds, request("filler", range(3, 97), 1))
    prompts = {name: tokens for name, tokens in prompts.items() if not resident(engine, tokens)}
    assert len(prompts) == 3
    hierarchy: Any = engine.kv.tiers
    begin, num_begun, most_begun = hierarchy._begin_load, 0, 0

    def begin_load(*given: Any, **named: Any) -> None:
        nonlocal num_begun
        num_begun += 1
        begin(*given, **named)

    monkeypatch.setattr(hierarchy, "_begin_load", begin_load)
    engine.add(request("runs", range(50, 53), 20))
    engine.step()
    prompts["new"] = range(70, 75)
    for name, tokens in prompts.items():
        engine.add(request(name, tokens, 4))
    answers: dict[str, list[int]] = {}
    while engine.has_work():
        before = num_begun
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
        most_begun = max(most_begun, num_begun - before)
        check_books(engine)
    assert engine.diagnostics().num_kv_waits == 3, "the new one did not wait"
    assert (num_begun, most_begun) == (3, 1)
    for name, tokens in prompts.items():
        assert answers[name] == expected_tokens(backend, tokens, 4)
    engine.close()


@pytest.mark.parametrize("gated", [1, 8], indirect=True)
def test_the_load_of_an_aborted_request_stops(gated: Gated) -> None:
    engine = gated.engine
    engine.add(request("runs", range(20, 23), 20))
    engine.step()
    engine.add(request("goes", OLD, 4))
    gated.step_until(lambda: gated.num_reads)
    free = engine.kv.block_states().free
    assert engine.abort("goes")
    gated.open()
    run_all(engine)
    assert gated.num_reads == 1, "the blocks behind the one that was being read were read too"
    assert resident(engine, OLD) <= 1
    assert engine.kv.block_states().free > free
