"""The running batch in rows, kept between steps: block tables, tokens, sampler state. Host memory only.

A plan holds the changes. `apply` updates the rows, `inputs` makes the step's tensors, `advance` appends the
drawn tokens. Until `advance` a step can be repeated, or its rows joined anew, with the same result.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sagellm.core.blocks import NO_PAGE
from sagellm.core.errors import PlanError
from sagellm.core.plan import BlockTableDelta, ExecutionPlan, Join
from sagellm.core.seeds import request_seed
from sagellm.core.token_trees import check_tree, depths_of
from sagellm.engines.native.attention import AttentionPlanner, Span
from sagellm.engines.native.branches import branches_of
from sagellm.engines.native.kv_cache import LayerKind
from sagellm.engines.native.memory import to_device
from sagellm.engines.native.model import StepInputs
from sagellm.engines.native.recurrent.states import RecurrentRows, RecurrentSpan
from sagellm.engines.native.sampler import RowSampler, ScoredPrompt

Tables = Sequence[Sequence[int]]
"""A block table for each KV group."""


@dataclass(slots=True)
class BatchRow:
    """One running request. `tokens` is prompt and output; `tables` has its block ids in each KV group.

    Once blocks have been dropped out of the middle of its only table, `tables` has the others, and
    `with_dropped` all of them, `NO_PAGE` for those. `num_dropped`: tokens whose KV they held.
    """

    request_id: str
    tokens: array[int]
    num_prompt_tokens: int
    tables: list[array[int]]
    sampler: RowSampler
    with_dropped: array[int] | None = None
    num_dropped: int = 0


class BatchRows:
    """At most `max_rows` sequences by row number. Raises `PlanError` for a plan that cannot be executed."""

    def __init__(
        self, max_rows: int, max_length: int, num_blocks: int, block_size: int, vocab_size: int, seed: int,
        num_groups: int = 1,
    ) -> None:  # fmt: skip
        self._max_rows = max_rows
        self._max_length = max_length
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._seed = seed
        self._num_groups = num_groups
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
        ids = np.frombuffer(join.tokens, np.int32)
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise PlanError(f"{join.request_id} has a token id outside the vocabulary of {self._vocab_size}")
        self._check_blocks(join.request_id, join.block_ids)
        params = join.params
        seed = request_seed(self._seed, join.request_id) if params.seed is None else params.seed
        prompt, outputs = tokens[: join.num_prompt_tokens], tokens[join.num_prompt_tokens :]
        sampler = RowSampler.of(params, seed, prompt, outputs, join.eos_token_ids, self._vocab_size, device)
        tables = self._by_group(join.block_ids)
        self._rows[join.row] = BatchRow(join.request_id, tokens, join.num_prompt_tokens, tables, sampler)

    def _update_table(self, delta: BlockTableDelta) -> None:
        row = self.row(delta.row)
        self._check_blocks(row.request_id, delta.block_ids, may_drop=True)
        drops = self._num_groups == 1 and NO_PAGE in delta.block_ids
        if drops and row.with_dropped is None:
            row.with_dropped = row.tables[0]
        tables = row.tables if row.with_dropped is None else [row.with_dropped]
        first, held = delta.first // self._num_groups, len(tables[0])
        if first > held:
            raise PlanError(f"{row.request_id} grows at block {first} of a table of {held}")
        for table, new in zip(tables, self._by_group(delta.block_ids), strict=True):
            table[first : first + len(new)] = new
        if row.with_dropped is not None:
            row.tables = [array("i", [block for block in row.with_dropped if block != NO_PAGE])]
            row.num_dropped = (len(row.with_dropped) - len(row.tables[0])) * self._block_size

    def _by_group(self, block_ids: Sequence[int]) -> list[array[int]]:
        """The ids of each KV group. In `block_ids` those of one position follow those of another."""
        return [array("i", block_ids[group :: self._num_groups]) for group in range(self._num_groups)]

    def _check_blocks(self, request_id: str, block_ids: Sequence[int], *, may_drop: bool = False) -> None:
        least = NO_PAGE if may_drop or self._num_groups > 1 else 0
        if block_ids and (min(block_ids) < least or max(block_ids) >= self._num_blocks):
            raise PlanError(f"{request_id} has a block outside the pool of {self._num_blocks}: {block_ids}")
        if len(block_ids) % self._num_groups:
            raise PlanError(f"{request_id} has {len(block_ids)} blocks for {self._num_groups} KV groups")

    def row(self, row: int) -> BatchRow:
        """The running request of a row. Raises `PlanError` where none has joined."""
        try:
            return self._rows[row]
        except KeyError:
            raise PlanError(f"row {row} is in the plan, but no request has joined it") from None

    def inputs(
        self,
        plan: ExecutionPlan,
        planner: AttentionPlanner,
        kinds: Iterable[LayerKind],
        device: torch.device,
        scored: Sequence[ScoredPrompt] = (),
        *,
        recurrent: bool = False,
    ) -> StepInputs:
        """The tensors of a step. Flat order: decode rows, longest first; rows with chains, the same; rows
        with trees, the same; prefills as planned. The positions of `scored` follow the sampled rows.
        `recurrent`: the model has recurrent states.
        """
        proposed = self._proposed(plan)
        trees = {chain.row: chain.parents for chain in plan.chains if chain.parents}
        places = list(zip(plan.decode_rows, plan.decode_positions, strict=True))
        order = sorted(range(len(places)), key=lambda i: self.row(places[i][0]).num_dropped - places[i][1])
        if proposed:
            order.sort(key=lambda i: (plan.decode_rows[i] in trees, plan.decode_rows[i] in proposed))
        spans: list[Span] = []
        tokens, positions, first = array("i"), array("q"), 0
        for i in order:
            row, start = places[i]
            more = proposed.get(row, ())
            spans.append(self._span(first, row, start, 1 + len(more), len(more)))
            tokens.append(self._rows[row].tokens[start])
            tokens.extend(more)
            first += 1 + len(more)
        for op in plan.prefills:
            spans.append(self._span(first, op.row, op.start, op.num_tokens))
            tokens.extend(self._rows[op.row].tokens[op.start : op.start + op.num_tokens])
            first += op.num_tokens
        rows = [plan.decode_rows[i] for i in order] + [op.row for op in plan.prefills]
        for span, row in zip(spans, rows, strict=True):
            if row in trees:
                depths = [0, *(1 + depth for depth in depths_of(trees[row]))]
                positions.extend(span.positions.start + depth for depth in depths)
            else:
                positions.extend(span.positions)
        in_group = [spans]
        for group in range(1, self._num_groups):
            tables = [self._rows[row].tables[group] for row in rows]
            in_group.append([replace(s, block_ids=t) for s, t in zip(spans, tables, strict=True)])
        first_chain, first_tree, first_prefill = (len(order) - n for n in (len(proposed), len(trees), 0))
        parts = [(own[:first_chain], own[first_chain:first_tree], own[first_prefill:]) for own in in_group]
        branches = [
            self._branches(own[first_tree:first_prefill], rows[first_tree:], trees) for own in in_group
        ]
        return StepInputs(
            tokens=to_device(torch.frombuffer(tokens, dtype=torch.int32), device),
            positions=to_device(torch.frombuffer(positions, dtype=torch.long), device),
            max_position=max(span.positions.stop for span in spans) - 1,
            slots=[to_device(self._slots(own), device) for own in in_group],
            sampled=to_device(self._sampled(plan, order, spans, scored), device),
            attention={
                kind: planner.plan(*parts[kind[0]], kind[1], branches[kind[0]]) for kind in set(kinds)
            },
            recurrent=self._recurrent(spans, rows, len(order), device) if recurrent else None,
        )

    def _branches(
        self, spans: Iterable[Span], rows: Iterable[int], trees: Mapping[int, tuple[int, ...]]
    ) -> list[Span]:
        """The branches of the trees of `rows`, by slot."""
        size = self._block_size
        pairs = zip(spans, rows, strict=False)
        return [branch for span, row in pairs for branch in branches_of(span, trees[row], size)]

    @staticmethod
    def _recurrent(
        spans: Sequence[Span], rows: Sequence[int], num_decodes: int, device: torch.device
    ) -> RecurrentRows:
        decode = torch.tensor(rows[:num_decodes], dtype=torch.long)
        prefill = zip(spans[num_decodes:], rows[num_decodes:], strict=True)
        spans_of = [RecurrentSpan(span.first_row, span.num_tokens, row) for span, row in prefill]
        return RecurrentRows(to_device(decode, device), spans_of)

    def _proposed(self, plan: ExecutionPlan) -> dict[int, tuple[int, ...]]:
        """The tokens of the plan's chains, by row."""
        proposed = plan.proposed
        if proposed and not proposed.keys() <= set(plan.decode_rows):
            raise PlanError(f"rows {sorted(proposed)} have chains, rows {list(plan.decode_rows)} decode")
        for row, token_ids, parents in plan.chains:
            if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
                raise PlanError(f"row {row} has a chain {token_ids}; tokens are 0 to {self._vocab_size - 1}")
            try:
                check_tree(token_ids, parents)
            except ValueError as error:
                raise PlanError(f"row {row} has proposed tokens that are no tree: {error}") from error
        return proposed

    def _slots(self, spans: Iterable[Span]) -> torch.Tensor:
        slots, size = array("q"), self._block_size
        for span in spans:
            slots.extend(span.block_ids[p // size] * size + p % size for p in range(span.start, span.end))
        return torch.frombuffer(slots, dtype=torch.long)

    def scored(self, plan: ExecutionPlan) -> list[ScoredPrompt]:
        """The positions in this step for which prompt log-probabilities are wanted."""
        found: list[ScoredPrompt] = []
        first = len(plan.decode_rows) + plan.num_proposed_tokens
        for op in plan.prefills:
            batch_row = self.row(op.row)
            top = batch_row.sampler.params.prompt_logprobs
            if top is not None:
                stop = min(op.start + op.num_tokens + 1, batch_row.num_prompt_tokens)
                found.append(ScoredPrompt(op.row, first, batch_row.tokens[op.start + 1 : stop], top))
            first += op.num_tokens
        return found

    def decodes(self, plan: ExecutionPlan, *, unrolled: bool) -> tuple[list[int], list[Span], list[Tables]]:
        """Tokens of `plan.decode_rows`, in that order, and spans with their tables.

        A chain is a span, or `unrolled` as many spans of one token.
        """
        places = list(zip(plan.decode_rows, plan.decode_positions, strict=True))
        if plan.chains:
            return self._with_chains(places, self._proposed(plan), unrolled=unrolled)
        spans = [self._span(i, row, position, 1) for i, (row, position) in enumerate(places)]
        tokens = [self._rows[row].tokens[position] for row, position in places]
        return tokens, spans, [self._rows[row].tables for row in plan.decode_rows]

    def _with_chains(
        self, places: Iterable[tuple[int, int]], proposed: Mapping[int, tuple[int, ...]], *, unrolled: bool
    ) -> tuple[list[int], list[Span], list[Tables]]:
        tokens: list[int] = []
        spans: list[Span] = []
        tables: list[Tables] = []
        for row, position in places:
            batch_row, more = self.row(row), proposed.get(row, ())
            whole = self._span(len(tokens), row, position, 1 + len(more), len(more))
            own = whole.one_by_one() if unrolled else [whole]
            tokens += [batch_row.tokens[position], *more]
            spans += own
            tables += [batch_row.tables] * len(own)
        return tokens, spans, tables

    def decodes_by_slot(self, plan: ExecutionPlan) -> tuple[list[int], list[Span], list[Tables]]:
        """As `decodes`, with tables of slots. A tree has a span for each of its branches."""
        tokens: list[int] = []
        spans: list[Span] = []
        tables: list[Tables] = []
        proposed, parents = self._proposed(plan), {chain.row: chain.parents for chain in plan.chains}
        for row, position in zip(plan.decode_rows, plan.decode_positions, strict=True):
            batch_row, more = self.row(row), proposed.get(row, ())
            whole = self._span(len(tokens), row, position, 1 + len(more), len(more))
            tree = parents.get(row) or range(-1, len(more) - 1)
            tokens += [batch_row.tokens[position], *more]
            wholes = [replace(whole, block_ids=table) for table in batch_row.tables]
            in_group = [branches_of(each, tree, self._block_size) for each in wholes]
            for own in zip(*in_group, strict=True):
                spans.append(own[0])
                tables.append([span.block_ids for span in own])
        return tokens, spans, tables

    def _span(self, first_row: int, row: int, start: int, num_tokens: int, num_proposed: int = 0) -> Span:
        """A span that may end `num_proposed` tokens behind those of the row."""
        batch_row = self.row(row)
        dropped = batch_row.num_dropped
        span = Span(first_row, num_tokens, start - dropped, batch_row.tables[0], dropped)
        limits = {
            "tokens": len(batch_row.tokens) + num_proposed,
            "slots in its blocks": len(batch_row.tables[0]) * self._block_size + dropped,
            "positions in the model's length": self._max_length,
        }
        for name, limit in limits.items():
            if num_tokens < 1 or span.start < 0 or span.positions.stop > limit:
                raise PlanError(
                    f"{batch_row.request_id} has {limit} {name}; [{start}, {start + num_tokens}) cannot be "
                    "computed"
                )
        return span

    @staticmethod
    def _sampled(
        plan: ExecutionPlan, order: Sequence[int], spans: Sequence[Span], scored: Sequence[ScoredPrompt]
    ) -> torch.Tensor:
        """The flat rows of `plan.sample_rows`, of a chain all; then those of `scored`."""
        decode, prefill = spans[: len(order)], spans[len(order) :]
        place = [0] * len(order)
        for i, s in zip(order, decode, strict=True):
            place[i] = s.first_row
        if plan.chains:
            longer = {row: len(token_ids) for row, token_ids in plan.proposed.items()}
            firsts = zip(plan.decode_rows, place, strict=True)
            place = [first + i for row, first in firsts for i in range(1 + longer.get(row, 0))]
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
        longer = {row: len(token_ids) for row, token_ids in plan.proposed.items()}
        places = zip(plan.decode_rows, plan.decode_positions, strict=True)
        ends = [(row, at, at + longer.get(row, 0)) for row, at in places]
        ends += [(op.row, op.start, op.start + op.num_tokens - 1) for op in plan.prefills]
        return [
            table[(last - self.row(row).num_dropped) // size]
            for row, start, last in ends
            if last // size * size >= start
            for table in self.row(row).tables
        ]

    def samplers(self, rows: Iterable[int]) -> list[RowSampler]:
        return [self.row(row).sampler for row in rows]

    def chain_samplers(self, plan: ExecutionPlan) -> list[RowSampler]:
        """The sampler of each row of logits; in a chain, after the tokens before."""
        chains, found = {chain.row: chain for chain in plan.chains}, list[RowSampler]()
        for row in plan.sample_rows:
            sampler = self.row(row).sampler
            found.append(sampler)
            if row in chains:
                found += [sampler.after(path) for path in chains[row].paths()]
        return found

    def moved_slots(
        self, plan: ExecutionPlan, accepted: Mapping[int, Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        """From where KV of accepted tokens of trees moves to their positions.

        `accepted`: by row, the indices of its accepted tokens.
        """
        starts = dict(zip(plan.decode_rows, plan.decode_positions, strict=True))
        sources, targets, size = list[int](), list[int](), self._block_size
        for chain in plan.chains:
            own = self._rows[chain.row]
            for depth, node in enumerate(accepted[chain.row] if chain.parents else ()):
                for table in own.tables if node != depth else ():
                    for slots, index in ((sources, node), (targets, depth)):
                        place = starts[chain.row] - own.num_dropped + 1 + index
                        slots.append(table[place // size] * size + place % size)
        return sources, targets

    def advance(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Append a token to each of `rows`. One with a chain may be there several times."""
        for row, token_id in zip(rows, token_ids, strict=True):
            batch_row = self._rows[row]
            batch_row.tokens.append(token_id)
            batch_row.sampler.accept(token_id)
