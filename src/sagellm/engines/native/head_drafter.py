"""`HeadDrafter`: proposes tokens with a draft head.

It keeps the model's last hidden states of each row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from sagellm.core.blocks import NO_PAGE, cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import ExecutionPlan
from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.engines.native.attention import AttentionPlanner, Span
from sagellm.engines.native.draft_head import DraftHead
from sagellm.engines.native.head_draft import (
    MOST_TOKENS,
    HeadDraft,
    HeldRows,
    HiddenRows,
    as_rows,
    draw_all,
    draw_each,
)
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.memory import to_device
from sagellm.engines.native.model import StepInputs
from sagellm.engines.native.recorded_steps import MOST_CPU_ROWS, RecordedSteps
from sagellm.engines.native.rows import BatchRow, BatchRows
from sagellm.engines.native.sampler import Draw

MOST_COMPUTED = MOST_TOKENS + 1
"""Tokens of a row that one pass of a head computes. The KV of more is written before."""
MOST_HELD = 64
"""Hidden states of a row that are kept; before there are more, the KV of their tokens is written.

So requests that are short, or not asked about, cost a copy of a hidden state for each token.
"""


def blocks_per_row(block_size: int) -> int:
    """Blocks in which a row's proposed tokens have their KV."""
    return cdiv(MOST_TOKENS, block_size)


@dataclass(slots=True)
class HeadRow:
    """What the head has of a row.

    KV of the tokens before `start`, and `count` hidden states of the model. They are of the positions from
    `start` - 1 on. The first is zeros where it is not known: of a request that begins, or whose prefix was
    cached.
    """

    request_id: str
    start: int
    count: int = 1

    @property
    def num_computed(self) -> int:
        """The row's tokens that the model has computed, as the head knows."""
        return self.start + self.count - 1


class Run(NamedTuple):
    """Tokens that the head computes, from position `start` on. `table` has the sequence's blocks."""

    token_ids: Sequence[int]
    start: int
    table: array[int]


def next_run(draft: HeadDraft) -> Run:
    """The token that was drawn last."""
    return Run(draft.token_ids[-1:], len(draft.own.tokens) - 1 + len(draft.token_ids), draft.table)


def lasts_of(runs: Sequence[Run]) -> list[int]:
    """The last token of each run, among those of all."""
    return [end - 1 for end in accumulate(len(run.token_ids) for run in runs)]


class Computed(NamedTuple):
    """Logits behind the wanted tokens. The hidden state of the i-th is `hidden[rows[i]]`."""

    logits: torch.Tensor
    hidden: HiddenRows
    rows: Sequence[int]
    may_run_next: bool = False
    """Of recorded steps, whether they can go on without new inputs."""


