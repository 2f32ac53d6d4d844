"""Miss attribution seen from an engine: why blocks of prompts had to be computed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.blocks import cdiv
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.prefix_cache import MissCounts, TenantReuse
from sagellm.core.types import Namespace, RequestOutput, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import TENANT_A, TENANT_B, fake_engine, request, run_all
from tests.engines.kv_scenes import FILLER, INDEXES, OLD, YOUNG, Preempt, resident, serve, small_engine


def misses(engine: Engine) -> dict[str, int]:
    """By cause, without those that did not occur."""
    found = engine.stats().misses
    assert found is not None
    return {cause: count for cause, count in found._asdict().items() if count}


def counting(**options: Any) -> Engine:
    return small_engine(miss_attribution=True, **options)


def test_nobody_counts_unasked() -> None:
    assert small_engine().stats().misses is None
    assert counting().stats().misses == MissCounts()


@pytest.mark.parametrize(("after_s", "cause"), [(0.0, "premature"), (59.0, "premature"), (61.0, "capacity")])
@pytest.mark.parametrize("index", INDEXES)
def test_what_was_evicted_is_missed(index: str, after_s: float, cause: str) -> None:
    engine = counting(index=index)
    serve(engine, request("old", OLD, 1), request("young", YOUNG, 1), request("filler", FILLER, 1))
    assert misses(engine) == {"cold": 15}
    assert isinstance(engine.clock, ManualClock)
    engine.clock.advance(after_s)
    serve(engine, request("again", OLD, 1))
    assert misses(engine) == {"cold": 15, cause: 4}


def test_what_another_namespace_holds_is_no_cold_miss() -> None:
    engine = counting(num_blocks=20)
    serve(engine, request("a", OLD, 1, namespace=TENANT_A), request("b", OLD, 1, namespace=TENANT_B))
    assert misses(engine) == {"cold": 4, "namespace": 4}


def test_what_went_for_anothers_share_is_missed_for_its_quota() -> None:
    engine = counting(num_blocks=16, tenant_shares={"a": {"guaranteed": 0.5}})
    for number in range(3):
        start = 20 * number
        serve(engine, request(f"b{number}", range(start, start + 17), 1, namespace=TENANT_B))
    serve(engine, request("a", range(64, 93), 1, namespace=TENANT_A))
    evicted = [prompt for prompt in (OLD, YOUNG) if resident(engine, prompt, TENANT_B) < 4]
    serve(engine, *(request(f"again{p[0]}", p, 1, namespace=TENANT_B) for p in evicted))
    assert evicted == [OLD]
    assert misses(engine) == {"cold": 12 + 7, "quota": 4}


def test_what_a_preempted_request_lost_is_missed_for_its_preemption() -> None:
    passes = [Preempt("victim", 19), PrefixCacheAwarePass(), PriorityBasedPass()]
    engine = counting(passes=passes)
    engine.add(request("victim", OLD, 8))
    engine.step()
    engine.add(request("urgent", range(60, 95), 8, priority=9))
    run_all(engine)
    assert engine.stats().num_preemptions == 1
    grown = cdiv(35 + 8, 4)
    assert misses(engine) == {"cold": 4 + 8, "preemption": grown - (12 - 4)}


@pytest.mark.parametrize("index", INDEXES)
def test_what_one_request_computes_for_another_of_its_step_is_missed_once(index: str) -> None:
    engine = counting(index=index, index_as_computed=True, passes=strategies.make("vllm-like"))
    for name in ("first", "second"):
        engine.add(request(name, OLD, 1))
    run_all(engine)
    assert misses(engine) == {"cold": 4}


@settings(max_examples=60)
@given(
    prompts=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=15
    ),
    seconds=st.sampled_from([0.0, 7.0, 40.0]),
    index=st.sampled_from(INDEXES),
)
def test_each_block_is_found_or_missed_for_one_cause(
    prompts: list[tuple[str, int, int]], seconds: float, index: str
) -> None:
    engine = counting(index=index)
    assert isinstance(engine.clock, ManualClock)
    total = found = 0
    for number, (tenant, start, length) in enumerate(prompts):
        length += length % 4 == 0  # the last token is computed always: no whole block is
        engine.clock.advance(seconds)
        tokens = range(10 * start, 10 * start + length)
        engine.add(request(str(number), tokens, 1, namespace=Namespace(tenant=tenant)))
        [output] = engine.step()
        total += length // 4
        found += output.num_cached_tokens // 4
    assert sum(misses(engine).values()) == total - found


def outputs(engine: Engine) -> list[RequestOutput]:
    found: list[RequestOutput] = []
    while engine.has_work():
        found += engine.step()
    return found


@pytest.mark.parametrize("index", INDEXES)
def test_each_request_hears_why_its_blocks_were_computed(index: str) -> None:
    engine = counting(index=index)
    serve(engine, request("old", OLD, 1), request("young", YOUNG, 1), request("filler", FILLER, 1))
    engine.add(request("again", OLD, 3))
    first, middle, last = outputs(engine)
    assert first.misses == last.misses == MissCounts(premature=4)
    assert middle.misses is None
    engine.add(request("last", [*OLD[:8], *FILLER[:8], 1], 1))
    [output] = outputs(engine)
    assert output.misses == MissCounts(cold=2)


def test_no_request_hears_of_misses_that_are_not_attributed() -> None:
    engine = small_engine()
    engine.add(request("r", OLD, 1))
    [output] = outputs(engine)
    assert output.misses is None


def test_what_a_request_lost_by_preemption_is_added_to_its_misses() -> None:
    engine = counting(passes=[Preempt("victim", 19), PrefixCacheAwarePass(), PriorityBasedPass()])
    engine.add(request("victim", OLD, 8))
    engine.step()
    engine.add(request("urgent", range(60, 95), 8, priority=9))
    last = {output.request_id: output for output in outputs(engine) if output.finish_reason}
    assert last["victim"].misses == MissCounts(cold=4, preemption=3)
    assert last["urgent"].misses == MissCounts(cold=8)


def test_the_time_in_the_queue_is_in_the_first_output_and_the_last() -> None:
    engine = fake_engine(TokenMemoryBackend(max_num_seqs=1))
    assert isinstance(engine.clock, ManualClock)
    for name in ("first", "second"):
        engine.add(request(name, OLD, 3, arrival_s=engine.clock.now()))
    found: list[RequestOutput] = []
    while engine.has_work():
        found += engine.step()
        engine.clock.advance(2.0)
    assert [output.queued_s for output in found if output.request_id == "first"] == [0.0, None, 0.0]
    assert [output.queued_s for output in found if output.request_id == "second"] == [6.0, None, 6.0]


# -- diagnostics


def test_evictions_are_counted_by_cause() -> None:
    engine = small_engine(num_blocks=16, tenant_shares={"a": {"guaranteed": 0.5}})
    assert engine.diagnostics().evicted_blocks == {}
    for number in range(3):
        start = 20 * number
        serve(engine, request(f"b{number}", range(start, start + 17), 1, namespace=TENANT_B))
    serve(engine, request("a", range(64, 93), 1, namespace=TENANT_A))
    evicted = engine.diagnostics().evicted_blocks
    assert evicted == {"quota": 12 + 8 - 16}
    num_cached = engine.stats().blocks_cached
    engine.clear_cache()
    assert engine.diagnostics().evicted_blocks == {**evicted, "cleared": num_cached}
    serve(
        other := small_engine(), request("old", OLD, 1), request("young", YOUNG, 1), request("f", FILLER, 1)
    )
    assert other.diagnostics().evicted_blocks == {"capacity": 15 + 1 - 12}


def test_diagnostics_know_pins_fragmentation_passes_and_tenants() -> None:
    engine = small_engine(num_blocks=20, sharing_groups={"team": ["a"]})
    engine.add(request("a", OLD, 4, namespace=TENANT_A))
    engine.step()
    assert engine.diagnostics().internal_fragmentation == 1 - 17 / 20
    run_all(engine)
    serve(engine, request("again", OLD, 1, namespace=TENANT_A), request("b", OLD, 1, namespace=TENANT_B))
    serve(engine, request("nobody", OLD, 1))
    tokens = Tokens(OLD)
    holds = [engine.pin_prefix(tokens, engine_namespace) for engine_namespace in (TENANT_A, TENANT_A)]
    assert [(hold.num_tokens, hold.num_blocks) for hold in holds] == [(16, 4), (16, 4)]
    found = engine.diagnostics()
    assert (found.num_pinned_prefixes, found.num_pinned_blocks) == (2, 4)
    assert found.reuse_by_tenant == {
        "a": TenantReuse(34, 16), "(other)": TenantReuse(17, 0), "(none)": TenantReuse(17, 0)
    }  # fmt: skip
    assert {"prefix_cache_aware", "priority_based", "chunked_prefill"} <= found.pass_time_s.keys()
    holds[0]()
    holds[1].release()
    assert engine.diagnostics().num_pinned_prefixes == 0
    with pytest.raises(BookkeepingError):
        holds[0]()


def test_made_up_tenants_cost_no_memory() -> None:
    engine = small_engine()
    for number in range(50):
        serve(engine, request(str(number), OLD, 1, namespace=Namespace(tenant=f"made up {number}")))
    assert engine.diagnostics().reuse_by_tenant == {"(other)": TenantReuse(50 * 17, 0)}
