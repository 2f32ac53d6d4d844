"""KV hints and tiers: what is expected comes up before its request, what has ended is evicted there first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.core.types import NO_ACCOUNT, Account, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.simulator.token_memory import TokenBytes
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from tests.builders import TENANT_A, TENANT_B, expected_tokens, fake_engine, run_all
from tests.engines.kv_scenes import NOBODY, hints, resident, serve, session, status


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
