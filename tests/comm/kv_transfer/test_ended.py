"""An engine sees the end of each transfer once, whatever happens to the link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from sagellm.comm.kv_transfer import ended
from sagellm.comm.kv_transfer.ended import EndedTransfers
from sagellm.comm.kv_transfer.messages import End, Kind
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.core.protocols.kv_transfer import Message, TransferStatus
from tests.comm.kv_transfer.world import LAYOUT, SIZE, Instance, finish, introduce, prompt, until

OPTIONS = ChannelOptions(
    chunk_bytes=LAYOUT.bytes_per_block, credits=2, backoff_s=0.01, stall_s=5.0, offer_wait_s=1.0
)
DONE, RETRY = TransferStatus.DONE, TransferStatus.RETRY


class LosingTransport(InProcessTransport):
    """Loses the link instead of sending the messages of a kind, as often as it is told to."""

    def __init__(self, node: str, network: InProcessNetwork) -> None:
        super().__init__(node, network)
        self.lost_kind, self.num_left, self.num_passed = 0, 0, 0

    def lose(self, kind: Kind, count: int, after: int = 0) -> None:
        self.lost_kind, self.num_left, self.num_passed = kind, count, -after

    def post(self, link: int, message: Message) -> None:
        if message.kind == self.lost_kind:
            self.num_passed += 1
        if message.kind == self.lost_kind and self.num_passed > 0 and self.num_left:
            self.num_left -= 1
            self.reset(link, "a fault")
            if message.is_chunk:
                self._network.submit(lambda: self._endpoint.sent(link, message.token))
        else:
            super().post(link, message)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Instance, Instance, LosingTransport]]:
    """Its parameter, if any: `resume_s`."""
    options = replace(OPTIONS, resume_s=getattr(request, "param", 30.0))
    with ExitStack() as stack:
        network = InProcessNetwork()
        transports = [LosingTransport(name, network) for name in "ab"]
        made = [Instance(each.node, each, options=options) for each in transports]
        for instance in made:
            stack.callback(instance.channel.close)
        introduce(*made)
        for seed in range(3):
            made[0].compute(prompt(seed, 8))
        yield made[0], made[1], transports[1]


@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_end_is_sent_again(pair: tuple[Instance, Instance, LosingTransport], count: int) -> None:
    source, target, transport = pair
    transport.lose(Kind.END, count)
    tokens = prompt(0, 8)
    report = finish(source, source.send(tokens, "b"), target)
    assert (report.status, report.num_tokens) == (DONE, 8 * SIZE)
    target.evict_all()
    source.compute(tokens)
    again = finish(source, source.send(tokens, "b", "r2"), target)
    assert again.status is DONE
    until(lambda: len(target.received) == 2, target)
    assert [(each.request_id, each.status) for each in target.received] == [("r", DONE), ("r2", DONE)]
    assert len(target.channel._receiver._ended._senders) == 1


def test_a_resumed_transfer_is_reported_when_it_has_ended(
    pair: tuple[Instance, Instance, LosingTransport],
) -> None:
    source, target, transport = pair
    transport.lose(Kind.ACK, 1, after=3)
    report = finish(source, source.send(prompt(0, 8), "b"), target)
    assert report.status is DONE
    until(lambda: target.received, target)
    assert [each.status for each in target.received] == [DONE]


@pytest.mark.parametrize("pair", [0.05], indirect=True)
def test_what_is_not_offered_again_is_reported(pair: tuple[Instance, Instance, LosingTransport]) -> None:
    source, target, transport = pair
    transport.lose(Kind.ACK, 1, after=3)
    ticket = source.send(prompt(0, 8), "b")
    until(lambda: not transport.num_left, source, target)
    until(lambda: target.received, target)
    [received] = target.received
    assert received.status is RETRY
    assert 0 < received.num_tokens < 8 * SIZE
    report = finish(source, ticket, target)
    assert (report.status, report.num_tokens) == (RETRY, received.num_tokens), "as its engine was told"
    assert target.received == [received]
    target.check(prompt(0, 8))


def test_a_sender_that_starts_again_counts_from_one(
    pair: tuple[Instance, Instance, LosingTransport],
) -> None:
    source, target, transport = pair
    assert finish(source, source.send(prompt(0, 8), "b", "before"), target).status is DONE
    source.channel.close()
    again = Instance("a", InProcessTransport("a", transport._network), options=OPTIONS)
    try:
        again.channel.add_peer(target.channel.metadata())
        again.compute(prompt(1, 8))
        assert finish(again, again.send(prompt(1, 8), "b", "after"), target).status is DONE
    finally:
        again.channel.close()
    until(lambda: len(target.received) == 2, target)
    assert [each.request_id for each in target.received] == ["before", "after"]


def test_ends_are_kept_until_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "MAX_SENDERS", 3)
    kept = EndedTransfers()
    for number in (4, 5, 7):
        kept.keep("x", End(number, 0, "done", ""))
    assert not kept.is_known("x", 4, oldest=4)
    assert kept.find("x", 4) == End(4, 0, "done", "")
    assert not kept.is_known("x", 9, oldest=7)
    assert kept.is_known("x", 5, oldest=3), "an offer that comes late"
    assert [kept.find("x", number) for number in (4, 5)] == [None, None]
    assert kept.find("x", 7) is not None
    kept.keep("x", End(6, 0, "done", ""))
    assert kept.find("x", 6) is None
    for name in "abc":
        kept.keep(name, End(1, 0, "done", ""))
    assert kept.find("x", 7) is None, "forgotten: three others were heard of since"
    assert not kept.is_known("y", 1 << 61, oldest=1 << 60), "takes no time"
