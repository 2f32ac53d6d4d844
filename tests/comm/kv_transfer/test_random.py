"""Random transfers with faults: a block arrives verified or is reported as failed, and no other changes."""

from __future__ import annotations

import random
from contextlib import ExitStack
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

from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports.tcp import TcpTransport
from sagellm.core.protocols.kv_transfer import TransferStatus
from tests.comm.kv_transfer.faulty import FaultyWorld
from tests.comm.kv_transfer.proxy import Proxy, Shuffler, damaged
from tests.comm.kv_transfer.world import KEY, Instance, prompt, until
from tests.effort import examples

PER_WORLD = 50
NAMES = ["plain", "gpu", "head first", "zstd"]


def run_transfers(count: int, seed: int) -> dict[TransferStatus, int]:
    """At least so many, in worlds of `PER_WORLD`."""
    outcomes, num_sent = dict.fromkeys(TransferStatus, 0), 0
    for number in range(seed, seed + count // PER_WORLD):
        world = FaultyWorld(number, share=random.Random(number).choice([0.05, 0.15, 0.35]))
        step = 0
        while world.num_sent < PER_WORLD:
            world.do()
            step += 1
            if step % 10 == 0:
                world.check()
        world.finish()
        assert world.network.num_faults
        num_sent += world.num_sent
        for status, found in world.outcomes.items():
            outcomes[status] += found
    assert sum(outcomes.values()) == num_sent >= count
    return outcomes


def test_200_transfers_with_faults() -> None:
    outcomes = run_transfers(200, seed=0)
    assert outcomes[TransferStatus.DONE] > 60
    assert outcomes[TransferStatus.RETRY]
    assert outcomes[TransferStatus.CANCELLED]
    assert not outcomes[TransferStatus.REFUSED]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_10_000_transfers_with_faults() -> None:
    outcomes = run_transfers(10_000, seed=1000)
    print(outcomes)
    assert outcomes[TransferStatus.DONE] > 3000


class TransferMachine(RuleBasedStateMachine):
    """Senders, receivers, pools and arrivals; hypothesis chooses what happens and in which order."""

    @initialize(seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.1, 0.4]))
    def begin(self, seed: int, share: float) -> None:
        self.world = FaultyWorld(seed, share)

    @rule(name=st.sampled_from(NAMES), number=st.integers(0, 23))
    def compute(self, name: str, number: int) -> None:
        self.world.compute(name, number)

    @rule(names=st.permutations(NAMES), number=st.integers(0, 23), by_layer=st.booleans())
    def send(self, names: list[str], number: int, by_layer: bool) -> None:
        self.world.compute(names[0], number)
        self.world.send(names[0], names[1], number, by_layer=by_layer)

    @rule(name=st.sampled_from(NAMES), number=st.integers(0, 23), by_layer=st.booleans())
    def send_heads(self, name: str, number: int, by_layer: bool) -> None:
        self.world.send_heads(name, number, by_layer=by_layer)

    @rule(count=st.integers(1, 30))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.world.network.run_one()

    @rule()
    def poll(self) -> None:
        self.world.poll()

    @rule(seconds=st.sampled_from([0.01, 0.15, 0.6, 1.1]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name, ticket = data.draw(st.sampled_from(list(self.world.open)))
        self.world.instances[name].channel.cancel(ticket)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), num_layers=st.integers(0, 3))
    def computed(self, data: st.DataObject, num_layers: int) -> None:
        name, ticket = data.draw(st.sampled_from(list(self.world.open)))
        self.world.instances[name].channel.computed(ticket, num_layers)

    @invariant()
    def nothing_wrong_is_served(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


def test_any_order_of_events() -> None:
    machine: Any = TransferMachine
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(40), stateful_step_count=30))


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1500)
def test_transfers_over_tcp_with_faults(count: int) -> None:
    options = ChannelOptions(
        chunk_bytes=4000, credits=3, stall_s=0.25, offer_wait_s=0.1, backoff_s=0.01, drain_s=0.1
    )
    with ExitStack() as stack:
        source, target = (Instance(name, TcpTransport(KEY, port=0), options=options) for name in "ab")
        for each in (source, target):
            stack.callback(each.channel.close)
        proxy = Proxy(target.channel.metadata())
        stack.callback(proxy.close)
        source.channel.add_peer(proxy.metadata())
        rng, shuffle = random.Random(count), Shuffler(0.05, 0.02)

        def change(frame: bytes, of_frame: random.Random) -> list[bytes] | None:
            chance = of_frame.random()
            if chance < 0.01:
                return None
            if chance < 0.03:
                frame = damaged(frame, of_frame.randrange(len(frame)))
            return shuffle(frame, of_frame)

        proxy.change = change
        prompts = [prompt(seed, 2 + seed % 14) for seed in range(30)]
        done = 0
        while len(source.reports) < count:
            tokens = rng.choice(prompts)
            source.compute(tokens)
            ticket = source.send(tokens, "b")
            if rng.random() < 0.1:
                source.channel.cancel(ticket)
            until(lambda ticket=ticket: ticket in source.reports, source, target)  # type: ignore[misc]
            done += source.reports[ticket].status is TransferStatus.DONE
            target.check(*prompts)
        until(lambda: not target.arrivals.num_blocks, source, target)
        source.check(*prompts)
        target.check(*prompts)
        assert done > count / 3
