"""The tests behind findings: exact, and their level holds."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.diagnostics.verify import statistics
from sagellm.diagnostics.verify.prober import Trial
from sagellm.diagnostics.verify.statistics import MARGIN, holm, rank_sum_test, rank_test, tail_test
from tests.effort import examples

sizes = st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6)


def rank_p_by_permutation(cold: list[float], warm: list[float], rank: int) -> float:
    """The slow twin of `_rank_p` for numbers without ties: all ways to call some of them cold."""
    above = sum(size > sorted(cold, reverse=True)[rank] for size in warm)
    pooled = sorted(cold + warm, reverse=True)
    ways = list(itertools.combinations(range(len(pooled)), len(cold)))

    def as_extreme(places: tuple[int, ...]) -> bool:
        return places[rank] - rank >= above  # warm ones before the cold one of this rank

    return sum(map(as_extreme, ways)) / len(ways)


@given(st.data())
@settings(max_examples=examples(60), deadline=None)
def test_the_rank_test_is_the_permutation_test(data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, 1000), min_size=2, max_size=9, unique=True))
    count = data.draw(st.integers(1, len(numbers) - 1))
    cold, warm = sorted(map(float, numbers[:count]), reverse=True), list(map(float, numbers[count:]))
    rank = data.draw(st.integers(0, count - 1))
    assert statistics._rank_p(cold, warm, rank) == pytest.approx(rank_p_by_permutation(cold, warm, rank))


def tail_of(cold: list[float], warm: list[float], *, floor: float) -> float:
    """One compared token for each number."""
    return tail_test(cold, warm, num_cold=len(cold), num_warm=len(warm), floor=floor)


@given(sizes, sizes)
@settings(max_examples=examples(60), deadline=None)
def test_p_values_are_probabilities(cold: list[float], warm: list[float]) -> None:
    assert 0.0 <= rank_test(cold, warm, floor=1e-4) <= 1.0
    assert 0.0 <= tail_of(cold, warm, floor=1e-4) <= 1.0


def test_without_numbers_nothing_can_be_said() -> None:
    assert rank_test([], [1.0], floor=0.1) == tail_of([1.0], [], floor=0.1) == 1.0


def test_warm_noise_up_to_the_margin_is_no_finding() -> None:
    cold = [0.01 * (1 + i % 7) for i in range(60)]
    assert rank_test(cold, [size * MARGIN * 0.99 for size in cold], floor=1e-4) == 1.0
    assert rank_test(cold, [size * MARGIN * 20 for size in cold], floor=1e-4) < 1e-9


def test_one_answer_far_out_is_significant_only_beside_small_noise() -> None:
    cold = [1e-5] * 50
    assert tail_of(cold, [1e-5] * 49 + [3.0], floor=1e-4) < 1e-8
    assert tail_of([0.2] * 50, [0.2] * 49 + [3.0], floor=1e-4) > 1e-3
    assert tail_of(cold, [math.inf], floor=1e-4) == 0.0


def test_the_level_holds_for_noise_with_infinite_variance() -> None:
    """Pareto with index 2, cold and warm alike, is the edge of what `tail_test` assumes."""
    rng = random.Random(1)
    runs, false = 4000, 0
    for _ in range(runs):
        cold, warm = ([rng.paretovariate(2.0) for _ in range(40)] for _ in range(2))
        false += min(1.0, 2 * min(rank_test(cold, warm, floor=0.0), tail_of(cold, warm, floor=0.0))) <= 0.05
    assert false / runs <= 0.05


@pytest.mark.parametrize("tail_index", [2.0, 3.0])
def test_the_level_holds_where_a_warm_number_is_over_many_more_tokens(tail_index: float) -> None:
    """Long answers at once, beside the short cold ones of all other families."""
    rng = np.random.default_rng(1)
    false = 0
    for _ in range(1000):
        cold = [1.0 + float(size) for size in rng.pareto(tail_index, (40, 8)).max(axis=1)]
        warm = [1.0 + float(size) for size in rng.pareto(tail_index, (10, 2000)).max(axis=1)]
        false += tail_test(cold, warm, num_cold=40 * 8, num_warm=10 * 2000, floor=0.0) <= 0.05
    assert false <= 65  # 5 %, and chance


@pytest.mark.parametrize("count", range(7))
def test_two_answers_of_a_scenario_are_ranked(count: int) -> None:
    trial = Trial("churn", "all", warm_sizes=[float(size) for size in range(count)])
    ranked = {0: 0.0}.get(count, count - 1.0)
    assert (trial.ranked, trial.warm) == (ranked, ranked)
    trial.warm_sizes.reverse()
    assert trial.ranked == max(0, (count + 1) // 2 if count > 1 else 0)


def test_holm_adjusts_and_stops_at_the_first_that_is_not_significant() -> None:
    assert holm({"a": 0.001, "b": 0.02, "c": 0.5}, 0.05) == {"a": 0.003, "b": 0.04}
    assert holm({"a": 0.03, "b": 0.03}, 0.05) == {}
    assert holm({}, 0.05) == {}


def test_cold_answers_that_the_fault_struck_too_hide_nothing_frequent() -> None:
    cold, warm = [1e-5] * 100 + [2.0], [1e-5] * 13 + [0.5] * 7
    assert rank_test(cold, warm, floor=1e-4) < 1e-4


def test_the_rank_sum_is_that_of_all_orders() -> None:
    numbers = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    orders = [
        (low, [number for number in numbers if number not in low])
        for low in itertools.combinations(numbers, 3)
    ]
    inversions = [sum(a >= b for a in low for b in high) for low, high in orders]
    for (low, high), count in zip(orders, inversions, strict=True):
        expected = sum(other <= count for other in inversions) / len(orders)
        assert rank_sum_test(low, high) == pytest.approx(expected)
    assert rank_sum_test(range(12), range(20, 32)) < 1e-6
    assert rank_sum_test([1.0], [1.0]) == 1.0
