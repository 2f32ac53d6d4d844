"""Depths of which only a lower bound is known."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sagellm.diagnostics.watch.ghosts import LEAST_AT_RISK, DepthCurve
from sagellm.diagnostics.watch.report import UNLIMITED


def test_without_unknown_depths_it_is_the_sum() -> None:
    curve = DepthCurve({3: 10, 5: 20, 9: 70}, {})
    for limit, tokens in ((2, 0), (3, 10), (8, 30), (9, 100), (UNLIMITED, 100)):
        assert curve.within(limit) == pytest.approx(tokens)
    assert curve.known_until == UNLIMITED
    assert DepthCurve({}, {}).within(5) == 0


def test_unknown_depths_are_as_the_others_that_exceed_them() -> None:
    """Of ten tokens deeper than 4, half are at 6; so half of those of which only that is known."""
    curve = DepthCurve({3: 10, 6: 5, 9: 5}, {4: 20})
    assert curve.known_until == 9
    assert curve.within(3) == pytest.approx(10)
    assert curve.within(6) == pytest.approx(10 + 30 * 0.5)


def test_where_nothing_deeper_was_seen_it_is_a_lower_bound() -> None:
    curve = DepthCurve({3: 10}, {4: 90})
    assert curve.known_until == 4
    assert curve.within(8) == pytest.approx(10)
    curve = DepthCurve({3: 10, 8: 1, 9: 1}, {4: 90})
    assert curve.known_until == 4, "one of two tokens does not say what ninety did"
    assert curve.within(9) == pytest.approx(10)


def test_the_estimate_finds_a_distribution_that_was_cut() -> None:
    draw = random.Random(1)
    depths, beyond = Counter[int](), Counter[int]()
    for _ in range(20_000):
        depth, known = int(draw.expovariate(0.01)), draw.randrange(400)
        if depth <= known:
            depths[depth] += 1
        else:
            beyond[known] += 1
    curve = DepthCurve(depths, beyond)
    assert curve.known_until > 100
    assert curve.within(100) / 20_000 == pytest.approx(0.63, abs=0.02)


def test_it_is_what_a_loop_finds() -> None:
    draw = random.Random(2)
    for _ in range(50):
        depths = {draw.randrange(60): draw.randrange(1, 9) for _ in range(draw.randrange(1, 12))}
        beyond = {draw.randrange(60): draw.randrange(1, 9) for _ in range(draw.randrange(12))}
        limit = draw.randrange(60)
        total = at_risk = sum(depths.values()) + sum(beyond.values())
        deeper = 1.0
        for depth in sorted(depths.keys() | beyond.keys()):
            if depth > limit or (beyond and at_risk < LEAST_AT_RISK * total):
                break
            deeper *= 1 - depths.get(depth, 0) / at_risk
            at_risk -= depths.get(depth, 0) + beyond.get(depth, 0)
        assert DepthCurve(depths, beyond).within(limit) == pytest.approx(total * (1 - deeper))
