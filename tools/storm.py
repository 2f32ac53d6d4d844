"""Storms `sagellm serve` with clients that break off in every way. It serves the demo model.

    python tools/storm.py [--clients 256] [--seconds 120] [--seed 0] [--port N]

Clients connect and stay silent, send half their headers, trickle or break off an upload, leave a stream
half-way or stop reading it, send what is no HTTP, or ask properly and keep the connection. Afterwards the
server must be as it was before: healthy, no request in the engine, no block in use, as many descriptors, no
traceback in its log, and exit status 0 on SIGTERM. Ends with 0 if all of that holds, else with 1 and what
does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

LOCALHOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
SETTINGS = {
    "server.max_connections": 240,
    "server.header_timeout_s": 2,
    "server.body_timeout_s": 3,
    "server.send_timeout_s": 3,
    "server.keep_alive_timeout_s": 3,
    "server.shutdown_grace_s": 5,
    "kv.num_blocks": 1024,
    "log.level": "info",
}
EXPECTED = {200, 400, 408, 429, 503}
"""Statuses that a storm may bring; anything else is a fault."""


@dataclass
class Tally:
    """What the clients did and what they got."""

    done: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)


class Client:
    """One after the other, connections that each behave in a way drawn by `rng`."""

    def __init__(self, port: int, rng: random.Random, tally: Tally) -> None:
        self._port = port
        self._rng = rng
        self._tally = tally
        self._ways: Sequence[Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]] = (
            self.silent,
            self.half_head,
            self.no_http,
            self.slow_body,
            self.aborted_upload,
            self.half_stream,
            self.unread_stream,
            self.polite,
            self.polite,
        )

    async def run(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            way = self._rng.choice(self._ways)
            with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                reader, writer = await asyncio.open_connection(LOCALHOST, self._port)
                try:
                    await way(reader, writer)
                    self._tally.done[way.__name__] += 1
                finally:
                    self._leave(writer)
            await asyncio.sleep(self._rng.random() * 0.2)

    def _leave(self, writer: asyncio.StreamWriter) -> None:
        """By FIN, or by RST as a client does that is killed."""
        if self._rng.random() < 0.5:
            linger = struct.pack("ii", 1, 0)
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        writer.close()

    # -- ways to behave

    async def silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Wait for the server to close, or leave before."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.random() * 4):
                await self._end(reader)

    async def half_head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Headers byte by byte, not to their end."""
        head = _head("POST", "/v1/completions", 100)
        await self._trickle(writer, head[: self._rng.randrange(1, len(head) - 2)])
        await self.silent(reader, writer)

    async def no_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = _head("GET", "/health", 0)
        place = self._rng.randrange(len(head))
        writer.write(
            head[:place] + self._rng.choice([b"\n", b"\r", b"\0", b" " * 50_000 + b"\0"]) + head[place:]
        )
        await self._end(reader)

    async def slow_body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = self._body()
        writer.write(_head("POST", "/v1/completions", len(body)))
        await self._trickle(writer, body)
        await self._answer(reader)

    async def aborted_upload(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = self._body().ljust(self._rng.randrange(500, 1_000_000))
        writer.write(_head("POST", "/v1/chat/completions", len(body)))
        writer.write(body[: self._rng.randrange(len(body))])
        await asyncio.sleep(self._rng.random() * 0.2)

    async def half_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ask(writer, stream=True)
        await self._head_of_answer(reader)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.random() * 3):
                await reader.readuntil(b"data: [DONE]")

    async def unread_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self._ask(writer, stream=True, logprobs=20)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(self._rng.random() * 6)

    async def polite(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Several requests on one connection, each answered whole."""
        for _ in range(self._rng.randrange(1, 5)):
            self._ask(writer, stream=False)
            if not await self._answer(reader):
                return
            await asyncio.sleep(self._rng.random())

    # -- parts of them

    def _body(self, **fields: Any) -> bytes:
        prompt = " ".join(str(self._rng.randrange(1000)) for _ in range(self._rng.randrange(1, 60)))
        length = self._rng.randrange(1, 80)
        options = {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 1}
        return json.dumps(options | fields).encode()

    def _ask(self, writer: asyncio.StreamWriter, **fields: Any) -> None:
        body = self._body(**fields)
        writer.write(_head("POST", "/v1/completions", len(body)) + body)

    async def _trickle(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        """In up to 30 pieces within up to six seconds."""
        pause_s = self._rng.random() * 0.2
        size = len(content) // 30 + 1
        for start in range(0, len(content), size):
            writer.write(content[start : start + size])
            await writer.drain()
            await asyncio.sleep(pause_s)

    async def _end(self, reader: asyncio.StreamReader) -> None:
        """All that comes until the server closes; its status counts."""
        received = await reader.read()
        if received:
            self._tally.statuses[int(received.split()[1])] += 1

    async def _head_of_answer(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        self._tally.statuses[int(head.split()[1])] += 1
        return head.lower()

    async def _answer(self, reader: asyncio.StreamReader) -> bool:
        """Read an answer; whether the connection stays open."""
        head = await self._head_of_answer(reader)
        [length] = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(length.split(b":")[1]))
        return b"connection: close" not in head


def _head(method: str, path: str, length: int) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


@dataclass
class Server:
    """A running `sagellm serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def state(self) -> dict[str, float]:
        """Requests, blocks and descriptors in use."""
        samples = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=ANSWER_TIMEOUT_S).text.splitlines():
            name, _, value = line.rpartition(" ")
            samples[name] = float(value) if not line.startswith("#") else 0.0

        def total(name: str, label: str = "") -> float:
            return sum(value for key, value in samples.items() if key.split("{")[0] == name and label in key)

        return {
            "requests running": total("sagellm_requests_running"),
            "requests waiting": total("sagellm_requests_waiting"),
            "blocks in use": total("sagellm_kv_blocks", 'state="active"'),
            "blocks in all": total("sagellm_kv_blocks"),
            "descriptors": float(len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))),
        }

    def memory_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def settle(self, wanted: dict[str, float]) -> dict[str, float]:
        """The state as soon as it is the wanted one. Otherwise the state after `SETTLE_TIMEOUT_S`."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while (state := self.state()) != wanted and time.monotonic() < deadline:
            time.sleep(0.2)
        return state


@contextmanager
def serving(port: int) -> Iterator[Server]:
    options = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "sagellm", "serve", "--port", str(port), *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
            server = Server(process, f"http://{LOCALHOST}:{port}", log)
            try:
                _wait_ready(server)
                yield server
            finally:
                process.kill()


def _wait_ready(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/ready").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{server.log.read_text()}")


async def _storm(port: int, num_clients: int, seconds: float, seed: int) -> Tally:
    tally = Tally()
    until_s = time.monotonic() + seconds
    clients = [Client(port, random.Random(f"{seed}/{number}"), tally) for number in range(num_clients)]
    await asyncio.gather(_watch(port, until_s, tally), *(client.run(until_s) for client in clients))
    return tally


async def _watch(port: int, until_s: float, tally: Tally) -> None:
    """How long /health takes on a connection that stays open through the storm."""
    async with httpx.AsyncClient(base_url=f"http://{LOCALHOST}:{port}", timeout=ANSWER_TIMEOUT_S) as client:
        while time.monotonic() < until_s:
            began = time.monotonic()
            response = await client.get("/health")
            if response.status_code == 200:
                tally.health_s.append(time.monotonic() - began)
            await asyncio.sleep(0.5)


def faults_of(
    tally: Tally, before: dict[str, float], after: dict[str, float], status: int, log: str
) -> list[str]:
    """What is not as it should be."""
    faults = [
        f"{name}: {before[name]:g} before, {after[name]:g} after"
        for name in before
        if before[name] != after[name]
    ]
    faults += [
        f"{number} answers of status {code}"
        for code, number in tally.statuses.items()
        if code not in EXPECTED
    ]
    faults += [f"no client was {way}" for way in ("polite", "half_stream") if not tally.done[way]]
    if status:
        faults.append(f"exit status {status}")
    if "Traceback" in log:
        faults.append(f"a traceback in the log: {log[log.index('Traceback') :][:2000]}")
    if not tally.health_s:
        faults.append("/health was never 200")
    return faults


def storm(num_clients: int, seconds: float, seed: int, port: int) -> list[str]:
    """Print what happened; the faults that were found."""
    with serving(port) as server:
        httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "1", "max_tokens": 2}, timeout=ANSWER_TIMEOUT_S
        )
        before, memory_mib = server.state(), server.memory_mib()
        tally = asyncio.run(_storm(port, num_clients, seconds, seed))
        after = server.settle(before)
        memory_mib, memory_before_mib = server.memory_mib(), memory_mib
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(timeout=SETTLE_TIMEOUT_S)
        log = server.log.read_text()
    health_ms = sorted(1000 * seconds for seconds in tally.health_s) or [float("nan")]
    print(f"{num_clients} clients, {seconds:g} s, {sum(tally.done.values())} connections: {dict(tally.done)}")
    print(f"statuses: {dict(sorted(tally.statuses.items()))}")
    print(f"/health: median {health_ms[len(health_ms) // 2]:.0f} ms, longest {health_ms[-1]:.0f} ms")
    print(f"memory: {memory_before_mib:.0f} MiB before, {memory_mib:.0f} MiB after; log: {len(log)} bytes")
    print(f"state: {after}")
    return faults_of(tally, before, after, status, log)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="of the server; 0: a free one")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind((LOCALHOST, options.port))
        port = probe.getsockname()[1]
    faults = storm(options.clients, options.seconds, options.seed, port)
    print("\n".join(faults) or "the server is as it was before")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
