"""Bandwidth between a device's KV pool and host memory, and what locked pages gain.

    python benchmarks/tier_device.py --device cuda

`PoolBytes` reads and writes the blocks of a pool, K and V of each layer apart, in calls of a migrator's
chunk: through a buffer as the system gives it, and through one that is page-locked (`lock_pages`).
`one copy`, torch's copy between a tensor and the locked buffer, is what the link gives. `save` and `load` are
whole moves between pool and `HostStorage`, by one thread: where they are much slower than `locked`, the copy
between buffer and host tier bounds them. Rounds are interleaved; figures are medians of GB/s, with the least
and the most. In the end the pool is compared with what it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch

from sagellm.benchmarks.micro.kv_bytes import MB, Rates
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_tiers import BlockFormat, StoredBlock
from sagellm.core.types import Namespace
from sagellm.engines.native.block_bytes import PoolBytes
from sagellm.kvmgr.kv_pool.tiers.disk_slab import aligned_buffer
from sagellm.kvmgr.kv_pool.tiers.host import HostStorage
from sagellm.kvmgr.kv_pool.tiers.migrator import CHUNK_BYTES


def show(pools: Sequence[torch.Tensor], num_rounds: int) -> None:
    data, num_blocks = PoolBytes(pools), len(pools[0])
    size, per_call = data.bytes_per_block, max(1, CHUNK_BYTES // data.bytes_per_block)
    order = torch.randperm(num_blocks).tolist()
    calls = [order[first : first + per_call] for first in range(0, num_blocks, per_call)]
    stored = [StoredBlock(i, i.to_bytes(32, "big"), b"", Namespace(), b"", 0.0) for i in range(num_blocks)]
    storage = HostStorage(num_blocks, BlockFormat(bytes(16), size))
    plain, locked = aligned_buffer(per_call * size), aligned_buffer(per_call * size)
    data.lock_pages(locked)
    on_host = torch.frombuffer(locked, dtype=torch.uint8)
    on_device = torch.empty_like(on_host, device=pools[0].device)

    def save(ids: Sequence[int]) -> None:
        buffer = locked[: len(ids) * size]
        data.read_blocks(ids, buffer)
        storage.write([stored[i] for i in ids], buffer)

    def load(ids: Sequence[int]) -> None:
        buffer = locked[: len(ids) * size]
        storage.read(ids, [stored[i].token_hash for i in ids], buffer)
        data.write_blocks(ids, buffer)

    moves: dict[str, Callable[[Sequence[int]], object]] = {
        "one copy to host": lambda ids: copy(on_host[: len(ids) * size], on_device[: len(ids) * size]),
        "read": lambda ids: data.read_blocks(ids, plain[: len(ids) * size]),
        "read, locked": lambda ids: data.read_blocks(ids, locked[: len(ids) * size]),
        "save": save,
        "one copy to device": lambda ids: copy(on_device[: len(ids) * size], on_host[: len(ids) * size]),
        "write": lambda ids: data.write_blocks(ids, plain[: len(ids) * size]),
        "write, locked": lambda ids: data.write_blocks(ids, locked[: len(ids) * size]),
        "load": load,  # the last: it repairs what the writes before it have replaced
    }
    before = [pool.clone() for pool in pools]
    plain[:] = bytes(len(plain))  # the first use of memory takes longer
    each(save, calls)
    rates = Rates(num_blocks * size)
    for _ in range(num_rounds):
        for name, move in moves.items():
            rates.measure(name, partial(each, move, calls))
    if not all(map(torch.equal, pools, before)):
        raise BookkeepingError("other bytes came back")
    for link, names in (("one copy to host", list(moves)[1:4]), ("one copy to device", list(moves)[5:])):
        rates.show(link)
        for name in names:
            rates.show(name, link)


def each(move: Callable[[Sequence[int]], object], calls: Sequence[Sequence[int]]) -> None:
    for ids in calls:
        move(ids)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    if target.is_cuda or source.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block-kb", type=int, nargs="+", default=[2048, 512, 128])
    parser.add_argument("--total-mb", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for block_kb in options.block_kb:
        shape = options.total_mb * MB // (block_kb << 10), (block_kb << 10) // (2 * options.layers)
        print(f"{shape[0]} blocks of {block_kb} KB in {2 * options.layers} pools on {options.device}")
        pools = [
            torch.randint(256, shape, dtype=torch.uint8, device=options.device)
            for _ in range(2 * options.layers)
        ]
        show(pools, options.rounds)


if __name__ == "__main__":
    main()
