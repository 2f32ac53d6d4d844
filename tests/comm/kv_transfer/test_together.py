"""Chunks that share a message: how many there are, and what becomes of each."""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from sagellm.comm.kv_transfer.arriving_chunks import split
from sagellm.comm.kv_transfer.chunks import ChunkSpan
from sagellm.comm.kv_transfer.messages import MAX_TOGETHER, Accept, ChunkHead
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.outgoing import Outgoing
from sagellm.comm.kv_transfer.transports import _connection
from sagellm.comm.kv_transfer.transports._connection import SLOT, OutFrame, frame
from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork, InProcessTransport
from sagellm.comm.kv_transfer.transports.shared_memory import SharedMemoryTransport
from sagellm.comm.kv_transfer.transports.tcp import TcpTransport
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_transfer import (
    KVPath,
    Message,
    Ticket,
    TransferReport,
    TransferStatus,
    TransportEngine,
)
from sagellm.core.types import Tokens
from tests.comm.kv_transfer.world import (
    KEY,
    LAYOUT,
    SPACE,
    Inline,
    Instance,
    PairScene,
    finish,
    introduce,
    prompt,
    until,
)

DONE = TransferStatus.DONE
CHUNK_BYTES = LAYOUT.bytes_per_block
BLOCKS = 20


class NotingTransport(InProcessTransport):
    """Notes which chunks a message has. `change` may replace it."""

    def __init__(self, node: str, network: InProcessNetwork) -> None:
        super().__init__(node, network)
        self.posted: list[range] = []
        self.change: Callable[[ChunkHead, Message], Message] = lambda head, message: message

    def post(self, link: int, message: Message) -> None:
        if message.is_chunk:
            head = ChunkHead.unpack(message.head)
            self.posted.append(head.numbers)
            message = self.change(head, message)
        super().post(link, message)


