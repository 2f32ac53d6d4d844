"""The OpenAI-compatible HTTP application around one `LLM`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

import sagellm
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, UnknownModelError
from sagellm.engines.llm import LLM
from sagellm.serving import errors
from sagellm.serving.access_log import REQUEST_ID_HEADER, AccessLog, Refusals
from sagellm.serving.admin import AdminRoutes, SchedulingInUse, admin_check
from sagellm.serving.clients import ClientLimits
from sagellm.serving.gateway import DEFAULT_LIMITS, Gateway
from sagellm.serving.generate import GenerationRoutes
from sagellm.serving.openapi import Limits, document
from sagellm.serving.prompts import PromptEncoder
from sagellm.serving.reader import RequestReader
from sagellm.serving.schema import IGNORED_HEADER, DetokenizeRequest, HintRequest, TokenizeRequest

DEFAULT_MAX_WAITING = 1024
DEFAULT_MAX_BODY_BYTES = 32 * 2**20
DEFAULT_BODY_TIMEOUT_S = 60.0
DEFAULT_STOP_TIMEOUT_S = 5.0


def create_app(
    llm: LLM,
    *,
    config: Config | None = None,
    model_name: str | None = None,
    api_key: str | None = None,
    client_keys: Mapping[str, str] | None = None,
    client_limits: ClientLimits = DEFAULT_LIMITS,
    admin_key: str | None = None,
    cors_origins: Sequence[str] = (),
    max_waiting: int = DEFAULT_MAX_WAITING,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S,
    stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S,
    log_requests: bool = True,
    clock: Clock | None = None,
    wall_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The application. Its lifespan starts and stops the engine loop; the caller closes the `llm` afterwards.

    `config`: what the `llm` was built from, if from one; /v1/admin shows its policy and strategy.
    `model_name`: the model's name for clients.
    `api_key`, `client_keys`: the bearer tokens, for all routes but /health, /ready, /version and /metrics;
    `client_keys` has one by the name of each client.
    `client_limits`: what one client may ask for. `max_waiting`: sequences that may wait for a first token;
    beyond that, 429. A body larger than `max_body_bytes` gets 413, one slower than `body_timeout_s` 408.
    A shutdown waits `stop_timeout_s` for the step that runs. `log_requests`: a line each in `sagellm.access`.
    """
    keys = _names_by_key(api_key, client_keys or {}, admin_key)
    gateway = Gateway(llm, max_waiting=max_waiting, client_limits=client_limits, clock=clock)
    lifespan = _lifespan_of(gateway, stop_timeout_s)
    app = FastAPI(title="sageLLM", version=sagellm.__version__, lifespan=lifespan)
    app.state.gateway = gateway
    app.state.wants_key = bool(keys)
    errors.install(app)
    _allow_origins(app, cors_origins)
    log_clock, count = clock or MonotonicClock(), gateway.metrics.on_http
    app.add_middleware(AccessLog, clock=log_clock, count=count, enabled=log_requests)
    app.state.refusals = Refusals(log_clock, count, enabled=log_requests)
    models = ServedModel(model_name or llm.model_name, llm.max_model_len, int(wall_clock()))
    _add_open_routes(app, gateway)
    reader, encoder = RequestReader(max_body_bytes, body_timeout_s), PromptEncoder(llm)
    generation = GenerationRoutes(gateway, reader, encoder, models.check, wall_clock)
    others = TokenAndHintRoutes(gateway, reader, encoder, models)
    key = Depends(_key_check(keys))
    for path, handler in (
        ("/v1/chat/completions", generation.chat),
        ("/v1/completions", generation.completions),
        ("/v1/kv/hints", others.hint),
        ("/tokenize", others.tokenize),
        ("/detokenize", others.detokenize),
    ):
        app.add_api_route(path, handler, methods=["POST"], dependencies=[key])
    _add_get(app, "/v1/models", models.list, dependencies=[key])
    _add_get(app, "/v1/models/", models.list, dependencies=[key], include_in_schema=False)
    _add_get(app, "/v1/models/{model:path}", models.get, dependencies=[key])
    admin = AdminRoutes(gateway, reader, encoder, models.check, SchedulingInUse.of(config))
    _add_admin_routes(app, admin, Depends(admin_check(admin_key)))
    _describe(app, gateway, models)
    return app


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model that is served, under its public name."""

    name: str
    max_model_len: int
    created: int

    def check(self, name: str | None) -> str:
        """The served name; no name means this model. Raises `UnknownModelError`."""
        if name is not None and name != self.name:
            shown = errors.clipped(repr(name))
            raise UnknownModelError(f"the model {shown} is not served here; {self.name!r} is", "model")
        return self.name

    def card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "sagellm",
            "max_model_len": self.max_model_len,
        }

    async def list(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [self.card()]}

    async def get(self, model: str) -> dict[str, Any]:
        """GET /v1/models/{id}."""
        self.check(model)
        return self.card()


@dataclass(frozen=True, slots=True)
class TokenAndHintRoutes:
    """/tokenize and /detokenize, in vLLM's form, and /v1/kv/hints."""

    gateway: Gateway
    reader: RequestReader
    encoder: PromptEncoder
    models: ServedModel

    async def hint(self, request: Request) -> dict[str, Any]:
        """Carry out KV hints that belong to no request; one outcome per action.

        Only what is no envelope is an error.
        """
        body = await self.reader.read(HintRequest, request)
        self.models.check(body.model)
        tenant = body.cache_salt or ""
        outcomes = await self.gateway.call(lambda llm: llm.hint(body.kv_hints, tenant=tenant))
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
        self.models.check(body.model)
        return await run_in_threadpool(self._tokenized, body)

    async def detokenize(self, request: Request) -> dict[str, str]:
        body = await self.reader.read(DetokenizeRequest, request)
        self.models.check(body.model)
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
            "max_model_len": self.models.max_model_len,
            "tokens": tokens.tolist(),
            "token_strs": self.encoder.token_texts(tokens) if body.return_token_strs else None,
        }


