"""Requests that move between instances: the tokens are those of one engine, and no block is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sagellm.core.errors import ConfigError, RequestError
from sagellm.core.protocols.fleet import FailurePolicy, HandOver, HandOverPart, HandOverState
from sagellm.core.types import Tokens
from tests.builders import run_all
from tests.effort import examples
from tests.engines.hand_over_world import EARLY_S, World, cached, whole_blocks

NAMES = ["p", "d", "e"]
LONG, SHORT, LONGEST = 11, 0, 12
"""Prompts of six blocks, of less than one, and of two chunks."""


@pytest.fixture
def world() -> Iterator[World]:
    made = World(0)
    yield made
    made.close()


def drawn_at(world: World, name: str, steps: int = 3) -> None:
    """Deliver what the front has sent to an instance, and have it compute."""
    while world.instances[name].inbox:
        world.deliver_to(name)
    for _ in range(steps):
        world.step(name)


def states(world: World, name: str) -> list[HandOverState]:
    return [report.state for at, report in world.reports if at == name]


def move(world: World, *names: str) -> None:
    """Deliver all messages."""
    for _ in range(6):
        world.network.run_all()
        for name in names:
            world.poll(name)


# -- the way of one request


def test_the_first_token_comes_from_one_and_the_rest_from_the_other(world: World) -> None:
    asked = world.ask(LONG, 6)
    drawn_at(world, "p")
    assert (len(asked.said), asked.at) == (1, "d")
    world.deliver_to("d")
    move(world, "p", "d")
    decode = world.instances["d"].engine
    drawn_at(world, "d", 8)
    assert asked.ended == "length"
    assert decode.last_plan is not None
    assert states(world, "p") == [HandOverState(each) for each in ("bootstrapping", "transferring", "ready")]
    assert states(world, "d")[-1] is HandOverState.READY
    world.finish()


def test_what_has_come_is_not_computed_again(world: World) -> None:
    asked = world.ask(LONG, 6)
    drawn_at(world, "p")
    move(world, "p", "d")
    world.deliver_to("d")
    world.step("d")
    plan = world.instances["d"].engine.last_plan
    assert plan is not None
    [join] = plan.joined
    assert join.num_computed == whole_blocks(asked.request.tokens.tolist()) == 24
    world.finish()


def test_a_request_that_ends_with_its_first_token_moves_nowhere(world: World) -> None:
    asked = world.ask(LONG, 1)
    drawn_at(world, "p")
    assert (asked.ended, asked.at) == ("length", "p")
    assert not world.instances["p"].engine.kv.blocks_move
    world.finish()


@pytest.mark.parametrize("number", [SHORT, LONG])
def test_nothing_is_waited_for_that_is_there_or_cannot_come(world: World, number: int) -> None:
    """A prompt of less than a block, and one that the instance has cached."""
    before = world.ask(number, 1, prefill="d", decode="d")
    drawn_at(world, "d")
    assert before.ended
    asked = world.ask(number, 6)
    drawn_at(world, "p")
    drawn_at(world, "d", 8)
    assert asked.ended == "length"
    world.finish()


def test_all_is_reported_on_the_way(world: World) -> None:
    world.ask(LONGEST, 6)
    drawn_at(world, "p", 4)
    world.deliver_to("d")
    for _ in range(200):
        world.network.run_one()
        world.poll("d")
        world.poll("p")
    order = list(HandOverState)
    seen = states(world, "d")
    assert seen == [each for each in order if each is not HandOverState.FAILED]
    world.finish()


# -- KV that does not come


@pytest.mark.parametrize("policy", FailurePolicy)
def test_a_lease_ends_what_does_not_come(world: World, policy: FailurePolicy) -> None:
    asked = world.ask(LONG, 6, policy)
    drawn_at(world, "p")
    world.deliver_to("d")
    decode = world.instances["d"]
    assert decode.hand_overs.idle_s() == 2.0
    world.clock.advance(1.9)
    world.poll("d")
    assert not decode.engine.has_work()
    world.clock.advance(0.1)
    world.poll("d")
    assert [report.reason for _, report in world.reports][-1] == "no sign of its KV for 2 s"
    if policy is FailurePolicy.FAIL:
        assert asked.ended == "error"
    else:
        drawn_at(world, "d", 8)
        assert asked.ended == "length"
    world.finish()


def test_signs_renew_the_lease(world: World) -> None:
    world.lease_s = 0.9
    asked = world.ask(LONGEST, 6)
    drawn_at(world, "p", 4)
    world.deliver_to("d")
    for _ in range(60):
        world.clock.advance(0.2)
        world.network.run_one()
        world.poll("d")
        world.poll("p")
        if states(world, "d")[-1] is HandOverState.READY:
            break
    assert states(world, "d")[-1] is HandOverState.READY
    assert world.clock.now() > 2 * world.lease_s
    drawn_at(world, "d", 8)
    assert asked.ended
    world.finish()


def test_the_front_may_say_that_it_does_not_come(world: World) -> None:
    asked = world.ask(LONG, 6)
    drawn_at(world, "p")
    world.deliver_to("d")
    hand_overs = world.instances["d"].hand_overs
    hand_overs.fail(asked.request.request_id, asked.attempt + 1, "another attempt")
    hand_overs.fail("unknown", 1, "who?")
    assert not world.instances["d"].engine.has_work()
    hand_overs.fail(asked.request.request_id, asked.attempt, "its prefill failed")
    drawn_at(world, "d", 8)
    assert asked.ended == "length"
    world.finish()


def test_an_unknown_peer_is_reported(world: World) -> None:
    prefill = world.instances["p"]
    prefill.hand_overs.prefill(
        world.ask(LONG, 6, decode="p").request, HandOver(HandOverPart.PREFILL, "nobody")
    )
    world.instances["p"].inbox.clear()
    prefill.engine.step()
    progress = prefill.hand_overs.poll()
    assert progress.reports[-1].state is HandOverState.FAILED
    assert "unknown instance 'nobody'" in progress.reports[-1].reason
    assert not prefill.engine.kv.blocks_move


def test_a_lost_peer_ends_what_comes_from_it_and_goes_there(world: World) -> None:
    waits, sends = world.ask(LONG, 6), world.ask(8, 6, prefill="d", decode="p")
    drawn_at(world, "p")
    drawn_at(world, "d")
    world.instances["d"].hand_overs.peer_lost("p")
    assert waits.attempt == sends.attempt == 1
    assert not world.instances["d"].hand_overs._sending
    assert not world.instances["d"].hand_overs._awaited
    drawn_at(world, "d", 8)
    assert waits.ended == "length"
    reasons = {report.reason for at, report in world.reports if at == "d"} - {""}
    assert reasons == {"the instance p was lost"}
    world.finish()


# -- KV that comes first, late, or for nothing


def test_kv_without_a_request_is_kept_for_a_while(world: World) -> None:
    asked = world.ask(LONG, 6)
    drawn_at(world, "p")
    move(world, "p", "d")
    decode = world.instances["d"]
    decode.inbox.clear()
    assert list(decode.engine.kv.pins.kept_names) == [asked.request.request_id]
    assert decode.engine.kv.block_states().active == 6
    assert decode.hand_overs.idle_s() == EARLY_S
    world.clock.advance(EARLY_S)
    world.poll("d")
    assert decode.engine.kv.block_states().active == 0
    assert cached(decode, asked.request.tokens.tolist()) == 24
    world.abort(asked)
    world.finish()


def test_of_too_many_the_oldest_are_let_go(world: World) -> None:
    for number in range(6):
        world.ask(number + 3, 6)
        drawn_at(world, "p")
        move(world, "p", "d")
    decode = world.instances["d"]
    assert list(decode.hand_overs._early) == ["r2", "r3", "r4", "r5"]
    assert set(decode.engine.kv.pins.kept_names) <= set(decode.hand_overs._early)
    assert decode.engine.kv.pins.num_kept <= 12
    for asked in world.asked.values():
        world.abort(asked)
    world.finish()


@pytest.mark.parametrize("delivered", [True, False])
def test_late_kv_of_an_aborted_request_is_not_kept(world: World, delivered: bool) -> None:
    asked = world.ask(LONG, 6)
    drawn_at(world, "p")
    decode = world.instances["d"]
    if delivered:
        world.deliver_to("d")
    decode.inbox.clear()
    assert decode.hand_overs.abort(asked.request.request_id) is delivered
    assert not decode.hand_overs.abort(asked.request.request_id)
    move(world, "p", "d")
    assert cached(decode, asked.request.tokens.tolist()) == 24
    assert not decode.engine.kv.pins.kept_names
    world.abort(asked)
    world.finish()


def test_kv_of_an_earlier_attempt_settles_nothing(world: World) -> None:
    asked = world.ask(LONG, 6)
    drawn_at(world, "p")
    decode = world.instances["d"]
    [call] = decode.inbox
    decode.inbox.clear()
    later = HandOver(HandOverPart.DECODE, "p", 2.0, attempt=asked.attempt + 1)
    decode.hand_overs.expect(replace(asked.request, generated=tuple(asked.said)), later)
    move(world, "p", "d")
    with pytest.raises(RequestError, match="waits for KV already, as attempt 2"):
        call()
    assert decode.hand_overs._awaited
    world.clock.advance(2.1)
    drawn_at(world, "d", 8)
    assert asked.ended == "length"
    world.finish()


def test_a_running_request_takes_what_is_kept() -> None:
    """12 blocks, six of them kept: a prompt of seven blocks and its answer need more than the rest."""
    world = World(0, num_blocks=12)
    asked = world.ask(LONG, 6)
    drawn_at(world, "p")
    move(world, "p", "d")
    decode = world.instances["d"]
    decode.inbox.clear()
    assert decode.engine.kv.pins.num_kept == 6
    other = world.ask(LONG - 1, 20, prefill="d", decode="d")
    drawn_at(world, "d", 30)
    assert other.ended == "length"
    assert decode.engine.stats().num_preemptions == 0
    assert not decode.engine.kv.pins.kept_names
    world.abort(asked)
    world.finish()
    world.close()


def test_wrong_calls_are_refused(world: World) -> None:
    hand_overs = world.instances["p"].hand_overs
    one = world.ask(LONG, 6).request
    with pytest.raises(ConfigError, match="part DECODE, PREFILL is expected here"):
        hand_overs.prefill(one, HandOver(HandOverPart.DECODE, "d"))
    with pytest.raises(ConfigError, match="part PREFILL, DECODE or FETCH is expected here"):
        hand_overs.expect(one, HandOver(HandOverPart.PREFILL, "d"))
    with pytest.raises(ConfigError, match="attempt"):
        HandOver(HandOverPart.DECODE, "d", attempt=-1)
    with pytest.raises(ConfigError, match="lease"):
        HandOver(HandOverPart.DECODE, "d", lease_s=0)
    with pytest.raises(RequestError, match="answer is complete"):
        hand_overs.expect(replace(one, generated=(1,) * 6), HandOver(HandOverPart.DECODE, "d"))
    world.deliver_to("p")
    with pytest.raises(RequestError, match="is in use"):
        hand_overs.expect(one, HandOver(HandOverPart.DECODE, "d"))
    world.finish()


# -- a prefix that a peer has


@pytest.mark.parametrize("order", ["pd", "dp"])
def test_a_prefix_is_fetched(world: World, order: str) -> None:
    """Of a prompt whose first blocks the peer has, and of which it sends what it has."""
    world.ask(8, 2, prefill="p", decode="p")
    drawn_at(world, "p")
    asked = world.fetch(LONG, "p", "d", 6)
    for name in order:
        drawn_at(world, name, 0)
        move(world, "p", "d")
    world.step("d")
    plan = world.instances["d"].engine.last_plan
    assert plan is not None
    assert [join.num_computed for join in plan.joined] == [12]
    drawn_at(world, "d", 8)
    assert asked.ended == "length"
    world.finish()


def test_a_peer_that_has_nothing_says_so(world: World) -> None:
    asked = world.fetch(LONG, "p", "d", 6)
    drawn_at(world, "d", 0)
    drawn_at(world, "p", 0)
    move(world, "p", "d")
    drawn_at(world, "d", 8)
    assert asked.ended == "length"
    world.finish()


def test_a_fetched_prompt_moves_on(world: World) -> None:
    """Its beginning comes from one peer, and its KV goes to another."""
    world.ask(LONG, 2, prefill="p", decode="p")
    drawn_at(world, "p")
    asked = world.ask(LONG, 6, prefill="d", decode="e")
    world.instances["d"].inbox.clear()
    fetch = HandOver(HandOverPart.FETCH, "p", attempt=asked.attempt)
    onward = HandOver(HandOverPart.PREFILL, "e", attempt=asked.attempt)
    world.instances["d"].hand_overs.expect(asked.request, fetch, onward)
    world.instances["p"].hand_overs.send_prefix(
        asked.request.request_id, Tokens(asked.request.tokens), "d", attempt=asked.attempt
    )
    move(world, "p", "d")
    drawn_at(world, "d")
    move(world, "d", "e")
    drawn_at(world, "e", 8)
    assert asked.ended == "length"
    world.finish()


def test_two_engines_do_not_wait_for_each_other(world: World) -> None:
    """Plain requests beside hand-overs run as ever."""
    for number in range(3, 9):
        world.ask(number, 6, prefill="p", decode="d")
        world.ask(number, 6, prefill="d", decode="d")
    world.finish()
    assert not run_all(world.instances["d"].engine)


# -- everything at once


class HandOverMachine(RuleBasedStateMachine):
    """Requests, messages, clocks and losses in any order; hypothesis chooses."""

    @initialize(
        seed=st.integers(0, 1000),
        share=st.sampled_from([0.0, 0.1, 0.3]),
        overlap=st.booleans(),
        num_blocks=st.sampled_from([12, 24, 60]),
    )
    def begin(self, seed: int, share: float, overlap: bool, num_blocks: int) -> None:
        self.world = World(seed, share, overlap=overlap, num_blocks=num_blocks)

    @rule(
        number=st.integers(0, 11),
        max_tokens=st.integers(1, 12),
        policy=st.sampled_from(FailurePolicy),
        names=st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)),
        stops=st.booleans(),
    )
    def ask(
        self, number: int, max_tokens: int, policy: FailurePolicy, names: tuple[str, str], stops: bool
    ) -> None:
        self.world.ask(number, max_tokens, policy, prefill=names[0], decode=names[1], stops=stops)

    @rule(number=st.integers(0, 11), max_tokens=st.integers(1, 12), names=st.permutations(NAMES))
    def fetch(self, number: int, max_tokens: int, names: list[str]) -> None:
        self.world.fetch(number, names[0], names[1], max_tokens)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 4))
    def deliver_to(self, name: str, count: int) -> None:
        for _ in range(count):
            self.world.deliver_to(name)

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 4))
    def step(self, name: str, count: int) -> None:
        for _ in range(count):
            self.world.step(name)

    @rule(name=st.sampled_from(NAMES))
    def poll(self, name: str) -> None:
        self.world.poll(name)

    @rule(count=st.integers(1, 30))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.world.network.run_one()

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.1, 3.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @precondition(lambda self: any(not asked.ended for asked in self.world.asked.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [name for name, asked in self.world.asked.items() if not asked.ended]
        self.world.abort(self.world.asked[data.draw(st.sampled_from(alive))])

    @rule(name=st.sampled_from(NAMES))
    def lose(self, name: str) -> None:
        self.world.lose(name)

    @rule(name=st.sampled_from(NAMES))
    def evict(self, name: str) -> None:
        self.world.instances[name].engine.clear_cache()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
            self.world.close()


def run_machine(count: int, steps: int) -> None:
    machine: Any = HandOverMachine
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(count), stateful_step_count=steps)
    )


def test_any_order_of_events() -> None:
    run_machine(60, 40)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_orders_of_events() -> None:
    run_machine(1500, 60)
