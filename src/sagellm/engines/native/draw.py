"""Draws from softmax(logits / temperature), cut down by top_k, top_p and min_p; nothing sorts the vocabulary.

Each of the three filters keeps a first part of the tokens in order of falling logits, ties by rising id. So a
row needs its largest logits only, as many as are kept and one more: `topk` of a size that grows until it is
enough. The draw is the inverse of the distribution function over ids in ascending order, in float64.

Where a number is found is asked of numpy on a CPU: its argmax and comparison are made of vector instructions,
torch's are not (152 k logits: 13 us against 170).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sagellm.core.types import SamplingParams

FIRST_SIZE, GROWTH = 128, 16


@dataclass(frozen=True, slots=True)
class Kept:
    """What the filters leave of some rows: `ids` [s, n] ascending, and `weights` [s, n] in proportion to
    which they are drawn; behind a row's last id weights are 0.
    """

    rows: list[int]
    ids: torch.Tensor
    weights: torch.Tensor


def greatest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and id [S] of each row's greatest logit, the first of equals; NaN where a row has one."""
    ids = torch.from_numpy(logits.numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)
    return logits.gather(-1, ids[:, None])[:, 0], ids


def draw(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], points: Sequence[float]
) -> list[int]:
    """One token id per row of `logits` [S, vocab], whose greatest are `best` [S], finite; `points` are in
    [0, 1).
    """
    drawn = [0] * len(params)
    filtered = [i for i, row in enumerate(params) if _is_filtered(row, logits.shape[1])]
    for i in set(range(len(params))).difference(filtered):  # each alone: its float64 stays in cache
        weights = _scores(logits[i, None], best[i, None], [params[i]]).exp_()
        drawn[i] = int(_places(weights, [points[i]]))
    for kept in filter_rows(logits, best, params, filtered):
        places = _places(kept.weights, [points[i] for i in kept.rows])
        for i, token_id in zip(kept.rows, kept.ids.gather(1, places)[:, 0].tolist(), strict=True):
            drawn[i] = token_id
    return drawn


def filter_rows(
    logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams], rows: Sequence[int]
) -> Iterator[Kept]:
    """What is kept of each of `rows`: top_k, then top_p (Holtzman et al. 2020, arXiv:1904.09751) of what is
    left, then min_p relative to the best. A token stays if the mass before it is under top_p: the first
    always.
    """
    vocab, left = logits.shape[1], list(rows)
    masses = {i: _mass(logits[i, None], best[i, None], params[i]) for i in left}
    size = max([FIRST_SIZE, *(params[i].top_k + 1 for i in left if _cuts_rank(params[i], vocab))])
    while left:
        size = min(size, vocab)
        own = [params[i] for i in left]
        values, ids = logits[left].topk(size)
        scores = _scores(values, best[left], own)
        stays = _stays(scores, own, [masses[i] for i in left], vocab)
        counts = stays.sum(-1)
        enough = [i for i, count in enumerate(counts.tolist()) if count < size or size == vocab]
        if enough:
            most = int(counts[enough].max())
            for i in enough:
                _settle_ties(logits[left[i]], values[i], ids[i], int(counts[i]))
            weights = scores[enough, :most].exp_().masked_fill_(~stays[enough, :most], 0.0)
            order = ids[enough, :most].masked_fill_(~stays[enough, :most], vocab).sort(-1)
            yield Kept([left[i] for i in enough], order.values, weights.gather(1, order.indices))
        left = [row for i, row in enumerate(left) if i not in set(enough)]
        size *= GROWTH


def _is_filtered(params: SamplingParams, vocab: int) -> bool:
    return _cuts_rank(params, vocab) or params.top_p < 1.0 or params.min_p > 0


def _cuts_rank(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab


def _mass(logits: torch.Tensor, best: torch.Tensor, params: SamplingParams) -> float:
    """The weight of all tokens of a row [1, vocab], where top_p is a share of that; else 0, as if unknown."""
    if params.top_p >= 1.0 or _cuts_rank(params, logits.shape[1]):
        return 0.0
    return float(_scores(logits, best, [params]).exp_().sum())


def _scores(logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logarithms of weights relative to the best token's, float64 [S, n]."""
    temperatures = _column((row.temperature for row in params), logits.device)
    return (logits - best.double()[:, None]).div_(temperatures)


def _stays(
    scores: torch.Tensor, params: Sequence[SamplingParams], masses: Sequence[float], vocab: int
) -> torch.Tensor:
    """Which of the leading tokens are kept, bool [S, n], by falling `scores`: of each row a first part."""
    device = scores.device
    limits = _column((row.top_k if _cuts_rank(row, vocab) else vocab for row in params), device)
    stays = torch.arange(scores.shape[1], device=device) < limits
    if any(row.top_p < 1.0 for row in params):
        weights = scores.exp().masked_fill_(~stays, 0.0)
        before = weights.cumsum(-1) - weights
        known = _column(masses, device)
        shares = _column((row.top_p if row.top_p < 1.0 else math.inf for row in params), device)
        stays &= before < shares * torch.where(known > 0, known, weights.sum(-1, keepdim=True))
    floors = [math.log(row.min_p) if row.min_p > 0 else -math.inf for row in params]
    stays &= scores >= _column(floors, device)
    stays[:, 0] = True
    return stays


def _settle_ties(logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, count: int) -> None:
    """Of the tokens that are as good as the last of `count` kept ones, keep the smallest ids: `topk` takes
    any.
    """
    last = values[count - 1]
    if count == len(values) or values[count] != last or last.isinf():
        return
    better = int((values > last).sum())
    if logits.is_cpu:
        equal = torch.from_numpy(np.flatnonzero(logits.numpy() == last.numpy()))
    else:
        equal = (logits == last).nonzero()[:, 0]
    ids[better:count] = equal[: count - better]


def _places(weights: torch.Tensor, points: Sequence[float]) -> torch.Tensor:
    """The column [S, 1] in which each point lies, as a share of its row's weight."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    # The last column with any weight is the limit: rounding must not step over it.
    limit = torch.searchsorted(cumulative, total)
    found = torch.searchsorted(cumulative, _column(points, weights.device) * total, right=True)
    return torch.minimum(found, limit)


def _column(values: Iterable[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=device)[:, None]
