"""Transfers over TCP through a proxy that delays, stalls, resets, repeats, reorders and damages."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sagellm.comm.kv_transfer import blocks
from sagellm.comm.kv_transfer.messages import Kind
from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports import _connection
from sagellm.comm.kv_transfer.transports._connection import PREFIX
from sagellm.comm.kv_transfer.transports.shared_memory import SharedMemoryTransport
from sagellm.comm.kv_transfer.transports.tcp import TcpTransport
from sagellm.core.errors import ConfigError, KVDataError
from sagellm.core.protocols.kv_transfer import KVPath, TransferReport, TransferStatus
from sagellm.core.types import Tokens
from tests.comm.kv_transfer.fabrics import LIBRARIES, transport
from tests.comm.kv_transfer.proxy import Proxy, Shuffler, damaged
from tests.comm.kv_transfer.world import (
    KEY,
    SIZE,
    SPACE,
    Instance,
    PairScene,
    finish,
    introduce,
    prompt,
    until,
)

ROOT = Path(__file__).resolve().parents[3]
QUICK = ChannelOptions(
    chunk_bytes=6000,
    credits=3,
    stall_s=0.3,
    offer_wait_s=0.2,
    backoff_s=0.02,
    drain_s=0.1,
    num_retries=3,
)
BLOCKS = 24


class Scene(PairScene):
    """A sender, a receiver, and a proxy between them."""

    def __init__(self, stack: ExitStack, **options: Any) -> None:
        given: dict[str, Any] = {"options": QUICK, "num_blocks": 128} | options
        self.source = Instance("prefill", TcpTransport(KEY, port=0), **given)
        self.target = Instance("decode", TcpTransport(KEY, port=0), **given)
        for each in (self.source, self.target):
            stack.callback(each.channel.close)
        self.proxy = Proxy(self.target.channel.metadata())
        stack.callback(self.proxy.close)
        self.source.channel.add_peer(self.proxy.metadata())
        self.tokens = prompt(1, BLOCKS)
        self.source.compute(self.tokens)

    def send(self) -> TransferReport:
        return finish(self.source, self.source.send(self.tokens, "decode"), self.target)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def is_chunk(frame: bytes) -> bool:
    return frame[4] == Kind.CHUNK


def test_messages_that_come_twice_and_in_another_order(scene: Scene) -> None:
    scene.send()
    for seed in range(4):
        scene.proxy.change = Shuffler(0.4, 0.3)
        scene.tokens = prompt(100 + seed, BLOCKS)
        scene.source.compute(scene.tokens)
        report = scene.send()
        assert report.status in (TransferStatus.DONE, TransferStatus.RETRY)
        scene.check()
        assert scene.target.num_tokens(scene.tokens) >= report.num_tokens


def test_delays_cost_time_only(scene: Scene) -> None:
    scene.proxy.delay_s = 0.005
    assert scene.send().status is TransferStatus.DONE
    scene.check()


def test_a_reset_is_resumed_and_only_the_rest_is_sent(scene: Scene) -> None:
    seen = 0

    def reset_once(frame: bytes, rng: random.Random) -> list[bytes] | None:
        nonlocal seen
        seen += is_chunk(frame)
        return None if seen == 6 and is_chunk(frame) else [frame]

    scene.proxy.change = reset_once
    report = scene.send()
    assert (report.status, report.num_tokens) == (TransferStatus.DONE, BLOCKS * SIZE)
    assert scene.proxy.num_connections == 2
    whole = BLOCKS * scene.source.layout.bytes_per_block
    assert whole < report.num_bytes < 2 * whole, "what had verified is not sent again"
    until(lambda: scene.target.received, scene.target)
    assert [each.status for each in scene.target.received] == [TransferStatus.DONE]
    scene.check()


def test_a_stall_ends_in_time(scene: Scene) -> None:
    def stall(frame: bytes, rng: random.Random) -> list[bytes]:
        scene.proxy.is_stalled = scene.proxy.is_stalled or is_chunk(frame)
        return [frame]

    scene.proxy.change = stall
    began = time.monotonic()
    report = scene.send()
    assert report.status is TransferStatus.RETRY
    assert time.monotonic() - began < 15
    scene.proxy.close()
    scene.check()


def test_a_network_that_is_cut_for_good(scene: Scene) -> None:
    ticket = scene.source.send(scene.tokens, "decode")
    until(lambda: scene.proxy.num_frames > 6, scene.source, scene.target)
    scene.proxy.close()
    report = finish(scene.source, ticket, scene.target)
    assert report.status in (TransferStatus.RETRY, TransferStatus.DONE)
    scene.check()
    assert scene.target.num_tokens(scene.tokens) >= report.num_tokens


def test_a_damaged_chunk_is_asked_for_again(scene: Scene) -> None:
    left = [1, 1, 1]

    def damage(frame: bytes, rng: random.Random) -> list[bytes]:
        if is_chunk(frame) and left:
            left.pop()
            return [damaged(frame, len(frame) - 1 - rng.randrange(2000))]
        return [frame]

    scene.proxy.change = damage
    assert scene.send().status is TransferStatus.DONE
    assert scene.target.channel.num_damaged == 3
    scene.check()


def test_a_link_that_always_damages_is_given_up(scene: Scene) -> None:
    scene.proxy.change = lambda frame, rng: [damaged(frame, len(frame) - 1) if is_chunk(frame) else frame]
    report = scene.send()
    assert (report.status, report.num_tokens) == (TransferStatus.CORRUPT, 0)
    assert "damaged again" in report.reason
    scene.check()
    assert scene.target.num_tokens(scene.tokens) == 0


@pytest.mark.parametrize("place", range(0, PREFIX.size + 150, 7))
def test_damage_of_any_byte_is_found(scene: Scene, place: int) -> None:
    """Of prefix and head: the connection is reset, and the transfer goes on with another."""
    left = [1]

    def damage(frame: bytes, rng: random.Random) -> list[bytes]:
        if left and is_chunk(frame):
            left.pop()
            return [damaged(frame, place)]
        return [frame]

    scene.proxy.change = damage
    assert scene.send().status is TransferStatus.DONE
    scene.check()


def test_late_data_finds_no_block(scene: Scene) -> None:
    """A chunk is held back until its transfer was cancelled, and its blocks are another prompt's."""
    held: list[bytes] = []

    def hold(frame: bytes, rng: random.Random) -> list[bytes]:
        if is_chunk(frame) and not held:
            held.append(frame)
            return []
        if held and frame[4] == Kind.OFFER:
            return [frame, held[0], held[0]]
        return [frame]

    scene.proxy.change = hold
    ticket = scene.source.send(scene.tokens, "decode")
    until(lambda: held, scene.source, scene.target)
    scene.source.channel.cancel(ticket)
    assert finish(scene.source, ticket, scene.target).status is TransferStatus.CANCELLED
    until(lambda: scene.target.received, scene.source, scene.target)
    first, scene.tokens = scene.tokens, prompt(2, BLOCKS)
    scene.source.compute(scene.tokens)
    assert scene.send().status is TransferStatus.DONE
    assert scene.target.channel.num_late >= 1
    scene.check()
    scene.target.check(first)


