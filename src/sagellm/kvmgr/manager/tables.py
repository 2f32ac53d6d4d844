"""Block tables of requests in decode: a block for each that needs one, and news for the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from sagellm.core.errors import CapacityError
from sagellm.core.plan import Draft, Growth, RequestState
from sagellm.core.protocols.kv_pool import KVPool
from sagellm.core.types import NO_ACCOUNT, Account, BlockIds, append_each
from sagellm.kvmgr.manager.sequence import SequenceKV

_NAME = attrgetter("request.request_id")
_ROW = attrgetter("row")


class DecodeTables:
    """Of many requests, touches those that need a block, and those whose table changed otherwise.

    `make_room(n, account)` sees to free blocks; `with_quotas`: who takes a block matters, so each takes its
    own.
    """

    def __init__(
        self,
        sequences: Mapping[str, SequenceKV],
        pool: KVPool,
        make_room: Callable[[int, Account], None],
        *,
        with_quotas: bool,
    ) -> None:
        self._sequences = sequences
        self._pool = pool
        self._make_room = make_room
        self._with_quotas = with_quotas
        self._outdated: dict[str, SequenceKV] = {}

    def mark(self, sequence: SequenceKV, first: int) -> None:
        """The backend has to be told of the table from block `first` on."""
        sequence.changed_from = first
        self._outdated[sequence.state.request_id] = sequence

    def told(self, request_id: str) -> None:
        """The backend knows the table, or the request has left."""
        sequence = self._outdated.pop(request_id, None)
        if sequence is not None:
            sequence.changed_from = None

    def executed(self, draft: Draft) -> None:
        """The backend has done the step."""
        if self._outdated:
            for name in [name for name, one in self._outdated.items() if draft.computes(one.state)]:
                self.told(name)

    def grow(self, draft: Draft) -> None:
        """Fill in `draft.stretched` and `draft.grown`. Raises `CapacityError`; what was given by then stands
        in `stretched`."""
        growing = draft.growing()
        if growing:
            sequences = list(map(self._sequences.__getitem__, map(_NAME, growing)))
            if self._with_quotas:
                for sequence in sequences:
                    self._stretch(draft, [sequence], self.take(sequence, 1))
            else:
                self._stretch(draft, sequences, self._take_one_each(sequences))
        for sequence in self._outdated.values():
            state, first = sequence.state, sequence.changed_from
            if first is not None and state.decoding and draft.computes(state):
                draft.grown.append(Growth(state.row, first, tuple(sequence.block_ids[first:])))

    @property
    def is_up_to_date(self) -> bool:
        return not self._outdated

    def extend(self, states: Sequence[RequestState]) -> None:
        """One block for each, of which no backend has to be told."""
        sequences = [self._sequences[state.request_id] for state in states]
        if self._with_quotas:
            for sequence in sequences:
                sequence.block_ids += self.take(sequence, 1)
        else:
            append_each([one.block_ids for one in sequences], self._take_one_each(sequences))

    def undo(self, draft: Draft) -> None:
        """Take back what `grow` gave."""
        for state, _ in draft.stretched:
            sequence = self._sequences.get(state.request_id)
            if sequence is None or sequence.state is not state:  # it has ended since, and all went back
                continue
            self._pool.shrink(sequence.own, 1)
            sequence.block_ids.pop()
        draft.stretched.clear()
        draft.grown.clear()

    def take(self, sequence: SequenceKV, num_blocks: int) -> BlockIds:
        """Blocks for one request; raises `CapacityError`."""
        account = sequence.own.account
        if self._pool.num_free < num_blocks or self._with_quotas:
            self._make_room(num_blocks, account)
        taken = self._pool.grow(sequence.own, num_blocks)
        if taken is None:
            name = sequence.own.owner
            raise CapacityError(
                f"{name}: {num_blocks} blocks asked for, {self._pool.num_free} could be made free", name
            )
        return taken

    def _stretch(self, draft: Draft, sequences: Sequence[SequenceKV], blocks: BlockIds) -> None:
        tables = [sequence.block_ids for sequence in sequences]
        append_each(tables, blocks)
        states = [sequence.state for sequence in sequences]
        draft.stretched += zip(states, blocks, strict=True)
        places = [len(table) - 1 for table in tables]
        news: Iterable[Growth] = map(Growth, map(_ROW, states), places, zip(blocks, strict=True))
        if self._outdated:
            pairs = zip(news, sequences, strict=True)
            news = (growth for growth, sequence in pairs if sequence.changed_from is None)
        draft.grown += news

    def _take_one_each(self, sequences: Sequence[SequenceKV]) -> BlockIds:
        if self._pool.num_free < len(sequences):
            self._make_room(len(sequences), NO_ACCOUNT)
        taken = self._pool.grow_each([sequence.own for sequence in sequences])
        if taken is None:
            raise CapacityError(
                f"{len(sequences)} requests need a block each, {self._pool.num_free} could be made free",
                sequences[-1].own.owner,
            )
        return taken
