"""`TransferChannel` over every transport: what is sent arrives, verified, and nothing else does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from sagellm.comm.kv_transfer.messages import ChunkHead
from sagellm.comm.kv_transfer.options import ChannelOptions, CodecOf
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_transfer import Message, TransferStatus
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS
from tests.comm.kv_transfer.fabrics import FAKE, NAMES, transport
from tests.comm.kv_transfer.world import LAYOUT, SIZE, Instance, finish, introduce, prompt, until

Make = Callable[..., Instance]


@pytest.fixture(params=[*NAMES, FAKE])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes instances whose channels are closed at the end."""
    network = InProcessNetwork()
    with ExitStack() as stack:

        def made(name: str, *, place: str = "", **options: Any) -> Instance:
            """`place`: the node of the transport, if it differs from the name."""
            instance = Instance(name, transport(request.param, place or name, network), **options)
            stack.callback(instance.channel.close)
            return instance

        yield made


@pytest.mark.parametrize("has_views", [(True, True), (False, True), (True, False), (False, False)])
def test_what_is_sent_arrives(make: Make, has_views: tuple[bool, bool]) -> None:
    options = ChannelOptions(chunk_bytes=4000, credits=3)
    source = make("prefill", has_views=has_views[0], options=options)
    target = make("decode", has_views=has_views[1], options=options)
    introduce(source, target)
    prompts = [prompt(seed, 20) for seed in range(3)]
    for tokens in prompts:
        source.compute(tokens)
    tickets = [source.send(tokens, "decode", f"r{i}", b"note") for i, tokens in enumerate(prompts)]
    reports = [finish(source, ticket, target) for ticket in tickets]
    assert [report.status for report in reports] == [TransferStatus.DONE] * 3
    assert [report.num_tokens for report in reports] == [20 * SIZE] * 3
    for tokens in prompts:
        assert target.num_tokens(tokens) == 20 * SIZE
    until(lambda: len(target.received) == 3, target)
    first = target.received[0]
    assert (first.request_id, first.source, first.note, first.tokens) == (
        "r0",
        "prefill",
        b"note",
        prompts[0],
    )
    source.check(*prompts)
    target.check(*prompts)


def test_only_what_is_missing_is_sent(make: Make) -> None:
    source, target = make("prefill"), make("decode")
    introduce(source, target)
    tokens = prompt(1, 10)
    source.compute(tokens)
    target.compute(prompt(1, 4))
    report = finish(source, source.send(tokens, "decode"), target)
    assert (report.num_tokens, report.num_bytes) == (10 * SIZE, 6 * source.layout.bytes_per_block)
    again = finish(source, source.send(tokens, "decode"), target)
    assert (again.status, again.num_tokens, again.num_bytes) == (TransferStatus.DONE, 10 * SIZE, 0)
    target.check(tokens)


@pytest.mark.parametrize("has_views", [True, False])
def test_by_layer(make: Make, has_views: bool) -> None:
    options = ChannelOptions(chunk_bytes=2000)
    source, target = make("prefill", options=options), make("decode", has_views=has_views, options=options)
    introduce(source, target)
    tokens = prompt(2, 12)
    source.compute(tokens)
    ticket = source.send(tokens, "decode", by_layer=True)
    assert source.channel.layers_there(ticket) is None
    num_layers = source.layout.num_layers
    for layer in range(num_layers):
        source.channel.computed(ticket, layer + 1)
        if has_views and layer + 1 < num_layers:
            until(lambda: source.channel.layers_there(ticket) == layer + 1, source, target)  # noqa: B023
    assert finish(source, ticket, target).status is TransferStatus.DONE
    assert source.channel.layers_there(ticket) is None
    assert target.num_tokens(tokens) == 12 * SIZE
    target.check(tokens)


@pytest.mark.parametrize("has_views", [True, False])
def test_no_block_is_sent_before_its_layers_are_computed(make: Make, has_views: bool) -> None:
    """Without views whole blocks are sent, which have to wait for every layer."""
    options = ChannelOptions(chunk_bytes=2000)
    source, target = make("prefill", options=options), make("decode", has_views=has_views, options=options)
    introduce(source, target)
    tokens = prompt(2, 12)
    source.compute(tokens)
    right = source.memory.rows.copy()
    source.memory.rows[:] = 7
    ticket = source.send(tokens, "decode", by_layer=True)
    for _ in range(30):
        source.poll()
        target.poll()
        time.sleep(0.01)  # for the threads of a transport
    assert ticket not in source.reports
    assert target.num_tokens(tokens) == 0
    source.memory.rows[:] = right
    source.channel.computed(ticket, source.layout.num_layers)
    assert finish(source, ticket, target).status is TransferStatus.DONE
    target.check(tokens)


def test_both_directions_at_once(make: Make) -> None:
    first, second = make("a"), make("b")
    introduce(first, second)
    ours, theirs = prompt(3, 15), prompt(4, 15)
    first.compute(ours)
    second.compute(theirs)
    there, back = first.send(ours, "b"), second.send(theirs, "a")
    until(lambda: there in first.reports and back in second.reports, first, second)
    assert second.num_tokens(ours) == first.num_tokens(theirs) == 15 * SIZE
    first.check(ours, theirs)
    second.check(ours, theirs)


def codec_named(name: str) -> CodecOf:
    return lambda layout: CODECS.create(name, dtype="float32", layout=layout)


