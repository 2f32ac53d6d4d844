"""`SglangKind`: an SGLang server, asked with tokens at /generate.

Source of names and limits: `sglang/srt/managers/io_struct.py`, `sglang/srt/sampling/sampling_params.py` and
`sglang/srt/layers/sampler.py` of SGLang 0.5.23.
"""

from __future__ import annotations

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

Entry = tuple[float | None, int, str | None]
"""Log-probability, token and text, as SGLang writes them."""
_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class _ServerInfo(msgspec.Struct):
    version: str = ""
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    enable_deterministic_inference: bool | None = None
    incremental_streaming_output: bool | None = None
    is_embedding: bool | None = None


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    token_usage: float = 0.0
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0


class _Loads(msgspec.Struct):
    loads: list[_Load] = []


class _Finish(msgspec.Struct):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    input_token_logprobs: list[Entry] | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None
    output_token_logprobs: list[Entry] | None = None
    output_top_logprobs: list[list[Entry] | None] | None = None


class _Fault(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Message(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: _Fault | None = None


_INFOS = msgspec.json.Decoder(_ServerInfo)
_LOADS = msgspec.json.Decoder(_Loads)
_MESSAGES = msgspec.json.Decoder(_Message)


class SglangKind:
    """Implements `PlainKind`. Made by `connect`."""

    path, health_path, load_path = "/generate", "/ready", "/v1/loads?include=core"
    clear_path = "/flush_cache"
    clear_hint = "SGLang clears its cache while it has no requests"

    def __init__(self, info: _ServerInfo, max_model_len: int) -> None:
        self.name, self.max_model_len = f"SGLang {info.version}", max_model_len
        self.draws_by_position = bool(info.enable_deterministic_inference)
        self._is_incremental = bool(info.incremental_streaming_output)
        self.block_size = info.page_size or 1
        self.num_blocks = cdiv(max(max_model_len, info.max_total_num_tokens or 0), self.block_size)

    @classmethod
    async def connect(cls, ask: Ask, max_model_len: int) -> SglangKind:
        info = decoded(_INFOS, await ask("/server_info"), "/server_info")
        if info.is_embedding:
            raise PlainServerError("it computes embeddings, and generates no text")
        return cls(info, max_model_len)

    def body(self, request: Request) -> dict[str, Any]:
        params = request.params
        check_plain(request, self.name, draws_by_position=self.draws_by_position)
        self._check_sampling(request)
        most, least = limits(request, self.max_model_len)
        sampling: dict[str, Any] = {
            "n": 1,
            "max_new_tokens": most,
            "min_new_tokens": least,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k > 0 else -1,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop_token_ids": stop_ids(request),
            "ignore_eos": params.ignore_eos,
        }
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if params.seed is not None and not params.greedy:
            sampling["sampling_seed"] = signed_seed(params.seed)
        body: dict[str, Any] = {"input_ids": prompt_ids(request), "stream": True, "sampling_params": sampling}
        scores_prompt = params.prompt_logprobs is not None and not request.generated
        if params.logprobs is not None or scores_prompt:
            body |= {
                "return_logprob": True,
                "logprob_start_len": 0 if scores_prompt else -1,
                "top_logprobs_num": max(params.logprobs or 0, (params.prompt_logprobs or 0) * scores_prompt),
            }
        if request.namespace.tenant:
            body["cache_salt"] = salt_digest(request.namespace.tenant)
        return body

    def _check_sampling(self, request: Request) -> None:
        params = request.params
        if params.repetition_penalty != 1.0:
            raise RequestError(
                f"{self.name} applies repetition_penalty to the answer alone, not to the prompt: leave it "
                "out, or send presence_penalty",
                "repetition_penalty",
            )
        if params.greedy:
            return
        if params.seed is not None and not self.draws_by_position:
            raise RequestError(
                f"{self.name} keeps to a seed if it was started with --enable-deterministic-inference: leave "
                "seed out",
                "seed",
            )
        if params.logprobs is not None and params.temperature != 1.0:
            raise RequestError(
                f"{self.name} gives log-probabilities after the temperature: ask for logprobs at temperature "
                f"0 or 1, not {params.temperature}",
                "logprobs",
            )

    def answer(self, request: Request) -> SglangAnswer:
        return SglangAnswer(request, is_incremental=self._is_incremental)

    def reading(self, data: bytes) -> LoadReading:
        loads = decoded(_LOADS, data, "/v1/loads").loads
        if not loads:
            raise PlainServerError("/v1/loads has no rank")
        return LoadReading(
            sum(each.num_running_reqs for each in loads),
            sum(each.num_waiting_reqs for each in loads),
            sum(each.token_usage for each in loads) / len(loads),
            sum(each.num_waiting_uncached_tokens for each in loads),
            sum(each.total_prefill_busy_us for each in loads) * 1e-6,
            sum(each.total_prefill_uncached_tokens for each in loads),
        )


class SglangAnswer:
    """Implements `PlainAnswer`. A message has all tokens so far, or the new ones if the server says so."""

    streams = True

    def __init__(self, request: Request, *, is_incremental: bool) -> None:
        self._request, self._is_incremental = request, is_incremental
        self._num_read = 0
        self._gives_prompt = request.params.prompt_logprobs is not None and not request.generated

    def read(self, data: str | bytes) -> Piece | None:
        if data in ("[DONE]", b"[DONE]"):
            return None
        message = decoded(_MESSAGES, data, "an answer of SGLang")
        if message.error is not None:
            raise PlainServerError(
                message.error.message or "an error without a message", message.error.code or 500
            )
        meta = message.meta_info
        if meta is None:
            raise PlainServerError("an answer of SGLang has no meta_info")
        finish = None
        if meta.finish_reason is not None:
            finish = _FINISHES.get(meta.finish_reason.type)
            if finish is None:
                why = meta.finish_reason.message or f"it ended the request with {meta.finish_reason.type!r}"
                raise PlainServerError(why, meta.finish_reason.status_code or 500)
        num_before = 0 if self._is_incremental else self._num_read
        if len(message.output_ids) < num_before:
            raise PlainServerError(f"an answer of SGLang has shrunk to {len(message.output_ids)} tokens")
        new = message.output_ids[num_before:]
        logprobs = self._logprobs(meta, new, num_before)
        self._num_read += len(new)
        if finish is not None and meta.completion_tokens not in (None, self._num_read):
            raise PlainServerError(f"it has drawn {meta.completion_tokens} tokens and sent {self._num_read}")
        return Piece(tuple(new), logprobs, finish, meta.cached_tokens, self._prompt_logprobs(meta))

    def _logprobs(self, meta: _Meta, new: list[int], num_before: int) -> tuple[TokenLogprob, ...]:
        num = self._request.params.logprobs
        if num is None or not new:
            return ()
        stop = num_before + len(new)
        entries = (meta.output_token_logprobs or [])[num_before:stop]
        others = (meta.output_top_logprobs or [])[num_before:stop] if num else None
        return _scored(new, entries, others, num)

    def _prompt_logprobs(self, meta: _Meta) -> tuple[TokenLogprob, ...] | None:
        if not self._gives_prompt or meta.input_token_logprobs is None:
            return None
        self._gives_prompt = False
        tokens, num = list(self._request.tokens), self._request.params.prompt_logprobs
        others = (meta.input_top_logprobs or [])[1:] if num else None
        return _scored(tokens[1:], meta.input_token_logprobs[1:], others, num)


def _scored(
    tokens: list[int], entries: list[Entry], given: list[list[Entry] | None] | None, num: int | None
) -> tuple[TokenLogprob, ...]:
    """`given`: others at each position; None: none were asked for."""
    others = [None] * len(tokens) if given is None else given
    if not len(tokens) == len(entries) == len(others):
        raise PlainServerError(f"it gives {len(tokens)} tokens and {len(entries)} log-probabilities")
    found = []
    for token, (logprob, named, _), top in zip(tokens, entries, others, strict=True):
        if named != token or logprob is None:
            raise PlainServerError(f"token {token} of its answer has the log-probability of token {named}")
        found.append(
            TokenLogprob(token, logprob, best([(i, p) for p, i, _ in top or () if p is not None], num))
        )
    return tuple(found)
