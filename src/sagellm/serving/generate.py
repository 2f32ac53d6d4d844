"""The two endpoints that generate: chats and completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from json import JSONEncoder
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from sagellm.core.blocks import num_common
from sagellm.core.errors import RequestError, UnsupportedParameterError
from sagellm.core.types import Retention, SamplingParams, Tokens
from sagellm.engines.llm import Completion, RequestOptions, Usage
from sagellm.engines.llm.next_turns import turn_behind
from sagellm.serving.access_log import record_of
from sagellm.serving.answers import AnswerHead, ChatReply, CompletionReply, Reply
from sagellm.serving.clients import client_of
from sagellm.serving.errors import CLIENT_CLOSED_REQUEST
from sagellm.serving.gateway import Gateway, Generation
from sagellm.serving.prompt_cache import Messages, breakpoints
from sagellm.serving.prompts import PromptEncoder
from sagellm.serving.reader import RequestReader
from sagellm.serving.schema import ChatRequest, CompletionRequest, GenerationFields, StreamOptions
from sagellm.serving.sse import EventStream, closed_on_disconnect, sse_events

MAX_LOGPROB_ENTRIES = 2**20
"""Of one request at a time: each takes about 250 bytes of memory and 25 to 60 of the answer."""

B = TypeVar("B", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class GenerationRoutes:
    """Serves chats and completions of one model.

    Each handler reads the body, makes its `RequestOptions`, encodes the prompts, opens a `Generation` and
    answers with it. `wall_clock` gives seconds since 1970, for `created`.
    """

    gateway: Gateway
    reader: RequestReader
    encoder: PromptEncoder
    wall_clock: Callable[[], float]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body, options = await self._read(ChatRequest, request)
        variables = body.template_options()
        self.gateway.check_room(1, options.params.n, options.client)
        tokens = await run_in_threadpool(self.encoder.chat, body.messages, variables)
        cache = body.prompt_cache_options
        explicit = cache is not None and cache.mode == "explicit"
        if marked := breakpoints(body.messages, explicit=explicit):
            kept = await run_in_threadpool(lambda: list(self._kept(tokens, marked, variables)))
            options = replace(options, retention=(*options.retention, *kept))
        generation, head = self._open("chatcmpl", request, [tokens], options, body)
        if self.gateway.next_turns is not None and options.params.n == 1:
            generation.on_answer = partial(self._expect_turn, body, tokens, options)
        return await _answer(request, body, generation, ChatReply(head, logprobs=bool(body.logprobs)))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body, options = await self._read(CompletionRequest, request)
        n, prompts = options.params.n, body.prompts()
        self.gateway.check_room(len(prompts), n, options.client)
        tokens = await run_in_threadpool(lambda: [self.encoder.prompt(prompt) for prompt in prompts])
        if body.branch_from is not None:
            branch = self.gateway.recent.find(body.branch_from, options.tenant)
            behind = prompts[0] if isinstance(prompts[0], list) else await self._behind(prompts[0])
            tokens = [Tokens([*branch.tokens, *behind])]
            options = replace(options, branch_of=branch.parent)
        echoes = [""] * len(prompts)
        if body.echo:
            decode = self.gateway.llm.tokenizer.decode
            echoes = await run_in_threadpool(
                lambda: [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]
            )
        generation, head = self._open("cmpl", request, tokens, options, body)
        scores_prompts = options.params.prompt_logprobs is not None
        reply = CompletionReply(head, logprobs=body.logprobs, echoes=echoes, scores_prompts=scores_prompts)
        return await _answer(request, body, generation, reply)

    async def _read(self, model: type[B], request: Request) -> tuple[B, RequestOptions]:
        """The body, and the options for the engine."""
        body = await self.reader.read(model, request)
        settings = self.gateway.settings
        client = client_of(request, body.user, trust_user=settings.trust_user)
        return body, body.options(self.gateway.llm, settings, client)

    async def _behind(self, text: str) -> Tokens:
        return await run_in_threadpool(lambda: self.encoder.text(text, add_special_tokens=False))

    def _expect_turn(
        self, body: ChatRequest, prompt: Tokens, options: RequestOptions, answer: Completion
    ) -> None:
        asked, variables = (prompt, body.messages), body.template_options()
        self.gateway.expect_turn(lambda: turn_behind(self.gateway.llm, *asked, variables, answer, options))

    def _kept(
        self,
        tokens: Tokens,
        marked: Sequence[tuple[Messages, float]],
        variables: Mapping[str, Any],
    ) -> Iterator[Retention]:
        """Retention of a chat's tokens up to each breakpoint.

        Those are the leading tokens that the messages up to there have, too."""
        for messages, ttl_s in marked:
            alone = self.encoder.chat(messages, variables, add_generation_prompt=False)
            stop = num_common(tokens, alone)
            if stop:
                yield Retention(0, stop, 100, ttl_s)

    def _open(
        self,
        prefix: str,
        request: Request,
        prompts: Sequence[Tokens],
        options: RequestOptions,
        body: GenerationFields,
    ) -> tuple[Generation, AnswerHead]:
        """Submit the prompts. `prefix` begins the id of the answer."""
        record = record_of(request.scope)
        record.tenant = options.tenant
        if body.return_cache_misses and not self.gateway.attributes_misses:
            where = "return_cache_misses"
            raise UnsupportedParameterError(f"{where} needs kv.miss_attribution: true on the server", where)
        for tokens in prompts:
            self.gateway.llm.resolve(tokens, options.params)
        check_logprobs(prompts, options.params, self.gateway.llm.max_model_len, stream=bool(body.stream))
        generation = self.gateway.open(prompts, options)
        record.times = generation.times
        head = AnswerHead(
            f"{prefix}-{generation.generation_id}",
            self.reader.model_name,
            int(self.wall_clock()),
            len(prompts),
            options.params.n,
            tenant=options.tenant,
            bytes_per_block=self.gateway.llm.bytes_per_block,
            with_misses=bool(body.return_cache_misses),
            marks_reasoning=bool(self.gateway.llm.tokenizer.reasoning_token_ids),
            starts_late=options.early_stop is not None,
            outcomes=tuple(
                name for name in ("early_exit", "speculative_reasoning") if getattr(options, name) is not None
            ),
        )
        return generation, head


async def _answer(request: Request, body: GenerationFields, generation: Generation, reply: Reply) -> Response:
    if body.stream:
        chunks = sse_events(generation, reply, body.stream_options or StreamOptions())
        return EventStream(chunks, generation, body.warning_headers)
    whole = await _whole(request, generation, reply)
    whole.headers.update(body.warning_headers)
    return whole


async def _whole(request: Request, generation: Generation, reply: Reply) -> Response:
    """All of a generation in one body. A disconnect of the client ends it."""
    head = reply.head
    completions = [Completion.empty(str(position), head.num_choices) for position in range(head.num_prompts)]
    async with closed_on_disconnect(request.receive, generation):
        async for batch in generation:
            for position, delta in batch:
                completions[position].add(delta)
        if generation.closed:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    usage = sum((completion.usage for completion in completions), Usage())
    choices = [choice for completion in completions for choice in completion.choices]
    if any(choice.prompt_logprobs or choice.logprobs for choice in choices):  # they may be many
        return await run_in_threadpool(lambda: _written(reply.whole(completions, usage)))
    return JSONResponse(reply.whole(completions, usage))


def _written(answer: dict[str, Any]) -> Response:
    """The answer, encoded choice by choice, since encoding a value blocks other threads."""
    encoder = JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    choices = ",".join(map(encoder.encode, answer["choices"]))
    rest = encoder.encode({name: value for name, value in answer.items() if name != "choices"})
    return Response(f'{rest[:-1]},"choices":[{choices}]}}', media_type="application/json")


def check_logprobs(
    prompts: Sequence[Tokens], params: SamplingParams, max_model_len: int, *, stream: bool
) -> None:
    """Refuse an answer whose log-probabilities could take hundreds of megabytes.

    Counts those that are held at one time: of the prompts and, without a stream, of what is generated. One
    choice may always have them.
    """
    num_entries = 0
    for tokens in prompts:
        if params.prompt_logprobs is not None:
            num_entries += params.n * len(tokens) * (1 + params.prompt_logprobs)
        if params.logprobs is not None and not stream:
            room = max_model_len - len(tokens)
            most = room if params.max_tokens is None else min(room, params.max_tokens)
            num_entries += params.n * most * (1 + params.logprobs)
    per_token = 1 + max(params.prompt_logprobs or 0, params.logprobs or 0)
    allowed = max(MAX_LOGPROB_ENTRIES, max_model_len * per_token)
    if num_entries > allowed:
        asked = f"the answer could hold {num_entries} log-probabilities, at most {allowed} are allowed"
        raise RequestError(f"{asked}: send fewer prompts, a smaller n, max_tokens or logprobs", "logprobs")
