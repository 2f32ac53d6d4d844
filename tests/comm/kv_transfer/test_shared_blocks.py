"""Chunks that a receiver copies from where they lie in the sender's blocks."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sagellm.comm.kv_transfer import blocks
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports import _slots, shared_memory
from sagellm.comm.kv_transfer.transports._connection import MAPPED, OutFrame, frame
from sagellm.comm.kv_transfer.transports.shared_memory import MappedPart, SharedMemoryTransport
from sagellm.core.protocols.kv_transfer import Message, TransferStatus
from tests.comm.kv_transfer.world import (
    HEAD_FIRST,
    KEY,
    LAYOUT,
    Instance,
    finish,
    introduce,
    prompt,
    until,
)

DONE = TransferStatus.DONE
BLOCKS = 24
BLOCK_BYTES = LAYOUT.bytes_per_block
OPTIONS = ChannelOptions(chunk_bytes=2 * BLOCK_BYTES, credits=6, together=3, backoff_s=0.02, drain_s=0.1)


@pytest.fixture(autouse=True)
def small_blocks_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_SMALL_BYTES", 0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def pair(stack: ExitStack, **given: Any) -> tuple[Instance, Instance]:
    """A sender whose blocks are shared, and a receiver."""
    named: dict[str, Any] = {"options": OPTIONS, "num_blocks": 2 * BLOCKS} | given
    source = Instance("a", SharedMemoryTransport(KEY), is_shared=True, **named)
    target = Instance("b", SharedMemoryTransport(KEY), **named)
    for each in (source, target):
        stack.callback(each.channel.close)
    introduce(source, target)
    return source, target


def transport_of(instance: Instance) -> SharedMemoryTransport:
    found = instance.channel._transport
    assert isinstance(found, SharedMemoryTransport)
    return found


def refuse(*given: Any, **named: Any) -> Any:
    raise AssertionError("a slot is used")


@pytest.mark.parametrize("by_layer", [False, True])
def test_chunks_take_no_slot(stack: ExitStack, by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_slots.SlotTransport, "reserve", refuse)
    source, target = pair(stack)
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    ticket = source.send(tokens, "b", by_layer=by_layer)
    if by_layer:
        source.channel.computed(ticket, LAYOUT.num_layers)
    assert finish(source, ticket, target).status is DONE
    until(lambda: target.received, source, target)
    assert target.num_tokens(tokens) == len(tokens) - 1
    assert target.channel.num_damaged == 0
    for each in (source, target):
        each.check(tokens)
    assert not any(transport_of(source)._reads.values()), "all were read"


def test_pieces_beside_each_other_are_one_part(stack: ExitStack) -> None:
    source, _ = pair(stack)
    transport, memory = transport_of(source), source.memory
    views = memory.views([3, 4, 9])  # type: ignore[attr-defined]
    assert transport._parts_of(views) == [
        MappedPart(3 * BLOCK_BYTES, 2 * BLOCK_BYTES),
        MappedPart(9 * BLOCK_BYTES, BLOCK_BYTES),
    ]
    assert transport._parts_of([*views, memoryview(bytearray(8))]) == [], "not all of it lies there"


def test_more_parts_than_a_head_has_room_for_go_through_the_socket(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sagellm.comm.kv_transfer.transports.shared_memory.MAX_HEAD_BYTES", 90)
    source, target = pair(stack)
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    assert finish(source, source.send(tokens, "b"), target).status is DONE
    assert not transport_of(source)._reads
    until(lambda: target.received, source, target)
    target.check(tokens)


def test_other_layouts_go_through_slots(stack: ExitStack) -> None:
    source, _ = pair(stack)
    other = LAYOUT.__class__(HEAD_FIRST, 3, 4, 8, LAYOUT.block_size, "float32")
    target = Instance("c", SharedMemoryTransport(KEY), layout=other, options=OPTIONS)
    stack.callback(target.channel.close)
    source.channel.add_peer(target.channel.metadata())
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    assert finish(source, source.send(tokens, "c"), target).status is DONE
    until(lambda: target.received, source, target)
    target.check(tokens)


def test_a_receiver_without_address_space_takes_chunks_from_slots(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any) -> memoryview:
        raise OSError("told to")

    monkeypatch.setattr(shared_memory, "mapped_to_read", refuse)
    source, target = pair(stack)
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    assert finish(source, source.send(tokens, "b"), target).status is DONE
    until(lambda: target.received, source, target)
    target.check(tokens)
    assert "by two copies, not one: told to" in caplog.text
    assert not transport_of(source)._reads


def test_blocks_that_change_before_they_are_read_do_not_verify(stack: ExitStack) -> None:
    """As they may once the sender has given a link up. The checksums are of what was copied."""
    source, target = pair(stack)
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    reader, before = transport_of(target), source.memory.rows.copy()
    take: Callable[..., Any] = reader._take_chunk
    num_left = [1]

    def late(*given: Any) -> Any:
        if num_left[0]:
            num_left[0] -= 1
            source.memory.rows[:] ^= 1
            take(*given)
            source.memory.rows[:] = before
        else:
            take(*given)

    reader._take_chunk = late  # type: ignore[method-assign,assignment]
    assert finish(source, source.send(tokens, "b"), target).status is DONE
    assert target.channel.num_damaged
    until(lambda: target.received, source, target)
    target.check(tokens)


def parts(*named: tuple[int, int]) -> bytes:
    return struct.pack("<Q", 1) + b"".join(struct.pack("<QQ", *each) for each in named)


@pytest.mark.parametrize(
    ("said", "num_parts"),
    [
        (parts((2 * BLOCKS * BLOCK_BYTES, BLOCK_BYTES)), 1),  # behind its end
        (parts(((1 << 64) - 64, BLOCK_BYTES)), 1),
        (parts((0, BLOCK_BYTES - 64)), 1),  # less than the payload
        (parts((0, BLOCK_BYTES), (0, 64)), 2),  # more
        (parts(), 0),
        (b"", 60_000),  # they are not named
    ],
)
def test_parts_that_are_named_badly_lose_the_link(stack: ExitStack, said: bytes, num_parts: int) -> None:
    """Then the same sender connects again, and names them well."""
    source, target = pair(stack)
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    sender = transport_of(source)
    right, left = sender._framed, [1]

    def wrong(connection: Any, message: Message) -> OutFrame:
        made = right(connection, message)
        if not message.is_chunk or not left:
            return made
        left.pop()
        payload = [memoryview(bytes(BLOCK_BYTES))]
        return OutFrame(
            frame(message.kind, message.head + said, payload, MAPPED, num_parts), made.token, peer_reads=True
        )

    sender._framed = wrong  # type: ignore[method-assign]
    ticket = source.send(tokens, "b")
    assert finish(source, ticket, target).status is DONE
    assert not left
    until(lambda: target.received, source, target)
    target.check(tokens)
    assert source.reports[ticket].num_bytes > BLOCKS * BLOCK_BYTES, "it was sent again"


def test_a_peer_that_shares_nothing_names_no_parts(stack: ExitStack) -> None:
    source = Instance("a", SharedMemoryTransport(KEY), options=OPTIONS)
    target = Instance("b", SharedMemoryTransport(KEY), options=OPTIONS)
    for each in (source, target):
        stack.callback(each.channel.close)
    introduce(source, target)
    sender = transport_of(source)
    framed: Callable[..., OutFrame] = sender._framed

    def mapped(connection: Any, message: Message) -> OutFrame:
        if not message.is_chunk:
            return framed(connection, message)
        payload = [memoryview(part) for part in message.payload]
        said = parts((0, sum(map(len, payload))))
        return OutFrame(frame(message.kind, message.head + said, payload, MAPPED, 1), message.token)

    sender._framed = mapped  # type: ignore[method-assign]
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    report = finish(source, source.send(tokens, "b"), target)
    assert report.status is TransferStatus.RETRY
    assert not target.num_tokens(tokens)


def test_messages_that_were_not_read_end_with_their_link(stack: ExitStack) -> None:
    """Their blocks are the sender's again, and a late word that they were read says nothing."""
    source, target = pair(stack)
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    reader, sender = transport_of(target), transport_of(source)
    tell: Callable[..., Any] = reader._tell_read
    silent = [True]
    reader._tell_read = lambda *given: None if silent[0] else tell(*given)  # type: ignore[method-assign]
    ticket = source.send(tokens, "b")
    until(lambda: target.num_tokens(tokens), source, target)
    assert ticket not in source.reports, "its blocks may still be read"
    report = finish(source, ticket, target)  # after drain_s and stall_s, or since the link is reset
    assert report.status is DONE
    assert not any(sender._reads.values())
    silent[0] = False
    more = prompt(2, BLOCKS - 1)
    source.compute(more)
    assert finish(source, source.send(more, "b"), target).status is DONE
    [(link, connection)] = sender._connections.items()
    sender._take_message(connection, Message(253, struct.pack("<QQ", 1, 99) + b"odd"))
    source.channel.check()
    assert link


