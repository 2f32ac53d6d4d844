"""The running batch in rows, kept between steps: block tables, tokens, sampler state. Host memory only.

A plan holds the changes. `apply` updates the rows, `inputs` makes the step's tensors, `advance` appends the
drawn tokens. Until `advance` a step can be repeated, or its rows joined anew, with the same result.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sagellm.core.errors import PlanError
from sagellm.core.plan import BlockTableDelta, ExecutionPlan, Join
from sagellm.engines.native.attention import AttentionPlanner, Span
from sagellm.engines.native.memory import to_device
from sagellm.engines.native.model import StepInputs
from sagellm.engines.native.sampler import RowSampler, ScoredPrompt, request_seed


@dataclass(slots=True)
class BatchRow:
    """One running request: `tokens` is prompt and output, `table` its block ids."""

    request_id: str
    tokens: array[int]
    num_prompt_tokens: int
    table: array[int]
    sampler: RowSampler


class BatchRows:
    """At most `max_rows` sequences by row number. Raises `PlanError` for a plan that cannot be executed."""

    def __init__(
        self, max_rows: int, max_length: int, num_blocks: int, block_size: int, vocab_size: int, seed: int
    ) -> None:
        self._max_rows = max_rows
        self._max_length = max_length
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._seed = seed
        self._rows: dict[int, BatchRow] = {}

    def apply(self, plan: ExecutionPlan, device: torch.device) -> None:
        """Remove rows, add rows and update block tables, in that order."""
        for row in plan.left:
            self._rows.pop(row, None)
        for join in plan.joined:
            self._join(join, device)
        for delta in plan.table_deltas:
            self._update_table(delta)

    def _join(self, join: Join, device: torch.device) -> None:
        if not 0 <= join.row < self._max_rows:
            raise PlanError(f"{join.request_id} joins row {join.row}; rows are 0 to {self._max_rows - 1}")
        tokens = array("i")
        tokens.frombytes(join.tokens)
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise PlanError(f"{join.request_id} has a token id outside the vocabulary of {self._vocab_size}")
        self._check_blocks(join.request_id, join.block_ids)
        params = join.params
        seed = request_seed(self._seed, join.request_id) if params.seed is None else params.seed
        prompt, outputs = tokens[: join.num_prompt_tokens], tokens[join.num_prompt_tokens :]
        sampler = RowSampler.of(params, seed, prompt, outputs, join.eos_token_ids, self._vocab_size, device)
        table = array("i", join.block_ids)
        self._rows[join.row] = BatchRow(join.request_id, tokens, join.num_prompt_tokens, table, sampler)

    def _update_table(self, delta: BlockTableDelta) -> None:
        row = self._row(delta.row)
        self._check_blocks(row.request_id, delta.block_ids)
        if delta.first > len(row.table):
            raise PlanError(f"{row.request_id} grows at block {delta.first} of a table of {len(row.table)}")
        row.table[delta.first : delta.first + len(delta.block_ids)] = array("i", delta.block_ids)

    def _check_blocks(self, request_id: str, block_ids: Sequence[int]) -> None:
        if block_ids and (min(block_ids) < 0 or max(block_ids) >= self._num_blocks):
            raise PlanError(f"{request_id} has a block outside the pool of {self._num_blocks}: {block_ids}")

    def _row(self, row: int) -> BatchRow:
        try:
            return self._rows[row]
        except KeyError:
            raise PlanError(f"row {row} is in the plan, but no request has joined it") from None

    def inputs(
        self,
        plan: ExecutionPlan,
        planner: AttentionPlanner,
        windows: Iterable[int | None],
        device: torch.device,
        scored: Sequence[ScoredPrompt] = (),
    ) -> StepInputs:
        """The tensors of a step. Flat order: decode rows, longest first, then prefills as planned. The
        positions of `scored` follow the sampled rows.
        """
        order = sorted(range(len(plan.decode_rows)), key=lambda i: -plan.decode_positions[i])
        decode = [
            self._span(first, plan.decode_rows[i], plan.decode_positions[i], 1)
            for first, i in enumerate(order)
        ]
        prefill: list[Span] = []
        first = len(decode)
        for op in plan.prefills:
            prefill.append(self._span(first, op.row, op.start, op.num_tokens))
            first += op.num_tokens
        rows = [plan.decode_rows[i] for i in order] + [op.row for op in plan.prefills]
        spans = decode + prefill
        tokens, positions, slots, size = array("i"), array("q"), array("q"), self._block_size
        for row, span in zip(rows, spans, strict=True):
            tokens.extend(self._rows[row].tokens[span.start : span.end])
            positions.extend(range(span.start, span.end))
            slots.extend(span.block_ids[p // size] * size + p % size for p in range(span.start, span.end))
        return StepInputs(
            tokens=to_device(torch.frombuffer(tokens, dtype=torch.int32), device),
            positions=to_device(torch.frombuffer(positions, dtype=torch.long), device),
            max_position=max(span.end for span in spans) - 1,
            slots=to_device(torch.frombuffer(slots, dtype=torch.long), device),
            sampled=to_device(self._sampled(plan, order, prefill, scored), device),
            attention={window: planner.plan(decode, prefill, window) for window in windows},
        )

    def scored(self, plan: ExecutionPlan) -> list[ScoredPrompt]:
        """The positions in this step for which prompt log-probabilities are wanted."""
        found: list[ScoredPrompt] = []
        first = len(plan.decode_rows)
        for op in plan.prefills:
            batch_row = self._row(op.row)
            top = batch_row.sampler.params.prompt_logprobs
            if top is not None:
                stop = min(op.start + op.num_tokens + 1, batch_row.num_prompt_tokens)
                found.append(ScoredPrompt(op.row, first, batch_row.tokens[op.start + 1 : stop], top))
            first += op.num_tokens
        return found

    def decodes(self, plan: ExecutionPlan) -> tuple[list[int], list[Span]]:
        """The token and span of each of `plan.decode_rows`, in that order."""
        places = list(zip(plan.decode_rows, plan.decode_positions, strict=True))
        spans = [self._span(i, row, position, 1) for i, (row, position) in enumerate(places)]
        return [self._rows[row].tokens[position] for row, position in places], spans

    def _span(self, first_row: int, row: int, start: int, num_tokens: int) -> Span:
        batch_row = self._row(row)
        span = Span(first_row, num_tokens, start, batch_row.table)
        limits = {
            "tokens": len(batch_row.tokens),
            "slots in its blocks": len(batch_row.table) * self._block_size,
            "positions in the model's length": self._max_length,
        }
        for name, limit in limits.items():
            if num_tokens < 1 or start < 0 or span.end > limit:
                raise PlanError(
                    f"{batch_row.request_id} has {limit} {name}; [{start}, {span.end}) cannot be computed"
                )
        return span

    @staticmethod
    def _sampled(
        plan: ExecutionPlan, order: Sequence[int], prefill: Sequence[Span], scored: Sequence[ScoredPrompt]
    ) -> torch.Tensor:
        """The flat row of each of `plan.sample_rows`, then those of `scored`."""
        place = [0] * len(order)
        for first, i in enumerate(order):
            place[i] = first
        ends = [
            s.first_row + s.num_tokens - 1 for s, op in zip(prefill, plan.prefills, strict=True) if op.samples
        ]
        prompts = (
            row for part in scored for row in range(part.first_row, part.first_row + len(part.targets))
        )
        return torch.tensor([*place, *ends, *prompts], dtype=torch.long)

    def fresh_last_blocks(self, plan: ExecutionPlan) -> list[int]:
        """Last blocks of the step's rows that hold no computed token yet."""
        size = self._block_size
        ends = [(row, at, at) for row, at in zip(plan.decode_rows, plan.decode_positions, strict=True)]
        ends += [(op.row, op.start, op.start + op.num_tokens - 1) for op in plan.prefills]
        return [
            self._row(row).table[last // size] for row, start, last in ends if last // size * size >= start
        ]

    def samplers(self, rows: Iterable[int]) -> list[RowSampler]:
        return [self._row(row).sampler for row in rows]

    def advance(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Append the token drawn for each row."""
        for row, token_id in zip(rows, token_ids, strict=True):
            batch_row = self._rows[row]
            batch_row.tokens.append(token_id)
            batch_row.sampler.accept(token_id)
