"""The counters of prefix reuse, by exact numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.kvmgr.prefix_cache.metrics import BUCKET_BOUNDS_S, PrefixReuseMetrics

FIVE_MICROSECONDS = 5e-06  # one of the bounds; the next is twice as much


def three_requests() -> PrefixReuseMetrics:
    metrics = PrefixReuseMetrics()
    metrics.record(100, 64, 7, 4)
    metrics.record(32, 0, 2, 0)
    metrics.record(68, 16, 5, 1)
    return metrics


def test_ratios_and_sums() -> None:
    reuse = three_requests().snapshot()
    assert reuse.token_hit_ratio == 80 / 200
    assert reuse.block_hit_ratio == 5 / 14
    assert reuse.request_hit_ratio == 2 / 3
    assert reuse.mean_sharing == pytest.approx((4 / 7 + 0 + 1 / 5) / 3)
    assert (reuse.num_hit_tokens, reuse.num_matches) == (80, 0)


def test_nothing_counted_is_zero_and_no_quantile() -> None:
    reuse = PrefixReuseMetrics().snapshot()
    assert (reuse.token_hit_ratio, reuse.block_hit_ratio) == (0.0, 0.0)
    assert (reuse.request_hit_ratio, reuse.mean_sharing) == (0.0, 0.0)
    assert reuse.match_quantile(0.5) is None


def test_a_request_without_a_whole_block_counts() -> None:
    metrics = PrefixReuseMetrics()
    metrics.record(3, 0, 0, 0)
    reuse = metrics.snapshot()
    assert (reuse.num_requests, reuse.mean_sharing, reuse.request_hit_ratio) == (1, 0.0, 0.0)


@pytest.mark.parametrize("counts", [(10, 11, 1, 1), (10, -1, 1, 0), (10, 10, 1, 2), (10, 0, 1, -1)])
def test_more_hits_than_tokens_is_an_error_and_counts_nothing(counts: tuple[int, int, int, int]) -> None:
    metrics = PrefixReuseMetrics()
    with pytest.raises(ValueError, match="between 0 and all"):
        metrics.record(*counts)
    assert metrics.snapshot() == PrefixReuseMetrics().snapshot()


def test_bounds_are_round_numbers_up_to_a_second() -> None:
    assert (BUCKET_BOUNDS_S[0], BUCKET_BOUNDS_S[-1]) == (2.5e-07, 1.0)
    assert all(1.9 < high / low < 2.6 for low, high in itertools.pairwise(BUCKET_BOUNDS_S))
    assert {f"{bound:.1e}"[:3] for bound in BUCKET_BOUNDS_S} == {"1.0", "2.5", "5.0"}


def test_a_bound_belongs_to_its_own_bucket() -> None:
    metrics = PrefixReuseMetrics()
    metrics.observe_match(FIVE_MICROSECONDS)
    metrics.observe_match(math.nextafter(FIVE_MICROSECONDS, 1.0))
    metrics.observe_match(0.0)
    metrics.observe_match(100.0)
    counts = dict(metrics.snapshot().match_buckets)
    assert counts[BUCKET_BOUNDS_S[0]] == 1
    assert counts[FIVE_MICROSECONDS] == 2
    assert counts[2 * FIVE_MICROSECONDS] == 3
    assert counts[1.0] == 3
    assert counts[math.inf] == 4


def test_quantiles_are_linear_inside_a_bucket() -> None:
    metrics = PrefixReuseMetrics()
    for _ in range(4):
        metrics.observe_match(1.5 * FIVE_MICROSECONDS)
    reuse = metrics.snapshot()
    assert reuse.match_quantile(0.0) == FIVE_MICROSECONDS
    assert reuse.match_quantile(0.5) == 1.5 * FIVE_MICROSECONDS
    assert reuse.match_quantile(1.0) == 2 * FIVE_MICROSECONDS
    metrics.observe_match(30.0)
    assert metrics.snapshot().match_quantile(1.0) == 1.0
    with pytest.raises(ValueError, match=r"got 1\.5"):
        reuse.match_quantile(1.5)


@given(
    st.lists(st.floats(3e-7, 0.99), min_size=1, max_size=50),
    st.sampled_from([0.01, 0.25, 0.5, 0.9, 0.99, 1.0]),
)
def test_a_quantile_is_right_to_a_factor_of_two_and_a_half(times: list[float], q: float) -> None:
    metrics = PrefixReuseMetrics()
    for seconds in times:
        metrics.observe_match(seconds)
    exact = sorted(times)[max(0, math.ceil(q * len(times)) - 1)]
    answer = metrics.snapshot().match_quantile(q)
    assert answer is not None
    assert exact / 2.5001 <= answer <= 2.5001 * exact
    assert metrics.snapshot().num_matches == len(times)


def test_a_snapshot_stays_as_it_was() -> None:
    metrics = three_requests()
    metrics.observe_match(0.25)
    before = metrics.snapshot()
    metrics.record(10, 10, 1, 1)
    metrics.observe_match(0.5)
    assert (before.num_requests, before.num_hit_tokens, before.num_matches) == (3, 80, 1)
    assert before.match_sum_s == 0.25
    assert before.token_hit_ratio == 0.4
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.num_requests = 9  # type: ignore[misc]