@pytest.mark.parametrize("name", CODECS.names())
def test_codecs(make: Make, name: str) -> None:
    source, target = (
        make(node, codec=codec_named(name), options=ChannelOptions(chunk_bytes=8000))
        for node in ("prefill", "decode")
    )
    introduce(source, target)
    tokens = prompt(5, 9)
    source.compute(tokens)
    source.memory.rows[:, 64:] = 0  # so that it can be compressed
    for block in source.index.block_ids(source.index.lookup(tokens)):
        source.memory.rows[block, :64].view(np.float32)[:] = block + np.arange(16) / 16
    report = finish(source, source.send(tokens, "decode"), target)
    assert report.status is TransferStatus.DONE
    whole = 9 * source.layout.bytes_per_block
    assert report.num_bytes == whole if name == "raw" else report.num_bytes < whole / 3
    blocks = [each.index.block_ids(each.index.lookup(tokens)) for each in (source, target)]
    before, after = (
        each.memory.rows[list(ids)].view(np.float32)
        for each, ids in zip((source, target), blocks, strict=True)
    )
    bound = codec_named(name)(source.layout).max_error
    assert (np.abs(after - before) <= bound * np.abs(before).max(axis=1, keepdims=True)).all()


def test_a_codec_that_needs_a_layout_is_refused_without_one() -> None:
    transport_of_fake = InProcessTransport("prefill", InProcessNetwork())
    with pytest.raises(ConfigError, match="use zstd or int8"):
        Instance("prefill", transport_of_fake, codec=codec_named("delta"), converts=False)


def test_a_target_without_room(make: Make) -> None:
    source, target = make("prefill"), make("decode", num_blocks=4)
    introduce(source, target)
    tokens = prompt(6, 5)
    source.compute(tokens)
    report = finish(source, source.send(tokens, "decode"), target)
    assert (report.status, report.reason) == (TransferStatus.RETRY, "no room for its blocks")
    target.check(tokens)


def test_another_model_is_refused_and_says_why(make: Make) -> None:
    source, target = make("prefill"), make("decode", fingerprint="other weights")
    introduce(source, target)
    tokens = prompt(7, 2)
    source.compute(tokens)
    for _ in range(2):
        report = finish(source, source.send(tokens, "decode"), target)
        assert report.status is TransferStatus.REFUSED
        assert "model fingerprint: weights at the sender, other weights at the receiver" in report.reason
    assert target.num_tokens(tokens) == 0


def test_a_cancelled_transfer_ends(make: Make) -> None:
    options = ChannelOptions(chunk_bytes=1600, credits=1)
    source, target = make("prefill", options=options), make("decode", options=options)
    introduce(source, target)
    tokens = prompt(8, 30)
    source.compute(tokens)
    ticket = source.send(tokens, "decode")
    until(lambda: target.pool.num_free < 64, source, target)
    source.channel.cancel(ticket)
    report = finish(source, ticket, target)
    assert report.status in (TransferStatus.CANCELLED, TransferStatus.DONE)
    until(lambda: target.received, target)
    until(lambda: not target.arrivals.num_blocks, target)
    assert target.num_tokens(tokens) == target.received[0].num_tokens
    target.check(tokens)


def test_a_closed_target_is_no_answer(make: Make) -> None:
    options = ChannelOptions(backoff_s=0.01)
    source, target = make("prefill", options=options), make("decode")
    introduce(source, target)
    tokens = prompt(9, 2)
    source.compute(tokens)
    target.channel.close()
    report = finish(source, source.send(tokens, "decode"))
    assert (report.status, report.num_tokens) == (TransferStatus.RETRY, 0)


def test_a_prompt_without_whole_blocks(make: Make) -> None:
    source, target = make("prefill"), make("decode")
    introduce(source, target)
    report = finish(source, source.send(prompt(10, 0, 3), "decode", note=b"n"), target)
    assert (report.status, report.num_tokens) == (TransferStatus.DONE, 0)
    until(lambda: target.received, target)
    assert target.received[0].note == b"n"


def test_a_write_that_comes_after_the_end_changes_no_block() -> None:
    """A chunk has its place; then its transfer ends, and its blocks are another prompt's."""
    network, places = InProcessNetwork(threaded=False), []

    class Holding(InProcessTransport):
        def take(self, link: int, message: Message) -> None:
            if not message.is_chunk:
                super().take(link, message)
                return
            data, head = [memoryview(b"".join(message.payload))], ChunkHead.unpack(message.head)
            for wrong in (head._replace(epoch=head.epoch + 1), head._replace(number=99)):
                assert self._endpoint.place(link, wrong.pack(), len(data[0])) is None
            places.append((self._endpoint.place(link, message.head, len(data[0])), data))

    options = ChannelOptions(chunk_bytes=LAYOUT.bytes_per_block, together=1)
    source = Instance("a", InProcessTransport("a", network), options=options)
    target = Instance("b", Holding("b", network), options=options, num_blocks=6)
    introduce(source, target)
    first, second = prompt(1, 6), prompt(2, 6)
    source.compute(first)
    ticket = source.send(first, "b")
    while len(places) < 6:
        network.run_one()
        source.poll()
        target.poll()
    source.channel.cancel(ticket)
    while not target.received:
        network.run_one()
        target.poll()
    assert target.compute(second)
    for place, data in places:
        assert place is not None
        place.write(data)
        target.channel.filled(1, place)
    assert target.num_tokens(second) == 6 * SIZE
    target.check(first, second)
    for each in (source, target):
        each.channel.close()
