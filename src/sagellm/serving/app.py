"""The OpenAI-compatible HTTP application around one `LLM`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

import sagellm
from sagellm.core.clock import Clock
from sagellm.core.errors import RequestError, UnknownModelError
from sagellm.engines.llm import LLM
from sagellm.serving import errors
from sagellm.serving.gateway import Gateway
from sagellm.serving.generate import Generator
from sagellm.serving.parameters import parse
from sagellm.serving.schema import DetokenizeRequest, TokenizeRequest, options_of

DEFAULT_MAX_WAITING = 1024
DEFAULT_STOP_TIMEOUT_S = 5.0


def create_app(
    llm: LLM,
    *,
    model_name: str | None = None,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    max_waiting: int = DEFAULT_MAX_WAITING,
    stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S,
    clock: Clock | None = None,
    wall_clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The application; its lifespan starts and stops the engine loop, the caller closes the `llm` afterwards.

    `model_name` is what clients call the model. With an `api_key`, all but /health, /ready, /version and
    /metrics want it as a bearer token. At most `max_waiting` sequences wait for their first token, then 429.
    A step that runs at shutdown is waited for `stop_timeout_s`.
    """
    gateway = Gateway(llm, max_waiting=max_waiting, clock=clock)
    lifespan = _lifespan_of(gateway, stop_timeout_s)
    app = FastAPI(title="sageLLM", version=sagellm.__version__, lifespan=lifespan)
    app.state.gateway = gateway
    errors.install(app)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    models = Models(model_name or llm.model_name, llm.max_model_len, int(wall_clock()))
    _add_open_routes(app, gateway)
    _add_api_routes(app, gateway, models, wall_clock, Depends(_key_check(api_key)))
    return app


@dataclass(frozen=True, slots=True)
class Models:
    """The one model that is served, under its public name."""

    name: str
    max_model_len: int
    created: int

    def check(self, name: str | None) -> str:
        """The served name; no name means this model. Raises `UnknownModelError`."""
        if name is not None and name != self.name:
            raise UnknownModelError(f"the model {name!r} is not served here; {self.name!r} is", "model")
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
class TokenRoutes:
    """/tokenize and /detokenize, in vLLM's form."""

    llm: LLM
    models: Models

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body = parse(TokenizeRequest, await request.body())
        self.models.check(body.model)
        tokens = await run_in_threadpool(self._tokens, body)
        texts = [self.llm.tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in tokens]
        return {
            "count": len(tokens),
            "max_model_len": self.llm.max_model_len,
            "tokens": tokens,
            "token_strs": texts if body.return_token_strs else None,
        }

    async def detokenize(self, request: Request) -> dict[str, str]:
        body = parse(DetokenizeRequest, await request.body())
        self.models.check(body.model)
        limit = self.llm.tokenizer.vocab_size
        wrong = next((token_id for token_id in body.tokens if not 0 <= token_id < limit), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is not in the vocabulary [0, {limit})", "tokens")
        return {"prompt": self.llm.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    def _tokens(self, body: TokenizeRequest) -> list[int]:
        tokenizer = self.llm.tokenizer
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            return tokenizer.encode(body.prompt, add_special_tokens=special).tolist()
        prompted = body.add_generation_prompt is not False
        options = options_of(body)
        tokens = tokenizer.encode_chat(
            body.messages or [], add_generation_prompt=prompted, template_options=options
        )
        return tokens.tolist()


def _lifespan_of(gateway: Gateway, stop_timeout_s: float) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        yield
        await gateway.close(stop_timeout_s)

    return lifespan


def _add_open_routes(app: FastAPI, gateway: Gateway) -> None:
    """What probes and scrapers ask, without a key."""

    @app.get("/health")
    async def health() -> Response:
        if gateway.failure is not None:
            raise errors.UnavailableError(f"the engine has failed: {gateway.failure}")
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if not gateway.ready:
            raise errors.UnavailableError("not ready: starting, shutting down, or the engine has failed")
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": sagellm.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_api_routes(
    app: FastAPI, gateway: Gateway, models: Models, wall_clock: Callable[[], float], key: Any
) -> None:
    generator = Generator(gateway, models.check, wall_clock)
    tokens = TokenRoutes(gateway.llm, models)
    posts: dict[str, Callable[[Request], Awaitable[Any]]] = {
        "/v1/chat/completions": generator.chat,
        "/v1/completions": generator.completions,
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
    }
    for path, handler in posts.items():
        app.add_api_route(path, handler, methods=["POST"], dependencies=[key])
    app.add_api_route("/v1/models", models.list, dependencies=[key])
    app.add_api_route("/v1/models/{model:path}", models.get, dependencies=[key])


def _key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """A dependency that raises `UnauthorizedError` unless the request carries the key."""

    async def check(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), api_key.encode()):
            defect = "the API key is wrong" if given else "no API key"
            raise errors.UnauthorizedError(f"{defect}: send it as 'Authorization: Bearer KEY'")

    return check
