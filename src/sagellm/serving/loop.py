"""The engine loop: one thread that owns the `LLM`. Commands come by a queue, events leave by a callback.

When an SSE client disconnects (`sse.py`), the gateway sends an `Abort` for each request that is still open.
This loop takes it from the queue before its next step and calls `LLM.abort`. That aborts the engine requests
of all choices: they leave the table of requests, their blocks are released, and no delta of them follows. A
step that already runs is not interrupted; the gateway drops deltas that cross the `Abort` on their way.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sagellm.core.errors import RequestError, SageError
from sagellm.core.protocols.engine import EngineStats
from sagellm.core.types import Tokens
from sagellm.engines.llm import LLM, RequestOptions, TextDelta
from sagellm.serving.errors import CallError

log = logging.getLogger("sagellm.serving")


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request under the caller's own id."""

    request_id: str
    tokens: Tokens
    options: RequestOptions


@dataclass(frozen=True, slots=True)
class Call:
    """Call `do` between two steps; `Answered` has its result under the same id."""

    call_id: int
    do: Callable[[LLM], object]


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop a request. No event of it follows."""

    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    """Leave the loop."""


Command = Submit | Call | Abort | _Stop


@dataclass(frozen=True, slots=True)
class Refused:
    """A `Submit` that the engine does not take."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a `Call`, or the error that it raised.

    An exception that is no `SageError` becomes a `CallError`.
    """

    call_id: int
    result: object = None
    error: SageError | None = None


@dataclass(frozen=True, slots=True)
class LoopFailed:
    """An error has ended the loop, and with it every request."""

    error: Exception


Event = TextDelta | Refused | Answered | LoopFailed


class EngineLoop:
    """Steps the engine while it has work, else sleeps on the queue.

    Calls `deliver` on the loop's thread once per step, with all events of the step. An exception that leaves
    the engine ends the loop: `failure` holds it, and `LoopFailed` is the last event.
    """

    def __init__(self, llm: LLM, deliver: Callable[[list[Event]], None]) -> None:
        self._llm = llm
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sagellm-engine", daemon=True)
        self._stopping = False
        self.failure: Exception | None = None
        self.stats: EngineStats = llm.stats()

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    @property
    def stopped(self) -> bool:
        return not self._thread.is_alive()

    def send(self, command: Command) -> None:
        """Queue a command for execution before the next step. Thread-safe."""
        self._commands.put(command)

    def request_stop(self) -> None:
        """End the thread after the step that runs. A step that never ends dies with the process."""
        self.send(_Stop())

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._execute_and_step()
        except Exception as error:
            log.exception("the engine loop has failed; the server answers 503 from now on")
            self.failure = error
            self._deliver([LoopFailed(error)])

    def _execute_and_step(self) -> None:
        """Execute the queued commands, run one step, deliver the events of both."""
        events: list[Event] = []
        for command in self._take_commands():
            self._execute(command, events)
        if not self._stopping and self._llm.has_work():
            events += self._llm.step()
        self.stats = self._llm.stats()
        if events:
            self._deliver(events)

    def _take_commands(self) -> list[Command]:
        """All queued commands; sleeps for the first if the engine has no work."""
        commands = [] if self._llm.has_work() else [self._commands.get()]
        try:
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _execute(self, command: Command, events: list[Event]) -> None:
        match command:
            case Submit(request_id, tokens, options):
                try:
                    self._llm.submit(tokens, options, request_id=request_id)
                except RequestError as error:
                    events.append(Refused(request_id, error))
            case Call():
                events.append(self._answer(command))
            case Abort(request_id):
                self._llm.abort(request_id)
            case _Stop():
                self._stopping = True

    def _answer(self, call: Call) -> Answered:
        try:
            return Answered(call.call_id, call.do(self._llm))
        except SageError as error:
            return Answered(call.call_id, error=error)
        except Exception as error:  # of a plug-in, most likely: only this call has failed
            log.exception("a call of the engine failed; the engine goes on")
            return Answered(call.call_id, error=CallError(type(error).__name__))
