"""Prefix-aware order: one look-up each, and what several lack is computed once."""

from __future__ import annotations

from sagellm.core.plan import RequestState
from sagellm.core.types import RequestStatus
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from tests.builders import expected_tokens, fake_engine, request
from tests.kvmgr.scheduler_ir.passes.desk import Desk, admit, state

SHARED = list(range(20, 60))


def test_the_unchanged_are_looked_up_once() -> None:
    desk = Desk(PrefixCacheAwarePass(refresh=8))
    desk.waiting = [state(str(i)) for i in range(100)]
    for _ in range(10):
        desk.step()
    assert desk.view.num_matches == 100
    assert len(desk.draft.hits) == 100  # still good: the index has not changed


def test_a_change_of_the_index_costs_a_few_look_ups_a_step() -> None:
    desk = Desk(PrefixCacheAwarePass(refresh=8))
    desk.waiting = [state(str(i)) for i in range(100)]
    desk.step()
    for _ in range(5):
        desk.view.version += 1
        desk.step()
        assert len(desk.draft.hits) == 8  # no others: a hit of before would be void
    assert desk.view.num_matches == 100 + 5 * 8


def test_what_is_cached_later_is_found_and_goes_first() -> None:
    desk = Desk(PrefixCacheAwarePass(refresh=2))
    desk.waiting = [state(str(i)) for i in range(6)]
    assert desk.step()[0] == "0"
    desk.view.cached["4"] = 4
    for _ in range(3):
        desk.view.version += 1
        order = desk.step()
    assert order[0] == "4"


def test_a_preempted_request_goes_before_new_ones() -> None:
    desk = Desk(PrefixCacheAwarePass())
    desk.view.cached["new"] = 4
    preempted = state("preempted")
    preempted.num_preemptions = 1
    desk.waiting = [state("new"), preempted]
    assert desk.step() == ["preempted", "new"]


def _sharing(count: int) -> list[RequestState]:
    return [state(f"s{i}", tokens=[*SHARED, 100 + i], arrival_s=0.0) for i in range(count)]


def test_of_requests_that_share_a_prefix_one_runs_and_the_others_wait() -> None:
    desk = Desk(PrefixCacheAwarePass(min_shared=8))
    desk.waiting = [*_sharing(3), state("alone", 30)]
    assert desk.step() == ["s0", "alone"]
    assert [(d.request_id, d.action) for d in desk.draft.decisions] == [("s1", "wait"), ("s2", "wait")]
    leader = admit(desk.waiting.pop(0), 10)
    assert desk.step() == ["alone"]  # still being computed
    leader.num_prefilled = leader.num_prompt_tokens
    desk.view.cached.update(s1=40, s2=40)
    desk.view.version += 1
    assert desk.step() == ["s1", "s2", "alone"]
    assert set(desk.draft.hits) >= {"s1", "s2"}


def test_the_wait_for_a_shared_prefix_is_bounded() -> None:
    desk = Desk(PrefixCacheAwarePass(min_shared=8, max_defer_s=2.0, max_wait_s=1e9))
    desk.waiting = _sharing(2)
    admit(desk.waiting[0])
    desk.waiting[0].status = RequestStatus.WAITING
    assert desk.step() == ["s0"]
    desk.now_s = 1.9
    assert desk.step() == ["s0"]
    desk.now_s = 2.0
    assert desk.step() == ["s0", "s1"]
    desk.now_s = 2.1
    assert desk.step() == ["s0", "s1"]  # and is not held again


def test_a_promoted_request_waits_for_no_leader() -> None:
    desk = Desk(PrefixCacheAwarePass(min_shared=8, max_wait_s=0.0))
    leader, follower = _sharing(2)
    desk.waiting = [leader, follower]
    desk.step()
    desk.run_first().num_prefilled = 5
    assert desk.step() == ["s1"]


def test_a_preempted_or_ended_leader_is_not_waited_for() -> None:
    for change in ("preempt", "end"):
        desk = Desk(PrefixCacheAwarePass(min_shared=8))
        desk.waiting = _sharing(2)
        desk.step()
        leader = desk.waiting[0]
        if change == "end":
            leader.status = RequestStatus.FINISHED
            assert desk.step() == ["s1"]
        else:
            leader.num_preemptions += 1
            assert desk.step() == ["s0", "s1"]


def test_no_request_waits_for_lower_priority_or_for_little() -> None:
    desk = Desk(PrefixCacheAwarePass(min_shared=8))
    desk.waiting = [
        state("low", tokens=[*SHARED, 1]),
        state("high", tokens=[*SHARED, 2], priority=1),
    ]
    assert desk.step() == ["high", "low"]
    desk = Desk(PrefixCacheAwarePass(min_shared=8, worth=0.5))
    desk.waiting = [
        state("long", tokens=[*SHARED, *range(1000, 1100)]),  # 40 of 140 tokens are not worth the wait
        state("short", tokens=[*SHARED, 2]),
    ]
    assert desk.step() == ["long", "short"]


def test_a_leader_takes_the_place_of_the_first_that_waits_for_it() -> None:
    desk = Desk(PrefixCacheAwarePass(min_shared=8))
    follower, other = state("follower", tokens=[*SHARED, 1]), state("other", 30)
    leader = state("leader", tokens=[*SHARED, 2])
    desk.waiting = [leader]
    desk.step()
    follower.num_preemptions = 1  # stands in front of all
    desk.waiting = [other, leader, follower]
    assert desk.step() == ["leader", "other"]


def test_a_shared_prompt_is_computed_once() -> None:
    computed = {}
    for hold_s in (0.0, 2.0):
        passes = [PrefixCacheAwarePass(min_shared=4, max_defer_s=hold_s)]
        backend = TokenMemoryBackend(num_blocks=200, block_size=4, max_num_seqs=8, max_model_len=128)
        engine = fake_engine(backend, max_batched_tokens=256, passes=passes)
        for i in range(6):
            engine.add(request(f"r{i}", [*SHARED, 90 - i, i], 2))
        got: dict[str, list[int]] = {}
        computed[hold_s] = 0
        while engine.has_work():
            for output in engine.step():
                got.setdefault(output.request_id, []).extend(output.new_token_ids)
            assert engine.last_plan is not None
            computed[hold_s] += engine.last_plan.num_prefill_tokens
        for i in range(6):
            assert got[f"r{i}"] == expected_tokens(backend, [*SHARED, 90 - i, i], 2)
    assert computed == {0.0: 6 * 42, 2.0: 42 + 5 * 2}


def test_nothing_waits_costs_nothing() -> None:
    desk = Desk(PrefixCacheAwarePass())
    running = [admit(state(str(i)), 8) for i in range(4)]
    desk.running = running
    assert desk.step() == []
    assert desk.view.num_matches == 0
    assert desk.draft.chunks == {}