# -- keys


def test_another_key_is_not_let_in() -> None:
    with ExitStack() as stack:
        source = Instance("a", TcpTransport(b"one key of 16 bytes", port=0), options=QUICK)
        target = Instance("b", TcpTransport(b"other key, as long", port=0), options=QUICK)
        for each in (source, target):
            stack.callback(each.channel.close)
        introduce(source, target)
        tokens = prompt(1, 2)
        source.compute(tokens)
        report = finish(source, source.send(tokens, "b"), target)
        assert report.status is TransferStatus.RETRY
        assert "closed the connection" in report.reason or "reset" in report.reason
        assert not target.received


@pytest.mark.parametrize("kind", [TcpTransport, SharedMemoryTransport])
def test_a_short_key_is_refused(kind: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match="share one of 16 random bytes or more"):
        kind(b"short")


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 8, b"\0" * 4096, os.urandom(4096)])
def test_strangers_are_disconnected(scene: Scene, said: bytes) -> None:
    """They are told nothing but a random number, and others are served meanwhile."""
    address = scene.target.channel._transport.address()
    with socket.create_connection((str(address["host"]), int(address["port"]))) as stranger:
        stranger.settimeout(10)
        stranger.sendall(said)
        assert scene.send().status is TransferStatus.DONE
        if len(said) < 76:
            return
        answer = b"".join(iter(lambda: _received(stranger), b""))
        assert len(answer) <= 40


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionError:
        return b""


def test_a_recorded_handshake_is_worth_nothing(scene: Scene) -> None:
    scene.send()
    address = scene.target.channel._transport.address()
    place = (str(address["host"]), int(address["port"]))
    with socket.create_connection(place) as first, socket.create_connection(place) as second:
        challenges = [sock.recv(40, socket.MSG_WAITALL) for sock in (first, second)]
        assert challenges[0][:8] == challenges[1][:8]
        assert challenges[0][8:] != challenges[1][8:]


# -- peers that are killed


PEER = """
import sys
from sagellm.comm.kv_transfer import blocks as of_instance
from sagellm.comm.kv_transfer.options import ChannelOptions
from tests.comm.kv_transfer.fabrics import transport
from tests.comm.kv_transfer.world import Instance, prompt
kind, role, blocks, is_shared = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["shared"]
if is_shared:
    of_instance._SMALL_BYTES = 0
options = ChannelOptions(chunk_bytes=3000, credits=2)
me = Instance("peer", transport(kind), num_blocks=512, options=options, is_shared=is_shared)
print(me.channel.metadata().decode(), flush=True)
if role == "sender":
    me.compute(prompt(1, blocks))
    me.channel.add_peer(sys.stdin.readline().encode())
    me.send(prompt(1, blocks), "test")
while True:
    me.poll()
    me.channel.wait(0.01)
"""


