"""What a request over HTTP may hold, and what each of its parameters becomes.

A body becomes one of the pydantic models below (`checked`), by the names that OpenAI and vLLM use. Each field
of a generation then has one of five fates:

* served: a field of `GenerationFields`, `ChatRequest` or `CompletionRequest`. Method `options` turns those
  for the engine into one `RequestOptions`; the others are the prompt, or shape the answer alone.
* without effect (`WITHOUT_EFFECT`), or of another server (`OF_OTHER_SERVERS`): ignored.
* neutral (`NEUTRAL`): accepted with a value that asks for nothing, else refused as unsupported.
* renamed (`RENAMED`): refused, with the name to send.
* any other name: refused as unknown, with the nearest known one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from sagellm.core.config import Effort, ServerConfig
from sagellm.core.errors import RequestError, UnsupportedParameterError, nearest
from sagellm.core.kv_hints import MAX_DURATION_S, KVHintsEnvelope
from sagellm.core.types import MAX_LOGPROBS, MAX_RETENTIONS, SLO, Retention, SamplingParams
from sagellm.engines.llm import LLM, MAX_SESSION_ID_CHARS, RequestOptions
from sagellm.serving.branches import BranchFields
from sagellm.serving.clients import Client, allowed_priority
from sagellm.serving.errors import MAX_ECHO_CHARS, clipped
from sagellm.serving.other_names import ENDPOINT_OF, OF_OTHER_SERVERS, RENAMED
from sagellm.serving.prompt_cache import CACHE_LIFETIMES_S
from sagellm.serving.reasoning import EarlyExitFields, EarlyStopFields, SpeculativeReasoningFields, rule_of

M = TypeVar("M", bound=BaseModel)

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat may fill the rest of the context."""

MAX_LISTED = 2**16
"""Entries of `logit_bias` and `stop_token_ids`."""

MAX_PRIORITY = 2**31
MAX_SALT_CHARS = 2**16

KVHints = Annotated[KVHintsEnvelope, PlainValidator(KVHintsEnvelope.parse)]

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
ROLES = ("system", "developer", "user", "assistant")
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))

WITHOUT_EFFECT = frozenset(
    {
        "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "parallel_tool_calls",
    }
)  # fmt: skip
"""Without effect on the answer: they describe the caller, or tools, of which there are none.

A generation serves `user`, which may be its client, and the fields of the prompt cache; other requests ignore
them.
"""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "audio", "chat_template", "ebnf", "guided_choice", "guided_grammar", "guided_json",
            "guided_regex", "json_schema", "logprob_token_ids", "lora_path", "moderation", "prediction",
            "prompt_logprobs", "regex", "stop_regex", "structured_outputs", "truncate_prompt_tokens",
            "web_search_options",
        ),
        (),
    ),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "documents", "functions", "lora", "tools"), ([],)),
    **dict.fromkeys(
        (
            "continue_final_message", "echo", "return_hidden_states", "return_token_ids",
            "return_tokens_as_token_ids", "store", "use_beam_search",
        ),
        (False,),
    ),
    **dict.fromkeys(
        ("add_generation_prompt", "skip_special_tokens", "spaces_between_special_tokens"), (True,)
    ),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    **dict.fromkeys(("grammar", "suffix"), ("",)),
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
}  # fmt: skip
"""Known and not supported: the values, beside null, that ask for nothing."""

MESSAGE_FIELDS = frozenset({"role", "content", "name"})

MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": (),
    "reasoning_content": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
"""The same for fields of a message: a client library sends answers back as it dumped them."""

IGNORED_HEADER = "X-Sagellm-Ignored-Fields"
"""The answer's header that names the ignored fields of its request."""


class Body(BaseModel):
    """What a request or an answer holds, and nothing else."""

    model_config = ConfigDict(strict=True, extra="forbid")


