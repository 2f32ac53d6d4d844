"""A backend of tokens that tells approximate KV from exact: what it may never serve raises an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import BlockCopy, Chain, ExecutionPlan, StepResult
from sagellm.core.protocols.kv_tiers import Buffer
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.simulator.token_memory import TokenBytes, _Row


class ApproximateMemory(TokenMemoryBackend):
    """`TokenMemoryBackend` with a mark on each slot whose KV is approximate.

    KV is approximate where it was copied to another position, and where it was computed behind such KV or
    behind dropped blocks. An answer drawn from marked KV is off by one. Only requests whose id begins with
    "~" may see a mark. KV is copied only while `engine`, if it is set, has no step in flight.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.marked: set[int] = set()
        self.num_copied = 0
        self.leaks: list[int] = []
        self.engine: Engine | None = None
        self._may_see: dict[int, bool] = {}
        self._saw: dict[int, bool] = {}

    def token_copier(self) -> ApproximateMemory:
        return self

    def copy(self, sources: Sequence[int], targets: Sequence[int], distance: int) -> None:
        if self.engine is not None and self.engine._in_flight is not None:
            raise BookkeepingError("KV is copied while a step is in flight")
        if not set(sources).isdisjoint(targets) or not self.marked.isdisjoint(sources):
            raise BookkeepingError("approximate KV is copied again, or KV to itself")
        for source, target in zip(sources, targets, strict=True):
            entry = self._memory[source]
            if entry is None:
                raise BookkeepingError(f"slot {source} is empty")
            self._memory[target] = entry[0], entry[1] + distance, entry[2]
        self.marked.update(targets)
        self.num_copied += len(targets)

    def kv_bytes(self) -> MarkedBytes:
        return MarkedBytes(self)

    def execute(self, plan: ExecutionPlan) -> StepResult:
        for join in plan.joined:
            self._may_see[join.row] = join.request_id.startswith("~")
            self._saw[join.row] = False
        return super().execute(plan)

    def _copy(self, copy: BlockCopy) -> None:
        super()._copy(copy)
        size = self._capability.block_size
        for offset in range(size):
            self._mark(copy.target * size + offset, copy.source * size + offset in self.marked)

    def _compute(self, row_id: int, start: int, end: int) -> None:
        row = self._rows[row_id]
        behind = self._is_behind_marks(row, start)
        for position in range(start, end):
            self._mark(self._slot(row, position), behind)
        super()._compute(row_id, start, end)

    def _compute_proposed(self, chain: Chain, start: int) -> None:
        row = self._rows[chain.row]
        behind = self._is_behind_marks(row, start)
        for place in range(start, start + len(chain.token_ids)):
            self._mark(self._slot(row, place), behind)
        super()._compute_proposed(chain, start)

    def _is_behind_marks(self, row: _Row, stop: int) -> bool:
        held = self._held(row, 0, stop)
        return len(held) < stop or any(self._slot(row, position) in self.marked for position in held)

    def _move(self, source: int, target: int) -> None:
        super()._move(source, target)
        self._mark(target, source in self.marked)

    def _read(self, row_id: int, position: int, group: int) -> int:
        if self._slot(self._rows[row_id], position, group) in self.marked:
            self._saw[row_id] = True
            if not self._may_see[row_id]:
                raise BookkeepingError(f"row {row_id} is exact, and sees approximate KV at {position}")
        return super()._read(row_id, position, group)

    def _draw(self, row_id: int, num_tokens: int) -> int:
        token = super()._draw(row_id, num_tokens)
        return (token + 1) % self._capability.vocab_size if self._saw[row_id] else token

    def _mark(self, slot: int, is_marked: bool) -> None:
        if is_marked:
            self.marked.add(slot)
        else:
            self.marked.discard(slot)


class MarkedBytes(TokenBytes):
    """Its bytes, for tiers. Blocks with approximate KV that are read are noted in `leaks`."""

    def __init__(self, backend: ApproximateMemory) -> None:
        super().__init__(backend._memory, backend._capability.block_size)
        self._backend = backend

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        marked = self._backend.marked
        self._backend.leaks += [block for block in block_ids if not marked.isdisjoint(self._slots_of(block))]
        super().read_blocks(block_ids, target)

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        super().write_blocks(block_ids, data)
        for block in block_ids:
            self._backend.marked.difference_update(self._slots_of(block))

    def _slots_of(self, block: int) -> range:
        return range(block * self._size, (block + 1) * self._size)


def check_index(engine: Engine) -> None:
    """No block of the prefix index has approximate KV, nor has one gone to a tier.

    While a step is in flight the index may have blocks that it computes, with old marks.
    """
    backend, size = engine.backend, engine.kv.block_size
    assert isinstance(backend, ApproximateMemory)
    leaks = {slot // size for slot in backend.marked} & set(engine.kv.index.all_block_ids())
    assert engine._in_flight is not None or not leaks, f"blocks {leaks} of the index have approximate KV"
    assert not backend.leaks, f"blocks {backend.leaks} have approximate KV and went to a tier"
