"""Transports whose payloads a library moves: reads that fail, hang or come late, and links that are lost."""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest

from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports import TRANSPORTS, _fabric
from sagellm.comm.kv_transfer.transports._connection import SMALL, OutFrame, frame
from sagellm.comm.kv_transfer.transports._fabric import (
    _SLOTS,
    MAX_DESCRIPTION_BYTES,
    SLOTS,
    FabricTransport,
)
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.protocols.kv_transfer import Message, TransferStatus
from tests.comm.kv_transfer.fabrics import FAKE, LIBRARIES, FakeFabric, transport
from tests.comm.kv_transfer.test_networks import PEER, ROOT
from tests.comm.kv_transfer.world import KEY, SIZE, Instance, PairScene, finish, introduce, prompt, until

BLOCKS = 24
QUICK = ChannelOptions(
    chunk_bytes=6000, credits=3, stall_s=0.3, offer_wait_s=0.2, backoff_s=0.02, drain_s=0.1, num_retries=3
)


class Scene(PairScene):
    """A sender and a receiver. `fabric` is the receiver's, which reads."""

    def __init__(self, stack: ExitStack, kind: str = FAKE, **options: Any) -> None:
        given: dict[str, Any] = {"options": QUICK, "num_blocks": 128} | options
        self.source = Instance("prefill", transport(kind), **given)
        self.target = Instance("decode", transport(kind), **given)
        for each in (self.source, self.target):
            stack.callback(each.channel.close)
        introduce(self.source, self.target)
        self.tokens = prompt(1, BLOCKS)
        self.source.compute(self.tokens)

    @property
    def fabric(self) -> FakeFabric:
        fabric = self.of(self.target)._fabric
        assert isinstance(fabric, FakeFabric)
        return fabric

    @staticmethod
    def of(instance: Instance) -> FabricTransport:
        found = instance.channel._transport
        assert isinstance(found, FabricTransport)
        return found

    def send(self) -> TransferStatus:
        return finish(self.source, self.source.send(self.tokens, "decode"), self.target).status

    def anew(self, seed: int) -> None:
        self.tokens = prompt(seed, BLOCKS)
        self.source.compute(self.tokens)

    def link(self) -> int:
        [link] = self.of(self.source)._addresses
        return link


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def test_payloads_go_through_the_library(scene: Scene) -> None:
    assert scene.send() is TransferStatus.DONE
    assert scene.fabric.num_reads >= BLOCKS * scene.source.layout.bytes_per_block // 6000
    scene.check()


def test_a_read_that_fails_loses_the_link_and_is_resumed(scene: Scene) -> None:
    scene.fabric.num_failing = 1
    assert scene.send() is TransferStatus.DONE
    assert scene.target.num_tokens(scene.tokens) == BLOCKS * SIZE
    scene.check()


def test_a_library_that_always_fails_is_given_up(scene: Scene) -> None:
    scene.fabric.num_failing = 1 << 30
    assert scene.send() is TransferStatus.RETRY
    scene.check()
    scene.fabric.num_failing = 0
    assert scene.send() is TransferStatus.DONE
    scene.check()


def test_memory_of_a_read_that_hangs_is_not_used_again(scene: Scene) -> None:
    """Its link is lost, blocks go to another prompt, and only then do its bytes arrive."""
    fabric, receiver = scene.fabric, scene.of(scene.target)
    fabric.is_stuck = True
    assert scene.send() is TransferStatus.RETRY
    until(lambda: not any(each._active for each in receiver._readers.values()), scene.source, scene.target)
    hanging = [each for each in receiver._running if each._active]
    num_idle = len(receiver._idle)
    assert hanging
    scene.check()
    assert scene.target.compute(prompt(2, BLOCKS))
    assert len(receiver._idle) == num_idle, "each read hangs in memory of its own"
    fabric.is_stuck = False
    until(lambda: not any(each.is_alive() for each in hanging), scene.source, scene.target)
    assert len(receiver._idle) == num_idle + len(hanging)
    scene.target.check(scene.tokens, prompt(2, BLOCKS))
    assert scene.send() is TransferStatus.DONE
    scene.check()


def test_a_transport_closes_while_a_read_hangs() -> None:
    with ExitStack() as stack:
        scene = Scene(stack)
        scene.fabric.is_stuck = True
        scene.source.send(scene.tokens, "decode")
        until(lambda: scene.fabric.num_reads, scene.source, scene.target)
        began = time.monotonic()
        scene.target.channel.close()
        assert time.monotonic() - began < 4
        assert scene.fabric.is_closed


