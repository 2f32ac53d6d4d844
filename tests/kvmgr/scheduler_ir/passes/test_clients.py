"""Clients share the batch: a flood of one does not keep the others, nor urgent requests, waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.plan import RequestState
from sagellm.core.types import Request, RequestStatus, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.kvmgr.scheduler_ir.client_shares import ClientShares
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import check_books, fake_engine, request

ROWS = 16
FLOOD = 7
STRATEGIES = ("priority", "adaptive")


def engine(strategy: str = "priority", num_blocks: int = 4096, *, passes: Any = None) -> Engine:
    backend = TokenMemoryBackend(num_blocks=num_blocks, block_size=4, max_num_seqs=ROWS, max_model_len=512)
    return fake_engine(backend, max_batched_tokens=64, passes=passes or strategies.make(strategy))


def of(
    client: Sequence[str], request_id: str, prompt: int = 8, max_tokens: int = 8, **options: int
) -> Request:
    random = Random(request_id)
    tokens = [random.randrange(50) for _ in range(prompt)]
    return replace(request(request_id, tokens, max_tokens, ignore_eos=True, **options), client=tuple(client))


def flood(client: str = "mallory", n: int = 40, max_tokens: int = 200, user: str = "") -> Iterator[Request]:
    """The flood of issue 16: seven calls with many choices and a long answer each."""
    for call in range(FLOOD):
        for choice in range(n):
            one = of((client, user or f"user-{call}", f"call-{call}"), f"f{call}#{choice}", 8, max_tokens)
            yield replace(one, tokens=Tokens([call + 1] * 8), group=f"f{call}")


def steps_until(engine: Engine, wanted: set[str], *, at_most: int) -> int:
    """Steps until all of these requests have ended; books are checked after each."""
    left = set(wanted)
    for step in range(1, at_most + 1):
        for output in engine.step():
            assert output.error is None, output.error
            if output.finish_reason is not None:
                left.discard(output.request_id)
        check_books(engine)
        if not left:
            return step
    raise AssertionError(f"after {at_most} steps {left} have not ended")


def flooded(strategy: str = "priority", num_blocks: int = 4096, steps: int = 30) -> Engine:
    running = engine(strategy, num_blocks)
    for one in flood():
        running.add(one)
    for _ in range(steps):
        running.step()
    return running


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "small",
    [
        of(("bob", "", "call"), "small"),
        of(("mallory", "bob", "call"), "small"),
        of(("mallory", "user-0", "another call"), "small"),
        of(("mallory", "user-0", "urgent"), "small", priority=1),
    ],
    ids=["another client", "another user", "another call", "urgent"],
)
def test_a_small_request_is_served_in_a_flood(strategy: str, small: Request) -> None:
    running = flooded(strategy)
    running.add(small)
    assert steps_until(running, {"small"}, at_most=200) <= 8 + 4  # its tokens, and a few steps to enter


def test_without_shares_it_waits_for_the_flood() -> None:
    """The same with 8e042c4's pass: what the bound above is worth."""
    running = engine(passes=[PriorityBasedPass(preempt=True)])
    for one in flood():
        running.add(one)
    for _ in range(30):
        running.step()
    running.add(of(("bob", "", "call"), "small"))
    with pytest.raises(AssertionError, match="have not ended"):
        steps_until(running, {"small"}, at_most=1000)


def test_memory_that_the_flood_holds_is_given_back() -> None:
    """Memory for a third of the rows: a request that fits beside none of the flood's gets its blocks."""
    running = flooded(num_blocks=64, steps=60)
    running.add(of(("bob", "", "call"), "large", prompt=100, max_tokens=8))
    assert steps_until(running, {"large"}, at_most=400) <= 8 + 12


def test_several_requests_of_one_client_get_half_of_the_rows() -> None:
    running = flooded()
    names = {f"b{number}" for number in range(ROWS)}
    for name in sorted(names):
        running.add(of(("bob", "", name), name, max_tokens=60))
    most = 0
    for _ in range(50):
        running.step()
        rows = [state for state in running._request_table.running if state.request.client[0] == "bob"]
        most = max(most, len(rows))
    assert most == ROWS // 2


