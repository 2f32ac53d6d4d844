"""The asyncio side of the engine loop: opens generations, fills them, aborts abandoned ones."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sagellm.control_plane.fleet.engine import FleetEngine
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import ServerConfig
from sagellm.core.errors import RequestError
from sagellm.core.protocols.engine import RANKS_END_S
from sagellm.core.types import SamplingParams, Tokens
from sagellm.engines.llm import LLM, Completion, RequestOptions, TextDelta
from sagellm.engines.llm.next_turns import NextTurn, NextTurns
from sagellm.serving.branches import RecentCompletions
from sagellm.serving.clients import Client, ClientLoad
from sagellm.serving.errors import GenerationError, OverloadedError, SlowClientError, UnavailableError
from sagellm.serving.loop import Answered, EngineLoop, Event, LoopFailed, Refused, answered
from sagellm.serving.metrics import RequestTimes, ServerMetrics

log = logging.getLogger("sagellm.serving")

MAX_UNREAD_BYTES = 2**20
"""Of one generation. The socket's buffers fill first, so only a client that does not read gets this far."""

DIAGNOSTICS_TIMEOUT_S = 1.0
"""How long a scrape waits for the step that runs."""

NUM_WORKERS = 16
"""Threads that wait for answers of a fleet's instances. They are made when they are needed."""

T = TypeVar("T")

_POLL_S = 0.01
_CODES = {400: "invalid_value", 429: OverloadedError.code, 503: UnavailableError.code}

_BYTES_PER_TOKEN = 64
"""What a token, or an alternative to it, takes at least, beside its text."""


@dataclass(slots=True)
class _OpenRequest:
    """A request in the engine, with what it counts for in `ClientLoad`.

    `position` is that of its prompt in the generation; `num_tokens` the most it may hold and generate.
    """

    generation: Generation
    position: int
    num_choices: int
    times: RequestTimes
    client: Client
    num_tokens: int
    started: bool = False


class Generation:
    """The deltas of one HTTP request, each with the position of its prompt.

    Iterates over batches. A batch holds all that came since the last one, so a client that lags gets fewer
    and larger pieces. The iteration ends when all prompts have ended or the generation is closed. It raises
    the error of the first prompt to fail, after what came before. More than `MAX_UNREAD_BYTES` unread end the
    generation, and are dropped. `on_answer` is called with the answer to its one prompt at the end.
    """

    def __init__(self, gateway: Gateway, num_requests: int) -> None:
        self.generation_id = uuid.uuid4().hex
        self.closed = False
        self.request_ids: set[str] = set()
        self.times: list[RequestTimes] = []
        self.on_answer: Callable[[Completion], None] | None = None
        self._answer: list[TextDelta] = []
        self._gateway = gateway
        self._num_running = num_requests
        self._unread: list[tuple[int, TextDelta]] = []
        self._unread_bytes = 0
        self._error: RequestError | None = None
        self._changed = asyncio.Event()

    def put(self, position: int, delta: TextDelta) -> None:
        self._unread.append((position, delta))
        self._unread_bytes += _size(delta)
        self._changed.set()
        if self.on_answer is not None:
            self._answer.append(delta)
            if delta.is_last:
                self.on_answer(_joined(self._answer))
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._unread.clear()
            self.fail(SlowClientError(f"the client left more than {MAX_UNREAD_BYTES} bytes unread"))
            self._gateway.abort(self.request_ids)

    def fail(self, error: RequestError) -> None:
        """End with this error, unless there is an earlier one."""
        self._error = self._error or error
        self._changed.set()

    def close(self) -> None:
        """Abort the requests that still run, since their client has left. Idempotent."""
        if not self.closed:
            self.closed = True
            self._gateway.abort(self.request_ids)
            self._changed.set()

    async def wait(self) -> None:
        """Wait for something to read. An error is raised and closes the generation."""
        await self._changed.wait()
        if not self._unread and self._error is not None:
            self.close()
            raise self._error

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[tuple[int, TextDelta]]:
        if not self._num_running:
            raise StopAsyncIteration
        await self.wait()
        batch, self._unread, self._unread_bytes = self._unread, [], 0
        if not batch:
            raise StopAsyncIteration
        if not self.closed and self._error is None:
            self._changed.clear()
        self._num_running -= sum(delta.is_last for _, delta in batch)
        return batch


def _joined(deltas: Sequence[TextDelta]) -> Completion:
    """The deltas of one choice, in linear time."""
    completion = Completion.empty(deltas[0].request_id, 1)
    completion.choices[0].text = "".join(delta.text for delta in deltas)
    completion.choices[0].token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return completion


def _size(delta: TextDelta) -> int:
    """Bytes that an unread delta keeps, roughly and at least.

    The prompt's log-probabilities come once and do not count: they may be more than a client has time to
    read.
    """
    entries = len(delta.token_ids) + sum(1 + len(entry.top) for entry in delta.logprobs)
    return len(delta.text) + _BYTES_PER_TOKEN * entries


