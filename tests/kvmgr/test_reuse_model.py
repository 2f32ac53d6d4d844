"""The model of reuse: what an extent is worth, and whether hazards that are known come out of their data."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import islice, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.kvmgr.eviction.adaptive.reuse_model import (
    LEVELS,
    MAX_HAZARD,
    MAX_KINDS,
    NUM_AGES,
    OLDEST_S,
    PART,
    PART_KINDS,
    YOUNGEST_S,
    ReuseModel,
    _values,
    _values_of_one,
    age_bin,
)

BORDERS_S = [0.0, *(YOUNGEST_S * (OLDEST_S / YOUNGEST_S) ** (n / (NUM_AGES - 1)) for n in range(NUM_AGES))]
AGES_S = [0.5, *(math.sqrt(a * b) for a, b in pairwise(BORDERS_S[1:]))]
"""One age in each bin."""

hazards = st.lists(
    st.just(0.0) | st.floats(-7.0, math.log10(MAX_HAZARD)).map(lambda exponent: 10.0**exponent),
    min_size=NUM_AGES,
    max_size=NUM_AGES,
)


def best_ratio(rates: Sequence[float], first: int, steps: int = 200) -> float:
    """By small steps of time: the best ratio of the chance of a use to the mean seconds held, over all times
    to stop, for an extent that is alive where bin `first` begins."""
    alive, held_s, best = 1.0, 0.0, 0.0
    for rate, (from_s, to_s) in list(zip(rates, pairwise(BORDERS_S), strict=True))[first:]:
        step_s = (to_s - from_s) / steps
        stays = math.exp(-rate * step_s)
        for _ in range(steps):
            held_s += step_s * alive * (1.0 + stays) / 2
            alive *= stays
            best = max(best, (1.0 - alive) / held_s)
    return best


def model_of(num_features: int = 1, **options: float) -> ReuseModel:
    return ReuseModel(num_features, **options)


def live(model: ReuseModel, kind: int, rate: float, draw: random.Random, watched_s: float) -> None:
    """One life with a constant hazard, from a use to the next or until nobody watches any more."""
    used_s = draw.expovariate(rate)
    model.at_risk(kind, 0.0, min(used_s, watched_s))
    if used_s < watched_s:
        model.used(kind, used_s)


# -- values


def bearable(rates: list[float], most_uses: float = 8.0) -> list[float]:
    """The same hazards, made smaller where hardly one life in 3,000 would last to the oldest age: beyond that
    differences of chances of survival lose their digits."""
    widths_s = [to_s - from_s for from_s, to_s in pairwise(BORDERS_S)]
    uses = sum(rate * width_s for rate, width_s in zip(rates, widths_s, strict=True))
    return [rate * min(1.0, most_uses / max(uses, 1e-9)) for rate in rates]


@settings(max_examples=40)
@given(hazards.map(bearable))
def test_the_forms_for_one_kind_and_for_many_agree(rates: list[float]) -> None:
    assert _values_of_one(rates) == pytest.approx(_values(np.array([rates]))[0].tolist(), rel=1e-5, abs=1e-12)


@settings(max_examples=40)
@given(hazards)
def test_a_value_lies_between_the_hazard_now_and_the_best_one_later(rates: list[float]) -> None:
    for age, value in enumerate(_values_of_one(rates)):
        assert rates[age] * (1 - 1e-5) - 1e-12 <= value <= max(rates[age:]) * (1 + 1e-5) + 1e-12


@pytest.mark.parametrize(
    "rate_at",
    [
        lambda s: 0.01,
        lambda s: 1.0 / (s + 20.0),
        lambda s: 0.001 + 0.05 * math.exp(-(((s - 60.0) / 30.0) ** 2)),
        lambda s: 0.0 if s < 600.0 else 0.02,
    ],
    ids=["constant", "falling", "a bump at a minute", "nothing for ten minutes"],
)
def test_values_are_the_best_over_all_times_to_stop(rate_at: Callable[[float], float]) -> None:
    rates = [rate_at(age_s) for age_s in AGES_S]
    values = _values_of_one(rates)
    for age in range(0, NUM_AGES, 3):
        assert values[age] == pytest.approx(best_ratio(rates, age), rel=0.02)


def test_what_is_due_soon_is_worth_more_the_nearer_it_comes() -> None:
    rates = [0.0 if age_s < 600.0 else 0.02 for age_s in AGES_S]
    due = age_bin(600.0)
    values = _values_of_one(rates)[: due + 1]
    assert values == sorted(values)
    assert values[0] < values[-1]


@pytest.mark.parametrize(("age_s", "number"), [(0.0, 0), (0.99, 0), (1.0, 1), (1e9, NUM_AGES - 1)])
def test_bins_of_ages(age_s: float, number: int) -> None:
    assert age_bin(age_s) == number


def test_each_age_lies_in_its_bin() -> None:
    assert [age_bin(age_s) for age_s in AGES_S] == list(range(NUM_AGES))


# -- learning


def test_without_data_value_falls_with_age() -> None:
    model = model_of()
    kind = model.kind((0,))
    model.fit(0)
    values = [model.value(kind, age_s) for age_s in AGES_S]
    assert all(younger > older > 0 for younger, older in pairwise(values))


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_recovers_two_known_hazards(seed: int) -> None:
    model, draw = model_of(), random.Random(seed)
    rates = {model.kind((0,)): 0.1, model.kind((1,)): 0.001}
    for _ in range(3_000):
        for kind, rate in rates.items():
            live(model, kind, rate, draw, watched_s=1_000.0)
    model.fit(6_000)
    for kind, age_s in ((0, 0.5), (0, 3.0), (0, 15.0), (1, 15.0), (1, 100.0), (1, 300.0)):
        assert rates[kind] / 2 < model.value(kind, age_s) < rates[kind] * 2
    assert model.value(1, 0.5) < 0.005  # three uses to learn from: the best of many noisy ratios is high


def test_factors_of_two_features_multiply() -> None:
    """Three of the four combinations are seen; the fourth is said from its features."""
    model, draw = model_of(2), random.Random(1)
    for features, rate in (((0, 0), 0.002), ((1, 0), 0.01), ((0, 1), 0.01)):
        for _ in range(3_000):
            live(model, model.kind(features), rate, draw, watched_s=500.0)
    model.fit(9_000)
    never_seen = model.kind((1, 1))
    assert model.value(never_seen, 10.0) == pytest.approx(0.05, rel=0.5)


def test_one_use_is_not_yet_an_opinion() -> None:
    model, draw = model_of(), random.Random(2)
    common, rare = model.kind((0,)), model.kind((1,))
    for _ in range(2_000):
        live(model, common, 0.01, draw, watched_s=500.0)
    model.used(rare, 0.5)
    model.at_risk(rare, 0.0, 0.5)
    model.fit(2_000)
    assert model.value(rare, 0.5) < 3 * model.value(common, 0.5)


def test_what_was_learned_fades() -> None:
    model, draw = model_of(half_life=500.0), random.Random(3)
    kind = model.kind((0,))
    for rate, age_s in ((0.1, 5.0), (0.001, 50.0)):
        for _ in range(10):
            for _ in range(500):
                live(model, kind, rate, draw, watched_s=200.0)
            model.fit(500)
        assert model.value(kind, age_s) == pytest.approx(rate, rel=0.5)


def test_a_kind_that_came_after_the_fit_has_the_values_of_the_next_fit() -> None:
    """Between fits its factors are those of its levels, so nothing new in the data changes nothing."""
    model, draw = model_of(2), random.Random(4)
    for features in ((0, 1), (1, 0), (1, 1)):
        for _ in range(200):
            live(model, model.kind(features), 0.01, draw, watched_s=300.0)
    model.fit(0)
    late = model.kind((0, 0))
    before = [model.value(late, age_s) for age_s in AGES_S]
    for _ in range(5):
        model.fit(0)
    assert [model.value(late, age_s) for age_s in AGES_S] == pytest.approx(before, rel=0.2)


def test_a_fit_in_parts_learns_what_was_counted_at_its_start() -> None:
    """What comes between the parts, a new kind too, changes neither the fit nor its own place in the next."""
    draw = random.Random(7)
    whole, parts = model_of(3), model_of(3)
    features = list(product(range(LEVELS), repeat=3))[: 3 * PART_KINDS]
    lives = [(draw.randrange(len(features)), draw.expovariate(0.01)) for _ in range(5_000)]
    for round_number in range(2):
        for model in (whole, parts):
            for kind, age_s in lives:
                model.used(model.kind(features[kind]), age_s)
                model.at_risk(model.kind(features[kind]), 0.0, age_s)
        before, num_parts = [*parts.values], 0
        for _ in parts.fit_in_parts(5_000):
            num_parts += 1
            assert parts.values[: len(before)] == before
            if num_parts == 2:
                parts.used(parts.kind((0, 0, LEVELS - 1)), 3.0)
                parts.at_risk(parts.kind(features[0]), 0.0, 700.0)
        whole.fit(5_000)
        whole.used(whole.kind((0, 0, LEVELS - 1)), 3.0)
        whole.at_risk(whole.kind(features[0]), 0.0, 700.0)
        known = len(features) + round_number
        assert num_parts > len(features) * 3 / PART
        assert np.allclose(parts.values[:known], whole.values[:known], rtol=1e-12)
        assert len(parts.values) == len(parts)


def test_seconds_at_risk_add_up_from_pieces() -> None:
    draw = random.Random(5)
    lives = [(draw.randrange(3), draw.uniform(0, 50), draw.expovariate(0.01)) for _ in range(50)]
    whole, pieces = model_of(), model_of()
    for model in (whole, pieces):
        for level in range(3):
            model.used(model.kind((level,)), 10.0)
    for kind, from_s, held_s in lives:
        whole.at_risk(kind, from_s, from_s + held_s)
    for kind, from_s, held_s in reversed(lives):
        pieces.at_risk(kind, from_s + held_s / 3, from_s + held_s)
        pieces.at_risk(kind, from_s, from_s + held_s / 3)
    for model in (whole, pieces):
        model.fit(0)
    assert np.allclose(whole.values, pieces.values)
    assert not np.allclose(whole.values[0], whole.values[1], rtol=0.01)


def test_a_hazard_is_bounded() -> None:
    model = model_of()
    kind = model.kind((0,))
    for _ in range(1_000):
        model.used(kind, 0.0)
    model.fit(0)
    assert model.value(kind, 0.0) <= MAX_HAZARD * (1 + 1e-9)


# -- memory


@pytest.mark.parametrize("fitted", [False, True])
def test_beyond_the_most_kinds_all_new_ones_share_a_row(fitted: bool) -> None:
    model = model_of(4)
    if fitted:
        model.kind((7, 7, 7, 7))
        model.fit(0)
    combinations = list(islice(product(range(1, LEVELS), repeat=4), MAX_KINDS + 200))
    rows = [model.kind(features) for features in combinations]
    shared = set(rows[MAX_KINDS:])
    assert len(shared) == 1
    assert len(model) == len({*rows, model.kind((7, 7, 7, 7))}) == MAX_KINDS + 1
    assert [model.kind(features) for features in combinations] == rows
    model.used(shared.pop(), 10.0)
    model.fit(1)
    assert len(model.values) == len(model)
    assert all(math.isfinite(value) and value > 0 for row in model.values for value in row)


def test_memory_does_not_grow_with_use() -> None:
    model, draw = model_of(2), random.Random(6)

    def size() -> int:
        return sum(part.nbytes for part in vars(model).values() if isinstance(part, np.ndarray))

    sizes = []
    for _ in range(20):
        for _ in range(100):
            live(model, model.kind((draw.randrange(5), draw.randrange(5))), 0.01, draw, watched_s=300.0)
        model.fit(100)
        sizes.append(size())
    assert set(sizes) == {sizes[0]}
    assert len(model) == len(model.values) == 25