def test_a_flood_does_not_rise_above_later_requests() -> None:
    """It ages, but only the first of each client do so while others are there."""
    running = flooded()
    clock = running.clock
    assert isinstance(clock, ManualClock)
    clock.advance(3600)
    running.step()
    running.add(replace(of(("bob", "", "call"), "small"), arrival_s=clock.now()))
    running.add(replace(of(("mallory", "", "urgent"), "urgent", priority=1), arrival_s=clock.now()))
    assert steps_until(running, {"small", "urgent"}, at_most=200) <= 8 + 8


def test_the_flood_itself_ends_and_loses_nothing() -> None:
    running = engine()
    requests = list(flood(n=8, max_tokens=30))
    for one in requests:
        running.add(one)
    for number in range(40):
        running.add(of(("bob", "", str(number)), f"small-{number}", prompt=5, max_tokens=3))
    everybody = {one.request_id for one in requests} | {f"small-{number}" for number in range(40)}
    steps_until(running, everybody, at_most=1000)


def test_requests_of_one_client_are_served_in_order_of_arrival() -> None:
    running = engine(passes=[PriorityBasedPass(preempt=True, fair=True)])
    begun: dict[str, None] = {}
    for number in range(3 * ROWS):
        running.add(of(("bob", "", str(number)), f"r{number}", max_tokens=5))
    while running.has_work():
        begun |= {output.request_id: None for output in running.step()}
    assert list(begun) == [f"r{number}" for number in range(3 * ROWS)]
    assert running.stats().num_preemptions == 0


# -- the counts

PATHS = st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from("123"))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_counts_and_turns(data: st.DataObject) -> None:
    """Requests come, run, are preempted and end in any order."""
    shares = ClientShares(lambda state: state.request.priority)
    waiting: list[RequestState] = []
    running: list[RequestState] = []
    for step in range(data.draw(st.integers(1, 12))):
        paths = data.draw(st.lists(PATHS, max_size=4))
        arrived = [RequestState.of(of(path, f"{step}-{place}")) for place, path in enumerate(paths)]
        waiting += arrived
        shares.update(running, arrived, max_num_seqs=16)
        shares.check()
        before = running.copy()
        ordered = shares.arrange(running, waiting, lambda state: state.request.priority)
        slow = slow_order(before + waiting)
        assert running == [state for state in slow if state in before]
        assert ordered == [state for state in slow if state in waiting]
        for state in data.draw(st.permutations(running))[: data.draw(st.integers(0, 2))]:
            running.remove(state)
            ends = data.draw(st.booleans())
            state.status = RequestStatus.FINISHED if ends else RequestStatus.WAITING
            waiting += [] if ends else [state]
        for state in ordered[: data.draw(st.integers(0, 3))]:
            waiting.remove(state)
            state.status = RequestStatus.RUNNING
            running.append(state)
    for state in waiting + running:
        state.status = RequestStatus.FINISHED
    shares.update([], [], 16)
    shares.check()


def slow_order(states: list[RequestState]) -> list[RequestState]:
    """By definition: the turn of a request at a level is its place in the line of that client, which is
    ordered by the turns below. Calls of one or two requests have one turn."""
    place = {state: number for number, state in enumerate(states)}
    turns: dict[RequestState, tuple[int, ...]] = dict.fromkeys(states, ())
    for depth in (3, 2, 1):
        found = {}
        for state in states:
            rivals = [one for one in states if one.request.client[:depth] == state.request.client[:depth]]
            line = sorted(rivals, key=lambda one: (turns[one], place[one]))
            is_small = depth == 3 and len(rivals) <= 2
            found[state] = 0 if is_small else line.index(state)
        turns = {state: (found[state], *turns[state]) for state in states}
    return sorted(states, key=lambda one: (turns[one], place[one]))
