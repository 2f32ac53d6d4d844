"""What the protocol of KV transfer costs beside moving bytes: framing, and CPU time.

Sender and receiver are in one process, so that both are counted. Copies, checksums and system calls are
timed one by one, on the clock of their thread; what is left of the process' CPU time is the protocol: Python
of channels, transports and prefix index, locks included. Taking the times adds to it, about 1 us a call.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sagellm.benchmarks.micro.kv_transfer_peer import BLOCK_TOKENS, TransferNode, transport_options
from sagellm.comm.kv_transfer import arriving_chunks, blocks
from sagellm.comm.kv_transfer.transports import TRANSPORTS
from sagellm.comm.kv_transfer.transports._connection import PREFIX
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_transfer import KVPath, Message, TransferStatus
from sagellm.core.types import Namespace, Tokens

COPIES, CALLS = "copies and checksums", "system calls"
TIMEOUT_S = 60.0
_SOCKET_CALLS = ("sendmsg", "recv_into", "recvmsg_into", "recvmsg", "send", "recv")


class TransferCosts:
    """CPU time in nanoseconds by kind of call, and bytes of frames beside payloads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ns: Counter[str] = Counter()
        self.framing_bytes = 0

    def timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, whose time is added to this kind."""

        def run(*given: Any, **named: Any) -> Any:
            began_ns = time.thread_time_ns()
            try:
                return call(*given, **named)
            finally:
                spent_ns = time.thread_time_ns() - began_ns
                with self._lock:
                    self.ns[kind] += spent_ns

        return run

    def framed(self, num_bytes: int) -> None:
        with self._lock:
            self.framing_bytes += num_bytes

    def clear(self) -> None:
        with self._lock:
            self.ns.clear()
            self.framing_bytes = 0


class _Timed:
    """A socket or selector whose system calls are timed."""

    def __init__(self, inner: Any, names: tuple[str, ...], spent: TransferCosts) -> None:
        self._inner = inner
        for name in names:
            if hasattr(inner, name):
                setattr(self, name, spent.timed(CALLS, getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _counted(kind: str, spent: TransferCosts) -> Any:
    """A transport that times its system calls and counts bytes of frames."""
    base: Any = TRANSPORTS.get(kind)

    class Counted(base):  # type: ignore[misc]
        def start(self, endpoint: Any) -> None:
            super().start(endpoint)
            for name, calls in (("_selector", ("select", "modify")), ("_waker", ("send",))):
                setattr(self, name, _Timed(getattr(self, name), calls, spent))

        def _register(self, sock: Any, link: int, *, is_ours: bool) -> Any:
            return super()._register(_Timed(sock, _SOCKET_CALLS, spent), link, is_ours=is_ours)

        def _take_chunk(self, connection: Any, found: Any, head: bytes) -> None:
            spent.framed(PREFIX.size + len(head))
            super()._take_chunk(connection, found, head)

        def _take_message(self, connection: Any, message: Message) -> None:
            payload_bytes = sum(memoryview(part).nbytes for part in message.payload)
            spent.framed(PREFIX.size + len(message.head) + payload_bytes)
            super()._take_message(connection, message)

    return Counted(**transport_options(kind))


@contextmanager
def _timed_copies(spent: TransferCosts) -> Iterator[None]:
    """Time the copies and checksums of all channels of this process."""
    replaced = [
        (module, name, getattr(module, name))
        for module in (blocks, arriving_chunks)
        for name in ("copy_with_checksums", "checksums")
    ]
    for module, name, call in replaced:
        setattr(module, name, spent.timed(COPIES, call))
    try:
        yield
    finally:
        for module, name, call in replaced:
            setattr(module, name, call)


class Loopback:
    """A sender and a receiver of this process, over one transport."""

    def __init__(self, kind: str, num_blocks: int) -> None:
        self.spent, self._num_blocks = TransferCosts(), num_blocks
        self._source, self._target = (
            TransferNode(name, _counted(kind, self.spent), num_blocks) for name in ("source", "target")
        )
        self._source.channel.add_peer(self._target.channel.metadata())
        self._tokens = Tokens(range(num_blocks * BLOCK_TOKENS))
        self._source.cache(self._tokens)

    def move(self) -> None:
        """Send all blocks once, each of 1 MB."""
        source, target = self._source, self._target
        ids = source.index.block_ids(source.index.lookup(self._tokens))
        path = KVPath("r", self._tokens, Namespace(), ids)
        source.channel.transfer(path, "target")
        end_s = time.monotonic() + TIMEOUT_S
        while not (reports := source.channel.poll()):
            target.channel.poll()
            target.channel.wait(0.001)
            if time.monotonic() > end_s:
                raise BookkeepingError("a transfer of the benchmark does not end")
        if reports[0].status is not TransferStatus.DONE:
            raise BookkeepingError(f"a transfer of the benchmark failed: {reports[0]}")
        target.channel.received()
        target.evict_all()

    def measure(self) -> dict[str, float]:
        """Costs of a move, for each block: CPU time in us, bytes of framing."""
        self.spent.clear()
        with _timed_copies(self.spent):
            began_ns = time.process_time_ns()
            self.move()
            whole_ns = time.process_time_ns() - began_ns
        found = {kind: self.spent.ns[kind] / self._num_blocks / 1000 for kind in (COPIES, CALLS)}
        found["protocol"] = whole_ns / self._num_blocks / 1000 - sum(found.values())
        found["framing"] = self.spent.framing_bytes / self._num_blocks
        return found

    def close(self) -> None:
        for node in (self._source, self._target):
            node.channel.close()
