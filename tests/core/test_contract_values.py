"""The values that the contracts of later modules speak in: ranges, orderings and small sums."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import KVDataError
from sagellm.core.protocols.kv_tiers import BlockFormat
from sagellm.core.protocols.overlap import OverlapSchedule, Slot, Task
from sagellm.core.protocols.quantization import QuantizationProfile, QuantTarget
from sagellm.core.protocols.sparsity import SparseLayer, SparseModel, SparsityPattern
from sagellm.core.protocols.speculative import Proposal, SpeculativeResult
from sagellm.core.protocols.topology import Confidence, Device, DeviceKind, Link, LinkKind, TopologyInfo
from sagellm.core.types import KVCacheSchema, KVGroup

MODULES = [
    *("prefix_cache", "kv_pool", "eviction", "scheduler_ir", "lifetime"),
    *("topology", "collectives", "kv_transfer", "overlap", "interconnect"),
    *("quantization", "sparsity", "speculative", "fusion", "cot"),
    *("engine", "router", "tokenizer"),
]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_contract_that_explains_itself(module: str) -> None:
    contract = import_module(f"sagellm.core.protocols.{module}")
    own = [
        value
        for value in vars(contract).values()
        if inspect.isclass(value) and value.__module__ == contract.__name__
    ]
    assert contract.__doc__
    assert any(getattr(value, "_is_protocol", False) for value in own)


def link(source: str, target: str, bandwidth: float = 1e9, latency: float = 1e-6) -> Link:
    return Link(source, target, LinkKind.PIX, bandwidth, latency, "test", Confidence.ASSUMED)


def test_a_link_costs_latency_and_bytes() -> None:
    assert link("a", "b", 1e6, 0.5).transfer_s(2_000_000) == pytest.approx(2.5)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1e-9)])
def test_an_impossible_link_is_refused(bandwidth: float, latency: float) -> None:
    with pytest.raises(ValueError, match="a -> b"):
        link("a", "b", bandwidth, latency)


def test_a_topology_has_one_link_for_each_direction() -> None:
    devices = (Device("a", DeviceKind.CPU), Device("b", DeviceKind.GPU))
    info = TopologyInfo(devices, (link("a", "b", 2.0), link("b", "a", 3.0)))
    found = info.link("a", "b")
    assert found is not None
    assert found.bandwidth_bytes_per_s == 2.0
    assert info.link("b", "b") is None
    with pytest.raises(ValueError, match="two links in one direction"):
        TopologyInfo(devices, (link("a", "b", 1.0), link("a", "b", 2.0)))
    with pytest.raises(ValueError, match="names c"):
        TopologyInfo(devices, (link("a", "c"),))
    with pytest.raises(ValueError, match="no device 'c': there are a, b"):
        info.device("c")


def test_nan_is_no_bandwidth() -> None:
    with pytest.raises(ValueError, match="a -> b"):
        link("a", "b", float("nan"))


def test_a_task_does_not_wait_for_itself_and_lasts() -> None:
    with pytest.raises(ValueError, match="waits for itself"):
        Task("a", "gpu", 1.0, frozenset({"a"}))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="duration_s"):
            Task("a", "gpu", wrong)


def test_hidden_fraction_counts_time_under_computation() -> None:
    slots = (
        Slot(Task("c1", "gpu", 2.0), 0.0),
        Slot(Task("c2", "gpu", 2.0), 3.0),
        Slot(Task("send", "net", 4.0), 1.0),
    )
    schedule = OverlapSchedule(slots, frozenset({"send"}))
    assert (schedule.makespan_s, schedule.serial_s) == (5.0, 8.0)
    assert schedule.hidden_fraction == pytest.approx(3.0 / 4.0)
    assert OverlapSchedule(slots).hidden_fraction == 1.0
    assert schedule.idle_shares == {"gpu": pytest.approx(0.2), "net": pytest.approx(0.2)}


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100), st.floats(0, 10)), max_size=12))
def test_the_hidden_fraction_is_that_of_counted_moments(slots: list[tuple[bool, float, float]]) -> None:
    """The slow twin: at every border of a slot, is something of each kind running behind it?"""
    placed = tuple(
        Slot(Task(str(i), f"lane {i}", duration), start) for i, (_, start, duration) in enumerate(slots)
    )
    comm = frozenset(str(i) for i, (is_comm, *_) in enumerate(slots) if is_comm)
    borders = sorted({moment for slot in placed for moment in (slot.start_s, slot.end_s)})
    seconds = [0.0, 0.0, 0.0]  # of computation, of communication, of both
    for begin, end in pairwise(borders):
        kinds = {slot.task.name in comm for slot in placed if slot.start_s <= begin and slot.end_s >= end}
        for i, counts in enumerate((False in kinds, True in kinds, len(kinds) == 2)):
            seconds[i] += (end - begin) * counts
    hidden = seconds[2] / min(seconds[:2]) if min(seconds[:2]) else 1.0
    assert OverlapSchedule(placed, comm).hidden_fraction == pytest.approx(hidden, abs=1e-6)


@pytest.mark.parametrize(("bits", "group_size"), [(0, None), (17, None), (4, 0)])
def test_a_profile_has_possible_sizes(bits: int, group_size: int | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        QuantizationProfile(QuantTarget.WEIGHTS, bits, group_size)


def test_fixed_patterns_have_one_ratio() -> None:
    ratios = {pattern.value: pattern.fixed_ratio for pattern in SparsityPattern}
    assert ratios == {"2:4": 0.5, "4:8": 0.5, "block": None, "unstructured": None}


def test_the_ratio_of_a_model_is_the_mean_over_layers() -> None:
    layers = (SparseLayer("a", 0.2, 0.0), SparseLayer("b", 0.4, 0.0))
    assert SparseModel(None, SparsityPattern.BLOCK, layers, accelerated=False).ratio == pytest.approx(0.3)
    assert SparseModel(None, SparsityPattern.BLOCK, (), accelerated=False).ratio == 0.0


def test_a_proposal_has_a_probability_per_token_or_none() -> None:
    assert Proposal((1, 2)).probabilities == ()
    with pytest.raises(ValueError, match="2 tokens with 1 probabilities"):
        Proposal((1, 2), (0.5,))
    with pytest.raises(ValueError, match="2 tokens with 3 estimates"):
        Proposal((1, 2), acceptance=(0.5, 0.5, 0.5))


def test_acceptance_rate_without_proposals_is_zero() -> None:
    assert SpeculativeResult((1,), 1, 0, 0).acceptance_rate == 0.0
    assert SpeculativeResult((1,), 1, 8, 6).acceptance_rate == 0.75


SCHEMA = KVCacheSchema(3, 2, 64, "bfloat16", 16, "blocks first", "weights and tokenizer")
OTHER: dict[str, Any] = {
    "num_layers": 4, "num_kv_heads": 4, "head_dim": 128, "dtype": "float16", "block_size": 32,
    "layout": "heads first", "model_fingerprint": "other weights", "groups": (KVGroup((0, 1, 2), None),),
    "values_in_keys": True, "state_bytes": 8, "layer_shapes": ((2, 64), (2, 64), (1, 128)),
}  # fmt: skip


def test_equal_schemas_have_one_block_format() -> None:
    assert BlockFormat.of(SCHEMA, 4096) == BlockFormat.of(replace(SCHEMA), 4096)
    assert BlockFormat.of(SCHEMA, 4096).digest != BlockFormat.of(SCHEMA, 8192).digest


@pytest.mark.parametrize("name", [each.name for each in fields(KVCacheSchema)])
def test_each_field_of_a_schema_makes_another_block_format(name: str) -> None:
    other = replace(SCHEMA, **{name: OTHER[name]})
    assert BlockFormat.of(other, 4096).digest != BlockFormat.of(SCHEMA, 4096).digest


def test_kv_of_a_model_without_a_fingerprint_has_no_format() -> None:
    with pytest.raises(KVDataError, match="no fingerprint"):
        BlockFormat.of(replace(SCHEMA, model_fingerprint=""), 4096)
