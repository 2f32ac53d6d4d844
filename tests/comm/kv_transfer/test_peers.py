"""Peers that move, that are somebody else, that say what does not fit; and paths that cannot be offered."""

from __future__ import annotations

import json
import threading
from array import array
from dataclasses import asdict, replace
from typing import Any

import pytest

from sagellm.comm.kv_transfer.messages import Accept, Alive, Kind, Offer
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_transfer import KVPath, Message, Ticket, TransferStatus
from sagellm.core.types import Account, Namespace
from tests.comm.kv_transfer.test_channel import Make, make
from tests.comm.kv_transfer.world import (
    LAYOUT,
    SIZE,
    SPACE,
    Inline,
    Instance,
    finish,
    introduce,
    prompt,
    schema_of,
    until,
)

__all__ = ["make"]
QUICK = ChannelOptions(chunk_bytes=LAYOUT.bytes_per_block, credits=2, backoff_s=0.01)
DONE, RETRY, REFUSED = TransferStatus.DONE, TransferStatus.RETRY, TransferStatus.REFUSED


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_peer_that_has_another_address(make: Make, has_begun: bool) -> None:
    """What is under way goes on there, from the beginning; the old one ends its part."""
    source, old = make("prefill", options=QUICK), make("decode", place="old", options=QUICK)
    tokens = prompt(1, 40)
    source.compute(tokens)
    source.channel.add_peer(old.channel.metadata())
    ticket = source.send(tokens, "decode")
    if has_begun:
        until(lambda: old.arrivals.num_blocks, source, old)
    new = make("decode", place="new", options=QUICK)
    assert source.channel.add_peer(new.channel.metadata()) == "decode"
    assert finish(source, ticket, new).status is DONE
    assert new.num_tokens(tokens) == 40 * SIZE
    until(lambda: not old.arrivals.num_blocks, old)
    for each in (source, old, new):
        each.check(tokens)


def test_the_same_address_again_changes_nothing(make: Make) -> None:
    source, target = make("prefill", options=QUICK), make("decode", options=QUICK)
    introduce(source, target)
    tokens = prompt(1, 30)
    source.compute(tokens)
    ticket = source.send(tokens, "decode")
    until(lambda: target.arrivals.num_blocks, source, target)
    source.channel.add_peer(target.channel.metadata())
    report = finish(source, ticket, target)
    assert (report.status, report.num_bytes) == (DONE, 30 * LAYOUT.bytes_per_block)


def test_what_was_queued_for_a_lost_link_does_not_open_the_next(make: Make) -> None:
    """Only a HELLO does, so no attempt of a transfer is lost by it."""
    source, target = make("prefill", options=replace(QUICK, num_retries=0)), make("decode", options=QUICK)
    introduce(source, target)
    first, second = prompt(1, 3), prompt(2, 3)
    for tokens in (first, second):
        source.compute(tokens)
    assert finish(source, source.send(first, "decode"), target).status is DONE
    transport, [link] = source.channel._transport, source.channel._peers.values()
    tickets, is_sent, alive = [], threading.Event(), Alive(1)

    def send() -> None:
        tickets.append(source.send(second, "decode"))
        is_sent.set()

    def lose() -> None:
        """On the transport's thread, so that nothing comes in between."""
        transport.reset(link, "a test resets it")
        transport.post(link, Message(alive.kind, alive.pack()))
        transport.call(send)

    transport.call(lose)
    assert is_sent.wait(10)
    assert finish(source, tickets[0], target).status is DONE


def test_another_instance_at_the_address_is_refused(make: Make) -> None:
    source, target = make("prefill"), make("decode")
    metadata = json.loads(target.channel.metadata()) | {"node": "another"}
    source.channel.add_peer(json.dumps(metadata).encode())
    tokens = prompt(1, 3)
    source.compute(tokens)
    report = finish(source, source.send(tokens, "another"), target)
    assert report.status is REFUSED
    assert "'decode' answers there: add_peer with the metadata that it has now" in report.reason
    assert not target.received


