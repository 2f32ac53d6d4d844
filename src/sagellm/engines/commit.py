"""The end of a step: tokens are appended, KV is committed, requests end.

`StepOutputs` collects what the step added to each request, and `stop_reason` says which requests it ends.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import compress, islice, repeat
from typing import NamedTuple, overload

from sagellm.core.binding import Binding
from sagellm.core.events import RequestFinished
from sagellm.core.plan import NO_ROW, ExecutionPlan, RequestState, StepResult
from sagellm.core.types import FinishReason, Request, RequestOutput, RequestStatus, TokenLogprob
from sagellm.engines.request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir.batch import ChainCounts

NOT_FINITE = "no token could be drawn: the model's logits are not finite"


class Finish(NamedTuple):
    """A request ends now. `token_ids` and `logprobs` are those of its last step. With `keep` the KV that it
    computed may serve others."""

    state: RequestState
    reason: FinishReason
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    keep: bool = True


class Committer:
    """Appends the tokens of an executed step to its requests and commits their KV."""

    def __init__(
        self, table: RequestTable, kv: KVCacheManager, *, vocab_size: int, max_model_len: int
    ) -> None:
        self._table = table
        self._kv = kv
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def commit(
        self,
        binding: Binding,
        plan: ExecutionPlan,
        result: StepResult,
        outputs: StepOutputs,
        now_s: float,
        num_given_ahead: Mapping[str, int] | None = None,
    ) -> Iterator[Finish]:
        """Commit the step, and yield each request that it ends. The caller must consume it to the end and end
        each request before it takes the next one. Requests in decode come first in the plan.
        `num_given_ahead`: by id, the blocks that requests already have for the step after this one."""
        self._kv.executed(binding)
        draft = binding.draft
        num_decodes = num_drawn = draft.num_decodes
        counts = None
        if plan.chains:
            counts = _chain_counts(plan, result, num_decodes)
            num_drawn = sum(counts.num_drawn)
        drawn: dict[int, int] = {}
        if draft.chunks or len(result.token_ids) != num_drawn:
            drawn = dict(zip(plan.sample_rows[num_decodes:], result.token_ids[num_drawn:], strict=True))
        if num_decodes:
            token_ids, indices = result.token_ids[:num_drawn], binding.decode_indices
            yield from self._commit_decodes(indices, token_ids, counts, result.logprobs, outputs)
        for chunk in draft.chunks.values():
            state = chunk.state
            if state.status is RequestStatus.FINISHED:
                continue
            token_id = drawn.get(state.row)
            if token_id is not None and not 0 <= token_id < self._vocab_size:
                yield Finish(state, FinishReason.ERROR, error=NOT_FINITE, keep=False)
                continue
            self._table.advance(state, chunk.num_tokens)
            self._kv.commit(state)
            if state.prompt_logprobs is not None:
                state.score(chunk.start, result.prompt_logprobs.get(state.row, ()))
            if token_id is None:
                continue
            state.tokens.append(token_id)
            if state.first_token_s is None:
                state.first_token_s = now_s
            logprobs = result.logprobs.get(state.row, ())
            reason = stop_reason(state, token_id, self._max_model_len)
            if reason is not None:
                yield Finish(state, reason, (token_id,), logprobs)
                continue
            outputs.append(output_of(state, (token_id,), logprobs))
            ahead = (num_given_ahead or {}).get(state.request_id, 0)
            self._table.start_decode(
                state, self._kv.num_slots(state.request_id) - ahead * self._kv.block_size
            )

    def _commit_decodes(
        self,
        indices: list[int] | None,
        token_ids: Sequence[int],
        counts: ChainCounts | None,
        logprobs: Mapping[int, tuple[TokenLogprob, ...]],
        outputs: StepOutputs,
    ) -> list[Finish]:
        """Append what was drawn to each decoding request at `indices` (None: all).

        That is one token each or, with `counts`, so many.
        """
        batch = self._table.decodes
        states = list(batch.states) if indices is None else [batch.states[i] for i in indices]
        parts = None if counts is None else _parts(token_ids, counts.num_drawn)
        drawn = zip(token_ids, strict=True) if parts is None else parts
        try:
            may_end = batch.advance(token_ids, indices, counts)
        except ValueError:
            places = range(len(batch)) if indices is None else indices
            return self._commit_finite(places, list(drawn), counts, logprobs, outputs)
        ended: dict[RequestState, Finish] = {}
        for i in may_end:
            own, reason = self._cut_at_end(states[i], (token_ids[i],) if parts is None else parts[i])
            if reason is not None:
                own_logprobs = logprobs.get(states[i].row, ())[: len(own)]
                ended[states[i]] = Finish(states[i], reason, own, own_logprobs)
        outputs.add_decoded(states, drawn, batch.lengths(indices), logprobs, ended)
        return [ended[state] for state in self._table.in_order(ended)]

    def _commit_finite(
        self,
        indices: Sequence[int],
        drawn: Sequence[tuple[int, ...]],
        counts: ChainCounts | None,
        logprobs: Mapping[int, tuple[TokenLogprob, ...]],
        outputs: StepOutputs,
    ) -> list[Finish]:
        """As `_commit_decodes`, where some requests drew what is no token: these end."""
        states = [self._table.decodes.states[i] for i in indices]
        is_good = [all(0 <= token < self._vocab_size for token in own) for own in drawn]
        bad = [state for state, good in zip(states, is_good, strict=True) if not good]
        failed = [Finish(state, FinishReason.ERROR, error=NOT_FINITE, keep=False) for state in bad]
        if not any(is_good):
            return failed
        if counts is not None:
            counts = ChainCounts(*(list(compress(column, is_good)) for column in counts))
        token_ids = [token for own in compress(drawn, is_good) for token in own]
        rest = list(compress(indices, is_good))
        return failed + self._commit_decodes(rest, token_ids, counts, logprobs, outputs)

    def _cut_at_end(
        self, state: RequestState, drawn: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Take back the tokens behind the one that ends the request.

        Returns those that stay, and why it ends.
        """
        for _ in drawn:
            state.tokens.pop()
        for num, token_id in enumerate(drawn, 1):
            state.tokens.append(token_id)
            reason = stop_reason(state, token_id, self._max_model_len)
            if reason is not None:
                return drawn[:num], reason
        return drawn, None


