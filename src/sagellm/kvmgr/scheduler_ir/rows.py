"""The batch as a backend knows it from the plans that it executed.

A plan holds changes only; to read or check it, one needs the batch before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sagellm.core.ir import JoinOp
from sagellm.core.plan import ExecutionPlan, Join
from sagellm.core.types import TOKEN_BYTES


@dataclass(slots=True)
class Row:
    """One request in the batch. Its first `num_computed` of `num_tokens` tokens have KV in `block_ids`."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, join: Join | JoinOp) -> Row:
        num_tokens = len(join.tokens) // TOKEN_BYTES
        return cls(
            join.request_id, num_tokens, join.num_prompt_tokens, join.num_computed, list(join.block_ids)
        )


class Rows(Mapping[int, Row]):
    """Rows by number. `preempted` are requests that were preempted and have not resumed."""

    def __init__(self, rows: Mapping[int, Row] | None = None) -> None:
        self._rows = dict(rows or {})
        self.preempted: set[str] = set()

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def names(self) -> dict[int, str]:
        """The request id of each row."""
        return {number: row.request_id for number, row in self._rows.items()}

    def copy(self) -> Rows:
        """An independent copy."""
        copied = Rows({number: replace(row, block_ids=row.block_ids[:]) for number, row in self.items()})
        copied.preempted = set(self.preempted)
        return copied

    def follow(self, plan: ExecutionPlan, num_accepted: Sequence[int] = ()) -> None:
        """Apply a plan that was executed. Rows that joined before the first plan stay unknown.

        `num_accepted`: how many tokens of each of `plan.chains` were accepted.
        """
        self.preempted.update(plan.preempted)
        for number in plan.left:
            self._rows.pop(number, None)
        for join in plan.joined:
            self._rows[join.row] = Row.of(join)
            self.preempted.discard(join.request_id)
        for delta in plan.table_deltas:
            if delta.row in self._rows:
                self._rows[delta.row].block_ids[delta.first :] = delta.block_ids
        for number, position in zip(plan.decode_rows, plan.decode_positions, strict=True):
            self._computed(number, position + 1)
        for op in plan.prefills:
            self._computed(op.row, op.start + op.num_tokens)
        for number in plan.sample_rows:
            if number in self._rows:
                self._rows[number].num_tokens += 1
        for chain, accepted in zip(plan.chains, num_accepted, strict=True):
            row = self._rows.get(chain.row)
            if row is not None:
                row.num_tokens += accepted
                row.num_computed += accepted

    def _computed(self, number: int, end: int) -> None:
        row = self._rows.get(number)
        if row is not None:
            row.num_computed = end
