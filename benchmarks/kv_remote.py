"""Speed of the remote KV store, beside the plain client on the same server.

    python benchmarks/kv_remote.py --gb 1

Starts a `redis-server` on a socket in a temporary folder. Blocks of random bytes, all distinct, are put and
got in calls of `--call-mb`. The plain client sets the same blocks, and gets what the store has put,
unverified. MB per second of wall-clock time, the best of three rounds in turns.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import redis

from sagellm.core.protocols.kv_tiers import BlockFormat, ReadOutcome, StoredBlock
from sagellm.core.types import Namespace
from sagellm.kvmgr.kv_pool.tiers.remote import PutOutcome, RemoteOptions, RemoteStore

ROUNDS = 3


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def seconds(run: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


class Load:
    """Calls of both clients on the same blocks."""

    def __init__(self, path: Path, block_bytes: int, num_blocks: int, per_call: int) -> None:
        options = RemoteOptions(f"unix://{path}", max_put_bytes_per_s=1 << 40, max_put_bytes=1 << 40)
        self.store = RemoteStore(options, BlockFormat(bytes(16), block_bytes))
        self.plain = redis.Redis(unix_socket_path=str(path))
        self.block_bytes = block_bytes
        self.data = memoryview(np.random.default_rng(0).bytes(block_bytes * num_blocks))
        hashes = [number.to_bytes(32, "big") for number in range(num_blocks)]
        self.calls: Sequence[Sequence[bytes]] = [
            hashes[at : at + per_call] for at in range(0, num_blocks, per_call)
        ]
        self.target = memoryview(bytearray(block_bytes * per_call))

    def data_of(self, call: int) -> memoryview:
        first = call * len(self.calls[0]) * self.block_bytes
        return self.data[first : first + len(self.calls[call]) * self.block_bytes]

    def put(self) -> None:
        for number, hashes in enumerate(self.calls):
            blocks = [StoredBlock(0, token_hash, b"", Namespace(), b"", 0.0) for token_hash in hashes]
            assert {*self.store.put(blocks, self.data_of(number))} == {PutOutcome.STORED}, self.store.fault

    def get(self) -> None:
        for hashes in self.calls:
            target = self.target[: len(hashes) * self.block_bytes]
            assert {*self.store.get(hashes, target)} == {ReadOutcome.OK}, self.store.fault

    def contains(self) -> None:
        for hashes in self.calls:
            assert self.store.contains(hashes) == [True] * len(hashes), self.store.fault

    def plain_set(self) -> None:
        for number, hashes in enumerate(self.calls):
            data = self.data_of(number)
            with self.plain.pipeline(transaction=False) as pipeline:
                for place, token_hash in enumerate(hashes):
                    pipeline.set(token_hash, data[place * self.block_bytes : (place + 1) * self.block_bytes])
                pipeline.execute()

    def plain_get(self) -> None:
        for hashes in self.calls:
            keys = [f"sagellm:{bytes(16).hex()}:{token_hash.hex()}" for token_hash in hashes]
            assert None not in self.plain.mget(keys)


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the remote KV store.")
    parser.add_argument("--gb", type=float, default=1.0, help="size of all blocks together")
    parser.add_argument("--call-mb", type=float, default=1.0, help="size of the blocks of a call")
    parser.add_argument("--block-kb", type=int, nargs="+", default=[64, 256, 1024], help="sizes of a block")
    options = parser.parse_args()
    command = shutil.which("valkey-server") or shutil.which("redis-server")
    if command is None:
        raise SystemExit("needs valkey-server or redis-server")
    print("| block KB | put MB/s | plain SET | get MB/s | plain MGET | contains, µs a block |")
    print("|---|---|---|---|---|---|")
    for block_kb in options.block_kb:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "socket")
            server = subprocess.Popen(
                [command, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder],
                stdout=subprocess.DEVNULL,
            )
            wait_for(path)
            try:
                print(row(path, block_kb * 1024, options.gb, options.call_mb))
            finally:
                server.terminate()
                server.wait()


def row(path: Path, block_bytes: int, gb: float, call_mb: float) -> str:
    num_blocks = int(gb * (1 << 30) / block_bytes)
    load = Load(path, block_bytes, num_blocks, max(1, int(call_mb * (1 << 20) / block_bytes)))
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for run in (load.plain_set, load.put, load.plain_get, load.get, load.contains):
            if run in (load.put, load.plain_set):
                load.plain.flushall()
            best[run.__name__] = min(best.get(run.__name__, 1e9), seconds(run))
    load.store.close()
    mb = num_blocks * block_bytes / 1e6
    speeds = [f"{mb / best[name]:.0f}" for name in ("put", "plain_set", "get", "plain_get")]
    cells = [f"{block_bytes // 1024}", *speeds, f"{best['contains'] / num_blocks * 1e6:.1f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
