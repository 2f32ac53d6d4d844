"""Size, speed and error of the codecs on the demo model's KV.

    python benchmarks/kv_codecs.py

Blocks are grouped to 1 MB, and distinct. Speeds are MB of KV per second of CPU time, the best of `--repeats`
rounds over all blocks, since other programs only slow a round down. The error is relative to the
largest number of a block. The groups of `int8` are measured with its other constants as they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sagellm.core.protocols.kv_tiers import KVCodec
from sagellm.core.types import Request, SamplingParams, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS, int8

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GROUPS = (32, 64, 128, 256, 1024)
BLOCK_BYTES = 1 << 20


def kv_of_demo_model(num_requests: int) -> torch.Tensor:
    """All numbers of the KV of some generated texts, block by block."""
    engine = build_engine(load_config(environ={}).config)
    backend: Any = engine.backend
    generator = torch.Generator().manual_seed(0)
    for number in range(num_requests):
        prompt = torch.randint(3, 700, (200,), generator=generator).tolist()
        engine.add(Request(f"r{number}", Tokens(prompt), SamplingParams(temperature=1.0, max_tokens=200)))
    while engine.has_work():
        engine.step()
    pools = backend._kv._pools
    used = pools[0].abs().sum(dim=(1, 2)) > 0
    return torch.cat([pool[used].flatten(1) for pool in pools], dim=1).flatten()


def blocks_of(numbers: torch.Tensor, dtype: str) -> list[bytes]:
    data = numbers.to(TYPES[dtype]).view(torch.uint8).numpy().tobytes()
    return [data[at : at + BLOCK_BYTES] for at in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES)]


def best_mb_s(run: Callable[[], object], num_bytes: int, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.thread_time()
        run()
        seconds.append(time.thread_time() - began)
    return num_bytes / min(seconds) / 1e6


def errors_of(codec: KVCodec, blocks: Sequence[bytes], dtype: str) -> tuple[float, float]:
    """Largest and root mean square error, relative to the largest number of a block."""
    largest, squares = 0.0, []
    for block in blocks:
        target = bytearray(len(block))
        codec.decode(codec.encode(block), memoryview(target))
        before, after = (
            torch.frombuffer(bytearray(data), dtype=TYPES[dtype]).double() for data in (block, target)
        )
        shares = (after - before) / before.abs().max()
        largest = max(largest, float(shares.abs().max()))
        squares.append(float(shares.square().mean()))
    return largest, float(np.sqrt(np.mean(squares)))


def row(name: str, dtype: str, blocks: Sequence[bytes], repeats: int) -> str:
    codec = CODECS.create(name, dtype=dtype)
    stored = [bytes(codec.encode(block)) for block in blocks]
    target = memoryview(bytearray(BLOCK_BYTES))
    total = sum(map(len, blocks))

    def encode_all() -> None:
        for block in blocks:
            codec.encode(block)

    def decode_all() -> None:
        for data in stored:
            codec.decode(data, target)

    encode, decode = (best_mb_s(run, total, repeats) for run in (encode_all, decode_all))
    share = sum(map(len, stored)) / total
    error, mean = errors_of(codec, blocks, dtype)
    return f"| {name} | {dtype} | {share:.3f} | {encode:.0f} | {decode:.0f} | {error:.2g} | {mean:.2g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Size, speed and error of the codecs of KV tiers.")
    parser.add_argument("--requests", type=int, default=32, help="texts whose KV is measured")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the best counts")
    options = parser.parse_args()
    numbers = kv_of_demo_model(options.requests)
    print("| codec | dtype | stored / KV | encode MB/s | decode MB/s | max error | rms error |")
    print("|---|---|---|---|---|---|---|")
    for dtype in TYPES:
        blocks = blocks_of(numbers, dtype)
        for name in CODECS.names():
            print(row(name, dtype, blocks, options.repeats))
    for group in GROUPS:
        int8.GROUP = group
        print(row("int8", "bfloat16", blocks_of(numbers, "bfloat16"), options.repeats), f"groups of {group}")


if __name__ == "__main__":
    main()