class PromptCacheOptions(Body):
    """What OpenAI's clients say of the cached prompt as a whole."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class StreamOptions(Body):
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


class TemplateFields(Body):
    """Variables of the chat template, as vLLM and SGLang take them.

    Each is a field of its own, or a key of `chat_template_kwargs`.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None
    documents: list[dict[str, Any]] | None = Field(default=None, max_length=MAX_LISTED)

    def template_options(self) -> Mapping[str, Any]:
        """The variables for the template.

        A reasoning effort of "none" switches thinking off and any other on, unless the request says that too.
        Raises `RequestError` for variables that the server sets, and for contradictions.
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


class SloFields(Body):
    """Latency goals of a request in seconds: to the first token, and between tokens."""

    ttft_s: float | None = Field(default=None, ge=0, le=MAX_DURATION_S)
    tpot_s: float | None = Field(default=None, ge=0, le=MAX_DURATION_S)


class RetentionFields(Body):
    """A range of prompt tokens that eviction should spare."""

    model_config = ConfigDict(
        json_schema_extra={
            "description": "Prompt tokens `[start, stop)` that eviction treats as used "
            "`duration_s * priority / 100` s later."
        },
    )

    start: int = Field(default=0, ge=0, lt=2**31)
    stop: int | None = Field(default=None, ge=1, lt=2**31)
    priority: int = Field(default=50, ge=0, le=100)
    duration_s: float = Field(default=300.0, ge=0, le=MAX_DURATION_S)


MAX_EXTRA_ARGUMENTS = 64
REPORT_MODE = "kv_cache_report_mode"
"""vLLM's name: whether KV events also name the blocks that the request reuses."""


