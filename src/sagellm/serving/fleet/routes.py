"""/v1/fleet and /v1/admin/fleet: the instances of a fleet, and their operation."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from fastapi import Request
from pydantic import Field

from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.control_plane.fleet_instances import group_of, instance_name
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError, RequestError
from sagellm.core.fleet_config import FleetConfig
from sagellm.core.protocols.fleet import InstanceFacts
from sagellm.core.protocols.router import InstanceType
from sagellm.engines.llm import LLM
from sagellm.serving.errors import ConflictError, NotFoundError, clipped
from sagellm.serving.fleet.scaling import FleetCounts, FleetScaling, fleet_counts
from sagellm.serving.fleet.status import FleetStatus, InstanceDetail, fleet_status, instance_detail, look
from sagellm.serving.gateway import Gateway
from sagellm.serving.reader import RequestReader
from sagellm.serving.schema import Body

_LOOK_S = 0.05
_DETAIL_S = 1.0
SWITCH_S = 10.0
"""An instance that has drained says its new type within this time."""


class InstanceRequest(Body):
    """POST /v1/admin/fleet/drain, /resume, /restart: one instance; restart without a name: all, in turn."""

    name: str | None = None


class ScaleRequest(Body):
    """POST /v1/admin/fleet/scale: how many instances a group of this host has."""

    group: str
    count: int = Field(ge=0, le=1024)


class SwitchRequest(Body):
    """POST /v1/admin/fleet/switch: what an instance serves from then on."""

    name: str
    type: Literal["general", "prefilling", "decoding", "hybrid"]


class Lifecycle(Protocol):
    """What starts and ends the processes of instances."""

    def restart(self, name: str) -> None: ...

    def start(self, group: str, number: int) -> None: ...

    def end(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class FleetRoutes:
    """The handlers. Changes of instances happen on the engine's thread; an operation waits for its end.

    `began_s`: when this server began, by the engine's clock.
    One operation runs at a time, so that no two of them drain the last instances together.
    """

    gateway: Gateway
    reader: RequestReader
    fleet: FleetConfig
    lifecycle: Lifecycle | None = None
    began_s: float = 0.0
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def status(self) -> FleetStatus:
        model = self.reader.model_name
        return await self.gateway.call(lambda llm: fleet_status(_engine(llm), model, self.began_s))

    async def instance(self, name: str) -> InstanceDetail:
        """One instance in detail. Its answer is waited for up to `_DETAIL_S`; the engine's thread goes on."""
        began_s = asyncio.get_running_loop().time()
        answers = await self.gateway.call(lambda llm: look(_engine_with(name, llm), name))
        while True:
            detail = await self.gateway.call(lambda llm: instance_detail(_engine_with(name, llm), name))
            waited_s = asyncio.get_running_loop().time() - began_s
            is_fresh = detail.asked_s_ago is not None and detail.asked_s_ago <= waited_s
            if is_fresh or not answers or waited_s > _DETAIL_S:
                return detail
            await asyncio.sleep(_LOOK_S)

    async def drain(self, request: Request) -> FleetStatus:
        """Give an instance no new requests, and wait until it has none."""
        name = self._name(await self.reader.read(InstanceRequest, request))
        async with self._busy:
            await self._drain(name)
        return await self.status()

    async def resume(self, request: Request) -> FleetStatus:
        """Give a drained instance requests again."""
        name = self._name(await self.reader.read(InstanceRequest, request))
        await self._set_draining(name, draining=False)
        return await self.status()

    async def switch(self, request: Request) -> FleetStatus:
        """Change the type of an instance; returns when it serves as that."""
        body = await self.reader.read(SwitchRequest, request)
        kind, drain_s = InstanceType(body.type), self.fleet.drain_timeout_s
        async with self._busy:
            members = await self.gateway.call(lambda llm: list(_engine(llm).members))
            if body.name not in members:
                raise NotFoundError(
                    f"no instance is named {clipped(body.name)!r}: there are {', '.join(members)}", "name"
                )
            await self.gateway.call(lambda llm: _switch(_engine(llm), body.name, kind, drain_s))
            await self._until(partial(_has_switched, body.name), body.name, drain_s + SWITCH_S)
        return await self.status()

    async def restart(self, request: Request) -> FleetStatus:
        """Drain an instance, start its process again, and wait until it is there. Without a name: each."""
        body = await self.reader.read(InstanceRequest, request)
        lifecycle = self._lifecycle()
        async with self._busy:
            members = await self.gateway.call(lambda llm: list(_engine(llm).members))
            own = [name for name in members if self.fleet.groups[group_of(name, self.fleet)].is_local]
            if body.name is not None and body.name in members and body.name not in own:
                elsewhere = f"name: {body.name} is started by something else, and restarted there"
                raise RequestError(elsewhere, "name")
            for name in own if body.name is None else [body.name]:
                await self._restart(name, lifecycle)
        return await self.status()

    async def scale(self, request: Request) -> FleetStatus:
        """Start or end instances of a group. Those that end are drained first."""
        body = await self.reader.read(ScaleRequest, request)
        self._lifecycle()
        if body.group not in self.fleet.groups or not self.fleet.groups[body.group].is_local:
            local = [name for name, group in self.fleet.groups.items() if group.is_local]
            raise RequestError(f"group: the groups of this host are {', '.join(local)}", "group")
        await self.resize(body.group, body.count)
        return await self.status()

    async def resize(self, group: str, count: int) -> None:
        """Start instances of a group, or drain and end some, as `first_to_end` orders them."""
        lifecycle = self._lifecycle()
        async with self._busy:
            members = await self.gateway.call(lambda llm: first_to_end(_engine(llm)))
            own = [name for name in members if group_of(name, self.fleet) == group]
            if not count and len(own) == len(members):
                raise ConflictError("the fleet would have no instance: scale another group up first")
            for name in own[: max(0, len(own) - count)]:
                await self._remove(name, lifecycle)
            free = (n for n in itertools.count() if instance_name(group, n) not in own)
            for number in itertools.islice(free, max(0, count - len(own))):
                lifecycle.start(group, number)
                name = instance_name(group, number)
                await self._until(partial(_is_member, name, True), name)
                await self._wait_for(name, None)

    async def remove(self, name: str) -> None:
        """Drain an instance and end it."""
        lifecycle = self._lifecycle()
        async with self._busy:
            await self._remove(name, lifecycle)

    async def counts(self) -> FleetCounts:
        return await self.gateway.call(lambda llm: fleet_counts(_engine(llm), self.fleet))

    async def _remove(self, name: str, lifecycle: Lifecycle) -> None:
        await self._drain(name)
        lifecycle.end(name)
        await self._until(partial(_is_member, name, False), name)

    def scaling(self, clock: Clock) -> FleetScaling | None:
        """What scales the fleet as configured; None if that is off. Raises `ConfigError` for its options."""
        if self.fleet.autoscaling == "off":
            return None
        dry_run = self.fleet.autoscaling == "dry_run" or self.lifecycle is None
        return FleetScaling(self.fleet, self, clock, dry_run=dry_run)

    def _name(self, body: InstanceRequest) -> str:
        if body.name is None:
            raise RequestError("name: which instance? GET /v1/fleet lists them", "name")
        return body.name

    def _lifecycle(self) -> Lifecycle:
        if self.lifecycle is None:
            raise ConflictError(
                "the instances of this fleet are started by something else, such as Kubernetes"
            )
        return self.lifecycle

    async def _drain(self, name: str) -> None:
        """What has not ended within `fleet.drain_timeout_s` goes on at another instance."""
        await self._set_draining(name, draining=True)
        until_s = asyncio.get_running_loop().time() + self.fleet.drain_timeout_s
        while await self.gateway.call(lambda llm: _engine(llm).requests.num_on(name)):
            if asyncio.get_running_loop().time() > until_s:
                await self.gateway.call(lambda llm: _engine(llm).move_away(name))
                return
            await asyncio.sleep(_LOOK_S)

    async def _set_draining(self, name: str, *, draining: bool) -> None:
        def change(llm: LLM) -> None:
            try:
                _engine(llm).drain(name, draining=draining)
            except ConfigError as error:
                raise NotFoundError(str(error), "name") from error

        await self.gateway.call(change)

    async def _restart(self, name: str, lifecycle: Lifecycle) -> None:
        await self._drain(name)
        try:
            facts = await self.gateway.call(lambda llm: _engine(llm).members[name].facts)
            lifecycle.restart(name)
            await self._wait_for(name, facts)
        finally:
            await self._set_draining(name, draining=False)

    async def _wait_for(self, name: str, former: InstanceFacts | None) -> None:
        """Wait until an instance is there, as another process than before."""

        def is_there(llm: LLM) -> bool:
            member = _engine(llm).members.get(name)
            if member is None:
                raise ConflictError(f"{name} was given up, as there is no room for it: the log says why")
            return member.is_ready and member.load is not None and member.facts is not former

        await self._until(is_there, name, self.fleet.start_timeout_s)

    async def _until(self, is_so: Callable[[LLM], bool], name: str, timeout_s: float = 10.0) -> None:
        until_s = asyncio.get_running_loop().time() + timeout_s
        while not await self.gateway.call(is_so):
            if asyncio.get_running_loop().time() > until_s:
                raise ConflictError(f"{name} was not there within {timeout_s:g} s: its log says why")
            await asyncio.sleep(_LOOK_S)


