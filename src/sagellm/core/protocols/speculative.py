"""Contract of speculative decoding: a proposer proposes tokens, one forward pass verifies them.

The output does not change: greedy output is equal token by token, sampled output has the same distribution. A
proposer can only make it slower, so a controller may switch it off at any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from sagellm.core.token_trees import ROOT, branch_by_branch, check_tree
from sagellm.core.types import Request, Tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow one sequence; empty when the proposer has nothing to say.

    They are a chain or, with `parents`, a tree (`core/token_trees.py`). Where fewer are verified, these are
    the first, so a tree has its likeliest tokens first.

    `probabilities[i]` is the probability with which the proposer has drawn `token_ids[i]`, for rejection
    sampling; empty for proposers that draw nothing (n-gram, suffix), whose tokens count as certain.
    `acceptance[i]` is the estimated chance that the model accepts `token_ids[i]`, once it has accepted those
    before it (in a tree, its ancestors); empty for proposers that estimate none. It decides how many tokens
    are worth a step, and no output depends on it.
    """

    token_ids: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if self.probabilities and len(self.probabilities) != count:
            raise ValueError(f"{count} tokens with {len(self.probabilities)} probabilities")
        if self.acceptance and len(self.acceptance) != count:
            raise ValueError(f"{count} tokens with {len(self.acceptance)} estimates")
        check_tree(self.token_ids, self.parents)

    def first(self, num_tokens: int) -> Proposal:
        """Its first tokens, at most so many."""
        if num_tokens >= len(self.token_ids):
            return self
        kept = slice(max(0, num_tokens))
        rest = (self.probabilities[kept], self.acceptance[kept], self.parents[kept])
        return Proposal(self.token_ids[kept], *rest)

    def in_branches(self) -> Proposal:
        """The same tree, branch by branch (`token_trees.branch_by_branch`)."""
        order = branch_by_branch(self.parents)
        place = {node: number for number, node in enumerate(order)} | {ROOT: ROOT}

        def moved(values: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(values[node] for node in order) if values else ()

        return Proposal(
            moved(self.token_ids),
            moved(self.probabilities),
            moved(self.acceptance),
            tuple(place[self.parents[node]] for node in order),
        )


class Asked(NamedTuple):
    """A request for which up to `num_tokens` tokens are wanted, at least one.

    `tokens`: its prompt and its output so far. Those of the last call for this request are the first of them.
    """

    request: Request
    tokens: Tokens
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Verification:
    """The proposed tokens that stand, and the one that the model draws behind them."""

    accepted: tuple[int, ...]
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


class Proposer(Protocol):
    """Proposes what follows the tokens of running requests. Must be cheap: it runs on every step.

    It may keep what it likes of a request between two calls, by `request_id`, until `forget`; what it learns
    from a request beyond that serves requests of the same namespace alone: a proposal shows in the time of an
    answer what others were answered.
    """

    def propose(self, asked: Sequence[Asked]) -> Sequence[Proposal]:
        """A proposal for each request of a step, perhaps empty.

        All tokens are in the vocabulary.
        """

    def observe(self, request_id: str, num_accepted: int) -> None:
        """Learn how many tokens of the request's last proposal were accepted.

        The engine may have cut the proposal short before, for lack of budget or memory.
        """

    def forget(self, request: Request, tokens: Tokens) -> None:
        """The request has ended with these tokens, prompt and output. It may never have been asked about."""

    def close(self) -> None:
        """The engine ends. Nothing is asked any more."""


class TokenDrafter(Protocol):
    """Draws tokens from the served model's hidden states: a backend's draft head.

    It keeps them up to date with each step, unless it rests.
    """

    keeping_s: float
    """What that takes for a step."""

    rests: bool

    @property
    def is_ready(self) -> bool:
        """Whether there is a request for which it can draw."""

    def rest(self) -> None:
        """Forget all requests, and keep nothing of those that join until `wake`."""

    def wake(self) -> None:
        """Keep hidden states of requests that join from now on."""

    def draft(self, asked: Sequence[Asked], min_probability: float) -> Sequence[Proposal]:
        """A proposal for each request, in the order asked.

        Empty for one whose last token but one was not computed here. A greedy request's proposal ends before
        a token with less than `min_probability`.
        """


class Verifier(Protocol):
    """The model that is served. KV of refused tokens is void when `verify` returns."""

    def verify(self, request: Request, tokens: Tokens, proposal: Proposal) -> Verification:
        """Judge a proposal behind `tokens`, prompt and output so far, by one forward pass.

        Those of the last call for this request are the first of them.
        """


class SpeculativeDecoder(Protocol):
    """The loop of propose and verify for one prompt.

    In an engine the same two halves are part of its steps.
    """

    def generate(self, proposer: Proposer, verifier: Verifier, request: Request) -> SpeculativeResult:
        """The same tokens as without a proposer.

        Errors of the proposer are errors: it is switched off by a controller that measures, not by dropping
        exceptions.
        """
