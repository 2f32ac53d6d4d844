"""`DraftModel`: a small model proposes what the served one may draw.

Speculative decoding with a draft (Leviathan et al. 2023, Chen et al. 2023). The draft draws as the served
model does: with the request's parameters, and the same random number at each position. Where both would draw
the same token it is accepted, so the output stays that of the served model alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sagellm.core.blocks import cdiv
from sagellm.core.errors import BookkeepingError
from sagellm.core.plan import ExecutionPlan, Join, Prefill, StepResult, accepted_length
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.core.types import Request, SamplingParams, Tokens

MOST_RECORDED_ROWS = 8
"""Two decode steps of so few rows take less than one chunk of two tokens: the native backend records them."""


@dataclass(slots=True, eq=False)
class DraftRow:
    """What the draft has of a request.

    It has KV of `num_in_pool` tokens: of the first `num_known` that the request had, and of `drawn` behind
    them.
    """

    row: int
    params: SamplingParams
    block_ids: list[int] = field(default_factory=list)
    num_known: int = 0
    num_in_pool: int = 0
    drawn: tuple[int, ...] = ()

    def num_valid(self, tokens: Tokens) -> int:
        """Of how many leading tokens the KV holds.

        The request may have drawn others than the draft.
        """
        later = tokens.slice(self.num_known, self.num_known + len(self.drawn))
        num_equal = accepted_length(self.drawn[: len(later)], later)
        return min(self.num_known + num_equal, self.num_in_pool, len(tokens) - 1)


@dataclass(slots=True, eq=False)
class Drafting:
    """A request in this call, and what was drawn for it so far."""

    asked: Asked
    held: DraftRow
    most: int
    start: int
    num_tokens: int
    """Tokens `[start, start + num_tokens)` are computed first."""
    token_ids: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.asked.tokens)

    @property
    def catches_up(self) -> bool:
        """Whether it draws nothing yet: more of its tokens are to be computed."""
        return self.start + self.num_tokens < self.length

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 and not self.catches_up

    def join(self, num_tokens: int) -> Join:
        """The request with its first tokens alone."""
        request, held, tokens = self.asked.request, self.held, self.asked.tokens.slice(0, num_tokens)
        return Join(
            held.row, request.request_id, tokens.tobytes(), min(len(request.tokens), num_tokens), self.start,
            tuple(held.block_ids), held.params, frozenset(),
        )  # fmt: skip

    def prefill(self) -> Prefill:
        name = self.asked.request.request_id
        return Prefill(self.held.row, name, self.start, self.num_tokens, not self.catches_up)


class DraftModel:
    """Implements `Proposer` with a backend that runs a model with the same tokens. Closes the backend.

    A call computes the tokens that the draft does not know yet, at most `catch_up_tokens` for all requests:
    a long prompt takes several calls, in which it gets no proposal. Then it draws token by token, for all
    requests at once. A greedy request's proposal ends before a token to which the draft gives less than
    `min_probability`. Where the draft's pool is too small, requests that were not asked about lose what it
    has of them, and then some get no proposal.
    """

    def __init__(
        self, backend: InferenceBackend, min_probability: float = 0.4, catch_up_tokens: int = 2048
    ) -> None:
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability must be from 0 to 1, got {min_probability}")
        if catch_up_tokens < 1:
            raise ValueError(f"catch_up_tokens must be at least 1, got {catch_up_tokens}")
        self._backend, capability = backend, backend.capability()
        self._min_probability, self._catch_up_tokens = min_probability, catch_up_tokens
        self._block_size, self._max_length = capability.block_size, capability.max_model_len
        self._num_groups = backend.get_kv_schema().num_groups
        self._num_blocks, self._num_rows = capability.num_blocks, capability.max_num_seqs
        self._free_blocks = list(range(self._num_blocks))
        self._free_rows = list(range(self._num_rows))
        self._rows: dict[str, DraftRow] = {}
        """By request, the one that was asked about longest ago first."""
        self._joined: set[int] = set()
        """Rows that the backend has."""
        self._left: set[int] = set()
        """Those of them that are in use no more."""
        self._num_steps = 0

    def propose(self, asked: Sequence[Asked]) -> Sequence[Proposal]:
        drafts = self._begin(asked)
        if not drafts:
            return [Proposal()] * len(asked)
        self._draw_first(list(drafts.values()))
        going = [each for each in drafts.values() if len(each.token_ids) and len(each.token_ids) < each.most]
        while going:
            going = list(self._draw_next(going))
        for each in drafts.values():
            self._note(each)
        found = [drafts.get(each.request.request_id) for each in asked]
        return [Proposal() if made is None else _proposal(made) for made in found]

    def observe(self, request_id: str, num_accepted: int) -> None:
        """The request's next tokens tell it."""

    def forget(self, request: Request, tokens: Tokens) -> None:
        held = self._rows.pop(request.request_id, None)
        if held is not None:
            self._give_back(held)

    def close(self) -> None:
        self._backend.close()

    # -- rows and blocks

    def _begin(self, asked: Sequence[Asked]) -> dict[str, Drafting]:
        """Rows and blocks for those of the requests that get some."""
        budget, found = self._catch_up_tokens, dict[str, Drafting]()
        names = {each.request.request_id for each in asked}
        for wanted in asked:
            length, name = len(wanted.tokens), wanted.request.request_id
            most = min(wanted.num_tokens, self._max_length - length)
            if most < 1 or not budget:
                continue
            held = self._rows.pop(name, None) or self._new_row(wanted.request, names)
            if held is None:
                continue
            self._rows[name] = held
            start = held.num_valid(wanted.tokens)
            held.num_known, held.num_in_pool, held.drawn = start, start, ()  # should this step fail
            num_tokens = min(length - start, budget)
            end = length + most - 1 if start + num_tokens == length else start + num_tokens
            if self._has_room(held, end, names):
                budget -= num_tokens
                found[name] = Drafting(wanted, held, most, start, num_tokens)
        return found

    def _new_row(self, request: Request, asked: set[str]) -> DraftRow | None:
        """None while all rows are those of requests that are asked about."""
        if not self._free_rows and not self._evict(asked):
            return None
        has_estimate = request.params.greedy and self._min_probability > 0
        params = replace(
            request.params, n=1, logprobs=0 if has_estimate else None, prompt_logprobs=None, max_tokens=None,
            min_tokens=0, stop=(), stop_token_ids=(),
        )  # fmt: skip
        return DraftRow(self._free_rows.pop(), params)

    def _has_room(self, held: DraftRow, num_tokens: int, asked: set[str]) -> bool:
        """Give it blocks for so many tokens; False if there are too few."""
        count = cdiv(num_tokens, self._block_size) * self._num_groups - len(held.block_ids)
        while count > len(self._free_blocks):
            if not self._evict(asked):
                return False
        if count > 0:
            held.block_ids += self._free_blocks[-count:]
            del self._free_blocks[-count:]
        return True

    def _evict(self, asked: set[str]) -> bool:
        """Forget the request last asked about longest ago; False if there is none.

        Not those that are asked about now.
        """
        name = next((name for name in self._rows if name not in asked), None)
        if name is None:
            return False
        self._give_back(self._rows.pop(name))
        return True

    def _give_back(self, held: DraftRow) -> None:
        self._free_rows.append(held.row)
        self._left.add(held.row)
        self._free_blocks += held.block_ids

    # -- steps

    def _draw_first(self, drafts: Sequence[Drafting]) -> None:
        """Compute what the draft does not know; draw a token behind it."""
        behind = [each for each in drafts if each.num_tokens == 2 and not each.catches_up]
        if behind and len(drafts) <= MOST_RECORDED_ROWS:  # a proposal that was accepted whole leaves two
            self._rejoin(behind, num_later=1)  # what is drawn there is dropped
            for each in behind:
                each.start, each.num_tokens = each.start + 1, 1
        single = [each for each in drafts if each.is_decode]
        others = [each for each in drafts if not each.is_decode]
        result = self._rejoin(single, others)
        self._take(result, [each for each in (*single, *others) if not each.catches_up])

    def _rejoin(
        self, decodes: Sequence[Drafting], prefills: Sequence[Drafting] = (), num_later: int = 0
    ) -> StepResult:
        """Run a step of requests that join their rows.

        They join with all their tokens but the last `num_later`.
        """
        drafts = (*decodes, *prefills)
        rows = {each.held.row for each in drafts}
        plan = ExecutionPlan(
            self._num_steps,
            joined=tuple([each.join(each.length - num_later) for each in drafts]),
            left=tuple(sorted(self._joined & (self._left | rows))),
            decode_rows=tuple([each.held.row for each in decodes]),
            decode_positions=tuple([each.start for each in decodes]),
            prefills=tuple([each.prefill() for each in prefills]),
        )
        result = self._run(plan)
        self._joined = (self._joined - self._left) | rows
        self._left.clear()
        return result

    def _draw_next(self, drafts: Sequence[Drafting]) -> Iterator[Drafting]:
        """Draw one more token for each; those that may go on after it."""
        plan = ExecutionPlan(
            self._num_steps,
            decode_rows=tuple([each.held.row for each in drafts]),
            decode_positions=tuple([each.length + len(each.token_ids) - 1 for each in drafts]),
        )
        before = [len(each.token_ids) for each in drafts]
        self._take(self._run(plan), drafts)
        for each, count in zip(drafts, before, strict=True):
            if count < len(each.token_ids) < each.most:
                yield each

    def _run(self, plan: ExecutionPlan) -> StepResult:
        self._num_steps += 1
        return self._backend.execute(plan)

    def _take(self, result: StepResult, drafts: Sequence[Drafting]) -> None:
        """Take the tokens that were drawn for these."""
        for each, token_id in zip(drafts, result.token_ids, strict=True):
            chance = self._chance(each, result)
            if chance is None or chance >= self._min_probability:
                each.token_ids.append(token_id)
                each.chances += [] if chance is None else [chance]

    @staticmethod
    def _chance(drafting: Drafting, result: StepResult) -> float | None:
        """What the draft gives to the token it has drawn for a greedy request."""
        found = result.logprobs.get(drafting.held.row)
        return math.exp(found[0].logprob) if found else None

    @staticmethod
    def _note(drafting: Drafting) -> None:
        """The last token that was drawn has not been computed."""
        held, count = drafting.held, len(drafting.token_ids)
        held.num_known, held.drawn = drafting.length, tuple(drafting.token_ids)
        held.num_in_pool = drafting.start + drafting.num_tokens + max(0, count - 1)

    def check(self) -> None:
        """Raise `BookkeepingError` unless each row and block is free or of one request."""
        blocks = sorted([*self._free_blocks, *(b for held in self._rows.values() for b in held.block_ids)])
        rows = sorted([*self._free_rows, *(held.row for held in self._rows.values())])
        if blocks != list(range(self._num_blocks)) or rows != list(range(self._num_rows)):
            raise BookkeepingError(f"a draft with {len(blocks)} blocks and {len(rows)} rows: {self._rows}")


def _proposal(drafting: Drafting) -> Proposal:
    return Proposal(tuple(drafting.token_ids), acceptance=tuple(drafting.chances))


PLUGIN = DraftModel
