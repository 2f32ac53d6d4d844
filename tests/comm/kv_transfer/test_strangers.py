"""Connections of others keep no peer out, and addresses are those that a peer can reach."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from sagellm.comm.kv_transfer.options import ChannelOptions
from sagellm.comm.kv_transfer.transports import shared_memory
from sagellm.comm.kv_transfer.transports._stream import MAX_UNPROVEN
from sagellm.comm.kv_transfer.transports.shared_memory import SharedMemoryTransport
from sagellm.comm.kv_transfer.transports.tcp import TcpTransport
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_transfer import TransferStatus, TransportEngine
from tests.comm.kv_transfer.world import KEY, Instance, finish, introduce, prompt, until

QUICK = ChannelOptions(chunk_bytes=6000, stall_s=5.0, offer_wait_s=1.0, backoff_s=0.02, num_retries=0)
MAKERS: dict[str, Callable[[], TransportEngine]] = {
    "tcp": lambda: TcpTransport(KEY, port=0),
    "shared_memory": lambda: SharedMemoryTransport(KEY),
}
TOKENS = prompt(1, 8)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def pair(stack: ExitStack, *transports: TransportEngine) -> tuple[Instance, Instance]:
    source, target = (
        Instance(name, each, options=QUICK) for name, each in zip("ab", transports, strict=True)
    )
    for each in (source, target):
        stack.callback(each.channel.close)
    introduce(source, target)
    source.compute(TOKENS)
    return source, target


def stranger_at(instance: Instance) -> socket.socket:
    address = instance.channel._transport.address()
    sock = socket.socket(socket.AF_INET if "host" in address else socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect((address["host"], address["port"]) if "host" in address else "\0" + str(address["name"]))
    return sock


@pytest.mark.parametrize("kind", MAKERS)
def test_idle_strangers_keep_no_peer_out(kind: str, stack: ExitStack) -> None:
    """The oldest are sent away, and all others stay until their time is over."""
    source, target = pair(stack, MAKERS[kind](), MAKERS[kind]())
    strangers = [stack.enter_context(stranger_at(target)) for _ in range(MAX_UNPROVEN + 6)]
    for sock in strangers:
        assert len(sock.recv(40, socket.MSG_WAITALL)) == 40, "each was accepted"
    assert finish(source, source.send(TOKENS, "b"), target).status is TransferStatus.DONE
    assert [sock.recv(1) for sock in strangers[:7]] == [b""] * 7
    strangers[-1].setblocking(False)
    with pytest.raises(BlockingIOError):
        strangers[-1].recv(1)


@pytest.mark.parametrize("failure", [errno.EMFILE])
def test_without_descriptors_the_thread_does_not_spin(failure: int, stack: ExitStack) -> None:
    calls = []

    class Full(socket.socket):
        is_full = True

        def accept(self) -> Any:
            calls.append(time.monotonic())
            if self.is_full:
                raise OSError(failure, os.strerror(failure))
            return super().accept()

    class FullTransport(TcpTransport):
        def _listen(self) -> socket.socket:
            with super()._listen() as made:
                return Full(made.family, made.type, made.proto, made.detach())

    source, target = pair(stack, TcpTransport(KEY, port=0), FullTransport(KEY, port=0))
    ticket = source.send(TOKENS, "b")
    until(lambda: len(calls) > 1, source, target)
    assert calls[1] - calls[0] > 0.4, "a pause in between"
    target.channel._transport._listener.is_full = False  # type: ignore[attr-defined]
    assert finish(source, ticket, target).status is TransferStatus.DONE


def test_a_peer_that_is_gone_without_a_word_is_noticed(stack: ExitStack) -> None:
    """The kernel asks on both sides, where nothing is sent."""
    source, target = pair(stack, TcpTransport(KEY, port=0), TcpTransport(KEY, port=0))
    assert finish(source, source.send(TOKENS, "b"), target).status is TransferStatus.DONE
    for each in (source, target):
        [connection] = each.channel._transport._connections.values()  # type: ignore[attr-defined]
        for level, name in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY),
        ):
            assert connection.sock.getsockopt(level, name)
        assert connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15


def test_a_stranger_leaves_no_descriptors(stack: ExitStack) -> None:
    """With one byte each, it could send many before it has said anything."""
    _, target = pair(stack, SharedMemoryTransport(KEY), SharedMemoryTransport(KEY))
    with stranger_at(target) as stranger:
        assert len(stranger.recv(40, socket.MSG_WAITALL)) == 40
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_slowly(stranger)
        assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def send_slowly(stranger: socket.socket) -> None:
    for _ in range(70):
        socket.send_fds(stranger, [b"x"], [0])
        time.sleep(0.005)


# -- users of one host


@contextmanager
def other_user() -> Iterator[None]:
    """This thread's system calls are another user's; the process' too, so tests of it run alone."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.root
