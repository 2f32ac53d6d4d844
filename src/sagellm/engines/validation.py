"""Checks of a request before an engine takes it; errors say what is accepted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sagellm.core.errors import ContextLengthError, RequestError, UnsupportedParameterError
from sagellm.core.types import APPROXIMATE_REUSE, PROMPT_LOGPROBS, CapabilityDescriptor, Request


def check_request(
    request: Request, capability: CapabilityDescriptor, max_model_len: int, account_tokens: int
) -> None:
    """Raise `RequestError` unless the backend can compute the request. `account_tokens`: tokens of KV that
    the account of the request may have at most."""
    params, num_tokens, vocab_size = request.params, len(request.tokens), capability.vocab_size
    if params.n != 1:
        raise RequestError("the engine computes one sequence a request: expand n > 1 above it", "n")
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            max_model_len, f"the prompt has {num_tokens} and at least one must be generated", "prompt"
        )
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
    _check_ids("logit_bias: ", params.logit_bias, vocab_size, "logit_bias")
    _check_ids("stop_token_ids: ", params.stop_token_ids, vocab_size, "stop_token_ids")
    if num_tokens >= account_tokens:
        tenant, service_class = request.account
        raise ContextLengthError(
            account_tokens,
            f"the prompt has {num_tokens}: it is the KV quota of tenant {tenant!r}, class "
            f"{service_class!r}, that sets this limit",
            "prompt",
        )


def _check_ids(label: str, token_ids: Iterable[int], vocab_size: int, parameter: str) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{label}token id {token} is not in the vocabulary of {vocab_size} tokens", parameter
            )
