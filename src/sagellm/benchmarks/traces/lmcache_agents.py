"""LMCache's agent traces (JSON Lines): the text of every call, with its session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sagellm.benchmarks.traces._parsing import BrokenLineError, IdMap, json_object, number, text
from sagellm.benchmarks.traces.record import TraceRequest
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.types import Namespace, Tokens

EVERYBODY = Namespace()
BYTES_PER_TOKEN = 4
"""About what a token of a large vocabulary holds of English text and code."""
BYTES = "bytes"

Encode = Callable[[str], Iterable[int]]


class LmcacheAgentsFormat:
    """`timestamp` in µs, `input` (the whole prompt), `output`, `session_id` (or `session_file`). Prompts are
    compared by content, so `ids` are tokens and there is one namespace.

    `tokenizer`: a function from text to ids, a model's folder (needs the extra `native`), or `bytes`, the
    default: each 4 bytes of UTF-8 from the start of the prompt on are a token, numbered as they appear. So
    equal prefixes stay equal, lengths are about those of a real tokenizer, and the result does not depend on
    what is installed.
    """

    block_tokens = 1
    title = None
    from_zero = True

    def __init__(self, tokenizer: str | Path | Encode = BYTES) -> None:
        self._encode = None if tokenizer == BYTES else _encoder(tokenizer)

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        return record is not None and {"timestamp", "input", "output"} <= record.keys()

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        record = json_object(line)
        tokens = self._tokens(text(record, "input"), ids)
        yield TraceRequest(
            time_s=number(record, "timestamp") / 1e6,
            ids=tokens,
            namespace=EVERYBODY,
            num_input_tokens=len(tokens),
            num_output_tokens=self._count(text(record, "output")),
            session=_session(record),
        )

    def _tokens(self, content: str, ids: IdMap) -> Tokens:
        if self._encode is not None:
            return Tokens(list(self._encode(content)))
        data = _utf8(content)
        pieces = (data[start : start + BYTES_PER_TOKEN] for start in range(0, len(data), BYTES_PER_TOKEN))
        return Tokens([ids.number(piece, EVERYBODY) for piece in pieces])

    def _count(self, content: str) -> int:
        """Tokens of an output, which gets no ids."""
        if self._encode is not None:
            return len(list(self._encode(content)))
        return -(-len(_utf8(content)) // BYTES_PER_TOKEN)


def _utf8(content: str) -> bytes:
    try:
        return content.encode()
    except UnicodeEncodeError as error:
        raise BrokenLineError(f"a text that is no Unicode: {error.reason}") from error


def _session(record: Mapping[str, Any]) -> str:
    return text(record, "session_id" if record.get("session_id") is not None else "session_file")


def _encoder(tokenizer: str | Path | Encode) -> Encode:
    if callable(tokenizer):
        return tokenizer
    if not Path(tokenizer).is_dir():
        raise ConfigError(f"tokenizer {str(tokenizer)!r}: a model's folder, or {BYTES!r}")
    try:
        from sagellm.engines.native.tokenizer import Tokenizer
    except ImportError as error:
        raise MissingExtraError("a model's tokenizer", "native") from error
    return Tokenizer.from_folder(tokenizer).encode


PLUGIN = LmcacheAgentsFormat
