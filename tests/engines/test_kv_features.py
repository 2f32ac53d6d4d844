"""What the KV core can do, seen from an engine: forks, windows, quotas, compaction, pins, events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import CapacityError, ContextLengthError, RequestError
from sagellm.core.events import BlocksRemoved, BlocksStored, EventBus
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.types import Namespace, SamplingParams, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir.passes.vllm_like import VllmLikePass
from tests.builders import check_books, expected_tokens, fake_engine, request, run_all
from tests.scripted_engine import toy_tokenizer


def computed_tokens(engine: Engine) -> int:
    """Prompt tokens that are computed until nothing is left to do."""
    computed = 0
    while engine.has_work():
        engine.step()
        check_books(engine)
        assert engine.last_plan is not None
        computed += engine.last_plan.num_prefill_tokens
    return computed


@pytest.mark.parametrize("length", [21, 23, 24])
def test_a_group_shares_its_last_block_too(length: int) -> None:
    engine = fake_engine()
    for index in range(4):
        engine.add(request(f"r#{index}", range(length), 2, group="r"))
    assert computed_tokens(engine) == length + 3


@pytest.mark.parametrize("length", [23, 24])
def test_a_group_shares_its_last_block_after_blocks_were_shared_ahead_of_time(length: int) -> None:
    engine = fake_engine(passes=[VllmLikePass()], index_as_computed=True)
    engine.add(request("r#0", range(length), 9, group="r"))
    engine.add(request("other", [7], 1))  # the first is published before this one is admitted
    engine.step()
    for index in range(1, 4):
        engine.add(request(f"r#{index}", range(length), 2, group="r"))
    assert computed_tokens(engine) == 3


def test_a_fork_goes_on_with_the_kv_of_its_parent() -> None:
    backend = TokenMemoryBackend()
    engine = fake_engine(backend)
    engine.add(request("parent", range(10), 12))
    for _ in range(5):
        engine.step()
    engine.fork("parent", "child", SamplingParams(max_tokens=3))
    outputs = [output for output in engine.step() if output.request_id == "child"]
    assert [(out.num_prompt_tokens, out.num_cached_tokens) for out in outputs] == [(15, 14)]
    assert engine.last_plan is not None
    assert len(engine.last_plan.copies) == 1
    tokens = run_all(engine)
    parent = expected_tokens(backend, range(10), 12)
    child = [*outputs[0].new_token_ids, *tokens["child"]]
    assert child == expected_tokens(backend, [*range(10), *parent[:5]], 3) == parent[5:8]


def test_a_branch_begins_as_a_running_request_does_and_goes_its_own_way() -> None:
    backend = TokenMemoryBackend()
    engine = fake_engine(backend)
    engine.add(request("parent", range(10), 12))
    for _ in range(5):
        engine.step()
    parent = expected_tokens(backend, range(10), 12)
    engine.branch("parent", request("child", [*range(10), *parent[:4], 7], 3, group="probes"))
    outputs = [output for output in engine.step() if output.request_id == "child"]
    assert [(out.num_prompt_tokens, out.num_cached_tokens) for out in outputs] == [(15, 14)]
    tokens = run_all(engine)
    child = [*outputs[0].new_token_ids, *tokens["child"]]
    assert child == expected_tokens(backend, [*range(10), *parent[:4], 7], 3)
    engine.branch("parent", request("late", [*range(10), *parent[:4]], 3, group="probes"))  # it has ended
    assert run_all(engine)["late"] == parent[4:7]


def test_a_fork_of_nobody_is_refused() -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match="no request of that id is running"):
        engine.fork("nobody", "child")


def test_a_fork_whose_parent_leaves_before_it_runs_computes_the_rest() -> None:
    backend = TokenMemoryBackend()
    engine = fake_engine(backend)
    engine.add(request("parent", range(10), 12))
    for _ in range(5):
        engine.step()
    engine.fork("parent", "child", SamplingParams(max_tokens=3))
    engine.abort("parent")
    answer = run_all(engine)["child"]
    assert answer == expected_tokens(backend, [*range(10), *expected_tokens(backend, range(10), 5)], 3)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    num_blocks=st.integers(12, 40),
    window=st.integers(1, 20),
)
def test_same_tokens_with_a_window_that_gives_blocks_back(
    lengths: list[int], num_blocks: int, window: int
) -> None:
    backend = TokenMemoryBackend(num_blocks=num_blocks, max_model_len=num_blocks * 4, sliding_window=window)
    engine = fake_engine(backend, max_batched_tokens=16)
    lengths = [min(length, num_blocks * 4 - 9) for length in lengths]
    for index, length in enumerate(lengths):
        engine.add(request(str(index), range(length), 8))
    expected = {str(i): expected_tokens(backend, range(n), 8) for i, n in enumerate(lengths)}
    assert run_all(engine) == expected
    assert engine.kv.block_states().active == 0


def test_blocks_behind_the_window_go_before_anything_cached() -> None:
    backend = TokenMemoryBackend(num_blocks=16, sliding_window=8)
    engine = fake_engine(backend)
    engine.add(request("cached", range(50, 66), 1))
    run_all(engine)
    cached = engine.kv.index.num_cached
    engine.add(request("long", range(4), 52))
    run_all(engine)
    assert engine.kv.index.lookup(Tokens(range(50, 66))).num_blocks == cached == 4


def test_a_tenant_stays_below_its_ceiling_and_gets_its_guarantee() -> None:
    shares = {"a": {"ceiling": 0.5}, "b": {"guaranteed": 0.5}}
    backend = TokenMemoryBackend(num_blocks=16)
    engine = fake_engine(backend, tenant_shares=shares)
    a, b = Namespace(tenant="a"), Namespace(tenant="b")
    for index in range(4):
        engine.add(request(f"a{index}", range(10 * index, 10 * index + 9), 4, namespace=a))
    for index in range(3):
        engine.add(request(f"b{index}", range(40, 49 + index), 4, namespace=b))
    quota = engine.kv.quota
    assert quota is not None
    while engine.has_work():
        engine.step()
        check_books(engine)
        assert sum(quota.used(account) for account in engine.kv.index.evictable_by_account()) <= 16
        assert quota.used(request("x", [1], namespace=a).account) <= 8
    assert engine.stats().num_preemptions == 0


def test_a_prompt_that_its_quota_can_never_hold_is_refused() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=16), tenant_shares={"a": {"ceiling": 0.25}})
    with pytest.raises(ContextLengthError, match=r"is 16 tokens.*tenant 'a'"):
        engine.add(request("r", range(16), namespace=Namespace(tenant="a")))
    engine.add(request("r", range(16), 1, namespace=Namespace(tenant="b")))
    run_all(engine)


def test_a_request_that_outgrows_its_quota_ends_and_others_go_on() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=16), tenant_shares={"a": {"ceiling": 0.25}})
    engine.add(request("a", range(12), 20, namespace=Namespace(tenant="a")))
    engine.add(request("b", range(12), 20, namespace=Namespace(tenant="b")))
    errors = {}
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason is not None:
                errors[output.request_id] = output.error
        check_books(engine)
    assert errors["b"] is None
    assert errors["a"] is not None
    assert "out of KV memory" in errors["a"]


def test_tenants_of_a_sharing_group_share() -> None:
    engine = fake_engine(sharing_groups={"friends": ["a", "b"]})
    for tenant, cached in (("a", 0), ("b", 8), ("c", 0)):
        engine.add(request(tenant, range(12), 1, namespace=Namespace(tenant=tenant)))
        assert engine.step()[0].num_cached_tokens == cached


def test_compaction_moves_blocks_of_running_and_cached() -> None:
    backend = TokenMemoryBackend(num_blocks=32)
    engine = fake_engine(backend)
    for index in range(5):
        engine.add(request(str(index), range(10 * index, 10 * index + 9), 3 + 4 * (index % 2)))
    for _ in range(4):
        engine.step()
    engine.kv.clear_cache()
    assert engine.kv.fragmentation().external > 0
    assert engine.compact() > 0
    check_books(engine)
    assert engine.kv.fragmentation().external == 0
    tokens = run_all(engine)
    assert tokens["1"] == expected_tokens(backend, range(10, 19), 7)[4:]


class FailingCopies(TokenMemoryBackend):
    """Cannot copy."""

    def execute(self, plan: ExecutionPlan) -> StepResult:
        if plan.copies:
            raise RuntimeError("no copy engine")
        return super().execute(plan)


def test_a_compaction_that_fails_has_moved_nothing() -> None:
    backend = FailingCopies(num_blocks=32)
    engine = fake_engine(backend)
    for index in range(3):
        engine.add(request(str(index), range(10 * index, 10 * index + 9), 2 + 6 * (index == 2)))
    for _ in range(3):
        engine.step()
    engine.kv.clear_cache()
    before = engine.kv.block_table("2").tolist()
    with pytest.raises(RuntimeError, match="no copy engine"):
        engine.compact()
    assert engine.kv.block_table("2").tolist() == before
    assert run_all(engine)["2"] == expected_tokens(backend, range(20, 29), 8)[3:]


def test_a_pinned_prompt_stays_and_pins_are_bounded() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=16))
    for start in (0, 40):
        engine.add(request(str(start), range(start, start + 17), 1))
        run_all(engine)
    hold = engine.kv.pin_prefix(Tokens(range(17)))
    with pytest.raises(CapacityError, match="8 blocks, at most 4"):
        engine.kv.pin_prefix(Tokens(range(40, 57)))
    check_books(engine)
    engine.add(request("big", range(90, 97), 40))
    run_all(engine)
    assert engine.kv.index.lookup(Tokens(range(17))).num_blocks == 4
    engine.kv.unpin_prefix(hold)
    engine.kv.clear_cache()
    assert engine.kv.block_states() == (0, 0, 16)


def test_events_replayed_give_what_is_resident() -> None:
    events = EventBus()
    resident: dict[bytes, int] = {}

    def stored(event: BlocksStored) -> None:
        resident.update(zip(event.hashes, event.block_ids, strict=True))

    def removed(event: BlocksRemoved) -> None:
        for one in event.hashes:
            del resident[one]

    events.subscribe(BlocksStored, stored)
    events.subscribe(BlocksRemoved, removed)
    engine = fake_engine(TokenMemoryBackend(num_blocks=24), events=events)
    for index in range(12):
        engine.add(request(str(index), [*range(index % 3, 14), index], 3))
        engine.step()
        assert sorted(resident.values()) == sorted(engine.kv.index.all_block_ids())
    run_all(engine)
    assert sorted(resident.values()) == sorted(engine.kv.index.all_block_ids())


def test_a_request_may_have_its_hit_published() -> None:
    events, seen = EventBus(), list[BlocksStored]()
    engine = fake_engine(TokenMemoryBackend(num_blocks=24), events=events)
    engine.add(request("first", range(9), 3))
    run_all(engine)
    events.subscribe(BlocksStored, seen.append)
    engine.add(request("silent", [*range(8), 50], 1))
    engine.add(request("told", [*range(8), 60, 61, 62, 63, 64], 1, reports_hit=True))
    run_all(engine)
    hits = [event for event in seen if event.parent_hash is None]
    assert [len(event.hashes) for event in hits] == [2]
    assert hits[0].tokens == Tokens(range(8)).tobytes()
    new = [event for event in seen if event.parent_hash is not None]
    assert [event.parent_hash for event in new] == [hits[0].hashes[-1]]
    assert seen.index(hits[0]) < seen.index(new[0])


def test_reuse_is_counted_once_a_request() -> None:
    engine = fake_engine()
    for name in "ab":
        engine.add(request(name, range(10), 1))
        run_all(engine)
    reuse = engine.stats().reuse
    assert reuse is not None
    assert (reuse.num_requests, reuse.num_hit_requests) == (2, 1)
    assert (reuse.num_tokens, reuse.num_hit_tokens) == (20, 8)
    assert reuse.num_matches >= 2


def test_a_prompt_is_pinned_through_the_llm() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=40, vocab_size=512))
    llm = LLM(engine, toy_tokenizer(), model_name="toy", max_model_len=128)
    let_go = llm.pin_prompt("You are a helpful machine.")
    held = engine.kv.block_states().active
    assert held > 0
    engine.kv.clear_cache()
    assert engine.kv.block_states() == (held, 0, 40 - held)
    let_go()
    assert engine.kv.block_states() == (0, held, 40 - held)


def test_classes_of_service_have_shares_of_their_own() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=16), class_shares={"batch": {"ceiling": 0.25}})
    with pytest.raises(ContextLengthError, match="class 'batch'"):
        engine.add(request("batch", range(20), service_class="batch"))
    engine.add(request("other", range(20), 1))
    run_all(engine)
