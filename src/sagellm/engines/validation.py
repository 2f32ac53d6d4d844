"""Checks of a request before an engine takes it; errors say what is accepted."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from sagellm.core.errors import ContextLengthError, RequestError, UnsupportedParameterError
from sagellm.core.features import APPROXIMATE_REUSE, PROMPT_LOGPROBS, REASONING_BUDGETS, REASONING_KV
from sagellm.core.types import CapabilityDescriptor, Request, SamplingParams

LEAST_BLOCKS = 4
"""Of reasoning, whose KV is kept where the rest is dropped."""


def check_request(
    request: Request, capability: CapabilityDescriptor, max_model_len: int, account_tokens: int
) -> None:
    """Raise `RequestError` unless the backend can compute the request. `account_tokens`: tokens of KV that
    the account of the request may have at most."""
    params, vocab_size = request.params, capability.vocab_size
    if params.n != 1:
        raise RequestError("the engine computes one sequence a request: expand n > 1 above it", "n")
    _check_length(request, max_model_len, account_tokens)
    ids = np.frombuffer(request.tokens.view(), dtype=np.uint32)  # negative ids are the greatest
    if ids.max() >= vocab_size:
        wrong = next(token for token in request.tokens if not 0 <= token < vocab_size)
        raise RequestError(
            f"token id {wrong} is not in the model's vocabulary of {vocab_size} tokens; if the prompt was "
            "text, the model's folder holds the tokenizer of another model",
            "prompt",
        )
    if params.prompt_logprobs is not None and PROMPT_LOGPROBS not in capability.features:
        raise UnsupportedParameterError(
            f"prompt_logprobs: the backend on {capability.device} does not compute them", "prompt_logprobs"
        )
    if request.approximate_reuse and APPROXIMATE_REUSE not in capability.features:
        raise UnsupportedParameterError(
            "approximate_reuse: this server computes every prompt exactly. Set kv.approximate_reuse: true on "
            "the server, or leave the field out",
            APPROXIMATE_REUSE,
        )
    _check_reasoning(request, capability)
    _check_ids("logit_bias: ", params.logit_bias, vocab_size, "logit_bias")
    _check_ids("stop_token_ids: ", params.stop_token_ids, vocab_size, "stop_token_ids")
    _check_ids("generated: ", request.generated, vocab_size, "generated")
    _check_generated(request)


def _check_reasoning(request: Request, capability: CapabilityDescriptor) -> None:
    """A budget needs a backend that keeps it, and markers."""
    params = request.params
    field = "soft_reasoning_tokens" if params.max_reasoning_tokens is None else "max_reasoning_tokens"
    _check_ids(
        "reasoning_token_ids: ", params.reasoning_token_ids, capability.vocab_size, "reasoning_token_ids"
    )
    _check_reasoning_kv(params, capability)
    if not params.has_reasoning_budget:
        return
    if REASONING_BUDGETS not in capability.features:
        raise UnsupportedParameterError(
            f"{field}: what computes on {capability.device} does not end reasoning: leave it out", field
        )
    if not params.reasoning_token_ids:
        raise RequestError(f"{field} needs reasoning_token_ids: the start and the end marker", field)


def _check_reasoning_kv(params: SamplingParams, capability: CapabilityDescriptor) -> None:
    """A limit of KV needs an engine that drops blocks, and markers."""
    field, least = "max_reasoning_kv_tokens", LEAST_BLOCKS * capability.block_size
    if params.max_reasoning_kv_tokens is None:
        return
    if REASONING_KV not in capability.features:
        raise UnsupportedParameterError(
            f"{field}: this server keeps all KV of reasoning. Set kv.compress_reasoning: true on the server, "
            "or leave the field out",
            field,
        )
    if not params.reasoning_token_ids:
        raise RequestError(f"{field} needs reasoning_token_ids: the start and the end marker", field)
    if params.max_reasoning_kv_tokens < least:
        raise RequestError(
            f"{field} must be at least {least}, {LEAST_BLOCKS} blocks of {capability.block_size} tokens, got "
            f"{params.max_reasoning_kv_tokens}",
            field,
        )


def _check_length(request: Request, max_model_len: int, account_tokens: int) -> None:
    num_prompt, num_generated = len(request.tokens), len(request.generated)
    num_tokens, parts = num_prompt + num_generated, f"the prompt has {num_prompt}"
    if num_generated:
        parts = f"the prompt has {num_prompt}, {num_generated} are generated already"
    if num_tokens >= max_model_len:
        raise ContextLengthError(max_model_len, f"{parts} and at least one must be generated", "prompt")
    if num_tokens >= account_tokens:
        tenant, service_class = request.account
        raise ContextLengthError(
            account_tokens,
            f"{parts}: the KV quota of tenant {tenant!r}, class {service_class!r}, sets this limit",
            "prompt",
        )


def _check_generated(request: Request) -> None:
    """What another instance has generated must be a part of an answer."""
    num_generated, most = len(request.generated), request.params.max_tokens
    ends = {*request.eos_token_ids, *request.params.stop_token_ids}
    may_end = request.scripted_output is not None or not ends.isdisjoint(request.generated)
    for number, token_id in enumerate(request.generated if may_end else (), 1):
        if ends_with(request, token_id, number):
            raise RequestError(
                f"generated: the answer ends with its token {number}, {token_id}, and {num_generated} are "
                "given: do not send on a request that has ended",
                "generated",
            )
    if num_generated and most is not None and num_generated >= most:
        raise RequestError(
            f"generated: {num_generated} tokens are given, max_tokens is {most}: the answer is complete",
            "generated",
        )


def _check_ids(label: str, token_ids: Collection[int], vocab_size: int, parameter: str) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{label}token id {token} is not in the vocabulary of {vocab_size} tokens", parameter
            )


def ends_with(request: Request, token_id: int, num_output_tokens: int) -> bool:
    """Whether an answer ends by itself with this token, the last of `num_output_tokens`."""
    params = request.params
    if num_output_tokens >= params.min_tokens:
        is_eos = token_id in request.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            return True
    return num_output_tokens == request.scripted_output
