"""What it costs to get KV back, and what the cost-benefit policy and its migration make of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import Extent, SimpleExtent
from sagellm.kvmgr.eviction.cost_benefit import CostBenefitPolicy
from sagellm.kvmgr.eviction.cost_model import PrefillCostModel

SLOW_PREFILL = PrefillCostModel(
    block_size=10,
    bytes_per_block=1_000,
    seconds_per_token=1.0,
    seconds_per_token_squared=0.1,
    bandwidths={"here": math.inf, "dram": 100.0, "nvme": 10.0},
    latencies_s={"nvme": 5.0},
)


def first_gone(policy: CostBenefitPolicy, *runs: SimpleExtent) -> int:
    for run in runs:
        policy.insert(run)
    gone: list[int] = []
    policy.evict(1, lambda run, count: gone.append(run.key))
    return gone[0]


def test_recompute_sums_over_tokens() -> None:
    run = SimpleExtent(0, num_blocks=2, first_position=3)
    by_token = sum(1.0 + 0.1 * position for position in range(30, 50))
    assert SLOW_PREFILL.recompute_s(run) == pytest.approx(by_token)


def test_transfer_is_latency_and_bytes_over_bandwidth() -> None:
    run = SimpleExtent(0, num_blocks=2)
    assert SLOW_PREFILL.transfer_s(run, "dram") == pytest.approx(20.0)
    assert SLOW_PREFILL.transfer_s(run, "nvme") == pytest.approx(205.0)
    assert SLOW_PREFILL.transfer_s(run, "here") == 0.0
    with pytest.raises(ConfigError, match="known tiers: dram, here, nvme"):
        SLOW_PREFILL.transfer_s(run, "tape")


def test_a_model_of_a_model() -> None:
    model = PrefillCostModel.of_model(1e9, 10, 1_000, 1e12, block_size=1)
    assert model.recompute_s(SimpleExtent(0, 1)) == pytest.approx(2e-3)
    assert model.recompute_s(SimpleExtent(0, 1, first_position=1_000)) == pytest.approx(2e-3 + 4e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"seconds_per_token": -1.0},
        {"seconds_per_token": 0.0, "seconds_per_token_squared": 0.0},
        {"bandwidths": {"dram": 0.0}},
    ],
)
def test_impossible_costs_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrefillCostModel(**wrong)


def test_the_deeper_block_costs_more_and_stays() -> None:
    policy = CostBenefitPolicy(model=SLOW_PREFILL)
    assert (
        first_gone(policy, SimpleExtent(1, first_position=9), SimpleExtent(2, first_position=0, last_use=1))
        == 2
    )


def test_use_outweighs_depth() -> None:
    policy = CostBenefitPolicy(model=SLOW_PREFILL)
    assert first_gone(policy, SimpleExtent(1, first_position=1), SimpleExtent(2, num_uses=5, last_use=1)) == 1


def test_what_a_tier_holds_is_cheap_to_lose() -> None:
    def copies(extent: Extent) -> list[str]:
        return ["here"] if extent.key == 1 else []

    policy = CostBenefitPolicy(model=SLOW_PREFILL, copies=copies)
    assert first_gone(policy, SimpleExtent(2), SimpleExtent(1, first_position=9)) == 1


def test_cost_per_block_does_not_depend_on_length_without_attention() -> None:
    linear = PrefillCostModel(seconds_per_token_squared=0.0)
    policy = CostBenefitPolicy(model=linear)
    assert first_gone(policy, SimpleExtent(1, 8, last_use=0), SimpleExtent(2, 1, last_use=1)) == 1


def test_an_extent_that_went_in_parts_leaves_its_parent_in_place() -> None:
    policy = CostBenefitPolicy(model=SLOW_PREFILL)
    parent = SimpleExtent(0, 2)
    policy.insert(SimpleExtent(1, 3, parent=parent, first_position=2))

    def give_up(run: SimpleExtent, num_blocks: int) -> SimpleExtent | None:
        run.num_blocks -= num_blocks
        return run.parent if not run.num_blocks else None

    assert [policy.evict(1, give_up) for _ in range(6)] == [1, 1, 1, 1, 1, 0]
    policy.check()
