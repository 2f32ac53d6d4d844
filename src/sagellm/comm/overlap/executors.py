"""Executors of schedules: a simulated clock, threads, and the streams of a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from heapq import heappop, heappush
from threading import Event, Lock, Thread
from typing import Any, Protocol

from sagellm.comm.overlap.run_book import RunBook
from sagellm.core.clock import Clock, ManualClock, MonotonicClock
from sagellm.core.errors import SageError
from sagellm.core.protocols.overlap import OverlapRun, OverlapSchedule, Task, Work


class _Executor:
    """Runs one schedule at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._book: RunBook | None = None

    @contextmanager
    def _running(self, schedule: OverlapSchedule, work: Work) -> Iterator[RunBook]:
        """The book of a new run. Raises `SageError` during another, `ValueError` for unsuitable input."""
        if not self._lock.acquire(blocking=False):
            raise SageError("this executor is running a schedule: wait for its end, or use another executor")
        try:
            self._book = RunBook(schedule, work)
            yield self._book
        finally:
            self._book = None
            self._lock.release()

    def cancel(self) -> None:
        book = self._book  # read once: the run may end meanwhile
        if book is not None:
            book.cancel()


class SimulatedExecutor(_Executor):
    """Implements `OverlapExecutor` on a simulated clock, which it moves.

    A task is called when it starts. `seconds_of` says how long a task takes; by default as long as planned.
    """

    def __init__(
        self, clock: ManualClock, seconds_of: Callable[[Task], float] = lambda task: task.duration_s
    ) -> None:
        super().__init__()
        self._clock, self._seconds_of = clock, seconds_of

    def run(self, schedule: OverlapSchedule, work: Work) -> OverlapRun:
        with self._running(schedule, work) as book:
            self._play(schedule, work, book)
        return book.result()

    def _play(self, schedule: OverlapSchedule, work: Work, book: RunBook) -> None:
        """Start tasks in order of time, those of a lane in its order."""
        slots, began_s = schedule.slots, self._clock.now()
        position = {slot.task.name: i for i, slot in enumerate(slots)}
        waits, successors = [0] * len(slots), defaultdict[int, list[int]](list)
        last_of_lane: dict[str, int] = {}
        for i, slot in enumerate(slots):
            before = {position[name] for name in slot.task.after}
            if slot.task.lane in last_of_lane:
                before.add(last_of_lane[slot.task.lane])
            last_of_lane[slot.task.lane], waits[i] = i, len(before)
            for earlier in before:
                successors[earlier].append(i)
        ready_s = [0.0] * len(slots)
        heap = [(0.0, i) for i, number in enumerate(waits) if not number]
        last_s = 0.0
        while heap:
            start_s, i = heappop(heap)
            self._clock.advance_to(began_s + start_s)
            end_s = start_s + self._call(slots[i].task, work, book, start_s)
            last_s = max(last_s, end_s)
            for after in successors[i]:
                waits[after] -= 1
                ready_s[after] = max(ready_s[after], end_s)
                if not waits[after]:
                    heappush(heap, (ready_s[after], after))
        self._clock.advance_to(began_s + last_s)

    def _call(self, task: Task, work: Work, book: RunBook, start_s: float) -> float:
        """Run a task; returns its seconds, 0 if it did not run or failed."""
        if not book.may_begin(task):
            return 0.0
        try:
            work[task.name]()
        except Exception as error:  # noqa: BLE001 - whatever a task raises, the others must run
            book.failed(task, error)
            return 0.0
        seconds = self._seconds_of(task)
        book.ran(task, start_s, seconds)
        return seconds


