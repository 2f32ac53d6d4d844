"""What a request must satisfy before an engine takes it: each refusal says what would have worked."""

from __future__ import annotations

import numpy as np

from sagellm.core.errors import ContextLengthError, RequestError, UnsupportedParameterError
from sagellm.core.types import PROMPT_LOGPROBS, CapabilityDescriptor, Request


def check_request(request: Request, capability: CapabilityDescriptor, max_model_len: int) -> None:
    """Raise `RequestError` unless a backend of that capability can compute the request in that context."""
    vocab_size = capability.vocab_size
    if request.params.n != 1:
        raise RequestError("the engine computes one sequence a request: expand n > 1 above it", "n")
    if len(request.tokens) >= max_model_len:
        raise ContextLengthError(
            max_model_len,
            f"the prompt has {len(request.tokens)} and at least one must be generated",
            "prompt",
        )
    ids = np.frombuffer(request.tokens.view(), dtype=np.uint32)  # negative ids are the greatest
    if ids.max() >= vocab_size:
        bad = next(token for token in request.tokens if not 0 <= token < vocab_size)
        raise RequestError(f"token id {bad} is not in the vocabulary of {vocab_size} tokens", "prompt")
    if request.params.prompt_logprobs is not None and PROMPT_LOGPROBS not in capability.features:
        raise UnsupportedParameterError(
            f"prompt_logprobs: the backend on {capability.device} does not compute them", "prompt_logprobs"
        )
    _check_parameters(request, vocab_size)


def check_quota(request: Request, most: int) -> None:
    """Raise `ContextLengthError` if the account of the request can never hold its prompt (`most` tokens)."""
    if len(request.tokens) >= most:
        tenant, service_class = request.account
        raise ContextLengthError(
            most,
            f"the prompt has {len(request.tokens)}: it is the KV quota of tenant {tenant!r}, class "
            f"{service_class!r}, that sets this limit",
            "prompt",
        )


def _check_parameters(request: Request, vocab_size: int) -> None:
    for name, ids in (
        ("logit_bias", request.params.logit_bias),
        ("stop_token_ids", request.params.stop_token_ids),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name}: token id {token} is not in the vocabulary of {vocab_size} tokens", name
                )
