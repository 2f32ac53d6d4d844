"""`OpenRequest`: a request as its caller sees it, over one or more engine requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.protocols.prefix_cache import MissCounts, PromptSpan
from sagellm.core.types import Request
from sagellm.engines.llm.completion import Usage
from sagellm.engines.llm.drafted_reasoning import DraftedReasoning
from sagellm.engines.llm.options import RequestOptions
from sagellm.engines.llm.probes import ProbedReasoning
from sagellm.engines.llm.samples import VotedSamples
from sagellm.engines.llm.text_stream import TextStream


@dataclass(slots=True)
class OpenRequest:
    """A request as its caller sees it: `n` engine requests over one prompt.

    `streams`: of the engine requests that have been started, by id. `samples`: with `early_stop`; `probed`:
    with `early_exit`, by id; `drafted`: with `speculative_reasoning`. `parent_id`: the engine request that it
    branches from. `reasoning`: at the end of the prompt, for models that mark it.
    """

    request_id: str
    num_prompt_tokens: int
    options: RequestOptions
    parent_id: str | None = None
    samples: VotedSamples | None = None
    reasoning: ReasoningTracker | None = None
    streams: dict[str, TextStream] = field(default_factory=dict)
    probed: dict[str, ProbedReasoning] = field(default_factory=dict)
    drafted: dict[str, DraftedReasoning] = field(default_factory=dict)
    num_cached_tokens: int | None = None
    queued_s: float | None = None
    misses: MissCounts | None = None
    evicted: PromptSpan | None = None
    num_approximate_tokens: int = 0

    def computing(self, index: int) -> str | None:
        """What computes a choice now; None: it has ended or not begun."""
        names = list(self.streams)
        if index >= len(names) or self.streams[names[index]].finish_reason is not None:
            return None
        steered = self.probed.get(names[index]) or self.drafted.get(names[index])
        return names[index] if steered is None else steered.engine_id

    @property
    def usage(self) -> Usage:
        generated = sum(stream.num_tokens for stream in self.streams.values())
        reasoning = sum(stream.num_reasoning_tokens for stream in self.streams.values())
        return Usage(
            self.num_prompt_tokens,
            generated,
            self.num_cached_tokens or 0,
            self.misses,
            self.evicted,
            min(self.num_approximate_tokens, self.num_prompt_tokens),
            reasoning,
            sum(probed.num_probe_tokens for probed in self.probed.values()),
        )


def requests_of_choices(request: Request) -> Iterator[Request]:
    """The `n` engine requests `id#i` of a request, or itself if `n` is 1."""
    if request.params.n == 1:
        yield request
        return
    for index in range(request.params.n):
        seed = request.params.seed
        params = replace(request.params, n=1, seed=None if seed is None else seed + index)
        engine_id = f"{request.request_id}#{index}"
        hints = request.kv_hints if index == 0 else None
        yield replace(request, request_id=engine_id, params=params, group=request.request_id, kv_hints=hints)
