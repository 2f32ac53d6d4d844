"""Approximate reuse: what is copied and counted, and that exact requests never see it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sagellm.core.errors import UnsupportedParameterError
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import NO_ACCOUNT, Namespace, RequestOutput, Tokens
from sagellm.engines import approximate as approximate_module
from sagellm.engines.approximate import MAX_RUNS, ApproximateReuse
from sagellm.engines.engine import Engine
from sagellm.kvmgr.manager.tables import INDEX_OWNER
from tests.approximate_memory import ApproximateMemory, check_index
from tests.builders import PreemptAtRandom, check_books, expected_tokens, fake_engine, request
from tests.effort import examples

TEXT, OTHER = list(range(20, 60)), list(range(60, 96))


def engine_of(recompute_tokens: int = 4, **options: Any) -> Engine:
    backend = ApproximateMemory(**{"max_model_len": 256, **options.pop("backend", {})})
    return fake_engine(backend, recompute_tokens=recompute_tokens, **options)


def reuse_of(engine: Engine) -> ApproximateReuse:
    assert engine._approximate is not None
    return engine._approximate


def ask(engine: Engine, name: str, tokens: Iterable[int], **options: Any) -> RequestOutput:
    """The last output of a request, with all its tokens. "~" asks for approximate reuse."""
    engine.add(request(name, tokens, approximate_reuse=name.startswith("~"), **options))
    drawn: tuple[int, ...] = ()
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            if output.request_id == name:
                drawn += output.new_token_ids
                last = output
        check_books(engine)
        check_index(engine)
    return last._replace(new_token_ids=drawn)


def exact(engine: Engine, tokens: Iterable[int]) -> list[int]:
    assert isinstance(engine.backend, ApproximateMemory)
    return expected_tokens(engine.backend, tokens, 4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"index_as_computed": True}, {"index": "hashed"}, {"host_blocks": 64}]
)
def test_text_at_another_position_is_copied(overlap: bool, options: dict[str, Any]) -> None:
    engine = engine_of(overlap=overlap, **options)
    prompt = [7, 8, *TEXT, 9]
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])
    moved = ask(engine, "~moved", prompt)
    assert (moved.num_approximate_tokens, moved.num_cached_tokens) == (28, 0)
    assert engine.diagnostics().num_approximate_tokens == 28
    assert list(moved.new_token_ids) != exact(engine, prompt)
    again = ask(engine, "exact", prompt)
    assert list(again.new_token_ids) == exact(engine, prompt)
    assert (again.num_approximate_tokens, again.num_cached_tokens) == (0, 8)
    reuse = engine.stats().reuse
    assert reuse is not None
    assert reuse.num_hit_tokens == 8
    engine.close()


def test_it_is_asked_for_and_allowed() -> None:
    engine = engine_of()
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])
    assert list(ask(engine, "plain", [7, 8, *TEXT]).new_token_ids) == exact(engine, [7, 8, *TEXT])
    with pytest.raises(UnsupportedParameterError, match=r"kv\.approximate_reuse"):
        fake_engine().add(request("~r", [1], approximate_reuse=True))


def test_another_tenant_finds_nothing() -> None:
    engine = engine_of(sharing_groups={"g": ("a", "c")})
    for tenant in "abc":
        ask(engine, f"~first {tenant}", [90], namespace=Namespace(tenant))
    ask(engine, "source", [1, 2, 3, *TEXT], namespace=Namespace("a"))
    found = {}
    for number, tenant in enumerate("abc"):
        asked = ask(engine, f"~{tenant}", [number, 7, *TEXT], namespace=Namespace(tenant))
        found[tenant] = asked.num_approximate_tokens
    assert found == {"a": 28, "b": 0, "c": 28}
    assert ask(engine, "~none", [7, 7, *TEXT]).num_approximate_tokens == 0


def test_prompts_are_observed_once_their_tenant_has_asked() -> None:
    engine = engine_of()
    ask(engine, "early", [1, 2, 3, *TEXT])
    assert ask(engine, "~first", [7, *TEXT]).num_approximate_tokens == 0
    assert ask(engine, "~second", [8, 8, *TEXT]).num_approximate_tokens > 0


def test_evicted_text_is_computed_and_found_again_later() -> None:
    engine = engine_of()
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])
    engine.clear_cache()
    assert list(ask(engine, "~gone", [7, *TEXT]).new_token_ids) == exact(engine, [7, *TEXT])
    assert ask(engine, "~back", [8, 8, *TEXT]).num_approximate_tokens > 0


def test_evicted_text_hides_no_other() -> None:
    engine = engine_of()
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])
    ask(engine, "hides", [7, *TEXT])  # its slice of 7 and more is found first
    engine.clear_cache()
    ask(engine, "source again", [1, 2, 3, *TEXT])
    assert ask(engine, "~moved", [7, *TEXT, 8]).num_approximate_tokens == 28


def test_a_source_that_is_half_evicted_serves_its_head() -> None:
    engine = engine_of()
    ask(engine, "~first", [90])
    source = ask(engine, "source", [1, 2, 3, *TEXT])
    hit = engine.kv.index.lookup(Tokens([1, 2, 3, *TEXT, *source.new_token_ids]))
    engine.kv.pool.take_back(INDEX_OWNER, engine.kv.index.evict_tail(hit, 5), NO_ACCOUNT)
    assert ask(engine, "~half", [7, *TEXT]).num_approximate_tokens == 12
    assert len(reuse_of(engine)._registries[Namespace()]) == 3


def test_what_is_computed_again_is_all_of_a_short_text() -> None:
    engine = engine_of(recompute_tokens=20)
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT[:36]])
    asked = ask(engine, "~short", [7, *TEXT[:36]])
    assert list(asked.new_token_ids) == exact(engine, [7, *TEXT[:36]])


def test_several_texts_of_several_sources() -> None:
    engine = engine_of(recompute_tokens=2)
    ask(engine, "~first", [90])
    ask(engine, "one", [1, 2, 3, *TEXT])
    ask(engine, "two", [4, *OTHER])
    moved = ask(engine, "~both", [7, *OTHER, 8, 9, *TEXT, *OTHER])
    assert moved.num_approximate_tokens == 30 + 34 + 30


@pytest.mark.parametrize("options", [{"group": "g"}, {"prompt_logprobs": 0}])
def test_some_requests_are_exact_all_the_same(options: dict[str, Any]) -> None:
    engine = engine_of()
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])
    if "prompt_logprobs" in options:
        features = engine._capability.features | {"prompt_logprobs"}
        object.__setattr__(engine._capability, "features", features)
    asked = ask(engine, "~r", [7, *TEXT], **options)
    assert list(asked.new_token_ids) == exact(engine, [7, *TEXT])


def test_a_fork_shares_what_is_exact() -> None:
    engine = engine_of()
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])
    engine.add(request("~r", [7, *TEXT], 12, approximate_reuse=True))
    while not engine._request_table.decodes.states:
        engine.step()
    engine.fork("~r", "fork")
    prompt = engine._request_table.states["fork"].tokens.tolist()
    found: dict[str, list[int]] = {"~r": [], "fork": []}
    while engine.has_work():
        for output in engine.step():
            found[output.request_id] += output.new_token_ids
        check_books(engine)
        check_index(engine)
    assert isinstance(engine.backend, ApproximateMemory)
    assert found["fork"] == expected_tokens(engine.backend, prompt, 12)


def test_a_preempted_request_starts_anew() -> None:
    engine = engine_of(passes=None)
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])
    engine.add(request("~r", [7, *TEXT], approximate_reuse=True))
    state = engine._request_table.states["~r"]
    while not state.decoding:
        engine.step()
    engine._preempt(state)
    check_books(engine)
    while engine.has_work():
        engine.step()
        check_books(engine)
        check_index(engine)
    assert isinstance(engine.backend, ApproximateMemory)
    assert (state.num_approximate, engine.backend.num_copied) == (28, 28 + 20)  # 8 are an exact prefix then


def test_without_room_the_text_is_computed() -> None:
    engine = engine_of(backend={"num_blocks": 14, "max_model_len": 50})
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT], max_tokens=1)
    asked = ask(engine, "~r", [7, *TEXT], max_tokens=1)
    assert asked.num_approximate_tokens == 0
    assert list(asked.new_token_ids) == exact(engine, [7, *TEXT])[:1]


def test_kv_is_copied_between_steps() -> None:
    """The backend refuses it while a step is in flight, which with overlap is nearly always."""
    engine = engine_of(overlap=True)
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])
    engine.add(request("decodes", [50, 51], 60))
    for _ in range(4):
        engine.step()
    assert engine._in_flight is not None
    assert ask(engine, "~r", [7, *TEXT]).num_approximate_tokens == 28
    engine.close()


def test_text_that_is_evicted_before_it_is_copied_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of()
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])
    engine.add(request("~r", [7, *TEXT], approximate_reuse=True))
    engine.step()
    assert engine._request_table.limited
    engine.clear_cache()
    drawn = [token for _ in range(9) for output in engine.step() for token in output.new_token_ids]
    assert drawn == exact(engine, [7, *TEXT])
    assert not caplog.records


def test_a_copy_that_fails_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    ask(engine, "~first", [90])
    ask(engine, "source", [1, 2, 3, *TEXT])

    def fail(sources: Sequence[int], targets: Sequence[int], distance: int) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(engine.backend, "copy", fail)
    asked = ask(engine, "~r", [7, *TEXT])
    assert list(asked.new_token_ids) == exact(engine, [7, *TEXT])
    assert asked.num_approximate_tokens == 0


def test_a_prompt_costs_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few look-ups of sources, however many texts a prompt is made of."""
    engine = engine_of(recompute_tokens=1, backend={"num_blocks": 400, "max_model_len": 512})
    ask(engine, "~first", [90])
    pairs = [(a, b) for a in range(8) for b in range(10)]
    for a, b in pairs:
        ask(engine, f"source {a} {b}", [a, b, 9, 9], max_tokens=1)
    looked_up: list[int] = []
    lookup = engine.kv.index.lookup

    def counted(tokens: Tokens, *others: Any) -> PrefixHit:
        looked_up.append(len(tokens))
        return lookup(tokens, *others)

    monkeypatch.setattr(engine.kv.index, "lookup", counted)
    prompt = [token for a, b in pairs for token in (50, a, b)]
    runs = reuse_of(engine)._runs_of
    state = request("~r", prompt, approximate_reuse=True)
    engine.add(state)
    found = runs(engine._request_table.states["~r"], 0)
    assert len(found) == len(looked_up) == MAX_RUNS


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate_module, "MAX_SOURCE_TOKENS", 100)
    monkeypatch.setattr(approximate_module, "MAX_NAMESPACES", 3)
    engine, draw = engine_of(backend={"num_blocks": 300}), random.Random(0)
    for number in range(20):
        tenant = Namespace(f"t{number % 5}")
        ask(engine, f"~first {number}", [number], namespace=tenant)
        ask(engine, f"r {number}", [draw.randrange(97) for _ in range(32)], namespace=tenant)
        reuse = reuse_of(engine)
        assert len(reuse._registries) <= 3
        assert sum(map(len, reuse._registries.values())) <= 12
        assert reuse._num_source_tokens <= 100
    engine.clear_cache()


