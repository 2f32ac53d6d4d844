"""`PoolBytes`: the blocks of a paged KV pool as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.engines.native.kv_cache import PagedKV


class PoolBytes:
    """Implements `BlockBytes`. A block's bytes are those of each pool of `kv`, one behind the other.

    On a GPU it has a stream of its own, and waits for its copies.
    """

    def __init__(self, kv: PagedKV) -> None:
        self._pools = kv.as_bytes()
        sizes = [pool.shape[1] for pool in self._pools]
        self._offsets = [0, *accumulate(sizes)]
        self.bytes_per_block = self._offsets[-1]
        self._device = kv.device
        self._stream: torch.cuda.Stream | None = None
        if kv.device.type == "cuda":
            self._stream = torch.cuda.Stream(kv.device)  # type: ignore[no-untyped-call]

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        rows = self._view(target, len(block_ids))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            ids = torch.tensor(list(block_ids), dtype=torch.long, device=self._device)
            for pool, start, stop in zip(self._pools, self._offsets, self._offsets[1:], strict=False):
                rows[:, start:stop].copy_(pool.index_select(0, ids), non_blocking=True)
        self._wait()

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        rows = self._view(data, len(block_ids))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            ids = torch.tensor(list(block_ids), dtype=torch.long, device=self._device)
            for pool, start, stop in zip(self._pools, self._offsets, self._offsets[1:], strict=False):
                pool.index_copy_(0, ids, rows[:, start:stop].to(self._device, non_blocking=True))
        self._wait()

    def _view(self, data: Buffer, num_blocks: int) -> torch.Tensor:
        """The bytes as [num_blocks, bytes_per_block]."""
        return torch.frombuffer(data, dtype=torch.uint8).view(num_blocks, self.bytes_per_block)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
