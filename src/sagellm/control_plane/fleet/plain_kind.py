"""`PlainKind`: what a front must know of another engine's server to use it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from sagellm.core.errors import ContextLengthError, RequestError, SageError, UnsupportedParameterError
from sagellm.core.types import FinishReason, Request, RequestOutput, TokenLogprob

MAX_SAID = 300
"""Characters of a server's error that are repeated."""
MAX_SAID_BYTES = 1 << 16
REFUSED = frozenset({400, 413, 422})
"""Statuses with which a server refuses one request; it would refuse it again."""
MISPLACED = frozenset({401, 403, 404})
"""Statuses that mean that the server does not serve us: another key, another model."""
_INT64 = 2**63
T = TypeVar("T")


class PlainServerError(SageError):
    """What a server has sent, or not sent, in place of tokens.

    `status`: that of HTTP; 0: there is none. `is_silence`: it has sent nothing in time.
    """

    def __init__(self, message: str, status: int = 0, *, is_silence: bool = False) -> None:
        super().__init__(message)
        self.status, self.is_silence = status, is_silence


Ask = Callable[[str], Awaitable[bytes]]
"""The body of a GET of a path. Raises `PlainServerError`."""


class Piece(NamedTuple):
    """What one message of a server adds to an answer.

    `num_cached_tokens`, `prompt_logprobs`: None where the message does not tell.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class LoadReading(NamedTuple):
    """What a server says of its load; all of its ranks together.

    `num_queued_tokens`: None where it does not tell. `prefill_s`, `num_prefill_tokens`: what prompts have
    taken since it began. `start`: another one after each start.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_queued_tokens: int | None = None
    prefill_s: float = 0.0
    num_prefill_tokens: int = 0
    start: str = ""


class PlainAnswer(Protocol):
    """Reads the answer to one request. `streams`: it comes in messages; else it is one body."""

    streams: bool

    def read(self, data: str | bytes) -> Piece | None:
        """None: the answer is over. Raises `PlainServerError`."""


class PlainKind(Protocol):
    """A connected server: what it is, and its form of requests and answers.

    `name`: engine and version. `draws_by_position`: a sampled token depends on the seed and its position
    alone. `clear_path`: what empties its cache, and `clear_hint` what it needs for that.
    """

    name: str
    max_model_len: int
    num_blocks: int
    block_size: int
    draws_by_position: bool
    path: str
    health_path: str
    load_path: str
    clear_path: str
    clear_hint: str

    def body(self, request: Request) -> dict[str, Any]:
        """The JSON of a request. Raises `RequestError` for what this server cannot be asked."""

    def answer(self, request: Request) -> PlainAnswer: ...

    def reading(self, data: bytes) -> LoadReading:
        """The load, from the body of `load_path`. Raises `PlainServerError`."""


def check_plain(request: Request, name: str, *, draws_by_position: bool) -> None:
    """Raises `RequestError` for what no plain server can be asked.

    A request that goes on is sent as a longer prompt. That changes nothing for greedy requests, for those
    without a seed, and for a repetition penalty, which counts prompt and answer alike.
    """
    params = request.params
    if params.n != 1:
        raise RequestError("an instance computes one sequence a request: expand n > 1 above it", "n")
    if request.namespace.adapter:
        raise UnsupportedParameterError(f"adapters are not asked of {name}: leave it out", "model")
    if not request.generated:
        return
    begun = f"another instance has drawn {len(request.generated)} tokens of this answer, and {name}"
    if params.presence_penalty or params.frequency_penalty:
        raise RequestError(
            f"{begun} would count them as prompt, which presence_penalty and frequency_penalty leave out: "
            "send the request again",
            "presence_penalty" if params.presence_penalty else "frequency_penalty",
        )
    if params.seed is not None and not params.greedy and not draws_by_position:
        raise RequestError(
            f"{begun} would begin anew with the random numbers of the seed: send the request again, or leave "
            "seed out",
            "seed",
        )


def num_left(request: Request, max_model_len: int) -> int:
    """How many tokens are wanted at most.

    0 or less: those that were drawn are all."""
    drawn, most = len(request.generated), request.params.max_tokens
    room = max_model_len - len(request.tokens) - drawn
    return room if most is None else min(room, most - drawn)


