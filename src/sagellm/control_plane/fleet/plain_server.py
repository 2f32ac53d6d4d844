"""`PlainServer`: the `EngineClient` of a vLLM or SGLang server, over HTTP.

    unreachable --its list of models, its kind--> connected --+
        ^                                                     |  its health fails, or it serves us no more
        +-------------------- backoff <-----------------------+

All servers share one thread with an event loop (`PlainServers`); the methods of a client only hand it work.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sagellm.control_plane.fleet.client import FIRST_BACKOFF_S, LONGEST_BACKOFF_S
from sagellm.control_plane.fleet.plain_events import PlainEvents
from sagellm.control_plane.fleet.plain_http import PlainHttp
from sagellm.control_plane.fleet.plain_kind import (
    MISPLACED,
    REFUSED,
    LoadReading,
    Piece,
    PlainKind,
    PlainProgress,
    PlainServerError,
    decoded,
    num_left,
)
from sagellm.control_plane.fleet.plain_meter import PlainMeter
from sagellm.control_plane.fleet.plain_sglang import SglangKind
from sagellm.control_plane.fleet.plain_vllm import VllmKind
from sagellm.control_plane.fleet.record import InstanceRecord
from sagellm.core.clock import Clock
from sagellm.core.errors import ConfigError, RequestError, SageError
from sagellm.core.features import PROMPT_LOGPROBS
from sagellm.core.fleet_config import PlainServerConfig
from sagellm.core.kv_hints import HintOutcome, HintStatus, KVHintsEnvelope
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats
from sagellm.core.protocols.fleet import (
    CallResult,
    Connected,
    HandOver,
    InstanceEvent,
    InstanceFacts,
    InstanceLost,
    RequestRefused,
)
from sagellm.core.protocols.router import ExecutionInstance, InstanceType
from sagellm.core.types import CapabilityDescriptor, FinishReason, Request, RequestOutput

log = logging.getLogger("sagellm.fleet")
ASK_S = 10.0
"""The facts of a server, its load and the emptying of its cache take at most so long."""
MAX_TRIES = 6
"""A request that a busy server does not take is sent again so often."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class PlainTerms:
    """What a front expects of its plain servers.

    `model`: the name that its clients use. `sample`: a text, and the tokens that its tokenizer makes of it; a
    server whose tokenizer makes others is not connected. `interval_s`: between two looks at health and load.
    `lease_s`: a server that sends nothing for so long is lost. `stall_s`: an answer may bring nothing for so
    long.
    """

    model: str
    vocab_size: int
    sample: tuple[str, tuple[int, ...]] = ("", ())
    interval_s: float = 0.25
    lease_s: float = 2.0
    stall_s: float = 600.0


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


_MODELS, _TOKENS = msgspec.json.Decoder(_Models), msgspec.json.Decoder(_Tokens)


@dataclass(slots=True, eq=False)
class _Link:
    """One connection: from the server's facts to its loss.

    `sign_s`: when the server last sent anything. `fault`: why it is to end; `look` is set with it.
    """

    kind: PlainKind
    facts: InstanceFacts
    meter: PlainMeter
    sign_s: float
    events: PlainEvents | None = None
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    look: asyncio.Event = field(default_factory=asyncio.Event)
    fault: str = ""

    def give_up(self, reason: str) -> None:
        self.fault = self.fault or reason
        self.look.set()


