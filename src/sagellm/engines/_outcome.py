"""What a step made of a request: whether it ends, and what its caller is told."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, overload

from sagellm.core.events import RequestFinished
from sagellm.core.plan import RequestState
from sagellm.core.types import FinishReason, RequestOutput, TokenLogprob


def stop_reason(state: RequestState, token_id: int, max_model_len: int) -> FinishReason | None:
    """Why the request ends with the token just drawn for it, or None if it goes on."""
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
    """What the caller is told of one step of the request; its prompt's log-probabilities, once."""
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
    )


def finished(state: RequestState, reason: FinishReason, now_s: float) -> RequestFinished:
    """What the world is told of a request that ended."""
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
    """What one step added to each request. Tokens of requests in decode become `RequestOutput`s when they are
    first looked at: of 1,024 requests a step notes two lists.

    Iterate before the next step, or keep what you need.
    """

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []
        self._decoded: _Decoded | None = None

    def append(self, output: RequestOutput) -> None:
        self._outputs.append(output)

    def decoded(
        self,
        states: list[RequestState],
        token_ids: Sequence[int],
        lengths: Iterable[int],
        logprobs: Mapping[int, TokenLogprob],
        skipped: Container[RequestState],
    ) -> None:
        """A token for each request; `lengths`: tokens that it has with it; `skipped` are told otherwise."""
        self.keep()
        rows = [state.row for state in states] if logprobs else []
        self._decoded = _Decoded(states, token_ids, lengths, rows, logprobs, skipped)

    def keep(self) -> None:
        """What was noted so far stays as it is, and in front of what comes."""
        self._all()

    def drop(self, request_id: str) -> None:
        """Whatever was noted of a request is told to nobody."""
        if self:
            self._outputs = [one for one in self._all() if one.request_id != request_id]

    def __len__(self) -> int:
        return len(self._all())

    def __bool__(self) -> bool:
        return bool(self._outputs) or self._decoded is not None

    def __iter__(self) -> Iterator[RequestOutput]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> RequestOutput: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestOutput]: ...
    def __getitem__(self, index: int | slice) -> RequestOutput | list[RequestOutput]:
        return self._all()[index]

    def _all(self) -> list[RequestOutput]:
        decoded, self._decoded = self._decoded, None
        if decoded is not None:
            self._outputs += decoded.outputs()
        return self._outputs


class _Decoded(NamedTuple):
    states: list[RequestState]
    token_ids: Sequence[int]
    lengths: Iterable[int]
    rows: list[int]
    logprobs: Mapping[int, TokenLogprob]
    skipped: Container[RequestState]

    def outputs(self) -> list[RequestOutput]:
        logprobs: list[tuple[TokenLogprob, ...]] = [()] * len(self.states)
        for i, row in enumerate(self.rows):
            if row in self.logprobs:
                logprobs[i] = (self.logprobs[row],)
        return [
            RequestOutput(
                state.request_id,
                (token_id,),
                state.num_prompt_tokens,
                state.num_cached,
                int(length) - state.num_prompt_tokens,
                logprobs[i],
            )
            for i, (state, token_id, length) in enumerate(
                zip(self.states, self.token_ids, self.lengths, strict=True)
            )
            if state not in self.skipped
        ]
