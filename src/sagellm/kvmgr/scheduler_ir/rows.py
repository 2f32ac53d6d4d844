"""`Rows`: what a backend knows of its batch, from the plans that it was told.

A plan says what changes; who wants to read or check one needs to know what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from sagellm.core.plan import ExecutionPlan, Join
from sagellm.core.types import TOKEN_BYTES


@dataclass(slots=True)
class Row:
    """One request in the batch: `num_tokens` it has, the first `num_computed` have KV in `block_ids`."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, join: Join) -> Row:
        num_tokens = len(join.tokens) // TOKEN_BYTES
        return cls(
            join.request_id, num_tokens, join.num_prompt_tokens, join.num_computed, list(join.block_ids)
        )


class Rows(Mapping[int, Row]):
    """Rows by number. `preempted`: requests that left by preemption and have not come back."""

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
        """The request in each row."""
        return {number: row.request_id for number, row in self._rows.items()}

    def copy(self) -> Rows:
        """The same rows, free to change."""
        made = Rows({number: replace(row, block_ids=row.block_ids[:]) for number, row in self.items()})
        made.preempted = set(self.preempted)
        return made

    def follow(self, plan: ExecutionPlan) -> None:
        """What the plan changes, once it was executed. Rows that entered before the first plan are left
        alone: nothing is known of them."""
        self.preempted.update(plan.preempted)
        for row in plan.left:
            self._rows.pop(row, None)
        for join in plan.joined:
            self._rows[join.row] = Row.of(join)
            self.preempted.discard(join.request_id)
        for growth in plan.table_deltas:
            if growth.row in self._rows:
                self._rows[growth.row].block_ids[growth.first :] = growth.block_ids
        for number, position in zip(plan.decode_rows, plan.decode_positions, strict=True):
            self._computed(number, position + 1)
        for op in plan.prefills:
            self._computed(op.row, op.start + op.num_tokens)
        for number in plan.sample_rows:
            if number in self._rows:
                self._rows[number].num_tokens += 1

    def _computed(self, number: int, end: int) -> None:
        row = self._rows.get(number)
        if row is not None:
            row.num_computed = end
