"""/v1/admin: what an operator may change on a running server, with `server.admin_key`.

That is: pinned prompts, the cached blocks, the eviction policy, the scheduling strategy and accelerations.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from pydantic import Field

from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.core.config import Config
from sagellm.core.errors import CapacityError, RequestError, SageError
from sagellm.core.protocols.engine import PinnedPrefix
from sagellm.core.registry import registry
from sagellm.core.types import Tokens
from sagellm.engines.build import replace_strategy
from sagellm.engines.build_kv import replace_policy
from sagellm.engines.llm import LLM, RequestOptions
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.serving.access_log import record_of
from sagellm.serving.answers import (
    CacheCleared,
    CurrentPolicy,
    CurrentStrategy,
    Pin,
    PinDeleted,
    PinList,
)
from sagellm.serving.clients import NO_CLIENT
from sagellm.serving.errors import ConflictError, NotFoundError, clipped
from sagellm.serving.gateway import Gateway
from sagellm.serving.prompts import PromptEncoder
from sagellm.serving.reader import RequestReader
from sagellm.serving.schema import Body, PromptFields
from sagellm.serving.sse import closed_on_disconnect

MAX_PINS = 1024


class PinRequest(PromptFields):
    """POST /v1/admin/pins: a prompt of the tenant `cache_salt`. At least one whole block of tokens."""


class PolicyRequest(Body):
    """PUT /v1/admin/eviction_policy, and its answer. The policy says which options it takes."""

    policy: str
    options: dict[str, Any] = Field(default_factory=dict)


class StrategyRequest(Body):
    """PUT /v1/admin/scheduling_strategy, and its answer. `options` by name of pass."""

    strategy: str
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Acceleration(Body):
    """What one acceleration has saved since the start, and spent for that, by unit.

    `exact`: it changes no output.
    """

    name: str
    on: bool
    exact: bool
    saved: dict[str, float]
    spent: dict[str, float]


class AccelerationList(Body):
    """The answer of GET and PUT /v1/admin/accelerations."""

    object: Literal["list"] = "list"
    data: list[Acceleration]


class SwitchAcceleration(Body):
    """PUT /v1/admin/accelerations: switch one of those that GET lists."""

    name: str
    on: bool


@dataclass(slots=True)
class SchedulingInUse:
    """The eviction policy and scheduling strategy in use."""

    policy: CurrentPolicy
    strategy: CurrentStrategy

    @classmethod
    def of(cls, config: Config | None) -> SchedulingInUse:
        """Those of the engine's configuration; None: it was not built from one."""
        if config is None:
            return cls(CurrentPolicy(), CurrentStrategy())
        scheduler = config.scheduler
        strategy = None if scheduler.passes is not None else scheduler.strategy
        passes = _passes(strategy) if strategy is not None else list(scheduler.passes or ())
        return cls(
            CurrentPolicy(policy=config.kv.eviction, options=config.kv.eviction_options),
            CurrentStrategy(strategy=strategy, passes=passes, options=scheduler.pass_options),
        )