def test_other_users_are_sent_away_before_anything_is_said(stack: ExitStack) -> None:
    _, target = pair(stack, SharedMemoryTransport(KEY), SharedMemoryTransport(KEY))
    with other_user():
        stranger = stack.enter_context(stranger_at(target))
    assert stranger.recv(40) == b""


@pytest.mark.root
def test_nothing_is_said_to_another_users_server(stack: ExitStack) -> None:
    """One that has taken the name of an instance that was killed."""
    source, target = pair(stack, SharedMemoryTransport(KEY), SharedMemoryTransport(KEY))
    address = target.channel._transport.address()
    target.channel.close()
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    with other_user():
        server.bind("\0" + str(address["name"]))
        server.listen()
    report = finish(source, source.send(TOKENS, "b"))
    assert report.status is TransferStatus.RETRY
    assert "the peer runs as user 65534, this instance as 0" in report.reason


def test_a_link_shares_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_SHARED_BYTES", 4096)
    with pytest.raises(ConfigError, match="set num_slots or chunk_bytes lower"):
        Instance("a", SharedMemoryTransport(KEY))


# -- addresses


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_an_address_that_reaches_no_host_is_refused(host: str, stack: ExitStack) -> None:
    if host == "::" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with pytest.raises(ConfigError, match="give `advertise`"):
        Instance("a", TcpTransport(KEY, host=host, port=0))
    advertised = TcpTransport(KEY, host="0.0.0.0", port=0, advertise="localhost")
    source, target = pair(stack, TcpTransport(KEY, port=0), advertised)
    assert advertised.address()["host"] in ("127.0.0.1", "::1")
    if advertised.address()["host"] == "127.0.0.1":
        assert finish(source, source.send(TOKENS, "b"), target).status is TransferStatus.DONE


@pytest.mark.parametrize("host", ["decode-1.example", "", "x" * 300, "1.2.3.4.5", "\ud800", "a\0b"])
def test_names_are_not_resolved_here(host: str) -> None:
    """A resolver that is slow would stop all links."""
    transport = TcpTransport(KEY, port=0)
    with pytest.raises(ConfigError, match="is no IP address: an instance advertises addresses"):
        transport.connect({"transport": "tcp", "host": host, "port": 5600})
    for nowhere in ("0.0.0.0", "::", "0:0::0"):
        with pytest.raises(ConfigError, match="no host is reached"):
            transport.connect({"transport": "tcp", "host": nowhere, "port": 5600})
    transport.close()


def test_the_thread_asks_no_resolver(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pair(stack, TcpTransport(KEY, host="localhost", port=0), TcpTransport(KEY, port=0))
    asks = socket.getaddrinfo

    def numeric(*given: Any, **named: Any) -> Any:
        is_numeric = named.get("flags", 0) & socket.AI_NUMERICHOST
        assert is_numeric, (threading.current_thread().name, given)
        return asks(*given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", numeric)
    assert finish(source, source.send(TOKENS, "b"), target).status is TransferStatus.DONE


def test_a_network_that_cannot_be_reached_says_so(stack: ExitStack) -> None:
    source, _ = pair(stack, TcpTransport(KEY, port=0), TcpTransport(KEY, port=0))
    address = '{"transport": "tcp", "host": "255.255.255.255", "port": 9}'
    source.channel.add_peer(f'{{"node": "c", "address": {address}}}'.encode())
    report = finish(source, source.send(TOKENS, "c"))
    assert report.status is TransferStatus.RETRY
    assert report.reason.startswith("cannot connect: ")


@pytest.mark.parametrize("name", ["", "x" * 100, "é", 7])
def test_a_name_that_no_socket_has(name: object) -> None:
    transport = SharedMemoryTransport(KEY)
    with pytest.raises(ConfigError, match="no address of a transport shared_memory"):
        transport.connect({"transport": "shared_memory", "name": name})  # type: ignore[dict-item]
    transport.close()
