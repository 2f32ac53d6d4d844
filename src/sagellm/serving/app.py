"""The OpenAI-compatible HTTP application around one `LLM`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST

import sagellm
from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import Config, ServerConfig
from sagellm.core.errors import ConfigError
from sagellm.engines.llm import LLM
from sagellm.serving import errors
from sagellm.serving.access_log import REQUEST_ID_HEADER, AccessLog, RequestLog
from sagellm.serving.admin import AdminRoutes, SchedulingInUse
from sagellm.serving.explain import ExplainRoutes
from sagellm.serving.fleet.routes import FleetRoutes, Lifecycle
from sagellm.serving.gateway import Gateway
from sagellm.serving.generate import GenerationRoutes
from sagellm.serving.openapi import ENDPOINTS, FOR_ALL, FOR_OPERATORS, document
from sagellm.serving.prompts import PromptEncoder
from sagellm.serving.reader import RequestReader
from sagellm.serving.schema import IGNORED_HEADER, DetokenizeRequest, HintRequest, TokenizeRequest

DEFAULT_SETTINGS = ServerConfig()
DEFAULT_STOP_TIMEOUT_S = 5.0

Handler = Callable[..., Awaitable[Any]]


def create_app(
    llm: LLM,
    settings: ServerConfig = DEFAULT_SETTINGS,
    *,
    config: Config | None = None,
    model_name: str | None = None,
    stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S,
    log_requests: bool = True,
    clock: Clock | None = None,
    wall_clock: Callable[[], float] = time.time,
    lifecycle: Lifecycle | None = None,
) -> FastAPI:
    """The application. Its lifespan starts and stops the engine loop; the caller closes the `llm` afterwards.

    `settings`: the keys of clients and operators, and the limits of a request, a client and a connection.
    `config`: what the `llm` was built from, if from one; /v1/admin shows its policy and strategy.
    `model_name`: the model's name for clients.
    `lifecycle`: what starts and ends the instances of a fleet, if this server has one.
    A shutdown waits `stop_timeout_s` for the step that runs. `log_requests`: a line each in `sagellm.access`.
    Raises `ConfigError` for unsafe keys.
    """
    keys = _names_by_key(settings)
    gateway = Gateway(llm, settings, clock=clock)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        scaling = fleet.scaling(clock or MonotonicClock())
        task = None if scaling is None else asyncio.create_task(scaling.run())
        yield
        if task is not None:
            task.cancel()
        await gateway.close(stop_timeout_s)

    app = FastAPI(title="sageLLM", version=sagellm.__version__, lifespan=lifespan)
    request_log = RequestLog(clock or MonotonicClock(), gateway.metrics.on_http, enabled=log_requests)
    app.state.gateway = gateway
    app.state.wants_key = bool(keys)
    app.state.request_log = request_log
    errors.install(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER],
        )
    app.add_middleware(AccessLog, request_log=request_log)
    reader = RequestReader(settings, model_name or llm.model_name)
    fleet = FleetRoutes(
        gateway, reader, (config or Config()).fleet, lifecycle, began_s=llm.engine.clock.now()
    )
    _add_routes(app, _handlers(gateway, reader, config, wall_clock, fleet), keys, settings.admin_key)
    described = partial(document, gateway, reader.model_name, wants_key=bool(keys))
    app.openapi = cache(described)  # type: ignore[method-assign] # in place of FastAPI's
    return app


@dataclass(frozen=True, slots=True)
class OtherRoutes:
    """The handlers of probes, models, hints and tokens; the last have vLLM's form.

    `created`: when the application was made, in seconds since 1970.
    """

    gateway: Gateway
    reader: RequestReader
    encoder: PromptEncoder
    created: int

    async def health(self) -> dict[str, Any]:
        if self.gateway.failure is not None:
            raise errors.UnavailableError(f"the engine has failed: {self.gateway.failure}")
        faults = list(self.gateway.tier_faults)
        return {"status": "ok", "kv_tier_faults": faults} if faults else {"status": "ok"}

    async def ready(self) -> dict[str, str]:
        if not self.gateway.ready:
            raise errors.UnavailableError("not ready: starting, shutting down, or the engine has failed")
        engine = self.gateway.llm.engine
        if isinstance(engine, FleetEngine) and not engine.is_available:
            raise errors.UnavailableError("not ready: no instance of this fleet is connected")
        return {"status": "ready"}

    async def version(self) -> dict[str, str]:
        return {"version": sagellm.__version__}

    async def metrics(self) -> Response:
        return Response(await self.gateway.metrics_text(), media_type=CONTENT_TYPE_LATEST)

    async def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.get_model(self.reader.model_name)]}

    async def get_model(self, model: str) -> dict[str, Any]:
        self.reader.check_model(model)
        return {
            "id": model,
            "object": "model",
            "created": self.created,
            "owned_by": "sagellm",
            "max_model_len": self.gateway.llm.max_model_len,
        }

    async def hint(self, request: Request) -> dict[str, Any]:
        """Carry out KV hints that belong to no request; one outcome per action.

        Only what is no envelope is an error.
        """
        body = await self.reader.read(HintRequest, request)
        tenant = body.cache_salt or ""
        outcomes = await self.gateway.ask(lambda llm: llm.hint(body.kv_hints, tenant=tenant))
        shown = [
            {
                "action_id": outcome.action_id,
                "status": outcome.status.value,
                "num_blocks": outcome.num_blocks,
                "reason": errors.clipped(outcome.reason, errors.MAX_MESSAGE_CHARS),
            }
            for outcome in outcomes
        ]
        return {"outcomes": shown}

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body = await self.reader.read(TokenizeRequest, request)
        return await run_in_threadpool(self._tokenized, body)

    async def detokenize(self, request: Request) -> dict[str, str]:
        body = await self.reader.read(DetokenizeRequest, request)
        return {"prompt": await run_in_threadpool(self.encoder.decode, body.tokens, "tokens")}

    def _tokenized(self, body: TokenizeRequest) -> dict[str, Any]:
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = self.encoder.text(body.prompt, add_special_tokens=special)
        else:
            prompted, variables = body.add_generation_prompt is not False, body.template_options()
            tokens = self.encoder.chat(body.messages or [], variables, add_generation_prompt=prompted)
        return {
            "count": len(tokens),
            "max_model_len": self.gateway.llm.max_model_len,
            "tokens": tokens.tolist(),
            "token_strs": self.encoder.token_texts(tokens) if body.return_token_strs else None,
        }


def _handlers(
    gateway: Gateway,
    reader: RequestReader,
    config: Config | None,
    wall_clock: Callable[[], float],
    fleet: FleetRoutes,
) -> dict[tuple[str, str], Handler]:
    """What answers each route of `ENDPOINTS`."""
    encoder = PromptEncoder(gateway.llm)
    generation = GenerationRoutes(gateway, reader, encoder, wall_clock)
    admin = AdminRoutes(gateway, reader, encoder, SchedulingInUse.of(config))
    explanation = ExplainRoutes(gateway, reader, encoder)
    others = OtherRoutes(gateway, reader, encoder, int(wall_clock()))
    return {
        ("GET", "/health"): others.health,
        ("GET", "/ready"): others.ready,
        ("GET", "/version"): others.version,
        ("GET", "/metrics"): others.metrics,
        ("GET", "/v1/models"): others.list_models,
        ("GET", "/v1/models/{model}"): others.get_model,
        ("POST", "/v1/chat/completions"): generation.chat,
        ("POST", "/v1/completions"): generation.completions,
        ("POST", "/v1/kv/hints"): others.hint,
        ("POST", "/v1/kv/explain"): explanation.explain,
        ("POST", "/tokenize"): others.tokenize,
        ("POST", "/detokenize"): others.detokenize,
        ("POST", "/v1/admin/pins"): admin.pin,
        ("GET", "/v1/admin/pins"): admin.list_pins,
        ("DELETE", "/v1/admin/pins/{pin_id}"): admin.unpin,
        ("GET", "/v1/admin/eviction_policy"): admin.get_policy,
        ("PUT", "/v1/admin/eviction_policy"): admin.set_policy,
        ("GET", "/v1/admin/scheduling_strategy"): admin.get_strategy,
        ("PUT", "/v1/admin/scheduling_strategy"): admin.set_strategy,
        ("GET", "/v1/admin/accelerations"): admin.list_accelerations,
        ("PUT", "/v1/admin/accelerations"): admin.switch_acceleration,
        ("GET", "/v1/fleet"): fleet.status,
        ("GET", "/v1/admin/fleet/instances/{name}"): fleet.instance,
        ("POST", "/v1/admin/fleet/drain"): fleet.drain,
        ("POST", "/v1/admin/fleet/resume"): fleet.resume,
        ("POST", "/v1/admin/fleet/switch"): fleet.switch,
        ("POST", "/v1/admin/fleet/restart"): fleet.restart,
        ("POST", "/v1/admin/fleet/scale"): fleet.scale,
        ("POST", "/reset_prefix_cache"): admin.clear_cache,
        ("POST", "/flush_cache"): admin.clear_cache,
    }


def _names_by_key(settings: ServerConfig) -> dict[str, str]:
    """The name of the client that has each key; "" for `api_key`. Raises `ConfigError` for unsafe keys."""
    api_key, admin_key = settings.api_key, settings.admin_key
    if api_key is not None and not api_key.strip():
        raise ConfigError("api_key is empty: give it a value, or None for a server that wants no key")
    names = {key: name for name, key in settings.client_keys.items()}
    if any(not key.strip() for key in names) or len(names) < len(settings.client_keys):
        raise ConfigError("client_keys: each client needs a key of its own, which is not empty")
    if api_key is not None:
        names.setdefault(api_key, "")
    if admin_key is not None and (not admin_key.strip() or admin_key in names):
        raise ConfigError("admin_key is empty, or the api_key, which every client has: choose another")
    return names


def _add_routes(
    app: FastAPI, handlers: Mapping[tuple[str, str], Handler], keys: Mapping[str, str], admin_key: str | None
) -> None:
    """Add the routes of `ENDPOINTS`, each behind its key, and HEAD beside GET."""
    admin_check = _bearer_check({admin_key: ""}, "admin key", "ADMIN_KEY") if admin_key else _refuse_admin
    for_operators = [Depends(admin_check)]
    for_clients = _client_checks(keys)
    models = handlers["GET", "/v1/models"]
    app.add_api_route(
        "/v1/models/", models, methods=["GET", "HEAD"], dependencies=for_clients, include_in_schema=False
    )
    for method, path in ENDPOINTS:
        is_admin = (method, path) in FOR_OPERATORS
        checks = [] if (method, path) in FOR_ALL else for_operators if is_admin else for_clients
        pattern, handler = path.replace("{model}", "{model:path}"), handlers[method, path]
        app.add_api_route(pattern, handler, methods=[method], dependencies=checks)
        if method == "GET" and not is_admin:  # the HTTP server leaves out the body of the answer
            app.add_api_route(
                pattern, handler, methods=["HEAD"], dependencies=checks, include_in_schema=False
            )


def client_checks(settings: ServerConfig) -> list[Any]:
    """The dependencies of a route for clients: their key, if they need one."""
    return _client_checks(_names_by_key(settings))


def _client_checks(keys: Mapping[str, str]) -> list[Any]:
    return [Depends(_bearer_check(keys, "API key", "KEY"))] if keys else []


async def _refuse_admin() -> None:
    raise errors.ForbiddenError("this needs an admin key: start the server with server.admin_key set")


def _bearer_check(names: Mapping[str, str], kind: str, shown: str) -> Handler:
    """A dependency that raises `UnauthorizedError` for a request without one of the keys.

    It stores the name that belongs to the key in `request.state`.
    """

    async def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.encode("latin-1")  # as headers come
        # Every key is compared, in constant time, so that the time reveals nothing about a key.
        found = [name for key, name in names.items() if secrets.compare_digest(sent, key.encode())]
        if scheme.lower() != "bearer" or not found:
            defect = f"the {kind} is wrong" if given else f"no {kind}"
            raise errors.UnauthorizedError(f"{defect}: send it as 'Authorization: Bearer {shown}'")
        request.state.key_name = found[0]

    return check
