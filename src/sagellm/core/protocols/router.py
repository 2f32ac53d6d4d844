"""Contract of the router: which instance serves a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from sagellm.core.types import SLO, Namespace, Tokens


class InstanceType(Enum):
    """What an instance is for.

    GENERAL serves whole requests. PREFILLING computes prompts for others, DECODING goes on from prompts of
    others; both still serve whole requests where the fleet has nothing better. HYBRID does all three and may
    change its part at any time. EMBEDDING computes embeddings alone, LLM_EMBEDDING both, from one memory.
    """

    GENERAL = "general"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    HYBRID = "hybrid"
    EMBEDDING = "embedding"
    LLM_EMBEDDING = "llm_embedding"


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """A request as the control plane sees it.

    `kv_cache_size_tokens`: what its KV will hold at the end, prompt and expected answer.
    `slo_slack_s`: what is left of its goal for the first token; None without a goal. `num_generated`: tokens
    of the answer that an instance which is gone has drawn already.
    """

    request_id: str
    tokens: Tokens
    namespace: Namespace = Namespace()
    kv_cache_size_tokens: int = 0
    slo: SLO = SLO()
    slo_slack_s: float | None = None
    priority: int = 0
    session_id: str | None = None
    num_generated: int = 0


@dataclass(frozen=True, slots=True)
class ExecutionInstance:
    """An instance as it last reported itself. Times in seconds of the control plane's clock.

    `num_queued_tokens`: prompt tokens that wait or are being computed. `kv_cache_usage`: share of its blocks
    that requests use. `utilization`: share of the last seconds in which it computed. `prefill_token_s` and
    `step_s`: what a prompt token takes, and a decode step at its present batch, as measured there; 0.0:
    not known. `prefill_token_squared_s`: in addition, for each token before it; 0.0 where the mean has it.
    `is_fresh`: its KV events are complete and recent; else what is known of its cache is a guess.
    `num_free_blocks` counts those that cached prefixes may be evicted from; they have `block_size` tokens
    each, 0: not known.
    """

    instance_id: str
    kind: InstanceType = InstanceType.GENERAL
    num_waiting: int = 0
    num_running: int = 0
    num_queued_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    max_num_seqs: int = 0
    kv_cache_usage: float = 0.0
    eviction_count: int = 0
    utilization: float = 0.0
    prefill_token_s: float = 0.0
    prefill_token_squared_s: float = 0.0
    step_s: float = 0.0
    is_fresh: bool = True
    reported_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.num_running

    @property
    def num_used_tokens(self) -> float:
        """Tokens of KV that its requests use; 0.0 where it does not tell."""
        return self.kv_cache_usage * self.num_blocks * self.block_size

    @property
    def only_decodes(self) -> bool:
        """Whether no prompt waits or is computed there.

        Then `step_s` is of the rows and the context that it reports."""
        return self.num_running > 0 and not self.num_waiting and not self.num_queued_tokens


class CachedPrefix(NamedTuple):
    """Leading tokens of a prompt that an instance has.

    Those in device memory, and those in any tier."""

    num_device_tokens: int = 0
    num_tokens: int = 0


NOT_CACHED = CachedPrefix()


@dataclass(frozen=True, slots=True)
class Placement:
    """Prefill and decode instance (equal when not separated) and why.

    `terms`: what the decision weighed for the chosen instance, by name, in seconds where it is a cost.
    `fetch_from`: an instance whose cached prefix should be fetched first, as that is cheaper than to compute
    it; empty: none.
    """

    prefill: str
    decode: str
    reason: str = ""
    terms: Mapping[str, float] = field(default_factory=dict)
    fetch_from: str = ""

    @property
    def is_separated(self) -> bool:
        return self.prefill != self.decode


class Router(Protocol):
    """`reads_cache`: whether placements depend on `cached`; else a caller may leave the look-up out."""

    reads_cache: bool

    def place(
        self,
        request: RequestMetadata,
        instances: Sequence[ExecutionInstance],
        cached: Sequence[CachedPrefix],
    ) -> Placement:
        """Choose among `instances`; `cached` has one entry for each of them.

        Raises `CapacityError` if none of them can serve a request."""

    def observe(self, instance_id: str, latencies_s: Mapping[str, float]) -> None:
        """Learn from a finished request. Seconds by name, where known: ttft, tpot, decode (first token
        to last), e2e. Of a separated request, ttft for its prefill instance, and at once the others for the
        decode instance."""
