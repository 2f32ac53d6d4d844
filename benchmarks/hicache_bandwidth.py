"""Bandwidth of HiCache storages of SGLang: ours beside its own `file`.

    PYTHONPATH=src:. HOST_PYTHON benchmarks/hicache_bandwidth.py --folder DIR --rounds 5

Pages are distinct. They move between SGLang's host pool and the storage by the controller's own calls, 128
pages in each, without its threads. `file` writes to the page cache and reads from it, and verifies nothing.
So it is also measured with its files written to the disk (`synced`), and with the page cache empty
(`cold`). Ours uses direct I/O where the file system has it, and verifies checksums. Rounds are interleaved;
figures are medians of GB/s, with the least and the most. Torch has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.hosts.sglang_hicache import Pages, hicache

BATCH = 128
SHAPE: dict[str, Any] = {"page_size": 64, "heads": 8, "head_dim": 64, "layers": 8}
"""A page of 1 MiB in float16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: of temporary files")
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", default="page_first", choices=["page_first", "layer_first"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for name in ("file", "ours", "ours, interface_v1"):
            folder = Path(tempfile.mkdtemp(dir=args.folder))
            try:
                for step, rate in measure(name, folder, args.pages, args.layout).items():
                    rates[f"{name}, {step}"].append(rate)
            finally:
                shutil.rmtree(folder)
    print(f"{args.pages} pages of 1 MiB, {args.layout}, {args.rounds} rounds")
    for name, each in sorted(rates.items()):
        print(f"  {name:32} {statistics.median(each):5.2f} GB/s ({min(each):.2f} to {max(each):.2f})")


def measure(name: str, folder: Path, num_pages: int, layout: str) -> dict[str, float]:
    """GB/s of each step, for one storage in an empty folder."""
    with opened(name, folder, num_pages, layout) as cache:
        pages = Pages(cache)
        controller: Any = pages.controller
        indices = pages.alloc(num_pages)
        expected = pages.fill(indices, 1)
        keys = pages.hashes(list(range(num_pages * pages.page_size)))
        pages.storage.batch_exists(keys)  # ours opens its files at the first call
        running = type("Running", (), {"is_terminated": lambda self: False, "request_id": "r"})()
        batches = [
            (keys[i : i + BATCH], indices[i * pages.page_size : (i + BATCH) * pages.page_size])
            for i in range(0, num_pages, BATCH)
        ]

        def write() -> None:
            for batch in batches:
                assert controller.page_set_func(*batch)

        def read() -> None:
            found = [controller.page_get_func(running, *batch) for batch in batches]
            assert sum(found) == num_pages

        num_bytes = num_pages * expected[0].nbytes
        rates, began_s = {"write": rate(write, num_bytes)}, time.perf_counter()
        if name == "file":
            sync(folder)
            rates["write, synced"] = (
                num_bytes / 1e9 / (time.perf_counter() - began_s + num_bytes / 1e9 / rates["write"])
            )
            rates["read, from the page cache"] = rate(read, num_bytes)
            sync(folder)
        pages.fill(indices, 2)
        rates["read, cold" if name == "file" else "read"] = rate(read, num_bytes)
        assert all(map(torch.equal, pages.read(indices), expected))
    return rates


def opened(name: str, folder: Path, num_pages: int, layout: str) -> Any:
    """SGLang with that storage, and a host pool for all pages."""
    size: dict[str, Any] = {"num_tokens": 64 * 16, "host_ratio": num_pages / 16, "layout": layout, **SHAPE}
    if name == "file":
        extra = json.dumps({"file_storage_path": str(folder)})
        size["hicache_storage_backend_extra_config"] = extra
        return hicache({}, hicache_storage_backend="file", **size)
    disk_gb = num_pages * 2.2 / 1024
    storage = {
        "dir": str(folder),
        "disk_gb": disk_gb,
        "weights_id": "random",
        "interface_v1": int("v1" in name),
    }
    return hicache(storage, **size)


def rate(move: Callable[[], None], num_bytes: int) -> float:
    began_s = time.perf_counter()
    move()
    return num_bytes / 1e9 / (time.perf_counter() - began_s)


def sync(folder: Path) -> None:
    """Write files to the disk, and let the page cache forget them."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


if __name__ == "__main__":
    main()
