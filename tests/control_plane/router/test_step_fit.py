"""How steps lengthen, learned from reports: exact planes, one slope alone, and what gives none."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.control_plane.router._step_fit import KEEP, StepFit, StepLine
from tests.effort import examples

PLANE = StepLine(0.007, 1e-4, 5e-8)


def fitted(*steps: tuple[float, float, float]) -> StepFit:
    fit = StepFit()
    for step in steps:
        fit.add(*step)
    return fit


def drawn(line: StepLine, count: int, seed: int = 0) -> list[tuple[float, float, float]]:
    draw, made = random.Random(seed), list[tuple[float, float, float]]()
    for _ in range(count):
        rows = draw.randint(1, 60)
        context = rows * draw.uniform(100, 8000)
        made.append((rows, context, line.of(rows, context)))
    return made


def test_a_plane_is_found() -> None:
    assert fitted(*drawn(PLANE, 50)).line() == pytest.approx(PLANE, rel=1e-6)


def test_what_has_no_slope() -> None:
    assert StepFit().line() == (0.0, 0.0, 0.0)
    assert fitted((3, 1000, 0.01)).line() == (0.01, 0.0, 0.0), "one point"
    assert fitted((1, 1.0, 1.0), (1, 1000.0, 0.001)).line()[1:] == (0.0, 0.0), "steps become no shorter"
    assert fitted((9, 0.0, 0.1), (10, 0.0, 0.1)).line() == pytest.approx((0.1, 0.0, 0.0)), "all are equal"


def test_where_rows_and_context_grow_together_one_slope_explains_all() -> None:
    line = fitted(*((rows, 1000.0 * rows, 0.007 + 1e-4 * rows) for rows in range(1, 20))).line()
    assert (line.row_s == 0.0) != (line.context_token_s == 0.0)
    assert line.of(30, 30_000) == pytest.approx(0.01)


def test_a_step_without_rows_takes_no_less_than_nothing() -> None:
    line = fitted((10, 0.0, 0.01), (20, 0.0, 0.03)).line()
    assert line == pytest.approx((0.0, 0.02 / 15, 0.0), rel=1e-2)


def test_an_instance_with_few_steps_is_taken_for_one_of_the_fleet() -> None:
    fleet = fitted(*drawn(PLANE, 300))
    assert StepFit().line(fleet, 8.0) == pytest.approx(PLANE, rel=1e-6)
    slow = StepLine(0.02, 1e-3, 5e-7)
    own = fitted(*drawn(slow, 300)).line(fleet, 1e-6)
    assert own == pytest.approx(slow, rel=1e-2)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 256), st.integers(0, 400_000), st.floats(1e-4, 1.0)), min_size=1, max_size=40
    )
)
def test_nothing_is_below_zero_and_the_mean_is_met(steps: list[tuple[int, int, float]]) -> None:
    line = fitted(*steps).line()
    assert min(line) >= -1e-9
    weights = KEEP ** np.arange(len(steps) - 1, -1, -1.0)
    rows, context, step_s = (
        float(np.average(column, weights=weights)) for column in zip(*steps, strict=True)
    )
    assert line.of(rows, context) == pytest.approx(step_s, rel=1e-6, abs=1e-9)