prompts = st.lists(
    st.tuples(st.sampled_from([TEXT, OTHER, [7] * 30]), st.integers(0, 12), st.integers(1, 30)),
    min_size=1, max_size=3,
)  # fmt: skip
arrivals = st.tuples(st.booleans(), prompts, st.integers(1, 8), st.sampled_from(["a", "a", "b"]))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(arrivals, min_size=2, max_size=10), st.integers(0, 99), st.integers(1, 6), st.booleans(),
    st.booleans(), st.sampled_from([0, 24]), st.sampled_from([24, 40, 64]),
)  # fmt: skip
def test_no_exact_request_ever_sees_it(
    arriving: list[tuple[bool, list[tuple[list[int], int, int]], int, str]], seed: int, recompute_tokens: int,
    overlap: bool, index_as_computed: bool, host_blocks: int, num_blocks: int,
) -> None:  # fmt: skip
    """Exact and other requests over shared text, with evictions, preemptions and a host tier."""
    backend = ApproximateMemory(num_blocks=num_blocks, max_model_len=92)
    passes = [PreemptAtRandom(seed, 0.1), *fake_engine().scheduler.passes]
    engine = fake_engine(
        backend, passes=passes, recompute_tokens=recompute_tokens, overlap=overlap, host_blocks=host_blocks,
        index_as_computed=index_as_computed,
    )  # fmt: skip
    draw, expected, found = random.Random(seed), dict[str, list[int]](), dict[str, list[int]]()
    waiting = list(enumerate(arriving))
    while waiting or engine.has_work():
        if waiting and draw.random() < 0.3:
            number, (asks, parts, max_tokens, tenant) = waiting.pop(0)
            tokens = [token for text, start, size in parts for token in text[start : start + size]][:80]
            name = f"~{number}" if asks else str(number)
            engine.add(request(name, tokens, max_tokens, approximate_reuse=asks, namespace=Namespace(tenant)))
            expected[name] = expected_tokens(backend, tokens, max_tokens)
            found[name] = []
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.new_token_ids
            if output.finish_reason is not None and output.num_approximate_tokens == 0:
                assert found[output.request_id] == expected[output.request_id]
            elif not output.request_id.startswith("~"):
                assert output.num_approximate_tokens == 0
        if draw.random() < 0.05:
            engine.clear_cache()
        check_books(engine)
        check_index(engine)
    assert {name: len(tokens) for name, tokens in found.items()} == {
        name: len(tokens) for name, tokens in expected.items()
    }
    engine.close()
