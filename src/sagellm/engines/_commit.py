"""The end of a step: drawn tokens are appended, what is computed is told to the KV books, what ended ends."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from sagellm.core.plan import Draft, ExecutionPlan, RequestState, StepResult
from sagellm.core.types import FinishReason, RequestStatus, TokenLogprob
from sagellm.engines._outcome import StepOutputs, output_of, stop_reason
from sagellm.engines._request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager

NOT_FINITE = "no token could be drawn: the model's logits are not finite"


class End(Protocol):
    """Ends a request with its last token; `keep`: whether what it computed may serve others."""

    def __call__(
        self,
        state: RequestState,
        reason: FinishReason,
        token: tuple[int, ...] = ...,
        logprobs: tuple[TokenLogprob, ...] = ...,
        *,
        error: str | None = ...,
        keep: bool = ...,
    ) -> None: ...


class Committer:
    """The only one that moves requests forward for good."""

    def __init__(
        self, roster: RequestTable, kv: KVCacheManager, end: End, *, vocab_size: int, max_model_len: int
    ) -> None:
        self._request_table = roster
        self._kv = kv
        self._end = end
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def commit(
        self,
        draft: Draft,
        plan: ExecutionPlan,
        result: StepResult,
        outputs: StepOutputs,
        now_s: float,
        grown_ahead: Container[str] = (),
    ) -> None:
        """Take in what the backend answered. Requests in decode come first in the plan. `grown_ahead`: those
        that have a block for the token after the one that was drawn now."""
        self._kv.executed(draft)
        num_decodes = draft.num_decodes
        drawn = dict(zip(plan.sample_rows[num_decodes:], result.token_ids[num_decodes:], strict=True))
        if num_decodes:
            self._decodes(draft, result.token_ids[:num_decodes], result.logprobs, outputs)
        for chunk in draft.chunks.values():
            state = chunk.state
            if state.status is RequestStatus.FINISHED:
                continue
            token_id = drawn.get(state.row)
            if token_id is not None and not 0 <= token_id < self._vocab_size:
                self._end(state, FinishReason.ERROR, error=NOT_FINITE, keep=False)
                continue
            state.num_computed = chunk.end
            self._kv.commit(state)
            if state.prompt_logprobs is not None:
                state.score(chunk.start, result.prompt_logprobs.get(state.row, ()))
            if token_id is not None:
                logprob = result.logprobs.get(state.row)
                self._append(state, token_id, logprob, outputs, now_s)
                if state.status is RequestStatus.RUNNING and not state.decoding:
                    slots = self._kv.num_slots(state.request_id)
                    slots -= self._kv.block_size * (state.request_id in grown_ahead)
                    self._request_table.decode(state, slots, self._max_model_len)

    def _decodes(
        self,
        draft: Draft,
        token_ids: Sequence[int],
        logprobs: Mapping[int, TokenLogprob],
        outputs: StepOutputs,
    ) -> None:
        batch, places = self._request_table.decodes, draft.decode_indices
        states = list(batch.states) if places is None else [batch.states[i] for i in places]
        try:
            ends = batch.advance(token_ids, places)
        except ValueError:
            self._drop_not_finite(draft, dict(zip(states, token_ids, strict=True)))
            token_ids = [one for one in token_ids if 0 <= one < self._vocab_size]
            if token_ids:
                self._decodes(draft, token_ids, logprobs, outputs)
            return
        ended = {
            states[i]: (token_ids[i], reason)
            for i in ends
            if (reason := stop_reason(states[i], token_ids[i], self._max_model_len)) is not None
        }
        outputs.decoded(states, token_ids, batch.lengths(places), logprobs, ended)
        for state in self._request_table.in_order(ended):
            token_id, reason = ended[state]
            logprob = logprobs.get(state.row)
            self._end(state, reason, (token_id,), () if logprob is None else (logprob,))

    def _drop_not_finite(self, draft: Draft, drawn: dict[RequestState, int]) -> None:
        """Those for which nothing could be drawn end; the others are all that takes part."""
        good = [state for state, token_id in drawn.items() if 0 <= token_id < self._vocab_size]
        for state in [one for one in drawn if one not in good]:
            self._end(state, FinishReason.ERROR, error=NOT_FINITE, keep=False)
        draft.decode_indices = [self._request_table.decodes.states.index(state) for state in good]

    def _append(
        self,
        state: RequestState,
        token_id: int,
        logprob: TokenLogprob | None,
        outputs: StepOutputs,
        now_s: float,
    ) -> None:
        state.tokens.append(token_id)
        if state.first_token_s is None:
            state.first_token_s = now_s
        reason = stop_reason(state, token_id, self._max_model_len)
        logprobs = () if logprob is None else (logprob,)
        if reason is not None:
            self._end(state, reason, (token_id,), logprobs)
            return
        outputs.append(output_of(state, (token_id,), logprobs))