@dataclass(frozen=True, slots=True)
class AdminRoutes:
    """The handlers. A change happens between two steps of an engine, whole or not at all.

    Running requests go on.
    """

    gateway: Gateway
    reader: RequestReader
    encoder: PromptEncoder
    current: SchedulingInUse
    pins: dict[str, tuple[PinnedPrefix, Pin]] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def pin(self, request: Request) -> Pin:
        """Compute the prompt unless it is cached, then hold its whole blocks."""
        body = await self.reader.read(PinRequest, request)
        tenant = record_of(request.scope).tenant = body.cache_salt or ""
        tokens = await run_in_threadpool(self.encoder.of, body)
        await self._compute(request, tokens, tenant)
        pin_id = f"pin-{next(self._ids)}"
        return await self.gateway.ask(lambda llm: self._hold(llm, pin_id, tokens, tenant))

    async def list_pins(self) -> PinList:
        return PinList(data=[pin for _, pin in list(self.pins.values())])

    async def unpin(self, pin_id: str) -> PinDeleted:
        def release(_llm: LLM) -> PinDeleted:
            if pin_id not in self.pins:
                raise NotFoundError(f"no prompt is pinned as {clipped(repr(pin_id))}", "pin_id")
            self.pins.pop(pin_id)[0].release()
            return PinDeleted(id=pin_id)

        return await self.gateway.call(release)

    async def clear_cache(self, request: Request) -> CacheCleared:
        """With `reset_external=true` also the tiers below the device; the name is vLLM's."""
        tiers = request.query_params.get("reset_external", "false")
        if tiers not in ("true", "false"):
            raise RequestError("reset_external is true or false", "reset_external")
        clear = self.gateway.ask(lambda llm: llm.clear_cache(tiers=tiers == "true"))
        return CacheCleared(num_blocks=await clear)

    async def get_policy(self) -> CurrentPolicy:
        return self.current.policy

    async def set_policy(self, request: Request) -> PolicyRequest:
        body = await self.reader.read(PolicyRequest, request)

        def replace(llm: LLM) -> None:
            if isinstance(llm.engine, FleetEngine):
                llm.engine.replace_policy(body.policy, body.options)
            else:
                replace_policy(llm.engine, body.policy, **body.options)
            self.current.policy = CurrentPolicy(policy=body.policy, options=body.options)

        await self._replace("policy", body.policy, registry("policy").names(), body.options, replace)
        return body

    async def get_strategy(self) -> CurrentStrategy:
        return self.current.strategy

    async def set_strategy(self, request: Request) -> StrategyRequest:
        body = await self.reader.read(StrategyRequest, request)

        def replace(llm: LLM) -> None:
            if isinstance(llm.engine, FleetEngine):
                llm.engine.replace_strategy(body.strategy, body.options)
            else:
                replace_strategy(llm.engine, body.strategy, **body.options)
            self.current.strategy = CurrentStrategy(
                strategy=body.strategy, passes=_passes(body.strategy), options=body.options
            )

        await self._replace("strategy", body.strategy, strategies.STRATEGIES, body.options, replace)
        return body

    async def list_accelerations(self) -> AccelerationList:
        return await self.gateway.call(_accelerations)

    async def switch_acceleration(self, request: Request) -> AccelerationList:
        body = await self.reader.read(SwitchAcceleration, request)

        def switch(llm: LLM) -> AccelerationList:
            llm.accelerations.switch(body.name, on=body.on)
            return _accelerations(llm)

        return await self.gateway.call(switch)

    async def _replace(
        self,
        param: str,
        name: str,
        known: Iterable[str],
        options: Mapping[str, Any],
        replace: Callable[[LLM], None],
    ) -> None:
        """Check the request, then call `replace`. A name that is a module's path would import any code."""
        if name not in known:
            shown, names = clipped(repr(name)), ", ".join(sorted(known))
            raise RequestError(f"{param}: {shown} is unknown here; known are {names}", param)
        _check_options(options)

        def replaced(llm: LLM) -> None:
            try:
                replace(llm)
            except SageError as error:
                refused = RequestError(str(error), param)
                refused.status = getattr(error, "status", refused.status)
                raise refused from error

        async with self._turn:  # `current` is what came last
            await self.gateway.ask(replaced)

    async def _compute(self, request: Request, tokens: Tokens, tenant: str) -> None:
        params = self.gateway.llm.sampling_params(max_tokens=1)
        self.gateway.llm.resolve(tokens, params)
        generation = self.gateway.open([tokens], RequestOptions(params, tenant=tenant, client=NO_CLIENT))
        record_of(request.scope).times = generation.times
        async with closed_on_disconnect(request.receive, generation):
            async for _ in generation:
                pass

    def _hold(self, llm: LLM, pin_id: str, tokens: Tokens, tenant: str) -> Pin:
        """Pin the prompt; for the thread of `ask`."""
        if len(self.pins) >= MAX_PINS:
            raise ConflictError(f"{MAX_PINS} prompts are pinned: delete one first")
        try:
            hold = llm.pin_cached(tokens, tenant=tenant)
        except CapacityError as error:
            raise ConflictError(str(error)) from error
        if not hold.num_blocks:
            whole = "only whole blocks are held, and none of this prompt is cached"
            raise RequestError(f"{whole}: send a longer one ({len(tokens)} tokens)", "prompt")
        pin = Pin(id=pin_id, cache_salt=tenant, num_tokens=hold.num_tokens, num_blocks=hold.num_blocks)
        self.pins[pin_id] = hold, pin
        return pin


def _accelerations(llm: LLM) -> AccelerationList:
    return AccelerationList(
        data=[
            Acceleration(
                name=each.name,
                on=each.is_on,
                exact=each.is_exact,
                saved=dict(each.saved),
                spent=dict(each.spent),
            )
            for each in llm.accelerations.report()
        ]
    )


def _passes(strategy: str) -> list[str]:
    return [name for name, _ in strategies.STRATEGIES.get(strategy, ())]


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that name a module, since predictors are plug-ins, too."""
    values = list(options.values())
    for value in values:
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
        elif isinstance(value, str) and ":" in value:
            raise RequestError("options: only the configuration may name other modules", "options")