def _names_by_key(
    api_key: str | None, client_keys: Mapping[str, str], admin_key: str | None
) -> dict[str, str]:
    """The name of the client that has each key; "" for `api_key`. Raises `ConfigError` for unsafe keys."""
    if api_key is not None and not api_key.strip():
        raise ConfigError("api_key is empty: give it a value, or None for a server that wants no key")
    names = {key: name for name, key in client_keys.items()}
    if any(not key.strip() for key in names) or len(names) < len(client_keys):
        raise ConfigError("client_keys: each client needs a key of its own, which is not empty")
    if api_key is not None:
        names.setdefault(api_key, "")
    if admin_key is not None and (not admin_key.strip() or admin_key in names):
        raise ConfigError("admin_key is empty, or the api_key, which every client has: choose another")
    return names


def _describe(app: FastAPI, gateway: Gateway, models: ServedModel) -> None:
    """Serve the document of `openapi.py` in place of FastAPI's."""

    @cache
    def described() -> dict[str, Any]:
        limits = Limits(
            models.name,
            gateway.llm.tokenizer.vocab_size,
            models.max_model_len,
            min(gateway.load.limits.max_n, gateway.load.most_of_one_client),
            gateway.load.limits.max_priority,
            attributes_misses=gateway.attributes_misses,
        )
        return document(limits, wants_key=app.state.wants_key)

    app.openapi = described  # type: ignore[method-assign]


def _allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins call the server and read its headers."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER],
        )


def _lifespan_of(gateway: Gateway, stop_timeout_s: float) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        yield
        await gateway.close(stop_timeout_s)

    return lifespan


def _add_open_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes for probes and scrapers, which need no key."""

    async def health() -> Response:
        if gateway.failure is not None:
            raise errors.UnavailableError(f"the engine has failed: {gateway.failure}")
        return JSONResponse({"status": "ok"})

    async def ready() -> Response:
        if not gateway.ready:
            raise errors.UnavailableError("not ready: starting, shutting down, or the engine has failed")
        return JSONResponse({"status": "ready"})

    async def version() -> dict[str, str]:
        return {"version": sagellm.__version__}

    async def metrics() -> Response:
        return Response(await gateway.metrics_text(), media_type=CONTENT_TYPE_LATEST)

    for handler in (health, ready, version, metrics):
        _add_get(app, f"/{handler.__name__}", handler)


def _add_admin_routes(app: FastAPI, admin: AdminRoutes, key: Any) -> None:
    """Add our own paths, and those of vLLM and SGLang for clearing the cache."""
    for method, path, handler in (
        ("POST", "/v1/admin/pins", admin.pin),
        ("GET", "/v1/admin/pins", admin.list_pins),
        ("DELETE", "/v1/admin/pins/{pin_id}", admin.unpin),
        ("GET", "/v1/admin/eviction_policy", admin.get_policy),
        ("PUT", "/v1/admin/eviction_policy", admin.set_policy),
        ("GET", "/v1/admin/scheduling_strategy", admin.get_strategy),
        ("PUT", "/v1/admin/scheduling_strategy", admin.set_strategy),
        ("POST", "/reset_prefix_cache", admin.clear_cache),
        ("POST", "/flush_cache", admin.clear_cache),
    ):
        app.add_api_route(path, handler, methods=[method], dependencies=[key])


def _add_get(app: FastAPI, path: str, handler: Callable[..., Awaitable[Any]], **options: Any) -> None:
    """Add GET and HEAD. The HTTP server leaves out the body of an answer to HEAD."""
    app.add_api_route(path, handler, methods=["GET"], **options)
    app.add_api_route(path, handler, methods=["HEAD"], **(options | {"include_in_schema": False}))


def _key_check(keys: Mapping[str, str]) -> Callable[[Request], Awaitable[None]]:
    """A dependency that raises `UnauthorizedError` for a request without one of the keys.

    It does nothing if there are no keys, and stores the name that belongs to the key in `request.state`.
    """

    async def check(request: Request) -> None:
        if not keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.encode("latin-1")  # as headers come
        # Every key is compared, in constant time, so that the time reveals nothing about a key.
        names = [name for key, name in keys.items() if secrets.compare_digest(sent, key.encode())]
        if scheme.lower() != "bearer" or not names:
            defect = "the API key is wrong" if given else "no API key"
            raise errors.UnauthorizedError(f"{defect}: send it as 'Authorization: Bearer KEY'")
        request.state.key_name = names[0]

    return check
