"""The bodies of answers: their models for /openapi.json, and the functions that write them.

`ChatReply` and `CompletionReply` write plain dictionaries, because validated models would cost time for every
token. Tests check that the dictionaries match the models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from sagellm.core.types import FinishReason
from sagellm.engines.llm import Choice, Completion, TextDelta, TokenText, Usage
from sagellm.serving.cache_facts import CacheEviction, CacheSpan
from sagellm.serving.reasoning import DraftedOutcome, ExitOutcome, VoteOutcome, outcomes_of, vote_outcome
from sagellm.serving.schema import Body

Json = dict[str, Any]
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; this is what OpenAI sends for it."""


class CachedTokens(Body):
    """Prompt tokens whose KV was reused, and why other blocks had to be computed."""

    model_config = ConfigDict(
        json_schema_extra={
            "description": "Of the prompt, those whose KV was reused; for `approximate_reuse`, others whose "
            "KV was copied from another position; for `return_cache_misses`, why blocks had to be computed."
        }
    )
    cached_tokens: int
    approximate_tokens: int | None = None
    cache_miss_blocks: dict[str, int] | None = None


class ReasoningUsage(Body):
    """The generated tokens between markers of reasoning, if the model has such.

    For `early_exit`, also those that were drawn for probes and are in no answer.
    """

    reasoning_tokens: int
    probe_tokens: int | None = None


class TokenUsage(Body):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningUsage | None = None


Finish = Literal["stop", "length", "abort"]
"""`abort`: of a choice that `early_stop` ended."""


class TokenAlternative(Body):
    """A token as text and as its exact bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenAlternative):
    """A generated token and the likeliest ones at its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Body):
    """Of the tokens of a message, if `logprobs` was true."""

    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(Body):
    """What the model answers."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Body):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Body):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    sagellm: CacheEviction | None = None
    early_stop: list[VoteOutcome] | None = None
    early_exit: list[ExitOutcome] | None = None
    speculative_reasoning: list[DraftedOutcome] | None = None


class ChatDelta(Body):
    """What an event adds to a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(Body):
    """What an event adds to one of `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(Body):
    """The data of an event of a streamed chat. With `stream_options.include_usage` the last one has usage and
    no choices. With `early_stop`, the last one with choices has its outcome."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None
    sagellm: CacheEviction | None = None
    early_stop: list[VoteOutcome] | None = None
    early_exit: list[ExitOutcome] | None = None
    speculative_reasoning: list[DraftedOutcome] | None = None


