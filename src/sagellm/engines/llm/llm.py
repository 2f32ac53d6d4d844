"""`LLM`: text in, text out. Joins an engine and a tokenizer for the CLI, the server and notebooks."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from typing import Any, Self, cast

from sagellm.accel.cot.reasoning import ReasoningTracker
from sagellm.core.clock import Clock
from sagellm.core.errors import ContextLengthError, RequestError, UnsupportedParameterError, nearest, shown
from sagellm.core.features import PROMPT_LOGPROBS, REASONING_BUDGETS, REASONING_KV
from sagellm.core.kv_hints import HintOutcome, KVHintsEnvelope
from sagellm.core.protocols.cot import SpeculativeReasoning, StepAction
from sagellm.core.protocols.engine import (
    BranchingEngine,
    EngineCore,
    EngineDiagnostics,
    EngineStats,
    PinnedPrefix,
    PromptExplanation,
)
from sagellm.core.protocols.prefix_cache import PromptSpan
from sagellm.core.protocols.tokenizer import Message, TextTokenizer
from sagellm.core.types import (
    CapabilityDescriptor,
    FinishReason,
    Namespace,
    Request,
    RequestOutput,
    SamplingParams,
    Tokens,
)
from sagellm.engines.llm.accelerations import EARLY_EXIT, SPECULATIVE_REASONING, Accelerations
from sagellm.engines.llm.completion import Completion, TextDelta
from sagellm.engines.llm.drafted_reasoning import ReasoningDrafts
from sagellm.engines.llm.open_request import OpenRequest, requests_of_choices
from sagellm.engines.llm.options import Hints, RequestOptions
from sagellm.engines.llm.probes import EarlyExits
from sagellm.engines.llm.samples import VotedSamples
from sagellm.engines.llm.text_stream import TextStream

Prompt = str | Tokens | Sequence[int] | Sequence[Message]
_PARAMETERS = frozenset(parameter.name for parameter in fields(SamplingParams))


class LLM:
    """An engine with a tokenizer. As a context manager it is closed at the end.

    Synchronous, and for one thread; `encode` and `resolve` alone are thread-safe. `defaults`: sampling
    parameters by name, from generation_config.json, for what a request leaves open. `accelerations` says what
    is on and what it has saved. `drafter`: the engine of a small model, which writes steps of reasoning for
    requests with `speculative_reasoning`; it is closed with this one.
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
        drafter: EngineCore | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len = max_model_len
        self._engine = engine
        self._defaults = dict(defaults or {})
        self._clock = clock or engine.clock
        self._open: dict[str, OpenRequest] = {}
        self._by_engine_id: dict[str, OpenRequest] = {}
        parts = (getattr(engine, name, None) for name in ("speculation", "reasoning_kv"))
        self.accelerations = Accelerations(*parts)
        self._early_exits = EarlyExits(engine, tokenizer, self.accelerations)
        self._drafts: ReasoningDrafts | None = None
        if drafter is not None:
            self.accelerations.add(SPECULATIVE_REASONING, is_exact=False)
            self._drafts = ReasoningDrafts(engine, drafter, tokenizer, self.accelerations)
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
        """`SamplingParams` with this model's defaults. Raises `RequestError`."""
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
        """Token ids of a text, messages, or token ids, which are checked. Thread-safe."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, Tokens):
            return prompt
        _check_is_list(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            messages = cast("Sequence[Message]", prompt)
            return self.tokenizer.encode_chat(messages, template_options=template_options)
        limit, ids = self.tokenizer.vocab_size, cast("Sequence[int]", prompt)
        try:
            for token_id in ids:
                if not 0 <= token_id < limit:
                    raise RequestError(f"prompt: token id {token_id} is not in [0, {limit})", "prompt")
            return Tokens(ids)
        except TypeError:
            raise _no_prompt(ids) from None

    def resolve(self, tokens: Tokens, params: SamplingParams) -> SamplingParams:
        """`params` with `max_tokens` and the markers of reasoning filled in.

        Raises `RequestError` for what can never fit the model."""
        room = self.max_model_len - len(tokens)
        if room < 1:
            raise ContextLengthError(
                self.max_model_len,
                f"the prompt has {len(tokens)} and at least one must be generated: shorten the prompt",
                "prompt",
            )
        for token_id in params.logit_bias:
            if not 0 <= token_id < self.tokenizer.vocab_size:
                limit = f"[0, {self.tokenizer.vocab_size})"
                raise RequestError(f"logit_bias: token id {token_id} is not in {limit}", "logit_bias")
        limits = ("max_reasoning_tokens", "soft_reasoning_tokens", "max_reasoning_kv_tokens")
        asked = next((name for name in limits if getattr(params, name) is not None), None)
        if asked is not None and not params.reasoning_token_ids:
            if not self.tokenizer.reasoning_token_ids:
                raise _no_markers(asked)
            params = replace(params, reasoning_token_ids=self.tokenizer.reasoning_token_ids)
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
        options: RequestOptions | SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> str:
        """Queue a request and return its id; `step` returns its text. A `RequestError` queues nothing.

        Sampling parameters alone are options with nothing else set; None is the model's defaults. With `n >
        1` the seeds are `seed + index`, and the first choice alone carries out the hints. With `early_stop`,
        choices that are not needed end or never begin, and the last delta has the `consensus`.
        """
        if self._closed:
            raise RequestError("this LLM is closed: load it anew")
        options = self._options(options)
        tokens = self.encode(prompt)
        if options.early_exit is not None:
            self._check_early_exit(options.params)
        if options.speculative_reasoning is not None:
            self._check_drafts(options.params, options.speculative_reasoning)
        request_id = request_id or f"req-{next(self._ids)}"
        request = Request(
            request_id,
            tokens,
            self.resolve(tokens, options.params),
            self.tokenizer.eos_token_ids,
            arrival_s=self._clock.now(),
            priority=options.priority,
            namespace=Namespace(tenant=options.tenant),
            service_class=options.service_class,
            retention=tuple(options.retention),
            slo=options.slo,
            session_id=options.session_id,
            kv_hints=None if options.kv_hints is None else _parsed(options.kv_hints),
            client=options.client,
            reports_hit=options.reports_hit,
            reports_eviction=options.reports_eviction,
            approximate_reuse=options.approximate_reuse,
        )
        self._add(request_id, list(requests_of_choices(request)), options)
        return request_id

    def _check_early_exit(self, params: SamplingParams) -> None:
        if not params.reasoning_token_ids and not self.tokenizer.reasoning_token_ids:
            raise _no_markers("early_exit")
        if not self.has_early_exits:
            where = "a single server with an engine of its own, not a fleet, can: leave it out"
            raise UnsupportedParameterError(f"early_exit: probes cannot share KV here; {where}", "early_exit")

    def _check_drafts(self, params: SamplingParams, rule: SpeculativeReasoning) -> None:
        field = "speculative_reasoning"
        if not params.reasoning_token_ids and not self.tokenizer.reasoning_token_ids:
            raise _no_markers(field)
        if not self.has_reasoning_drafts:
            where = "set speculative.reasoning_model of a single server, or leave it out"
            raise UnsupportedParameterError(f"{field}: no small model writes reasoning here: {where}", field)
        if not rule.judge and PROMPT_LOGPROBS not in self.capability().features:
            raise UnsupportedParameterError(f"{field}: no prompt is scored here: send a judge", field)

    def _options(self, given: RequestOptions | SamplingParams | None) -> RequestOptions:
        if isinstance(given, RequestOptions):
            return given
        return RequestOptions(self.sampling_params() if given is None else given)

    def pin_prompt(self, prompt: Prompt, *, tenant: str = "") -> PinnedPrefix:
        """Hold the KV of a prompt, computing what is not resident. Calling the result releases it.

        Whole blocks are held, so the last tokens may not be. Raises `CapacityError` beyond
        `kv.max_pinned_share`.
        """
        tokens = self.encode(prompt)
        for _ in self.stream(tokens, RequestOptions(self.sampling_params(max_tokens=1), tenant=tenant)):
            pass
        return self.pin_cached(tokens, tenant=tenant)

    def pin_cached(self, tokens: Tokens, *, tenant: str = "") -> PinnedPrefix:
        """Hold what is cached of a prompt; computes nothing. Raises as `pin_prompt`."""
        return self._engine.pin_prefix(tokens, Namespace(tenant=tenant))

    def clear_cache(self, *, tiers: bool = False) -> int:
        """Drop cached blocks that no request and no pin uses; returns how many.

        With `tiers` also those in host memory and on disk.
        """
        return self._engine.clear_cache(tiers=tiers)

    def hint(self, kv_hints: Hints, *, tenant: str = "") -> Sequence[HintOutcome]:
        """Carry out KV hints for a tenant's sessions and prompts; one outcome per action.

        Raises `RequestError` for what is no envelope. An action that cannot be done has an outcome that says
        so.
        """
        if "\0" in tenant:  # the cache itself uses such names, for groups of tenants
            raise RequestError("a tenant or cache salt must not hold NUL characters", "cache_salt")
        return self._engine.hint(_parsed(kv_hints), Namespace(tenant=tenant))

    def explain(
        self, prompt: Prompt, *, tenant: str = "", session_id: str | None = None
    ) -> PromptExplanation:
        """What the KV cache knows of a prompt of a tenant, span by span.

        Raises `RequestError` without `kv.miss_attribution`, and for a bad prompt or tenant."""
        if "\0" in tenant:
            raise RequestError("a tenant or cache salt must not hold NUL characters", "cache_salt")
        return self._engine.explain(self.encode(prompt), Namespace(tenant=tenant), session_id)

    def step(self) -> list[TextDelta]:
        """Run one engine step; returns its deltas, after those that `stream` kept back."""
        deltas, self._undelivered = self._undelivered, []
        failed = [] if self._drafts is None else self._drafts.step()
        outputs = self._engine.step() if self._engine.has_work() else ()
        voting: dict[str, OpenRequest] = {}
        for output in itertools.chain(failed, self._shown(outputs)):
            opened = self._by_engine_id.get(output.request_id)
            if opened is not None:
                deltas.append(self._delta(opened, output))
                if opened.samples is not None and deltas[-1].finish_reason is not None:
                    voting[opened.request_id] = opened
        for opened in voting.values():
            deltas = self._voted(opened, deltas)
        return deltas

    def _shown(self, outputs: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
        """What choices may show after these outputs, some of probes and judges."""
        if self._drafts is not None:
            outputs = itertools.chain.from_iterable(map(self._drafts.through, outputs))
        return itertools.chain.from_iterable(map(self._early_exits.through, outputs))

    def abort(self, request_id: str) -> bool:
        """Drop a request with all its choices; no delta follows. False if it is not open."""
        opened = self._open.pop(request_id, None)
        self._undelivered = [delta for delta in self._undelivered if delta.request_id != request_id]
        if opened is None:
            return False
        for engine_id in opened.streams:
            if self._by_engine_id.pop(engine_id, None) is not None:
                self._close(engine_id)
                self._engine.abort(engine_id)
        return True

    def has_work(self) -> bool:
        drafts = self._drafts is not None and self._drafts.has_work()
        return bool(self._undelivered) or drafts or self._engine.has_work()

    def is_idle(self, tokens: Tokens, namespace: Namespace) -> bool:
        """Whether what would compute a prompt, and the small model, have no request."""
        drafts = self._drafts is not None and self._drafts.has_work()
        return not drafts and self._engine.is_idle(tokens, namespace)

    def idle_s(self) -> float | None:
        """Seconds until there is work without a call; None: never."""
        return self._engine.idle_s()

    def stats(self) -> EngineStats:
        """Running, waiting, blocks by state, as of now."""
        return self._engine.stats()

    @property
    def engine(self) -> EngineCore:
        """The engine itself, for the thread that steps it."""
        return self._engine

    def capability(self) -> CapabilityDescriptor:
        """What the engine can do, and on which device."""
        return self._engine.capability()

    @property
    def has_reasoning_budgets(self) -> bool:
        """Whether requests may have `max_reasoning_tokens`."""
        ends_reasoning = REASONING_BUDGETS in self._engine.capability().features
        return ends_reasoning and bool(self.tokenizer.reasoning_token_ids)

    @property
    def has_early_exits(self) -> bool:
        """Whether requests may have `early_exit`."""
        return self.has_reasoning_budgets and self._early_exits.are_possible

    @property
    def has_reasoning_kv(self) -> bool:
        """Whether requests may have `max_reasoning_kv_tokens`."""
        is_possible = REASONING_KV in self._engine.capability().features
        return is_possible and bool(self.tokenizer.reasoning_token_ids)

    @property
    def has_reasoning_drafts(self) -> bool:
        """Whether requests may have `speculative_reasoning`."""
        return self._drafts is not None and self.has_reasoning_budgets

    @property
    def bytes_per_block(self) -> int:
        """Of KV; 0 if the engine does not tell."""
        schema = self._engine.capability().kv_schema
        return 0 if schema is None else schema.bytes_per_block

    def diagnostics(self) -> EngineDiagnostics:
        """Evictions, fragmentation, pins and time by pass, as of now."""
        return self._engine.diagnostics()

    def close(self) -> None:
        """Abort what is open and release the engine. Other ranks are ended before a step is waited for."""
        self._closed = True
        self._open.clear()
        self._by_engine_id.clear()
        self._early_exits.clear()
        self._undelivered.clear()
        with closing(self._engine):
            if self._drafts is not None:
                self._drafts.shut_down()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: RequestOptions | SamplingParams | None = None
    ) -> list[Completion]:
        """Complete one prompt or several together, in order. A failed completion has an `error`.

        `params` as `options` of `submit`."""
        options = self._options(params)
        encoded = [self.encode(prompt) for prompt in _as_prompts(prompts)]
        found: dict[str, Completion] = {}
        try:
            for tokens in encoded:
                request_id = self.submit(tokens, options)
                found[request_id] = Completion.empty(request_id, options.params.n)
        except BaseException:
            for request_id in found:
                self.abort(request_id)
            raise
        for delta in self._deltas_of(set(found)):
            found[delta.request_id].add(delta)
        return list(found.values())

    def chat(self, messages: Sequence[Message] | str, params: SamplingParams | None = None) -> Completion:
        """The model's answer to messages, or to a text as one user message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        given: Any = messages
        if not isinstance(given, Sequence) or not all(isinstance(message, Mapping) for message in given):
            form = '[{"role": "user", "content": "..."}]'
            raise RequestError(f"messages must be a text or a list {form}, got {shown(messages)}", "messages")
        if not messages:
            raise RequestError("messages is empty: send at least one message", "messages")
        return self.generate([messages], params)[0]

    def stream(
        self, prompt: Prompt, options: RequestOptions | SamplingParams | None = None
    ) -> Generator[TextDelta, None, None]:
        """The deltas of one request as they come; `options` as for `submit`. Leaving the loop aborts it."""
        request_id = self.submit(prompt, options)
        try:
            yield from self._deltas_of({request_id})
        finally:
            self.abort(request_id)

    def _deltas_of(self, request_ids: set[str]) -> Iterator[TextDelta]:
        """Step until these requests have ended; `step` returns the deltas of others later."""
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

    def _add(self, request_id: str, requests: Sequence[Request], options: RequestOptions) -> None:
        """Add all engine requests of one request, or none. With `early_stop`, its first window."""
        taken = [request.request_id for request in requests if request.request_id in self._by_engine_id]
        if taken or request_id in self._open:
            raise RequestError(f"a request with the id {request_id!r} is running", "request_id")
        opened = OpenRequest(request_id, len(requests[0].tokens), options)
        opened.parent_id = self._running(options.branch_of)
        self._open[request_id] = opened
        markers = requests[0].params.reasoning_token_ids or self.tokenizer.reasoning_token_ids
        if markers:
            prompt = requests[0].tokens.slice(0)
            opened.reasoning = ReasoningTracker.behind(prompt, markers, self.tokenizer.eos_token_ids)
        if options.early_stop is not None:
            end = self.tokenizer.decode(markers[1:], skip_special_tokens=False)
            opened.samples = VotedSamples(requests, options.early_stop, self.accelerations, end)
            requests = opened.samples.start(opened.samples.plan().num_to_start)
        try:
            for request in requests:
                self._start(opened, request)
        except BaseException:
            self.abort(request_id)
            raise

    def _running(self, choice: tuple[str, int] | None) -> str | None:
        """The engine's id of what computes a request's choice, if that runs."""
        request_id, index = choice or ("", 0)
        opened = self._open.get(request_id)
        return None if opened is None else opened.computing(index)

    def _start(self, opened: OpenRequest, request: Request) -> None:
        params = request.params
        if params.max_tokens == 0:  # computing a prompt draws a token, which the text stream drops
            request = replace(request, params=replace(params, max_tokens=1))
        if opened.parent_id is not None and isinstance(self._engine, BranchingEngine):
            group = request.group or request.request_id
            self._engine.branch(opened.parent_id, replace(request, group=group))
        else:
            self._engine.add(request)
        self._by_engine_id[request.request_id] = opened
        eos = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        reasoning = None if opened.reasoning is None else replace(opened.reasoning)
        stream = TextStream(self.tokenizer, params, stop_ids, request.tokens, reasoning)
        opened.streams[request.request_id] = stream
        if opened.reasoning is None:
            return
        rule, steps = opened.options.early_exit, opened.options.speculative_reasoning
        if rule is not None and self.accelerations.is_on(EARLY_EXIT):
            probed = self._early_exits.open(request, rule, replace(opened.reasoning))
            opened.probed[request.request_id] = probed
        if steps is not None and self._drafts is not None and self.accelerations.is_on(SPECULATIVE_REASONING):
            drafted = self._drafts.open(request, steps, replace(opened.reasoning))
            opened.drafted[request.request_id] = drafted

    def _voted(self, opened: OpenRequest, deltas: list[TextDelta]) -> list[TextDelta]:
        """Continue or end a request of which samples have ended in a step.

        More samples are started, or those that run are aborted. Returns the `deltas` of the step with those
        that follow from that.
        """
        samples, consensus = opened.samples, None
        assert samples is not None
        plan = samples.plan()
        try:
            for request in samples.start(plan.num_to_start):
                self._start(opened, request)
        except RequestError as error:  # a fleet may have no room for more
            failed = TextDelta(
                opened.request_id, len(opened.streams), "", (), opened.usage,
                finish_reason=FinishReason.ERROR, error=str(error), error_status=error.status,
            )  # fmt: skip
            deltas = [*deltas, *self._aborted(opened), failed]
        else:
            if plan.action is StepAction.CONTINUE:
                return deltas
            consensus = samples.consensus(plan)
            deltas = [*deltas, *self._aborted(opened)]
        del self._open[opened.request_id]
        last = max(i for i, delta in enumerate(deltas) if delta.request_id == opened.request_id)
        deltas[last] = replace(deltas[last], is_last=True, consensus=consensus)
        return deltas

    def _aborted(self, opened: OpenRequest) -> Iterator[TextDelta]:
        """Abort the choices that run; one delta of each."""
        for index, (engine_id, stream) in enumerate(opened.streams.items()):
            if self._by_engine_id.pop(engine_id, None) is not None:
                self._close(engine_id)
                self._engine.abort(engine_id)
                stream.finish_reason = reason = FinishReason.ABORT
                yield TextDelta(opened.request_id, index, "", (), opened.usage, finish_reason=reason)

    def _close(self, engine_id: str) -> None:
        """End the probes, drafts and judges of a choice that ends."""
        self._early_exits.close(engine_id)
        if self._drafts is not None:
            self._drafts.close(engine_id)

    def _delta(self, opened: OpenRequest, output: RequestOutput) -> TextDelta:
        engine_id = output.request_id
        stream = opened.streams[engine_id]
        text, token_ids, logprobs = stream.feed(output)
        reason = stream.finish_reason
        if opened.num_cached_tokens is None:
            opened.num_cached_tokens = min(output.num_cached_tokens, opened.num_prompt_tokens)
            opened.queued_s, opened.misses = output.queued_s, output.misses
            opened.evicted = _before_arrival(output.evicted, output.queued_s)
        opened.num_approximate_tokens = max(opened.num_approximate_tokens, output.num_approximate_tokens)
        if reason is not None:
            del self._by_engine_id[engine_id]
            self._close(engine_id)
            if output.finish_reason is None:  # a stop string ended the choice, and the engine runs on
                self._engine.abort(engine_id)
            all_ended = all(choice.finish_reason is not None for choice in opened.streams.values())
            if all_ended and opened.samples is None:
                del self._open[opened.request_id]
        index = list(opened.streams).index(engine_id)
        probed, drafted = opened.probed.get(engine_id), opened.drafted.get(engine_id)
        if opened.samples is not None:
            answers = reason is FinishReason.STOP and not stream.is_reasoning
            opened.samples.add(index, text, has_ended=reason is not None, answers=answers)
        return TextDelta(
            request_id=opened.request_id,
            index=index,
            text=text,
            token_ids=token_ids,
            usage=opened.usage,
            logprobs=logprobs,
            prompt_logprobs=stream.prompt_texts(output.prompt_logprobs),
            finish_reason=reason,
            error=output.error if reason is FinishReason.ERROR else None,
            error_status=output.error_status,
            is_last=opened.request_id not in self._open,
            queued_s=opened.queued_s,
            exit=None if reason is None or probed is None else probed.outcome,
            drafted=None if reason is None or drafted is None else drafted.outcome,
        )


def _no_markers(field: str) -> RequestError:
    markers = "like <think> and </think> that mark its reasoning"
    return RequestError(f"{field}: this model has no tokens {markers}: leave it out", field)


def _parsed(kv_hints: Hints) -> KVHintsEnvelope:
    return kv_hints if isinstance(kv_hints, KVHintsEnvelope) else KVHintsEnvelope.parse(kv_hints)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a list. A list of ints or of messages is one prompt."""
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


def _before_arrival(span: PromptSpan | None, queued_s: float | None) -> PromptSpan | None:
    """The span with its seconds counted back from the request's arrival."""
    if span is None or span.seconds_ago is None:
        return span
    return replace(span, seconds_ago=span.seconds_ago - (queued_s or 0.0))
