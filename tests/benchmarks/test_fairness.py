"""The fairness experiment: its trace, its sums, its verdict, and the target itself."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from datetime import UTC, datetime

import pytest

from sagellm.benchmarks.fairness import (
    BASELINE,
    FORMAT,
    FairnessOutcome,
    TenantHits,
    as_json,
    as_table,
    run,
    served,
    tenants_trace,
)
from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.sweep import CacheCapacity
from sagellm.benchmarks.reporting import environment
from sagellm.benchmarks.traces.record import Trace, TraceRequest
from sagellm.benchmarks.traces.synth import synthesize
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.eviction import jain_index


def a_trace(*prompts: tuple[str, list[int]]) -> BlockTrace:
    """One request a second, each of a tenant with its block ids."""
    requests = tuple(
        TraceRequest(
            time_s=float(number),
            ids=Tokens(ids),
            namespace=Namespace(tenant=tenant),
            num_input_tokens=64 * len(ids),
            num_output_tokens=1,
            session=str(number),
            tenant=tenant,
        )
        for number, (tenant, ids) in enumerate(prompts)
    )
    return block_trace(Trace(name="tiny", format="synth", block_tokens=64, requests=requests))


TINY = (("a", [1, 2]), ("b", [1, 2]), ("a", [1, 2]), ("b", [1, 3]), ("a", [1, 2, 4]))


@pytest.fixture(scope="module")
def short() -> BlockTrace:
    """Ten minutes of another seed than the experiment's."""
    return block_trace(synthesize("tenants", seed=5, duration_s=600.0))


def outcome(
    *hits: int, policy: str = "fair", lost: float = 0.0, baseline_jain: float = 0.5
) -> FairnessOutcome:
    tenants = tuple(TenantHits(str(number), 1, 100, hit, 50) for number, hit in enumerate(hits))
    return FairnessOutcome(policy, CacheCapacity("9", 9), tenants, lost, baseline_jain)


def test_the_trace_is_of_three_tenants_at_8_1_1_with_nothing_in_common() -> None:
    trace = tenants_trace(0)
    counts = Counter(request.tenant for request in trace.requests)
    assert sorted(counts) == ["tenant-1", "tenant-2", "tenant-3"]
    for quiet in ("tenant-2", "tenant-3"):
        assert counts["tenant-1"] / counts[quiet] == pytest.approx(8, rel=0.2)
    contents = {name: set[int]() for name in counts}
    for request in trace.requests:
        assert request.namespace.tenant == request.tenant
        contents[request.tenant].update(request.ids)
    assert sum(map(len, contents.values())) == len(set().union(*contents.values())) == trace.num_unique
    assert tenants_trace(1).num_unique != trace.num_unique


def test_sums_are_by_tenant() -> None:
    trace = a_trace(*TINY)
    a, b = served(trace, [0, 0, 1, 1, 0])
    assert a == TenantHits("a", requests=3, blocks=7, hit_blocks=1, bound_blocks=4)
    assert b == TenantHits("b", requests=2, blocks=4, hit_blocks=1, bound_blocks=1)
    assert (a.hit_ratio, a.infinite_ratio, a.normalised) == (1 / 7, 4 / 7, 1 / 4)
    assert b.normalised == 1.0


def test_a_policy_is_judged_by_index_and_price_where_the_baseline_is_unfair() -> None:
    assert outcome(20, 20, 20).jain == 1.0
    assert outcome(30, 0, 0).jain == pytest.approx(1 / 3)
    assert outcome(30, 20, 10).hit_ratio == pytest.approx(0.2)
    assert outcome(30, 20, 20, lost=0.03).meets_target is True
    assert outcome(30, 20, 20, lost=0.031).meets_target is False
    assert outcome(30, 10, 10, lost=0.0).meets_target is False
    assert outcome(20, 20, 20, baseline_jain=0.7).meets_target is None
    assert outcome(20, 20, 20, policy=BASELINE).meets_target is None


def test_all_is_reused_where_all_has_room() -> None:
    [lru] = run(a_trace(*TINY), ["lru"], ["100%"])
    assert [one.normalised for one in lru.tenants] == [1.0, 1.0]
    assert (lru.jain, lru.lost, lru.hit_ratio) == (1.0, 0.0, 5 / 11)


def test_the_baseline_runs_first_and_once_at_each_capacity(short: BlockTrace) -> None:
    heard: list[str] = []
    outcomes = run(short, ["sieve", "lru"], ["2%", "40", "2%"], on_case=heard.append)
    cases = [(one.policy, one.capacity.text) for one in outcomes]
    assert cases == [("lru", "2%"), ("sieve", "2%"), ("lru", "40"), ("sieve", "40")]
    assert heard == ["lru at 2%", "sieve at 2%", "lru at 40", "sieve at 40"]
    for lru, sieve in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert sieve.lost == lru.hit_ratio - sieve.hit_ratio
        assert sieve.baseline_jain == lru.baseline_jain == lru.jain
        assert lru.jain == jain_index(one.hit_ratio / one.infinite_ratio for one in lru.tenants)
        assert lru.lost == 0.0


def test_qos_serves_tenants_more_alike_than_lru(short: BlockTrace) -> None:
    lru, qos = run(short, ["qos"], ["1%"])
    assert qos.jain > lru.jain
    assert min(one.normalised for one in qos.tenants) > min(one.normalised for one in lru.tenants)


def test_the_target_is_met_at_half_a_percent() -> None:
    """The seed was fixed before the first run; at 1 % and more the price is above the limit."""
    lru, qos = run(tenants_trace(0), ["qos"], ["0.5%"])
    assert lru.jain < 0.7
    assert qos.jain >= 0.9
    assert lru.hit_ratio - qos.hit_ratio <= 0.03
    assert qos.meets_target is True


def test_the_results_as_json_and_as_a_table(short: BlockTrace) -> None:
    outcomes = run(short, ["qos"], ["1%"])
    values = as_json(outcomes, short, environment(datetime.now(UTC)), {"seed": 5})
    assert values == json.loads(json.dumps(values, allow_nan=False))
    assert values["format"] == FORMAT
    assert values["trace"]["unique_blocks"] == short.num_unique
    lru, qos = values["outcomes"]
    assert (qos["policy"], qos["jain"], qos["lost"]) == ("qos", outcomes[1].jain, outcomes[1].lost)
    assert qos["capacity_blocks"] == round(short.num_unique / 100)
    for given, one in zip(lru["tenants"], outcomes[0].tenants, strict=True):
        assert given == dataclasses.asdict(one) | {
            "hit_ratio": one.hit_ratio,
            "infinite_ratio": one.infinite_ratio,
            "normalised": one.normalised,
        }
    shown = as_table(outcomes, "fairness")
    assert [*shown.columns[3:6]] == ["tenant-1", "tenant-2", "tenant-3"]
    assert len(shown.rows) == 2


def test_what_cannot_be_run_is_refused_before_anything_runs() -> None:
    trace, heard = a_trace(*TINY), list[str]()
    with pytest.raises(UnknownNameError, match="unknown policy 'nope'"):
        run(trace, ["qos", "nope"], ["2"], on_case=heard.append)
    with pytest.raises(ConfigError, match="capacity '0': write blocks from 1 on"):
        run(trace, ["qos"], ["2", "0"], on_case=heard.append)
    with pytest.raises(ConfigError, match="name at least one capacity"):
        run(trace, ["qos"], [], on_case=heard.append)
    with pytest.raises(ConfigError, match="no prompt of 'c' has a block that was there before"):
        run(a_trace(*TINY, ("c", [1])), ["qos"], ["2"], on_case=heard.append)
    assert not heard