@pytest.mark.parametrize("kind", ["tcp", "shared_memory", "shared blocks", *LIBRARIES])
@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_a_peer_is_killed_in_the_middle(kind: str, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_blocks, is_shared = 400, kind == "shared blocks"
    if is_shared:
        kind = "shared_memory"
        monkeypatch.setattr(blocks, "_SMALL_BYTES", 0)
    options = ChannelOptions(
        chunk_bytes=3000, credits=2, backoff_s=0.01, stall_s=5.0, offer_wait_s=1.0, resume_s=0.1
    )
    me = Instance("test", transport(kind), num_blocks=512, options=options, is_shared=is_shared)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, kind, role, str(num_blocks), "shared" if is_shared else ""],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT,
    )  # fmt: skip
    try:
        assert peer.stdin is not None
        assert peer.stdout is not None
        me.channel.add_peer(peer.stdout.readline())
        tokens = prompt(1, num_blocks)
        if role == "receiver":
            me.compute(tokens)
            ticket = me.send(tokens, "peer")
            until(lambda: me.channel._sender._transfers[ticket.transfer_id].num_bytes > 60_000, me)
            peer.send_signal(signal.SIGKILL)
            report = finish(me, ticket)
            assert report.status is TransferStatus.RETRY
        else:
            peer.stdin.write(me.channel.metadata() + b"\n")
            peer.stdin.flush()
            until(lambda: sum(len(each.landed) for each in me.channel._receiver._incoming.values()) > 20, me)
            peer.send_signal(signal.SIGKILL)
            until(lambda: me.received, me)
            [received] = me.received
            assert received.status is TransferStatus.RETRY
            assert 0 < received.num_tokens == me.num_tokens(tokens) < num_blocks * SIZE
        assert not me.arrivals.num_blocks
        me.check(tokens)
    finally:
        peer.kill()
        peer.communicate()
        me.channel.close()


def test_use_after_release(scene: Scene) -> None:
    """What has ended stays ended, and a closed channel says so."""
    ticket = scene.source.send(scene.tokens, "decode")
    report = finish(scene.source, ticket, scene.target)
    scene.source.channel.cancel(ticket)
    scene.source.channel.computed(ticket, 3)
    for _ in range(20):
        scene.source.poll()
        scene.target.poll()
    assert scene.source.reports == {ticket: report}
    for _ in range(2):
        scene.source.channel.close()
    with pytest.raises(ConfigError, match="closed"):
        scene.source.send(scene.tokens, "decode")
    scene.check()


def test_an_unknown_instance_is_named() -> None:
    source = Instance("a", TcpTransport(KEY, port=0))
    tokens = Tokens(range(SIZE))
    with pytest.raises(ConfigError, match="unknown instance 'b'"):
        source.channel.transfer(KVPath("r", tokens, SPACE, array("i", [0])), "b")
    source.channel.add_peer(b'{"node": "b", "address": {"transport": "tcp", "host": "127.0.0.1", "port": 1}}')
    with pytest.raises(ConfigError, match="4 tokens do not fill 2 blocks"):
        source.channel.transfer(KVPath("r", tokens, SPACE, array("i", [0, 1])), "b")
    with pytest.raises(ConfigError, match="a note has at most"):
        source.channel.transfer(KVPath("r", tokens, SPACE, array("i", [0]), bytes(1 << 20)), "b")
    with pytest.raises(ConfigError, match="no address of a transport tcp"):
        source.channel.add_peer(b'{"node": "x", "address": {"transport": "shm"}}')
    for metadata in (b"", b"{}", b"[]", b'{"node": 1, "address": {}}', b"[" * 10_000):
        with pytest.raises(KVDataError, match="no metadata"):
            source.channel.add_peer(metadata)
    source.channel.close()


@pytest.mark.parametrize("num_bytes", [1, 100, 6144])
def test_reading_a_little_at_a_time(scene: Scene, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that ends where a turn of its connection ends is taken at once."""
    monkeypatch.setattr(_connection, "READ_BYTES", num_bytes)
    assert scene.send().status is TransferStatus.DONE
    assert scene.proxy.num_connections == 1
    scene.check()


@pytest.mark.parametrize("num_fds", [0, 1, 2])
def test_a_stranger_shares_no_memory(num_fds: int) -> None:
    """Descriptors that come without the key are closed."""
    target = Instance("a", SharedMemoryTransport(KEY))
    path = "\0" + str(target.channel._transport.address()["name"])
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        stranger.settimeout(10)
        assert len(stranger.recv(40, socket.MSG_WAITALL)) == 40
        if num_fds:
            socket.send_fds(stranger, [bytes(76)], [0] * num_fds)
        else:
            stranger.sendall(bytes(76))
        assert _received(stranger) == b""
    until(lambda: len(os.listdir("/proc/self/fd")) == before, target)  # noqa: PTH208
    target.channel.close()
