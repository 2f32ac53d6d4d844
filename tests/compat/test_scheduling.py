"""`schedule` and `build` on plain requests: small cases, and plans that agree with the schedule."""

from __future__ import annotations

import random

import pytest

from sagellm.compat import BaseSchedulerIR, IRBuilder, ScheduleRequest
from sagellm.core.blocks import cdiv
from sagellm.core.errors import PlanError
from sagellm.core.ir import LOCAL
from sagellm.core.plan import NO_ROW
from sagellm.kvmgr.scheduler_ir.graph import IRGraph
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from sagellm.kvmgr.scheduler_ir.rows import Row, Rows
from sagellm.kvmgr.scheduler_ir.verify_graph import verify_graph


def ask(
    name: str, length: int, *, cached: int = 0, priority: int = 0, block_size: int = 4
) -> ScheduleRequest:
    tokens = list(range(length))
    return ScheduleRequest(name, tokens, 8, priority, prefix_cache_hit=cached, block_size=block_size)


def waiting(name: str, length: int, *, priority: int = 0, arrived: float = 0.0) -> ScheduleRequest:
    return ScheduleRequest(name, list(range(length)), 16, priority, arrived)


def before(running: list[ScheduleRequest], available: int) -> Rows:
    """The batch before the step, as `IRBuilder` numbers it."""
    rows, first = {}, available
    for number, one in enumerate(running):
        length = len(one.token_ids)
        count = cdiv(length - 1, one.block_size)
        rows[number] = Row(one.request_id, length, length, length - 1, list(range(first, first + count)))
        first += count
    return Rows(rows)


def test_a_plan_of_waiting_and_running_requests() -> None:
    running = [ask("a", 9), ask("b", 7)]
    pending = [ask("new", 10, cached=4), ask("late", 6)]
    plan = IRBuilder().build(pending, running, available_memory=8, step=3, max_batched_tokens=10)
    assert (plan.step, plan.decode_rows, plan.decode_positions) == (3, (0, 1), (8, 6))
    assert [(one.row, one.block_ids) for one in plan.table_deltas] == [(0, (0,))]
    assert [(one.request_id, one.row, one.num_computed, one.block_ids) for one in plan.joined] == [
        ("new", 2, 4, (12, 1, 2)),
        ("late", 3, 0, (3,)),
    ]
    assert [(one.request_id, one.start, one.num_tokens) for one in plan.prefills] == [
        ("new", 4, 6),
        ("late", 0, 2),
    ]
    graph = IRGraph.of(plan)
    verify_graph(graph, 4, token_budget=10, before={LOCAL: before(running, 8)})


def test_a_preempted_request_gives_back_row_and_blocks() -> None:
    running = [ask("old", 9), ask("young", 9)]
    plan = IRBuilder().build([ask("new", 4)], running, available_memory=0)
    assert (plan.preempted, plan.left, plan.decode_rows) == (("young",), (1,), (0,))
    assert plan.table_deltas[0].block_ids == (2,), "a block that young held"
    assert plan.joined == (), "a step that preempts admits none"


def test_an_empty_queue() -> None:
    assert IRBuilder().build([], available_memory=4).is_empty


def test_passes_decide() -> None:
    pending = [ask("low", 8), ask("high", 8, priority=1)]
    plan = IRBuilder().build(pending, available_memory=9, passes=[PriorityBasedPass()], max_batched_tokens=8)
    assert [one.request_id for one in plan.joined] == ["high"]
    assert plan.joined[0].row != NO_ROW


def test_one_pool_has_one_block_size() -> None:
    with pytest.raises(PlanError, match="blocks of 4 and of 16 tokens"):
        IRBuilder().build([ask("a", 4), ask("b", 4, block_size=16)], available_memory=4)


@pytest.mark.parametrize("seed", range(40))
def test_plans_are_right_and_agree_with_the_simple_schedule(seed: int) -> None:
    rng = random.Random(seed)
    running = [ask(f"r{i}", rng.randrange(1, 90), block_size=16) for i in range(rng.randrange(6))]
    pending = [
        ask(f"w{i}", rng.randrange(1, 90), cached=16 * rng.randrange(3), block_size=16)
        for i in range(rng.randrange(9))
    ]
    available, budget = rng.randrange(12), rng.randrange(8, 140)
    plan = IRBuilder().build(
        pending, running, available_memory=available, max_batched_tokens=budget, max_num_seqs=10
    )
    graph = IRGraph.of(plan)
    verify_graph(graph, 16, token_budget=budget, before={LOCAL: before(running, available)})
    result = BaseSchedulerIR().schedule(
        pending, running, available, max_batched_tokens=budget, max_num_seqs=10
    )
    assert [one.request_id for one in plan.joined] == [one.request_id for one in result.scheduled_requests]
    assert list(plan.preempted) == [one.request_id for one in result.preempted_requests]


def test_schedule_admits_what_fits_in_order() -> None:
    scheduler = BaseSchedulerIR()
    scheduler.add_optimization_pass(PriorityBasedPass())
    pending = [waiting("low", 64), waiting("high", 64, priority=1), waiting("late", 64, arrived=1.0)]
    result = scheduler.schedule(pending, [], available_memory=9)
    assert [r.request_id for r in result.scheduled_requests] == ["high", "low"]
    assert [d.action for d in result.draft.decisions if d.request_id == "late"] == ["admit", "wait"]
    assert scheduler.schedule(pending, [], available_memory=3).scheduled_requests == []


def test_schedule_preempts_for_an_older_request() -> None:
    scheduler = BaseSchedulerIR([PriorityBasedPass()])
    inside = [waiting("old", 16), waiting("young", 16, arrived=1.0)]
    result = scheduler.schedule([waiting("new", 16)], inside, available_memory=0)
    assert (result.scheduled_requests, result.preempted_requests) == ([], [])
    at_a_border = [waiting("old", 33), waiting("young", 17, arrived=1.0)]
    result = scheduler.schedule([waiting("new", 16)], at_a_border, available_memory=0)
    assert result.scheduled_requests == []
    assert [r.request_id for r in result.preempted_requests] == ["young"]


def test_kv_blocks_needed_counts_what_is_cached() -> None:
    wanted = waiting("r", 40)
    assert wanted.kv_blocks_needed == 4
    wanted.prefix_cache_hit = 32
    assert wanted.kv_blocks_needed == 2
