"""Eviction policies and strategies that are replaced while requests run: the same tokens, balanced books."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.build import replace_strategy
from sagellm.engines.build_kv import replace_policy
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.eviction.lru import LRUPolicy
from sagellm.kvmgr.scheduler_ir import strategies
from tests.builders import check_books, expected_tokens, fake_engine, request, run_all
from tests.effort import examples
from tests.engines.kv_scenes import INDEXES, POLICIES

STRATEGIES = sorted(strategies.STRATEGIES)
QUOTAS: dict[str, Any] = {
    "tenant_shares": {"a": {"guaranteed": 0.25, "ceiling": 0.75}, "b": {"guaranteed": 0.25}}
}


def busy_engine(backend: TokenMemoryBackend, index: str, quotas: dict[str, Any], **options: Any) -> Engine:
    """Twelve requests of three tenants, four prompts that share prefixes, more than the pool holds."""
    engine = fake_engine(backend, index=index, **quotas, **options)
    for number in range(12):
        start = 40 * (number % 4)
        tenant = Namespace(tenant=("", "a", "b")[number % 3])
        engine.add(request(str(number), range(start, start + 9 + number), 6, namespace=tenant))
    return engine


def expected(backend: TokenMemoryBackend) -> dict[str, list[int]]:
    prompts = {str(n): range(40 * (n % 4), 40 * (n % 4) + 9 + n) for n in range(12)}
    return {name: expected_tokens(backend, prompt, 6) for name, prompt in prompts.items()}


def run_with(engine: Engine, actions: list[Any]) -> dict[str, list[int]]:
    """One action between any two steps, until all requests have ended."""
    tokens: dict[str, list[int]] = {}
    for step in range(1000):
        if not engine.has_work():
            return tokens
        if actions:
            actions[step % len(actions)]()
            check_books(engine)
        for output in engine.step():
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        check_books(engine)
    raise AssertionError("1,000 steps were not enough")


@pytest.mark.parametrize("quotas", [{}, QUOTAS], ids=["one account", "quotas"])
@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_takes_over_a_busy_cache(policy: str, index: str, quotas: dict[str, Any]) -> None:
    """It chooses among what was cached, pinned and shared before it came, and can be replaced in turn."""
    backend = TokenMemoryBackend(vocab_size=512, num_blocks=40)
    engine = busy_engine(backend, index, quotas, eviction="lru")
    for _ in range(4):
        engine.step()
    pinned = engine.pin_prefix(Tokens(range(40, 48)), Namespace(tenant="a"))
    engine.abort("1")
    replace_policy(engine, policy)
    check_books(engine)
    run_all(engine)
    for number in range(3):  # all that was cached before has to go
        engine.add(request(f"new{number}", range(200 + 60 * number, 257 + 60 * number), 2))
        run_all(engine)
    pinned.release()
    check_books(engine)
    replace_policy(engine, "sieve")
    num_cached = engine.stats().blocks_cached
    assert engine.clear_cache() == num_cached > 0
    check_books(engine)
    assert engine.stats().blocks_free == 40


@settings(max_examples=examples(40))
@given(data=st.data(), index=st.sampled_from(INDEXES), quotas=st.sampled_from([{}, QUOTAS]))
def test_the_same_tokens_whatever_is_replaced_when(
    data: st.DataObject, index: str, quotas: dict[str, Any]
) -> None:
    backend = TokenMemoryBackend(vocab_size=512, num_blocks=data.draw(st.integers(24, 60)))
    engine = busy_engine(backend, index, quotas)

    def replace() -> None:
        kind = data.draw(st.sampled_from(["policy", "strategy", "clear", "nothing"]))
        if kind == "policy":
            replace_policy(engine, data.draw(st.sampled_from(POLICIES)))
        elif kind == "strategy":
            replace_strategy(engine, data.draw(st.sampled_from(STRATEGIES)))
        elif kind == "clear":
            engine.clear_cache()

    assert run_with(engine, [replace]) == expected(backend)


@pytest.mark.parametrize("index", INDEXES)
def test_a_policy_that_refuses_what_is_cached_does_not_take_over(index: str) -> None:
    class Refuses(LRUPolicy):
        def insert(self, extent: Any) -> None:
            if num_made > 1:
                raise RuntimeError("not this one")
            super().insert(extent)

    num_made = 0

    def factory() -> EvictionPolicy:
        nonlocal num_made
        num_made += 1
        return Refuses()

    backend = TokenMemoryBackend(vocab_size=512, num_blocks=40)
    engine = busy_engine(backend, index, QUOTAS)
    for _ in range(8):
        engine.step()
    with pytest.raises(RuntimeError, match="not this one"):
        engine.set_policy(factory)
    check_books(engine)
    assert not any(isinstance(policy, Refuses) for policy in policies_of(engine))
    run_all(engine)


def policies_of(engine: Engine) -> list[Any]:
    index: Any = engine.kv.index
    return [share.policy for share in index._leaves.shares.values()]


def test_unknown_names_are_answered_with_the_list() -> None:
    engine = fake_engine()
    with pytest.raises(UnknownNameError, match=r"unknown policy 'lruu'.*Known: adaptive.*two_q"):
        replace_policy(engine, "lruu")
    with pytest.raises(UnknownNameError, match=r"'fiffo'.*Did you mean 'fifo'\?.*Known: adaptive.*vllm-like"):
        replace_strategy(engine, "fiffo")
    with pytest.raises(UnknownNameError, match="no option 'foo'"):
        replace_policy(engine, "lru", foo=1)
    with pytest.raises(UnknownNameError, match="no pass 'fairness'"):
        replace_strategy(engine, "fifo", fairness={})
    with pytest.raises(ConfigError, match="capacity is given by the engine"):
        replace_policy(engine, "lru", capacity=1)


WRONG: tuple[Any, ...] = ("x", -1, [], {}, None, 10**400, True, {"a": "b"}, 0, [[]], 1e308)


@pytest.mark.parametrize("kind", ["policy", "pass"])
def test_no_value_of_an_option_fails_later_than_at_once(kind: str) -> None:
    """Whatever JSON can hold: either it is refused, or the engine runs with it."""
    plugins = registry(kind)
    for name, option in [(one, option) for one in plugins.names() for option in plugins.options(one)]:
        for value in WRONG:
            engine = fake_engine(TokenMemoryBackend(vocab_size=512, num_blocks=16))
            try:
                if kind == "policy":
                    replace_policy(engine, name, **{option: value})
                else:
                    engine.set_passes([strategies.make_pass(name, {option: value})])
            except (ConfigError, UnknownNameError):
                continue
            for number in range(8):
                engine.add(request(str(number), range(number % 3, 10 + number), 5, priority=number % 4))
            run_all(engine)


def test_options_of_the_right_type_are_taken() -> None:
    engine = fake_engine()
    replace_strategy(engine, "fair", fairness={"weights": {"a": 2, "b": 0.5}, "quantum": 100})
    replace_strategy(engine, "slo", slo_aware={"ttft_s": None, "tpot_s": 1})
    engine.set_passes([strategies.make_pass("lifetime_aware", {"predictor": "statistical"})])
    with pytest.raises(ConfigError, match="weights"):
        replace_strategy(engine, "fair", fairness={"weights": {"a": math.nan}})
