"""`DroppedBlocks`: blocks of running requests whose KV is given up, out of their tables.

The request goes on with the others: later tokens do not see those of dropped blocks. So its KV behind them is
an approximation, which no other request and no tier gets (`RequestBlocks.num_exact`).
"""

from __future__ import annotations

from array import array

from sagellm.core.blocks import NO_PAGE, cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import RequestState
from sagellm.core.protocols.kv_pool import KVPool
from sagellm.kvmgr.manager.tables import BlockTables, free_leading

DROPPED = "dropped"


class DroppedBlocks:
    """Drops blocks of requests whose KV is in one group and has no window. `num_blocks`: so far."""

    def __init__(self, tables: BlockTables, pool: KVPool) -> None:
        self._tables, self._pool = tables, pool
        self.num_blocks = 0

    def droppable(self, state: RequestState, first_token: int) -> range:
        """The blocks of a request that can be dropped, as places in its table.

        They hold computed tokens from `first_token` on alone, and none is the first block of its own, which
        others of its group may copy. Those that were dropped before are not among them if `first_token` is
        the same or greater.
        """
        blocks, size = self._tables[state.request_id], self._pool.block_size
        first, stop = max(cdiv(first_token, size), blocks.num_shared + 1), state.num_computed // size
        while first < stop and blocks.block_ids[first] == NO_PAGE:
            first += 1
        return range(first, max(first, stop))

    def drop(self, state: RequestState, places: range) -> None:
        """Free the blocks at these places of a request's table. No step that reads them is in flight.

        The backend is sent the table with the request's next step. If it raises an error, nothing has
        changed.
        """
        blocks, size = self._tables[state.request_id], self._pool.block_size
        table, last = blocks.block_ids, state.num_computed // size
        if (
            not blocks.num_shared < places.start < places.stop <= last
            or NO_PAGE in table[places.start : places.stop]
        ):
            raise BookkeepingError(f"{state.request_id} has no blocks to drop at {places} of its table")
        before = table[blocks.num_shared : places.start]
        free_leading(self._pool, blocks.own, len(places), DROPPED, keep=len(before) - before.count(NO_PAGE))
        table[places.start : places.stop] = array("i", [NO_PAGE]) * len(places)
        blocks.num_dropped_blocks += len(places)
        self.num_blocks += len(places)
        blocks.num_exact = min(blocks.num_exact, places.start * size)
        self._tables.mark_unsent(blocks, places.start)
