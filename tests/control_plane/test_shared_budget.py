"""How generation and embedding divide steps and blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.control_plane.shared_budget import ServiceDemand, SharedBudget

NONE = ServiceDemand()


def test_each_side_gets_what_the_other_leaves() -> None:
    budget = SharedBudget(1000, 100)
    assert budget.divide(100, ServiceDemand(5000, 1.0), NONE) == (900, 0)
    assert budget.divide(100, NONE, ServiceDemand(5000, 1.0)) == (0, 900)
    assert budget.divide(100, ServiceDemand(50, 1.0), ServiceDemand(5000, 1.0)) == (50, 850)


def test_the_one_nearer_to_its_goal_gets_more() -> None:
    budget = SharedBudget(1000, 100, goals_s=(1.0, 10.0), rate=1.0, floor=0.1)
    assert budget.divide(0, ServiceDemand(5000, 1.0), ServiceDemand(5000, 10.0)) == (500, 500)
    assert budget.divide(0, ServiceDemand(5000, 0.5), ServiceDemand(5000, 15.0)) == (250, 750)
    assert budget.divide(0, ServiceDemand(5000, 100.0), ServiceDemand(5000, 0.0)) == (900, 100)


def test_the_share_moves_by_a_part_in_each_step() -> None:
    budget = SharedBudget(1000, 100, rate=0.5)
    shares = []
    for _ in range(3):
        budget.divide(0, ServiceDemand(9999, 0.0), ServiceDemand(9999, 5.0))
        shares.append(round(budget.share, 3))
    assert shares == [0.7, 0.8, 0.85]


def test_a_share_below_a_token_is_saved_up() -> None:
    budget = SharedBudget(65, 100, rate=1.0, floor=0.1)
    got = [budget.divide(64, ServiceDemand(99, 100.0), ServiceDemand(99, 0.0)) for _ in range(20)]
    assert got.count((0, 1)) == 2
    assert got.count((1, 0)) == 18


@given(
    decodes=st.integers(0, 300),
    prompts=st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 100)), min_size=1, max_size=10),
    texts=st.tuples(st.integers(0, 3000), st.floats(0, 100)),
    static=st.one_of(st.none(), st.floats(0.01, 0.99)),
)
def test_no_step_exceeds_its_tokens(
    decodes: int, prompts: list[tuple[int, float]], texts: tuple[int, float], static: float | None
) -> None:
    budget = SharedBudget(256, 100, static=static)
    for number, oldest_s in prompts:
        prompt, text = budget.divide(decodes, ServiceDemand(number, oldest_s), ServiceDemand(*texts))
        assert 0 <= prompt <= number and 0 <= text <= texts[0]
        room = max(0, 256 - decodes)
        assert prompt + text <= room
        if static is None:
            assert prompt + text == min(room, number + texts[0])


def test_blocks_that_an_older_request_waits_for_stay_free() -> None:
    budget = SharedBudget(1000, 100)
    assert budget.free_blocks(10, 20, 0, is_text=True) == 70
    assert budget.free_blocks(10, 20, 50, is_text=True) == 20
    static = SharedBudget(1000, 100, static=0.25)
    assert static.free_blocks(10, 20, 50, is_text=True) == 15
    assert static.free_blocks(10, 20, 50, is_text=False) == 65


@pytest.mark.parametrize("values", [{"floor": 0.6}, {"rate": 0.0}, {"goals_s": (0.0, 1.0)}, {"static": 1.0}])
def test_options_that_cannot_be(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="between|positive"):
        SharedBudget(1000, 100, **values)  # type: ignore[arg-type]
