"""`DecodeBatch` keeps the running requests in decode as columns of arrays.

A step touches a request object only where a column says so: it needs a block, it reaches its length, or its
token may end it. `sagellm bench micro scheduler_ir` shows the gain. Fixed rows and deltas are those of the
persistent batches of LMDeploy and of vLLM's model runner, applied to the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sagellm.core.blocks import cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import Decodes, RequestState
from sagellm.core.types import append_each

Ints = npt.NDArray[np.int64]
POSITION, FREE_SLOTS, REMAINING = range(3)
_ONE_TOKEN = np.array([[1], [-1], [-1]])
"""What a drawn token adds to the three columns of a request.

They are the position that is computed next, the free slots in its blocks from that position on, and the
tokens that it may still draw until it reaches its length."""


class ChainCounts(NamedTuple):
    """Of each request of a step with chains: positions computed, and drawn tokens."""

    num_computed: Sequence[int]
    num_drawn: Sequence[int]


class DecodeBatch(Decodes):
    """Requests in decode, in arrays. When a request leaves, the last one takes its index. Drawn tokens are 0
    to `vocab_size` - 1."""

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self.states: list[RequestState] = []
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._table: Ints = np.zeros((3, 64), dtype=np.int64)
        self._stops = np.zeros(vocab_size, dtype=np.bool_)
        self._tokens: list[array[int]] = []
        self._rows: tuple[int, ...] | None = ()
        self._needing_block: Sequence[RequestState] | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """The backend's row of each request, in the order of `states`."""
        if self._rows is None:
            self._rows = tuple(state.row for state in self.states)
        return self._rows

    def positions(self) -> tuple[int, ...]:
        """The position that each request computes next, in the order of `states`."""
        return tuple(self._column(POSITION).tolist())

    # -- members

    def enter(self, state: RequestState, num_slots: int, max_length: int) -> None:
        """Add a running request of whose tokens only the last is not computed. `num_slots`: tokens that its
        blocks hold. `max_length`: tokens at which it ends in any case."""
        count = len(self.states)
        if count == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
        if not count:
            self._stops[:] = False
        params, length = state.request.params, len(state.tokens)
        limits = (state.max_output_tokens, state.request.scripted_output)
        most = min([max_length, *(limit + state.num_prompt_tokens for limit in limits if limit is not None)])
        self._table[:, count] = (length - 1, num_slots - length + 1, most - length)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= state.request.eos_token_ids
        self._stops[[token for token in stops if 0 <= token < self._vocab_size]] = True
        self.states.append(state)
        self._tokens.append(state.tokens.live)
        self._rows = self._needing_block = None

    def leave(self, state: RequestState) -> None:
        """Remove a request that was preempted or has ended."""
        index, last = self.states.index(state), len(self.states) - 1
        self._table[:, index] = self._table[:, last]
        self.states[index], self._tokens[index] = self.states[last], self._tokens[last]
        self.states.pop()
        self._tokens.pop()
        self._rows = self._needing_block = None

    # -- a step

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def needing_block(self) -> Sequence[RequestState]:
        """Requests whose next token needs another block."""
        if self._needing_block is None:
            free_slots = self._column(FREE_SLOTS)
            indices = () if free_slots.all() else np.flatnonzero(free_slots == 0).tolist()
            self._needing_block = [self.states[i] for i in indices]
        return self._needing_block

    def lengths(self, indices: list[int] | None = None) -> Ints:
        """Tokens of each request, prompt and output; a copy."""
        column = self._column(POSITION)
        lengths: Ints = (column if indices is None else column[indices]) + 1
        return lengths

    def indices_without(self, skipped: Container[str]) -> list[int]:
        """Indices in `states` of all requests but the skipped."""
        return [i for i, state in enumerate(self.states) if state.request_id not in skipped]

    def remaining(self) -> list[int]:
        """Tokens that each request may still draw, in the order of `states`."""
        remaining: list[int] = self._column(REMAINING).tolist()
        return remaining

    def advance(
        self, token_ids: Sequence[int], indices: list[int] | None = None, counts: ChainCounts | None = None
    ) -> list[int]:
        """Append the token drawn for each request at `indices` (None: for all).

        With `counts` each request has drawn so many. Returns the places, among these requests, of those that
        a token may end. Raises `ValueError`, and changes nothing, if a token is not in the vocabulary.
        """
        table = self._table
        drawn = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
        if indices is None:
            view, tokens = table[:, : len(self.states)], self._tokens
        else:
            view, tokens = table[:, indices], [self._tokens[i] for i in indices]
        num_drawn = len(tokens) if counts is None else sum(counts.num_drawn)
        if len(drawn) != num_drawn or (counts is not None and len(counts.num_drawn) != len(tokens)):
            raise BookkeepingError(f"{len(drawn)} tokens were drawn for {len(tokens)} requests in decode")
        if drawn.size and (drawn.min() < 0 or drawn.max() >= self._vocab_size):
            raise ValueError("a token outside the vocabulary was drawn")
        stops = self._stops[drawn]
        if counts is None:
            append_each(tokens, token_ids)
            self._move(view)
        else:
            stops = self._advance_chains(view, tokens, token_ids, counts, stops)
        if indices is not None:
            table[:, indices] = view
        ends = (view[REMAINING] <= 0) | stops
        found: list[int] = np.flatnonzero(ends).tolist() if ends.any() else []
        return found

    def _advance_chains(
        self,
        view: Ints,
        tokens: Sequence[array[int]],
        token_ids: Sequence[int],
        counts: ChainCounts,
        stops: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Append each request's tokens and move its columns.

        Returns, for each request, whether any of its tokens is a stop token.
        """
        ends = list(accumulate(counts.num_drawn))
        firsts = [0, *ends[:-1]]
        for own, first, end in zip(tokens, firsts, ends, strict=True):
            own.extend(token_ids[first:end])
        computed, drawn = (np.array(column, dtype=np.int64) for column in counts)
        free_slots = view[FREE_SLOTS]  # grew by the blocks that the computed positions needed
        free_slots += cdiv(np.maximum(0, computed - free_slots), self._block_size) * self._block_size
        view += _ONE_TOKEN * drawn
        self._needing_block = None
        found: npt.NDArray[np.bool_] = np.logical_or.reduceat(stops, firsts)
        return found

    def _move(self, view: Ints) -> None:
        if self._needing_block is None or self._needing_block:  # blocks were appended in this step
            view[FREE_SLOTS][view[FREE_SLOTS] == 0] = self._block_size
        view += _ONE_TOKEN
        self._needing_block = None

    # -- planning ahead

    def assume_step(self, indices: list[int] | None = None) -> Ints:
        """Move the columns as if each request had drawn a token. Only those at `indices` move, if given.
        Returns what `undo_assumed_step` needs."""
        live = self._table[:, : len(self.states)]
        before = live.copy()
        view = live if indices is None else live[:, indices]
        self._move(view)
        if indices is not None:
            live[:, indices] = view
        return before

    def at_full_length(self) -> list[RequestState]:
        """Requests that have reached their length; only after `assume_step`."""
        return [self.states[i] for i in np.flatnonzero(self._column(REMAINING) <= 0).tolist()]

    def undo_assumed_step(self, before: Ints) -> None:
        """Undo `assume_step`. Requests that have entered since must have left."""
        self._table[:, : len(self.states)] = before
        self._needing_block = None

    # -- many equal steps

    @property
    def steps_below_length(self) -> int:
        """Number of steps before the one in which the first request reaches its length."""
        return int(self._column(REMAINING).min()) - 1 if self.states else 0

    def block_boundaries(self, num_steps: int) -> dict[int, list[int]]:
        """By step from now: indices of the requests that need a block in it. The next step is 0; all requests
        take part in all of the `num_steps` steps."""
        found: dict[int, list[int]] = {}
        free_slots = self._column(FREE_SLOTS)
        for index in np.flatnonzero(free_slots < num_steps).tolist():
            for step in range(int(free_slots[index]), num_steps, self._block_size):
                found.setdefault(step, []).append(index)
        return found

    def append_repeated(self, token_ids: Sequence[int], num_steps: int) -> None:
        """Append each request's token `num_steps` times; none may reach its length."""
        for tokens, token_id in zip(self._tokens, token_ids, strict=True):
            tokens.extend(array("i", (token_id,)) * num_steps)
        table = self._table[:, : len(self.states)]
        table[POSITION] += num_steps
        table[REMAINING] -= num_steps
        self._needing_block = None
        free_slots = table[FREE_SLOTS]
        blocks = np.maximum(0, cdiv(num_steps - free_slots, self._block_size))
        free_slots += blocks * self._block_size - num_steps

    def check(self, num_slots: Sequence[int]) -> None:
        """Raise `BookkeepingError` where a column and its request differ. `num_slots`: tokens that the blocks
        of each request hold."""
        table = self._table
        for i, (state, slots) in enumerate(zip(self.states, num_slots, strict=True)):
            at, free_slots = int(table[POSITION, i]), int(table[FREE_SLOTS, i])
            num_computed = len(state.tokens) - 1
            if at != num_computed or at + free_slots != slots:
                raise BookkeepingError(
                    f"{state.request_id}: {num_computed} tokens computed of {slots} slots, the batch "
                    f"says {at} and {free_slots} left"
                )

    def _column(self, which: int) -> Ints:
        return self._table[which, : len(self.states)]
