"""Contract of speculative decoding: a draft proposes tokens, one forward pass verifies them.

The output does not change: greedy output is equal token by token, sampled output has the same distribution. A
draft can only make it slower, so a controller may switch it off at any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sagellm.core.types import SamplingParams, Tokens


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for one sequence; empty when the draft has nothing to say.

    `probabilities[i]` is the draft's probability of `token_ids[i]`; empty for drafts that choose without one
    (n-gram, suffix), which count as certain.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.probabilities and len(self.probabilities) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens with {len(self.probabilities)} probabilities")


@dataclass(frozen=True, slots=True)
class Verification:
    """The first `num_accepted` draft tokens stand, then comes `next_token`, drawn by the model itself."""

    num_accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class SpeculativeResult:
    """Tokens of one generation and what speculation did for it. `num_steps` counts forward passes of the
    model."""

    token_ids: tuple[int, ...]
    num_steps: int
    num_proposed: int
    num_accepted: int

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0


class DraftModel(Protocol):
    """Proposes. Must be cheap: it runs on every step."""

    def propose(self, tokens: Tokens, num_tokens: int) -> Proposal:
        """At most `num_tokens` tokens to follow; never raises for a sequence without a continuation."""

    def observe(self, tokens: Tokens, num_accepted: int) -> None:
        """Learn how the last proposal fared."""


class Verifier(Protocol):
    """The model that is served. KV of refused tokens is void when `verify` returns."""

    def verify(
        self, tokens: Tokens, proposals: Sequence[Proposal], params: SamplingParams
    ) -> list[Verification]:
        """One answer per proposal, all from one forward pass."""


class SpeculativeDecoder(Protocol):
    """The loop of propose and verify for one prompt. In an engine the same two halves are part of its
    steps."""

    def generate(
        self, draft_model: DraftModel, verifier: Verifier, prompt: Tokens, params: SamplingParams
    ) -> SpeculativeResult:
        """The same tokens as without a draft. Errors of the draft are errors: it is switched off by a
        controller that measures, not by dropping exceptions."""
