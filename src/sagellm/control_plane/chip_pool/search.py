"""Chooses for each of several instances a class of equal chips, at the least cost in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

MAX_STATES = 20_000
"""Ways to have used up the classes that are kept after each instance. Below it the search is exact."""

Amount: TypeAlias = tuple[int, int]
"""Units (chips or cores) and bytes."""
State: TypeAlias = tuple[Amount, ...]


def cheapest(
    costs: Sequence[Mapping[int, float]], needs: Sequence[Amount], room: Sequence[Amount]
) -> tuple[int, ...]:
    """For each instance the class that it gets; shorter than `costs` where the next one fits nowhere.

    `costs`: by class, of each instance, where it can be. `needs` of each instance are taken from the `room`
    of its class. Of all ways to use up the classes the cheapest is kept after each instance (dynamic
    programming); of more than `MAX_STATES` the cheapest of those.
    """
    states: dict[State, tuple[float, tuple[int, ...]]] = {tuple(room): (0.0, ())}
    longest: tuple[int, ...] = ()
    for cost, need in zip(costs, needs, strict=True):
        after: dict[State, tuple[float, tuple[int, ...]]] = {}
        for left, (spent, chosen) in states.items():
            for number, more in cost.items():
                units, size = left[number][0] - need[0], left[number][1] - need[1]
                if units < 0 or size < 0:
                    continue
                state = (*left[:number], (units, size), *left[number + 1 :])
                candidate = (spent + more, (*chosen, number))
                if state not in after or candidate < after[state]:
                    after[state] = candidate
        if not after:
            break
        if len(after) > MAX_STATES:
            after = dict(sorted(after.items(), key=lambda item: item[1])[:MAX_STATES])
        states = after
        longest = min(states.values())[1]
    return longest