def test_a_library_that_does_not_return_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing it under a call would end the process."""
    monkeypatch.setattr(_fabric, "CLOSE_S", 0.1)
    waits = threading.Event()
    with ExitStack() as stack:
        scene = Scene(stack)
        right = scene.fabric.connect
        monkeypatch.setattr(scene.fabric, "connect", lambda said: waits.wait(20) and right(said))
        scene.source.send(scene.tokens, "decode")
        until(lambda: scene.of(scene.target)._running, scene.source, scene.target)
        scene.target.channel.close()
        assert not scene.fabric.is_closed
        waits.set()


@pytest.mark.parametrize("kind", [FAKE, *LIBRARIES])
def test_a_link_that_is_reset_connects_again(kind: str) -> None:
    """Memory and connections of the library are used again, and those of lost links are not."""
    with ExitStack() as stack:
        scene = Scene(stack, kind)
        for seed in range(4):
            scene.anew(10 + seed)
            ticket = scene.source.send(scene.tokens, "decode")
            until(lambda: scene.target.pool.num_free < 128, scene.source, scene.target)
            scene.of(scene.source).reset(scene.link(), "a test resets it")
            report = finish(scene.source, ticket, scene.target)
            assert report.status is TransferStatus.DONE
            scene.check()
            scene.target.evict_all()
        until(lambda: len(scene.of(scene.target)._running) <= 1, scene.source, scene.target)
        assert len(scene.of(scene.source)._idle) + len(scene.of(scene.source)._regions) <= 2


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_peer_that_stops_and_goes_on(kind: str) -> None:
    """Its reads hang, its blocks become another prompt's, and then its bytes come."""
    options = ChannelOptions(chunk_bytes=3000, credits=2, stall_s=0.5, offer_wait_s=0.2, resume_s=0.1)
    me = Instance("test", transport(kind), num_blocks=512, options=options)
    first, second = prompt(1, 400), prompt(2, 500)
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, kind, "sender", "400"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
    )  # fmt: skip
    try:
        assert peer.stdin is not None
        assert peer.stdout is not None
        me.channel.add_peer(peer.stdout.readline())
        peer.stdin.write(me.channel.metadata() + b"\n")
        peer.stdin.flush()
        until(lambda: sum(len(each.landed) for each in me.channel._receiver._incoming.values()) > 20, me)
        peer.send_signal(signal.SIGSTOP)
        until(lambda: not me.arrivals.num_blocks, me)
        me.evict_all()
        assert me.compute(second)
        peer.send_signal(signal.SIGCONT)
        until(lambda: not any(each._is_ended for each in Scene.of(me)._running), me)
        me.check(first, second)
    finally:
        peer.kill()
        peer.communicate()
        me.channel.close()


def test_a_chunk_that_was_made_for_a_lost_link_is_not_sent(scene: Scene) -> None:
    """Its slot may be another chunk's on the connection that follows."""
    assert scene.send() is TransferStatus.DONE
    sender, link = scene.of(scene.source), scene.link()
    reserved = [sender.reserve(link, 100) for _ in range(2)]
    assert None not in reserved
    sender.reset(link, "a test resets it")
    until(lambda: link not in sender._connections, scene.source, scene.target)
    assert len(sender._left) == 1
    assert not sender._idle
    num_reads, sent = scene.fabric.num_reads, threading.Event()
    [[first], [second]] = [each for each in reserved if each is not None]
    sender.post(link, Message(5, b"", [first], is_chunk=True, token=1))
    sender.call(sent.set)
    assert sent.wait(10)
    assert link not in sender._connections, "nothing connects for it"
    sender.discard(link, second)
    assert len(sender._idle) == 1
    assert not sender._left
    scene.anew(3)
    assert scene.send() is TransferStatus.DONE
    assert scene.fabric.num_reads > num_reads
    scene.check()


@pytest.mark.parametrize(
    ("head", "description"),
    [
        (_SLOTS.pack(4096, 8, 0), b"fake"),  # a second time
        (b"", b"fake"),
        (_SLOTS.pack(4096, 1 << 20, 0), b"fake"),
        (_SLOTS.pack(1 << 60, 1 << 10, 1 << 60), b"fake"),
        (_SLOTS.pack(4096, 8, 0), bytes(MAX_DESCRIPTION_BYTES + 1)),
        (_SLOTS.pack(4096, 8, 0), b"another library"),
    ],
)
def test_slots_that_are_described_badly_lose_the_link(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, head: bytes, description: bytes
) -> None:
    """Then the same sender connects again, and describes them well."""
    sender, left = scene.of(scene.source), [1]
    right = sender._open

    def wrong(connection: Any) -> None:
        if left and connection.is_ours:
            left.pop()
            sent = frame(SLOTS, head, [memoryview(description)], SMALL)
            connection.outgoing.append(OutFrame(sent))
        right(connection)

    monkeypatch.setattr(sender, "_open", wrong)
    assert scene.send() is TransferStatus.DONE
    assert not left
    scene.check()


def test_random_failures(scene: Scene) -> None:
    """Whatever fails, what is in the index is right, and each transfer ends."""
    rng, prompts = random.Random(7), [scene.tokens]
    for seed in range(20):
        tokens = prompt(100 + seed, BLOCKS)
        prompts.append(tokens)
        scene.target.evict_all()
        scene.source.evict_all()
        scene.source.compute(tokens)
        scene.fabric.num_failing = rng.choice([0, 1, 2])
        scene.fabric.is_stuck = rng.random() < 0.2
        ticket = scene.source.send(tokens, "decode")
        if rng.random() < 0.3:
            scene.of(scene.source).reset(scene.link(), "a test resets it")
        release = threading.Timer(0.2, lambda: setattr(scene.fabric, "is_stuck", False))
        release.start()
        finish(scene.source, ticket, scene.target)
        release.join()
        until(lambda: not scene.target.arrivals.num_blocks, scene.source, scene.target)
        for each in (scene.source, scene.target):
            each.check(*prompts)


@pytest.mark.parametrize(
    ("name", "package"), [("nixl", "nixl-cu12"), ("mooncake", "mooncake-transfer-engine-non-cuda")]
)
def test_a_missing_package_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., ModuleType] = importlib.import_module

    def missing(module: str, *rest: Any) -> ModuleType:
        if module.startswith("nixl"):
            raise ModuleNotFoundError(module)
        return right(module, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(MissingExtraError, match=rf"needs {package}, which is not installed: .*\[{name}\]"):
        TRANSPORTS.create(name, key=KEY)


@pytest.mark.parametrize("num_slots", [0, 1 << 11])
def test_slots_have_a_limit(num_slots: int) -> None:
    with pytest.raises(ConfigError, match="a link has 1 to 1024 slots"):
        FabricTransport(FakeFabric(), KEY, port=0, num_slots=num_slots)
