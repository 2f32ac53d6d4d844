"""What eviction policies weigh: a backend's prefill cost and block size, a request's goal and priority."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.config import Config, KVConfig
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.eviction import SimpleExtent, Use
from sagellm.core.types import SLO, CapabilityDescriptor, KVCacheSchema
from sagellm.engines.build import build_engine
from sagellm.engines.build_kv import build_kv, prefill_costs, replace_policy
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.eviction.slo import SLOPolicy
from tests.builders import fake_engine, request, run_all


class Measured(TokenMemoryBackend):
    """A backend that says what its prefill takes."""

    def capability(self) -> CapabilityDescriptor:
        schema = KVCacheSchema(2, 4, 8, "float16", 4, "tests")
        return replace(
            super().capability(),
            block_size=4,
            kv_schema=schema,
            prefill_token_s=3e-3,
            prefill_token_squared_s=2e-6,
        )


EXPECTED = PrefillCostModel(4, 2 * 2 * 4 * 8 * 2 * 4, 3e-3, 2e-6)


def policy_of(engine: Any) -> Any:
    return engine.kv.index._leaves.default_share.policy


@pytest.mark.parametrize("name", ["cost_benefit", "slo"])
def test_policies_get_the_backends_costs_and_the_configured_block_size(name: str) -> None:
    config = Config(kv=KVConfig(eviction=name, block_size=4))
    engine = build_engine(config, Measured(block_size=4), clock=ManualClock())
    assert policy_of(engine)._model == EXPECTED


def test_a_policy_that_is_swapped_in_gets_them_too() -> None:
    engine = build_engine(Config(kv=KVConfig(block_size=4)), Measured(block_size=4), clock=ManualClock())
    replace_policy(engine, "cost_benefit")
    assert policy_of(engine)._model == EXPECTED


def test_without_a_measurement_only_the_order_of_the_cost_is_assumed() -> None:
    capability = TokenMemoryBackend(block_size=8).capability()
    assert prefill_costs(capability).block_size == 8
    assert prefill_costs(capability).seconds_per_token == PrefillCostModel().seconds_per_token
    kv: Any = build_kv(KVConfig(eviction="slo", block_size=8), 10)
    assert kv.index._leaves.default_share.policy._model.block_size == 8


def test_the_cost_model_is_no_option_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="model is given by the engine"):
        build_kv(KVConfig(eviction="slo", eviction_options={"model": 1}), 10)


def test_a_request_hands_over_its_priority_and_its_goal() -> None:
    engine = fake_engine()
    engine.add(request("a", range(40), priority=7, slo=SLO(ttft_s=0.25)))
    run_all(engine)
    index: Any = engine.kv.index
    (leaf,) = [node for node in index.tree.nodes() if not node.children]
    assert (leaf.use.priority, leaf.use.ttft_slo_s) == (7, 0.25)
    assert leaf.use.num_prompt_blocks == 40 // index.block_size


def first_gone(*runs: SimpleExtent) -> int:
    clock = ManualClock()
    policy = SLOPolicy(clock=clock, model=PrefillCostModel(16, 1, 1e-3, 0.0), patience_s=60.0)
    for run in runs:
        policy.insert(run)
    gone: list[int] = []
    policy.evict(1, lambda run, count: gone.append(run.key))
    return gone[0]


def test_what_a_request_of_low_priority_left_goes_first() -> None:
    assert first_gone(SimpleExtent(1, used_s=0.0, use=Use(priority=1)), SimpleExtent(2, used_s=9.0)) == 2


def test_what_would_cost_a_tight_goal_stays() -> None:
    """Computing a block again takes 16 ms: 16 % of a goal of 0.1 s, which makes it look 9.6 s younger."""
    tight = SimpleExtent(1, used_s=0.0, use=Use(ttft_slo_s=0.1))
    assert first_gone(tight, SimpleExtent(2, used_s=5.0, last_use=1)) == 2
    assert first_gone(tight, SimpleExtent(2, used_s=12.0, last_use=1)) == 1
