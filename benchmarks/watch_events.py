"""Measures what following KV events costs `sagellm watch`.

The figures: CPU per block event, memory, lost batches.

    python benchmarks/watch_events.py --rate 50000 --seconds 20 --servers 1

Another process publishes on real sockets as vLLM does: a batch per step, 20 requests of 16 new blocks each,
and as many evictions once the cache is full. The CPU is that of the watching process, decoding included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from typing import Any

import zmq

from sagellm.control_plane.kv_events import BlockRemoved, BlockStored, KVEventBatch, encode_batch
from sagellm.control_plane.kv_events.publisher import WallClock
from sagellm.diagnostics.watch.endpoints import ServerAddress
from sagellm.diagnostics.watch.watcher import CacheSizes, Watcher

BLOCK_SIZE, REQUEST_BLOCKS, REQUESTS_PER_STEP = 16, 16, 20
BLOCKS_PER_STEP = 2 * REQUEST_BLOCKS * REQUESTS_PER_STEP
CACHED_BLOCKS = 50_000
REUSED = 0.3
"""The share of requests that repeat an earlier one, which may have been evicted."""


def payloads(count: int, seed: int) -> Iterator[bytes]:
    """Encoded batches of `BLOCKS_PER_STEP` block events each, once the cache is full."""
    draw = random.Random(seed)
    cached, evicted = deque[tuple[int, list[bytes | int]]](), deque[int]()
    texts: list[list[int]] = []
    for _ in range(count):
        events: list[Any] = []
        for _ in range(REQUESTS_PER_STEP):
            number = evicted.popleft() if evicted and draw.random() < REUSED else len(texts)
            if number == len(texts):
                texts.append([draw.randrange(50_000) for _ in range(BLOCK_SIZE * REQUEST_BLOCKS)])
            hashes: list[bytes | int] = [
                (number * REQUEST_BLOCKS + i).to_bytes(32, "big") for i in range(REQUEST_BLOCKS)
            ]
            events.append(BlockStored(hashes, None, texts[number], BLOCK_SIZE, None, "GPU", None))
            cached.append((number, hashes))
            if len(cached) * REQUEST_BLOCKS > CACHED_BLOCKS:
                evicted_number, gone = cached.popleft()
                evicted.append(evicted_number)
                events.append(BlockRemoved(gone, "GPU"))
        yield encode_batch(KVEventBatch(time.time(), events))


def publish(port_to: Any, begin: Event, rate: float, count: int, seed: int) -> None:
    """Publish `count` batches at `rate` block events per second, once `begin` is set."""
    made = list(payloads(count, seed))
    socket: zmq.SyncSocket = zmq.Context.instance().socket(zmq.PUB)
    socket.setsockopt(zmq.SNDHWM, 100_000)
    port_to.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    begin.wait()
    start_s = time.monotonic()
    for number, payload in enumerate(made):
        time.sleep(max(0.0, start_s + number * BLOCKS_PER_STEP / rate - time.monotonic()))
        socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
    time.sleep(2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=50_000, help="block events per second, of all servers")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--servers", type=int, default=1)
    given = parser.parse_args()
    rate = given.rate / given.servers
    count = int(given.seconds * rate / BLOCKS_PER_STEP)
    spawn = multiprocessing.get_context("spawn")
    begin, addresses, processes = spawn.Event(), [], []
    for seed in range(given.servers):
        port_from, port_to = spawn.Pipe(duplex=False)
        processes.append(spawn.Process(target=publish, args=(port_to, begin, rate, count, seed)))
        processes[-1].start()
        addresses.append(ServerAddress.parse(f"tcp://127.0.0.1:{port_from.recv()}"))
    watcher = Watcher(addresses, sizes=CacheSizes(CACHED_BLOCKS), wall_clock=WallClock())
    time.sleep(1)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    begin.set()
    for process in processes:
        process.join()
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
    watcher.close()
    instances = watcher.report().instances
    blocks = sum(each.num_block_events for each in instances)
    lost = count * given.servers - sum(each.num_batches for each in instances)
    print(f"{blocks:,} block events of {given.servers} servers in {wall_s - 2:.1f} s, {lost} batches lost")
    print(f"CPU {cpu_s:.2f} s, {1e6 * cpu_s / blocks:.2f} µs per block event: {blocks / cpu_s:,.0f} a second")
    print(f"memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


if __name__ == "__main__":
    main()
