"""KV hints and tiers: what is expected comes up before its request, what has ended is evicted there first."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.kv_hints import HintStatus
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.types import NO_ACCOUNT, Account, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.simulator.token_memory import TokenBytes
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.manager.hints import EXPECTED_FOR_S, LOAD_MARGIN_S, KVHints
from tests.builders import TENANT_A, TENANT_B, expected_tokens, fake_engine, request, run_all
from tests.engines.kv_scenes import (
    FILLER,
    NOBODY,
    OLD,
    YOUNG,
    hints,
    resident,
    serve,
    session,
    small_engine,
    status,
)


def engine_with(host_blocks: int, *, overlap: bool = False) -> Engine:
    backend = TokenMemoryBackend(num_blocks=12)
    return fake_engine(backend, host_blocks=host_blocks, eviction="lru", overlap=overlap)


def in_tier(engine: Engine, tokens: range) -> int:
    assert isinstance(engine.kv.tiers, HierarchyManager)
    return engine.kv.tiers.tiers[0].lookup(Tokens(tokens), NOBODY).num_blocks


@pytest.mark.parametrize("overlap", [False, True])
def test_an_expected_session_comes_up_while_nothing_runs(overlap: bool) -> None:
    engine = engine_with(40, overlap=overlap)
    serve(engine, session("old", range(17)))
    for number in range(1, 4):
        serve(engine, session(f"new {number}", range(20 * number, 20 * number + 25)))
    assert resident(engine, range(17)) == 0
    assert status(engine, hints("kv.expect", session_id="old")) == ("applied", 4)
    run_all(engine)
    assert resident(engine, range(17)) == 4
    assert status(engine, hints("kv.expect", session_id="gone")) == ("not_found", 0)
    assert not engine.has_work()
    engine.close()


def test_an_ended_session_leaves_the_tier_first() -> None:
    engine = engine_with(12)
    serve(engine, session("old", range(17)))
    serve(engine, session("ended", range(20, 37)))
    assert status(engine, hints("session.end", session_id="ended"))[0] == "applied"
    serve(engine, session("new", range(60, 89)))
    assert (in_tier(engine, range(17)), in_tier(engine, range(20, 37))) == (4, 1)
    engine.close()


def with_old_in_the_tier(*, overlap: bool = False) -> Engine:
    """The session `old` is in the tier alone."""
    engine = engine_with(60, overlap=overlap)
    serve(engine, session("old", OLD), session("young", YOUNG))
    serve(engine, request("filler", range(56, 96), 1))
    assert resident(engine, OLD) == 0
    return engine


def let_pass(engine: Engine, seconds: float) -> None:
    assert isinstance(engine.clock, ManualClock)
    engine.clock.advance(seconds)


def test_what_has_come_up_is_evicted_last() -> None:
    """It was not on the device when it was expected."""
    engine = with_old_in_the_tier()
    assert status(engine, hints("kv.expect", session_id="old")) == ("applied", 4)
    run_all(engine)
    serve(engine, session("young", YOUNG), request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (4, 0)
    let_pass(engine, EXPECTED_FOR_S + 1)
    serve(engine, session("young", YOUNG), request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (0, 4)
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("target", [{"session_id": "old"}, {"token_ids": list(OLD)}])
def test_what_is_expected_later_comes_up_shortly_before(overlap: bool, target: dict[str, Any]) -> None:
    engine = with_old_in_the_tier(overlap=overlap)
    assert engine.idle_s() is None
    assert status(engine, hints("kv.expect", in_s=30, **target)) == ("applied", 4)
    assert engine.kv.tiers is not None
    load_s = engine.kv.tiers.slowest_load_s(Tokens(OLD), NOBODY)
    assert engine.idle_s() == pytest.approx(30 - LOAD_MARGIN_S - load_s)
    assert 0 < load_s < 0.5
    assert not engine.has_work()
    let_pass(engine, 28)
    serve(engine, session("other", range(40, 57)))
    assert resident(engine, OLD) == 0
    let_pass(engine, 1)
    assert engine.has_work()
    run_all(engine)
    assert resident(engine, OLD) == 4
    assert engine.idle_s() is None
    let_pass(engine, EXPECTED_FOR_S - 1)
    serve(engine, session("young", YOUNG), request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (4, 0)
    engine.close()


@pytest.mark.parametrize(
    ("kind", "payload", "idle_s"),
    [
        ("session.end", {}, None),
        ("session.supersede", {}, None),
        ("kv.expect", {}, None),
        ("kv.expect", {"in_s": 600}, 600),
        ("kv.retain", {}, 30),
    ],
)
def test_a_later_hint_replaces_what_is_expected(
    kind: str, payload: dict[str, Any], idle_s: float | None
) -> None:
    engine = with_old_in_the_tier()
    status(engine, hints("kv.expect", session_id="old", in_s=30))
    assert status(engine, hints(kind, session_id="old", **payload))[0] == "applied"
    run_all(engine)
    assert engine.idle_s() == (None if idle_s is None else pytest.approx(idle_s - LOAD_MARGIN_S, abs=0.5))
    assert resident(engine, OLD) == (4 if kind == "kv.expect" and not payload else 0)
    engine.close()


def test_a_session_that_has_come_is_expected_no_more() -> None:
    engine = with_old_in_the_tier()
    status(engine, hints("kv.expect", session_id="old", in_s=30))
    serve(engine, session("old", OLD))
    assert engine.idle_s() is None
    serve(engine, session("old", OLD, kv_hints=hints("kv.expect", in_s=30)))
    assert engine.idle_s() == pytest.approx(30 - LOAD_MARGIN_S, abs=0.5)
    assert status(engine, hints("session.end", session_id="old"))[0] == "applied"
    assert engine.idle_s() is None
    engine.close()


def test_a_load_stops_when_its_session_ends() -> None:
    engine = with_old_in_the_tier()
    status(engine, hints("kv.expect", session_id="old"))
    assert engine.has_work()
    status(engine, hints("session.end", session_id="old"))
    run_all(engine)
    assert resident(engine, OLD) == 0
    engine.close()


def test_the_tier_keeps_what_is_expected_later() -> None:
    """And no longer than that: afterwards it goes as others do."""
    for is_over in (False, True):
        engine = engine_with(12)
        serve(engine, session("old", OLD), session("young", YOUNG))
        assert status(engine, hints("kv.expect", session_id="old", in_s=30)) == ("applied", 4)
        if is_over:
            let_pass(engine, 30)
            run_all(engine)
            let_pass(engine, EXPECTED_FOR_S + 1)
        serve(engine, session("new", range(60, 81)))
        assert in_tier(engine, OLD) == (3 if is_over else 4)
        engine.close()


def test_without_tiers_it_goes_last_from_then_on() -> None:
    for passed_s, kept in ((0, YOUNG), (30, OLD)):
        engine = small_engine()
        serve(engine, session("old", OLD), session("young", YOUNG))
        assert status(engine, hints("kv.expect", session_id="old", in_s=30)) == ("applied", 4)
        let_pass(engine, passed_s)
        run_all(engine)
        serve(engine, request("filler", FILLER, 1))
        assert (resident(engine, OLD) == 4, resident(engine, YOUNG) == 4) == (kept is OLD, kept is YOUNG)
        engine.close()


def test_an_ended_session_is_expected_no_more() -> None:
    engine = small_engine()
    serve(engine, session("old", OLD), session("young", YOUNG))
    for kind in ("kv.expect", "session.end"):
        assert status(engine, hints(kind, session_id="young")) == ("applied", 4)
    serve(engine, request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (4, 0)


def test_of_too_many_that_are_expected_the_last_are_dropped() -> None:
    engine = with_old_in_the_tier()
    kv = engine.kv
    kv.hints = KVHints(kv.index, kv.namespace_of, engine.clock.now, tiers=kv.tiers, max_tokens=20)
    assert status(engine, hints("kv.expect", token_ids=list(OLD), in_s=100))[0] == "applied"
    [outcome] = engine.hint(hints("kv.expect", token_ids=list(range(56, 73)), in_s=200), NOBODY)
    assert outcome.status is HintStatus.INVALID
    assert outcome.reason == "too much is expected before it: say so again when it is nearer"
    assert engine.idle_s() == pytest.approx(99, abs=0.5)
    assert status(engine, hints("kv.expect", token_ids=list(range(56, 73)), in_s=50))[0] == "applied"
    assert engine.idle_s() == pytest.approx(49, abs=0.5)
    let_pass(engine, 200)
    run_all(engine)
    assert resident(engine, OLD) == 0
    engine.close()


@pytest.mark.parametrize("in_s", [-1, math.nan, math.inf, 10**300, 7 * 24 * 3600 + 1, True, "soon", None, []])
def test_a_time_that_makes_no_sense_is_refused(in_s: Any) -> None:
    engine = with_old_in_the_tier()
    [outcome] = engine.hint(hints("kv.expect", session_id="old", in_s=in_s), NOBODY)
    assert outcome.status is HintStatus.INVALID
    assert outcome.reason == "in_s must be a number from 0 to 604800"
    assert (engine.idle_s(), engine.has_work()) == (None, False)
    engine.close()


def test_what_another_tenant_has_cannot_be_expected() -> None:
    engine = with_old_in_the_tier()
    for target in ({"session_id": "old"}, {"token_ids": list(OLD)}):
        assert status(engine, hints("kv.expect", in_s=30, **target), TENANT_A) == ("not_found", 0)
    assert engine.idle_s() is None
    engine.close()


class LoadsFirst(TokenMemoryBackend):
    """A step with `is_slow` computes only after a load has written a block, if one does so within 0.2 s."""

    def __init__(self) -> None:
        super().__init__(num_blocks=12)
        self.is_slow = False
        self.has_loaded = threading.Event()

    def kv_bytes(self) -> TokenBytes:
        has_loaded = self.has_loaded

        class Noting(TokenBytes):
            def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
                super().write_blocks(block_ids, data)
                has_loaded.set()

        return Noting(self._memory, self._capability.block_size)

    def execute(self, plan: ExecutionPlan) -> StepResult:
        if self.is_slow:
            self.has_loaded.wait(0.2)
        return super().execute(plan)


def test_what_an_ended_request_expects_loads_behind_the_step_that_still_has_it() -> None:
    """The step in flight writes a dropped token of the request into the block that it has given back."""
    backend = LoadsFirst()
    engine = fake_engine(backend, host_blocks=40, eviction="lru", overlap=True)
    old, own = range(17), range(70, 79)
    serve(engine, session("old", old))
    for number in range(1, 4):
        serve(engine, session(f"new {number}", range(20 * number, 20 * number + 25)))
    assert resident(engine, old) == 0
    end = expected_tokens(backend, own, 2)[1]
    expects = hints("kv.expect", session_id="old")
    engine.add(session("ends", own, 8, stop_token_ids=(end,), kv_hints=expects))
    backend.is_slow = True
    backend.has_loaded.clear()
    run_all(engine)
    backend.is_slow = False
    assert resident(engine, old) == 4
    engine.add(session("again", old, 3))
    assert run_all(engine) == {"again": expected_tokens(backend, old, 3)}
    engine.close()


def shared_engine(ceiling: float) -> Engine:
    """Tenant "b" has at most this part of the device, and three sessions of four blocks in host memory."""
    shares = {"b": {"ceiling": ceiling}}
    engine = fake_engine(
        TokenMemoryBackend(num_blocks=12), host_blocks=60, eviction="lru", tenant_shares=shares
    )
    for number in range(3):
        serve(engine, session(f"b{number}", range(17 * number, 17 * number + 17), namespace=TENANT_B))
    for tokens in (range(60, 85), range(84, 59, -1)):
        serve(engine, session("a", tokens, namespace=TENANT_A))
    return engine


def test_what_a_tenant_expects_is_charged_to_it() -> None:
    engine = shared_engine(0.5)
    quota = engine.kv.quota
    assert quota is not None
    for number in range(3):
        engine.hint(hints("kv.expect", session_id=f"b{number}"), TENANT_B)
        run_all(engine)
        assert quota.used(Account("b")) == (6 if number else 4)
    assert quota.used(NO_ACCOUNT) == 6, "tenants without a share are charged together"
    expects = hints("kv.expect", session_id="b0")
    engine.add(session("c", range(90, 97), 1, namespace=TENANT_B, kv_hints=expects))
    run_all(engine)
    assert quota.used(Account("b")) <= 6
    engine.close()


def test_what_is_expected_leaves_room_for_what_runs() -> None:
    """Four blocks could be evicted, and the running request may need one of them."""
    engine = engine_with(40)
    serve(engine, session("old", range(17)))
    for first in (20, 45):
        serve(engine, session("new", range(first, first + 25)))
    engine.add(session("runs", range(65, 97), 8))
    engine.step()
    for expected in (0, 4):
        engine.hint(hints("kv.expect", session_id="old"), NOBODY)
        moves = engine.kv.tiers
        assert moves is not None
        while not moves.is_idle:
            moves.start_loads()
            moves.wait(1.0)
            moves.poll()
        assert resident(engine, range(17)) == expected
        run_all(engine)
    engine.close()
