"""A transfer that stalls is given up alone, unless its link shows no sign of life."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from sagellm.comm.kv_transfer.messages import Accept, Kind
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.kv_transfer import Message, Ticket, TransferStatus
from tests.comm.kv_transfer.world import LAYOUT, Inline, Instance, introduce, prompt

DONE, RETRY, CANCELLED = TransferStatus.DONE, TransferStatus.RETRY, TransferStatus.CANCELLED
STALLED, GOING = prompt(1, 4), prompt(2, 12)
LAYER_BYTES = LAYOUT.bytes_per_block // LAYOUT.num_layers


class SwallowingTransport(InProcessTransport):
    """Loses messages and tells nobody, as a peer does that hangs. Counts resets."""

    def __init__(self, node: str, network: InProcessNetwork) -> None:
        super().__init__(node, network)
        self.swallows: Callable[[Message], bool] = lambda message: False
        self.num_resets = 0

    def post(self, link: int, message: Message) -> None:
        if not self.swallows(message):
            super().post(link, message)

    def reset(self, link: int, reason: str) -> None:
        self.num_resets += 1
        super().reset(link, reason)


class Scene:
    """A sender with a transfer that stalls, and one by layer that goes on, on one link."""

    def __init__(self, stack: ExitStack, *, stall_s: float, target_stall_s: float, num_retries: int) -> None:
        self.clock, network = ManualClock(), InProcessNetwork(threaded=False)
        self.network = network
        self.ours, self.theirs = SwallowingTransport("a", network), SwallowingTransport("b", network)
        given = {"chunk_bytes": 1024, "offer_wait_s": 0.1, "drain_s": 0.2, "backoff_s": 0.01}
        stalls = stall_s, target_stall_s
        self.source, self.target = (
            Instance(
                each.node, each, clock=self.clock, worker=Inline(),
                options=ChannelOptions(**given, stall_s=seconds, num_retries=num_retries),  # type: ignore[arg-type]
            )
            for each, seconds in zip((self.ours, self.theirs), stalls, strict=True)
        )  # fmt: skip
        for each in (self.source, self.target):
            stack.callback(each.channel.close)
        introduce(self.source, self.target)
        for tokens in (STALLED, GOING):
            self.source.compute(tokens)

    def begin(self) -> tuple[Ticket, Ticket]:
        stalled = self.source.send(STALLED, "b", "stalled")
        return stalled, self.source.send(GOING, "b", "going", by_layer=True)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            self.settle()
            self.clock.advance(0.01)
        self.settle()

    def settle(self) -> None:
        for _ in range(4):
            while self.network.run_one():
                pass
            self.source.poll()
            self.target.poll()

    def go_on(self, ticket: Ticket, seconds: float) -> None:
        """Compute layers of the other transfer, so that its chunks are acknowledged meanwhile."""
        for layer in range(LAYOUT.num_layers):
            self.run(seconds / LAYOUT.num_layers)
            self.source.channel.computed(ticket, layer + 1)
        self.run(0.1)

    def check(self) -> None:
        self.source.check(STALLED, GOING)
        self.target.check(STALLED, GOING)


@pytest.fixture
def make() -> Iterator[Callable[..., Scene]]:
    with ExitStack() as stack:

        def made(stall_s: float = 0.5, target_stall_s: float = 5.0, num_retries: int = 2) -> Scene:
            return Scene(stack, stall_s=stall_s, target_stall_s=target_stall_s, num_retries=num_retries)

        yield made


def accepts(transfer: int, attempt: int) -> Callable[[Message], bool]:
    def is_it(message: Message) -> bool:
        if message.kind != Kind.ACCEPT:
            return False
        accept = Accept.unpack(message.head)
        return (accept.transfer, accept.attempt) == (transfer, attempt)

    return is_it


def test_a_stalled_transfer_is_tried_again_and_the_others_go_on(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.theirs.swallows = accepts(1, 1)
    stalled, going = scene.begin()
    scene.go_on(going, 0.9)
    assert scene.ours.num_resets == 0
    reports = scene.source.reports
    assert [reports[each].status for each in (stalled, going)] == [DONE, DONE]
    assert reports[going].num_bytes == 12 * LAYOUT.bytes_per_block, "nothing is sent again"
    assert sorted((each.request_id, each.status) for each in scene.target.received) == [
        ("going", DONE), ("stalled", DONE),
    ]  # fmt: skip
    scene.check()


def test_after_its_last_try_it_ends_alone(make: Callable[..., Scene]) -> None:
    scene = make(num_retries=0)
    scene.theirs.swallows = accepts(1, 1)
    stalled, going = scene.begin()
    scene.go_on(going, 0.9)
    reports = scene.source.reports
    assert (reports[stalled].status, reports[stalled].reason) == (RETRY, "no answer for 0.5 s")
    assert reports[going].status is DONE
    assert scene.ours.num_resets == 0
    assert not scene.target.arrivals.num_blocks, "the target was told"
    assert sorted((each.request_id, each.status) for each in scene.target.received) == [
        ("going", DONE), ("stalled", CANCELLED),
    ]  # fmt: skip
    scene.check()


def test_both_sides_give_up_at_once(make: Callable[..., Scene]) -> None:
    """It is offered again while its first attempt ends at the target: its engine is told once."""
    scene = make(target_stall_s=0.5)
    scene.theirs.swallows = accepts(1, 1)
    stalled, going = scene.begin()
    scene.go_on(going, 0.9)
    status = scene.source.reports[stalled].status
    assert status in (DONE, RETRY)
    told = [each.status for each in scene.target.received if each.request_id == "stalled"]
    assert told == [status]
    scene.check()


def test_an_offer_that_comes_again_before_the_target_has_polled(make: Callable[..., Scene]) -> None:
    """The first attempt has failed, and its end is not reported: that of the second is."""
    scene = make(target_stall_s=0.2)
    scene.theirs.swallows = accepts(1, 1)
    stalled = scene.source.send(STALLED, "b", "stalled")
    scene.run(0.1)
    receiver = scene.target.channel._receiver
    [(key, _)] = receiver._incoming.items()
    with scene.target.channel._lock:
        receiver._fail(key, RETRY, "nothing came")
    with scene.source.channel._lock:
        sender = scene.source.channel._sender
        sender._try_again(sender._transfers[stalled.transfer_id])
    scene.clock.advance(0.1)
    scene.source.poll()
    while scene.network.run_one():
        pass
    scene.run(0.3)
    assert scene.source.reports[stalled].status is DONE
    assert [each.status for each in scene.target.received] == [DONE]
    scene.check()


def test_a_link_without_a_sign_of_life_is_reset(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.theirs.swallows = lambda message: message.kind != Kind.HELLO
    scene.begin()
    scene.run(0.7)
    assert scene.ours.num_resets


def test_a_chunk_of_an_ended_transfer_gets_more_time_on_a_link_that_is_alive(
    make: Callable[..., Scene],
) -> None:
    scene = make(stall_s=1.0)
    stalled, going = scene.begin()
    held: list[Message] = []

    def holds(message: Message) -> bool:
        if message.is_chunk and message.token == stalled.transfer_id:
            held.append(message)
        return bool(held) and message is held[-1]

    scene.ours.swallows = holds
    scene.run(0.05)
    assert held, "`sent` was not called for it"
    scene.source.channel.cancel(stalled)
    scene.go_on(going, 0.5)
    assert scene.source.reports[going].status is DONE
    assert stalled not in scene.source.reports
    assert not scene.ours.num_resets
    scene.run(1.0)
    assert scene.ours.num_resets, "nothing is heard any more"
