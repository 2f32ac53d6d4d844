"""`PoolBytes`: the blocks of a paged KV pool as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import torch

from sagellm.core.protocols.kv_tiers import Buffer

Rows: TypeAlias = np.ndarray[tuple[int, int], Any]


class PoolBytes:
    """Implements `BlockBytes`. A block's bytes are its row in each pool, one behind the other.

    `pools`: uint8 [num_blocks, bytes of a row], at least one, all on one device. In a CPU's memory numpy
    copies whole rows at the speed of memory; torch's indexing takes two to three times as long. On a GPU the
    copies have a stream of their own, and are waited for, so that a later step finds what was written.
    """

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._pools = pools
        self._spans = list(pairwise([0, *accumulate(pool.shape[1] for pool in self._pools)]))
        self.bytes_per_block = self._spans[-1][1]
        self._device = pools[0].device
        self._arrays: list[Rows] = []
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        else:
            self._arrays = [pool.numpy() for pool in self._pools]

    def follow_steps(self) -> None:
        """Threads launch steps, recorded ones too, on their current stream: the device's default one.

        A stream of torch does not wait for that one by itself.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        rows, ids = self._rows(target, len(block_ids)), np.asarray(block_ids, np.int64)
        for array, (start, stop) in zip(self._arrays, self._spans, strict=False):
            rows[:, start:stop] = array[ids]
        for pool, index, (start, stop) in self._on_gpu(ids):
            torch.from_numpy(rows)[:, start:stop].copy_(pool.index_select(0, index), non_blocking=True)
        self._wait()

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        rows, ids = self._rows(data, len(block_ids)), np.asarray(block_ids, np.int64)
        for array, (start, stop) in zip(self._arrays, self._spans, strict=False):
            array[ids] = rows[:, start:stop]
        for pool, index, (start, stop) in self._on_gpu(ids):
            part = torch.from_numpy(np.ascontiguousarray(rows[:, start:stop]))
            pool.index_copy_(0, index, part.to(self._device, non_blocking=True))
        self._wait()

    def _rows(self, data: Buffer, num_blocks: int) -> Rows:
        """The bytes as [num_blocks, bytes_per_block]."""
        return np.frombuffer(data, np.uint8).reshape(num_blocks, self.bytes_per_block)

    def _on_gpu(self, ids: Rows) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]]:
        """Each pool of a GPU with the ids and its span of a block."""
        if self._stream is None:
            return
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            index = torch.from_numpy(ids).to(self._device)
            for pool, span in zip(self._pools, self._spans, strict=True):
                yield pool, index, span

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
