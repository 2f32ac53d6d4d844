"""The requests that the server reads, as OpenAI and vLLM write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sagellm.core.errors import RequestError, UnsupportedParameterError
from sagellm.core.kv_hints import MAX_DURATION_S, KVHintsEnvelope
from sagellm.core.types import MAX_LOGPROBS, MAX_RETENTIONS, SLO, Retention, SamplingParams
from sagellm.engines.llm import LLM, MAX_SESSION_ID_CHARS
from sagellm.serving.errors import clipped
from sagellm.serving.parameters import MESSAGE_FIELDS, MESSAGE_NEUTRAL, LenientRequest, check_names

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chats default to the rest of the context."""

MAX_LISTED = 2**16
"""Entries of `logit_bias` and `stop_token_ids`."""

MAX_PRIORITY = 2**31
MAX_SALT_CHARS = 2**16

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

KVHints = Annotated[KVHintsEnvelope, PlainValidator(KVHintsEnvelope.parse)]

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
ROLES = ("system", "developer", "user", "assistant")
_TOOL_ROLES = ("tool", "function")
_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    @field_validator("include_obfuscation")
    @classmethod
    def _no_padding(cls, value: bool | None) -> bool | None:
        if value:
            where = "stream_options.include_obfuscation"
            raise UnsupportedParameterError(f"{where}: chunks are not padded here", where)
        return value