def _engine_with(name: str, llm: LLM) -> FleetEngine:
    """Raises `NotFoundError` for a fleet without this instance."""
    engine = _engine(llm)
    if name not in engine.members:
        raise NotFoundError(f"no instance is named {clipped(repr(name))}: GET /v1/fleet lists them", "name")
    return engine


def first_to_end(engine: FleetEngine) -> list[str]:
    """The instances, those first whose end costs least.

    Those are drained ones, then those that are not connected, then the highest numbers.
    """

    def cost(name: str) -> tuple[bool, bool, int]:
        member = engine.members[name]
        return not member.draining, member.is_ready, -_number(name)

    return sorted(engine.members, key=cost)


def _switch(engine: FleetEngine, name: str, kind: InstanceType, drain_s: float) -> None:
    try:
        engine.switch(name, kind, drain_s)
    except ConfigError as error:
        raise ConflictError(str(error), "type") from error


def _has_switched(name: str, llm: LLM) -> bool:
    return not _engine(llm).roles.is_changing(name)


def _is_member(name: str, wanted: bool, llm: LLM) -> bool:
    return (name in _engine(llm).members) is wanted


def _engine(llm: LLM) -> FleetEngine:
    """Raises `NotFoundError` for a server of one engine."""
    if not isinstance(llm.engine, FleetEngine):
        raise NotFoundError(
            "this server is one engine: start it with --prefill and --decode, or a fleet file"
        )
    return llm.engine


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
