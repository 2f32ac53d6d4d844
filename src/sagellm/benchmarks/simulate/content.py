"""Prompt tokens of a trace: whoever shares an id shares the tokens of its block, and nobody else does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sagellm.benchmarks.traces import Trace, TraceRequest
from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError
from sagellm.core.types import Tokens

MOST_BITS = 16
MIN_VOCAB = 2
_ODD = np.uint32(0x9E3779B1)
_NOTHING = np.empty(0, dtype=np.int32)


class PromptContent:
    """Makes the tokens of prompts, each in one go, from ids of blocks of `block_tokens` tokens.

    A block is an arithmetic progression modulo a power of two, whose start and (odd) step its id gives. With
    a vocabulary of 65,536 tokens or more and ids below 2**30, two ids differ in every run of two tokens at
    equal places; with smaller ones they do for all but a few. Where `block_tokens` is 1 the ids are the
    tokens, modulo the vocabulary.
    """

    def __init__(self, block_tokens: int, vocab_size: int) -> None:
        if vocab_size < MIN_VOCAB:
            raise ConfigError(f"a vocabulary of {vocab_size} tokens cannot tell contents apart: 2 at least")
        self.block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._bits = min(MOST_BITS, vocab_size.bit_length() - 1)
        self._offsets = np.arange(block_tokens).astype(np.uint16)

    def tokens(self, ids: Tokens, num_tokens: int, number: int) -> Tokens:
        """A prompt of exactly `num_tokens`: the blocks of `ids`, the last one cut, and behind them what only
        the prompt of this `number` has."""
        made = self._named(ids)[:num_tokens] if len(ids) else _NOTHING
        rest = num_tokens - len(made)
        if rest:
            own = np.array([2 * number + 1], dtype=np.uint32)
            tail = self._blocks(own, np.arange(rest).astype(np.uint16))
            made = np.concatenate([made, tail])
        return Tokens.frombytes(made.tobytes())

    def _named(self, ids: Tokens) -> NDArray[np.int32]:
        known = np.frombuffer(ids.view(), dtype=np.int32)
        if self.block_tokens == 1:
            return np.mod(known, np.int32(self._vocab_size)).astype(np.int32)
        return self._blocks(known.view(np.uint32) * np.uint32(2), self._offsets)

    def _blocks(self, ids: NDArray[np.uint32], offsets: NDArray[np.uint16]) -> NDArray[np.int32]:
        """`len(ids) * len(offsets)` tokens. The product of an id and an odd number is another id for each;
        its low bits are the start, the next ones the step. 16 bits wrap as they should."""
        mixed = ids * _ODD
        start = mixed.astype(np.uint16)
        step = ((mixed >> np.uint32(self._bits)) << np.uint32(1)).astype(np.uint16) | np.uint16(1)
        made: NDArray[np.uint16] = np.multiply.outer(step, offsets)
        made += start[:, None]
        if self._bits < MOST_BITS:
            made &= np.uint16((1 << self._bits) - 1)
        return made.ravel().astype(np.int32)


def check_lengths(trace: Trace) -> None:
    """Raise `ConfigError` for a request with more whole blocks of ids than its prompt is long."""
    for number, request in enumerate(trace.requests):
        blocks = cdiv(request.num_input_tokens, trace.block_tokens)
        if len(request.ids) > blocks:
            raise ConfigError(
                f"request {number} of trace {trace.name!r} names {len(request.ids)} blocks of "
                f"{trace.block_tokens} tokens, its {request.num_input_tokens} tokens have {blocks}"
            )


def uncached_tokens(requests: tuple[TraceRequest, ...], block_tokens: int) -> NDArray[np.int64]:
    """For each request the prompt tokens that a cache which never evicts would still have to compute, had all
    earlier ones of the trace been served before."""
    seen: dict[object, set[int]] = {}
    left = np.empty(len(requests), dtype=np.int64)
    for number, request in enumerate(requests):
        known = seen.setdefault(request.namespace, set())
        found = 0
        for one in request.ids:
            if one not in known:
                break
            found += 1
        known.update(request.ids.slice(found))
        left[number] = max(request.num_input_tokens - found * block_tokens, 0)
    return left
