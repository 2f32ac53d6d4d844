"""`Heads`: the served model's own draft head proposes, from the model's hidden states.

A head is trained for the model: a layer behind its last (EAGLE, Li et al. 2024; multi-token prediction of
DeepSeek-V3; a block at once after DFlash), or blocks on its last hidden state (Medusa). Hidden states stay in
the backend, which runs the head (`TokenDrafter`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.protocols.speculative import Asked, Proposal, TokenDrafter
from sagellm.core.types import Request, Tokens


class Heads:
    """Implements `Proposer` with what the backend has beside the model.

    A request's proposal ends before a token to which the head gives less than `min_probability`, if it is
    greedy. A request whose last tokens the model has not computed here gets none: it has just come from
    another instance, say.
    """

    def __init__(self, drafter: TokenDrafter, min_probability: float = 0.3) -> None:
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability must be from 0 to 1, got {min_probability}")
        self._drafter, self._min_probability = drafter, min_probability

    def propose(self, asked: Sequence[Asked]) -> Sequence[Proposal]:
        return self._drafter.draft(asked, self._min_probability)

    def observe(self, request_id: str, num_accepted: int) -> None:
        """The next step's hidden states tell it."""

    def forget(self, request: Request, tokens: Tokens) -> None:
        """The backend forgets a request with its row."""

    def close(self) -> None:
        """The backend is the engine's."""


PLUGIN = Heads
