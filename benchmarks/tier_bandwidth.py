"""Bandwidth of `DiskStorage` and `HostStorage` beside raw reads, writes and memcpy.

    python benchmarks/tier_bandwidth.py --folder DIR --rounds 5

All bytes are distinct. Disk: blocks are written and read in calls of `--call-mb`, verified; beside it the
slab file itself is written and read with `pwritev` and `preadv`, in pieces of the block size from one thread,
with O_DIRECT. Host: beside `numpy.copyto` of the same pieces. Rounds are interleaved;
figures are medians of GB/s, with the least and the most. `verify` is the share of the load time that
verification adds: one minus the ratio of the times without and with it, medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from sagellm.benchmarks.micro.kv_bytes import (
    COPY_FROM,
    COPY_TO,
    HOST_READ,
    HOST_WRITE,
    MB,
    RAW_READ,
    RAW_WRITE,
    READ,
    READ_UNVERIFIED,
    WRITE,
    Blocks,
    measure_disk,
    measure_host,
)


def show(blocks: Blocks, parent: Path, num_rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        rates = measure_disk(Path(folder), blocks, num_rounds, unverified=True)
    for name, reference in ((WRITE, RAW_WRITE), (READ, RAW_READ)):
        rates.show(reference)
        rates.show(name, reference)
    rates.show(READ_UNVERIFIED, RAW_READ)
    print(f"  verify: {1 - rates.ratio(READ, READ_UNVERIFIED):.1%} of the load time")
    rates = measure_host(blocks, num_rounds)
    for name, reference in ((HOST_WRITE, COPY_TO), (HOST_READ, COPY_FROM)):
        rates.show(reference)
        rates.show(name, reference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--total-mb", type=int, default=1024)
    parser.add_argument("--block-kb", type=int, nargs="+", default=[1024, 576, 128])
    parser.add_argument("--call-mb", type=int, nargs="+", default=[16, 1])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for block_kb in options.block_kb:
        for call_mb in options.call_mb:
            blocks = Blocks(block_kb << 10, options.total_mb * MB, call_mb * MB)
            print(f"{blocks.count} blocks of {block_kb} KB, {blocks.per_call} in a call")
            show(blocks, options.folder, options.rounds)


if __name__ == "__main__":
    main()
