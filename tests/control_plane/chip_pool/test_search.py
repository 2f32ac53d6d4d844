"""The search against trying everything."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sagellm.control_plane.chip_pool import search
from sagellm.control_plane.chip_pool.search import Amount, cheapest


def best_of_all(
    costs: list[dict[int, float]], needs: list[Amount], room: list[Amount]
) -> float:
    """The least cost of all choices; infinite where none fits."""
    best = math.inf
    for chosen in itertools.product(*(list(cost) for cost in costs)):
        left = [list(amount) for amount in room]
        for number, need in zip(chosen, needs, strict=True):
            left[number][0] -= need[0]
            left[number][1] -= need[1]
        if min(min(pair) for pair in left) >= 0:
            best = min(best, sum(cost[number] for cost, number in zip(costs, chosen, strict=True)))
    return best


@pytest.mark.parametrize("seed", range(200))
def test_the_cheapest_choice(seed: int) -> None:
    generator = random.Random(seed)
    room = [(generator.randint(0, 4), generator.randint(0, 4)) for _ in range(generator.randint(1, 3))]
    needs = [(generator.randint(0, 2), generator.randint(0, 2)) for _ in range(generator.randint(1, 5))]
    costs = [
        {number: generator.randint(1, 9) / 2 for number in range(len(room)) if generator.random() < 0.9}
        for _ in needs
    ]
    chosen, best = cheapest(costs, needs, room), best_of_all(costs, needs, room)
    if math.isinf(best):
        assert len(chosen) < len(needs)
    else:
        assert sum(cost[number] for cost, number in zip(costs, chosen, strict=True)) == best


def test_of_too_many_states_the_cheapest_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_STATES", 4)
    costs = [{number: 1.0 + (number + each) % 5 for number in range(5)} for each in range(10)]
    chosen = cheapest(costs, [(1, 0)] * 10, [(2, 0)] * 5)
    assert sorted(chosen) == sorted([0, 1, 2, 3, 4] * 2)
