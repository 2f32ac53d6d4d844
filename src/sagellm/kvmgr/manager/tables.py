"""Block tables of requests in decode: a block for each that needs one, and news for the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from sagellm.core.binding import Binding
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.plan import BlockTableDelta, RequestState
from sagellm.core.protocols.kv_pool import KVPool
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds, append_each
from sagellm.kvmgr.manager.sequence import SequenceKV

_ROW = attrgetter("row")


class DecodeTables:
    """Of many requests, touches those that need a block, and those whose table changed otherwise.

    `make_room(n, account)` sees to free blocks; `with_quotas`: who takes a block matters, so each takes its
    own.
    """

    def __init__(
        self,
        pool: KVPool,
        make_room: Callable[[int, Account], None],
        *,
        with_quotas: bool,
    ) -> None:
        self._of: dict[RequestState, SequenceKV] = {}
        self._pool = pool
        self._make_room = make_room
        self._with_quotas = with_quotas
        self._outdated: dict[str, SequenceKV] = {}
        self._num_binds = 0
        self._num_landed = 0

    def enter(self, sequence: SequenceKV) -> None:
        """A request is admitted."""
        self._of[sequence.state] = sequence

    def leave(self, state: RequestState) -> None:
        """It is out of the batch again."""
        del self._of[state]
        self._outdated.pop(state.request_id, None)

    def bind(self, binding: Binding) -> None:
        """A draft is about to be bound: it sends the backend all changes until now, and none to come."""
        self._num_binds += 1
        binding.number = self._num_binds

    def mark(self, sequence: SequenceKV, first: int) -> None:
        """The backend has to be told of the table from block `first` on."""
        before = sequence.changed_from
        sequence.changed_from = first if before is None else min(first, before)
        sequence.changed_at = self._num_binds
        self._outdated[sequence.state.request_id] = sequence

    def told(self, request_id: str) -> None:
        """The request took part in the step that was executed last: the backend knows its table as it was
        when that was bound. Another step may have been bound since."""
        sequence = self._outdated.get(request_id)
        if sequence is not None and sequence.changed_at < self._num_landed:
            del self._outdated[request_id]
            sequence.changed_from = None

    def executed(self, binding: Binding) -> None:
        """The backend has executed the step."""
        draft, self._num_landed = binding.draft, binding.number
        if self._outdated:
            for name in [name for name, one in self._outdated.items() if draft.computes(one.state)]:
                self.told(name)

    def grow(self, binding: Binding) -> None:
        """Append a block to each request in decode that needs one, and note it in the binding.

        Raises `CapacityError`; the blocks appended until then stand in the binding."""
        draft = binding.draft
        growing = draft.needing_block()
        if growing:
            sequences = list(map(self._of.__getitem__, growing))
            if self._with_quotas:
                for state, sequence in zip(growing, sequences, strict=True):
                    self._stretch(binding, [state], [sequence], self.take(sequence, 1))
            else:
                self._stretch(binding, growing, sequences, self._take_one_each(sequences))
        for sequence in self._outdated.values():
            state, first = sequence.state, sequence.changed_from
            if first is not None and state.decoding and draft.computes(state):
                binding.table_deltas.append(
                    BlockTableDelta(state.row, first, tuple(sequence.block_ids[first:]))
                )

    @property
    def is_up_to_date(self) -> bool:
        return not self._outdated

    def append_blocks(self, states: Sequence[RequestState]) -> None:
        """One block for each, of which no backend has to be told."""
        sequences = [self._of[state] for state in states]
        if self._with_quotas:
            for sequence in sequences:
                sequence.block_ids += self.take(sequence, 1)
        else:
            append_each([one.block_ids for one in sequences], self._take_one_each(sequences))

    def undo(self, binding: Binding) -> None:
        """Take back what `grow` gave."""
        for state in binding.appended_to:
            sequence = self._of.get(state)
            if sequence is None:  # it has ended since, and all went back
                continue
            self._pool.shrink(sequence.own, 1)
            sequence.block_ids.pop()
        binding.clear_decodes()

    def take(self, sequence: SequenceKV, num_blocks: int) -> BlockIds:
        """Blocks for one request; raises `CapacityError`."""
        account = sequence.own.account
        if self._pool.num_free < num_blocks or self._with_quotas:
            self._make_room(num_blocks, account)
        taken = self._pool.append_blocks(sequence.own, num_blocks)
        if taken is None:
            name = sequence.own.owner
            raise CapacityError(
                f"{name}: {num_blocks} blocks asked for, {self._pool.num_free} could be made free",
                name,
                num_blocks,
            )
        return taken

    def check(self, sequences: Iterable[SequenceKV]) -> None:
        """Raise `BookkeepingError` unless exactly these are admitted."""
        known, running = set(self._of.values()), set(sequences)
        if known != running or not known.issuperset(self._outdated.values()):
            raise BookkeepingError(f"tables of {len(known)} requests are kept, {len(running)} run")

    def _stretch(
        self,
        binding: Binding,
        states: Sequence[RequestState],
        sequences: Sequence[SequenceKV],
        blocks: BlockIds,
    ) -> None:
        """Append a block to each table. Of outdated tables the backend is sent more than the block."""
        tables = [sequence.block_ids for sequence in sequences]
        indices = list(map(len, tables))
        append_each(tables, blocks)
        binding.appended_to += states
        binding.appended_ids += blocks
        rows, firsts, block_ids = binding.delta_columns
        if not self._outdated:
            rows.extend(map(_ROW, states))
            firsts += indices
            block_ids += blocks
            return
        for state, index, block, sequence in zip(states, indices, blocks, sequences, strict=True):
            if sequence.changed_from is None:
                rows.append(state.row)
                firsts.append(index)
                block_ids.append(block)

    def _take_one_each(self, sequences: Sequence[SequenceKV]) -> BlockIds:
        if self._pool.num_free < len(sequences):
            self._make_room(len(sequences), NO_ACCOUNT)
        taken = self._pool.append_block_to_each([sequence.own for sequence in sequences])
        if taken is None:
            raise CapacityError(
                f"{len(sequences)} requests need a block each, {self._pool.num_free} could be made free",
                sequences[-1].own.owner,
            )
        return taken
