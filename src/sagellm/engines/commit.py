"""The end of a step: tokens are appended, KV is committed, requests end.

`StepOutputs` collects what the step added to each request, and `stop_reason` says which requests it ends.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple, overload

from sagellm.core.binding import Binding
from sagellm.core.events import RequestFinished
from sagellm.core.plan import NO_ROW, ExecutionPlan, RequestState, StepResult
from sagellm.core.types import FinishReason, RequestOutput, RequestStatus, TokenLogprob
from sagellm.engines.request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager

NOT_FINITE = "no token could be drawn: the model's logits are not finite"


class Finish(NamedTuple):
    """A request ends now. `token` and `logprobs` are those of its last step. With `keep` the KV that it
    computed may serve others."""

    state: RequestState
    reason: FinishReason
    token: tuple[int, ...] = ()
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
        given_block_ahead: Container[str] = (),
    ) -> Iterator[Finish]:
        """Commit the step, and yield each request that it ends. The caller must consume it to the end and end
        each request before it takes the next one. Requests in decode come first in the plan.
        `given_block_ahead`: ids of requests that already have a block for the step after this one."""
        self._kv.executed(binding)
        draft = binding.draft
        num_decodes = draft.num_decodes
        drawn: dict[int, int] = {}
        if draft.chunks or len(result.token_ids) != num_decodes:
            drawn = dict(zip(plan.sample_rows[num_decodes:], result.token_ids[num_decodes:], strict=True))
        if num_decodes:
            token_ids = result.token_ids[:num_decodes]
            yield from self._commit_decodes(binding.decode_indices, token_ids, result.logprobs, outputs)
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
            logprobs = _as_tuple(result.logprobs.get(state.row))
            reason = stop_reason(state, token_id, self._max_model_len)
            if reason is not None:
                yield Finish(state, reason, (token_id,), logprobs)
                continue
            outputs.append(output_of(state, (token_id,), logprobs))
            ahead = state.request_id in given_block_ahead
            self._table.start_decode(
                state, self._kv.num_slots(state.request_id) - ahead * self._kv.block_size
            )

    def _commit_decodes(
        self,
        indices: list[int] | None,
        token_ids: Sequence[int],
        logprobs: Mapping[int, TokenLogprob],
        outputs: StepOutputs,
    ) -> list[Finish]:
        """Append a token to each decoding request at `indices` (None: all)."""
        batch, size = self._table.decodes, self._vocab_size
        states = list(batch.states) if indices is None else [batch.states[i] for i in indices]
        try:
            may_end = batch.advance(token_ids, indices)
        except ValueError:
            drawn = list(zip(indices or range(len(batch)), states, token_ids, strict=True))
            good = [(i, token) for i, _, token in drawn if 0 <= token < size]
            bad = [state for _, state, token in drawn if not 0 <= token < size]
            failed = [Finish(state, FinishReason.ERROR, error=NOT_FINITE, keep=False) for state in bad]
            if not good:
                return failed
            indices, token_ids = map(list, zip(*good, strict=True))
            return failed + self._commit_decodes(indices, token_ids, logprobs, outputs)
        ended = {
            states[i]: (token_ids[i], reason)
            for i in may_end
            if (reason := stop_reason(states[i], token_ids[i], self._max_model_len)) is not None
        }
        outputs.add_decoded(states, token_ids, batch.lengths(indices), logprobs, ended)
        return [
            Finish(state, ended[state][1], (ended[state][0],), _as_tuple(logprobs.get(state.row)))
            for state in self._table.in_order(ended)
        ]


def stop_reason(state: RequestState, token_id: int, max_model_len: int) -> FinishReason | None:
    """Why the request ends with the token just drawn; None if it continues."""
    params = state.request.params
    generated = state.num_output_tokens
    if generated >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if token_id in state.request.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
    if generated == state.request.scripted_output:
        return FinishReason.STOP
    full = len(state.tokens) >= max_model_len
    if full or (params.max_tokens is not None and generated >= params.max_tokens):
        return FinishReason.LENGTH
    return None


def output_of(
    state: RequestState,
    token: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...],
    reason: FinishReason | None = None,
    error: str | None = None,
) -> RequestOutput:
    """The output of one step; the prompt's log-probabilities come with the first token."""
    scheduled_s = state.scheduled_s
    return RequestOutput(
        state.request_id,
        token,
        state.num_prompt_tokens,
        state.num_cached,
        state.num_output_tokens,
        logprobs,
        reason,
        error,
        state.take_prompt_logprobs() if token else None,
        None if scheduled_s is None else scheduled_s - state.request.arrival_s,
        state.misses,
        state.evicted,
    )


def finished_event(state: RequestState, reason: FinishReason, now_s: float) -> RequestFinished:
    """The event of a request that ends now."""
    return RequestFinished(
        state.request_id,
        reason.value,
        state.num_prompt_tokens,
        state.num_cached,
        state.num_output_tokens,
        state.request.arrival_s,
        state.scheduled_s,
        state.first_token_s,
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
        token_ids: Sequence[int],
        lengths: Iterable[int],
        logprobs: Mapping[int, TokenLogprob],
        skipped: Container[RequestState],
    ) -> None:
        """Add a token for each request but the `skipped`. `lengths`: tokens of each request, this one
        included."""
        self.materialize()
        rows = [state.row for state in states] if logprobs else repeat(NO_ROW, len(states))
        self._decoded = (
            RequestOutput(
                state.request_id,
                (token_id,),
                state.num_prompt_tokens,
                state.num_cached,
                int(length) - state.num_prompt_tokens,
                _as_tuple(logprobs.get(row)) if logprobs else (),
            )
            for state, token_id, length, row in zip(states, token_ids, lengths, rows, strict=True)
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


def _as_tuple(logprob: TokenLogprob | None) -> tuple[TokenLogprob, ...]:
    return () if logprob is None else (logprob,)
