"""The kept batch: running requests in decode, in arrays. A step in which nothing changes touches no request.

One column per request: where it stands, how many tokens still fit into its blocks, how many it may still
draw. Objects are looked at where a column says so: a block is needed, a limit is reached, a token may stop.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt

from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import RequestState
from sagellm.core.types import append_each

Ints = npt.NDArray[np.int64]
POSITION, SLACK, LEFT = range(3)
_ONE_TOKEN = np.array([[1], [-1], [-1]])
"""Rows of the table: the position computed next; tokens that fit into the blocks held beyond it; tokens that
may be drawn until a length ends the request."""


class DecodeBatch:
    """Implements `Decodes` over arrays. Columns have no order that means anything; who leaves gives its place
    to the last.

    `vocab_size`: drawn tokens are 0 to vocab_size - 1. Sources of the idea: fixed rows and deltas, as in
    persistent batches of LMDeploy and vLLM's model runner, here for the scheduler.
    """

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self.states: list[RequestState] = []
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._table: Ints = np.zeros((3, 64), dtype=np.int64)
        self._stops = np.zeros(vocab_size, dtype=np.bool_)
        self._tokens: list[array[int]] = []
        self._rows: tuple[int, ...] | None = ()
        self._growing: Sequence[RequestState] | None = None

    def __len__(self) -> int:
        return len(self.states)

    @property
    def rows(self) -> tuple[int, ...]:
        """The backend's row of each request, in order of `states`."""
        if self._rows is None:
            self._rows = tuple(state.row for state in self.states)
        return self._rows

    def positions(self) -> tuple[int, ...]:
        """The position that each request computes next, in order of `states`."""
        return tuple(self._column(POSITION).tolist())

    # -- who is in it

    def enter(self, state: RequestState, num_slots: int, max_length: int) -> None:
        """A running request whose tokens are all computed but the last goes on by one token a step.

        `num_slots`: tokens that its blocks hold; `max_length`: tokens at which it ends, whatever it says.
        """
        count = len(self.states)
        if count == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
        if not count:
            self._stops[:] = False
        params, length = state.request.params, len(state.tokens)
        limits = (params.max_tokens, state.request.scripted_output)
        most = min([max_length, *(one + state.num_prompt_tokens for one in limits if one is not None)])
        self._table[:, count] = (length - 1, num_slots - length + 1, most - length)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= state.request.eos_token_ids
        self._stops[[token for token in stops if 0 <= token < self._vocab_size]] = True
        self.states.append(state)
        self._tokens.append(state.tokens.live)
        self._rows = self._growing = None

    def leave(self, state: RequestState) -> None:
        """A request leaves the batch, preempted or at its end."""
        place, last = self.states.index(state), len(self.states) - 1
        self._table[:, place] = self._table[:, last]
        self.states[place], self._tokens[place] = self.states[last], self._tokens[last]
        self.states.pop()
        self._tokens.pop()
        self._rows = self._growing = None

    # -- what a step needs, and what it brings

    def needing_block(self) -> Sequence[RequestState]:
        """Those whose next token needs another block."""
        if self._growing is None:
            slack = self._column(SLACK)
            full = slack.all()
            self._growing = () if full else [self.states[i] for i in np.flatnonzero(slack == 0).tolist()]
        return self._growing

    @property
    def num_needing_block(self) -> int:
        return len(self.needing_block())

    def lengths(self, places: list[int] | None = None) -> Ints:
        """Tokens that each request has, prompt and output; a copy."""
        column = self._column(POSITION)
        lengths: Ints = (column if places is None else column[places]) + 1
        return lengths

    def indices_without(self, skipped: Container[str]) -> list[int]:
        """Places in `states` of all but some."""
        return [i for i, state in enumerate(self.states) if state.request_id not in skipped]

    def advance(self, token_ids: Sequence[int], places: list[int] | None = None) -> list[int]:
        """Append the token drawn for each request (of those at `places`, or of all).

        Returns which of the tokens may end their requests, to be looked at one by one. Raises `ValueError`,
        and changes nothing, where one is not in the vocabulary.
        """
        table = self._table
        drawn = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
        if places is None:
            view, tokens = table[:, : len(self.states)], self._tokens
        else:
            view, tokens = table[:, places], [self._tokens[i] for i in places]
        if len(drawn) != len(tokens):
            raise BookkeepingError(f"{len(drawn)} tokens were drawn for {len(tokens)} requests in decode")
        if drawn.size and (drawn.min() < 0 or drawn.max() >= self._vocab_size):
            raise ValueError("a token outside the vocabulary was drawn")
        append_each(tokens, token_ids)
        self._move(view)
        if places is not None:
            table[:, places] = view
        ends = (view[LEFT] <= 0) | self._stops[drawn]
        found: list[int] = np.flatnonzero(ends).tolist() if ends.any() else []
        return found

    def _move(self, view: Ints) -> None:
        if self._growing is None or self._growing:  # blocks were bound in this step
            view[SLACK][view[SLACK] == 0] = self._block_size
        view += _ONE_TOKEN
        self._growing = None

    # -- before it is known what was drawn

    def assume_step(self, places: list[int] | None = None) -> Ints:
        """As if a token had been drawn for each (of those at `places`, or of all), whichever. Returns what
        `recall` wants."""
        live = self._table[:, : len(self.states)]
        before = live.copy()
        view = live if places is None else live[:, places]
        self._move(view)
        if places is not None:
            live[:, places] = view
        return before

    def at_full_length(self) -> list[RequestState]:
        """Those that have all tokens that they may have: only after `foresee`."""
        return [self.states[i] for i in np.flatnonzero(self._column(LEFT) <= 0).tolist()]

    def undo_assumed_step(self, before: Ints) -> None:
        """Undo `foresee`; who entered since must have left."""
        self._table[:, : len(self.states)] = before
        self._growing = None

    # -- many equal steps

    @property
    def steps_below_length(self) -> int:
        """Steps after which no request has reached its length yet; the next one ends a request."""
        return int(self._column(LEFT).min()) - 1 if self.states else 0

    def block_boundaries(self, num_steps: int) -> dict[int, list[int]]:
        """By step from now (the next one is 0): indices of the requests that need a block in it.

        All requests take part in all of the `num_steps` steps.
        """
        found: dict[int, list[int]] = {}
        slack = self._column(SLACK)
        for place in np.flatnonzero(slack < num_steps).tolist():
            for step in range(int(slack[place]), num_steps, self._block_size):
                found.setdefault(step, []).append(place)
        return found

    def append_repeated(self, token_ids: Sequence[int], num_steps: int) -> None:
        """Append each request's token `num_steps` times: equal steps, in which no request ends."""
        for tokens, token_id in zip(self._tokens, token_ids, strict=True):
            tokens.extend(array("i", (token_id,)) * num_steps)
        table = self._table[:, : len(self.states)]
        table[POSITION] += num_steps
        table[LEFT] -= num_steps
        self._growing = None
        slack = table[SLACK]
        blocks = np.maximum(0, -(-(num_steps - slack) // self._block_size))
        slack += blocks * self._block_size - num_steps

    def check(self, num_slots: Sequence[int]) -> None:
        """Raise `BookkeepingError` where a column and its request differ. `num_slots`: tokens that each
        request's blocks hold."""
        table = self._table
        for i, (state, slots) in enumerate(zip(self.states, num_slots, strict=True)):
            at, slack = int(table[POSITION, i]), int(table[SLACK, i])
            num_computed = len(state.tokens) - 1
            if at != num_computed or at + slack != slots:
                raise BookkeepingError(
                    f"{state.request_id}: {num_computed} tokens computed of {slots} slots, the batch "
                    f"says {at} and {slack} left"
                )

    def _column(self, which: int) -> Ints:
        return self._table[which, : len(self.states)]