class GenerationFields(Body):
    """The fields that chats and completions share. Null means: not given."""

    _ignored: tuple[str, ...] = PrivateAttr(default=())
    """Those of `OF_OTHER_SERVERS` that the request held."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_reasoning_tokens: int | None = None
    soft_reasoning_tokens: int | None = None
    soft_reasoning_slope: float | None = None
    max_reasoning_kv_tokens: int | None = None
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
    early_stop: bool | EarlyStopFields | None = None
    early_exit: bool | EarlyExitFields | None = None
    speculative_reasoning: bool | SpeculativeReasoningFields | None = None
    min_tokens: int | None = None
    stop: str | list[Any] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_LISTED, fail_fast=True)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    num_speculative_tokens: int | None = None
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, lt=MAX_PRIORITY)
    cache_salt: str | None = Field(default=None, max_length=MAX_SALT_CHARS)
    session_id: str | None = Field(default=None, min_length=1, max_length=MAX_SESSION_ID_CHARS)
    kv_hints: KVHints | None = None
    slo: SloFields | None = None
    retention: list[RetentionFields] | None = Field(default=None, max_length=MAX_RETENTIONS, fail_fast=True)
    return_cache_misses: bool | None = None
    approximate_reuse: bool | None = None
    vllm_xargs: dict[str, Any] | None = Field(default=None, max_length=MAX_EXTRA_ARGUMENTS)
    service_tier: str | None = Field(default=None, pattern=r"^[\w.-]{1,64}$")
    user: str | None = None
    prompt_cache_key: str | None = Field(default=None, max_length=MAX_SESSION_ID_CHARS)
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    fewest_tokens: ClassVar[int] = 1
    """The least `max_tokens`."""

    def options(self, llm: LLM, settings: ServerConfig, client: Client) -> RequestOptions:
        """The request's options for the engine. Raises `RequestError`.

        This is the only place where parameters of a request get their meaning for the engine. The model's own
        defaults (generation_config.json) replace sampling parameters that were not sent. `cache_salt` is the
        tenant: it names the namespace of the KV and the account of quotas.
        """
        return RequestOptions(
            params=llm.sampling_params(**self.sampling()),
            priority=allowed_priority(settings, self.priority, self.service_tier),
            tenant=self.cache_salt or "",
            service_class="" if self.service_tier in (None, "auto", "default") else self.service_tier,
            session_id=self.session_id or self.prompt_cache_key or None,
            kv_hints=self.kv_hints,
            slo=SLO() if self.slo is None else SLO(**self.slo.model_dump()),
            retention=tuple(self._retentions()),
            client=client,
            reports_hit=(self.vllm_xargs or {}).get(REPORT_MODE) == "full",
            reports_eviction=bool(self.return_cache_misses),
            approximate_reuse=bool(self.approximate_reuse),
            early_stop=rule_of(self.early_stop, EarlyStopFields),
            early_exit=rule_of(self.early_exit, EarlyExitFields),
            speculative_reasoning=rule_of(self.speculative_reasoning, SpeculativeReasoningFields),
        )

    def _retentions(self) -> Iterator[Retention]:
        """Those of the request, and what OpenAI's fields keep."""
        yield from (Retention(**span.model_dump()) for span in self.retention or ())
        options = self.prompt_cache_options
        if self.prompt_cache_retention == "24h":
            yield Retention(priority=100, duration_s=CACHE_LIFETIMES_S["24h"])
        elif options is not None and options.mode != "explicit":
            yield Retention(priority=100, duration_s=CACHE_LIFETIMES_S[options.ttl or "30m"])

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that were sent."""
        sent = {name: getattr(self, name) for name in type(self).model_fields if name in _SAMPLING}
        given = {name: value for name, value in sent.items() if value is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        return given

    @property
    def warning_headers(self) -> dict[str, str]:
        """The headers of the answer that name ignored fields."""
        return {IGNORED_HEADER: ", ".join(self._ignored)} if self._ignored else {}

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

    @field_validator("vllm_xargs")
    @classmethod
    def _report_mode(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        mode = (value or {}).get(REPORT_MODE, "full")
        if mode not in ("full", "incremental"):
            where = f"vllm_xargs.{REPORT_MODE}"
            raise RequestError(f"{where} must be 'full' or 'incremental', got {clipped(repr(mode))}", where)
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

    def options(self, llm: LLM, settings: ServerConfig, client: Client) -> RequestOptions:
        """Also the budgets that the configuration has for the request's `reasoning_effort`."""
        effort = self.reasoning_effort
        if effort is None or not llm.has_reasoning_budgets:
            return super().options(llm, settings, client)
        by_effort = {
            "max_reasoning_tokens": settings.reasoning_budgets.get(effort),
            "soft_reasoning_tokens": settings.soft_reasoning_budgets.get(effort),
        }
        left_open = {name: value for name, value in by_effort.items() if getattr(self, name) is None}
        return super(ChatRequest, self.model_copy(update=left_open)).options(llm, settings, client)

    def sampling(self) -> dict[str, Any]:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return super().sampling() | {"max_tokens": limit, "logprobs": logprobs}


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids. With `echo` the answer
    begins with the prompt, `logprobs` include its tokens, and `max_tokens` may be 0.
    """

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    branch_from: BranchFields | None = None

    fewest_tokens = 0

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1, or 0 with echo", "max_tokens")
        prompts = self.prompts()
        if self.branch_from is not None and (self.echo or len(prompts) > 1):
            raise RequestError("branch_from takes one prompt, which may be empty, and no echo", "branch_from")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        value = self.prompt
        if isinstance(value, str) or (_is_list_of(value, int) and value):
            return [value]
        parts = value if isinstance(value, list) else []
        if parts and all(isinstance(part, str) or (part and _is_list_of(part, int)) for part in parts):
            return parts
        forms = "a string, a list of strings, a list of token ids or a list of such lists"
        raise RequestError(f"prompt must be {forms}, and not empty", "prompt")

    def sampling(self) -> dict[str, Any]:
        return super().sampling() | {
            "max_tokens": COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.logprobs if self.echo else None,
        }


class TokenizeRequest(TemplateFields):
    """POST /tokenize: `prompt` or `messages`."""

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


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


class HintRequest(Body):
    """POST /v1/kv/hints. `cache_salt` says whose sessions and prompts are meant, as for a generation."""

    model: str | None = None
    kv_hints: KVHints
    cache_salt: str | None = Field(default=None, max_length=MAX_SALT_CHARS)


class PromptFields(TemplateFields):
    """`prompt` (text or token ids) or `messages`, of the tenant `cache_salt`."""

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    cache_salt: str | None = Field(default=None, max_length=MAX_SALT_CHARS)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if not self.prompt and not self.messages:
            raise RequestError("send either prompt or messages, and not empty", "prompt")
        if self.prompt is not None and self.messages is not None:
            raise RequestError("send either prompt or messages, not both", "prompt")
        check_messages(self.messages or [])
        return self


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Refuse unknown roles and fields of messages; the template checks their content."""
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if role in ("tool", "function"):
            unsupported = f"{where}.role: {role!r} is not supported, there are no tools"
            raise UnsupportedParameterError(unsupported, f"{where}.role")
        if role not in ROLES:
            got = clipped(repr(role))
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {got}", f"{where}.role")
        check_names(message, MESSAGE_FIELDS, MESSAGE_NEUTRAL, f"{where}.")
        if not isinstance(message.get("name", ""), str | None):
            raise RequestError(f"{where}.name must be a string", f"{where}.name")