class HeadDrafter(HeldRows[HeadRow]):
    """Owns the hidden states of a backend's rows. Implements `TokenDrafter`.

    The backend says what a step changes (`apply`) and what it has computed: of prompts (`prefilled`), and of
    rows in decode once their tokens are drawn (`decoded`). Proposed tokens have their KV in the row's last
    block and then in blocks that belong to the row alone, so no block of another request is written.
    `kv` is the head's part of the pool, of KV group `group`; `steps` are recorded steps of the head.
    """

    def __init__(
        self, head: DraftHead, kv: PagedKV, group: int, rows: BatchRows, planner: AttentionPlanner,
        max_rows: int, max_length: int, dtype: torch.dtype, draw: Draw | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._head, self._kv, self._group, self._rows, self._planner = head, kv, group, rows, planner
        self._max_length, self._draw, self._device = max_length, draw, kv.device
        self._most = MOST_TOKENS if head.masks is None else min(MOST_TOKENS, 1 + len(head.masks))
        shape = max_rows, MOST_HELD + 1, head.spec.hidden_size
        self._hidden = torch.zeros(shape, dtype=dtype, device=kv.device)
        self._rows_held = as_rows(self._hidden.flatten(0, 1))
        self.given = torch.zeros(max(max_rows, MOST_CPU_ROWS), shape[2], dtype=dtype, device=kv.device)
        """What a recorded step reads beside its tokens."""
        self._rows_given = as_rows(self.given)
        self.steps: RecordedSteps | None = None

    # -- what steps compute

    def apply(self, plan: ExecutionPlan) -> None:
        """The backend's rows have changed as the plan says. Nothing is computed yet."""
        if self.rests:
            return
        for row in plan.left:
            self._drop(row)
        for join in plan.joined:
            self._drop(join.row)
            self._held[join.row] = HeadRow(join.request_id, join.num_computed)
            self._row_of[join.request_id] = join.row
            self._rows_held[join.row * (MOST_HELD + 1)] = 0
        most = 1 + max([len(chain.token_ids) for chain in plan.chains]) if plan.chains else 1
        for row in plan.decode_rows:
            held = self._held.get(row)
            if held is not None and held.count + most > MOST_HELD + 1:
                half = (MOST_HELD + 1) // 2  # others go along, as the next step would soon write them
                self._flush([r for r in plan.decode_rows if r == row or self._num_held(r) > half])

    def _num_held(self, row: int) -> int:
        held = self._held.get(row)
        return 0 if held is None else held.count

    def prefilled(self, plan: ExecutionPlan, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Take in the prompts of a step. `hidden` [T, hidden] are the model's last ones of all its tokens.

        Short ones are kept as tokens in decode are; the KV of longer ones is written.
        """
        first = len(plan.decode_rows) + plan.num_proposed_tokens
        written: list[tuple[slice, torch.Tensor]] = []
        for op in plan.prefills:
            held, own = self._held.get(op.row), slice(first, first + op.num_tokens)
            first = own.stop
            if held is None:
                continue
            if held.num_computed != op.start:  # a step that has failed is repeated
                held.start, held.count = op.start, 1
                self._hidden[op.row, 0].zero_()
            if held.count + op.num_tokens <= MOST_HELD + 1:
                stop = held.count + op.num_tokens
                self._hidden[op.row, held.count : stop] = hidden[own]
                held.count = stop
            else:
                self._flush([op.row])
                written.append((own, torch.cat((self._hidden[op.row, :1], hidden[own][:-1]))))
                held.start, held.count = op.start + op.num_tokens, 1
                self._hidden[op.row, 0] = hidden[own.stop - 1]
        if written:
            tokens, positions, slots = (
                torch.cat([column[own] for own, _ in written])
                for column in (inputs.tokens, inputs.positions, inputs.slots[self._group])
            )
            before = torch.cat([rows for _, rows in written])
            self._write(tokens, positions, inputs.max_position, slots, before)

    def decoded(self, plan: ExecutionPlan, hidden: torch.Tensor, num_drawn: Sequence[int]) -> None:
        """Take in rows in decode. `hidden` has their positions in the plan's order, of chains all.

        `num_drawn`: how many tokens were drawn for each; so many positions count.
        """
        sizes = {chain.row: len(chain.token_ids) for chain in plan.chains}  # of a head, which makes no trees
        sources: list[int] = []
        targets: list[int] = []
        first = 0
        for row, position, count in zip(plan.decode_rows, plan.decode_positions, num_drawn, strict=True):
            held = self._held.get(row)
            if held is None:
                first += 1 + sizes.get(row, 0)
                continue
            num_new = count
            if held.num_computed != position or held.count + count > MOST_HELD + 1:
                held.start, held.count, num_new = position + count, 0, 1
            stop = first + count
            sources += range(stop - num_new, stop)
            target = row * (MOST_HELD + 1) + held.count
            targets += range(target, target + num_new)
            held.count += num_new
            first += 1 + sizes.get(row, 0)
        if len(sources) == 1:
            self._rows_held[targets[0]] = as_rows(hidden)[sources[0]]
        elif sources:
            self._rows_held[targets] = as_rows(hidden)[sources]

    @torch.inference_mode()
    def _flush(self, rows: Sequence[int]) -> None:
        """Write the KV of the tokens behind known hidden states. Then only the last state of each is kept."""
        tokens, positions, slots = array("i"), array("q"), array("q")
        before: list[torch.Tensor] = []
        size = self._kv.block_size
        for row in rows:
            held, own = self._held[row], self._rows.row(row)
            if held.count > 1 and self._has_blocks(held, own):
                places, table = range(held.start, held.num_computed), own.tables[self._group]
                tokens.extend(own.tokens[held.start : held.num_computed])
                positions.extend(places)
                slots.extend(table[p // size] * size + p % size for p in places)
                before.append(self._hidden[row, : held.count - 1])
        if before:
            columns = map(torch.tensor, (tokens, positions, slots))
            token_ids, at, where = (to_device(column, self._device) for column in columns)
            self._write(token_ids, at, max(positions), where, torch.cat(before))
        for row in rows:
            self._keep_last(row)

    def _has_blocks(self, held: HeadRow, own: BatchRow) -> bool:
        """Whether the tokens behind known hidden states still have blocks.

        A window may have passed them.
        """
        first, stop = held.start // self._kv.block_size, cdiv(held.num_computed, self._kv.block_size)
        return NO_PAGE not in own.tables[self._group][first:stop]

    def _keep_last(self, row: int) -> None:
        """All tokens but the last have their KV, or no place for it."""
        held = self._held[row]
        if held.count > 1:
            first = row * (MOST_HELD + 1)
            self._rows_held[first] = self._rows_held[first + held.count - 1]
        held.start, held.count = held.num_computed, 1

    def _write(
        self, tokens: torch.Tensor, positions: torch.Tensor, max_position: int, slots: torch.Tensor,
        before: torch.Tensor,
    ) -> None:  # fmt: skip
        self._head.write_kv(
            StepInputs(tokens, positions, max_position, [slots], None, {}, hidden=before), self._kv
        )

    # -- proposals

    @torch.inference_mode()
    def draft(self, asked: Sequence[Asked], min_probability: float) -> Sequence[Proposal]:
        proposals = [Proposal()] * len(asked)
        drafts = [draft for i, each in enumerate(asked) if (draft := self._begin(i, each)) is not None]
        if not drafts:
            return proposals
        behind = [draft.row for draft in drafts if self._num_held(draft.row) > MOST_COMPUTED]
        if behind:
            self._flush(behind)
        if self._head.masks is not None:
            self._draw_block(drafts, self._head.masks, min_probability)
        else:
            self._draw_in_turn(drafts, min_probability)
        for draft in drafts:
            self._keep_last(draft.row)
            proposals[draft.index] = draft.proposal()
        return proposals

    def _draw_block(self, drafts: Sequence[HeadDraft], masks: torch.Tensor, least: float) -> None:
        """Draw all tokens from one pass.

        For places further ahead the head reads the last token once more, and adds a mask to its hidden state.
        """
        runs: list[Run] = []
        sources: list[int] = []
        wanted: list[int] = []
        firsts: list[int] = []
        for draft in drafts:
            held, first, ahead = self._held[draft.row], draft.row * (MOST_HELD + 1), draft.most - 1
            tokens = draft.own.tokens[held.start :]
            runs.append(Run([*tokens, *tokens[-1:] * ahead], held.start, draft.table))
            sources += [*range(first, first + held.count), *[first + held.count - 1] * ahead]
            firsts.append(len(wanted))
            wanted += range(len(sources) - draft.most, len(sources))
        given = self._hidden.flatten(0, 1)[sources]
        for draft, first in zip(drafts, firsts, strict=True):
            given[wanted[first] + 1 : wanted[first] + draft.most] += masks[: draft.most - 1]
        found = self._compute(runs, as_rows(given), slice(None), wanted)
        draw_all(drafts, found.logits, firsts, least, self._draw)

    def _draw_in_turn(self, drafts: Sequence[HeadDraft], least: float) -> None:
        """Draw one token after the other.

        Each pass reads what the last has drawn, and its hidden state.
        """
        computed = self._first(drafts)
        going = drafts
        while True:
            draw_each(going, computed.logits, least, self._draw)
            left = [i for i, draft in enumerate(going) if not draft.has_ended]
            if not left:
                break
            sources, steps = [computed.rows[i] for i in left], self.steps
            follows = computed.may_run_next and len(left) == len(going) == len(computed.hidden)
            going = [going[i] for i in left]
            if self._draws_greedily(going):
                self._draw_rest(going, computed.hidden[sources], least)
                break
            if follows and steps is not None:
                self._rows_given[: len(going)] = computed.hidden
                computed = computed._replace(logits=steps.run_next([draft.token_ids[-1] for draft in going]))
            else:
                runs = [next_run(draft) for draft in going]
                ahead = max(draft.num_left for draft in going) - 1
                computed = self._compute(runs, computed.hidden, sources, lasts_of(runs), ahead)

    def _draws_greedily(self, drafts: Sequence[HeadDraft]) -> bool:
        """Whether recorded steps draw all further tokens of these rows."""
        steps = self.steps
        return (
            steps is not None
            and steps.can_run_greedily
            and steps.takes(len(drafts))
            and all(draft.takes_greatest for draft in drafts)
        )

    def _draw_rest(self, drafts: Sequence[HeadDraft], hidden: HiddenRows, least: float) -> None:
        """Draw what is left of each draft. `hidden`: the states behind the tokens before its last one."""
        assert self.steps is not None
        runs = [next_run(draft) for draft in drafts]
        count = max(draft.num_left for draft in drafts)
        count = min(count, self._max_length - max(run.start for run in runs))
        self._rows_given[: len(drafts)] = hidden
        spans = [Span(i, 1, run.start, run.table) for i, run in enumerate(runs)]
        tokens = [run.token_ids[0] for run in runs]
        found = self.steps.run_greedily(tokens, spans, [[run.table] for run in runs], count)
        for token_ids, chances in zip(*found, strict=True):
            for draft, token_id, chance in zip(drafts, token_ids, chances, strict=True):
                if not draft.has_ended:
                    draft.take(token_id, chance, least)

    def _begin(self, index: int, asked: Asked) -> HeadDraft | None:
        """None for a request whose last tokens the head has not seen."""
        row = self._row_of.get(asked.request.request_id)
        if row is None:
            return None
        held = self._held[row]
        most = min(asked.num_tokens, self._most, self._max_length - len(asked.tokens))
        draft = HeadDraft.of(index, row, asked, held.num_computed, self._rows, most)
        if draft is None:
            return None
        if not self._has_blocks(held, draft.own):
            self._keep_last(row)
        per_row = blocks_per_row(self._kv.block_size)
        first = self._kv.first_draft_block + row * per_row
        computed = cdiv(held.num_computed, self._kv.block_size)
        draft.table = draft.own.tables[self._group][:computed] + array("i", range(first, first + per_row))
        return draft

    def _first(self, drafts: Sequence[HeadDraft]) -> Computed:
        """Compute all tokens whose hidden states are known."""
        runs: list[Run] = []
        sources: list[int] = []
        for draft in drafts:
            held, first = self._held[draft.row], draft.row * (MOST_HELD + 1)
            runs.append(Run(draft.own.tokens[held.start :], held.start, draft.table))
            sources += range(first, first + held.count)
        ahead = max(draft.num_left for draft in drafts) - 1
        return self._compute(runs, self._rows_held, sources, lasts_of(runs), ahead)

    def _compute(
        self, runs: Sequence[Run], hidden: HiddenRows, sources: list[int] | slice, wanted: Sequence[int],
        ahead: int = 0,
    ) -> Computed:  # fmt: skip
        """Compute runs, whose tokens read the rows `sources` of `hidden`, one after the other.

        `wanted`: the tokens whose logits are. At most so many `ahead` follow behind each run.
        """
        ends = list(accumulate(len(run.token_ids) for run in runs))
        spans = [
            Span(end - len(run.token_ids), len(run.token_ids), run.start, run.table)
            for run, end in zip(runs, ends, strict=True)
        ]
        tokens, steps = [i for run in runs for i in run.token_ids], self.steps
        if steps is not None and steps.takes(len(tokens)):
            self._rows_given[: len(tokens)] = hidden[sources]
            if self._device.type != "cpu":
                spans = [each for span in spans for each in span.one_by_one()]
            logits = steps.run(tokens, spans, [[span.block_ids] for span in spans], ahead)
            logits = logits if len(tokens) == len(wanted) else logits[wanted]
            return Computed(logits, as_rows(steps.hidden(len(tokens))), wanted, steps.can_run_next)
        given = torch.empty(len(tokens), self.given.shape[1], dtype=self.given.dtype, device=self._device)
        as_rows(given)[:] = hidden[sources]
        found = self._head.hidden(self._inputs(tokens, spans, given, wanted), self._kv)
        return Computed(self._head.head(found), as_rows(found), range(len(wanted)))

    def _inputs(
        self, tokens: Sequence[int], spans: Sequence[Span], given: torch.Tensor, last: Sequence[int]
    ) -> StepInputs:
        size, positions = self._kv.block_size, [at for span in spans for at in range(span.start, span.end)]
        slots = [
            span.block_ids[at // size] * size + at % size
            for span in spans
            for at in range(span.start, span.end)
        ]
        columns = torch.tensor(tokens, dtype=torch.int32), *map(torch.tensor, (positions, slots, last))
        token_ids, places, where, rows = (to_device(column, self._device) for column in columns)
        plans = {kind: self._planner.plan((), spans, (), kind[1]) for kind in self._head.kinds}
        return StepInputs(token_ids, places, max(positions), [where], rows, plans, hidden=given)

    def check(self) -> None:
        """Raise `BookkeepingError` where what the head knows of its rows cannot be."""
        super().check()
        for row, held in self._held.items():
            known = len(self._rows.row(row).tokens)
            if not 1 <= held.count <= MOST_HELD + 1 or held.num_computed > known:
                raise BookkeepingError(f"a draft head has {held} of a row with {known} tokens")
