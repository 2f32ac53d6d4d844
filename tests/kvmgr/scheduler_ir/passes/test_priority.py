"""Priority, classes of service, and how the urgent make their way."""

from __future__ import annotations

import pytest

from sagellm.core.plan import Chunk, RequestState
from sagellm.core.types import RequestStatus
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.kvmgr.scheduler_ir.passes.desk import Desk, DeskView, admit, state


def test_classes_add_to_priority() -> None:
    desk = Desk(PriorityBasedPass(classes={"gold": 2, "batch": -1}))
    desk.waiting = [
        state("batch", service_class="batch"),
        state("plain", priority=1),
        state("gold", service_class="gold"),
        state("unnamed", service_class="none"),
    ]
    assert desk.step() == ["gold", "plain", "unnamed", "batch"]


def test_levels_rise_with_time_and_equals_keep_their_order() -> None:
    desk = Desk(PriorityBasedPass(age_s=10.0))
    desk.waiting = [state("b"), state("a"), state("high", priority=1, arrival_s=5.0)]
    assert desk.step() == ["high", "b", "a"]
    desk.now_s = 9.9
    assert desk.step() == ["high", "b", "a"]
    desk.now_s = 10.0
    assert desk.step() == ["b", "a", "high"]  # all of level 1: as they came
    desk.now_s = 15.0
    assert desk.step() == ["high", "b", "a"]
    desk.now_s = 20.0
    assert desk.step() == ["b", "a", "high"]


def test_a_request_that_waits_again_rises_one_level_at_a_time() -> None:
    desk = Desk(PriorityBasedPass(age_s=10.0))
    desk.waiting = [state("again")]
    desk.step()
    again = desk.run_first()
    desk.step()
    again.status = RequestStatus.WAITING  # it was preempted
    desk.waiting = [state("rival", priority=1, arrival_s=9.0), again]
    assert desk.step() == ["rival", "again"]
    desk.now_s = 10.0
    assert desk.step() == ["rival", "again"]  # both of level 1
    desk.now_s = 18.0
    assert desk.step() == ["rival", "again"]
    desk.now_s = 20.0
    assert desk.step() == ["rival", "again"]  # both of level 2
    desk.now_s = 30.0
    assert desk.step() == ["rival", "again"]


def test_the_running_stand_by_priority_and_arrival() -> None:
    desk = Desk(PriorityBasedPass(age_s=10.0))
    desk.running = [
        admit(state("late", arrival_s=5.0), 8),
        admit(state("low"), 8),
        admit(state("high", priority=1, arrival_s=9.0), 8),
        admit(state("too late", priority=1, arrival_s=99.0), 8),
    ]
    desk.step()
    assert [one.request_id for one in desk.draft.running] == ["high", "low", "late", "too late"]
    desk.running = [*desk.draft.running, admit(state("new", arrival_s=1.0), 8)]
    desk.step(num_new_running=1)
    assert [one.request_id for one in desk.draft.running] == ["high", "low", "new", "late", "too late"]


def _full(num_free_rows: int = 0, available: int = 100) -> DeskView:
    return DeskView(num_free_rows=num_free_rows, available=available)


def test_the_urgent_push_out_the_last_of_lower_priority() -> None:
    desk = Desk(PriorityBasedPass(preempt=True), _full())
    desk.running = [admit(state("a"), 8), admit(state("b", arrival_s=1.0), 8)]
    desk.waiting = [state("urgent", priority=1, arrival_s=2.0)]
    desk.step()
    assert [one.request_id for one in desk.draft.preempted] == ["b"]
    assert [(d.request_id, d.action) for d in desk.draft.decisions] == [("b", "preempt")]


def test_as_many_victims_as_needed_and_none_where_that_is_not_enough() -> None:
    for length, preempted in ((8, ["c"]), (16, ["c", "b"]), (400, [])):
        desk = Desk(PriorityBasedPass(preempt=True, watermark=0), _full(9, available=0))
        desk.running = [admit(state(name, arrival_s=i), 12) for i, name in enumerate("abc")]
        desk.waiting = [state("urgent", length, priority=1)]
        desk.step()
        assert [one.request_id for one in desk.draft.preempted] == preempted


def test_equal_and_aged_requests_are_not_preempted() -> None:
    for priority, arrival_s in ((0, 200.0), (1, 300.0)):
        desk = Desk(PriorityBasedPass(preempt=True, age_s=100.0), _full())
        desk.now_s = 300.0
        desk.running = [admit(state("old", arrival_s=0.0), 8)]
        desk.waiting = [state("urgent", priority=priority, arrival_s=arrival_s)]
        desk.step()
        assert desk.draft.preempted == {}


def test_without_the_option_no_request_is_preempted() -> None:
    desk = Desk(PriorityBasedPass(), _full())
    desk.running = [admit(state("a"), 8)]
    desk.waiting = [state("urgent", priority=1)]
    desk.step()
    assert desk.draft.preempted == {}


def test_chunks_of_lower_priority_leave_tokens_for_the_urgent() -> None:
    scheduler_pass = PriorityBasedPass(preempt=True)
    desk = Desk(scheduler_pass, _full(8))
    low, high = admit(state("low", 90), 0), admit(state("high", 30, priority=1), 0)
    desk.running = [high, low]
    desk.step(token_budget=100)

    def shortened(urgent: RequestState) -> dict[str, int]:
        desk.draft.waiting[:] = [urgent]
        desk.draft.chunks = {one.request_id: Chunk(one, 0, len(one.tokens)) for one in (low, high)}
        scheduler_pass(desk.draft, desk.view)
        return {name: chunk.num_tokens for name, chunk in desk.draft.chunks.items()}

    assert shortened(state("urgent", 20, priority=1)) == {"low": 50, "high": 30}
    assert shortened(state("larger", 200, priority=1)) == {"low": 1, "high": 30}
    assert shortened(state("equal", 20)) == {"low": 90, "high": 30}


def test_age_is_positive() -> None:
    with pytest.raises(ValueError, match="age_s must be at least"):
        PriorityBasedPass(0.0)