class TemplateFields(BaseModel):
    """Variables of the chat template, as vLLM and SGLang take them: by themselves, or together as
    `chat_template_kwargs`.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None
    documents: list[dict[str, Any]] | None = Field(default=None, max_length=MAX_LISTED)

    def template_options(self) -> Mapping[str, Any]:
        """What the template is given. An effort of "none" switches thinking off, any other on, unless that is
        said too. Raises `RequestError` for variables that the server sets, and for contradictions.
        """
        where = "chat_template_kwargs"
        options = dict(self.chat_template_kwargs or {})
        taken = {"messages", "tools", "add_generation_prompt"} & options.keys()
        if taken:
            raise RequestError(f"{where} may not set {', '.join(sorted(taken))}", where)
        for name in ("enable_thinking", "thinking", "reasoning_effort", "documents"):
            value = getattr(self, name)
            if value is not None and options.setdefault(name, value) != value:
                raise RequestError(f"{name} and {where}.{name} differ: send one", name)
        if self.reasoning_effort is not None:
            for name in ("enable_thinking", "thinking"):
                options.setdefault(name, self.reasoning_effort != "none")
        return options


class SloFields(BaseModel):
    """Latency goals of a request in seconds: to the first token, and between tokens."""

    model_config = ConfigDict(strict=True, extra="forbid")

    ttft_s: float | None = Field(default=None, ge=0, le=MAX_DURATION_S)
    tpot_s: float | None = Field(default=None, ge=0, le=MAX_DURATION_S)


class RetentionFields(BaseModel):
    """Prompt tokens `[start, stop)` that eviction treats as used `duration_s * priority / 100` s later."""

    model_config = ConfigDict(strict=True, extra="forbid")

    start: int = Field(default=0, ge=0, lt=2**31)
    stop: int | None = Field(default=None, ge=1, lt=2**31)
    priority: int = Field(default=50, ge=0, le=100)
    duration_s: float = Field(default=300.0, ge=0, le=MAX_DURATION_S)


class GenerationFields(LenientRequest):
    """What chats and completions share. Null means: not given."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_LISTED)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = None
    min_tokens: int | None = None
    stop: str | list[Any] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_LISTED, fail_fast=True)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, lt=MAX_PRIORITY)
    cache_salt: str | None = Field(default=None, max_length=MAX_SALT_CHARS)
    session_id: str | None = Field(default=None, min_length=1, max_length=MAX_SESSION_ID_CHARS)
    kv_hints: KVHints | None = None
    slo: SloFields | None = None
    retention: list[RetentionFields] | None = Field(default=None, max_length=MAX_RETENTIONS, fail_fast=True)
    return_cache_misses: bool | None = None
    service_tier: str | None = Field(default=None, pattern=r"^[\w.-]{1,64}$")
    user: str | None = None

    fewest_tokens: ClassVar[int] = 1
    """The least `max_tokens`."""

    @property
    def service_class(self) -> str:
        """The class whose share of KV memory the request uses; OpenAI's words for none in particular are
        none."""
        return "" if self.service_tier in (None, "auto", "default") else str(self.service_tier)

    def slo_goals(self) -> SLO:
        return SLO() if self.slo is None else SLO(**self.slo.model_dump())

    def retentions(self) -> tuple[Retention, ...]:
        """Raises `RequestError` for a range that ends before it starts."""
        return tuple(Retention(**one.model_dump()) for one in self.retention or ())

    @field_validator("max_tokens", "max_completion_tokens", check_fields=False)
    @classmethod
    def _enough(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < cls.fewest_tokens:
            least = f"{info.field_name} must be at least {cls.fewest_tokens}"
            raise RequestError(f"{least}, got {value}", info.field_name)
        return value

    @field_validator("top_p")
    @classmethod
    def _some_probability(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value <= 1:
            hint = "for the likeliest token alone, send temperature 0"
            raise RequestError(f"top_p must be above 0 and at most 1, got {value}; {hint}", "top_p")
        return value

    @field_validator("stop")
    @classmethod
    def _texts(cls, value: str | list[Any] | None) -> str | list[Any] | None:
        if isinstance(value, list) and not _is_list_of(value, str):
            raise RequestError("stop must be a string or a list of strings", "stop")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value and not all(map(_TOKEN_ID.fullmatch, value)):
            raise ValueError('keys must be token ids, as in {"50256": -100}')
        return value

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise RequestError('stream_options needs "stream": true', "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, llm: LLM, max_tokens: int | None, **given: Any) -> SamplingParams:
        """The parameters, with the model's defaults for what is not given. Raises `RequestError`."""
        given["max_tokens"] = max_tokens
        given |= {name: getattr(self, name) for name in _PASSED_ON if getattr(self, name) is not None}
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias is not None:
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return llm.sampling_params(**given)


class ChatRequest(TemplateFields, GenerationFields):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(fail_fast=True)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        check_messages(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError('top_logprobs needs "logprobs": true', "top_logprobs")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_tokens and max_completion_tokens differ: send one", "max_tokens")
        return self

    def params(self, llm: LLM) -> SamplingParams:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(llm, limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids. With `echo` the answer
    begins with the prompt, `logprobs` include its tokens, and `max_tokens` may be 0.
    """

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None

    fewest_tokens = 0

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1, or 0 with echo", "max_tokens")
        self.prompts()
        return self

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        value = self.prompt
        if isinstance(value, str) or (_is_list_of(value, int) and value):
            return [value]
        if isinstance(value, list) and value and all(isinstance(one, str) or _is_ids(one) for one in value):
            return value
        forms = "a string, a list of strings, a list of token ids or a list of such lists"
        raise RequestError(f"prompt must be {forms}, and not empty", "prompt")

    def params(self, llm: LLM) -> SamplingParams:
        limit = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        prompt_logprobs = self.logprobs if self.echo else None
        return self.sampling(llm, limit, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)


class TokenizeRequest(TemplateFields):
    """POST /tokenize: `prompt` or `messages`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages", "prompt")
        check_messages(self.messages or [])
        return self


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


class HintRequest(BaseModel):
    """POST /v1/kv/hints. `cache_salt` says whose sessions and prompts are meant, as for a generation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    kv_hints: KVHints
    cache_salt: str | None = Field(default=None, max_length=MAX_SALT_CHARS)


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Refuse roles and fields that no message has here; content is the template's to check."""
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        _check_role(message.get("role"), f"{where}.role")
        check_names(message, MESSAGE_FIELDS, MESSAGE_NEUTRAL, f"{where}.")
        if not isinstance(message.get("name", ""), str | None):
            raise RequestError(f"{where}.name must be a string", f"{where}.name")


def _check_role(role: object, where: str) -> None:
    if role in _TOOL_ROLES:
        raise UnsupportedParameterError(f"{where}: {role!r} is not supported, there are no tools", where)
    if role not in ROLES:
        got = clipped(repr(role))
        raise RequestError(f"{where} must be one of {', '.join(ROLES)}, got {got}", where)


def _is_list_of(value: object, kind: type) -> bool:
    """Whether it is a list of `kind`; a bool is no int here."""
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _is_ids(value: object) -> bool:
    return bool(value) and _is_list_of(value, int)
