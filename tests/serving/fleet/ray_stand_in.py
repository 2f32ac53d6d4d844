"""A stand-in of a Ray cluster: placement groups on paper, actors in threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sagellm.core.config_layers import Layer, Resolved, resolve
from sagellm.serving.fleet.ray_cluster import ActorLostError, RayCluster, Resources

KILLED = "the actor was killed"


class StandInActor:
    """An actor that Ray starts again unless it was ended for good. `make` gives the object in its process.

    `num_away`: so many calls after each kill fail, as Ray is starting the process.
    """

    def __init__(self, make: Callable[[], Any], num_away: int = 0) -> None:
        self._make, self._num_away = make, num_away
        self.process = make()
        self.num_starts, self.is_gone = 1, False
        self._lost = threading.Event()
        self._away = 0

    def kill(self, *, for_good: bool) -> None:
        former, self.process = self.process, None
        self.is_gone = self.is_gone or for_good
        self._away = self._num_away
        lost, self._lost = self._lost, threading.Event()
        lost.set()
        if former is not None:
            former.stop()
        if not self.is_gone:
            self.process = self._make()
            self.num_starts += 1

    def call(self, method: str, *texts: str) -> str:
        if self._away:
            self._away -= 1
            raise ActorLostError("the actor is restarting", returns=True)
        lost, process = self._lost, self.process
        if process is None:
            raise ActorLostError(KILLED, returns=False)
        if method == "watch":
            lost.wait()
            raise ActorLostError(KILLED, returns=not self.is_gone)
        found = str(getattr(process, method)(*texts))
        if lost.is_set():
            raise ActorLostError(KILLED, returns=not self.is_gone)
        return found


class StandInCluster(RayCluster):
    """`given`: what each node has. Groups find their place at once while `has_room`."""

    def __init__(
        self,
        given: Sequence[Resources],
        make: Callable[[str], Any],
        *,
        num_away: int = 0,
        has_room: bool = True,
    ) -> None:
        self.given, self._make, self._num_away, self.has_room = given, make, num_away, has_room
        self.groups: dict[str, tuple[list[Resources], str]] = {}
        self.actors: dict[str, list[StandInActor]] = {}
        self.is_closed = False

    def nodes(self) -> list[Resources]:
        return list(self.given)

    def free(self) -> Resources:
        return {name: amount for node in self.given for name, amount in node.items()}

    def reserve(self, bundles: Sequence[Resources], strategy: str) -> str:
        name = f"group {len(self.groups)}"
        while name in self.groups:
            name += "'"
        self.groups[name] = (list(bundles), strategy)
        return name

    def is_reserved(self, group: str, within_s: float) -> bool:
        return self.has_room

    def remove(self, group: str) -> None:
        del self.groups[group]

    def make_actor(self, name: str, group: str, bundle: int, resources: Resources) -> StandInActor:
        assert self.groups[group][0][bundle] == resources
        made = StandInActor(lambda: self._make(name), self._num_away)
        self.actors.setdefault(name, []).append(made)
        return made

    def call(self, actor: StandInActor, method: str, *texts: str, within_s: float | None = None) -> str:
        return actor.call(method, *texts)

    def kill(self, actor: StandInActor, *, for_good: bool) -> None:
        actor.kill(for_good=for_good)

    def close(self) -> None:
        self.is_closed = True
        for actor in (each for made in self.actors.values() for each in made):
            with suppress(ActorLostError):
                actor.kill(for_good=True)


def resolved_fleet(groups: dict[str, Any], **keys: Any) -> Resolved:
    """The configuration of a fleet file."""
    return resolve([Layer("test", {"fleet.groups": groups, **keys})])
