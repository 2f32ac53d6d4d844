"""Measures what `sagellm watch` costs a server, in CPU time of it.

    python benchmarks/watch_overhead.py --pairs 30

Each part is the CPU time of the process that is watched. *Events*: a process publishes batches as vLLM
does, each of 20 requests with 16 new blocks, with a watch connected and without one in turn; the difference
is the cost of a batch. *Scrapes*: /metrics of a running `sagellm serve` is asked, beside pauses of the same
length. Medians of pairs, with the middle 95 % of their bootstrap. With one batch per step and one scrape in
five seconds they are a share of a core. That events are published at all is the server's own setting, and
is no part of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from sagellm.control_plane.kv_events import BlockStored, KVEventBatch, encode_batch
from sagellm.control_plane.kv_events.publisher import WallClock
from sagellm.diagnostics.watch.endpoints import ServerAddress
from sagellm.diagnostics.watch.watcher import CacheSizes, Watcher

BATCHES, BATCH_PERIOD_S = 500, 0.002
SCRAPES, SCRAPE_PERIOD_S = 100, 5.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def payload(number: int) -> bytes:
    """The encoded batch of a step: requests of which nothing was cached."""
    events: list[Any] = []
    for request in range(20 * number, 20 * number + 20):
        hashes: list[bytes | int] = [(16 * request + i).to_bytes(32, "big") for i in range(16)]
        tokens = [(request + i) % 50_000 for i in range(256)]
        events.append(BlockStored(hashes, None, tokens, 16, None, "GPU", None))
    return encode_batch(KVEventBatch(time.time(), events))


def publish(commands: Connection, num_batches: int) -> None:
    """Publish so many batches for each command; answer with the CPU seconds."""
    socket: zmq.SyncSocket = zmq.Context.instance().socket(zmq.PUB)
    commands.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    number = 0
    while commands.recv():
        cpu_s = time.process_time()
        for _ in range(num_batches):
            socket.send_multipart([b"", number.to_bytes(8, "big"), payload(number)])
            number += 1
            time.sleep(BATCH_PERIOD_S)
        commands.send(time.process_time() - cpu_s)


def batch_costs(num_pairs: int) -> list[float]:
    """What a batch costs more with a watch connected, in seconds, by pair."""
    spawn = multiprocessing.get_context("spawn")
    commands, theirs = spawn.Pipe()
    process = spawn.Process(target=publish, args=(theirs, BATCHES), daemon=True)
    process.start()
    address = ServerAddress.parse(f"tcp://127.0.0.1:{commands.recv()}")
    costs = []
    for _ in range(num_pairs):
        commands.send(True)
        alone_s = commands.recv()
        watcher = Watcher([address], sizes=CacheSizes(50_000), wall_clock=WallClock())
        time.sleep(0.5)
        commands.send(True)
        costs.append((commands.recv() - alone_s) / BATCHES)
        watcher.close()
    commands.send(False)
    return costs


def scrape_costs(num_pairs: int) -> list[float]:
    """What a scrape of an idle server's metrics costs it, in seconds, by pair."""
    command = [sys.executable, "-m", "sagellm", "serve", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url = (
        next(line for line in process.stderr if "listening on" in line)
        .split("listening on ")[1]
        .split(";")[0]
    )
    costs = []
    for _ in range(num_pairs):
        before_s, began_s = _cpu_s(process.pid), time.monotonic()
        for _ in range(SCRAPES):
            urllib.request.urlopen(f"{url}/metrics").read()
        scraped_s, took_s = _cpu_s(process.pid), time.monotonic() - began_s
        time.sleep(took_s)
        idle_s = _cpu_s(process.pid) - scraped_s
        costs.append((scraped_s - before_s - idle_s) / SCRAPES)
    process.terminate()
    process.wait()
    return costs


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and the middle 95 % of its bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=float, default=50.0, help="batches per second of the server")
    given = parser.parse_args()
    total = [0.0, 0.0, 0.0]
    for name, costs, per_s in (
        ("a batch for a watch", batch_costs(given.pairs), given.steps),
        ("a scrape", scrape_costs(given.pairs), 1 / SCRAPE_PERIOD_S),
    ):
        found = interval(costs)
        print(f"{name}: {1e6 * found[0]:.1f} us of CPU ({1e6 * found[1]:.1f} to {1e6 * found[2]:.1f})")
        total = [share + per_s * cost for share, cost in zip(total, found, strict=True)]
    shown = [f"{share:.3%}" for share in total]
    print(f"at {given.steps:g} batches a second: {shown[0]} of a core ({shown[1]} to {shown[2]})")


if __name__ == "__main__":
    main()
