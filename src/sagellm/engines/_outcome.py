"""What a step made of a request: whether it ends, and what its caller is told."""

from __future__ import annotations

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
    """What the caller is told of one step of the request."""
    return RequestOutput(
        state.request_id,
        token,
        state.num_prompt_tokens,
        state.num_cached,
        state.num_output_tokens,
        logprobs,
        reason,
        error,
    )