def limits(request: Request, max_model_len: int) -> tuple[int, int]:
    """How many tokens to ask for, at most and at least. Raises `ContextLengthError`.

    A request for none is sent for one, which is left out of its answer.
    """
    if len(request.tokens) + len(request.generated) >= max_model_len:
        raise ContextLengthError(
            max_model_len,
            f"the prompt has {len(request.tokens)} and at least one must be generated",
            "prompt",
        )
    most = max(1, num_left(request, max_model_len))
    return most, min(most, max(0, request.params.min_tokens - len(request.generated)))


def stop_ids(request: Request) -> list[int]:
    """Tokens that end the answer, whatever the defaults of the server are."""
    ids = set(request.params.stop_token_ids)
    return sorted(ids if request.params.ignore_eos else ids | request.eos_token_ids)


def prompt_ids(request: Request) -> list[int]:
    return [*request.tokens, *request.generated]


def signed_seed(seed: int) -> int:
    """A seed of any size as an int64, which servers take."""
    return seed % _INT64


def best(entries: list[tuple[int, float]], num: int | None) -> tuple[tuple[int, float], ...]:
    """The `num` most probable tokens.

    Servers add the drawn one where it is none of them."""
    return tuple(sorted(entries, key=lambda entry: -entry[1])[: num or 0])


def decoded(decoder: msgspec.json.Decoder[T], data: str | bytes, what: str) -> T:
    """Raises `PlainServerError` for what is not of the expected form."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PlainServerError(f"{what} has an unexpected form: {error}") from error


def said(data: bytes) -> str:
    """The message of an error on one line.

    It is in OpenAI's form, in FastAPI's, or plain text."""
    text = data[:MAX_SAID_BYTES].decode(errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        inner = found.get("error", found)
        message = inner.get("message", inner.get("detail")) if isinstance(inner, dict) else inner
        text = str(message) if message else text
    return " ".join(text.split())[:MAX_SAID]


class PlainProgress:
    """What has come of one answer, as outputs. The end is held back until the server has said all."""

    def __init__(self, request: Request, max_model_len: int, vocab_size: int) -> None:
        self._request, self._vocab_size = request, vocab_size
        self._most = limits(request, max_model_len)[0]
        self._num_cached = 0
        self._last: Piece | None = None
        self.num_tokens = 0

    @property
    def is_over(self) -> bool:
        """Whether the server has given a finish reason."""
        return self._last is not None

    def take(self, piece: Piece) -> RequestOutput | None:
        """Raises `PlainServerError` for tokens that cannot be right."""
        if piece.num_cached_tokens is not None:
            self._num_cached = min(piece.num_cached_tokens, len(self._request.tokens))
        if self._last is not None:
            return None
        self.num_tokens += len(piece.token_ids)
        if any(not 0 <= token < self._vocab_size for token in piece.token_ids):
            raise PlainServerError(
                f"a token of its answer is not in the vocabulary of {self._vocab_size} tokens"
            )
        if self.num_tokens > self._most:
            raise PlainServerError(f"it has sent {self.num_tokens} tokens, {self._most} were asked for")
        if self._request.params.max_tokens == 0:
            piece = piece._replace(token_ids=(), logprobs=())
        if piece.finish is not None:
            self._last = piece
            return None
        return self._output(piece) if piece.token_ids or piece.prompt_logprobs is not None else None

    def end(self) -> RequestOutput:
        """Raises `PlainServerError` where the server has not ended the answer."""
        if self._last is None:
            raise PlainServerError(f"its answer broke off after {self.num_tokens} tokens")
        return self._output(self._last)

    def _output(self, piece: Piece) -> RequestOutput:
        request = self._request
        num_tokens = 0 if request.params.max_tokens == 0 else self.num_tokens
        finish = (
            piece.finish if request.params.max_tokens != 0 or piece.finish is None else FinishReason.LENGTH
        )
        return RequestOutput(
            request.request_id,
            piece.token_ids,
            len(request.tokens),
            self._num_cached,
            len(request.generated) + num_tokens,
            piece.logprobs,
            finish,
            prompt_logprobs=piece.prompt_logprobs,
        )
