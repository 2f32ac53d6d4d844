"""The engine loop: one thread that owns the `LLM`. Commands come by a queue, events leave by a callback."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sagellm.core.errors import EngineFailedError, RequestError, SageError
from sagellm.core.protocols.engine import EngineStats
from sagellm.core.types import Tokens
from sagellm.engines.llm import LLM, RequestOptions, TextDelta
from sagellm.engines.llm.next_turns import NextTurn, NextTurns
from sagellm.serving.errors import CallError

log = logging.getLogger("sagellm.serving")


@dataclass(frozen=True, slots=True)
class Refused:
    """A submitted request that the engine does not take."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a call, or its error, for the caller that awaits `answer`."""

    answer: asyncio.Future[Any]
    result: object = None
    error: SageError | None = None


@dataclass(frozen=True, slots=True)
class LoopFailed:
    """An error has ended the loop, and with it every request."""

    error: Exception


Event = TextDelta | Refused | Answered | LoopFailed
Command = Callable[[], Event | None]
"""What the engine's thread runs between two steps."""


class EngineLoop:
    """Steps the engine while it has work, else sleeps.

    It wakes for a command, and when the engine has work again by itself.

    Calls `deliver` on the loop's thread once per step, with all events of the step. An exception that leaves
    the engine ends the loop: `failure` holds it, and `LoopFailed` is the last event. `next_turns` are
    computed while no request is open.
    """

    def __init__(
        self, llm: LLM, deliver: Callable[[list[Event]], None], next_turns: NextTurns | None = None
    ) -> None:
        self._llm = llm
        self._next_turns = next_turns
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sagellm-engine", daemon=True)
        self._stopping = self._gives_up = False
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

    def submit(self, request_id: str, tokens: Tokens, options: RequestOptions) -> None:
        """Start a request under the caller's own id. This and the next four return at once."""

        def submit() -> Refused | None:
            if self._next_turns is not None:
                self._next_turns.make_way()
            try:
                self._llm.submit(tokens, options, request_id=request_id)
            except RequestError as error:
                return Refused(request_id, error)
            if self._next_turns is not None:
                self._next_turns.arrived(request_id, tokens, options.tenant)
            return None

        self._queue(submit)

    def abort(self, request_id: str) -> None:
        """Drop a request before the next step. A delta of the step that runs may still come."""

        def abort() -> None:
            self._llm.abort(request_id)
            if self._next_turns is not None:
                self._next_turns.left(request_id)

        self._queue(abort)

    def expect(self, turn: NextTurn) -> None:
        """Have what a chat's next turn begins with computed, once the engine has time."""

        def expect() -> None:
            if self._next_turns is not None:
                self._next_turns.add(turn)

        self._queue(expect)

    def call(self, do: Callable[[LLM], object], answer: asyncio.Future[Any]) -> None:
        """Call `do`; an `Answered` follows. An exception that is no `SageError` becomes a `CallError`."""

        self._queue(lambda: answered(self._llm, do, answer))

    def request_stop(self) -> None:
        """End the thread after the step that runs. See `end_ranks` for one that does not end."""

        def stop() -> None:
            self._stopping = True

        self._queue(stop)

    def _queue(self, command: Command) -> None:
        self._commands.put(command)
        self._llm.engine.wake()

    def end_ranks(self, grace_s: float) -> bool:
        """End the other ranks of the model, by force after `grace_s`. Returns when they have ended.

        A step that waits for one then ends the loop, which is no failure of the engine. False if there are
        none.
        """
        self._gives_up = True
        return self._llm.engine.end_ranks(grace_s)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._execute_and_step()
        except Exception as error:
            if self._gives_up and isinstance(error, EngineFailedError):
                log.info("the last step was given up: %s", error)
                return
            log.exception("the engine loop has failed; the server answers 503 from now on")
            self.failure = error
            self._deliver([LoopFailed(error)])

    def _execute_and_step(self) -> None:
        """Execute the queued commands, run one step, deliver the events of both."""
        events: list[Event] = []
        for command in self._take_commands():
            event = command()
            if event is not None:
                events.append(event)
        if not self._stopping:
            events += self._step()
        self.stats = self._llm.stats()
        if events:
            self._deliver(events)

    def _step(self) -> Sequence[TextDelta]:
        """The deltas of a step; none without work."""
        deltas = self._llm.step() if self._llm.has_work() else []
        return deltas if self._next_turns is None else self._next_turns.take(deltas)

    def _take_commands(self) -> list[Command]:
        """All queued commands; sleeps for the first while the engine has no work."""
        commands: list[Command] = []
        if self._next_turns is not None and self._commands.empty():
            self._next_turns.begin_chunk()
        try:
            if not self._llm.has_work():
                commands.append(self._commands.get(timeout=self._llm.idle_s()))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands


def answered(llm: LLM, do: Callable[[LLM], object], answer: asyncio.Future[Any]) -> Answered:
    """What `do` returns or raises, for the caller that awaits `answer`."""
    try:
        return Answered(answer, do(llm))
    except SageError as error:
        return Answered(answer, error=error)
    except Exception as error:  # of a plug-in, most likely: only this call has failed
        log.exception("a call of the engine failed; the engine goes on")
        what = f"{type(error).__name__} within the engine, which goes on"
        return Answered(answer, error=CallError(f"internal error: {what}; the log has the details"))