@pytest.mark.parametrize("which", ["source", "target"])
def test_a_hello_of_another_version_is_refused_and_says_why(
    make: Make, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make("prefill"), make("decode")
    introduce(source, target)
    changed = (source if which == "source" else target).channel
    newer = Message(Kind.HELLO, json.dumps(asdict(changed._hello) | {"new": 1}).encode(), opens=True)

    def greet(link: int, *_: object) -> None:
        if changed._sender.is_due(link) or which == "target":
            changed._transport.post(link, newer)

    monkeypatch.setattr(changed, "_greet" if which == "source" else "_on_hello", greet)
    tokens = prompt(1, 3)
    source.compute(tokens)
    report = finish(source, source.send(tokens, "decode"), target)
    assert report.status is REFUSED
    assert "run the same version on both sides" in report.reason


@pytest.mark.parametrize("chunk_bytes", [(1 << 20, 1024), (1024, 1 << 20)])
def test_chunks_of_other_sizes(make: Make, chunk_bytes: tuple[int, int]) -> None:
    """The smaller is agreed on, whatever memory the sender shares."""
    source, target = (
        make(name, options=ChannelOptions(chunk_bytes=size))
        for name, size in zip(("prefill", "decode"), chunk_bytes, strict=True)
    )
    introduce(source, target)
    tokens = prompt(1, 9)
    source.compute(tokens)
    assert finish(source, source.send(tokens, "decode"), target).status is DONE
    target.check(tokens)


# -- paths that cannot be offered


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "long request id": ({"request_id": "x" * 513}, "request_id is .*of at most 512"),
    "no text": ({"request_id": 7}, "request_id is 7"),
    "no JSON": ({"request_id": b"r"}, "cannot be offered"),
    "half a letter": ({"request_id": "\ud800"}, "request_id"),
    "long namespace": ({"namespace": Namespace("x" * 5000)}, "namespace is .*of at most 4096"),
    "long account": ({"account": Account("x" * 5000)}, "account is .*of at most 4096"),
    "all together": (
        {"namespace": Namespace(*["\U0001f600" * 2000] * 4), "account": Account("x" * 4000)},
        "bytes, at most 65536",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_offer_can_name_is_refused_here(make: Make, name: str) -> None:
    """The link is not reset by it, and what is under way goes on."""
    source, target = make("prefill", options=QUICK), make("decode", options=QUICK)
    introduce(source, target)
    tokens, (wrong, error) = prompt(1, 20), WRONG[name]
    source.compute(tokens)
    ticket = source.send(tokens, "decode")
    path = KVPath("r", tokens, SPACE, array("i", [0]))._replace(**wrong)
    with pytest.raises(ConfigError, match=error):
        source.channel.transfer(path, "decode")
    report = finish(source, ticket, target)
    assert (report.status, report.num_bytes) == (DONE, 20 * LAYOUT.bytes_per_block)
    source.check(tokens)


def test_names_that_no_hello_can_hold() -> None:
    network = InProcessNetwork(threaded=False)
    with pytest.raises(ConfigError, match=r"node is .*of at most 256"):
        Instance("x" * 257, InProcessTransport("a", network))
    with pytest.raises(ConfigError, match=r"fingerprint is .*of at most 256"):
        Instance("a", InProcessTransport("b", network), fingerprint="x" * 257)
    assert schema_of(LAYOUT, "x" * 256).model_fingerprint


# -- offers that fail at the target


@pytest.mark.parametrize("place", ["begin_receive", "num_cached", "hashes_of"])
def test_an_offer_that_fails_does_not_stop_the_others(make: Make, place: str) -> None:
    source, target = make("prefill", options=QUICK), make("decode", options=QUICK)
    introduce(source, target)
    prompts = [prompt(seed, 3) for seed in range(3)]
    owner: Any = target.channel._receiver if place == "hashes_of" else target.arrivals
    name = "_hashes_of" if place == "hashes_of" else place
    works, left = getattr(owner, name), [1]

    def fails(*given: Any) -> Any:
        if left:
            left.pop()
            raise ValueError("a fault")
        return works(*given)

    setattr(owner, name, fails)
    for tokens in prompts:
        source.compute(tokens)
    tickets = [source.send(tokens, "decode", f"r{i}") for i, tokens in enumerate(prompts)]
    reports = [finish(source, ticket, target) for ticket in tickets]
    assert [report.status for report in reports] == [REFUSED, DONE, DONE]
    assert reports[0].reason == "ValueError: a fault"
    until(lambda: len(target.received) == 3, target)
    assert sorted((each.request_id, each.status) for each in target.received) == [
        ("r0", REFUSED), ("r1", DONE), ("r2", DONE),
    ]  # fmt: skip
    assert not target.arrivals.num_blocks
    target.check(*prompts)


# -- waiting


def test_wait_does_not_return_at_once_while_an_offer_waits_for_room() -> None:
    clock, network = ManualClock(), InProcessNetwork(threaded=False)
    options = ChannelOptions(chunk_bytes=LAYOUT.bytes_per_block, stall_s=10.0, offer_wait_s=5.0)
    source, target = (
        Instance(
            name, InProcessTransport(name, network), options=options, clock=clock, worker=Inline(),
            num_blocks=size,
        )
        for name, size in (("a", 32), ("b", 6))
    )  # fmt: skip
    introduce(source, target)
    first, second = prompt(1, 5), prompt(2, 5)
    for tokens in (first, second):
        source.compute(tokens)
    tickets = [source.send(tokens, "b", by_layer=True) for tokens in (first, second)]
    for _ in range(50):
        network.run_one()
        for each in (source, target):
            each.poll()
    assert len(target.channel._receiver._offers) == len(target.channel._receiver._incoming) == 1
    assert not target.channel.wait(0.001)
    assert not target.channel.wants_blocks
    assert not source.channel.wait(0.001)
    clock.advance(0.06)
    assert target.channel.wait(0.0), "it is tried again now and then"
    target.poll()
    assert not target.channel.wait(0.001)
    source.channel.cancel(tickets[0])
    while network.run_one():
        pass
    assert target.channel.wait(0.0), "there is room"
    clock.advance(2.5)
    assert source.channel.wait(0.0), "it says that it is alive"
    for each in (source, target):
        each.channel.close()


# -- messages that the other side may not send


@pytest.mark.parametrize("to_sender", [True, False])
def test_messages_of_the_wrong_side_end_the_link(to_sender: bool) -> None:
    network = InProcessNetwork(threaded=False)
    source, target = (
        Instance(name, InProcessTransport(name, network), worker=Inline(), clock=ManualClock())
        for name in "ab"
    )
    introduce(source, target)
    tokens = prompt(1, 2)
    source.compute(tokens)
    source.send(tokens, "b", by_layer=True)

    def settle() -> None:
        for _ in range(20):
            source.poll()
            target.poll()
            while network.run_one():
                pass

    settle()
    [ours] = source.channel._peers.values()
    [incoming] = target.channel._receiver._incoming.values()
    offer = Offer(1, 1, "r", ("", "", "", ""), ("", ""), 0, 0, False, 1)
    if to_sender:
        target.channel._transport.post(incoming.waiting.link, Message(offer.kind, offer.pack()))
    else:
        accept = Accept(1, 1, 1, 0, 1)
        source.channel._transport.post(ours, Message(accept.kind, accept.pack()))
    while network.run_one():
        pass
    assert source.channel._links[ours].agreed is None
    assert not source.channel._receiver._offers
    for each in (source, target):
        each.channel.close()


def test_a_closed_channel_has_reported_all(make: Make) -> None:
    source, target = make("prefill", options=QUICK), make("decode", options=QUICK)
    introduce(source, target)
    tokens = prompt(1, 40)
    source.compute(tokens)
    ticket = source.send(tokens, "decode")
    until(lambda: target.arrivals.num_blocks, source, target)
    source.channel.close()
    source.poll()
    assert source.reports[ticket].status in (DONE, TransferStatus.CANCELLED)
    source.channel.cancel(Ticket(99))
    source.check(tokens)