def _chain_counts(plan: ExecutionPlan, result: StepResult, num_decodes: int) -> ChainCounts:
    """The counts of the first `num_decodes` rows in decode."""
    proposed = {chain.row: len(chain.token_ids) for chain in plan.chains}
    num_computed = [1 + proposed.get(row, 0) for row in plan.decode_rows[:num_decodes]]
    return ChainCounts(num_computed, result.num_drawn(plan)[:num_decodes])


def _parts(token_ids: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Consecutive parts of `token_ids`, so many in each."""
    tokens = iter(token_ids)
    return [tuple(islice(tokens, size)) for size in sizes]


def ends_with(request: Request, token_id: int, num_output_tokens: int) -> bool:
    """Whether an answer ends by itself with this token, the last of `num_output_tokens`."""
    params = request.params
    if num_output_tokens >= params.min_tokens:
        is_eos = token_id in request.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            return True
    return num_output_tokens == request.scripted_output


def stop_reason(state: RequestState, token_id: int, max_model_len: int) -> FinishReason | None:
    """Why the request ends with the token just drawn; None if it continues."""
    request, num_output_tokens = state.request, state.num_output_tokens
    if ends_with(request, token_id, num_output_tokens):
        return FinishReason.STOP
    full, max_tokens = len(state.tokens) >= max_model_len, request.params.max_tokens
    if full or (max_tokens is not None and num_output_tokens >= max_tokens):
        return FinishReason.LENGTH
    return FinishReason.MOVED if request.moves else None


def output_of(
    state: RequestState,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...],
    reason: FinishReason | None = None,
    error: str | None = None,
) -> RequestOutput:
    """The output of one step; the prompt's log-probabilities come with the first token."""
    scheduled_s = state.scheduled_s
    return RequestOutput(
        state.request_id,
        token_ids,
        state.num_prompt_tokens,
        state.num_cached,
        state.num_output_tokens,
        logprobs,
        reason,
        error,
        state.take_prompt_logprobs() if token_ids else None,
        None if scheduled_s is None else scheduled_s - state.request.arrival_s,
        state.misses,
        state.evicted,
        state.num_approximate,
    )


def finished_event(state: RequestState, reason: FinishReason, now_s: float) -> RequestFinished:
    """The event of a request that ends now. If its answer began elsewhere, so did its first token."""
    return RequestFinished(
        state.request_id,
        reason.value,
        state.num_prompt_tokens,
        state.num_cached,
        state.num_output_tokens,
        state.request.arrival_s,
        state.scheduled_s,
        None if state.request.generated else state.first_token_s,
        now_s,
    )


class StepOutputs(Sequence[RequestOutput]):
    """What one step added to each request.

    Tokens of requests in decode become `RequestOutput`s when the sequence is first read: until then a step of
    1,024 requests keeps two lists. Read it before the next step, or copy what you need.
    """

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []
        self._decoded: Iterator[RequestOutput] | None = None

    def append(self, output: RequestOutput) -> None:
        self._outputs.append(output)

    def add_decoded(
        self,
        states: list[RequestState],
        drawn: Iterable[tuple[int, ...]],
        lengths: Iterable[int],
        logprobs: Mapping[int, tuple[TokenLogprob, ...]],
        skipped: Container[RequestState],
    ) -> None:
        """Add the drawn tokens of each request but the `skipped`. `lengths`: tokens of each request, these
        included."""
        self.materialize()
        rows = [state.row for state in states] if logprobs else repeat(NO_ROW, len(states))
        self._decoded = (
            RequestOutput(
                state.request_id,
                token_ids,
                state.num_prompt_tokens,
                state.num_cached,
                int(length) - state.num_prompt_tokens,
                logprobs.get(row, ()) if logprobs else (),
            )
            for state, token_ids, length, row in zip(states, drawn, lengths, rows, strict=True)
            if state not in skipped
        )

    def drop(self, request_id: str) -> None:
        """Remove all outputs of a request."""
        if self:
            self._outputs = [output for output in self.materialize() if output.request_id != request_id]

    def materialize(self) -> list[RequestOutput]:
        """All outputs as objects, which later changes of their requests do not affect."""
        decoded, self._decoded = self._decoded, None
        self._outputs += decoded or ()
        return self._outputs

    def __len__(self) -> int:
        return len(self.materialize())

    def __bool__(self) -> bool:
        return bool(self._outputs) or self._decoded is not None

    def __iter__(self) -> Iterator[RequestOutput]:
        return iter(self.materialize())

    @overload
    def __getitem__(self, index: int) -> RequestOutput: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestOutput]: ...
    def __getitem__(self, index: int | slice) -> RequestOutput | list[RequestOutput]:
        return self.materialize()[index]
