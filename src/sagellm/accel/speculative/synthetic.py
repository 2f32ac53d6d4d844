"""`Synthetic`: proposals that are right with a given chance, for benchmarks on random weights.

A random model repeats nothing, so no other proposer has anything to say of it. Here the backend puts
made-up tokens in the place of what the model has drawn (`engines/native/synthetic_draws.py`). The proposer
knows them, so that as many proposed tokens are accepted as a benchmark asks for, and every step computes all
that it would. vLLM and llama.cpp have such a mode under the name of synthetic acceptance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.core.seeds import request_seed
from sagellm.core.types import Request, Tokens


def synthetic_token(seed: int, position: int, vocab_size: int) -> int:
    """The token at this position of the answer of a request with that seed."""
    return (_bits(seed, position) >> 32) % vocab_size


def _bits(seed: int, position: int) -> int:
    """64 of them, independent from position to position."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest(), "little")


class Synthetic:
    """Implements `Proposer`: each token is right with the chance `acceptance`.

    Takes no time to speak of. Which positions it gets right depends on seed and position alone, so that runs
    with other numbers of proposed tokens have the same luck. `vocab_size` and `engine_seed` are those of the
    engine.
    """

    def __init__(self, vocab_size: int, engine_seed: int, acceptance: float = 0.7) -> None:
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance must be from 0 to 1, got {acceptance}")
        self.acceptance = acceptance
        self._vocab_size, self._engine_seed = vocab_size, engine_seed

    def propose(self, asked: Sequence[Asked]) -> Sequence[Proposal]:
        return [Proposal(tuple(self._tokens(*each))) for each in asked]

    def _tokens(self, request: Request, tokens: Tokens, num_tokens: int) -> Iterator[int]:
        given = request.params.seed
        seed = request_seed(self._engine_seed, request.request_id) if given is None else given
        first = len(tokens) - len(request.tokens)
        for position in range(first, first + num_tokens):
            is_wrong = (_bits(seed, position) & 0xFFFF_FFFF) >= self.acceptance * 2**32
            yield (synthetic_token(seed, position, self._vocab_size) + is_wrong) % self._vocab_size

    def observe(self, request_id: str, num_accepted: int) -> None:
        """Nothing is learned."""

    def forget(self, request: Request, tokens: Tokens) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


PLUGIN = Synthetic
