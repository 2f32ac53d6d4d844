"""A request computes its prompt up to a limit, gets KV behind it from elsewhere, and goes on."""

from __future__ import annotations

from array import array

import pytest

from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import RequestState
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import strategies
from tests.builders import check_books, expected_tokens, fake_engine, request, run_all

BLOCK = 4
PROMPT = list(range(30))


def limited(engine: Engine, name: str, stop: int) -> RequestState:
    engine.add(request(name, PROMPT, 5))
    state = engine._request_table.states[name]
    engine._request_table.limit(state, stop)
    return state


def run(engine: Engine, state: RequestState, until: int, num_steps: int = 30) -> list[int]:
    """The tokens of all outputs. Once the request stands at its limit, KV up to `until` comes."""
    tokens: list[int] = []
    for _ in range(num_steps):
        if state.compute_until is not None and state.num_computed == state.compute_until:
            bring(engine, state, until)
        for output in engine.step():
            tokens += output.new_token_ids if output.request_id == state.request_id else ()
        check_books(engine)
    return tokens


def bring(engine: Engine, state: RequestState, until: int) -> None:
    """KV of the prompt up to token `until` comes from elsewhere. A step may be in flight."""
    first, table = state.num_computed, engine._request_table
    engine.kv.append_filled(state, until)
    backend = engine.backend
    assert isinstance(backend, TokenMemoryBackend)
    blocks = engine.kv.block_table(state.request_id)
    for position in range(first, until):
        slot = blocks[position // BLOCK] * BLOCK + position % BLOCK
        backend.kv_bytes()._memory[slot] = (state.tokens[position], position, 0)
    table.advance(state, until - first)
    table.limit(state, None)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", list(strategies.STRATEGIES))
@pytest.mark.parametrize(("stop", "until"), [(8, 16), (1, 29), (10, 23), (28, 29)])
def test_the_tokens_are_those_of_a_request_without_a_limit(
    stop: int, until: int, strategy: str, overlap: bool
) -> None:
    """Limits at and within blocks; beside a request that decodes and one that computes a long prompt."""
    engine = fake_engine(passes=strategies.make(strategy), overlap=overlap, max_batched_tokens=9)
    for name, length in (("other", 6), ("long", 40)):
        engine.add(request(name, range(50, 50 + length), 12))
    engine.step()
    state = limited(engine, "a", stop)
    computed: list[int] = []
    for _ in range(20):
        engine.step()
        check_books(engine)
        computed.append(state.num_computed)
    assert computed[-1] == stop == max(computed), "it is held at its limit"
    assert not {"other", "long"} & engine._request_table.states.keys(), "others go on, and end"
    assert run(engine, state, until) == expected_tokens(TokenMemoryBackend(), PROMPT, 5)
    cached = engine.kv.index.lookup(state.tokens).num_tokens
    assert cached == stop // BLOCK * BLOCK, "what a caller fills may be approximate"
    engine.close()


def test_a_hit_beyond_the_limit_ends_it() -> None:
    engine = fake_engine()
    engine.add(request("a", PROMPT, 5))
    run_all(engine)
    again = limited(engine, "b", 8)
    engine.step()
    assert (again.compute_until, again.num_cached) == (None, 28)
    assert run(engine, again, 0)


def test_a_request_that_leaves_has_no_limit() -> None:
    engine = fake_engine()
    state = limited(engine, "a", 8)
    engine.step()
    engine.step()
    engine._preempt(state)
    assert (state.compute_until, state.num_computed, engine._request_table.limited) == (None, 0, {})
    other = limited(engine, "b", 8)
    engine.abort("b")
    assert (other.compute_until, engine._request_table.limited) == (None, {})
    assert run(engine, state, 0) == expected_tokens(TokenMemoryBackend(), PROMPT, 5)


def test_filled_blocks_of_an_arrival_become_those_of_the_request() -> None:
    engine = fake_engine(host_blocks=4)
    state = limited(engine, "a", 8)
    engine.step()
    arrivals, kv = engine.kv.tiers.arrivals, engine.kv  # type: ignore[union-attr]
    arrival = arrivals.begin_receive(state.tokens, kv.namespace_of(state.request.namespace), 5)
    assert arrival is not None
    arrival.first = 2  # as if the first two were on the device
    with pytest.raises(BookkeepingError, match="cannot get KV"):
        kv.append_filled(state, 30, arrival)
    kv.append_filled(state, 20, arrival)
    assert kv.block_table("a")[2:] == array("i", arrival.block_ids[:3])
    engine._request_table.advance(state, 12)
    engine._request_table.limit(state, None)
    check_books(engine)
    engine.close()


def test_only_a_request_at_its_limit_gets_blocks() -> None:
    engine = fake_engine()
    state = limited(engine, "a", 8)
    with pytest.raises(BookkeepingError):
        engine.kv.append_filled(state, 16)
    engine.step()
    for stop in (30, 31):  # the last token is computed
        with pytest.raises(BookkeepingError, match="cannot get KV"):
            engine.kv.append_filled(state, stop)
    with pytest.raises(BookkeepingError, match="cannot stop"):
        engine._request_table.limit(state, 8)
