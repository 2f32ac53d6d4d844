"""The asyncio side of the engine loop: opens generations, feeds them, ends those that nobody waits for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import RequestError
from sagellm.core.kv_hints import HintOutcome, KVHintsEnvelope
from sagellm.core.types import SLO, Retention, SamplingParams, Tokens
from sagellm.engines.llm import LLM, TextDelta
from sagellm.serving.clients import Client, ClientLimits, ClientLoad
from sagellm.serving.errors import GenerationError, OverloadedError, SlowClientError, UnavailableError
from sagellm.serving.loop import Abort, Answered, Call, EngineLoop, Event, LoopFailed, Refused, Submit
from sagellm.serving.metrics import RequestTimes, ServerMetrics

log = logging.getLogger("sagellm.serving")

MAX_UNREAD_BYTES = 2**20
"""Of one generation. The socket's buffers come before it: only a client that does not read gets here."""

DIAGNOSTICS_TIMEOUT_S = 1.0
"""How long a scrape waits for the step that runs."""

T = TypeVar("T")

_POLL_S = 0.01
DEFAULT_LIMITS = ClientLimits()
NO_CLIENT: Client = ("", "")

_BYTES_PER_TOKEN = 64
"""What a token, or an alternative to it, takes at least beside its text."""


@dataclass(slots=True)
class _Open:
    """A request in the engine: whose it is, its place among the prompts, its times, its tokens at most."""

    generation: Generation
    position: int
    num_choices: int
    times: RequestTimes
    client: Client
    num_tokens: int
    started: bool = False


Item = tuple[int, TextDelta]


class Generation:
    """What a client waits for: the deltas of one or several prompts, each with its prompt's position.

    Iterates over batches: all that came since the last look, so that a client that lags gets fewer and larger
    pieces. Ends when all requests have ended or the generation is closed; raises the error of the first to
    fail, after what came before it. More than `MAX_UNREAD_BYTES` unread are thrown away and end it.
    """

    def __init__(self, gateway: Gateway, num_requests: int) -> None:
        self.generation_id = uuid.uuid4().hex
        self.closed = False
        self.request_ids: set[str] = set()
        self.times: list[RequestTimes] = []
        self._gateway = gateway
        self._num_running = num_requests
        self._items: list[Item] = []
        self._unread_bytes = 0
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._unread_bytes += _size(item[1])
        self._news.set()
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._items.clear()
            self.fail(SlowClientError(f"the client left more than {MAX_UNREAD_BYTES} bytes unread"))
            self._gateway.abandon(self.request_ids)

    def fail(self, error: RequestError) -> None:
        """The first error counts."""
        self._error = self._error or error
        self._news.set()

    def close(self) -> None:
        """Nobody waits any more: what still runs is aborted. Idempotent."""
        if not self.closed:
            self.closed = True
            self._gateway.abandon(self.request_ids)
            self._news.set()

    async def wait(self) -> None:
        """Until there is something to read; raises if that is an error, which then ends the generation."""
        await self._news.wait()
        if not self._items and self._error is not None:
            self.close()
            raise self._error

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Item]:
        if not self._num_running:
            raise StopAsyncIteration
        await self.wait()
        batch, self._items, self._unread_bytes = self._items, [], 0
        if not batch:
            raise StopAsyncIteration
        if not self.closed and self._error is None:
            self._news.clear()
        self._num_running -= sum(delta.is_last for _, delta in batch)
        return batch


def _size(delta: TextDelta) -> int:
    """Bytes, roughly and at least, that a delta keeps while nobody reads it. The prompt's log-probabilities,
    which come once, do not count: they may be more than what a client is given time for.
    """
    entries = len(delta.token_ids) + sum(1 + len(entry.top) for entry in delta.logprobs)
    return len(delta.text) + _BYTES_PER_TOKEN * entries


