"""Why a prompt could not reuse an earlier one, in the clients' own fields.

OpenAI types the answer as `prompt_cache_diagnostics` of a response (`openai` 3.54), Anthropic as
`diagnostics.cache_miss_reason` of a message (`anthropic` 2.12). Both compare what two requests asked for;
`with_eviction` adds whether the cache still held it. /v1/responses and /v1/messages are not served yet; they
are to keep a `ComparedRequests` and put what these functions return into their answers.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from sagellm.core.blocks import num_common
from sagellm.core.types import Tokens
from sagellm.serving.cache_facts import CacheEviction

OPENAI_SETTINGS = (
    "service_tier", "prompt_cache_key", "text_format", "reasoning_effort", "verbosity",
)  # fmt: skip
"""Settings of a request that OpenAI's reasons name, as `NAME_changed`."""


def digest(value: Any) -> bytes:
    """16 bytes, alike for equal JSON values."""
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    """What is remembered of a request. `system`, `tools` and `settings` are digests, the latter by name."""

    tokens: Tokens
    model: str
    system: bytes = b""
    tools: bytes = b""
    settings: Mapping[str, bytes] = field(default_factory=dict)


def openai_diagnostics(earlier: ComparedRequest | None, later: ComparedRequest) -> dict[str, Any]:
    """`prompt_cache_diagnostics`. `earlier` is None if no such response is remembered.

    A hit: the earlier prompt begins the later one, and nothing differs that the reasons name.
    """
    if earlier is None:
        return {"type": "comparison_response_not_found"}
    num_reusable = num_common(earlier.tokens, later.tokens)
    reason = _changed_for_openai(earlier, later)
    if reason is None:
        if num_reusable == len(earlier.tokens):
            return {"type": "cache_hit"}
        reason = "input_changed"
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": len(earlier.tokens) - num_reusable,
        "comparison_reusable_tokens": num_reusable,
    }


def anthropic_diagnostics(earlier: ComparedRequest | None, later: ComparedRequest) -> dict[str, Any] | None:
    """`diagnostics.cache_miss_reason`, or None for a hit.

    A hit: the earlier prompt begins the later one. `earlier` is None if no such message is remembered.
    """
    if earlier is None:
        return {"type": "previous_message_not_found"}
    num_missed = len(earlier.tokens) - num_common(earlier.tokens, later.tokens)
    for name in ("model", "system", "tools"):
        if getattr(earlier, name) != getattr(later, name):
            return {"type": f"{name}_changed", "cache_missed_input_tokens": num_missed}
    if earlier.settings != later.settings:
        return {"type": "unavailable"}
    return {"type": "messages_changed", "cache_missed_input_tokens": num_missed} if num_missed else None


def with_eviction(reason: dict[str, Any] | None, evicted: CacheEviction | None) -> dict[str, Any] | None:
    """A reason of either client; its `sagellm` says what the cache evicted.

    Evicted tokens make a hit `unavailable`: neither client has a reason for evictions. `evicted` is None
    without `kv.miss_attribution`; then, and for Anthropic's hits, nothing is added.
    """
    if evicted is None:
        return reason
    if evicted.evicted_tokens and (reason is None or reason["type"] == "cache_hit"):
        reason = {"type": "unavailable"}
    return None if reason is None else reason | {"sagellm": evicted.model_dump()}


def _changed_for_openai(earlier: ComparedRequest, later: ComparedRequest) -> str | None:
    """The first reason that is not about the input."""
    if earlier.model != later.model:
        return "model_changed"
    if earlier.tools != later.tools:
        return "tools_changed"
    changed = (name for name in OPENAI_SETTINGS if earlier.settings.get(name) != later.settings.get(name))
    return next((f"{name}_changed" for name in changed), None)


class ComparedRequests:
    """The last requests, by tenant and id of the answer.

    It keeps so many of them, and so many tokens together.
    A tenant cannot name the request of another: equal ids of two tenants are two requests.
    """

    def __init__(self, *, max_requests: int = 4096, max_tokens: int = 1 << 24) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._requests: OrderedDict[tuple[str, str], ComparedRequest] = OrderedDict()
        self._num_tokens = 0

    def remember(self, tenant: str, answer_id: str, request: ComparedRequest) -> None:
        """Keep a request, and forget the oldest of too many."""
        old = self._requests.pop((tenant, answer_id), None)
        self._num_tokens += len(request.tokens) - (len(old.tokens) if old is not None else 0)
        self._requests[tenant, answer_id] = request
        while len(self._requests) > self._max_requests or self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._requests.popitem(last=False)[1].tokens)

    def get(self, tenant: str, answer_id: str) -> ComparedRequest | None:
        """The tenant's request with this answer, or None."""
        return self._requests.get((tenant, answer_id))

    def check(self) -> None:
        """Raise `AssertionError` if the sum or a limit is wrong."""
        assert self._num_tokens == sum(len(request.tokens) for request in self._requests.values())
        assert len(self._requests) <= self._max_requests
        assert self._num_tokens <= self._max_tokens
