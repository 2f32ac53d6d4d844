"""Block reuse: the table of hazards against counting by hand, and what it learns."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.protocols.lifetime import ReuseFeatures, ReusePredictor
from sagellm.kvmgr.lifetime.reuse.reuse_table import MIN_SEEN, ReuseTable

BLOCK = ReuseFeatures(1, 1, 3, 20)
OTHER = ReuseFeatures(6, 6, 0, 40, gap_s=30.0)


def test_knowing_nothing_it_abstains() -> None:
    table: ReusePredictor = ReuseTable()
    prediction = table.predict(BLOCK)
    assert prediction.abstained
    assert 0 <= prediction.probability <= 1
    for _ in range(MIN_SEEN):
        table.update(BLOCK, 10.0, reused=False)
    assert not table.predict(BLOCK).abstained


def test_shares_are_those_that_were_told() -> None:
    table = ReuseTable(horizon_s=100.0, prior=1.0)
    for number in range(1000):
        table.update(BLOCK, 10.0 if number % 4 == 0 else 100.0, reused=number % 4 == 0)
        table.update(OTHER, 50.0 if number % 10 else 100.0, reused=number % 10 > 0)
    assert table.predict(BLOCK).probability == pytest.approx(0.25, abs=0.01)
    assert table.predict(OTHER).probability == pytest.approx(0.9, abs=0.01)
    table.check()


def test_the_times_are_those_of_the_blocks_that_were_used_again() -> None:
    table = ReuseTable(horizon_s=1000.0, prior=1.0)
    chance = random.Random(0)
    for _ in range(2000):
        table.update(BLOCK, chance.uniform(0, 200), reused=True)
        table.update(BLOCK, 1000.0, reused=False)
    prediction = table.predict(BLOCK)
    assert prediction.probability == pytest.approx(0.5, abs=0.01)
    for level, seconds in prediction.quantiles.items():
        assert seconds == pytest.approx(200 * level, abs=12)
    later = table.predict(BLOCK, age_s=100.0)
    assert later.probability == pytest.approx(1 / 3, abs=0.04)
    assert later.quantiles[0.5] == pytest.approx(50, abs=12)
    assert table.predict(BLOCK, age_s=500.0).probability == pytest.approx(0, abs=0.01)


def test_an_eviction_is_no_evidence_against_reuse() -> None:
    """All would be used again after 80 s; half are evicted after 20 s, and are told as watched until then."""
    table = ReuseTable(horizon_s=100.0, prior=1.0)
    for _ in range(500):
        table.update(BLOCK, 80.0, reused=True)
        table.update(BLOCK, 20.0, reused=False)
    assert table.predict(BLOCK).probability == pytest.approx(1, abs=0.01)


def test_a_rest_told_in_pieces_counts_once() -> None:
    whole, pieces = ReuseTable(100.0, prior=1.0), ReuseTable(100.0, prior=1.0)
    for number in range(1000):
        reused = number % 5 == 0
        end_s = 90.0 if reused else 100.0
        whole.update(BLOCK, end_s, reused=reused)
        for since_s, until_s in pairwise((0.0, 2.0, 11.0, 47.0)):
            pieces.update(BLOCK, until_s, reused=False, since_s=since_s)
        pieces.update(BLOCK, end_s, reused=reused, since_s=47.0)
    for age_s in (0.0, 5.0, 60.0):
        assert pieces.predict(BLOCK, age_s).probability == pytest.approx(
            whole.predict(BLOCK, age_s).probability, abs=0.01
        )
    pieces.check()


def test_a_block_unlike_any_other_gets_the_share_of_all() -> None:
    table = ReuseTable(horizon_s=100.0)
    for number in range(1000):
        table.update(BLOCK, 10.0 if number % 2 else 100.0, reused=number % 2 == 1)
    assert table.predict(OTHER).probability == pytest.approx(0.5, abs=0.05)


def test_a_block_that_rested_for_the_horizon_is_given_up() -> None:
    table = ReuseTable(horizon_s=100.0)
    for _ in range(100):
        table.update(BLOCK, 1.0, reused=True)
    assert table.predict(BLOCK, age_s=100.0).probability == 0
    assert table.horizon_s == 100.0


@pytest.mark.parametrize(("seconds", "since_s"), [(-1.0, 0.0), (1.0, 2.0), (1.0, -1.0)])
def test_time_that_runs_back_is_refused(seconds: float, since_s: float) -> None:
    with pytest.raises(ValueError, match="cannot be watched"):
        ReuseTable().update(BLOCK, seconds, reused=False, since_s=since_s)


@pytest.mark.parametrize("options", [{"horizon_s": 0.0}, {"prior": 0.0}, {"memory": 1}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="over"):
        ReuseTable(**options)


def test_what_was_long_ago_is_forgotten() -> None:
    forgetful, other = ReuseTable(100.0, memory=500), ReuseTable(100.0)
    for reused in (True, False):
        for table in (forgetful, other):
            for _ in range(2000):
                table.update(BLOCK, 10.0 if reused else 100.0, reused=reused)
            table.check()
    assert other.predict(BLOCK).probability == pytest.approx(0.5, abs=0.05)
    assert forgetful.predict(BLOCK).probability < 0.1
    assert forgetful.num_seen < 500


def test_a_cell_that_saw_little_follows_the_others() -> None:
    """It was asked when all blocks were used again; now none is, and nothing more was told of its own
    kind."""
    table = ReuseTable(100.0)
    for _ in range(100):
        table.update(BLOCK, 10.0, reused=True)
    table.update(OTHER, 10.0, reused=True)
    before = table.predict(OTHER).probability
    for _ in range(5000):
        table.update(BLOCK, 100.0, reused=False)
    assert before > 0.8
    assert table.predict(OTHER).probability < 0.2


FEATURES = st.builds(
    ReuseFeatures,
    num_uses=st.integers(1, 500),
    turn=st.integers(0, 200),
    position=st.integers(0, 10**6),
    num_blocks=st.integers(1, 10**6),
    gap_s=st.one_of(st.just(-1.0), st.floats(0, 1e6)),
)
TOLD = st.tuples(FEATURES, st.floats(0, 400), st.floats(0, 1), st.booleans())


@given(st.lists(TOLD, min_size=40, max_size=80), FEATURES, st.floats(0, 300))
def test_whatever_is_told_predictions_are_shares_and_ordered_times(
    told: list[tuple[ReuseFeatures, float, float, bool]], asked: ReuseFeatures, age_s: float
) -> None:
    table = ReuseTable(horizon_s=200.0)
    for features, seconds, part, reused in told:
        table.update(features, seconds, reused=reused, since_s=part * seconds)
    table.check()
    prediction = table.predict(asked, age_s)
    assert 0 <= prediction.probability <= 1
    values = list(prediction.quantiles.values())
    assert values == sorted(values)
    assert 0 <= values[0] <= values[-1] <= 200
