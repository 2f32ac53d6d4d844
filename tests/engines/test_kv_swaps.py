"""Hot swaps of the eviction policy on a live engine, and hints and swaps at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.errors import UnknownNameError
from sagellm.engines.build_kv import replace_policy
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import (
    TENANT_A,
    TENANT_B,
    PreemptAtRandom,
    check_books,
    expected_tokens,
    fake_engine,
    request,
    run_all,
)
from tests.effort import examples
from tests.engines.kv_scenes import (
    FILLER,
    INDEXES,
    OLD,
    POLICIES,
    YOUNG,
    hints,
    resident,
    serve,
    session,
    small_engine,
    status,
)


def busy_engine(backend: TokenMemoryBackend, **options: Any) -> Engine:
    """Sessions of two tenants cached, one request running, one waiting."""
    engine = fake_engine(backend, eviction="lru", **options)
    serve(engine, session("old", OLD, namespace=TENANT_A), session("young", YOUNG, namespace=TENANT_B))
    engine.add(request("runs", range(40, 45), 12, namespace=TENANT_A))
    engine.step()
    engine.add(request("waits", OLD, 4, namespace=TENANT_A))
    engine.step()
    return engine


def all_blocks(engine: Engine) -> tuple[list[int], tuple[int, ...], Sequence[int]]:
    index = engine.kv.index
    found = [resident(engine, OLD, TENANT_A), resident(engine, YOUNG, TENANT_B)]
    return sorted(index.all_block_ids()), tuple(engine.kv.block_states()), found


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("shares", [{}, {"a": {"guaranteed": 0.25}}], ids=["shared", "quota"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hot_swap_keeps_the_cache_and_goes_on(policy: str, shares: dict[str, Any], index: str) -> None:
    backend = TokenMemoryBackend(num_blocks=20, max_num_seqs=1)
    engine = busy_engine(backend, tenant_shares=shares, index=index)
    before = all_blocks(engine)
    assert before[2] == [4, 4]
    replace_policy(engine, policy)
    check_books(engine)
    assert all_blocks(engine) == before
    for name in range(6):
        engine.add(request(f"more{name}", [90 - name, *range(11 + name)], 6, namespace=TENANT_B))
    tokens = run_all(engine)
    assert tokens["waits"] == expected_tokens(backend, OLD, 4)
    for name in range(6):
        assert tokens[f"more{name}"] == expected_tokens(backend, [90 - name, *range(11 + name)], 6)


def test_one_policy_after_the_other_on_one_engine() -> None:
    backend = TokenMemoryBackend(num_blocks=16, max_num_seqs=3)
    engine = fake_engine(backend)
    for number, policy in enumerate([*POLICIES, *reversed(POLICIES)]):
        engine.add(request(f"r{number}", [number, *OLD], 5))
        engine.step()
        before = sorted(engine.kv.index.all_block_ids())
        replace_policy(engine, policy)
        check_books(engine)
        assert sorted(engine.kv.index.all_block_ids()) == before
    tokens = run_all(engine)
    last = 2 * len(POLICIES) - 1
    assert tokens[f"r{last}"] == expected_tokens(backend, [last, *OLD], 5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "left"), [("session.end", 0), ("kv.expect", 4)])
def test_hints_survive_a_hot_swap(policy: str, kind: str, left: int) -> None:
    engine = small_engine()
    serve(engine, session("old", OLD), session("young", YOUNG))
    assert status(engine, hints(kind, session_id="young")) == ("applied", 4)
    replace_policy(engine, policy)
    serve(engine, request("filler", FILLER, 1))
    assert (resident(engine, YOUNG), resident(engine, OLD)) == (left, 4 - left)


def test_a_swap_to_what_nobody_knows_changes_nothing() -> None:
    engine = small_engine()
    serve(engine, session("old", OLD), session("young", YOUNG))
    with pytest.raises(UnknownNameError, match="Known: adaptive"):
        replace_policy(engine, "nonsense")
    with pytest.raises(UnknownNameError, match="no option"):
        replace_policy(engine, "lru", wings=2)
    serve(engine, request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (0, 4)


PROMPTS = st.tuples(st.integers(0, 3), st.integers(1, 28)).map(lambda pair: range(pair[0], sum(pair)))
KINDS = ["session.end", "session.supersede", "kv.retain", "kv.expect", "kv.dance"]
TARGETS = st.one_of(
    st.just({}),
    st.builds(lambda name: {"session_id": name}, st.sampled_from(["s0", "s1", "s9"])),
    st.builds(lambda prompt: {"token_ids": list(prompt)}, PROMPTS),
)
HINTS = st.builds(lambda kind, target: hints(kind, **target), st.sampled_from(KINDS), TARGETS)
DEEDS = st.one_of(
    st.tuples(st.just("add"), PROMPTS, st.none() | HINTS),
    st.tuples(st.just("hint"), HINTS),
    st.tuples(st.just("swap"), st.sampled_from(POLICIES)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
)


@settings(max_examples=examples(80))
@given(
    deeds=st.lists(DEEDS, max_size=25),
    index=st.sampled_from(INDEXES),
    shares=st.sampled_from([{}, {"a": {"guaranteed": 0.4}}, {"a": {"ceiling": 0.7}}]),
)
def test_hints_and_swaps_at_any_time_change_no_answer(
    deeds: list[tuple[Any, ...]], index: str, shares: dict[str, Any]
) -> None:
    backend = TokenMemoryBackend(num_blocks=16, max_num_seqs=3)
    options: dict[str, Any] = {"index": index, "tenant_shares": shares, "miss_attribution": True}
    options["passes"] = [PreemptAtRandom(3, 0.1), PrefixCacheAwarePass(), PriorityBasedPass()]
    engine = fake_engine(backend, **options)
    assert isinstance(engine.clock, ManualClock)
    wanted, tokens = {}, dict[str, list[int]]()
    for number, (what, *how) in enumerate(deeds):
        engine.clock.advance(20.0)
        name, tenant = f"r{number}", (TENANT_A, TENANT_B)[number % 2]
        if what == "add":
            one = request(name, how[0], 6, namespace=tenant)
            engine.add(replace(one, session_id=f"s{number % 3}", kv_hints=how[1]))
            wanted[name] = expected_tokens(backend, how[0], 6)
        elif what == "hint":
            engine.hint(how[0], tenant)
        elif what == "swap":
            replace_policy(engine, how[0])
        elif what == "abort":
            wanted.pop(f"r{how[0]}", None)
            engine.abort(f"r{how[0]}")
        for _ in range(how[0] if what == "step" else 0):
            collect(engine, tokens)
        check_books(engine)
    while engine.has_work():
        collect(engine, tokens)
        check_books(engine)
    assert {name: tokens[name] for name in wanted} == wanted


@pytest.mark.parametrize("waits", [True, False])
def test_a_tenant_waits_for_memory_that_another_uses(waits: bool) -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=16))
    engine.add(request("a", range(40), 20, namespace=TENANT_A))
    engine.step()
    engine.add(request("b", range(40, 64 if waits else 44), 20, namespace=TENANT_B))
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        collect(engine, tokens)
    assert [len(tokens[name]) for name in "ab"] == [20, 20]


def collect(engine: Engine, tokens: dict[str, list[int]]) -> None:
    for output in engine.step():
        assert output.error is None
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
