"""The cost model: against figures computed by hand, monotone, and the same for one step and for many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.cost_model import Coefficients, CostModel, StepShape
from sagellm.engines.simulator.devices import DeviceSpec
from sagellm.engines.simulator.models import MODELS, ModelShape

DEVICE = DeviceSpec(
    "bench",
    memory_bytes=10**9,
    bandwidth=1e6,
    flops={"bfloat16": 1e9},
    pcie=1e5,
    link=1e6,
    network=1e4,
    source="made up",
    nvme=1e3,
    link_latency_s=0.0,
)
MODEL = ModelShape("small", 2, 8, 16, 2, 1, 4, 10)
LINEAR = 2 * (2 * 8 * 4 * (2 + 1) + 3 * 8 * 16)
"""Weights of two layers: query and output, key and value, three matrices of the MLP."""
HEAD = 10 * 8
KV_BYTES = 2 * 2 * 1 * 4 * 2
IDEAL = Coefficients(
    weight_bandwidth=1.0,
    kv_bandwidth=1.0,
    compute=1.0,
    chunk_attention=1.0,
    overlap=60.0,
    step_s=0.0,
    chunk_step_s=0.0,
    row_s=0.0,
    expert_bandwidth=1.0,
    expert_compute=1.0,
    expert_row_s=0.0,
    link_bandwidth=1.0,
)


def ideal(**changes: float) -> CostModel:
    return CostModel(DEVICE, MODEL, replace(IDEAL, **changes))


def test_one_decode_reads_the_weights_and_its_kv() -> None:
    expected_s = (2 * (LINEAR + HEAD) + 7 * KV_BYTES) / 1e6
    assert ideal().step_s(StepShape(1, 7)) == pytest.approx(expected_s, rel=1e-9)


def test_a_long_prompt_multiplies() -> None:
    tokens, rows = 4096, 1
    linear_s = 2 * (LINEAR * tokens + HEAD * rows) / 1e9
    pairs = tokens * (tokens + 1) // 2
    attention_s = max(4 * 2 * 2 * 4 * pairs / 1e9, tokens * KV_BYTES / 1e6)
    assert ideal().step_s(StepShape(prefills=((0, tokens),))) == pytest.approx(
        linear_s + attention_s, rel=1e-9
    )


def test_a_chunk_in_the_middle_attends_to_what_came_before() -> None:
    early, late = (ideal().step_s(StepShape(prefills=((start, 2048),))) for start in (0, 6400))
    assert late - early == pytest.approx(4 * 2 * 2 * 4 * 2048 * 6400 / 1e9, rel=1e-9)


def test_a_short_chunk_far_behind_reads_more_than_it_multiplies() -> None:
    early, late = (ideal().step_s(StepShape(prefills=((start, 8),))) for start in (0, 6400))
    assert late - early == pytest.approx(6400 * KV_BYTES / 1e6, rel=1e-9)


def test_two_short_chunks_cost_less_attention_than_a_long_one() -> None:
    one = ideal().step_s(StepShape(prefills=((0, 2048),)))
    two = ideal().step_s(StepShape(prefills=((0, 1024), (0, 1024))))
    assert two < one


def test_without_overlap_reading_and_multiplying_add_up() -> None:
    read_s, multiply_s = 2 * (LINEAR + HEAD) / 1e6, 2 * (LINEAR + HEAD) * 4 / 1e9
    model = ideal(overlap=1.0)
    assert model.step_s(StepShape(4)) == pytest.approx(read_s + multiply_s, rel=1e-9)


def test_overheads_are_by_step_by_row_and_for_chunks() -> None:
    model = ideal(step_s=1.0, chunk_step_s=10.0, row_s=100.0)
    decode = model.step_s(StepShape(2, 4)) - ideal().step_s(StepShape(2, 4))
    mixed = StepShape(2, 4, ((0, 8),))
    assert decode == pytest.approx(201.0)
    assert model.step_s(mixed) - ideal().step_s(mixed) == pytest.approx(301.0 + 10.0 * 2 / 32)


def test_a_copy_reads_and_writes_memory() -> None:
    still, moving = StepShape(1, 1), StepShape(1, 1, (), 1000, 300)
    expected_s = 2 * 1000 / 1e6 + 300 / 1e4
    assert ideal().step_s(moving) - ideal().step_s(still) == pytest.approx(expected_s)


def test_experts_are_read_as_far_as_tokens_meet_them() -> None:
    dense = replace(MODEL, num_heads=2)
    sparse = replace(dense, num_experts=8, experts_per_token=2, intermediate_size=4)
    router = 2 * 8 * 8
    expert = 2 * 3 * 8 * 4
    always = LINEAR - 2 * 3 * 8 * 16 + router
    model = CostModel(DEVICE, sparse, IDEAL)
    assert model.step_s(StepShape(1)) == pytest.approx(2 * (always + HEAD + 2 * expert) / 1e6, rel=1e-9)
    met = 8 * (1 - (1 - 2 / 8) ** 5)
    assert model.step_s(StepShape(5)) == pytest.approx(2 * (always + HEAD + met * expert) / 1e6, rel=1e-9)


def test_tensor_parallel_shares_the_work_and_pays_for_talking() -> None:
    wide = replace(MODEL, num_heads=4, num_kv_heads=2)
    alone = CostModel(DEVICE, wide, IDEAL).step_s(StepShape(1, 1000))
    shared = CostModel(DEVICE, wide, IDEAL, tensor_parallel=2).step_s(StepShape(1, 1000))
    talk_s = 2 * 2 * (2 * 1 / 2 * 8 * 2) / 1e6
    assert shared == pytest.approx(alone / 2 + talk_s, rel=1e-9)
    with pytest.raises(ConfigError, match="tensor_parallel 3 does not divide the 4 heads"):
        CostModel(DEVICE, wide, IDEAL, tensor_parallel=3)


def test_data_parallel_groups_share_experts_and_exchange_tokens() -> None:
    sparse = replace(MODEL, num_experts=8, experts_per_token=2, intermediate_size=4)
    always, expert = LINEAR - 2 * 3 * 8 * 16 + 2 * 8 * 8, 2 * 3 * 8 * 4
    model = CostModel(DEVICE, sparse, IDEAL, data_parallel=2)
    met = 8 * (1 - (1 - 2 / 8) ** 6)
    read_s = (2 * (always + HEAD + met * expert / 2) + 300 / 2 * KV_BYTES) / 1e6
    talk_s = 2 * 2 * (1 / 2 * 8 * 2 * 6) / 1e6  # all tokens' hidden states out and back, in each layer
    assert model.step_s(StepShape(6, 300)) == pytest.approx(read_s + talk_s, rel=1e-6)
    steps = model.decode_steps_s(StepShape(6, 300), 2).tolist()
    assert steps == [model.step_s(StepShape(6, 300)), model.step_s(StepShape(6, 306))]


def test_a_step_is_as_long_as_that_of_the_group_with_most_to_do() -> None:
    sparse = replace(MODEL, num_experts=8, experts_per_token=2)
    model = CostModel(DEVICE, sparse, IDEAL, data_parallel=2)
    assert model.columns(StepShape(4, 100, ((0, 30), (0, 20), (10, 10))))[:5] == (2.0, 50.0, 30.0, 2.0, 40.0)
    even = model.step_s(StepShape(prefills=((0, 512), (0, 512))))
    assert model.step_s(StepShape(prefills=((0, 1024),))) > 1.3 * even


def test_a_dense_model_has_no_experts_to_share() -> None:
    with pytest.raises(ConfigError, match="has no experts to share; simulate several instances"):
        CostModel(DEVICE, MODEL, IDEAL, data_parallel=2)


def test_collectives_cost_latency_and_bytes_of_the_link() -> None:
    wide = replace(MODEL, num_heads=4, num_kv_heads=2)
    slow = CostModel(replace(DEVICE, link_latency_s=1e-3), wide, IDEAL, tensor_parallel=2)
    fast = CostModel(DEVICE, wide, IDEAL, tensor_parallel=2)
    assert slow.step_s(StepShape(1, 1)) - fast.step_s(StepShape(1, 1)) == pytest.approx(2 * 2 * 1e-3)
    half = replace(fast, coefficients=replace(IDEAL, link_bandwidth=0.5))
    assert half.step_s(StepShape(8, 8)) - fast.step_s(StepShape(8, 8)) == pytest.approx(2 * 2 * 8 * 16 / 1e6)


coefficients = st.builds(
    Coefficients,
    weight_bandwidth=st.floats(0.1, 1.0),
    kv_bandwidth=st.floats(0.1, 1.0),
    compute=st.floats(0.1, 1.0),
    chunk_attention=st.floats(0.1, 1.0),
    overlap=st.floats(1.0, 8.0),
    step_s=st.floats(0.0, 0.01),
    chunk_step_s=st.floats(0.0, 0.01),
    row_s=st.floats(0.0, 1e-4),
)
real_models = st.sampled_from([MODELS["llama-3.1-8b"], MODELS["qwen3-30b-a3b"], MODELS["qwen3-0.6b"]])


@given(
    coefficients,
    real_models,
    st.integers(1, 512),
    st.integers(0, 10**6),
    st.integers(0, 4000),
    st.integers(1, 512),
)
def test_more_of_anything_never_costs_less(
    some: Coefficients, shape: ModelShape, decodes: int, context: int, start: int, tokens: int
) -> None:
    model = CostModel(DEVICE, shape, some)
    here = StepShape(decodes, context, ((start, tokens),))
    price = model.step_s(here)
    more = [
        here._replace(num_decodes=decodes + 1),
        here._replace(decode_context=context + 1),
        here._replace(prefills=((start, tokens + 1),)),
        here._replace(prefills=((start + 1, tokens),)),
        here._replace(prefills=((start, tokens), (0, 1))),
        here._replace(bytes_copied=1),
        here._replace(bytes_transferred=1),
    ]
    assert all(model.step_s(one) >= price * (1 - 1e-12) for one in more)
    assert model.step_s(StepShape(decodes, context)) < price


@given(coefficients, real_models, st.integers(1, 300), st.integers(0, 10**6), st.integers(1, 40))
def test_many_decode_steps_are_the_floats_of_single_ones(
    some: Coefficients, shape: ModelShape, decodes: int, context: int, k: int
) -> None:
    model = CostModel(DEVICE, shape, some)
    singly = [model.step_s(StepShape(decodes, context + i * decodes)) for i in range(k)]
    assert model.decode_steps_s(StepShape(decodes, context), k).tolist() == singly


def test_only_plain_decode_steps_are_priced_together() -> None:
    for shape in (
        StepShape(1, 1, ((0, 1),)),
        StepShape(1, 1, (), 1),
        StepShape(1, 1, (), 0, 1),
    ):
        with pytest.raises(ValueError, match="only steps that decode"):
            ideal().decode_steps_s(shape, 3)


@given(coefficients, real_models)
def test_arrays_are_priced_as_single_steps(some: Coefficients, shape: ModelShape) -> None:
    model = CostModel(DEVICE, shape, some)
    shapes = [StepShape(3, 50), StepShape(0, 0, ((10, 20),)), StepShape(2, 9, ((0, 5), (7, 3)))]
    rows = [[3, 50, 0, 0, 0, 0, 3], [0, 0, 20, 1, 30, 410, 20], [2, 9, 8, 2, 15, 15 + 27, 10]]
    assert [list(model.columns(one)) for one in shapes] == rows
    decodes, context, tokens, chunks, keys, pairs, all_tokens = np.array(rows, dtype=np.float64).T
    together = model.compute_s(decodes, context, tokens, chunks, keys, pairs, all_tokens)
    assert together == pytest.approx([model.step_s(one) for one in shapes], rel=1e-12)


def test_a_model_with_other_coefficients_forgets_old_prices() -> None:
    slow = ideal()
    before = slow.step_s(StepShape(3, 3))
    fast = replace(slow, coefficients=replace(IDEAL, weight_bandwidth=0.5))
    assert fast.step_s(StepShape(3, 3)) > before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speed": 1.0}, "no coefficient speed; they are weight_bandwidth"),
        ({"compute": 0.0}, "must be positive"),
        ({"step_s": -1.0}, "coefficient step_s: a number that is not negative"),
        ({"row_s": "fast"}, "coefficient row_s: a number"),
        ({"compute": float("nan")}, "coefficient compute: a number"),
        ({"overlap": 0.5}, "overlap: at least 1"),
    ],
)
def test_bad_coefficients_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Coefficients.of(values)


def test_coefficients_survive_being_written() -> None:
    some = Coefficients(compute=0.5)
    assert Coefficients.of(some.as_dict()) == some
