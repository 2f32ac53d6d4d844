"""`AdmissionFilter`: which blocks a tier takes, by how often their tokens were seen.

A count-min sketch with conservative update and ageing, as in TinyLFU (Einziger, Friedman and Manes 2017;
Cormode and Muthukrishnan 2005; Estan and Varghese 2002): a fixed table counts blocks that no tier has, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NUM_ROWS = 4
MOST = 255
"""The largest count."""
CELLS_PER_BLOCK = 8
MAX_LOAD = 0.5
"""Sightings per cell of a row after which all counts are halved; about 2 % of new blocks then look seen."""
Ints = npt.NDArray[np.int64]


class AdmissionFilter:
    """Counts prompts by block. For one thread.

    `num_blocks`: of the tier. The table has about `CELLS_PER_BLOCK` x `num_blocks` bytes in each of its rows.
    It remembers about the last four times as many blocks: then all counts are halved. A count may be too
    large where blocks share cells.
    """

    def __init__(self, num_blocks: int, min_uses: int) -> None:
        self.min_uses = min_uses
        self._num_cells = 1 << max(4, (CELLS_PER_BLOCK * num_blocks - 1).bit_length())
        self._counts = np.zeros((NUM_ROWS, self._num_cells), np.uint8)
        self._num_seen = 0

    def num_admitted(self, hashes: Sequence[bytes], *, ends: bool) -> int:
        """How many leading blocks of a path `min_uses` requests had, with the present one.

        `hashes`: chained token hashes of at least 32 bytes, so no block is seen more often than those before
        it. `ends`: the request ends; its blocks count for later ones from now on.
        """
        if not hashes:
            return 0
        cells = self._cells(hashes)
        rows = np.arange(NUM_ROWS)[:, None]
        seen = self._counts[rows, cells].min(axis=0)
        if ends:
            raised = np.minimum(seen.astype(np.int64) + 1, MOST).astype(np.uint8)
            np.maximum.at(self._counts, (np.broadcast_to(rows, cells.shape), cells), raised)
            self._age(len(hashes))
        too_few = np.flatnonzero(seen < self.min_uses - 1)
        return int(too_few[0]) if len(too_few) else len(hashes)

    def _age(self, num_blocks: int) -> None:
        self._num_seen += num_blocks
        if self._num_seen >= MAX_LOAD * self._num_cells:
            self._counts >>= 1
            self._num_seen //= 2

    def _cells(self, hashes: Sequence[bytes]) -> Ints:
        """[rows, blocks]: a cell in each row, from eight bytes of the hash each."""
        words = np.frombuffer(b"".join(hashes), "<u8").reshape(len(hashes), -1)[:, :NUM_ROWS]
        return (words & np.uint64(self._num_cells - 1)).astype(np.int64).T
