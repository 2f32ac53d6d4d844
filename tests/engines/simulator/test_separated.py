"""The price of a decode step whose attention and FFN are on different devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.cost_model import CostModel, StepShape
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.models import MODELS, model
from sagellm.engines.simulator.separated import SeparatedCost, turns_s, whole_cost

SECONDS = st.floats(1e-6, 1.0)


def event_by_event(
    num_layers: int, num_micro_batches: int, attention_s: float, ffn_s: float, transfer_s: float
) -> float:
    """The slow twin of `turns_s`."""
    stages = (attention_s, transfer_s, ffn_s, transfer_s)
    free_s, ready_s = [0.0] * 4, [0.0] * num_micro_batches
    for _ in range(num_layers):
        for batch in range(num_micro_batches):
            for stage, duration_s in enumerate(stages):
                ready_s[batch] = free_s[stage] = max(ready_s[batch], free_s[stage]) + duration_s
    return max(ready_s)


@given(st.integers(1, 12), st.integers(1, 6), SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_turns_as_event_by_event(
    num_layers: int, num_micro_batches: int, attention_s: float, ffn_s: float, transfer_s: float
) -> None:
    case = (num_layers, num_micro_batches, attention_s, ffn_s, transfer_s)
    assert turns_s(*case) == pytest.approx(event_by_event(*case), rel=1e-9)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("rows", [1, 64, 700])
def test_without_network_and_turns_it_is_the_price_of_one_device(name: str, rows: int) -> None:
    """One device of each side, one after the other, with no time between them."""
    shape, h100 = model(name), replace(device("h100-80g"), network=1e30)
    whole = CostModel(h100, shape)
    separated = SeparatedCost(shape, h100, h100, num_micro_batches=1, latency_s=0.0)
    expected_s = whole.step_s(StepShape(rows, rows * 3000))
    assert separated.step_s(rows, 3000) == pytest.approx(expected_s, rel=1e-9)
    assert whole_cost(whole, rows, 3000) == pytest.approx(expected_s, rel=1e-9)


def test_shared_experts_as_data_parallel_groups() -> None:
    shape = model("qwen3-30b-a3b")
    cost = CostModel(device("h100-80g"), shape, data_parallel=4)
    assert whole_cost(cost, 50, 2000) == pytest.approx(cost.step_s(StepShape(200, 400_000)), rel=1e-9)


def test_weights_of_the_sides_are_those_of_the_model() -> None:
    for shape in MODELS.values():
        h100 = device("h100-80g")
        one = SeparatedCost(shape, h100, h100)
        assert one.attention_weight_bytes + one.ffn_weight_bytes == shape.weight_bytes
        assert replace(one, num_ffn=4).ffn_weight_bytes == one.ffn_weight_bytes / 4


def test_turns_hide_the_shorter_side() -> None:
    assert turns_s(100, 1, 1.0, 1.0, 0.0) == 200.0
    assert turns_s(100, 2, 0.5, 0.5, 0.0) == 100.5
    assert turns_s(100, 3, 0.3, 0.3, 0.1) == pytest.approx(100 * 0.9 + 0.5, rel=0.01)


def test_what_is_no_separation_is_refused() -> None:
    h100 = device("h100-80g")
    with pytest.raises(ConfigError, match="at least 1 device of each side"):
        SeparatedCost(model("llama-3.1-8b"), h100, h100, num_ffn=0)
    with pytest.raises(ConfigError, match="does not divide the 32 heads"):
        SeparatedCost(model("llama-3.1-8b"), h100, h100, tensor_parallel=5)
