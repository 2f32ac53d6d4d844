"""The engine loop: one thread that owns the `LLM`. Commands go in by a queue, events out by a callback."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sagellm.core.errors import RequestError, SageError
from sagellm.core.kv_hints import KVHintsEnvelope
from sagellm.core.protocols.engine import EngineStats
from sagellm.core.types import SLO, Retention, SamplingParams, Tokens
from sagellm.engines.llm import LLM, TextDelta
from sagellm.serving.errors import CallError

log = logging.getLogger("sagellm.serving")


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request under the caller's own id."""

    request_id: str
    tokens: Tokens
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    service_class: str = ""
    session_id: str | None = None
    kv_hints: KVHintsEnvelope | None = None
    slo: SLO | None = None
    retention: Sequence[Retention] = ()
    client: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """Do something with the `LLM` between two steps; `Answered` has the result under the same id."""

    call_id: int
    do: Callable[[LLM], object]


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop a request; nothing more is said of it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class _Stop:
    """Leave the loop."""


Command = Submit | Call | Abort | _Stop


@dataclass(frozen=True, slots=True)
class Refused:
    """A submission that the engine does not take."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class Answered:
    """What a `Call` has returned, or the error that it has raised; `CallError` for what is no `SageError`."""

    call_id: int
    result: object = None
    error: SageError | None = None


@dataclass(frozen=True, slots=True)
class LoopFailed:
    """The loop has ended by an error; so has every request in it."""

    error: Exception


Event = TextDelta | Refused | Answered | LoopFailed


class EngineLoop:
    """Steps the engine while there is work and sleeps on the queue when there is none.

    `deliver` is called on the loop's thread, once per step, with all that the step brought. An exception that
    leaves the engine ends the loop: `failure` holds it, `LoopFailed` is the last event.
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
        """Queue a command; it is obeyed before the next step. Safe from any thread."""
        self._commands.put(command)

    def request_stop(self) -> None:
        """End the thread after the step that runs; a step that never ends dies with the process."""
        self.send(_Stop())

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            log.exception("the engine loop has failed; the server answers 503 from now on")
            self.failure = error
            self._deliver([LoopFailed(error)])

    def _turn(self) -> None:
        """Obey what is queued, run one step, publish."""
        events: list[Event] = []
        for command in self._take_commands():
            self._obey(command, events)
        if not self._stopping and self._llm.has_work():
            events += self._llm.step()
        self.stats = self._llm.stats()
        if events:
            self._deliver(events)

    def _take_commands(self) -> list[Command]:
        """All that is queued; sleeps for the first one when there is nothing else to do."""
        commands = [] if self._llm.has_work() else [self._commands.get()]
        try:
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def _obey(self, command: Command, events: list[Event]) -> None:
        match command:
            case Submit():
                self._submit(command, events)
            case Call():
                events.append(self._answer(command))
            case Abort(request_id):
                self._llm.abort(request_id)
            case _Stop():
                self._stopping = True

    def _submit(self, job: Submit, events: list[Event]) -> None:
        try:
            self._llm.submit(
                job.tokens,
                job.params,
                request_id=job.request_id,
                priority=job.priority,
                tenant=job.tenant,
                service_class=job.service_class,
                session_id=job.session_id,
                kv_hints=job.kv_hints,
                slo=job.slo,
                retention=job.retention,
                client=job.client,
            )
        except RequestError as error:
            events.append(Refused(job.request_id, error))

    def _answer(self, call: Call) -> Answered:
        try:
            return Answered(call.call_id, call.do(self._llm))
        except SageError as error:
            return Answered(call.call_id, error=error)
        except Exception as error:  # of a plug-in, most likely: only this call has failed
            log.exception("a call of the engine failed; the engine goes on")
            return Answered(call.call_id, error=CallError(type(error).__name__))
