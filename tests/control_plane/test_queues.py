"""Requests that wait for a place, against a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from sagellm.control_plane.queues import LOOK_PAST, PhaseQueue, QueuedRequest, QueuePhase
from sagellm.core.clock import ManualClock
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.protocols.router import RequestMetadata
from sagellm.core.types import Tokens
from tests.effort import examples


def request(name: str, priority: int = 0, num_tokens: int = 1) -> RequestMetadata:
    return RequestMetadata(name, Tokens(range(num_tokens)), priority=priority)


def queue(phase: QueuePhase = QueuePhase.PREFILL, **given: int) -> PhaseQueue:
    return PhaseQueue(phase, lambda one, since_s: since_s - one.priority, clock=ManualClock(), **given)


class AgainstList(RuleBasedStateMachine):
    """The queue of prefill: the smallest order first, then who came first."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue(max_waiting=30)
        self.expected: list[tuple[float, int, str]] = []
        self.number = 0

    @rule(priority=st.integers(0, 3), tokens=st.integers(1, 5))
    def push(self, priority: int, tokens: int) -> None:
        self.number += 1
        made = request(str(self.number), priority, tokens)
        if len(self.expected) == 30:
            with pytest.raises(CapacityError, match="full with 30 requests"):
                self.queue.push(made)
            return
        self.queue.push(made, 0.0)
        self.expected = sorted([*self.expected, (-priority, self.number, made.request_id)])

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*(one[2] for one in self.expected), "unknown"]))
        assert self.queue.remove(name) is (name != "unknown")
        self.expected = [one for one in self.expected if one[2] != name]

    @rule(accepted=st.sets(st.integers(0, 40)))
    def drain(self, accepted: set[int]) -> None:
        seen: list[str] = []

        def place(waiting: QueuedRequest) -> bool:
            seen.append(waiting.request.request_id)
            return int(waiting.request.request_id) % 41 in accepted

        placed = self.queue.drain(place)
        left, passed, expected_seen = [], 0, []
        for one in self.expected:
            if passed > LOOK_PAST[QueuePhase.PREFILL]:
                left.append(one)
                continue
            expected_seen.append(one[2])
            if int(one[2]) % 41 not in accepted:
                passed += 1
                left.append(one)
        assert seen == expected_seen
        assert placed == len(self.expected) - len(left)
        self.expected = left

    @invariant()
    def agree(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.expected)
        assert all(name in self.queue for _, _, name in self.expected)


def test_it_is_a_sorted_list() -> None:
    run_state_machine_as_test(
        AgainstList, settings=settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
    )


def test_decode_keeps_its_order() -> None:
    waiting = queue(QueuePhase.DECODE)
    for name in "abc":
        waiting.push(request(name))
    assert waiting.drain(lambda one: one.request.request_id != "b") == 1
    assert "b" in waiting
    assert "c" in waiting


def test_a_request_waits_once() -> None:
    waiting = queue()
    waiting.push(request("a"))
    with pytest.raises(BookkeepingError, match="waits in the prefill queue already"):
        waiting.push(request("a"))


def test_an_error_of_the_caller_loses_nobody() -> None:
    waiting = queue()
    waiting.push(request("a"))

    def fails(one: QueuedRequest) -> bool:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        waiting.drain(fails)
    waiting.check()
    assert waiting.drain(lambda one: True) == 1


def test_removed_requests_leave_no_trace() -> None:
    waiting = queue()
    for number in range(1000):
        waiting.push(request(str(number)))
        waiting.remove(str(number))
    waiting.check()
    assert len(waiting._heap) <= 64
    assert waiting.num_tokens == 0
