"""Executors on random graphs, with tasks that fail, runs that are cancelled, and estimates that are wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.comm.overlap.executors import SimulatedExecutor, StreamExecutor, ThreadExecutor
from sagellm.comm.overlap.managers import CriticalPathManager, SerialManager
from sagellm.core.clock import ManualClock
from sagellm.core.errors import SageError, TaskFailedError
from sagellm.core.protocols.overlap import OverlapExecutor, OverlapRun, OverlapSchedule, Slot, Task
from tests.comm.overlap.simulated_streams import SimulatedStreams
from tests.comm.overlap.task_graphs import Tasks, task_graphs

EXECUTORS: dict[str, Callable[[], OverlapExecutor]] = {
    "simulated": lambda: SimulatedExecutor(ManualClock()),
    "threads": ThreadExecutor,
    "streams": lambda: StreamExecutor(SimulatedStreams()),
}
every_executor = pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
Make = Callable[[], OverlapExecutor]


def chain(*names: str, lanes: str = "xy") -> OverlapSchedule:
    """Each waits for the one before it; they alternate between lanes."""
    tasks = [
        Task(name, lanes[i % len(lanes)], 1.0, frozenset(names[max(0, i - 1) : i]))
        for i, name in enumerate(names)
    ]
    return CriticalPathManager().schedule(tasks, [])


class Trace:
    """Work that records which tasks were called, in which order, and raises in those of `failing`."""

    def __init__(self, schedule: OverlapSchedule, failing: frozenset[str] = frozenset()) -> None:
        self.called: list[str] = []
        self._failing = failing
        self.work = {slot.task.name: partial(self._call, slot.task.name) for slot in schedule.slots}

    def _call(self, name: str) -> None:
        self.called.append(name)
        if name in self._failing:
            raise OSError(f"no {name}")


def run(executor: OverlapExecutor, schedule: OverlapSchedule, trace: Trace) -> OverlapRun:
    """The run; also that of one in which a task failed."""
    try:
        return executor.run(schedule, trace.work)
    except TaskFailedError as error:
        assert trace._failing
        return error.run


@every_executor
@settings(max_examples=25)
@given(graph=task_graphs(), failing=st.frozensets(st.integers(0, 11).map("t{}".format), max_size=2))
def test_each_task_runs_once_after_what_it_waits_for_unless_that_failed(
    make: Make, graph: Tasks, failing: frozenset[str]
) -> None:
    schedule = CriticalPathManager().schedule(*graph)
    trace = Trace(schedule, failing)
    done = run(make(), schedule, trace)
    tasks = {slot.task.name: slot.task for slot in schedule.slots}
    dead: set[str] = set()
    for slot in schedule.slots:
        if slot.task.name in failing or not dead.isdisjoint(slot.task.after):
            dead.add(slot.task.name)
    assert set(done.skipped) == dead
    assert {slot.task.name for slot in done.timeline.slots} == tasks.keys() - dead
    assert len(trace.called) == len(set(trace.called))
    assert set(trace.called) == (tasks.keys() - dead) | {
        name for name in failing & tasks.keys() if dead.isdisjoint(tasks[name].after)
    }
    place = {name: i for i, name in enumerate(trace.called)}
    for name in trace.called:
        assert all(place[before] < place[name] for before in tasks[name].after)
    for lane in {task.lane for task in tasks.values()}:
        planned = [slot.task.name for slot in schedule.slots if slot.task.lane == lane]
        called = [name for name in trace.called if tasks[name].lane == lane]
        assert called == [name for name in planned if name in place]
    done.timeline.check(tolerance_s=1e-6)
    assert done.timeline.comm == schedule.comm - dead


@every_executor
def test_no_tasks_are_a_run(make: Make) -> None:
    assert make().run(OverlapSchedule(()), {}) == OverlapRun(OverlapSchedule(()))


@every_executor
def test_the_error_names_the_task_and_keeps_its_cause(make: Make) -> None:
    schedule = chain("a", "b", "c", "d")
    with pytest.raises(TaskFailedError, match=r"task 'b' failed \(OSError: no b\), and 2 others") as caught:
        make().run(schedule, Trace(schedule, frozenset("b")).work)
    assert caught.value.task == "b"
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.run.skipped == ("b", "c", "d")
    assert [slot.task.name for slot in caught.value.run.timeline.slots] == ["a"]


@every_executor
def test_a_cancelled_run_begins_no_further_task_and_the_next_run_is_whole(make: Make) -> None:
    executor, schedule = make(), chain("a", "b", "c", "d")
    executor.cancel()  # without a run: nothing
    trace = Trace(schedule)
    done = executor.run(schedule, {**trace.work, "b": executor.cancel})
    assert trace.called == ["a"]
    assert done.skipped == ("c", "d")
    assert executor.run(schedule, trace.work).skipped == ()


@every_executor
def test_an_executor_runs_one_schedule_at_a_time(make: Make) -> None:
    executor, schedule = make(), chain("a")
    with pytest.raises(TaskFailedError, match="use another executor") as caught:
        executor.run(schedule, {"a": lambda: executor.run(schedule, {"a": int})})
    assert isinstance(caught.value.__cause__, SageError)
    assert executor.run(schedule, {"a": int}).skipped == ()


@every_executor
def test_work_must_be_that_of_the_schedule(make: Make) -> None:
    schedule = chain("a", "b")
    with pytest.raises(ValueError, match="has nothing for task 'b'"):
        make().run(schedule, {"a": int})
    with pytest.raises(ValueError, match="names no task: 'z'"):
        make().run(schedule, {"a": int, "b": int, "z": int})


@every_executor
def test_a_schedule_that_breaks_its_rules_is_not_run(make: Make) -> None:
    first, second = chain("a", "b").slots
    for slots, message in [
        ((second, first), "'b' is in front of 'a'"),
        ((first, Slot(second.task, 0.5)), "'b' starts at 0.5 s, it can at 1.0 s"),
        ((first, Slot(replace(first.task, name="c"), 0.5)), "'c' starts at 0.5 s, it can at 1.0 s"),
        ((Slot(first.task, 2.0), Slot(replace(first.task, name="c", lane="z"), 0.0)), "'c' starts at 0"),
        ((first, Slot(first.task, 1.0)), "'a' runs twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            make().run(OverlapSchedule(slots), {})
    with pytest.raises(ValueError, match="no slot has the communication task 'z'"):
        make().run(OverlapSchedule((first,), frozenset("z")), {"a": int})


@given(graph=task_graphs())
def test_the_simulated_clock_and_streams_take_what_was_planned(graph: Tasks) -> None:
    schedule = CriticalPathManager().schedule(*graph)
    clock, streams = ManualClock(100.0), SimulatedStreams()
    simulated = SimulatedExecutor(clock).run(schedule, Trace(schedule).work)
    assert clock.now() == pytest.approx(100.0 + schedule.makespan_s)
    work = {slot.task.name: partial(streams.spend, slot.task.duration_s) for slot in schedule.slots}
    streamed = StreamExecutor(streams).run(schedule, work)
    planned_s = {slot.task.name: slot.start_s for slot in schedule.slots}
    for done in (simulated, streamed):
        assert {slot.task.name: slot.start_s for slot in done.timeline.slots} == pytest.approx(planned_s)


@given(graph=task_graphs(), factors=st.lists(st.floats(0.1, 10), min_size=12, max_size=12))
def test_wrong_estimates_change_the_times_and_no_order(graph: Tasks, factors: list[float]) -> None:
    schedule = CriticalPathManager().schedule(*graph)
    seconds = {f"t{i}": factor for i, factor in enumerate(factors)}
    executor = SimulatedExecutor(ManualClock(), lambda task: seconds[task.name])
    done = executor.run(schedule, Trace(schedule).work)
    done.timeline.check(tolerance_s=1e-9)
    assert done.timeline.makespan_s <= sum(seconds[slot.task.name] for slot in schedule.slots) + 1e-9


def test_the_serial_schedule_on_the_simulated_clock_overlaps_what_it_can() -> None:
    """Executors keep dependencies and the order of lanes, not planned times."""
    tasks = [Task("a", "x", 1.0), Task("b", "y", 1.0)]
    schedule = SerialManager().schedule(tasks, [])
    assert schedule.makespan_s == 2.0
    assert SimulatedExecutor(ManualClock()).run(schedule, {"a": int, "b": int}).timeline.makespan_s == 1.0


def test_lanes_of_threads_run_at_the_same_time() -> None:
    """Both tasks wait for each other, so a run that does not overlap them does not end."""
    both = threading.Barrier(2, timeout=20)
    schedule = CriticalPathManager().schedule([Task("a", "x", 1.0)], [Task("b", "y", 1.0)])
    done = ThreadExecutor().run(schedule, {"a": both.wait, "b": both.wait})
    assert done.skipped == ()


def test_a_task_that_ends_its_thread_does_not_stop_the_others() -> None:
    def leave() -> None:
        raise SystemExit(3)

    schedule = chain("a", "b")
    with pytest.raises(TaskFailedError, match="task 'a' failed"):
        ThreadExecutor().run(schedule, {"a": leave, "b": int})


def test_a_device_that_fails_says_so() -> None:
    schedule = chain("a")
    executor = StreamExecutor(SimulatedStreams(fault="CUDA error: an illegal memory access"))
    with pytest.raises(SageError, match="the device failed while the tasks ran: CUDA error: an illegal"):
        executor.run(schedule, {"a": int})


def test_a_fault_of_the_device_is_not_blamed_on_the_task_whose_call_reports_it() -> None:
    streams, schedule = SimulatedStreams(), chain("a", "b", "c")

    def fault() -> None:
        streams.fault = "CUDA error: an illegal memory access"

    def report() -> None:
        raise RuntimeError(streams.fault)

    with pytest.raises(SageError, match="illegal memory access; it does not say in which") as caught:
        StreamExecutor(streams).run(schedule, {"a": fault, "b": report, "c": int})
    assert not isinstance(caught.value, TaskFailedError)


@every_executor
def test_an_interrupt_begins_nothing_more(make: Make) -> None:
    """It comes to the thread that runs: within a task, or while it waits for the lanes' threads."""
    executor, schedule = make(), chain("a", "b", "c", lanes="x")
    trace, is_alone = Trace(schedule), threading.main_thread()
    ended = threading.Event()

    def interrupted() -> None:
        if threading.current_thread() is is_alone:
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        ended.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    with pytest.raises(KeyboardInterrupt):
        executor.run(schedule, {**trace.work, "a": interrupted})
    signal.signal(signal.SIGINT, before)
    assert trace.called == []
    assert isinstance(executor, ThreadExecutor) == ended.is_set()
    assert executor.run(schedule, trace.work).skipped == ()


