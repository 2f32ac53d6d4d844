"""Log-probabilities of prompt tokens, from what the head reads of their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from sagellm.core.types import TokenLogprob
from sagellm.engines.native.rows import Scored

MAX_LOGITS = 2**23
"""Logits that are held at a time: 32 MiB in float32, and as much again for their exponentials."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""From hidden rows [R, hidden] to logits [R, vocab]."""


def prompt_logprobs(
    head: Head, hidden: torch.Tensor, scored: Sequence[Scored], vocab_size: int
) -> dict[int, tuple[TokenLogprob, ...]]:
    """By row, the log-probability of each of its targets. `hidden` [R, hidden] holds the positions before
    them, one `Scored` after the other; the logits are made and dropped a few rows at a time.
    """
    most = max(1, MAX_LOGITS // vocab_size)
    found: dict[int, tuple[TokenLogprob, ...]] = {}
    first = 0
    for one in scored:
        entries: list[TokenLogprob] = []
        for start in range(0, len(one.targets), most):
            targets = one.targets[start : start + most]
            begin = first + start
            entries += _entries(head(hidden[begin : begin + len(targets)]), targets, min(one.top, vocab_size))
        found[one.row] = tuple(entries)
        first += len(one.targets)
    return found


def _entries(logits: torch.Tensor, targets: Sequence[int], top: int) -> Iterator[TokenLogprob]:
    """Of each row of `logits` [R, vocab], its target's entry with the `top` likeliest tokens."""
    total = logits.logsumexp(-1, keepdim=True)
    column = torch.tensor(targets, dtype=torch.long, device=logits.device)[:, None]
    chosen = (logits.gather(1, column) - total)[:, 0].tolist()
    best = logits.topk(top, dim=-1)
    pairs = zip(best.indices.tolist(), (best.values - total).tolist(), strict=True)
    for token_id, logprob, (ids, values) in zip(targets, chosen, pairs, strict=True):
        yield TokenLogprob(token_id, logprob, tuple(zip(ids, values, strict=True)))