def test_random_transfers_with_cancels_resets_and_blocks_that_change(stack: ExitStack) -> None:
    """Each block arrives verified or is reported; blocks are used again as soon as they are unpinned."""
    source, target = pair(stack)
    rng, outcomes = random.Random(7), dict.fromkeys(TransferStatus, 0)
    for number in range(120):
        tokens = prompt(number, rng.randrange(1, BLOCKS))
        source.compute(tokens)
        ticket, fault = source.send(tokens, "b", name=f"r{number}"), rng.random()
        for _ in range(rng.randrange(4)):
            source.poll()
            target.poll()
        if fault < 0.2:
            source.channel.cancel(ticket)
        elif fault < 0.4:
            for each in (source, target):
                for link in list(transport_of(each)._connections):
                    if rng.random() < 0.5:
                        transport_of(each).reset(link, "told to")
        outcomes[finish(source, ticket, target).status] += 1
        source.evict_all()
        source.memory.rows[:] = number % 251  # a late copy would bring this
        if rng.random() < 0.3:
            target.evict_all()
        target.check(tokens)
    assert outcomes[DONE] > 60
    assert not outcomes[TransferStatus.CORRUPT]
    until(lambda: not target.arrivals.num_blocks, source, target)
    target.channel.check()
    source.channel.check()


def test_blocks_are_shared_with_a_peer_that_has_the_key(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that hold nothing are shared with its challenge; blocks only after its proof."""
    sent: list[int] = []
    send = socket.send_fds

    def note(sock: socket.socket, data: list[bytes], fds: list[int]) -> int:
        sent.extend(os.fstat(fd).st_size for fd in fds)
        return send(sock, data, fds)

    monkeypatch.setattr(socket, "send_fds", note)
    source = Instance("a", SharedMemoryTransport(KEY), is_shared=True, options=OPTIONS)
    other = Instance("b", SharedMemoryTransport(b"another key of 16 bytes"), options=OPTIONS)
    for each in (source, other):
        stack.callback(each.channel.close)
    introduce(source, other)
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    assert finish(source, source.send(tokens, "b"), other).status is TransferStatus.RETRY
    assert sent
    assert len(source.memory.shared_pages.memory) not in sent  # type: ignore[attr-defined]
    connections = transport_of(source)._connections
    assert not connections