class PlainServer:
    """Implements `EngineClient` for a plain server. Made by `PlainServers.add`.

    Its methods are for one thread. It takes no part in hand-overs. What only an instance of sageLLM can do is
    answered with an error.
    """

    def __init__(
        self,
        instance_id: str,
        config: PlainServerConfig,
        api_key: str | None,
        terms: PlainTerms,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
    ) -> None:
        self._id, self._config, self._terms = instance_id, config, terms
        self._clock, self._loop, self._wake = clock, loop, wake
        self.endpoint = config.url.rstrip("/").removesuffix("/v1")
        self._http = PlainHttp(self.endpoint, api_key, stall_s=terms.stall_s, num_kept=config.max_num_seqs)
        self._events: deque[InstanceEvent] = deque()
        self._call_ids = itertools.count(1)
        self._num_links = 0
        self._link: _Link | None = None  # of the loop's thread
        self._facts: InstanceFacts | None = None  # of the caller's, as are the following
        self._load: ExecutionInstance | None = None
        self.record = InstanceRecord(clock)
        self.fault = "it has not been reached yet"
        """Why it is not connected; empty while it is."""
        self._running: Future[None] = asyncio.run_coroutine_threadsafe(self._run(), loop)
        self._running.add_done_callback(self._on_end)

    # -- EngineClient

    @property
    def instance_id(self) -> str:
        return self._id

    @property
    def facts(self) -> InstanceFacts | None:
        return self._facts

    @property
    def has_events(self) -> bool:
        """Whether `poll` has something to give."""
        return bool(self._events)

    def submit(
        self, request: Request, hand_over: HandOver | None = None, onward: HandOver | None = None
    ) -> None:
        if self._facts is None:
            return
        if hand_over is not None or onward is not None:
            error = RequestError(f"{self._id} is a plain server: no KV goes there or comes from there")
            self._events.append(RequestRefused(request.request_id, error))
            return
        self._loop.call_soon_threadsafe(self._begin, request)

    def abort(self, request_id: str) -> None:
        self.record.drop(request_id)
        self._loop.call_soon_threadsafe(self._drop, request_id)

    def call(self, name: str, arguments: Sequence[Any] = ()) -> int:
        call_id = next(self._call_ids)
        if self._facts is None:
            answer = CallResult(call_id, error=SageError(f"{self._id} is not connected: {self.fault}"))
            self._events.append(answer)
        elif name == "clear_cache":
            asyncio.run_coroutine_threadsafe(self._clear(call_id), self._loop)
        else:
            self._events.append(self._answer_to(call_id, name, arguments))
        return call_id

    def drain(self, *, draining: bool) -> None:
        """The front alone knows."""

    def add_peer(self, facts: InstanceFacts) -> None:
        """No KV goes there."""

    def lose_peer(self, instance_id: str) -> None:
        """No KV comes from there."""

    def poll(self) -> Sequence[InstanceEvent]:
        found: list[InstanceEvent] = []
        while self._events:
            event = self._events.popleft()
            if isinstance(event, Connected):
                self._facts = event.facts
            elif isinstance(event, InstanceLost):
                self._facts = self._load = None
            elif isinstance(event, ExecutionInstance):
                self._load = event
            self.record.take(event)
            found.append(event)
        return found

    def look(self) -> bool:
        """It has no diagnostics that we know."""
        return False

    def close(self) -> None:
        """End its requests and the connection. Returns before they have ended."""
        self._running.cancel()
        self._facts = None

    def _answer_to(self, call_id: int, name: str, arguments: Sequence[Any]) -> CallResult:
        load = self._load
        if name == "stats":
            if load is None:
                return CallResult(call_id, EngineStats(0, 0, 0, 0, 0))
            active = load.num_blocks - load.num_free_blocks
            return CallResult(
                call_id, EngineStats(load.num_running, load.num_waiting, active, 0, load.num_free_blocks)
            )
        if name == "diagnostics":
            return CallResult(call_id, EngineDiagnostics())
        if name == "hint":
            envelope: KVHintsEnvelope = arguments[0]
            why = f"{self._id} is a plain server"
            return CallResult(
                call_id,
                [
                    HintOutcome(action.action_id, HintStatus.UNSUPPORTED, reason=why)
                    for action in envelope.actions
                ],
            )
        return CallResult(
            call_id, error=RequestError(f"{self._id} is a plain server, which cannot be asked {name!r}")
        )

    # -- from here on the loop's thread: connections

    def _post(self, event: InstanceEvent) -> None:
        """For any thread."""
        self._events.append(event)
        self._wake()

    async def _run(self) -> None:
        """Connect, and again when the connection is lost, until cancelled."""
        pause_s = FIRST_BACKOFF_S
        try:
            while True:
                try:
                    link = await self._connect()
                except PlainServerError as error:
                    self._note(str(error))
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)
                    continue
                pause_s, self.fault = FIRST_BACKOFF_S, ""
                log.info("%s is %s at %s", self._id, link.kind.name, self.endpoint)
                self._note(await self._keep(link))
                self._post(InstanceLost(self.fault))
                await asyncio.sleep(FIRST_BACKOFF_S)
        finally:
            await self._http.close()

    def _on_end(self, running: Future[None]) -> None:
        """An error that is none of the server's, but ours: it stays lost."""
        if not running.cancelled() and (error := running.exception()) is not None:
            self.fault = f"its client has failed: {error!r}"
            log.error("%s: its client has failed", self._id, exc_info=error)
            self._post(InstanceLost(self.fault))

    def _note(self, reason: str) -> None:
        if reason != self.fault:
            log.warning("%s at %s is not connected: %s", self._id, self.endpoint, reason)
        self.fault = reason

    async def _connect(self) -> _Link:
        """Raises `PlainServerError` that says what is wrong with the server or with our configuration."""
        models = decoded(_MODELS, await self._get("/v1/models"), "/v1/models").data
        name = self._config.model or self._terms.model
        model = next((each for each in models if each.id == name), None)
        if model is None:
            names = ", ".join(each.id for each in models[:10]) or "nothing"
            raise PlainServerError(f"it serves {names}, not {name}: set `model` of the server to one of them")
        if not model.max_model_len or model.max_model_len < 2:
            raise PlainServerError(f"it does not say the longest context of {name}")
        kind: PlainKind
        match model.owned_by:
            case "vllm":
                kind = await VllmKind.connect(self._get, name, model.max_model_len)
            case "sglang":
                kind = await SglangKind.connect(self._get, model.max_model_len)
            case "sagellm":
                raise PlainServerError("it is a server of sageLLM: name its instances by `addresses`")
            case other:
                raise PlainServerError(f"it is neither vLLM nor SGLang: its model is owned by {other!r}")
        await self._compare_tokens(name)
        await self._get(kind.health_path)
        try:
            reading = kind.reading(await self._get(kind.load_path))
        except PlainServerError:
            reading = None
        self._num_links += 1
        start = (reading.start if reading else "") or f"connection {self._num_links}"
        facts = InstanceFacts(
            self._id,
            start,
            InstanceType.GENERAL,
            self._capability(kind),
            kind.max_model_len,
            draws_by_position=kind.draws_by_position,
            kv_events=self._config.events or "",
            kv_replay=self._config.replay or "",
        )
        return _Link(kind, facts, PlainMeter(facts, self._clock), self._clock.now(), self._kv_events())

    def _kv_events(self) -> PlainEvents | None:
        config = self._config
        if config.events is None:
            return None
        try:
            return PlainEvents(config.events, config.replay, config.topic, self._post)
        except ConfigError as error:
            raise PlainServerError(str(error)) from error

    def _capability(self, kind: PlainKind) -> CapabilityDescriptor:
        """`dtype` is empty, since no server tells it."""
        return CapabilityDescriptor(
            device=kind.name,
            dtype="",
            vocab_size=self._terms.vocab_size,
            max_model_len=kind.max_model_len,
            num_blocks=kind.num_blocks,
            block_size=kind.block_size,
            max_num_seqs=self._config.max_num_seqs,
            features=frozenset({PROMPT_LOGPROBS}),
        )

    async def _compare_tokens(self, model: str) -> None:
        """A server of another model would give tokens that mean something else to us."""
        text, ours = self._terms.sample
        if not text:
            return
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            found = await self._post_json("/tokenize", body)
        except PlainServerError as error:
            if error.status in (404, 405, 501):  # it does not say
                return
            raise
        theirs = decoded(_TOKENS, found, "/tokenize").tokens
        if tuple(theirs) != ours:
            raise PlainServerError(
                f"its tokenizer is another one than ours: it makes {theirs[:8]} of {text[:20]!r}, not "
                f"{list(ours[:8])}. All instances of a fleet serve one model"
            )

    async def _keep(self, link: _Link) -> str:
        """Serve requests until the connection is lost; returns why."""
        self._link = link
        self._post(Connected(link.facts))
        reports = asyncio.create_task(self._report(link))
        try:
            if link.events is not None:
                link.events.start()
            return await self._watch(link)
        finally:
            self._link = None
            tasks = [reports, *link.tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if link.events is not None:
                await asyncio.to_thread(link.events.close)

    async def _watch(self, link: _Link) -> str:
        while not link.fault:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(link.look.wait(), self._terms.interval_s)
            link.look.clear()
            if not link.fault:
                await self._is_alive(link)
        return link.fault

    async def _is_alive(self, link: _Link) -> bool:
        """Whether its health is good; if not, the connection ends. A busy server may be late, as long as it
        sends tokens."""
        try:
            await self._get(link.kind.health_path, self._terms.lease_s)
            link.sign_s = self._clock.now()
        except PlainServerError as error:
            if not error.is_silence or self._clock.now() >= link.sign_s + self._terms.lease_s:
                link.give_up(str(error))
        return not link.fault

    async def _report(self, link: _Link) -> None:
        """Report its load again and again. One that cannot be read is what we have sent."""
        unread = ""
        while True:
            read_s = self._clock.now()
            reading: LoadReading | None = None
            try:
                reading = link.kind.reading(await self._get(link.kind.load_path))
            except PlainServerError as error:
                if str(error) != unread:
                    log.warning("%s: its load is guessed: %s", self._id, error)
                unread = str(error)
            if reading is not None and reading.start and reading.start != link.facts.start_id:
                link.give_up("it has been started again")
                return
            events = link.events
            self._post(
                link.meter.report(
                    reading,
                    read_s,
                    is_fresh=events is not None and events.is_fresh,
                    num_evicted=0 if events is None else events.num_evicted,
                )
            )
            await asyncio.sleep(self._terms.interval_s)

    # -- requests

    def _begin(self, request: Request) -> None:
        link = self._link
        if link is not None:
            task = self._loop.create_task(self._answer(link, request))
            link.tasks[request.request_id] = task
            task.add_done_callback(lambda _: self._ended(link, request.request_id, task))

    def _ended(self, link: _Link, request_id: str, task: asyncio.Task[None]) -> None:
        link.meter.end(request_id)
        if link.tasks.get(request_id) is task:
            del link.tasks[request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: a request failed in an unexpected way", self._id, exc_info=error)
            self._post(RequestRefused(request_id, SageError(f"{self._id}: {error!r}")))

    def _drop(self, request_id: str) -> None:
        """Close its stream, which aborts it at the server."""
        link = self._link
        if link is not None and (task := link.tasks.get(request_id)) is not None:
            task.cancel()

    async def _answer(self, link: _Link, request: Request) -> None:
        """Have the server answer, and say so. What may succeed in another attempt is refused as such."""
        if request.generated and num_left(request, link.kind.max_model_len) <= 0:
            self._post(_complete(request))
            return
        try:
            content = msgspec.json.encode(link.kind.body(request))
        except RequestError as error:
            self._post(RequestRefused(request.request_id, error))
            return
        link.meter.begin(request.request_id, len(request.tokens) + len(request.generated))
        for num_tries in itertools.count():
            progress = PlainProgress(request, link.kind.max_model_len, self._terms.vocab_size)
            try:
                await self._stream(link, request, content, progress)
                return
            except PlainServerError as error:
                if error.status in REFUSED:
                    refusal = RequestError(f"{self._id} refuses the request: {error}")
                    self._post(RequestRefused(request.request_id, refusal))
                    return
                if error.status in MISPLACED:
                    link.give_up(str(error))
                    return
                if not await self._is_alive(link):
                    return
                if progress.num_tokens or num_tries == MAX_TRIES:
                    failure = SageError(f"{self._id}: {error}")
                    self._post(RequestRefused(request.request_id, failure, again=True))
                    return
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**num_tries))

    async def _stream(self, link: _Link, request: Request, content: bytes, progress: PlainProgress) -> None:
        """Post what the server answers. Raises `PlainServerError` unless it has answered to the end."""
        answer = link.kind.answer(request)
        messages = self._http.messages(link.kind.path, content, streams=answer.streams)
        try:
            async with contextlib.aclosing(messages):
                async for message in messages:
                    if not self._take(link, request, progress, answer.read(message)):
                        break
        except PlainServerError:
            if not progress.is_over:
                raise
        self._post(progress.end())

    def _take(self, link: _Link, request: Request, progress: PlainProgress, piece: Piece | None) -> bool:
        """False: the answer is over."""
        link.sign_s = self._clock.now()
        if piece is None:
            return False
        output = progress.take(piece)
        if piece.token_ids:
            link.meter.token(request.request_id, len(piece.token_ids))
        if output is not None:
            self._post(output)
        return True

    # -- questions

    async def _clear(self, call_id: int) -> None:
        """The number of blocks is not known: 0."""
        link = self._link
        if link is None:
            return  # a `InstanceLost` says so
        try:
            await self._post_json(link.kind.clear_path, {})
        except PlainServerError as error:
            refusal = RequestError(f"{self._id}: {error}. {link.kind.clear_hint}")
            self._post(CallResult(call_id, error=refusal))
            return
        self._post(CallResult(call_id, 0))

    async def _get(self, path: str, timeout_s: float = ASK_S) -> bytes:
        return await self._http.ask("GET", path, None, timeout_s)

    async def _post_json(self, path: str, body: dict[str, Any]) -> bytes:
        return await self._http.ask("POST", path, msgspec.json.encode(body), ASK_S)


_CLOSING_S = 0.05
"""A transport that was closed ends in later turns of its loop. What is open when the loop ends stays open."""


class PlainServers:
    """The thread on which a front speaks to its plain servers. `wake` is called when one has events."""

    def __init__(self, terms: PlainTerms, clock: Clock, wake: Callable[[], None]) -> None:
        self._terms, self._clock, self._wake = terms, clock, wake
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="plain servers", daemon=True)
        self._thread.start()

    def add(self, instance_id: str, config: PlainServerConfig, api_key: str | None = None) -> PlainServer:
        return PlainServer(instance_id, config, api_key, self._terms, self._clock, self._loop, self._wake)

    def close(self) -> None:
        """End all connections, and the thread."""
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()
        await asyncio.sleep(_CLOSING_S)


def _complete(request: Request) -> RequestOutput:
    """All its tokens were drawn before; only the end was not said."""
    return RequestOutput(
        request.request_id, (), len(request.tokens), 0, len(request.generated),
        finish_reason=FinishReason.LENGTH,
    )  # fmt: skip
