"""A proven upper bound of what any hybrid cache reuses within a budget.

A request reuses a block only if it was resident ever since the last request that had it, and a checkpoint
only if it was resident ever since the last request that went through its depth: no other request computes
either. With a price per byte and step, which may change from step to step, each request pays for the
intervals that its hit needs, and no two requests pay for the same one. So, by weak Lagrangian duality, for
any prices

    saved tokens <= sum over steps of price x budget + sum over requests of max over hits (tokens - cost).

Each request's maximum is exact: cost is linear in the depth while the last use is the same, so that only the
ends of such runs are compared. `upper_bound` raises the prices where demand exceeds the budget, lowers them
elsewhere, and returns the lowest right side that it met.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sagellm.benchmarks.checkpoints.groups import KVGroups
from sagellm.benchmarks.checkpoints.tree import Path

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WINDOWS = 48
"""Prices change so often in the course of a trace."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """Consecutive blocks of a path with the same last use, in columns.

    Those of all requests in order. `tokens`: up to the end of the run; `block_bytes`: of the run alone;
    `checkpoint_bytes`: behind it. `first`: the first run of each request that has any.
    """

    request: Ints
    last_use: Ints
    tokens: Floats
    block_bytes: Floats
    checkpoint_bytes: Floats
    first: Ints


def upper_bound(
    paths: Sequence[Path], groups: KVGroups, block_tokens: int, budget_bytes: float, rounds: int = 150
) -> float:
    """Returns a bound of the tokens that requests reuse in so many bytes."""
    runs = _runs(paths, groups, block_tokens)
    num_steps = len(paths)
    if not len(runs.request) or not budget_bytes < np.inf:
        return _dual(runs, np.zeros(num_steps), 0.0)[0]
    window = np.arange(num_steps) * WINDOWS // num_steps
    prices = np.full(WINDOWS, runs.tokens[-1] / budget_bytes / num_steps)
    best = np.inf
    for number in range(rounds):
        value, used = _dual(runs, prices[window], budget_bytes)
        best = min(best, value)
        mean = np.bincount(window, used, WINDOWS) / np.maximum(1, np.bincount(window, minlength=WINDOWS))
        excess = np.clip(mean / budget_bytes, 0.2, 5.0)
        prices = prices * excess ** (1.0 / (1.0 + 0.05 * number))
    return float(best)


def _dual(runs: _Runs, prices: Floats, budget_bytes: float) -> tuple[float, Floats]:
    """Returns the right side of the inequality, and the bytes in demand."""
    paid = np.concatenate(([0.0], np.cumsum(prices)))
    price = paid[runs.request] - paid[runs.last_use]  # per byte, from the last use to this one
    costs = np.cumsum(price * runs.block_bytes)
    before = np.concatenate(([0.0], costs))[runs.first]
    lengths = np.diff(np.append(runs.first, len(runs.request)))
    gain = runs.tokens - (costs - np.repeat(before, lengths)) - price * runs.checkpoint_bytes
    most = np.maximum.reduceat(gain, runs.first) if len(runs.first) else np.zeros(0)
    value = float(np.maximum(most, 0.0).sum() + budget_bytes * prices.sum())
    return value, _used(runs, gain, most, lengths, len(prices))


def _used(runs: _Runs, gain: Floats, most: Floats, lengths: Ints, num_steps: int) -> Floats:
    """Bytes at each step that the best hit of each request needs."""
    chosen = (gain == np.repeat(most, lengths)) & (gain > 0.0)
    place = np.arange(len(gain))
    last = np.maximum.reduceat(np.where(chosen, place, -1), runs.first) if len(runs.first) else place
    taken = place <= np.repeat(last, lengths)
    size = np.where(taken, runs.block_bytes, 0.0) + np.where(chosen, runs.checkpoint_bytes, 0.0)
    change = np.bincount(runs.last_use, size, num_steps + 1) - np.bincount(runs.request, size, num_steps + 1)
    return np.cumsum(change)[:num_steps]


def _runs(paths: Sequence[Path], groups: KVGroups, block_tokens: int) -> _Runs:
    last_uses: dict[int, int] = {}
    rows: list[tuple[int, int, int, int]] = []
    first = []
    for number, path in enumerate(paths):
        began = len(rows)
        for segment in path.segments:
            last_use = last_uses.get(segment.first_key)
            last_uses[segment.first_key] = number
            if last_use is None:
                continue
            if len(rows) > began and rows[-1][1] == last_use:
                rows[-1] = (number, last_use, segment.stop, rows[-1][3])
            else:
                rows.append((number, last_use, segment.stop, segment.start))
        if len(rows) > began:
            first.append(began)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    tokens = columns[2] * block_tokens
    window = np.minimum(tokens, groups.window_tokens) * groups.window_bytes
    return _Runs(
        request=columns[0],
        last_use=columns[1],
        tokens=tokens.astype(np.float64),
        block_bytes=(columns[2] - columns[3]) * float(block_tokens * groups.attention_bytes),
        checkpoint_bytes=(groups.state_bytes + window).astype(np.float64),
        first=np.array(first, dtype=np.int64),
    )
