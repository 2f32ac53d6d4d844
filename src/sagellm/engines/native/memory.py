"""Memory of host and device: available bytes, KV blocks, lazy zeros, copies."""

from __future__ import annotations

import logging
import math
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sagellm.core.blocks import cdiv
from sagellm.core.config import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE
from sagellm.core.errors import CapacityError, ConfigError
from sagellm.engines.native.accelerators import free_bytes

if TYPE_CHECKING:
    from sagellm.core.shared_pages import SharedPages

log = logging.getLogger("sagellm.engine")
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(device: torch.device) -> int:
    """Bytes that this process may still take on `device`, within its control group."""
    if device.type != "cpu":
        return free_bytes(device)
    return min(_host_bytes(), *_cgroup_bytes())


def _host_bytes() -> int:
    """`MemAvailable` on Linux; elsewhere half of the installed memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_bytes() -> list[int]:
    """What the control groups (v2, v1) leave; large if there is no limit. Their usage counts file pages that
    the kernel would give back (a model just read, say). Those count as free.
    """
    left = [1 << 62]
    for folder, limit_file, usage_file, reclaimable in _CGROUPS:
        try:
            limit = Path(folder, limit_file).read_text(encoding="ascii").strip()
            usage = int(Path(folder, usage_file).read_text(encoding="ascii"))
            stat = Path(folder, "memory.stat").read_text(encoding="ascii")
        except OSError:
            continue
        fields = dict(line.split() for line in stat.splitlines())
        if limit.isdigit():
            left.append(max(0, int(limit) - usage + int(fields.get(reclaimable, 0))))
    return left


def pool_blocks(
    device: torch.device, num_blocks: int | None, most_blocks: int, bytes_per_block: int,
    memory_bytes: int | None, fraction: float | None, host_memory_bytes: int, available: int | None = None,
) -> int:  # fmt: skip
    """`num_blocks`, or as many as fit into memory and can be used. Raises as `kv_blocks`, `check_host` and
    `check_fits`.
    """
    available = available_bytes(device) if available is None else available
    blocks = num_blocks or kv_blocks(device, bytes_per_block, most_blocks, memory_bytes, fraction, available)
    check_host(host_memory_bytes)
    check_fits(device, blocks, bytes_per_block, host_memory_bytes, available)
    return blocks


def kv_blocks(
    device: torch.device, bytes_per_block: int, most_blocks: int, memory_bytes: int | None,
    fraction: float | None, available: int,
) -> int:  # fmt: skip
    """Blocks for the pool, at most `most_blocks`. As many as `memory_bytes`, or `fraction` of the `available`
    bytes, hold. Raises `CapacityError` if that is not even one block.
    """
    if memory_bytes is None:
        usual = CPU_MEMORY_SHARE if device.type == "cpu" else GPU_MEMORY_SHARE
        memory_bytes = int(available * (usual if fraction is None else fraction))
    blocks = min(most_blocks, memory_bytes // bytes_per_block)
    if blocks < 1:
        raise CapacityError(
            f"{memory_bytes:,} bytes for the KV cache hold no block of {bytes_per_block:,} bytes "
            f"({available:,} bytes are available on {device}): "
            f"give at least {bytes_per_block:,}, or a smaller block"
        )
    return blocks


def check_fits(
    device: torch.device,
    num_blocks: int,
    bytes_per_block: int,
    host_memory_bytes: int = 0,
    available: int | None = None,
) -> None:
    """Raise `CapacityError` for more blocks than a CPU has memory for. `host_memory_bytes` are
    set aside for a tier. The system would grant the pool and fail when pages are written. Other devices
    refuse such a pool themselves.
    """
    if device.type != "cpu":
        return
    available = available_bytes(device) if available is None else available
    most = max(0, available - host_memory_bytes) // bytes_per_block
    if num_blocks > most:
        raise CapacityError(
            f"{num_blocks:,} KV blocks are {num_blocks * bytes_per_block:,} bytes, more than is available on "
            f"{device}: at most {most:,} blocks fit"
        )


def check_host(num_bytes: int) -> None:
    """Check the size of a tier in host memory. Raises `ConfigError` for a negative size,
    `CapacityError` where there is not as much.
    """
    if num_bytes < 0:
        raise ConfigError(f"kv.host_gb must not be negative, got {num_bytes:,} bytes")
    available = available_bytes(torch.device("cpu"))
    if num_bytes > available:
        raise CapacityError(
            f"kv.host_gb: {num_bytes / 2**30:.1f} GiB are asked for, {available / 2**30:.1f} are there"
        )


FEWEST_BYTES = 1 << 20


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, *, huge: bool = False) -> torch.Tensor:
    """A CPU tensor of zeros that takes memory page by page, when written.

    An anonymous private mapping reads as zeros and is resident only where something was stored. So a KV pool
    of a quarter of the machine costs what its used blocks cost, and allocation takes no time. Under 1 MB, and
    where the system has no private mappings, the tensor is torch's own.

    `huge` asks for pages of 2 MB, for what is written whole and read again and again: weights are streamed
    from memory 5 % faster. Raises `CapacityError` where the system refuses the address space.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < FEWEST_BYTES or sys.platform == "win32":
        return torch.zeros(tuple(shape), dtype=dtype)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"out of memory on cpu: the system refuses {num_bytes:,} bytes ({error}): use fewer blocks"
        ) from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))  # unmapped with its last tensor


def shared_zeros(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[SharedPages | None, list[torch.Tensor]]:
    """CPU tensors of zeros, and the pages in which they lie.

    Other processes of the host may map these. A page is resident once it is written or read. Where the system
    has no such memory, there are no pages and the tensors are `lazy_zeros`; one line says so.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    ends = list(accumulate(cdiv(size, mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes))
    try:
        from sagellm.core.shared_pages import SharedPages  # it imports what Windows has not

        pages = SharedPages(ends[-1])
    except (ImportError, OSError, OverflowError) as error:
        log.warning("KV goes to instances of this host by two copies, not one: %s", error)
        return None, [lazy_zeros(shape, dtype) for shape in shapes]
    return pages, [
        torch.frombuffer(pages.memory, dtype=dtype, count=size // dtype.itemsize, offset=start).view(*shape)
        for start, size, shape in zip([0, *ends], sizes, shapes, strict=False)
    ]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`; the host does not wait for the copy. A copy to a GPU goes through pinned
    memory, which torch keeps until then.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