class Gateway:
    """Owns the engine loop. Methods are for the asyncio thread that called `start`.

    At most `settings.max_waiting` sequences may wait for their first token; requests beyond that are refused.
    """

    def __init__(self, llm: LLM, settings: ServerConfig, *, clock: Clock | None = None) -> None:
        self.llm = llm
        self.settings = settings
        self._clock = clock or MonotonicClock()
        self.load = ClientLoad(settings)
        self._open: dict[str, _OpenRequest] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._ids = itertools.count()
        self._workers = ThreadPoolExecutor(NUM_WORKERS, "sagellm-questions")
        self._draining = False
        self._hurried = False
        self.next_turns: NextTurns | None = None
        if settings.prefill_next_turn and llm.tokenizer.reasoning_token_ids:
            defer = self._workers.submit if self._is_fleet else lambda do: do()
            self.next_turns = NextTurns(llm, self._clock, defer)
        self.recent = RecentCompletions(settings.remembered_tokens)
        self._loop = EngineLoop(llm, self._deliver, self.next_turns)
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self.metrics = ServerMetrics(
            llm.model_name,
            llm.capability(),
            lambda: self._loop.stats,
            experts=settings.expert_metrics,
            accelerations=llm.accelerations,
        )

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
    def tier_faults(self) -> Sequence[str]:
        """Tiers of the KV cache that are not used now, and why.

        Not of the last step: a thread may have found since that a shared store works again.
        """
        return self.llm.engine.tier_faults()

    @property
    def _is_fleet(self) -> bool:
        return isinstance(self.llm.engine, FleetEngine)

    @property
    def attributes_misses(self) -> bool:
        """Whether the engine says why blocks had to be computed."""
        return self._loop.stats.misses is not None

    @property
    def num_open(self) -> int:
        """Open requests and calls."""
        return len(self._open) + len(self._calls)

    @property
    def stopped(self) -> bool:
        """Whether the engine's thread has ended; the caller may then use the `llm`."""
        return self._loop.stopped

    def open(self, prompts: Sequence[Tokens], options: RequestOptions) -> Generation:
        """Submit all prompts, or none if it raises.

        Raises `UnavailableError`, `OverloadedError`, or `RequestError` for more tokens than one request may
        have.
        """
        n, client = options.params.n, options.client
        self.check_room(len(prompts), n, client)
        sizes = [len(tokens) + n * self._most_tokens(tokens, options.params) for tokens in prompts]
        self.load.check_tokens(client, sum(sizes), self.llm.max_model_len)
        generation = Generation(self, len(prompts))
        options = replace(options, client=(*client, generation.generation_id))
        now_s, opened = self._clock.now(), list[str]()
        for position, (tokens, num_tokens) in enumerate(zip(prompts, sizes, strict=True)):
            request_id = f"http-{next(self._ids)}"
            times = RequestTimes(now_s)
            generation.times.append(times)
            self._open[request_id] = _OpenRequest(generation, position, n, times, client, num_tokens)
            self.load.enter(client, n, num_tokens)
            generation.request_ids.add(request_id)
            opened.append(request_id)
            self._loop.submit(request_id, tokens, options)
        self.recent.open(generation.generation_id, options.tenant, n, prompts, opened)
        return generation

    async def call(self, do: Callable[[LLM], T]) -> T:
        """Call `do` on the engine's thread between steps; returns its result.

        Raises the `SageError` that `do` raises, and `CallError` for another exception. As many calls may wait
        as sequences; beyond that it raises `OverloadedError`, without an engine `UnavailableError`.
        """
        return await self._answer(lambda answer: self._loop.call(do, answer))

    async def ask(self, do: Callable[[LLM], T]) -> T:
        """As `call`, for pins, hints and other questions.

        Instances of a fleet answer them after their step, so `do` is called on a thread that may wait.
        """
        if not self._is_fleet:
            return await self.call(do)

        def ask(answer: asyncio.Future[T]) -> None:
            self._workers.submit(lambda: self._deliver([answered(self.llm, do, answer)]))

        return await self._answer(ask)

    async def _answer(self, begin: Callable[[asyncio.Future[T]], None]) -> T:
        self._check_alive()
        if len(self._calls) >= self.settings.max_waiting:
            raise OverloadedError(f"{len(self._calls)} calls wait for the engine: try again later")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(answer)
        try:
            begin(answer)
            return await answer
        finally:
            self._calls.remove(answer)

    def expect_turn(self, make: Callable[[], NextTurn | None]) -> None:
        """Have the turn that `make` returns computed while the engine idles. `make` is called on a worker."""

        def make_and_queue() -> None:
            try:
                turn = make()
            except RequestError as error:
                log.debug("what the next turn begins with is not known: %s", error)
            else:
                if turn is not None:
                    self._loop.expect(turn)

        self._workers.submit(make_and_queue)

    async def metrics_text(self) -> bytes:
        """The exposition format, with the engine's diagnostics as of now.

        Shows the last diagnostics where a step takes longer than `DIAGNOSTICS_TIMEOUT_S` or the engine has
        ended.
        """
        try:
            async with asyncio.timeout(DIAGNOSTICS_TIMEOUT_S):
                self.metrics.diagnostics = await self.call(lambda llm: llm.diagnostics())
        except (TimeoutError, RequestError):
            log.debug("the engine has not answered; its last diagnostics are shown")
        return self.metrics.text()

    def abort(self, request_ids: set[str]) -> None:
        """Abort these requests, which are open, and forget them."""
        for request_id in list(request_ids):
            self._loop.abort(request_id)
            self._forget(request_id, "abort")

    def refuse_new(self) -> None:
        """Answer new requests 503 from now on. Running ones go on."""
        self._draining = True

    def fail_open(self, message: str) -> None:
        """End every generation and every call with an error that its client receives."""
        for request_id in list(self._open):
            self._loop.abort(request_id)
            self._end_with(request_id, UnavailableError(message))
        for answer in self._calls:
            if not answer.done():
                answer.set_exception(UnavailableError(message))

    def hurry(self) -> None:
        """Make `close` return without waiting for the step that runs."""
        self._hurried = True

    async def close(self, timeout_s: float) -> None:
        """Stop the engine loop. Open generations end with an error.

        A step has `timeout_s` to end, none after `hurry`. Then the other ranks of the model are ended, by
        force after `RANKS_END_S` (at once after `hurry`): a step that waits for one of them ends too, and no
        rank is left when this returns.
        """
        self.refuse_new()
        self.fail_open("the server is shutting down")
        self._loop.request_stop()
        await self._wait_for_loop(timeout_s)
        if not self.stopped:
            log.warning("the engine's last step did not end in time")
            grace_s = 0.0 if self._hurried else RANKS_END_S
            if await asyncio.to_thread(self._loop.end_ranks, grace_s):
                await self._wait_for_loop(RANKS_END_S)
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._asyncio = None

    async def _wait_for_loop(self, timeout_s: float) -> None:
        """Wait for the end of the loop, of the time, or for `hurry`."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + timeout_s
        while not (self.stopped or self._hurried or now_s() >= until_s):
            await asyncio.sleep(_POLL_S)

    def check_room(self, num_prompts: int, n: int, client: Client) -> None:
        """Raise what `open` would for so many prompts, before they are encoded."""
        num_sequences, most = num_prompts * n, self.load.most_of_one_client
        max_n = self.settings.max_n
        if n > max_n:
            text = f"n must be at most {max_n} on this server (server.max_n), got {n}"
            raise RequestError(f"{text}: send several requests", "n", "integer_above_max_value")
        if num_sequences > most:
            at_most = f"at most {most} sequences of a client may wait on this server (server.max_waiting)"
            asked = f"{num_prompts} prompts times n = {n} are {num_sequences}: send fewer at a time"
            raise RequestError(f"{at_most}; {asked}", "n" if n > most else "prompt")
        self._check_alive()
        self.load.check_waiting(client, num_sequences)

    def _most_tokens(self, tokens: Tokens, params: SamplingParams) -> int:
        """The most that one choice may generate."""
        room = max(0, self.llm.max_model_len - len(tokens))
        return room if params.max_tokens is None else min(room, params.max_tokens)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise UnavailableError(f"the engine has failed and must be restarted: {self.failure}")
        if not self.ready:
            raise UnavailableError("the server is starting or shutting down: try again")

    def _deliver(self, events: list[Event]) -> None:
        """Pass the events of one step from the engine's thread to the asyncio thread."""
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
                case Answered(answer, result, error):
                    if answer.done():  # its client has left, or has the error of a shutdown
                        continue
                    if error is not None:
                        answer.set_exception(error)
                    else:
                        answer.set_result(result)
                case LoopFailed(failure):
                    self.fail_open(f"the engine has failed: {failure}")

    def _on_delta(self, delta: TextDelta, now_s: float) -> None:
        entry = self._open.get(delta.request_id)
        if entry is None:
            return
        self._mark_started(entry)
        self.metrics.on_delta(delta, entry.times, now_s)
        self.recent.add(entry.generation.generation_id, entry.position, delta)
        if delta.error is not None:
            self._loop.abort(delta.request_id)
            error = GenerationError(delta.error)
            error.status, error.code = delta.error_status, _CODES.get(delta.error_status, error.code)
            self._end_with(delta.request_id, error)
            return
        if delta.is_last:
            reason = delta.finish_reason
            is_voted = delta.consensus is not None  # its last choice may have been aborted
            self._forget(delta.request_id, "stop" if is_voted or reason is None else reason.value)
        entry.generation.put(entry.position, delta)

    def _end_with(self, request_id: str, error: RequestError) -> None:
        entry = self._open.get(request_id)
        if entry is not None:
            self._forget(request_id, "error")
            entry.generation.fail(error)

    def _mark_started(self, entry: _OpenRequest) -> None:
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
