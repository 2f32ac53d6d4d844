"""`KVWaits`: no request waits for KV that does not come."""

from __future__ import annotations

from typing import Any

from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_tiers import TierLookup
from sagellm.core.types import RequestStatus
from sagellm.engines.kv_waits import KVWaits
from sagellm.engines.request_table import RequestTable
from sagellm.kvmgr.scheduler_ir import DecodeBatch
from tests.builders import request


class Tiers:
    """Tiers that bring up one request at a time; with `is_deep` there is always more."""

    is_idle = True

    def __init__(self) -> None:
        self.loading: list[str] = []
        self.came: list[str] = []
        self.whole: set[str] = set()
        self.is_deep = False

    def bring_up(self, state: RequestState, *, start: bool, admits: bool, splits: bool = False) -> TierLookup:
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

    def cancel(self, request_id: str) -> None:
        if request_id in self.loading:
            self.loading.remove(request_id)


def waiting(*names: str) -> tuple[KVWaits, Tiers, dict[str, RequestState]]:
    table, tiers = RequestTable(4, DecodeBatch(97, 4), 64), Tiers()
    found: Any = tiers
    waits, states = KVWaits(table, found, found), {}
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


def test_a_cancelled_load_leaves_no_request_behind() -> None:
    waits, tiers, states = waiting("a", "b")
    waits.forget(states["a"])
    waits.advance(start=True)
    assert tiers.loading == ["b"]
    tiers.loading, tiers.came = [], ["b"]
    waits.advance(start=True)
    assert states["b"].status is RequestStatus.WAITING