class CompletionLogprobs(Body):
    """Log-probabilities of a text's tokens, and of its prompt's with `echo`."""

    model_config = ConfigDict(
        json_schema_extra={
            "description": "Of the tokens of a text, and of its prompt with `echo`; "
            "the first token of a prompt has none."
        }
    )
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Body):
    """One of `n` texts for one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class TextCompletion(Body):
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage
    sagellm: CacheEviction | None = None
    early_stop: list[VoteOutcome] | None = None
    early_exit: list[ExitOutcome] | None = None
    speculative_reasoning: list[DraftedOutcome] | None = None


class TextCompletionChunk(TextCompletion):
    """The data of an event of a streamed completion. With `stream_options.include_usage` the last one has
    usage and no choices. With `early_stop`, the last one with choices of a prompt has its outcome."""

    usage: TokenUsage | None = None  # type: ignore[assignment]


class ModelCard(Body):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Body):
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Body):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Body):
    """The answer of POST /detokenize."""

    prompt: str


class HintAnswer(Body):
    """What became of one action of KV hints."""

    action_id: str
    status: Literal["applied", "not_found", "unsupported", "invalid"]
    num_blocks: int
    reason: str


class HintAnswers(Body):
    """The answer of POST /v1/kv/hints, in order of the actions."""

    outcomes: list[HintAnswer]


class Pin(Body):
    """A pinned prompt: its first `num_tokens` tokens stay in `num_blocks` KV blocks."""

    id: str
    cache_salt: str
    num_tokens: int
    num_blocks: int


class PinList(Body):
    """The answer of GET /v1/admin/pins."""

    object: Literal["list"] = "list"
    data: list[Pin]


class PinDeleted(Body):
    """The answer of DELETE /v1/admin/pins/{pin_id}."""

    id: str
    deleted: Literal[True] = True


class CacheCleared(Body):
    """Cached blocks that were given up. What runs and what is pinned stays."""

    num_blocks: int


class CurrentPolicy(Body):
    """The answer of GET /v1/admin/eviction_policy. Null: the server was not built from a configuration."""

    policy: str | None = None
    options: dict[str, Any] = Field(default={})


class CurrentStrategy(Body):
    """The answer of GET /v1/admin/scheduling_strategy: its name and passes. Null: the configuration lists
    passes of its own, or the server was not built from one."""

    strategy: str | None = None
    passes: list[str] = Field(default=[])
    options: dict[str, dict[str, Any]] = Field(default={})


class ServerStatus(Body):
    """The answer of /health and /ready.

    `kv_tier_faults`: tiers of the KV cache that have failed. The server goes on without them.
    """

    status: Literal["ok", "ready"]
    kv_tier_faults: list[str] = Field(default=[])


class ServerVersion(Body):
    """The answer of /version."""

    version: str


class ErrorDetail(Body):
    """`param` names the field in error; `code` is for programs."""

    message: str
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "rate_limit_error",
        "server_error",
    ]
    param: str | None
    code: str | None


class ErrorAnswer(Body):
    """What every refusal and failure is answered with. `request_id` is that of the server's log."""

    error: ErrorDetail
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of one answer repeats, and its size: `num_choices` for each prompt.

    `with_misses`: the tenant asked why blocks of its prompt had to be computed. `marks_reasoning`: the model
    has markers of reasoning, so that its tokens are counted. `starts_late`: choices may begin late or never.
    `outcomes`: the fields of an answer that has an entry for each choice, such as `early_exit`.
    """

    answer_id: str
    model: str
    created: int
    num_prompts: int
    num_choices: int
    tenant: str = ""
    bytes_per_block: int = 0
    with_misses: bool = False
    marks_reasoning: bool = False
    starts_late: bool = False
    outcomes: tuple[str, ...] = ()


class Reply(ABC):
    """Writes one answer, whole or as the chunks of a stream.

    The choices of all prompts are numbered in order of prompts.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, head: AnswerHead) -> None:
        self.head = head
        self._opened: set[tuple[int, int]] = set()

    def opening(self) -> Iterator[Json]:
        """The chunks before the first delta."""
        head = self.head
        for position in range(0 if head.starts_late else head.num_prompts):
            for index in range(head.num_choices):
                yield from self._opening_of(position, index)

    def parts(self, position: int, delta: TextDelta) -> Iterator[Json]:
        """The chunks for what a delta of the prompt at `position` adds."""
        choice = position, delta.index
        if self.head.starts_late and choice not in self._opened:
            self._opened.add(choice)
            yield from self._opening_of(*choice)
        for chunk in self._parts(position, delta):
            if chunk["choices"][0]["finish_reason"] is not None:
                first = position * self.head.num_choices
                if delta.consensus is not None:
                    chunk["early_stop"] = [vote_outcome(delta.consensus, first)]
                for name, outcome in outcomes_of(delta, first + delta.index).items():
                    chunk[name] = [outcome]
            yield chunk

    @abstractmethod
    def _opening_of(self, position: int, index: int) -> Iterator[Json]:
        """The chunks before the first delta of a choice."""

    @abstractmethod
    def _parts(self, position: int, delta: TextDelta) -> Iterator[Json]:
        """As `parts`; the last chunk of a delta that ends a choice says why."""

    def closing(self, usage: Usage) -> Json:
        """The usage chunk: no choices."""
        return self._wrap(self.chunk_kind, []) | {"usage": self.usage(usage)} | self._eviction(usage)

    def whole(self, completions: Sequence[Completion], usage: Usage) -> Json:
        choices = [
            self._choice(position, choice)
            for position, completion in enumerate(completions)
            for choice in completion.choices
        ]
        answer = self._wrap(self.kind, choices) | {"usage": self.usage(usage)} | self._eviction(usage)
        firsts = range(0, len(completions) * self.head.num_choices, self.head.num_choices)
        numbered = list(zip(firsts, completions, strict=True))
        if self.head.starts_late:
            votes = ((first, each.consensus) for first, each in numbered)
            answer["early_stop"] = [vote_outcome(vote, first) for first, vote in votes if vote is not None]
        outcomes = [
            outcomes_of(choice, first + choice.index) for first, each in numbered for choice in each.choices
        ]
        for name in self.head.outcomes:
            answer[name] = [found[name] for found in outcomes if name in found]
        return answer

    def usage(self, usage: Usage) -> Json:
        """Usage, with the causes of cache misses if the request asked (`return_cache_misses`)."""
        details: Json = {"cached_tokens": usage.cached_tokens}
        if usage.approximate_tokens:
            details["approximate_tokens"] = usage.approximate_tokens
        misses = usage.misses
        if self.head.with_misses and misses is not None:  # a tenant must not hear what another one has cached
            own = misses._replace(cold=misses.cold + misses.namespace, namespace=0)
            details["cache_miss_blocks"] = own._asdict()
        found: Json = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": details,
        }
        if self.head.marks_reasoning:
            found["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
        if "early_exit" in self.head.outcomes:
            found["completion_tokens_details"]["probe_tokens"] = usage.probe_tokens
        return found

    def _eviction(self, usage: Usage) -> Json:
        """What the cache evicted of the prompt, if the request asked (`return_cache_misses`)."""
        head = self.head
        if not head.with_misses:
            return {}
        span = None
        if usage.evicted is not None:
            span = CacheSpan.of(usage.evicted, head.tenant, head.bytes_per_block)
        return {"sagellm": CacheEviction.of(span, head.created).model_dump()}

    @abstractmethod
    def _choice(self, position: int, choice: Choice) -> Json:
        """A whole answer to the prompt at `position`."""

    def _wrap(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.head.answer_id,
            "object": kind,
            "created": self.head.created,
            "model": self.head.model,
            "choices": choices,
        }


class ChatReply(Reply):
    """Answers of /v1/chat/completions. The role and the reason of an end have chunks of their own."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, head: AnswerHead, *, logprobs: bool) -> None:
        super().__init__(head)
        self._logprobs = logprobs

    def _opening_of(self, position: int, index: int) -> Iterator[Json]:
        yield self._chunk(index, {"role": "assistant", "content": ""})

    def _parts(self, position: int, delta: TextDelta) -> Iterator[Json]:
        if delta.text or (self._logprobs and delta.logprobs):
            yield self._chunk(delta.index, {"content": delta.text}, delta.logprobs)
        if delta.finish_reason is not None:
            yield self._chunk(delta.index, {}, reason=delta.finish_reason)

    def _choice(self, position: int, choice: Choice) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs_json(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Sequence[TokenText] = (),
        reason: FinishReason | None = None,
    ) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs_json(logprobs) if logprobs else None,
            "finish_reason": reason,
        }
        return self._wrap(self.chunk_kind, [choice])

    def _logprobs_json(self, entries: Sequence[TokenText]) -> Json | None:
        if not self._logprobs:
            return None
        content = [
            _token_json(entry) | {"top_logprobs": [_token_json(token) for token in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}


class CompletionReply(Reply):
    """Answers of /v1/completions.

    `echoes[i]` stands before the text of prompt `i`. With `scores_prompts` the log-probabilities of its
    tokens stand before those of the answer, and in a stream the echo comes with them.
    """

    kind = chunk_kind = "text_completion"

    def __init__(
        self, head: AnswerHead, *, logprobs: int | None, echoes: Sequence[str], scores_prompts: bool = False
    ) -> None:
        super().__init__(head)
        self._logprobs = logprobs
        self._echoes = echoes
        self._scores_prompts = scores_prompts

    def _opening_of(self, position: int, index: int) -> Iterator[Json]:
        echo = self._echoes[position]
        if echo and not self._scores_prompts:
            yield self._chunk(position, index, echo)

    def _parts(self, position: int, delta: TextDelta) -> Iterator[Json]:
        if delta.prompt_logprobs:
            yield self._chunk(position, delta.index, self._echoes[position], delta.prompt_logprobs)
        if delta.text or delta.finish_reason is not None or (self._logprobs is not None and delta.logprobs):
            logprobs = self._behind_echo(position, delta.logprobs)
            yield self._chunk(position, delta.index, delta.text, logprobs, delta.finish_reason)

    def _choice(self, position: int, choice: Choice) -> Json:
        entries = (*choice.prompt_logprobs, *self._behind_echo(position, choice.logprobs))
        text = self._echoes[position] + choice.text
        return self._text_json(position, choice.index, text, entries, choice.finish_reason)

    def _chunk(
        self,
        position: int,
        index: int,
        text: str,
        entries: Sequence[TokenText] = (),
        reason: FinishReason | None = None,
    ) -> Json:
        return self._wrap(self.chunk_kind, [self._text_json(position, index, text, entries, reason)])

    def _text_json(
        self, position: int, index: int, text: str, entries: Sequence[TokenText], reason: FinishReason | None
    ) -> Json:
        logprobs = None
        if self._logprobs is not None:
            logprobs = {
                "tokens": [entry.text for entry in entries],
                "token_logprobs": [_finite(entry.logprob) for entry in entries],
                "top_logprobs": [_top_json(entry) for entry in entries] if self._logprobs else None,
                "text_offset": [entry.offset for entry in entries],
            }
        return {
            "index": position * self.head.num_choices + index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _behind_echo(self, position: int, entries: Sequence[TokenText]) -> Sequence[TokenText]:
        """Entries of the answer whose offsets count the echoed prompt."""
        echo = self._echoes[position]
        return [replace(entry, offset=entry.offset + len(echo)) for entry in entries] if echo else entries


def _token_json(entry: TokenText) -> Json:
    return {"token": entry.text, "logprob": _finite(entry.logprob), "bytes": list(entry.data)}


def _top_json(entry: TokenText) -> Json | None:
    """The likeliest tokens and the token itself, by text.

    Of several tokens with one text the likeliest counts.
    """
    if entry.logprob is None:
        return None
    found: Json = {}
    for token in (*entry.top, entry):
        found.setdefault(token.text, _finite(token.logprob))
    return found


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
