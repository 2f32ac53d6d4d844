"""`TierWrites`: the watermark of write-back, and the room for loads that it makes."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.types import Namespace
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.manager import allocator
from sagellm.kvmgr.manager.writes import TierWrites
from tests.builders import fake_engine, request, run_all, slow_copies

COPY_S = 0.2


def used_engine(**options: Any) -> tuple[Engine, TierWrites]:
    """64 blocks of the device, 50 of them cached by tenant `a`; nothing has been saved."""
    engine = fake_engine(
        TokenMemoryBackend(num_blocks=64, max_model_len=256), host_blocks=256, write_policy="write_back",
        host_gb=1.0, free_watermark=0.05, max_batched_tokens=4, **options,
    )  # fmt: skip
    for index in range(5):
        engine.add(request(f"r{index}", [index + 1] * 40, 1, namespace=Namespace(tenant="a")))
        run_all(engine)
        settle(engine)
    assert engine.kv.writes is not None
    return engine, engine.kv.writes


def settle(engine: Engine) -> None:
    """Wait for all copies."""
    engine.drain()
    assert engine._kv_waits is not None
    engine._kv_waits.settle()


def test_a_load_lacks_room_until_enough_is_saved() -> None:
    engine, writes = used_engine()
    free, evictable = writes.num_free, engine.kv.index.num_evictable
    assert writes.fewest_free <= free
    assert not writes.lacks_room(free)
    assert writes.lacks_room(free + 1)
    assert writes.lacks_room(free + evictable)
    assert not writes.lacks_room(free + evictable + 1), "no save would do"
    slow_copies(engine.kv, COPY_S)
    assert writes.make_room(free + 8), "nothing is free before it is copied"
    assert (writes.num_free, writes.num_leaving) == (free, 8)
    assert writes.lacks_room(free + 8), "blocks on their way out are not free"
    given_back = writes.num_given_back
    assert writes.make_room(free + 8)
    assert writes.num_leaving == 8, "room that comes is not made again"
    settle(engine)
    assert writes.num_given_back > given_back
    assert (writes.num_free, writes.num_leaving) == (free + 8, 0)
    assert not writes.lacks_room(free + 8)
    assert not writes.make_room(free + 8), "there is room already"
    engine.close()


def test_room_is_made_in_parts_where_paths_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tier has already is free at once, and still no more goes unsaved than has to."""
    engine, writes = used_engine()
    writes.make_room(64)
    settle(engine)
    assert writes.num_free == 64
    for index in range(5):
        engine.add(request(f"again {index}", [index + 1] * 40, 1, namespace=Namespace(tenant="a")))
        run_all(engine)
    settle(engine)
    free = writes.num_free
    assert free == 14
    monkeypatch.setattr(allocator, "MAX_PATH_BLOCKS", 1)
    num_calls = 0
    while writes.make_room(free + 24):
        assert writes.num_leaving == 0
        num_calls += 1
        assert writes.num_free == free + 4 * num_calls, "a first portion of each round"
    assert (num_calls, writes.num_free) == (5, free + 24)
    engine.close()


def test_no_more_is_evicted_than_tiers_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, writes = used_engine()
    free = writes.num_free
    monkeypatch.setattr(type(writes.tiers), "num_acceptable", 3)
    slow_copies(engine.kv, COPY_S)
    assert writes.make_room(free + 8)
    assert writes.num_leaving == 3
    monkeypatch.setattr(type(writes.tiers), "num_acceptable", 0)
    writes.make_room(free + 8)
    assert writes.num_leaving == 3
    settle(engine)
    engine.close()


def test_blocks_that_are_guaranteed_are_not_evicted_for_a_watermark() -> None:
    """What may go is evicted though not all that was asked for may."""
    engine, writes = used_engine(tenant_shares={"a": {"guaranteed": 0.5}})
    free, evictable = writes.num_free, engine.kv.index.num_evictable
    above = evictable - 32
    assert above == 18
    writes.make_room(free + evictable)
    settle(engine)
    assert 0 < writes.num_free - free <= above
    free = writes.num_free
    for _ in range(8):
        writes.make_room(free + 8)
        settle(engine)
    assert engine.kv.index.num_evictable >= 32
    engine.check()
    engine.close()


def test_an_account_with_all_it_has_guaranteed_loses_nothing() -> None:
    engine, writes = used_engine(tenant_shares={"a": {"guaranteed": 1.0}})
    free, evictable = writes.num_free, engine.kv.index.num_evictable
    assert not writes.make_room(free + 8)
    assert (writes.num_free, writes.num_leaving, engine.kv.index.num_evictable) == (free, 0, evictable)
    engine.close()