class ThreadExecutor(_Executor):
    """Implements `OverlapExecutor` with a thread for each lane.

    Tasks overlap as far as they release the GIL: copies, sockets, files, large operations of numpy and torch.
    An interrupt of `run` skips what has not begun, waits for the tasks that run, and is raised then; a second
    one does not wait.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__()
        self._clock = clock or MonotonicClock()

    def run(self, schedule: OverlapSchedule, work: Work) -> OverlapRun:
        with self._running(schedule, work) as book:
            self._run_lanes(schedule, work, book)
        return book.result()

    def _run_lanes(self, schedule: OverlapSchedule, work: Work, book: RunBook) -> None:
        lanes: defaultdict[str, list[Task]] = defaultdict(list)
        for slot in schedule.slots:
            lanes[slot.task.lane].append(slot.task)
        ended = {slot.task.name: Event() for slot in schedule.slots}
        began_s = self._clock.now()
        threads = {
            lane: Thread(
                target=self._lane, args=(tasks, work, book, ended, began_s), name=f"lane {lane}", daemon=True
            )
            for lane, tasks in lanes.items()
        }
        try:
            for thread in threads.values():
                thread.start()
            for thread in threads.values():
                thread.join()
        except BaseException as error:
            book.cancel()
            unstarted = [lane for lane, thread in threads.items() if thread.ident is None]
            for lane in unstarted:
                for task in lanes[lane]:
                    ended[task.name].set()  # the others wait for it, and skip what follows
            for lane in threads.keys() - set(unstarted):
                threads[lane].join()
            if isinstance(error, RuntimeError):
                raise SageError(f"no thread for lane {unstarted[0]!r}: {error}; use fewer lanes") from error
            raise

    def _lane(
        self, tasks: list[Task], work: Work, book: RunBook, ended: Mapping[str, Event], began_s: float
    ) -> None:
        """Run the tasks of a lane. Every task is marked as ended in any case, so no lane waits for ever."""
        for task in tasks:
            for name in task.after:
                ended[name].wait()
            try:
                if book.may_begin(task):
                    start_s = self._clock.now() - began_s
                    work[task.name]()
                    book.ran(task, start_s, self._clock.now() - began_s - start_s)
            except BaseException as error:  # noqa: BLE001 - whatever a task raises, the others must run
                book.failed(task, error)
            finally:
                ended[task.name].set()


class StreamModule(Protocol):
    """What `torch.cuda` has, and the modules of other chips' torch (`torch.npu`, `torch.mlu`, ...)."""

    def Stream(self) -> Any: ...  # noqa: N802 - torch's name

    def Event(self, *, enable_timing: bool) -> Any: ...  # noqa: N802 - torch's name

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    def current_stream(self) -> Any: ...

    def synchronize(self) -> None: ...


class StreamExecutor(_Executor):
    """Implements `OverlapExecutor` with a stream for each lane of the current device.

    A task is called on the host and launches its work on the current stream; events order the streams, and
    `run` returns when the device has finished. Memory that a task allocates and another lane uses must
    outlive the run. Raises `SageError` where the device reports an error: it comes late, in a call of any
    task behind, so no task is blamed.
    """

    def __init__(self, streams: StreamModule) -> None:
        super().__init__()
        self._module = streams

    def run(self, schedule: OverlapSchedule, work: Work) -> OverlapRun:
        with self._running(schedule, work) as book:
            try:
                self._launch(schedule, work, book)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise SageError(
                    f"the device failed while the tasks ran: {reason}; it does not say in which"
                ) from error
            except BaseException:  # an interrupt: what is launched runs on
                with suppress(RuntimeError):
                    self._module.synchronize()
                raise
        return book.result()

    def _launch(self, schedule: OverlapSchedule, work: Work, book: RunBook) -> None:
        """Raises `RuntimeError` where the device fails."""
        module, events = self._module, dict[str, tuple[Any, Any]]()
        origin, streams = self._recorded(module.current_stream()), dict[str, Any]()
        for slot in schedule.slots:
            task = slot.task
            if not book.may_begin(task):
                continue
            if task.lane not in streams:
                streams[task.lane] = module.Stream()
                streams[task.lane].wait_event(origin)
            stream = streams[task.lane]
            for name in task.after:
                stream.wait_event(events[name][1])
            with module.stream(stream):
                begun = self._recorded(stream)
                try:
                    work[task.name]()
                except Exception as error:  # noqa: BLE001 - whatever a task raises, the others must run
                    module.synchronize()  # raises if the error is the device's
                    book.failed(task, error)
                else:
                    events[task.name] = (begun, self._recorded(stream))
        module.synchronize()
        for slot in schedule.slots:
            if slot.task.name in events:
                begun, ended = events[slot.task.name]
                book.ran(slot.task, origin.elapsed_time(begun) / 1e3, begun.elapsed_time(ended) / 1e3)

    def _recorded(self, stream: Any) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event
