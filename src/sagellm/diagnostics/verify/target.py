"""Requests to an OpenAI-compatible server, and its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httpx2

from sagellm.core.clock import Clock
from sagellm.core.errors import SageError
from sagellm.diagnostics.verify.answers import NUM_TOP, Answer, read_scores, text_of

Prompt = tuple[int | str, ...]
"""Units: token ids, or places in a list of words that are sent as text; a text is sent as it is."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST_TIMEOUT_S = 120.0
GET_TIMEOUT_S = 20.0
KEEPALIVE_S = 1.0
"""An idle connection is closed before servers close it, which uvicorn does after five seconds."""
MAX_ANSWER_BYTES = 16 * 2**20
BUSY = (429, 503)
MAX_RETRIES = 5
RETRY_S = 0.5
HIT_COUNTERS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_hits",
    "sglang:cached_tokens_total",
)
"""Metrics that count cached prompt tokens, for servers whose answers do not."""

HitSource = Literal["usage", "timings", "metrics"]


class UntestableError(SageError):
    """The server cannot be tested: it does not answer, or not in OpenAI's forms."""


class RefusedError(SageError):
    """The server answered a request with an error."""

    def __init__(self, request: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{request}: HTTP {status}: {text[:300]}")


@dataclass(frozen=True, slots=True)
class Form:
    """How requests to this server are written, and where it tells hits.

    `words` is None if prompts are token ids; else a unit is a place in it. `forced` is a unit that
    logit_bias can force, or None.
    """

    model: str
    path: str = COMPLETIONS
    words: tuple[str, ...] | None = None
    logprobs: bool = False
    forced: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    hits: HitSource | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One request: greedy, at most `max_tokens` generated tokens.

    `forced` generates the unit of `Form.forced` throughout; `model` other than the form's is another adapter.
    """

    prompt: Prompt
    salt: str | None = None
    max_tokens: int = 1
    forced: bool = False
    model: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


class TargetServer:
    """Owns the connection to a server, and how requests to it are written.

    Use it in `async with`.
    """

    def __init__(self, url: str, *, api_key: str | None, clock: Clock) -> None:
        if not url.startswith(("http://", "https://")):
            raise UntestableError(f"{url}: not the address of a server; write http://host:port")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise UntestableError("the API key has characters that no HTTP header may have")
        self.root = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx2.AsyncClient(
                base_url=self.root,
                headers=headers,
                timeout=REQUEST_TIMEOUT_S,
                limits=httpx2.Limits(keepalive_expiry=KEEPALIVE_S),
            )
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise UntestableError(f"{url}: not a URL ({error}); write http://host:port") from error
        self._clock = clock
        self.form = Form(model="")
        self.num_requests = 0
        self._num_busy = 0  # answers 429 and 503

    async def __aenter__(self) -> TargetServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, question: Question, *, alone: bool = True) -> Answer:
        """The answer.

        Raises `RefusedError` for an error of the server, `UntestableError` if it is not reachable. Hits
        that only metrics show are read only if no other request runs at the time (`alone`).
        """
        before = await self._hit_counter() if alone and self.form.hits == "metrics" else None
        began, busy = self._clock.now(), self._num_busy
        body = await self._post(self.form.path, self.body(question))
        seconds = self._clock.now() - began
        after = None if before is None else await self._hit_counter()
        counted = None if before is None or after is None else round(after - before)
        return self._read(body, seconds, counted, retried=self._num_busy > busy)

    async def begin_and_leave(self, question: Question, *, after_s: float | None = None) -> None:
        """Abort a request: close its stream after the first event, or after `after_s` seconds."""
        body = self.body(question) | {"stream": True}
        try:
            async with (
                asyncio.timeout(after_s),
                self._http.stream("POST", self.form.path, json=body) as response,
            ):
                async for line in response.aiter_lines():
                    if line:
                        break
        except (TimeoutError, httpx2.HTTPError):
            return
        finally:
            self.num_requests += 1

    async def get(self, path: str) -> Any:
        """The JSON of a GET; raises as `ask`."""
        return _parsed(f"GET {path}", await self._send("GET", path, None))

    async def raw_post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The JSON object of a POST; raises as `ask`."""
        return await self._post(path, body)

    async def read_hit_counter(self) -> float | None:
        """The counter of cached prompt tokens in /metrics, or None if there is none."""
        return await self._hit_counter()

    def change(self, **changes: Any) -> None:
        """Write later requests another way."""
        self.form = replace(self.form, **changes)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.num_requests += 1
        parsed = _parsed(f"POST {path}", await self._send("POST", path, body))
        if not isinstance(parsed, dict):
            raise UntestableError(f"POST {path}: the answer is no JSON object")
        return parsed

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        """The body of the answer; a busy server (429, 503) is asked again."""
        request = f"{method} {path}"
        for attempt in range(MAX_RETRIES):
            status, content = await self._exchange(method, path, body)
            if status not in BUSY:
                break
            self._num_busy += 1
            await asyncio.sleep(RETRY_S * 2**attempt)
        if 200 <= status < 300:
            return content
        refused = RefusedError(request, status, content.decode(errors="replace"))
        if status in (401, 403):
            raise UntestableError(f"the server refuses the key, give --api-key: {refused}") from refused
        if status in BUSY:
            raise UntestableError(f"the server stays busy: {refused}") from refused
        raise refused

    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        limit_s = GET_TIMEOUT_S if method == "GET" else REQUEST_TIMEOUT_S
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.stream(method, path, json=body) as response,
            ):
                if response.is_redirect:
                    where = response.headers.get("location")
                    raise UntestableError(f"{method} {self.root}{path} leads to {where}: give that address")
                content = bytearray()
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise UntestableError(f"{method} {path}: an answer of over {MAX_ANSWER_BYTES} bytes")
                return response.status_code, bytes(content)
        except TimeoutError as error:
            text = f"{method} {self.root}{path}: no whole answer within {limit_s:.0f} s"
            raise UntestableError(text) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise UntestableError(f"{method} {self.root}{path}: {reason}") from error

    def body(self, question: Question) -> dict[str, Any]:
        """The JSON of a request."""
        form = self.form
        body: dict[str, Any] = {
            "model": question.model or form.model,
            "temperature": 0,
            "max_tokens": question.max_tokens,
        }
        content = self.render(question.prompt)
        if form.path == CHAT:
            body["messages"] = [{"role": "user", "content": content}]
            body |= {"logprobs": True, "top_logprobs": NUM_TOP} if form.logprobs else {}
        else:
            body["prompt"] = content
            body |= {"logprobs": NUM_TOP} if form.logprobs else {}
        if question.forced:
            body["logit_bias"] = {str(form.forced): 100}
        if question.salt is not None:
            body["cache_salt"] = question.salt
        return body | dict(form.extra) | dict(question.fields)

    def render(self, prompt: Prompt) -> str | list[int | str]:
        """The prompt as it is sent."""
        words = self.form.words
        if words is None:
            return list(prompt)
        return "".join(unit if isinstance(unit, str) else words[unit] for unit in prompt)

    def _read(self, body: Mapping[str, Any], seconds: float, counted: int | None, *, retried: bool) -> Answer:
        try:
            choice = body["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            usage = body.get("usage") or {}
            prompt_tokens = usage.get("prompt_tokens")
            scores = read_scores(choice)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UntestableError(
                f"POST {self.form.path}: not the form of OpenAI's API ({error!r})"
            ) from error
        cached = self._cached(body, usage, counted)
        return Answer(text_of(text or ""), scores, _count(prompt_tokens), cached, seconds, retried=retried)

    def _cached(self, body: Mapping[str, Any], usage: Mapping[str, Any], counted: int | None) -> int | None:
        match self.form.hits:
            case "usage":
                return cached_in_usage(usage)
            case "timings":
                return cached_in_timings(body)
        return counted

    async def _hit_counter(self) -> float | None:
        try:
            text = (await self._send("GET", "/metrics", None)).decode(errors="replace")
        except RefusedError:
            return None
        return _sum_of(text, HIT_COUNTERS)


def cached_in_usage(usage: Mapping[str, Any]) -> int | None:
    """`prompt_tokens_details.cached_tokens`, or None."""
    details = usage.get("prompt_tokens_details")
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def cached_in_timings(body: Mapping[str, Any]) -> int | None:
    """`timings.cache_n` of llama.cpp's server, or None."""
    timings = body.get("timings")
    return _count(timings.get("cache_n")) if isinstance(timings, dict) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _sum_of(text: str, names: Sequence[str]) -> float | None:
    """The sum over all labels of the first of these metrics that is there."""
    for name in names:
        values = [
            line.rpartition(" ")[2]
            for line in text.splitlines()
            if line.startswith((f"{name}{{", f"{name} "))
        ]
        if values:
            try:
                return sum(map(float, values))
            except ValueError:
                return None
    return None


def _parsed(request: str, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        text = f"{request}: the answer is no JSON, but {content[:60]!r}; is this an OpenAI-compatible server?"
        raise UntestableError(text) from error