class Scene(PairScene):
    """A sender, whose messages are noted, and a receiver, on a network that delivers when it is told to."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        self.network, self.clock = InProcessNetwork(threaded=False), ManualClock()
        given = ChannelOptions(chunk_bytes=CHUNK_BYTES, **options)
        self.ours = NotingTransport("a", self.network)
        self.source, self.target = (
            Instance(each.node, each, options=given, clock=self.clock, worker=Inline())
            for each in (self.ours, InProcessTransport("b", self.network))
        )
        for each in (self.source, self.target):
            stack.callback(each.channel.close)
        introduce(self.source, self.target)
        self.tokens = prompt(1, BLOCKS)
        self.source.compute(self.tokens)

    def send(self) -> TransferReport:
        ticket = self.source.send(self.tokens, "b")
        while ticket not in self.source.reports:
            while self.network.run_one():
                pass
            for each in (self.source, self.target):
                each.poll()
        return self.source.reports[ticket]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def sizes(ranges: Sequence[range]) -> list[int]:
    return [len(each) for each in ranges]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [8, 8, 4]),
        ({"together": 1}, [1] * BLOCKS),
        ({"together": 16}, [8, 8, 4]),  # half of the credits, so that both sides have something to do
        ({"credits": 3}, [2] * 10),
        ({"credits": 1}, [1] * BLOCKS),
    ],
)
def test_how_many_chunks_share_a_message(
    stack: ExitStack, options: dict[str, Any], expected: list[int]
) -> None:
    scene = Scene(stack, **options)
    assert scene.send().status is DONE
    assert sizes(scene.ours.posted) == expected
    assert [number for each in scene.ours.posted for number in each] == list(range(BLOCKS))
    scene.check()


def test_a_damaged_chunk_is_asked_for_again_alone(stack: ExitStack) -> None:
    scene, left = Scene(stack), [1]

    def damage(head: ChunkHead, message: Message) -> Message:
        if 10 in head.numbers and left:
            left.pop()
            data = bytearray(b"".join(message.payload))
            data[(10 - head.number) * CHUNK_BYTES + 5] ^= 1
            return message._replace(payload=[data])
        return message

    scene.ours.change = damage
    report = scene.send()
    assert (report.status, report.num_bytes) == (DONE, (BLOCKS + 1) * CHUNK_BYTES)
    assert range(10, 11) in scene.ours.posted
    assert scene.target.channel.num_damaged == 1
    scene.check()


def test_messages_whose_chunks_have_come_in_part_are_dropped_whole(stack: ExitStack) -> None:
    """No transfer is harmed by chunks that are named again, with others, or beyond its plan."""
    scene = Scene(stack, together=4)

    def repeat(head: ChunkHead, message: Message) -> Message:
        if head.number == 4:
            for first, count in ((2, 4), (BLOCKS - 1, 4), (0, 4)):
                wrong = head._replace(number=first, checksums=head.checksums[:count])
                InProcessTransport.post(scene.ours, 1, message._replace(head=wrong.pack(), token=99))
        return message

    scene.ours.change = repeat
    assert scene.send().status is DONE
    assert scene.target.channel.num_late == 12
    scene.check()


def outgoing(num_chunks: int, num_credits: int) -> Outgoing:
    made = Outgoing(
        Ticket(1), KVPath("r", Tokens(), SPACE, array("i")), "b", 1, False, num_chunks, [num_chunks], 0.0, 0.0
    )
    plan = [ChunkSpan.of(i, i + 1, ((0, 64),)) for i in range(num_chunks)]
    made.begin(Accept(1, 1, 1, 0, num_credits), plan, num_credits, now=10.0)
    return made


def test_messages_stay_large_while_credits_come_back_one_by_one() -> None:
    made = outgoing(40, 16)
    assert [made.next_chunks(8) for _ in range(3)] == [range(8), range(8, 16), range(0)]
    for number in range(7):
        made.landed([number])
        assert not made.next_chunks(8), "others that are on their way bring the missing credits"
    made.landed([7])
    assert made.next_chunks(8) == range(16, 24)
    made.take_back(range(20, 24))
    assert made.next_chunks(4) == range(20, 24)
    made.landed(range(8, 24))
    assert [made.next_chunks(8) for _ in range(3)] == [range(24, 32), range(32, 40), range(0)]


def test_chunks_of_a_message_follow_one_another() -> None:
    made = outgoing(6, 16)
    assert made.next_chunks(2) == range(2)
    made.landed([0])
    made.take_back(range(1, 2))
    made.todo.remove(2)
    assert made.next_chunks(8) == range(1, 2)
    assert made.next_chunks(8) == range(3, 6)


def test_over_a_slow_link_a_message_has_few_chunks() -> None:
    made = outgoing(40, 16)
    assert made.num_within(0.5, 10.001, 8) == 1, "nothing is known of the link"
    made.next_chunks(8)
    made.landed(range(6))
    assert made.num_within(0.5, 10.001, 8) == 8
    assert made.num_within(0.5, 11.0, 8) == 3, "six in a second"
    assert made.num_within(0.5, 100.0, 8) == 1


def test_the_number_has_a_limit() -> None:
    with pytest.raises(ConfigError, match=f"together is {MAX_TOGETHER + 1}, at most {MAX_TOGETHER}"):
        ChannelOptions(together=MAX_TOGETHER + 1)
    for count in (0, MAX_TOGETHER + 1):
        head = ChunkHead(1, 2, 3, bytes(16), bytes(32), "raw", (7,) * count)
        with pytest.raises(KVDataError, match=f"no head of 1 to {MAX_TOGETHER} chunks"):
            ChunkHead.unpack(head.pack())


@pytest.mark.parametrize("parts", [[10], [3, 7], [4, 6], [1] * 10, [2, 6, 2], [9, 1]])
def test_bytes_are_split_by_chunk(parts: list[int]) -> None:
    whole, at = memoryview(bytes(range(10))), 0
    data = []
    for size in parts:
        data.append(whole[at : at + size])
        at += size
    found = split(data, [4, 1, 5])
    assert [b"".join(each) for each in found] == [bytes(whole[:4]), bytes(whole[4:5]), bytes(whole[5:])]


# -- slots


def named(*slots: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<HI", *each) for each in slots)


@pytest.mark.parametrize(
    ("slots", "num_slots"),
    [
        (named((200, CHUNK_BYTES)), 1),  # there are 16
        (named((0, 1 << 30)), 1),
        (named((0, CHUNK_BYTES - 64)), 1),  # less than the payload
        (named((0, CHUNK_BYTES), (1, 64)), 2),  # more
        (b"", 0),
        (b"", 60_000),  # they are not named
    ],
)
def test_slots_that_are_named_badly_lose_the_link(stack: ExitStack, slots: bytes, num_slots: int) -> None:
    """Then the same sender connects again, and names them well."""
    options = ChannelOptions(chunk_bytes=CHUNK_BYTES, backoff_s=0.02)
    sender = SharedMemoryTransport(KEY)
    source, target = (
        Instance(name, each, options=options)
        for name, each in (("a", sender), ("b", SharedMemoryTransport(KEY)))
    )
    for each in (source, target):
        stack.callback(each.channel.close)
    introduce(source, target)
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    right, left = sender._framed, [1]

    def wrong(connection: Any, message: Message) -> OutFrame:
        made = right(connection, message)
        if not message.is_chunk or not left:
            return made
        left.pop()
        payload = [memoryview(bytes(CHUNK_BYTES))]
        buffers = frame(message.kind, message.head + slots, payload, SLOT, num_slots)
        return OutFrame(buffers, made.token, peer_reads=True)

    sender._framed = wrong  # type: ignore[method-assign]
    ticket = source.send(tokens, "b")
    assert finish(source, ticket, target).status is DONE
    assert not left
    until(lambda: target.received, source, target)
    target.check(tokens)
    assert source.reports[ticket].num_bytes > BLOCKS * CHUNK_BYTES, "it was sent again"


@pytest.mark.parametrize(
    ("make", "side"),
    [
        (SharedMemoryTransport, "sender"),
        (SharedMemoryTransport, "receiver"),
        (partial(TcpTransport, port=0), "sender"),
    ],
)
def test_both_sides_copy_at_the_same_time(
    stack: ExitStack, make: Callable[[bytes], TransportEngine], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message leaves before the next one is made, and is acknowledged before the next one is taken."""
    monkeypatch.setattr(_connection, "READ_BYTES", CHUNK_BYTES)
    source, target = (
        Instance(name, make(KEY), options=ChannelOptions(chunk_bytes=CHUNK_BYTES, together=2, credits=4))
        for name in "ab"
    )
    for each in (source, target):
        stack.callback(each.channel.close)
    introduce(source, target)
    tokens = prompt(1, BLOCKS)
    source.compute(tokens)
    chunks, waits = target.channel._receiver.chunks, iter([False, True])
    was_heard, found = threading.Event(), []
    ours, theirs = source.channel._sender, chunks.verify

    def copied(call: Callable[..., Any]) -> Callable[..., Any]:
        """Before its second copy this side waits for the other to have heard of its first."""

        def run(*given: Any) -> Any:
            if next(waits, False):
                found.append(was_heard.wait(10))
            return call(*given)

        return run

    def heard(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            was_heard.set()
            return call(*given)

        return run

    if side == "sender":
        monkeypatch.setattr(ours, "_made", copied(ours._made))
        monkeypatch.setattr(chunks, "verify", heard(theirs))
    else:
        monkeypatch.setattr(chunks, "verify", copied(theirs))
        monkeypatch.setattr(ours, "acknowledged", heard(ours.acknowledged))
    assert finish(source, source.send(tokens, "b"), target).status is DONE
    assert found == [True]
