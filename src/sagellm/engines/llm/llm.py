"""`LLM`: text in, text out. Joins an engine and a tokenizer; the door that CLI, HTTP and notebooks use."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, cast

from sagellm.core.clock import Clock
from sagellm.core.errors import ContextLengthError, RequestError, nearest, shown
from sagellm.core.kv_hints import HintOutcome, KVHintsEnvelope
from sagellm.core.protocols.engine import EngineCore, EngineDiagnostics, EngineStats, PinnedPrefix
from sagellm.core.protocols.prefix_cache import MissCounts
from sagellm.core.protocols.tokenizer import Message, TextTokenizer
from sagellm.core.types import (
    SLO,
    CapabilityDescriptor,
    FinishReason,
    Namespace,
    Request,
    RequestOutput,
    Retention,
    SamplingParams,
    Tokens,
)
from sagellm.engines.llm.completion import Completion, TextDelta, Usage
from sagellm.engines.llm.text_stream import Piece, TextStream

Prompt = str | Tokens | Sequence[int] | Sequence[Message]
Hints = KVHintsEnvelope | Mapping[str, Any]
"""KV hints, parsed or as decoded JSON."""

MAX_SESSION_ID_CHARS = 256
_PARAMETERS = frozenset(one.name for one in fields(SamplingParams))


@dataclass(slots=True)
class _Group:
    """A request as the caller sees it: `n` engine requests over one prompt."""

    request_id: str
    num_prompt_tokens: int
    streams: dict[str, TextStream]
    num_cached_tokens: int | None = None
    queued_s: float | None = None
    misses: MissCounts | None = None

    @property
    def usage(self) -> Usage:
        generated = sum(stream.num_tokens for stream in self.streams.values())
        return Usage(self.num_prompt_tokens, generated, self.num_cached_tokens or 0, self.misses)

    @property
    def open_ids(self) -> list[str]:
        return [engine_id for engine_id, stream in self.streams.items() if not stream.finished]


class LLM:
    """An engine with a tokenizer. Synchronous and, but for `encode` and `resolve`, for one thread. A context
    manager: it is closed at the end.

    `defaults` are sampling parameters by name for what a request leaves open (of generation_config.json).
    """

    def __init__(
        self,
        engine: EngineCore,
        tokenizer: TextTokenizer,
        *,
        model_name: str,
        max_model_len: int,
        defaults: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len = max_model_len
        self._engine = engine
        self._defaults = dict(defaults or {})
        self._clock = clock or engine.clock
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._undelivered: list[TextDelta] = []
        self._ids = itertools.count(1)
        self._closed = False

    def __repr__(self) -> str:
        return f"<LLM {self.model_name!r}, context of {self.max_model_len} tokens>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """`SamplingParams` with this model's defaults for whatever is not given. Raises `RequestError`."""
        for name in given.keys() - _PARAMETERS:
            raise RequestError(f"no sampling parameter is named {name!r}.{nearest(name, _PARAMETERS)}", name)
        return SamplingParams(**{**self._defaults, **given})

    def encode(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> Tokens:
        """Token ids of a text, of messages, or of token ids (checked against the vocabulary). Thread-safe."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, Tokens):
            return prompt
        _check_is_list(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            messages = cast("Sequence[Message]", prompt)
            return self.tokenizer.encode_chat(messages, template_options=template_options)
        return self._checked_ids(cast("Sequence[int]", prompt))

    def resolve(self, tokens: Tokens, params: SamplingParams) -> SamplingParams:
        """`params` with `max_tokens` filled in; raises `RequestError` for what this model can never serve."""
        given: object = params
        if not isinstance(given, SamplingParams):
            form = "llm.sampling_params(temperature=0.5, max_tokens=100)"
            raise RequestError(f"params must be SamplingParams, as of {form}; got {shown(params)}", "params")
        room = self.max_model_len - len(tokens)
        if room < 1:
            raise ContextLengthError(
                self.max_model_len,
                f"the prompt has {len(tokens)} and at least one must be generated: shorten the prompt",
                "prompt",
            )
        self._check_bias(params)
        if params.max_tokens is None:
            return replace(params, max_tokens=room)
        if params.max_tokens > room:
            raise ContextLengthError(
                self.max_model_len,
                f"the prompt has {len(tokens)} and max_tokens is {params.max_tokens}: at most {room} can be "
                "generated",
                "max_tokens",
            )
        return params

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        service_class: str = "",
        retention: Sequence[Retention] = (),
        slo: SLO | None = None,
        session_id: str | None = None,
        kv_hints: Hints | None = None,
        client: tuple[str, ...] = (),
    ) -> str:
        """Queue a request and return its id; its text comes out of `step`. A `RequestError` queues nothing.

        Requests of different tenants never share KV. `service_class` names the class whose share of KV memory
        is used, `retention` ranges of the prompt that eviction should spare. `session_id` is what later hints
        may call its KV; `kv_hints` are done when it ends. With `n > 1` the seeds are `seed + index`, and the
        first choice alone does the hints. `client` is the path of the sender, as of `Request`: scheduling
        shares the batch between clients.
        """
        if self._closed:
            raise RequestError("this LLM is closed: load it anew")
        _check_session(session_id)
        tokens = self.encode(prompt)
        params = self.resolve(tokens, self.sampling_params() if params is None else params)
        request_id = request_id or f"req-{next(self._ids)}"
        first = Request(
            request_id,
            tokens,
            params,
            self.tokenizer.eos_token_ids,
            arrival_s=self._clock.now(),
            priority=priority,
            namespace=Namespace(tenant=tenant),
            service_class=service_class,
            retention=tuple(retention),
            slo=slo or SLO(),
            session_id=session_id,
            kv_hints=None if kv_hints is None else _parsed(kv_hints),
            client=client,
        )
        self._add(request_id, list(_expand(first)))
        return request_id

    def pin_prompt(self, prompt: Prompt, *, tenant: str = "") -> PinnedPrefix:
        """Hold the KV of a prompt (a system prompt, say), computed first where it is not resident. Calling
        the result gives it up. Whole blocks are held, so the last tokens may not be.

        Raises `CapacityError` beyond `kv.max_pinned_share`.
        """
        tokens = self.encode(prompt)
        for _ in self.stream(tokens, self.sampling_params(max_tokens=1), tenant=tenant):
            pass
        return self.pin_cached(tokens, tenant=tenant)

    def pin_cached(self, tokens: Tokens, *, tenant: str = "") -> PinnedPrefix:
        """Hold what is cached of a prompt; computes nothing. Raises as `pin_prompt`."""
        return self._engine.pin_prefix(tokens, Namespace(tenant=tenant))

    def clear_cache(self) -> int:
        """Give up every cached block that no request and no pin uses; returns how many."""
        return self._engine.clear_cache()

    def hint(self, kv_hints: Hints, *, tenant: str = "") -> Sequence[HintOutcome]:
        """Do KV hints now, for sessions and prompts of that tenant and no other; one answer per action.

        Raises `RequestError` for what is no envelope. An action that cannot be done is answered, not raised.
        """
        if "\0" in tenant:  # such names are the cache's own, for groups of tenants
            raise RequestError("a tenant or cache salt must not hold NUL characters", "cache_salt")
        return self._engine.hint(_parsed(kv_hints), Namespace(tenant=tenant))

    def step(self) -> list[TextDelta]:
        """Run one engine step; returns what it added, also to requests whose conveniences left it behind."""
        deltas, self._undelivered = self._undelivered, []
        outputs = self._engine.step() if self._engine.has_work() else ()
        for output in outputs:
            group = self._group_of.get(output.request_id)
            if group is not None:
                deltas.append(self._delta(group, output))
        return deltas

    def abort(self, request_id: str) -> bool:
        """Drop a request, all its choices; False if it is unknown or has ended. No delta follows."""
        group = self._groups.pop(request_id, None)
        self._undelivered = [delta for delta in self._undelivered if delta.request_id != request_id]
        if group is None:
            return False
        for engine_id in group.streams:
            if self._group_of.pop(engine_id, None) is not None:
                self._engine.abort(engine_id)
        return True

    def has_work(self) -> bool:
        return bool(self._undelivered) or self._engine.has_work()

    def stats(self) -> EngineStats:
        """Running, waiting, blocks by state, as of now."""
        return self._engine.stats()

    @property
    def engine(self) -> EngineCore:
        """The engine below, for the thread that steps it."""
        return self._engine

    def capability(self) -> CapabilityDescriptor:
        """What the engine can do, and on which device."""
        return self._engine.capability()

    def diagnostics(self) -> EngineDiagnostics:
        """Evictions, fragmentation, pins and time by pass, as of now."""
        return self._engine.diagnostics()

    def close(self) -> None:
        """Abort what is open and release the engine."""
        for request_id in list(self._groups):
            self.abort(request_id)
        self._closed = True
        self._engine.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete one prompt or several together, in order. A failed one carries `error`."""
        several = _as_prompts(prompts)
        params = self.sampling_params() if params is None else params
        prepared = [self.encode(prompt) for prompt in several]
        for tokens in prepared:
            self.resolve(tokens, params)
        found: dict[str, Completion] = {}
        try:
            for tokens in prepared:
                request_id = self.submit(tokens, params)
                found[request_id] = Completion.empty(request_id, params.n)
        except BaseException:
            for request_id in found:
                self.abort(request_id)
            raise
        for delta in self._deltas_of(set(found)):
            found[delta.request_id].add(delta)
        return list(found.values())

    def chat(self, messages: Sequence[Message] | str, params: SamplingParams | None = None) -> Completion:
        """The model's answer to a conversation; a text is a conversation of one user message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        given: Any = messages
        if not isinstance(given, Sequence) or not all(isinstance(one, Mapping) for one in given):
            form = '[{"role": "user", "content": "..."}]'
            raise RequestError(f"messages must be a text or a list {form}, got {shown(messages)}", "messages")
        if not messages:
            raise RequestError("messages is empty: send at least one message", "messages")
        return self.generate([messages], params)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generator[TextDelta, None, None]:
        """The deltas of one request as they come; `options` as for `submit`. Leaving the loop aborts it."""
        request_id = self.submit(prompt, params, **options)
        try:
            yield from self._deltas_of({request_id})
        finally:
            self.abort(request_id)

    def _deltas_of(self, request_ids: set[str]) -> Iterator[TextDelta]:
        """Step until these requests have ended; deltas of others are kept for `step`."""
        waiting_for = set(request_ids)
        try:
            while waiting_for and self.has_work():
                deltas = self.step()
                self._undelivered = [delta for delta in deltas if delta.request_id not in request_ids]
                for delta in deltas:
                    if delta.request_id in waiting_for:
                        waiting_for -= {delta.request_id} if delta.is_last else set()
                        yield delta
        finally:
            for request_id in waiting_for:
                self.abort(request_id)

    def _add(self, request_id: str, requests: Sequence[Request]) -> None:
        """All engine requests of one group, or none."""
        taken = [request.request_id for request in requests if request.request_id in self._group_of]
        if taken or request_id in self._groups:
            raise RequestError(f"a request with the id {request_id!r} is running", "request_id")
        group = _Group(request_id, len(requests[0].tokens), {})
        self._groups[request_id] = group
        try:
            for request in requests:
                self._engine.add(_drawing(request))
                self._group_of[request.request_id] = group
                group.streams[request.request_id] = self._text_stream(request)
        except BaseException:
            self.abort(request_id)
            raise

    def _text_stream(self, request: Request) -> TextStream:
        params = request.params
        eos = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        return TextStream(self.tokenizer, params, eos | frozenset(params.stop_token_ids), request.tokens)

    def _delta(self, group: _Group, output: RequestOutput) -> TextDelta:
        engine_id = output.request_id
        piece = group.streams[engine_id].feed(output)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = min(output.num_cached_tokens, group.num_prompt_tokens)
            group.queued_s, group.misses = output.queued_s, output.misses
        if piece.finish_reason is not None:
            self._end(group, engine_id, piece)
        return TextDelta(
            request_id=group.request_id,
            index=list(group.streams).index(engine_id),
            text=piece.text,
            token_ids=piece.token_ids,
            usage=group.usage,
            logprobs=piece.logprobs,
            prompt_logprobs=piece.prompt_logprobs,
            finish_reason=piece.finish_reason,
            error=output.error if piece.finish_reason is FinishReason.ERROR else None,
            is_last=group.request_id not in self._groups,
            queued_s=group.queued_s,
        )

    def _end(self, group: _Group, engine_id: str, piece: Piece) -> None:
        """A choice has ended; with the last one the group is forgotten."""
        del self._group_of[engine_id]
        if piece.stopped_by_text:
            self._engine.abort(engine_id)
        if not group.open_ids:
            del self._groups[group.request_id]

    def _checked_ids(self, ids: Sequence[int]) -> Tokens:
        limit = self.tokenizer.vocab_size
        try:
            for token_id in ids:
                if not 0 <= token_id < limit:
                    raise RequestError(f"prompt: token id {token_id} is not in [0, {limit})", "prompt")
            return Tokens(ids)
        except TypeError:
            raise _no_prompt(ids) from None

    def _check_bias(self, params: SamplingParams) -> None:
        limit = self.tokenizer.vocab_size
        for token_id in params.logit_bias:
            if not 0 <= token_id < limit:
                raise RequestError(f"logit_bias: token id {token_id} is not in [0, {limit})", "logit_bias")


def _expand(request: Request) -> Iterator[Request]:
    """The engine requests `id#i` of one request with `n > 1`, or the request itself."""
    if request.params.n == 1:
        yield request
        return
    for index in range(request.params.n):
        seed = request.params.seed
        params = replace(request.params, n=1, seed=None if seed is None else seed + index)
        engine_id = f"{request.request_id}#{index}"
        hints = request.kv_hints if index == 0 else None
        yield replace(request, request_id=engine_id, params=params, group=request.request_id, kv_hints=hints)


def _drawing(request: Request) -> Request:
    """The request as an engine takes it: computing a prompt draws a token, also where none is wanted."""
    if request.params.max_tokens != 0:
        return request
    return replace(request, params=replace(request.params, max_tokens=1))


def _parsed(kv_hints: Hints) -> KVHintsEnvelope:
    return kv_hints if isinstance(kv_hints, KVHintsEnvelope) else KVHintsEnvelope.parse(kv_hints)


def _check_session(session_id: str | None) -> None:
    if session_id is not None and not 0 < len(session_id) <= MAX_SESSION_ID_CHARS:
        size = f"1 to {MAX_SESSION_ID_CHARS} characters, got {len(session_id)}"
        raise RequestError(f"session_id must have {size}", "session_id")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or the prompts of a list: a list of ints or of messages is one prompt."""
    if isinstance(prompts, (str, Tokens)):
        return [prompts]
    _check_is_list(prompts)
    if isinstance(next(iter(prompts), None), (int, float, Mapping)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _check_is_list(given: object) -> None:
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise _no_prompt(given)


def _no_prompt(given: object) -> RequestError:
    return RequestError(
        f"a prompt is a text, a list of messages or of token ids, got {shown(given)}", "prompt"
    )
