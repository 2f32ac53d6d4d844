"""`sagellm bench micro kv_transfer`: KV to another process, beside plain copies.

Section b: GB/s of a path of distinct 1 MB blocks, all of it with authentication, checksums and the receiver's
prefix index. `memcpy` copies the same blocks within one process, `raw socket` sends them in a loop over TCP
loopback. Each round measures all, one after the other; medians of the rounds, and of the rounds' ratios. The
CPU time of both sides says what bounds a rate where other processes use the machine.

Section c: the same over TCP loopback beside NIXL and Mooncake, if they are installed: alone, where they write
blocks and do nothing else, and as transports under our protocol.

Section d: what the protocol adds to a chunk of 1 MB, of both sides: bytes of framing, and CPU time that is no
copy, no checksum and no system call. Medians of the rounds, which measure all transports one after the other.
"""

from __future__ import annotations

import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from sagellm.benchmarks.micro.cases import MicroBenchmark, MicroBenchPlan, MicroBenchRow, Stopwatch
from sagellm.benchmarks.micro.kv_transfer_overhead import CALLS, COPIES, Loopback
from sagellm.benchmarks.micro.kv_transfer_peer import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    RAW,
    OneArray,
    TransferNode,
    transport_options,
)
from sagellm.benchmarks.micro.kv_transfer_plain import (
    PLAIN_MOONCAKE,
    PLAIN_NIXL,
    WRITERS,
    MooncakeWriter,
    NixlWriter,
    force_tcp,
    installed,
)
from sagellm.comm.kv_transfer.transports import TRANSPORTS
from sagellm.core.errors import BookkeepingError, UnknownNameError
from sagellm.core.processes import child_environment
from sagellm.core.protocols.kv_transfer import KVPath, TransferStatus
from sagellm.core.types import Namespace, Tokens

MEMCPY, RAW_SOCKET = "memcpy", "raw socket"
REFERENCES = MappingProxyType({"shared_memory": MEMCPY, "tcp": RAW_SOCKET})
PLAIN = MappingProxyType({"nixl": PLAIN_NIXL, "mooncake": PLAIN_MOONCAKE})
GB_PER_S, RATIO = "GB/s", "of reference"
FRAMING, PROTOCOL_SHARE = "bytes of framing/MB", "protocol, % of CPU"
CPU = ("sender's CPU us/MB", "receiver's CPU us/MB")
MEASURED = tuple(REFERENCES)
TIMEOUT_S = 120.0
ROUNDS = 3
"""Rounds for each of the plan's: a round takes half a second."""


class Pair:
    """A sender here and its receiver in another process."""

    def __init__(self, kind: str, num_blocks: int, stack: ExitStack) -> None:
        self._peer = _Peer(kind, num_blocks, stack)
        transport = TRANSPORTS.create(kind, **transport_options(kind))
        self._node = TransferNode("bench", transport, num_blocks)
        stack.callback(self._node.channel.close)
        self._tokens = Tokens(range(num_blocks * BLOCK_TOKENS))
        self._node.cache(self._tokens)
        self._target = self._node.channel.add_peer(self._peer.said)

    def move(self) -> None:
        node, channel = self._node, self._node.channel
        path = KVPath("r", self._tokens, Namespace(), node.index.block_ids(node.index.lookup(self._tokens)))
        ticket, end_s = channel.transfer(path, self._target), time.monotonic() + TIMEOUT_S
        while not (reports := channel.poll()):
            channel.wait(1.0)
            if time.monotonic() > end_s:
                raise BookkeepingError("a transfer of the benchmark does not end")
        if reports[0].ticket != ticket or reports[0].status is not TransferStatus.DONE:
            raise BookkeepingError(f"a transfer of the benchmark failed: {reports[0]}")

    def cpu_s(self) -> tuple[float, float]:
        return _cpu_s("self"), self._peer.cpu_s()


