"""Where a request makes checkpoints: rules of engines, and of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sagellm.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Served:
    """A prompt in full blocks: what is reused, resident, known, and all.

    Prefill begins behind `num_reused`. `num_resident` leading blocks have attention KV. An earlier request
    had `num_known`, resident or not.
    """

    num_reused: int
    num_resident: int
    num_known: int
    num_blocks: int
    block_tokens: int


Rule = Callable[[Served], list[int]]
"""Returns depths in blocks, ascending, each behind `num_reused`."""

CHUNK_TOKENS = 8192
"""Tokens of a prefill chunk: SGLang's default on a GPU of 80 GB."""


def dense(served: Served) -> list[int]:
    """Behind every block."""
    return list(range(served.num_reused + 1, served.num_blocks + 1))


def prompt_end(served: Served) -> list[int]:
    """Behind the last full block of the prompt."""
    return [served.num_blocks] if served.num_blocks > served.num_reused else []


def junctions(served: Served) -> list[int]:
    """Where the request leaves what is known: at the second visit."""
    return [served.num_known] if served.num_known > served.num_reused else []


def sparse(served: Served) -> list[int]:
    """The end of the prompt, and of the resident blocks that lack a state.

    vLLM since 2026-08: `prefix_cache_retention_interval` 0 (pull requests 47782 and 52216).
    """
    ends = {served.num_resident, served.num_blocks}
    return sorted(depth for depth in ends if depth > served.num_reused)


def every(num_tokens: int) -> Rule:
    """Behind each multiple of so many tokens, and at the end of the prompt."""

    def places(served: Served) -> list[int]:
        step = max(1, num_tokens // served.block_tokens)
        first = served.num_reused // step * step + step
        return [*range(first, served.num_blocks, step), *prompt_end(served)]

    return places


def chunk_ends(served: Served) -> list[int]:
    """Where a prefill chunk, the resident blocks, and the prompt end.

    SGLang keeps a state at each of them (pull request 11214 and later).
    """
    step = max(1, CHUNK_TOKENS // served.block_tokens)
    chunks = range(served.num_reused + step, served.num_blocks, step)
    return sorted({*chunks, *sparse(served)})


RULES: Mapping[str, Rule] = {
    "dense": dense,
    "prompt-end": prompt_end,
    "junctions": junctions,
    "vllm-sparse": sparse,
    "three-per-path": chunk_ends,
}
"""Rules by name; `every-N` stands for `every(N)`."""


def rule(name: str) -> Rule:
    """Returns the rule of a name. Raises `ConfigError` for one that there is not."""
    tokens = name.removeprefix("every-")
    if tokens != name and tokens.isdigit() and int(tokens):
        return every(int(tokens))
    if name not in RULES:
        raise ConfigError(f"no rule {name!r} for checkpoints: {', '.join(RULES)}, every-N, value, bound")
    return RULES[name]