def _is_list_of(value: object, kind: type) -> bool:
    """Whether it is a list of `kind`. A bool is no int."""
    return isinstance(value, list) and all(type(part) is kind for part in value)


def checked(model: type[M], fields: Mapping[str, Any]) -> M:
    """The request with these fields. Every defect is a `RequestError` that names one.

    Chats and completions ignore fields of other servers; other requests ignore nothing.
    """
    ignored = sorted(OF_OTHER_SERVERS & fields.keys()) if issubclass(model, GenerationFields) else []
    asked = {name: value for name, value in fields.items() if name not in ignored}
    if names_a_model(model):
        check_names(asked, model.model_fields.keys() | WITHOUT_EFFECT, NEUTRAL)
    else:
        check_names(asked, model.model_fields, {})
    known = {name: value for name, value in fields.items() if name in model.model_fields}
    try:
        request = model.model_validate(known)
    except ValidationError as error:
        raise _readable(error) from error
    if isinstance(request, GenerationFields):
        unused = (request.vllm_xargs or {}).keys() - {REPORT_MODE}
        names = sorted(name for name in unused if name.isascii() and name.isidentifier())
        request._ignored = (*ignored, *(f"vllm_xargs.{name}" for name in names))
    return request


def names_a_model(model: type[BaseModel]) -> bool:
    """Whether OpenAI's clients make such requests, which have further fields."""
    return "model" in model.model_fields


def check_names(
    fields: Mapping[str, Any],
    served: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]],
    prefix: str = "",
) -> None:
    """Refuse names that are neither `served` nor `neutral`.

    Also refuses neutral names whose value asks for something. Errors put `prefix` (`messages[0].`) before a
    name.
    """
    for name, value in fields.items():
        if name in served:
            continue
        where = f"{prefix}{clipped(name)}"
        if name not in neutral:
            renamed = RENAMED.get(name)
            if renamed in served:
                guess = f" Send {renamed!r} instead."
            elif name in ENDPOINT_OF:
                guess = f" It belongs to POST {ENDPOINT_OF[name]}."
            else:
                guess = nearest(name, served) if len(name) <= MAX_ECHO_CHARS else ""
            raise RequestError(f"unknown field {where!r}.{guess}", where, code="unknown_parameter")
        is_bool = isinstance(value, bool)  # 1 is not True
        if value is not None and value not in [v for v in neutral[name] if isinstance(v, bool) == is_bool]:
            values = " or ".join(json.dumps(allowed) for allowed in neutral[name])
            advice = f"leave it out, or send {values}" if values else "leave it out"
            raise UnsupportedParameterError(f"{where!r} is not supported by this server: {advice}", where)


def _readable(error: ValidationError) -> RequestError:
    """The first wrong field, by its JSON path, with all that it may be."""
    found = error.errors(include_url=False)
    inner = [each for each in found if each["type"] != "bool_type" or type(each["input"]) is not dict]
    details = inner or found
    path, name = place = _place(details[0]["loc"])
    message = " or ".join(dict.fromkeys(_message(each) for each in details if _place(each["loc"]) == place))
    if details[0]["type"] == "extra_forbidden":
        unknown = clipped(str(details[0]["loc"][-1]))
        message = f"unknown field {unknown!r}; GET /openapi.json lists the known ones"
    elif name:
        message = f"{name} {message}"
    return RequestError(f"{path or 'body'}: {message}", path or None)


def _message(detail: ErrorDetails) -> str:
    if detail["type"] == "model_type":
        return "should be an object"
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "should be")


def _place(location: tuple[int | str, ...]) -> tuple[str, str]:
    """`stop` or `messages[0]`; then the field within an object, or nothing."""
    path, inner = str(location[0]) if location else "", location[1:]
    named = inner[-1] if len(inner) == 2 and all(isinstance(part, str) for part in inner) else ""
    return path + "".join(f"[{part}]" for part in inner[:1] if isinstance(part, int)), str(named)
