"""The bodies of answers, as /openapi.json describes them. `replies` and others write them; tests hold that
they are of this form."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """What an answer holds, and nothing else."""

    model_config = ConfigDict(strict=True, extra="forbid")


class CachedTokens(Answer):
    """Of the prompt, those whose KV was reused; for `return_cache_misses`, why blocks had to be computed."""

    cached_tokens: int
    cache_miss_blocks: dict[str, int] | None = None


class TokenUsage(Answer):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


Finish = Literal["stop", "length"]


class TokenAlternative(Answer):
    """A token as text and as its exact bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenAlternative):
    """A generated token and the likeliest ones at its place."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Answer):
    """Of the tokens of a message, if `logprobs` was true."""

    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(Answer):
    """What the model answers."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Answer):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage


class ChatDelta(Answer):
    """What an event adds to a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(Answer):
    """What an event adds to one of `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(Answer):
    """The data of an event of a streamed chat. With `stream_options.include_usage` the last one has usage and
    no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None


class CompletionLogprobs(Answer):
    """Of the tokens of a text, and of its prompt with `echo`; the first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Answer):
    """One of `n` texts for one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class TextCompletion(Answer):
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage


class TextCompletionChunk(Answer):
    """The data of an event of a streamed completion. With `stream_options.include_usage` the last one has
    usage and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None


class ModelCard(Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """The answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Answer):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    """The answer of POST /detokenize."""

    prompt: str


class HintAnswer(Answer):
    """What became of one action of KV hints."""

    action_id: str
    status: Literal["applied", "not_found", "unsupported", "invalid"]
    num_blocks: int
    reason: str


class HintAnswers(Answer):
    """The answer of POST /v1/kv/hints, in order of the actions."""

    outcomes: list[HintAnswer]


class Pin(Answer):
    """A pinned prompt: its first `num_tokens` tokens stay in `num_blocks` KV blocks."""

    id: str
    cache_salt: str
    num_tokens: int
    num_blocks: int


class PinList(Answer):
    """The answer of GET /v1/admin/pins."""

    object: Literal["list"] = "list"
    data: list[Pin]


class PinDeleted(Answer):
    """The answer of DELETE /v1/admin/pins/{pin_id}."""

    id: str
    deleted: Literal[True] = True


class CacheCleared(Answer):
    """Cached blocks that were given up. What runs and what is pinned stays."""

    num_blocks: int


class CurrentPolicy(Answer):
    """The answer of GET /v1/admin/eviction_policy. Null: the server was not built from a configuration."""

    policy: str | None = None
    options: dict[str, Any] = {}


class CurrentStrategy(Answer):
    """The answer of GET /v1/admin/scheduling_strategy: its name and passes. Null: the configuration lists
    passes of its own, or the server was not built from one."""

    strategy: str | None = None
    passes: list[str] = []
    options: dict[str, dict[str, Any]] = {}


class ServerStatus(Answer):
    """The answer of /health and /ready."""

    status: Literal["ok", "ready"]


class ServerVersion(Answer):
    """The answer of /version."""

    version: str


class ErrorDetail(Answer):
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


class ErrorAnswer(Answer):
    """What every refusal and failure is answered with. `request_id` is that of the server's log."""

    error: ErrorDetail
    request_id: str | None = None