class RawSocket:
    """A loop over a TCP socket, to another process."""

    def __init__(self, num_blocks: int, stack: ExitStack) -> None:
        self._peer = _Peer(RAW, num_blocks, stack)
        self._memory = OneArray(num_blocks)
        self._blocks = self._memory.views(range(num_blocks))
        host, port = self._peer.said.decode().strip("[]\n ").replace('"', "").split(",")
        self._sock = socket.create_connection((host, int(port)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stack.callback(self._sock.close)

    def move(self) -> None:
        for block in self._blocks:
            self._sock.sendall(block)
        if self._sock.recv(1) != b"\1":
            raise BookkeepingError("the raw socket of the benchmark was closed")

    def cpu_s(self) -> tuple[float, float]:
        return _cpu_s("self"), self._peer.cpu_s()


class Plain:
    """A library that writes into the blocks of another process.

    That process is stopped between its turns: a thread of NIXL takes a core of its own.
    """

    def __init__(self, kind: str, num_blocks: int, stack: ExitStack) -> None:
        self._peer = _Peer(kind, num_blocks, stack)
        self._writer: NixlWriter | MooncakeWriter = WRITERS[kind](self._peer.said, num_blocks)

    def move(self) -> None:
        self._peer.signal(signal.SIGCONT)
        self._writer.move()
        self._peer.signal(signal.SIGSTOP)

    def cpu_s(self) -> tuple[float, float]:
        return _cpu_s("self"), self._peer.cpu_s()


class Memcpy:
    """Copies blocks within this process."""

    def __init__(self, num_blocks: int) -> None:
        self._source, self._target = OneArray(num_blocks), OneArray(num_blocks)

    def move(self) -> None:
        for source, target in zip(self._source.rows, self._target.rows, strict=True):
            np.copyto(target, source)

    def cpu_s(self) -> tuple[float, float]:
        return _cpu_s("self"), 0.0


class _Peer:
    """A receiving process, ended with the stack. `said`: its first line."""

    def __init__(self, kind: str, num_blocks: int, stack: ExitStack) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sagellm.benchmarks.micro.kv_transfer_peer", kind, str(num_blocks)],
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        stack.callback(self._end)
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def cpu_s(self) -> float:
        return _cpu_s(str(self._process.pid))


def _cpu_s(process: str) -> float:
    """Seconds that the threads of a process have run; 0 if unknown."""
    tasks = (Path("/proc") / process / "task").glob("*/schedstat")
    return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9


Case: TypeAlias = Pair | RawSocket | Plain | Memcpy
Cases = Mapping[str, Case]


def _case(name: str, num_blocks: int, stack: ExitStack) -> Case:
    if name == MEMCPY:
        return Memcpy(num_blocks)
    if name == RAW_SOCKET:
        return RawSocket(num_blocks, stack)
    return Plain(name, num_blocks, stack) if name in WRITERS else Pair(name, num_blocks, stack)


def _measured(
    letter: str, names: Sequence[str], ratios: Sequence[tuple[str, str]], num_blocks: int, rounds: int
) -> Iterator[MicroBenchRow]:
    """Run each case once in a round. Ratios are of pairs within a round, then medians."""
    rates: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[list[float]]] = defaultdict(list)
    with ExitStack() as stack:
        cases: Cases = {name: _case(name, num_blocks, stack) for name in names}
        for case in cases.values():
            case.move()
        for _ in range(rounds):
            for name, case in cases.items():
                began_s, spent_s = time.perf_counter(), case.cpu_s()
                case.move()
                rates[name].append(num_blocks * BLOCK_BYTES / (time.perf_counter() - began_s) / 1e9)
                used = zip(case.cpu_s(), spent_s, strict=True)
                cpu[name].append([(after - before) / num_blocks * 1e6 for after, before in used])
    for name in names:
        yield MicroBenchRow(letter, name, num_blocks, "", GB_PER_S, round(statistics.median(rates[name]), 2))
        for unit, used_us in zip(CPU, zip(*cpu[name], strict=True), strict=True):
            yield MicroBenchRow(letter, name, num_blocks, "", unit, round(statistics.median(used_us), 1))
    for case_name, reference in ratios:
        ratio = statistics.median(map(float.__truediv__, rates[case_name], rates[reference]))
        yield MicroBenchRow(letter, f"{case_name} / {reference}", num_blocks, "", RATIO, round(ratio, 3))


def bandwidth(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section b."""
    names = sorted({name for variant in plan.variants for name in (variant, REFERENCES[variant])})
    ratios = [(variant, REFERENCES[variant]) for variant in plan.variants]
    return _measured("b", names, ratios, max(4, plan.moved_mb // 4), ROUNDS * plan.rounds)


def libraries(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section c: nothing, where neither library is installed."""
    force_tcp()
    there = installed()
    if not there or "tcp" not in plan.variants:
        return iter(())
    plain = [PLAIN[name] for name in there]
    ratios = [("tcp", name) for name in plain] + [(name, PLAIN[name]) for name in there]
    return _measured("c", ["tcp", *plain, *there], ratios, max(4, plan.moved_mb // 8), ROUNDS * plan.rounds)


def overhead(plan: MicroBenchPlan, stopwatch: Stopwatch) -> Iterator[MicroBenchRow]:
    """Section d."""
    num_blocks = max(4, plan.moved_mb // 4)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with ExitStack() as stack:
        cases = {variant: Loopback(variant, num_blocks) for variant in plan.variants}
        for case in cases.values():
            stack.callback(case.close)
            case.move()
        for _ in range(ROUNDS * plan.rounds):
            for name, case in cases.items():
                found[name].append(case.measure())
    for name, rounds in found.items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        figures = {
            FRAMING: middle["framing"],
            f"{FRAMING}, %": 100 * middle["framing"] / BLOCK_BYTES,
            f"{COPIES}, us/MB": middle[COPIES],
            f"{CALLS}, us/MB": middle[CALLS],
            "protocol, us/MB": middle["protocol"],
            PROTOCOL_SHARE: 100 * middle["protocol"] / (middle[COPIES] + middle[CALLS] + middle["protocol"]),
        }
        for unit, value in figures.items():
            yield MicroBenchRow("d", name, num_blocks, "", unit, round(value, 4 if value < 1 else 1))


def _check(name: str) -> None:
    if name not in REFERENCES:
        raise UnknownNameError(f"{name!r} is not measured: known are {', '.join(MEASURED)}")
    TRANSPORTS.get(name)


BENCHMARK = MicroBenchmark(
    "kv_transfer", lambda: MEASURED, _check, {"b": bandwidth, "c": libraries, "d": overhead}
)
