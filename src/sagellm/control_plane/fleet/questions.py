"""`Questions`: what a front asks its instances. No answer is waited for by the thread that steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sagellm.control_plane.fleet.members import Member
from sagellm.core.clock import Clock
from sagellm.core.errors import RequestError, SageError
from sagellm.core.protocols.fleet import CallResult

ANSWER_S = 5.0
"""An instance answers between two of its steps. After so long its answer is not waited for any more."""
TURN_S = 0.1
_SPARE_S = 2.0
"""A thread waits so much longer for the front itself."""

_Call = tuple[str, int]
"""An instance, and the number of a call of it."""


@dataclass(slots=True, eq=False)
class _Question:
    """One question to some instances. `results`: by place, as they come; `open`: calls without an answer."""

    name: str
    until_s: float
    results: list[Any]
    answer: Future[list[Any]]
    open: dict[_Call, int] = field(default_factory=dict)


class Questions:
    """Questions and their answers. `ask` is for any thread; the rest for the one that steps the front.

    `turn(wait_s)` moves the front on, `call_soon` has its thread call something.
    """

    def __init__(
        self, turn: Callable[[float], None], call_soon: Callable[[Callable[[], None]], None], clock: Clock
    ) -> None:
        self._turn, self._call_soon, self._clock = turn, call_soon, clock
        self.thread_id: int | None = None
        """The thread that steps; None before the first step."""
        self._asked: dict[_Call, tuple[_Question, Member]] = {}
        self._figures: dict[_Call, tuple[str, Callable[[str, Any], None]]] = {}
        self._late_pins: dict[_Call, Member] = {}
        """Pins that are given up again, as their answer comes too late."""

    @property
    def is_open(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._asked)

    def ask(
        self, members_of: Callable[[], Sequence[Member]], name: str, arguments: Sequence[Any] = ()
    ) -> list[Any]:
        """The results of all that `members_of` names, asked at once. The caller waits, and the front goes on.

        On the thread that steps, which is a caller without a server, the front is moved on here; tokens that
        come meanwhile are kept for the next step. The first error is raised, and an `unavailable` one where
        there is no instance, or no answer in `ANSWER_S`.
        """
        answer: Future[list[Any]] = Future()

        def begin() -> None:
            try:
                self._begin(members_of(), name, arguments, answer)
            except Exception as error:  # noqa: BLE001 - of this question alone; the front goes on
                _fail(answer, error)

        if self.thread_id in (None, threading.get_ident()):
            begin()
            while not answer.done():
                self._turn(TURN_S)
        else:
            self._call_soon(begin)
        try:
            return answer.result(ANSWER_S + _SPARE_S)
        except TimeoutError:
            if answer.cancel():  # else it has come now
                raise unavailable("the front has not answered: it has ended, or a turn of it hangs") from None
            return answer.result()

    def ask_for_figures(self, members: Sequence[Member], name: str, take: Callable[[str, Any], None]) -> None:
        """Ask for `stats` or `diagnostics` and go on; `take(instance_id, result)` follows.

        An instance that has not answered the last time is not asked again.
        """
        waiting = {(call[0], each) for call, (each, _) in self._figures.items()}
        for member in members:
            instance_id = member.client.instance_id
            if (instance_id, name) not in waiting:
                self._figures[instance_id, member.client.call(name)] = name, take

    def take(self, instance_id: str, answer: CallResult) -> None:
        """An answer has come. A call on a lost connection is answered with an error."""
        call = instance_id, answer.call_id
        if (figures := self._figures.pop(call, None)) is not None:
            if answer.error is None:
                figures[1](instance_id, answer.result)
        elif (asked := self._asked.get(call)) is not None:
            self._take(asked[0], call, answer)
        elif (late := self._late_pins.pop(call, None)) is not None and answer.error is None:
            late.client.call("unpin", (answer.result.pin_id,))

    def expire(self) -> None:
        """End what has waited too long."""
        now_s = self._clock.now()
        for question in {asked[0] for asked in self._asked.values() if now_s >= asked[0].until_s}:
            names = ", ".join(sorted(instance_id for instance_id, _ in question.open))
            self._end(question, unavailable(f"{names} has not answered within {ANSWER_S:g} s"))

    def forget(self, instance_id: str) -> None:
        """No answer will come from there.

        Another client of its name counts its calls from 1 again.
        """
        for question in {asked[0] for call, asked in self._asked.items() if call[0] == instance_id}:
            self._end(question, unavailable(f"{instance_id} has left the fleet"))
        self._figures = {call: each for call, each in self._figures.items() if call[0] != instance_id}
        self._late_pins = {call: each for call, each in self._late_pins.items() if call[0] != instance_id}

    def close(self) -> None:
        """End all of them with an error."""
        for question in {asked[0] for asked in self._asked.values()}:
            self._end(question, unavailable("the fleet's front ends"))

    def _begin(
        self, members: Sequence[Member], name: str, arguments: Sequence[Any], answer: Future[list[Any]]
    ) -> None:
        if not members:
            raise unavailable("no instance of this fleet is connected")
        question = _Question(name, self._clock.now() + ANSWER_S, [None] * len(members), answer)
        for place, member in enumerate(members):
            call = member.client.instance_id, member.client.call(name, arguments)
            question.open[call] = place
            self._asked[call] = question, member

    def _take(self, question: _Question, call: _Call, answer: CallResult) -> None:
        member = self._asked.pop(call)[1]
        question.results[question.open.pop(call)] = answer.result
        if answer.error is not None:
            self._end(question, answer.error)
        elif not question.open:
            try:
                question.answer.set_result(question.results)
            except InvalidStateError:  # its caller has given it up
                if question.name == "pin":
                    member.client.call("unpin", (answer.result.pin_id,))

    def _end(self, question: _Question, error: SageError) -> None:
        for call in question.open:
            member = self._asked.pop(call)[1]
            if question.name == "pin":
                self._late_pins[call] = member
        question.open.clear()
        _fail(question.answer, error)


def unavailable(text: str) -> RequestError:
    """An error that a client sees as HTTP's 503."""
    error = RequestError(f"{text}: try again", code="service_unavailable")
    error.status = 503
    return error


def _fail(answer: Future[list[Any]], error: Exception) -> None:
    with suppress(InvalidStateError):  # its caller has given it up
        answer.set_exception(error)
