"""Where to split a prompt whose head is computed while its tail is loaded.

The idea is Cake's (Jin et al. 2024, arXiv 2410.03065). There both sides meet wherever they are when they
meet. Here the place is chosen before, from the measured speeds, so that a load stays one sequential read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

FEWEST_SAVED_SHARE = 0.1
FEWEST_SAVED_S = 0.02
"""A split must save this share of the time, and so many seconds. It costs steps, and the device computes
while it could rest."""


def first_of_tail(
    first: int,
    stop: int,
    most: int,
    compute_s: Callable[[int], float],
    load_s: Callable[[int], float],
) -> int | None:
    """The block of [first, stop) from which on they are loaded.

    Those before it are computed meanwhile. `compute_s(end)`: seconds to compute blocks [first, end).
    `load_s(count)`: seconds to load `count` blocks. Both grow with their argument. At most `most` blocks are
    loaded, at least one is computed. None where the later of both ends is not clearly before that of loading
    all, or of computing all.
    """
    lowest = max(first + 1, stop - most)
    meets = lowest + bisect_left(range(lowest, stop), True, key=lambda at: compute_s(at) >= load_s(stop - at))
    places = [at for at in (meets - 1, meets) if lowest <= at < stop]
    if not places:
        return None
    spent_s, place = min((max(compute_s(at), load_s(stop - at)), at) for at in places)
    whole_s = min(compute_s(stop), load_s(stop - first))
    return place if whole_s - spent_s > max(FEWEST_SAVED_SHARE * whole_s, FEWEST_SAVED_S) else None
