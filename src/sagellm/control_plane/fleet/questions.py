"""`Questions`: what a front asks its instances, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sagellm.core.clock import Clock
from sagellm.core.errors import SageError
from sagellm.core.protocols.engine import EngineStats
from sagellm.core.protocols.fleet import CallResult, EngineClient, HandOverReport, InstanceFacts
from sagellm.core.protocols.router import ExecutionInstance

ANSWER_S = 5.0
"""A call of an instance waits so long: its step may take long."""
TURN_S = 0.1


@dataclass(slots=True)
class Member:
    """An instance as this front knows it. `draining`: it gets no new requests."""

    client: EngineClient
    facts: InstanceFacts | None = None
    load: ExecutionInstance | None = None
    stats: EngineStats | None = None
    draining: bool = False
    fault: str = ""
    num_lost: int = 0
    last_report: HandOverReport | None = None

    @property
    def is_ready(self) -> bool:
        return self.facts is not None and not self.fault


class Questions:
    """Asks instances and waits, or asks for statistics and does not. `turn(wait_s)` moves the fleet on.

    Tokens that come while a call waits are kept by the fleet for its next step.
    """

    def __init__(self, turn: Callable[[float], None], clock: Clock) -> None:
        self._turn, self._clock = turn, clock
        self._asked: dict[tuple[str, int], CallResult | None] = {}
        """By instance and number of the call: what is waited for."""
        self._stats: dict[tuple[str, int], Member] = {}
        self._late_pins: dict[tuple[str, int], Member] = {}
        """Pins that are given up again, as their answer comes too late."""

    def ask(self, member: Member, name: str, arguments: Sequence[Any] = ()) -> Any:
        """The result of a call.

        Raises its error, or `SageError` without an answer in `ANSWER_S`.
        """
        call = self._call(member, name, arguments)
        try:
            return self._answer(call)
        except SageError:
            if name == "pin":
                self._late_pins[call] = member
            raise

    def ask_each(self, members: Sequence[Member], name: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """The results of all, asked at once. The first error is raised."""
        calls = [self._call(member, name, arguments) for member in members]
        try:
            return [self._answer(call) for call in calls]
        finally:
            for call in calls:
                self._asked.pop(call, None)

    def ask_for_stats(self, members: Sequence[Member]) -> None:
        """An instance that has not answered the last time is not asked again."""
        waiting = {instance_id for instance_id, _ in self._stats}
        for member in members:
            instance_id = member.client.instance_id
            if instance_id not in waiting:
                self._stats[instance_id, member.client.call("stats")] = member

    def take(self, instance_id: str, answer: CallResult) -> None:
        """An answer has come. A call on a lost connection is answered with an error."""
        call = instance_id, answer.call_id
        member = self._stats.pop(call, None)
        if member is not None and answer.error is None:
            member.stats = answer.result
        elif call in self._asked:
            self._asked[call] = answer
        elif (late := self._late_pins.pop(call, None)) is not None and answer.error is None:
            late.client.call("unpin", (answer.result.pin_id,))

    def _call(self, member: Member, name: str, arguments: Sequence[Any]) -> tuple[str, int]:
        call = member.client.instance_id, member.client.call(name, arguments)
        self._asked[call] = None
        return call

    def _answer(self, call: tuple[str, int]) -> Any:
        until_s = self._clock.now() + ANSWER_S
        while self._asked[call] is None and self._clock.now() < until_s:
            self._turn(TURN_S)
        answer = self._asked.pop(call)
        if answer is None:
            raise SageError(f"{call[0]} has not answered within {ANSWER_S:g} s")
        if answer.error is not None:
            raise answer.error
        return answer.result
