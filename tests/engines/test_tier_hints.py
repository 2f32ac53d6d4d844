"""KV hints and tiers: what is expected comes up before its request, what has ended is evicted there first."""

from __future__ import annotations

import pytest

from sagellm.core.types import Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from tests.builders import fake_engine, run_all
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
