"""`VllmKind`: a vLLM server, asked with tokens at /v1/completions.

It gives token ids since vLLM 0.10.2 (`return_token_ids`). All sampling parameters are sent, since a server
takes those that are missing from the model's generation_config.json. Source of names and limits:
`vllm/entrypoints/openai/completion` and `vllm/sampling_params.py` of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from sagellm.control_plane.fleet.plain_kind import (
    Ask,
    LoadReading,
    Piece,
    PlainServerError,
    best,
    check_plain,
    decoded,
    limits,
    prompt_ids,
    signed_seed,
    stop_ids,
)
from sagellm.control_plane.kv_events import salt_digest
from sagellm.core.blocks import cdiv
from sagellm.core.errors import RequestError
from sagellm.core.types import FinishReason, Request, TokenLogprob

FIRST_WITH_TOKENS = (0, 10, 2)
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""vLLM raises a temperature below the first, and refuses one above the second."""
DEFAULT_BLOCK_SIZE = 16
_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_TOKEN = "token_id:"
_CACHE = "vllm:cache_config_info"
_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prefill_kv_computed_tokens_sum",
    "process_start_time_seconds",
    _CACHE,
)
_MOST = 2.0**63
_LABEL = re.compile(r'\b(\w++)="([^"\\]*+)"')


class _Version(msgspec.Struct):
    version: str = ""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _PromptLogprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Fault(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Fault | None = None


_VERSIONS = msgspec.json.Decoder(_Version)
_CHUNKS = msgspec.json.Decoder(_Chunk)


class VllmKind:
    """Implements `PlainKind`. Made by `connect`."""

    draws_by_position = False
    path, health_path, load_path = "/v1/completions", "/health", "/metrics"
    clear_path = "/reset_prefix_cache"
    clear_hint = "vLLM clears its cache if it was started with VLLM_SERVER_DEV_MODE=1"

    def __init__(self, version: str, model: str, max_model_len: int, metrics: bytes) -> None:
        self.name, self._model, self.max_model_len = f"vLLM {version}", model, max_model_len
        cache = [labels for labels, _ in _read_metrics(metrics)[_CACHE]]
        sizes = [_number(labels, "block_size") for labels in cache]
        self.block_size = max(sizes, default=0) or DEFAULT_BLOCK_SIZE
        least = cdiv(max_model_len, self.block_size)
        self.num_blocks = max(least, sum(_number(labels, "num_gpu_blocks") for labels in cache))

    @classmethod
    async def connect(cls, ask: Ask, model: str, max_model_len: int) -> VllmKind:
        """Raises `PlainServerError` for a version that gives no tokens. Metrics may be switched off."""
        version = decoded(_VERSIONS, await ask("/version"), "/version").version
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
        if (0, 0, 0) < numbers < FIRST_WITH_TOKENS:
            raise PlainServerError(f"vLLM {version} gives no token ids: 0.10.2 or a later one does")
        try:
            metrics = await ask(cls.load_path)
        except PlainServerError as error:
            if error.status != 404:
                raise
            metrics = b""
        return cls(version, model, max_model_len, metrics)

    def body(self, request: Request) -> dict[str, Any]:
        params = request.params
        check_plain(request, self.name, draws_by_position=False)
        if not params.greedy and not LEAST_TEMPERATURE <= params.temperature <= MOST_TEMPERATURE:
            raise RequestError(
                f"{self.name} samples at a temperature from {LEAST_TEMPERATURE} to {MOST_TEMPERATURE:g}, or "
                f"not at all at 0: it is {params.temperature}",
                "temperature",
            )
        most, least = limits(request, self.max_model_len)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt_ids(request),
            "n": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "max_tokens": most,
            "min_tokens": least,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(0, params.top_k),
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop_token_ids": stop_ids(request),
            "ignore_eos": params.ignore_eos,
        }
        if params.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.seed is not None and not params.greedy:
            body["seed"] = signed_seed(params.seed)
        if params.logprobs is not None:
            body |= {"logprobs": params.logprobs, "return_tokens_as_token_ids": True}
        if request.namespace.tenant:
            body["cache_salt"] = salt_digest(request.namespace.tenant)
        if _asks_prompt(request):  # vLLM gives them in a whole answer alone
            del body["stream_options"]
            body |= {"stream": False, "prompt_logprobs": params.prompt_logprobs}
        return body

    def answer(self, request: Request) -> VllmAnswer:
        return VllmAnswer(request)

    def reading(self, data: bytes) -> LoadReading:
        running, waiting, usage, prefill_s, prefilled, starts, _ = _read_metrics(data).values()
        return LoadReading(
            round(_total(running)),
            round(_total(waiting)),
            _total(usage) / max(1, len(usage)),
            prefill_s=_total(prefill_s),
            num_prefill_tokens=round(_total(prefilled)),
            start=str(starts[0][1]) if starts else "",
        )


