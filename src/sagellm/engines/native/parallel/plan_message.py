"""A plan as a message to other ranks: int64 numbers, and no others.

Other ranks draw no tokens. So of a request's parameters only `prompt_logprobs` travels, which says what the
step computes, and with each plan come the tokens that the first rank has drawn since the last one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sagellm.core.plan import BlockCopy, BlockTableDelta, Chain, ExecutionPlan, Join, Prefill
from sagellm.core.types import SamplingParams, Tokens


class Drawn(NamedTuple):
    """Tokens that were drawn for rows, in order. A row with a chain may be there several times.

    KV of accepted tokens of trees has moved from slots `sources` to `targets`.
    """

    rows: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    sources: Sequence[int] = ()
    targets: Sequence[int] = ()


class _Reader:
    """Takes numbers from a message."""

    def __init__(self, message: bytes) -> None:
        self._values = array("q")
        self._values.frombytes(message)
        self._next = 0

    def one(self) -> int:
        return self.some(1)[0]

    def some(self, count: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + count
        return tuple(self._values[first : self._next])

    def list(self) -> tuple[int, ...]:
        """Numbers that follow their count."""
        return self.some(self.one())

    def times(self) -> Iterable[int]:
        return range(self.one())


def encode(plan: ExecutionPlan, drawn: Drawn) -> bytes:
    """The message. State pages are not in it: recurrent states are not divided."""
    numbers = array("q", [plan.step])

    def put(values: Sequence[int]) -> None:
        numbers.append(len(values))
        numbers.extend(values)

    for part in drawn:
        put(part)
    put(plan.left)
    numbers.append(len(plan.joined))
    for join in plan.joined:
        scored = join.params.prompt_logprobs
        numbers.extend(
            (join.row, join.num_prompt_tokens, join.num_computed, -1 if scored is None else scored)
        )
        put(join.block_ids)
        put(Tokens.frombytes(join.tokens).tolist())
    numbers.append(len(plan.table_deltas))
    for delta in plan.table_deltas:
        numbers.extend((delta.row, delta.first))
        put(delta.block_ids)
    put(plan.decode_rows)
    put(plan.decode_positions)
    numbers.append(len(plan.prefills))
    for op in plan.prefills:
        numbers.extend((op.row, op.start, op.num_tokens, op.samples))
    numbers.append(len(plan.copies))
    for copy in plan.copies:
        numbers.extend((copy.source, copy.target))
    numbers.append(len(plan.chains))
    for chain in plan.chains:
        numbers.append(chain.row)
        put(chain.token_ids)
        put(chain.parents)
    return numbers.tobytes()


def decode(message: bytes) -> tuple[ExecutionPlan, Drawn]:
    """The plan, with rows for request ids, and what was drawn before."""
    read = _Reader(message)
    step, drawn = read.one(), Drawn(*(read.list() for _ in Drawn._fields))
    plan = ExecutionPlan(
        step,
        left=read.list(),
        joined=tuple(_join(read) for _ in read.times()),
        table_deltas=tuple(BlockTableDelta(read.one(), read.one(), read.list()) for _ in read.times()),
        decode_rows=read.list(),
        decode_positions=read.list(),
        prefills=tuple(_prefill(*read.some(4)) for _ in read.times()),
        copies=tuple(BlockCopy(*read.some(2)) for _ in read.times()),
        chains=tuple(Chain(read.one(), read.list(), read.list()) for _ in read.times()),
    )
    return plan, drawn


def _join(read: _Reader) -> Join:
    row, num_prompt_tokens, num_computed, scored = read.some(4)
    params = SamplingParams(prompt_logprobs=None if scored < 0 else scored)
    block_ids, tokens = read.list(), Tokens(read.list())
    return Join(
        row, f"row {row}", tokens.tobytes(), num_prompt_tokens, num_computed, block_ids, params, frozenset()
    )


def _prefill(row: int, start: int, num_tokens: int, samples: int) -> Prefill:
    return Prefill(row, f"row {row}", start, num_tokens, bool(samples))
