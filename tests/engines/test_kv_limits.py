"""What a client or a setting must not be able to do to retention."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.errors import ConfigError
from sagellm.core.kv_hints import KVHintAction, KVHintsEnvelope
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.build_kv import build_kv, replace_policy
from sagellm.kvmgr.eviction.adaptive.history import _level
from sagellm.kvmgr.eviction.adaptive.reuse_model import NUM_AGES, age_bin
from sagellm.kvmgr.eviction.lru import LRUPolicy
from sagellm.kvmgr.manager import hints as hints_module
from sagellm.kvmgr.manager.hints import EXPECTED_FOR_S, KVHints
from sagellm.kvmgr.prefix_cache.radix import RadixIndex
from tests.builders import fake_engine


def test_an_expectation_ends() -> None:
    clock = ManualClock()
    index = RadixIndex(block_size=1, policy_factory=LRUPolicy, clock=clock)
    hints = KVHints(index, lambda namespace: namespace, clock.now)
    for first in (0, 10):
        index.insert(Tokens(range(first, first + 4)), range(first, first + 4))
    expect = KVHintAction("a", "kv.expect", payload={"token_ids": [0, 1, 2, 3]})
    (outcome,) = hints.apply(KVHintsEnvelope("0.1", "m", (expect,)), Namespace())
    assert outcome.num_blocks == 4
    assert index.evict(2) is not None
    assert index.lookup(Tokens(range(4))).num_blocks == 4
    clock.advance(EXPECTED_FOR_S)
    hints.expect(())
    assert index.evict(2) is not None
    assert index.lookup(Tokens(range(4))).num_blocks == 2


def test_expectations_are_bounded_and_may_be_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints_module, "MAX_EXPECTED", 2)
    clock = ManualClock()
    index = RadixIndex(block_size=1, policy_factory=LRUPolicy, clock=clock)
    hints = KVHints(index, lambda namespace: namespace, clock.now)
    for first in (0, 10, 20):
        index.insert(Tokens([first, first + 1]), [first, first + 1])

    def expect(first: int) -> None:
        payload = {"token_ids": [first, first + 1]}
        action = KVHintAction("a", "kv.expect", payload=payload)
        hints.apply(KVHintsEnvelope("0.1", "m", (action,)), Namespace())

    def wanted() -> list[bool]:
        nodes: list[Any] = [index.lookup(Tokens([first, first + 1])).node for first in (0, 10, 20)]
        return [bool(node.hint is not None and node.hint.expected) for node in nodes]

    for first in (0, 10, 20):
        expect(first)
    assert wanted() == [False, True, True]
    clock.advance(EXPECTED_FOR_S / 2)
    expect(10)
    clock.advance(EXPECTED_FOR_S / 2)
    hints.expect(())
    assert wanted() == [False, True, False]


@pytest.mark.parametrize(
    "options",
    [{"max_regret": "x"}, {"max_regret": -1.0}, {"stake": float("nan")}, {"max_records": 0}, {"capacity": 5}],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_built(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build_kv(KVConfig(eviction_options=options), 10)


def test_a_swap_that_fails_changes_nothing() -> None:
    engine = fake_engine()
    engine.kv.index.insert(Tokens(range(8)), [0, 1])
    with pytest.raises(ConfigError):
        replace_policy(engine, "adaptive", max_regret="x")
    with pytest.raises(StopIteration):
        engine.set_policy(lambda: next(iter(())))
    engine.kv.index.insert(Tokens(range(20, 28)), [2, 3])
    assert engine.kv.index.evict(4) is not None


def test_times_and_lengths_without_end_are_levels_too() -> None:
    assert _level(10**400, 6) == 6
    assert age_bin(float("inf")) == NUM_AGES - 1