def _asks_prompt(request: Request) -> bool:
    """Whether the log-probabilities of the prompt are still to be given."""
    return request.params.prompt_logprobs is not None and not request.generated


class VllmAnswer:
    """Implements `PlainAnswer`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.streams = not _asks_prompt(request)

    def read(self, data: str | bytes) -> Piece | None:
        if data in ("[DONE]", b"[DONE]"):
            return None
        chunk = decoded(_CHUNKS, data, "an answer of vLLM")
        if chunk.error is not None:
            status = chunk.error.code if isinstance(chunk.error.code, int) else 500
            raise PlainServerError(chunk.error.message or "an error without a message", status)
        details = None if chunk.usage is None else chunk.usage.prompt_tokens_details
        cached = None if details is None else details.cached_tokens
        if not chunk.choices:
            return Piece(num_cached_tokens=cached)
        choice = chunk.choices[0]
        if choice.token_ids is None:
            raise PlainServerError("its answer has no token ids: vLLM 0.10.2 or a later one gives them")
        finish = None if choice.finish_reason is None else _FINISHES.get(choice.finish_reason)
        if choice.finish_reason is not None and finish is None:
            raise PlainServerError(f"it ended the request with {choice.finish_reason!r}")
        return Piece(
            tuple(choice.token_ids), self._logprobs(choice), finish, cached, self._prompt_logprobs(choice)
        )

    def _logprobs(self, choice: _Choice) -> tuple[TokenLogprob, ...]:
        num, ids = self._request.params.logprobs, choice.token_ids or ()
        if num is None:
            return ()
        given = choice.logprobs or _Logprobs()
        if not len(ids) == len(given.token_logprobs) == len(given.top_logprobs):
            raise PlainServerError(
                f"it gives {len(ids)} tokens and {len(given.token_logprobs)} log-probabilities"
            )
        found = []
        for token, logprob, others in zip(ids, given.token_logprobs, given.top_logprobs, strict=True):
            if logprob is None:
                raise PlainServerError("a token of its answer has no log-probability")
            entries = [(_token_of(name), value) for name, value in (others or {}).items()]
            found.append(TokenLogprob(token, logprob, best(entries, num)))
        return tuple(found)

    def _prompt_logprobs(self, choice: _Choice) -> tuple[TokenLogprob, ...] | None:
        if self.streams:
            return None
        tokens, given = self._request.tokens, choice.prompt_logprobs or []
        if len(given) != len(tokens):
            raise PlainServerError(
                f"it gives {len(given)} log-probabilities of a prompt of {len(tokens)} tokens"
            )
        found = []
        for token, entries in zip(list(tokens)[1:], given[1:], strict=True):
            own = (entries or {}).get(str(token))
            if own is None:
                raise PlainServerError("a token of the prompt has no log-probability")
            others = [(_token_of(name), each.logprob) for name, each in (entries or {}).items()]
            found.append(TokenLogprob(token, own.logprob, best(others, self._request.params.prompt_logprobs)))
        return tuple(found)


def _token_of(name: str) -> int:
    """The id in "token_id:5", or in "5"."""
    text = name.removeprefix(_TOKEN)
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise PlainServerError(f"it names a token {name[:40]!r}, not by its id")
    return int(text)


def _read_metrics(data: bytes) -> dict[str, list[tuple[str, float]]]:
    """Labels and values of the metrics in `_METRICS`, by name, from Prometheus' text format.

    Only these lines are read: the text of a server has thousands, and is read several times a second.
    """
    found: dict[str, list[tuple[str, float]]] = {name: [] for name in _METRICS}
    for line in data.decode(errors="replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name not in found:
            continue
        labels, _, rest = line.rpartition("}") if "{" in line else ("", "", line[len(name) :])
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if 0 <= value < _MOST:  # neither NaN nor infinite
            found[name].append((labels, value))
    return found


def _total(values: Sequence[tuple[str, float]]) -> float:
    """Of all ranks."""
    return sum(value for _, value in values)


def _number(labels: str, name: str) -> int:
    """The value of a label that is a number; else 0."""
    text = dict(_LABEL.findall(labels)).get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0
