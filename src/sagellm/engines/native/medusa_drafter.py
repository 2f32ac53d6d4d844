"""`MedusaDrafter`: proposes tokens with Medusa's blocks, from the last hidden state of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import ExecutionPlan
from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.engines.native.head_draft import HeadDraft, HeldRows, as_rows, draw_all
from sagellm.engines.native.medusa_head import MedusaHead
from sagellm.engines.native.rows import BatchRows
from sagellm.engines.native.sampler import Draw

NOTHING = -1


@dataclass(slots=True)
class MedusaRow:
    """A request in a row. `num_computed`: of its tokens, up to that of the kept hidden state."""

    request_id: str
    num_computed: int = NOTHING


class MedusaDrafter(HeldRows[MedusaRow]):
    """Owns the last hidden state of each of a backend's rows. Implements `TokenDrafter`.

    The backend says what a step changes (`apply`), and what it has computed (`decoded`). `logits` is the
    model's head.
    """

    def __init__(
        self, head: MedusaHead, logits: Callable[[torch.Tensor], torch.Tensor], rows: BatchRows,
        max_rows: int, max_length: int, dtype: torch.dtype, device: torch.device, draw: Draw | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._head, self._logits, self._rows = head, logits, rows
        self._max_length, self._draw = max_length, draw
        self._hidden = torch.zeros(max_rows, head.hidden_size, dtype=dtype, device=device)
        self._rows_held = as_rows(self._hidden)

    def apply(self, plan: ExecutionPlan) -> None:
        """The backend's rows have changed as the plan says. Nothing is computed yet."""
        if self.rests:
            return
        for row in (*plan.left, *(join.row for join in plan.joined)):
            self._drop(row)
        for join in plan.joined:
            self._held[join.row], self._row_of[join.request_id] = MedusaRow(join.request_id), join.row

    def decoded(self, plan: ExecutionPlan, hidden: torch.Tensor, num_drawn: Sequence[int]) -> None:
        """Keep the last hidden state of each row that has drawn.

        `hidden` has those of the plan's `sample_rows` in order, of chains all. `num_drawn`: how many tokens
        were drawn for each row in decode.
        """
        sizes = {chain.row: len(chain.token_ids) for chain in plan.chains}  # of Medusa, which makes no trees
        rows: list[int] = []
        sources: list[int] = []
        first = 0
        for row, position, count in zip(plan.decode_rows, plan.decode_positions, num_drawn, strict=True):
            if row in self._held:
                self._held[row].num_computed = position + count
                rows.append(row)
                sources.append(first + count - 1)
            first += 1 + sizes.get(row, 0)
        for op in plan.prefills:
            if op.samples and op.row in self._held:
                self._held[op.row].num_computed = op.start + op.num_tokens
                rows.append(op.row)
                sources.append(first)
            first += op.samples
        if len(rows) == 1:
            self._rows_held[rows[0]] = as_rows(hidden)[sources[0]]
        elif rows:
            self._rows_held[rows] = as_rows(hidden)[sources]

    @torch.inference_mode()
    def draft(self, asked: Sequence[Asked], min_probability: float) -> Sequence[Proposal]:
        proposals = [Proposal()] * len(asked)
        drafts = [draft for i, each in enumerate(asked) if (draft := self._begin(i, each)) is not None]
        if not drafts:
            return proposals
        rows, most = [draft.row for draft in drafts], max(draft.most for draft in drafts)
        last = self._hidden[rows[0] : rows[0] + 1] if len(rows) == 1 else self._hidden[rows]
        logits = self._logits(self._head.hidden(last, most))
        draw_all(drafts, logits, range(0, len(logits), most), min_probability, self._draw)
        for draft in drafts:
            proposals[draft.index] = draft.proposal()
        return proposals

    def _begin(self, index: int, asked: Asked) -> HeadDraft | None:
        row = self._row_of.get(asked.request.request_id)
        if row is None:
            return None
        most = min(asked.num_tokens, self._head.count, self._max_length - len(asked.tokens))
        return HeadDraft.of(index, row, asked, self._held[row].num_computed, self._rows, most)

    def check(self) -> None:
        """Raise `BookkeepingError` where what is known of the rows cannot be."""
        super().check()
        for row, held in self._held.items():
            known = len(self._rows.row(row).tokens)
            if not NOTHING <= held.num_computed <= known:
                raise BookkeepingError(f"a draft head has {held} of a row with {known} tokens")
