"""The two endpoints that generate: from a parsed request to a reply or a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import JSONEncoder
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from sagellm.core.errors import RequestError, UnsupportedParameterError
from sagellm.core.types import SamplingParams, Tokens
from sagellm.engines.llm import Completion, Usage
from sagellm.serving.access_log import record_of
from sagellm.serving.clients import Client, client_of
from sagellm.serving.errors import CLIENT_CLOSED_REQUEST
from sagellm.serving.gateway import Gateway, Generation
from sagellm.serving.prompts import PromptEncoder
from sagellm.serving.reader import RequestReader
from sagellm.serving.replies import ChatReply, CompletionReply, Head, Reply
from sagellm.serving.schema import ChatRequest, CompletionRequest, GenerationFields
from sagellm.serving.sse import EventStream, closed_on_disconnect, events

MAX_LOGPROB_ENTRIES = 2**20
"""Of one request at a time: each takes about 250 bytes of memory and 25 to 60 of the answer."""


@dataclass(frozen=True, slots=True)
class Generator:
    """Serves chats and completions of one model. `wall_clock` gives seconds since 1970 for `created`."""

    gateway: Gateway
    reader: RequestReader
    encoder: PromptEncoder
    check_model: Callable[[str | None], str]
    wall_clock: Callable[[], float]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self.reader.read(ChatRequest, request)
        model = self.check_model(body.model)
        params = body.params(self.gateway.llm)
        options = body.template_options()
        self.gateway.check_room(1, params.n, self._client(request, body))
        tokens = await run_in_threadpool(self.encoder.chat, body.messages, options)
        generation = self._open(request, [tokens], params, body)
        head = self._head("chatcmpl", generation, model, body)
        reply = ChatReply(head, logprobs=bool(body.logprobs))
        return await self._answer(request, body, params, generation, reply, num_prompts=1)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self.reader.read(CompletionRequest, request)
        model = self.check_model(body.model)
        params = body.params(self.gateway.llm)
        prompts = body.prompts()
        self.gateway.check_room(len(prompts), params.n, self._client(request, body))
        tokens = await run_in_threadpool(lambda: [self.encoder.prompt(prompt) for prompt in prompts])
        echoes = [""] * len(prompts)
        if body.echo:
            echoes = await run_in_threadpool(lambda: [self._echo(prompt) for prompt in prompts])
        generation = self._open(request, tokens, params, body)
        head = self._head("cmpl", generation, model, body)
        reply = CompletionReply(
            head,
            logprobs=body.logprobs,
            echoes=echoes,
            num_choices=params.n,
            scores_prompts=params.prompt_logprobs is not None,
        )
        return await self._answer(request, body, params, generation, reply, num_prompts=len(prompts))

    def _client(self, request: Request, body: GenerationFields) -> Client:
        return client_of(request, body.user, trust_user=self.gateway.load.limits.trust_user)

    def _open(
        self, request: Request, prompts: Sequence[Tokens], params: SamplingParams, body: GenerationFields
    ) -> Generation:
        record = record_of(request.scope)
        record.tenant = body.cache_salt or ""
        if body.return_cache_misses and not self.gateway.attributes_misses:
            where = "return_cache_misses"
            raise UnsupportedParameterError(f"{where} needs kv.miss_attribution: true on the server", where)
        for tokens in prompts:
            self.gateway.llm.resolve(tokens, params)
        check_logprobs(prompts, params, self.gateway.llm.max_model_len, stream=bool(body.stream))
        generation = self.gateway.open(
            prompts,
            params,
            priority=self.gateway.load.limits.priority(body.priority, body.service_tier),
            tenant=body.cache_salt or "",
            service_class=body.service_class,
            session_id=body.session_id,
            kv_hints=body.kv_hints,
            slo=body.slo_goals(),
            retention=body.retentions(),
            client=self._client(request, body),
        )
        record.times = generation.times
        return generation

    def _head(self, prefix: str, generation: Generation, model: str, body: GenerationFields) -> Head:
        answer_id = f"{prefix}-{generation.generation_id}"
        return Head(answer_id, model, int(self.wall_clock()), with_misses=bool(body.return_cache_misses))

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.gateway.llm.tokenizer.decode(prompt)

    async def _answer(
        self,
        request: Request,
        body: GenerationFields,
        params: SamplingParams,
        generation: Generation,
        reply: Reply,
        *,
        num_prompts: int,
    ) -> Response:
        if not body.stream:
            whole = await _whole(request, generation, reply, params.n, num_prompts)
            whole.headers.update(body.warning_headers)
            return whole
        chunks = events(
            generation,
            reply,
            num_choices=params.n,
            num_prompts=num_prompts,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )
        return EventStream(chunks, generation, body.warning_headers)


async def _whole(
    request: Request, generation: Generation, reply: Reply, num_choices: int, num_prompts: int
) -> Response:
    """All of a generation in one body; a client that leaves meanwhile ends it."""
    completions = [Completion.empty(str(position), num_choices) for position in range(num_prompts)]
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
    """The answer, written choice by choice: the interpreter serves no other thread while one value is."""
    encoder = JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    choices = ",".join(map(encoder.encode, answer["choices"]))
    rest = encoder.encode({name: value for name, value in answer.items() if name != "choices"})
    return Response(f'{rest[:-1]},"choices":[{choices}]}}', media_type="application/json")


def check_logprobs(
    prompts: Sequence[Tokens], params: SamplingParams, max_model_len: int, *, stream: bool
) -> None:
    """Raise `RequestError` where the log-probabilities that the answer holds at one time could take hundreds
    of megabytes: those of prompts and, without a stream, of what is generated. One choice always may have
    them."""
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
