"""A server with OpenAI's API whose model is a hash, whose noise is drawn, and whose cache can be broken."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.serving.live import free_port, wait_until

VOCABULARY = 64
Tokens = tuple[str, ...]


@dataclass
class FakeServer:
    """What a server can do, its noise, and how it is broken.

    `noise` is the standard deviation of every logit; with probability `outliers` an answer has
    `outlier_noise` instead. With probability `corrupt` a hit forgets the first token of its context;
    `corrupt_shift` moves all logits of a hit by so much at random, always the same way for the same prompt.
    """

    block_size: int = 16
    salts: bool = True
    leaking_salts: bool = False
    tell: str | None = "usage"
    token_prompts: bool = True
    logprobs: bool = True
    completions: bool = True
    noise: float = 0.0
    outliers: float = 0.0
    outlier_noise: float = 0.0
    corrupt: float = 0.0
    corrupt_shift: float = 0.0
    corrupt_after_restart: float = 0.0
    wrong_count: int = 0
    seconds_per_token: float = 0.0
    dies_after: int | None = None
    model: str = "fake"
    capacity: int | None = None
    seed: int = 0
    hits: int = field(default=0, init=False)
    num_asked: int = field(default=0, init=False)
    url: str = field(default="", init=False)
    _cached: dict[str, list[Tokens]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def app(self) -> Starlette:
        routes = [Route("/v1/models", self._models), Route("/metrics", self._metrics)]
        routes += [Route("/restart", self._restart)]
        routes += [Route("/v1/completions", self._completions, methods=["POST"])] if self.completions else []
        return Starlette(routes=[*routes, Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": self.model, "max_model_len": 512}]})

    async def _restart(self, _: Request) -> Response:
        """Keeps the cache, as one on disk."""
        self.corrupt = self.corrupt_after_restart
        return PlainTextResponse("")

    async def _metrics(self, _: Request) -> Response:
        counter = f'vllm:prefix_cache_hits_total{{model="fake"}} {self.hits}\n'
        return PlainTextResponse(counter if self.tell == "metrics" else "")

    async def _completions(self, request: Request) -> Response:
        body = json.loads(await request.body())
        prompt = body["prompt"]
        if isinstance(prompt, list) and not self.token_prompts:
            return JSONResponse({"error": "prompt must be a string"}, 400)
        tokens = tuple(f"t{unit}" for unit in prompt) if isinstance(prompt, list) else tuple(prompt.split())
        return await self._answer(body, tokens, chat=False)

    async def _chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        tokens = ("<user>", *body["messages"][0]["content"].split(), "</user>", "<assistant>")
        return await self._answer(body, tokens, chat=True)

    async def _answer(self, body: dict[str, Any], tokens: Tokens, *, chat: bool) -> Response:
        self.num_asked += 1
        if self.dies_after is not None and self.num_asked > self.dies_after:
            return PlainTextResponse("<html>Bad Gateway</html>")
        salt = body.get("cache_salt")
        if self.salts and salt is not None and not isinstance(salt, str):
            return JSONResponse({"error": "cache_salt must be a string"}, 422)
        if not self.logprobs and body.get("logprobs"):
            return JSONResponse({"error": "no logprobs"}, 500)
        space = "" if self.leaking_salts or not self.salts else str(salt)
        hit = self._lookup(space, tokens)
        await asyncio.sleep(self.seconds_per_token * (len(tokens) - hit))
        scores = self._generate(body, tokens, hit)
        self._store(space, tokens + tuple(token for token, _ in scores))
        if body.get("stream"):
            return StreamingResponse(_slow_stream(), media_type="text/event-stream")
        return JSONResponse(self._written(body, tokens, hit, scores, chat=chat))

    def _lookup(self, space: str, tokens: Tokens) -> int:
        shared = max((_common(tokens, other) for other in self._cached.get(space, ())), default=0)
        hit = min(shared, len(tokens) - 1) // self.block_size * self.block_size
        self.hits += hit
        return hit

    def _store(self, space: str, tokens: Tokens) -> None:
        self._cached.setdefault(space, []).append(tokens)
        if self.capacity is not None and sum(map(len, self._cached.values())) > self.capacity:
            self._cached.pop(next(iter(self._cached)), None)

    def _generate(self, body: dict[str, Any], tokens: Tokens, hit: int) -> list[tuple[str, dict[str, float]]]:
        sigma = self.outlier_noise if self._rng.random() < self.outliers else self.noise
        broken = bool(hit) and self._rng.random() < self.corrupt
        context = tokens[1:] if broken else tokens
        forced = next(iter(body.get("logit_bias") or ()), None)
        scores = []
        for _ in range(body.get("max_tokens", 1)):
            logits = _logits(context) + sigma * np.random.default_rng(self._rng.getrandbits(32)).normal(
                size=VOCABULARY
            )
            if hit and self.corrupt_shift:
                logits += self.corrupt_shift * _logits(("shift", *context))
            logprobs = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logprobs)[:5]
            token = f"t{forced}" if forced else f"t{best[0]}"
            top = {f"t{i}": float(logprobs[i]) for i in best}
            scores.append((token, top | {token: float(logprobs[int(token[1:]) % VOCABULARY])}))
            context = (*context, token)
        return scores

    def _written(
        self,
        body: dict[str, Any],
        tokens: Tokens,
        hit: int,
        scores: list[tuple[str, dict[str, float]]],
        *,
        chat: bool,
    ) -> dict[str, Any]:
        text = "".join(f" {token}" for token, _ in scores)
        logprobs: dict[str, Any] | None = None
        if body.get("logprobs") and chat:
            tops = [[{"token": name, "logprob": value} for name, value in top.items()] for _, top in scores]
            content = [
                {"token": token, "logprob": top[token], "top_logprobs": listed}
                for (token, top), listed in zip(scores, tops, strict=True)
            ]
            logprobs = {"content": content}
        elif body.get("logprobs"):
            logprobs = {
                "tokens": [token for token, _ in scores],
                "token_logprobs": [top[token] for token, top in scores],
                "top_logprobs": [top for _, top in scores],
            }
        choice = {"index": 0, "logprobs": logprobs, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage: dict[str, Any] = {"prompt_tokens": len(tokens), "completion_tokens": len(scores)}
        if self.tell == "usage":
            usage["prompt_tokens_details"] = {"cached_tokens": hit + self.wrong_count if hit else 0}
        answer = {"id": "x", "choices": [choice], "usage": usage}
        return answer | ({"timings": {"cache_n": hit}} if self.tell == "timings" else {})

    @contextmanager
    def running(self) -> Iterator[FakeServer]:
        """The server on a free port."""
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(self.app(), port=port, log_level="error", ws="none"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(10)


async def _slow_stream() -> Any:
    for _ in range(3):
        yield b'data: {"choices": [{"text": "t1"}]}\n\n'
        await asyncio.sleep(0.001)


def _logits(context: Tokens) -> np.ndarray:
    return 2.0 * np.random.default_rng(zlib.crc32(" ".join(context).encode())).normal(size=VOCABULARY)


def _common(left: Tokens, right: Tokens) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
