"""`RequestOptions`: all that a request asks for beside its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sagellm.core.errors import RequestError, shown
from sagellm.core.kv_hints import KVHintsEnvelope
from sagellm.core.protocols.cot import MIN_WINDOW, EarlyExit, EarlyStop, SpeculativeReasoning
from sagellm.core.types import SLO, Retention, SamplingParams

Hints = KVHintsEnvelope | Mapping[str, Any]
"""KV hints, parsed or as decoded JSON."""

MAX_SESSION_ID_CHARS = 256
_RULES: Mapping[str, type] = {
    "early_stop": EarlyStop,
    "early_exit": EarlyExit,
    "speculative_reasoning": SpeculativeReasoning,
}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """All that a request asks for beside its prompt; checked at construction.

    `params` says how tokens are chosen and when to end. The other fields are those of `core.types.Request`:
    requests of different tenants never share KV, `service_class` names the class whose share of KV memory is
    used, `retention` ranges of the prompt that eviction should spare. Later hints refer to the request's KV
    by `session_id`; `kv_hints` are carried out when the request ends. `client` is the path of the sender (API
    key or address, end user, call): scheduling shares the batch between clients. With `reports_hit`, KV
    events name the blocks that the request reuses; with `reports_eviction` its usage says what was evicted.
    `approximate_reuse` lets KV of equal text at other positions stand in, if the engine allows it.
    `early_stop` starts the `n` choices in windows, and no more once their answers agree; `early_exit` closes
    the reasoning of each once probes know its answer; `speculative_reasoning` has a small model write steps
    of it.
    `branch_of` names a request and a choice that may still run and whose tokens begin the prompt: the KV of
    them that is computed is shared at once, to the token.

    Over HTTP `serving/schema.py` makes one, and `LLM.submit` turns it into the engine's `Request`.
    """

    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    service_class: str = ""
    session_id: str | None = None
    kv_hints: Hints | None = None
    slo: SLO = field(default_factory=SLO)
    retention: Sequence[Retention] = ()
    client: tuple[str, ...] = ()
    reports_hit: bool = False
    reports_eviction: bool = False
    approximate_reuse: bool = False
    early_stop: EarlyStop | None = None
    early_exit: EarlyExit | None = None
    speculative_reasoning: SpeculativeReasoning | None = None
    branch_of: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        params: object = self.params
        if not isinstance(params, SamplingParams):
            form = "llm.sampling_params(temperature=0.5, max_tokens=100)"
            raise RequestError(f"params must be SamplingParams, as of {form}; got {shown(params)}", "params")
        if self.session_id is not None and not 0 < len(self.session_id) <= MAX_SESSION_ID_CHARS:
            size = f"1 to {MAX_SESSION_ID_CHARS} characters, got {len(self.session_id)}"
            raise RequestError(f"session_id must have {size}", "session_id")
        for name, kind in _RULES.items():
            rule: object = getattr(self, name)
            if rule is not None and not isinstance(rule, kind):
                raise RequestError(f"{name} must be None or of type {kind.__name__}, got {shown(rule)}", name)
        if self.early_exit is not None and params.max_reasoning_kv_tokens is not None:
            why = "its probes share all KV of the reasoning, so that none can be dropped"
            raise RequestError(f"early_exit goes without max_reasoning_kv_tokens: {why}", "early_exit")
        if self.speculative_reasoning is not None:
            self._check_drafted()
        if self.early_stop is not None and params.n < MIN_WINDOW:
            least = f"early_stop needs n of at least {MIN_WINDOW}: how many choices there may be"
            raise RequestError(f"{least}, got {params.n}", "early_stop")

    def _check_drafted(self) -> None:
        """Raise `RequestError` for what drafted reasoning cannot have beside it.

        Tokens of a small model have no probabilities, and several requests write the answer in turn.
        """
        params = self.params
        beside = {
            "logprobs": params.logprobs,
            "prompt_logprobs": params.prompt_logprobs,
            "max_reasoning_kv_tokens": params.max_reasoning_kv_tokens,
            "early_exit": self.early_exit,
            "kv_hints": self.kv_hints,
        }
        for name, value in beside.items():
            if value is not None:
                raise RequestError(
                    f"speculative_reasoning cannot go with {name}: leave out either", "speculative_reasoning"
                )