def test_an_interrupted_stream_run_waits_for_the_device() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    streams, schedule = SimulatedStreams(), chain("a", "b")
    with pytest.raises(KeyboardInterrupt):
        StreamExecutor(streams).run(schedule, {"a": int, "b": interrupt})
    assert streams.num_waits == 1


def test_a_lane_without_a_thread_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    executor, schedule = ThreadExecutor(), chain("a", "b", "c", "d")
    trace = Trace(schedule)
    with pytest.raises(SageError, match="no thread for lane 'y': can't start new thread; use fewer lanes"):
        executor.run(schedule, trace.work)
    assert not started[0].is_alive()
    assert set(trace.called) <= {"a"}
    monkeypatch.undo()
    assert executor.run(schedule, trace.work).skipped == ()


def test_of_two_threads_one_runs_a_schedule() -> None:
    executor, schedule, both = ThreadExecutor(), chain("a"), threading.Barrier(2, timeout=20)
    refused: list[SageError] = []

    def run_it() -> None:
        both.wait()
        try:
            executor.run(schedule, {"a": lambda: time.sleep(0.2)})
        except SageError as error:
            refused.append(error)

    threads = [threading.Thread(target=run_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1


def test_a_stream_run_waits_for_the_device_once() -> None:
    streams, schedule = SimulatedStreams(), chain("a", "b", "c")
    StreamExecutor(streams).run(schedule, Trace(schedule).work)
    assert streams.num_waits == 1
