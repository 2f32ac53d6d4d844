"""Where a load is split: by hand, and against the slow twin that tries every place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.protocols.eviction import SimpleExtent
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.kv_pool.tiers.split_load import FEWEST_SAVED_S, FEWEST_SAVED_SHARE, first_of_tail
from tests.effort import examples

H100_8B = PrefillCostModel(16, 2 * 2**20, 2.8e-5, 6.3e-10)
"""About what an H100 takes for Llama 3.1 8B: 32K tokens in 1.26 s."""


def split(
    first: int, stop: int, bytes_per_s: float, most: int = 10**6, costs: PrefillCostModel = H100_8B
) -> int | None:
    return first_of_tail(
        first,
        stop,
        most,
        lambda end: costs.recompute_s(SimpleExtent(0, end - first, first_position=first)),
        lambda count: 0.001 + count * costs.bytes_per_block / bytes_per_s,
    )


def slowly(
    first: int, stop: int, bytes_per_s: float, most: int, costs: PrefillCostModel
) -> tuple[float, float]:
    """Seconds of the best place, and without any."""

    def compute_s(end: int) -> float:
        return costs.recompute_s(SimpleExtent(0, end - first, first_position=first))

    def load_s(count: int) -> float:
        return 0.001 + count * costs.bytes_per_block / bytes_per_s

    places = [at for at in range(first + 1, stop) if stop - at <= most]
    best = min((max(compute_s(at), load_s(stop - at)) for at in places), default=float("inf"))
    return best, min(compute_s(stop), load_s(stop - first))


@pytest.mark.parametrize(
    ("first", "stop", "gb_per_s", "expected"),
    [
        (0, 2047, 1.0, 1606),
        (0, 2047, 2.5, 1239),
        (0, 2047, 5.0, 913),  # 14,608 tokens in 0.476 s; 1,134 blocks of 2 MiB in 0.477 s
        (1024, 2047, 2.5, 1597),
        (0, 2047, 50.0, None),  # host memory: 4 % would be saved
        (0, 8, 2.5, None),  # 5 ms would not be saved
        (0, 1, 2.5, None),
    ],
)
def test_by_hand(first: int, stop: int, gb_per_s: float, expected: int | None) -> None:
    assert split(first, stop, gb_per_s * 1e9) == expected


def test_a_small_tail_where_the_device_has_little_room() -> None:
    assert split(0, 2047, 1e9, most=300) == 1747
    assert split(0, 2047, 1e9, most=10) is None
    assert split(0, 2047, 1e9, most=0) is None


@settings(max_examples=examples(300), deadline=None)
@given(
    first=st.integers(0, 40),
    num_blocks=st.integers(0, 60),
    bytes_per_s=st.floats(1e7, 1e11),
    most=st.integers(0, 70),
    token_s=st.floats(1e-7, 1e-3),
    square_s=st.floats(0, 1e-7),
)
def test_no_place_is_better(
    first: int, num_blocks: int, bytes_per_s: float, most: int, token_s: float, square_s: float
) -> None:
    costs, stop = PrefillCostModel(16, 2**20, token_s, square_s), first + num_blocks
    found = split(first, stop, bytes_per_s, most, costs)
    best_s, whole_s = slowly(first, stop, bytes_per_s, most, costs)
    if found is None:
        assert whole_s - best_s <= max(FEWEST_SAVED_SHARE * whole_s, FEWEST_SAVED_S) * (1 + 1e-9)
        return
    assert first < found < stop
    assert stop - found <= most
    compute_s = costs.recompute_s(SimpleExtent(0, found - first, first_position=first))
    load_s = 0.001 + (stop - found) * costs.bytes_per_block / bytes_per_s
    assert max(compute_s, load_s) == pytest.approx(best_s)
