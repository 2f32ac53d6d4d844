"""Which differences between cold and warm answers are more than the server's own noise.

Every scenario gives one number for its cold arm (the largest difference between cold answers to one prompt)
and one for its warm arm (the largest difference between a warm answer and its nearest cold one). A maximum
over more answers is larger by chance, and each of the two tests allows for that:

* `rank_test`: under the hypothesis that warm differences are at most `MARGIN` times the cold ones, scaled
  cold and warm numbers are exchangeable. How many warm ones lie above the j-th largest cold one is then
  hypergeometric, exactly. It is given the maximum over `RANKED_ANSWERS` warm answers of a scenario, no more
  than its cold arm compares.
* `tail_test`: a single difference far beyond all cold ones, of all warm answers. It counts the compared
  tokens of both arms, and assumes that the tail of the noise falls at least as fast as x^-2 (Pareto with
  index 2: infinite variance), which is far heavier than float noise.

`rank_sum_test` compares times. `holm` keeps the probability of any false finding in a run below the given
level (Holm 1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

MARGIN = 4.0
"""How much larger the float noise of warm answers may be."""

FLOOR = 1e-4
"""Nats; the least noise that is assumed: rounding in float32 and in JSON."""

COARSE_FLOOR = 2**-4
"""Nats; the same where noise between shapes of computation could not be measured.

It is the rounding of a logit of 16 to 32 in bfloat16.
"""

RANKED_ANSWERS = 2

TAIL_INDEX = 2.0
RANKS = (0, 1)
SHARES = (0.1, 0.5)
"""How many cold numbers are above the threshold of a rank test, as a count or a share of them.

A fault may strike a cold answer too, in a batch for instance; so the largest one alone is no threshold.
"""


def rank_test(cold: Sequence[float], warm: Sequence[float], *, floor: float) -> float:
    """The probability of so many large warm differences by chance.

    1 if nothing can be said. The least p over thresholds at four ranks of the cold numbers, times four
    (Bonferroni).
    """
    if not cold or not warm:
        return 1.0
    scaled = sorted((MARGIN * max(size, floor) for size in cold), reverse=True)
    ranks = {*RANKS, *(int(share * len(scaled)) for share in SHARES)} & set(range(len(scaled)))
    return min(1.0, len(ranks) * min(_rank_p(scaled, warm, rank) for rank in ranks))


def _rank_p(cold: Sequence[float], warm: Sequence[float], rank: int) -> float:
    """The probability of so many warm ones above the cold one of this rank.

    At most `rank` of the top ones are cold.
    Ties count as not above.
    """
    above = sum(size > cold[rank] for size in warm)
    draws, total = above + rank, len(cold) + len(warm)
    if not above:
        return 1.0
    ways = sum(
        math.comb(len(cold), k) * math.comb(len(warm), draws - k)
        for k in range(rank + 1)
        if draws - k <= len(warm)
    )
    return ways / math.comb(total, draws)


def tail_test(
    cold: Sequence[float], warm: Sequence[float], *, num_cold: int, num_warm: int, floor: float
) -> float:
    """The probability that noise alone gives the largest warm difference.

    1 if nothing can be said. `num_cold` and `num_warm` tokens were compared. A further one exceeds the
    maximum over N cold ones with probability 1/(N+1), and r times that with r^-2 of it: the assumed tail.
    """
    if not cold or not warm:
        return 1.0
    ratio = max(warm) / max(floor, *cold)
    if ratio <= 1.0:
        return 1.0
    return float(min(1.0, num_warm * ratio**-TAIL_INDEX / (num_cold + 1)))


def rank_sum_test(low: Sequence[float], high: Sequence[float]) -> float:
    """The probability by chance that `low` is so far below `high`.

    The exact test of Mann and Whitney (1947).
    """
    inversions = sum(a >= b for a in low for b in high)
    return _arrangements(len(low), len(high), inversions) / math.comb(len(low) + len(high), len(low))


@cache
def _arrangements(num_low: int, num_high: int, inversions: int) -> int:
    """The number of orders of two groups with at most so many inversions."""
    if inversions < 0:
        return 0
    if not num_low or not num_high:
        return 1
    last_is_low = _arrangements(num_low - 1, num_high, inversions - num_high)
    return last_is_low + _arrangements(num_low, num_high - 1, inversions)


def holm(p_values: Mapping[str, float], level: float) -> dict[str, float]:
    """Those that are significant at a family-wise level, with their adjusted p."""
    found: dict[str, float] = {}
    adjusted = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        adjusted = max(adjusted, min(1.0, p * (len(p_values) - rank)))
        if adjusted > level:
            break
        found[name] = adjusted
    return found