class Gateway:
    """Owns the engine loop; all methods but `_deliver` are for the asyncio thread that called `start`.

    At most `max_waiting` sequences may be without their first token; what would go beyond is refused.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int,
        client_limits: ClientLimits = DEFAULT_LIMITS,
        clock: Clock | None = None,
    ) -> None:
        self.llm = llm
        self._clock = clock or MonotonicClock()
        self.load = ClientLoad(client_limits, max_waiting)
        self._open: dict[str, _Open] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._draining = False
        self._hurried = False
        self._loop = EngineLoop(llm, self._deliver)
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self.metrics = ServerMetrics(llm.model_name, llm.capability(), lambda: self._loop.stats)

    def start(self) -> None:
        self._asyncio = asyncio.get_running_loop()
        self._loop.start()

    @property
    def failure(self) -> Exception | None:
        """What ended the engine loop, if anything did."""
        return self._loop.failure

    @property
    def ready(self) -> bool:
        return self._loop.alive and not self._draining

    @property
    def attributes_misses(self) -> bool:
        """Whether the engine says why blocks had to be computed."""
        return self._loop.stats.misses is not None

    @property
    def num_open(self) -> int:
        """Requests and calls whose clients still wait for an answer."""
        return len(self._open) + len(self._calls)

    @property
    def stopped(self) -> bool:
        """Whether the engine's thread has ended, so that the `llm` is the caller's again."""
        return self._loop.stopped

    def open(
        self,
        prompts: Sequence[Tokens],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        service_class: str = "",
        session_id: str | None = None,
        kv_hints: KVHintsEnvelope | None = None,
        slo: SLO | None = None,
        retention: Sequence[Retention] = (),
        client: Client = NO_CLIENT,
    ) -> Generation:
        """Submit all prompts. Raises `UnavailableError` or `OverloadedError` and submits none."""
        self.check_room(len(prompts), params.n, client)
        sizes = [len(tokens) + params.n * self._most_tokens(tokens, params) for tokens in prompts]
        self.load.limits.check_tokens(sum(sizes), self.llm.max_model_len)
        self.load.check_tokens(client, sum(sizes))
        generation = Generation(self, len(prompts))
        now_s = self._clock.now()
        for position, (tokens, num_tokens) in enumerate(zip(prompts, sizes, strict=True)):
            request_id = f"http-{next(self._ids)}"
            times = RequestTimes(now_s)
            generation.times.append(times)
            self._open[request_id] = _Open(generation, position, params.n, times, client, num_tokens)
            self.load.enter(client, params.n, num_tokens)
            generation.request_ids.add(request_id)
            self._loop.send(
                Submit(
                    request_id,
                    tokens,
                    params,
                    priority,
                    tenant,
                    service_class,
                    session_id,
                    kv_hints,
                    slo,
                    retention,
                    client=(*client, generation.generation_id),
                )
            )
        return generation

    async def hint(self, envelope: KVHintsEnvelope, *, tenant: str = "") -> Sequence[HintOutcome]:
        """Have the engine do KV hints before its next step; one answer per action. Raises as `call`."""
        return await self.call(lambda llm: llm.hint(envelope, tenant=tenant))

    async def call(self, do: Callable[[LLM], T]) -> T:
        """What `do` returns, called on the engine's thread between two steps; raises the `SageError` that it
        raises, `CallError` for another exception. As many calls may wait as sequences; raises
        `UnavailableError` or `OverloadedError` else.
        """
        self._check_alive()
        if len(self._calls) >= self.load.max_waiting:
            raise OverloadedError(f"{len(self._calls)} calls wait for the engine: try again later")
        call_id = next(self._ids)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self._loop.send(Call(call_id, do))
            return await answer
        finally:
            del self._calls[call_id]

    async def metrics_text(self) -> bytes:
        """The exposition format. Diagnostics are the engine's now, or its last ones where a step takes longer
        than `DIAGNOSTICS_TIMEOUT_S` or the engine has ended."""
        try:
            async with asyncio.timeout(DIAGNOSTICS_TIMEOUT_S):
                self.metrics.diagnostics = await self.call(lambda llm: llm.diagnostics())
        except (TimeoutError, RequestError):
            log.debug("the engine has not answered; its last diagnostics are shown")
        return self.metrics.text()

    def abandon(self, request_ids: set[str]) -> None:
        """Abort those of these requests that are still open."""
        for request_id in list(request_ids):
            self._loop.send(Abort(request_id))
            self._forget(request_id, "abort")

    def refuse_new(self) -> None:
        """From now on new requests are answered 503; those that run go on."""
        self._draining = True

    def fail_open(self, message: str) -> None:
        """End every generation, and every call, with an error that its client gets to see."""
        for request_id in list(self._open):
            self._loop.send(Abort(request_id))
            self._end_with(request_id, UnavailableError(message))
        self._fail_calls(message)

    def hurry(self) -> None:
        """Have `close` wait no longer for the step that runs."""
        self._hurried = True

    async def close(self, timeout_s: float) -> None:
        """Stop the engine loop, within `timeout_s`; open generations end with an error."""
        self.refuse_new()
        self.fail_open("the server is shutting down")
        self._loop.request_stop()
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + timeout_s
        while not (self.stopped or self._hurried or now_s() >= until_s):
            await asyncio.sleep(_POLL_S)
        if not self.stopped:
            log.warning("the engine's last step did not end in time")
        self._asyncio = None

    def check_room(self, num_prompts: int, n: int, client: Client = NO_CLIENT) -> None:
        """Raises what `open` would for that many prompts with `n` choices each, before they are encoded."""
        num_sequences, most = num_prompts * n, self.load.most_of_one_client
        self.load.limits.check_n(n)
        if num_sequences > most:
            at_most = f"at most {most} sequences of a client may wait on this server (server.max_waiting)"
            asked = f"{num_prompts} prompts times n = {n} are {num_sequences}: send fewer at a time"
            raise RequestError(f"{at_most}; {asked}", "n" if n > most else "prompt")
        self._check_alive()
        self.load.check_waiting(client, num_sequences)

    def _most_tokens(self, tokens: Tokens, params: SamplingParams) -> int:
        """That one choice may generate."""
        room = max(0, self.llm.max_model_len - len(tokens))
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise UnavailableError(f"the engine has failed and must be restarted: {self.failure}")
        if not self.ready:
            raise UnavailableError("the server is starting or shutting down: try again")

    def _deliver(self, events: list[Event]) -> None:
        """On the engine's thread: one hand-over per step."""
        target = self._asyncio
        if target is None or target.is_closed():
            return
        target.call_soon_threadsafe(self._receive, events)

    def _receive(self, events: list[Event]) -> None:
        now_s = self._clock.now()
        for event in events:
            match event:
                case TextDelta():
                    self._on_delta(event, now_s)
                case Refused(request_id, error):
                    self._end_with(request_id, error)
                case Answered():
                    self._on_answered(event)
                case LoopFailed(failure):
                    self._fail_all(failure)

    def _on_delta(self, delta: TextDelta, now_s: float) -> None:
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        self._mark_started(entry)
        self.metrics.on_delta(delta, entry.times, now_s)
        if delta.error is not None:
            self._loop.send(Abort(delta.request_id))
            self._end_with(delta.request_id, GenerationError(delta.error))
            return
        if delta.is_last:
            self._forget(delta.request_id, delta.finish_reason.value if delta.finish_reason else "stop")
        entry.generation.put((entry.position, delta))

    def _on_answered(self, event: Answered) -> None:
        answer = self._calls.get(event.call_id)
        if answer is None or answer.done():  # its client has left, or has been told of a shutdown
            return
        if event.error is not None:
            answer.set_exception(event.error)
        else:
            answer.set_result(event.result)

    def _fail_all(self, failure: Exception) -> None:
        message = f"the engine has failed: {failure}"
        for request_id in list(self._open):
            self._end_with(request_id, UnavailableError(message))
        self._fail_calls(message)

    def _fail_calls(self, message: str) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(UnavailableError(message))

    def _end_with(self, request_id: str, error: RequestError) -> None:
        entry = self._open.get(request_id)
        if entry is not None:
            self._forget(request_id, "error")
            entry.generation.fail(error)

    def _mark_started(self, entry: _Open) -> None:
        if not entry.started:
            entry.started = True
            self.load.start(entry.client, entry.num_choices)

    def _forget(self, request_id: str, reason: str) -> None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._mark_started(entry)
            entry.times.finish_reason = reason
            self.load.leave(entry.client, entry.num_tokens)
            entry.generation.request_ids.discard(request_id)
            self.metrics.on_end(reason)
