"""Texts of a trace as tokens, for formats that hold the prompts themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from sagellm.benchmarks.traces._parsing import BrokenLineError, IdMap
from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.types import Namespace, Tokens

EVERYBODY = Namespace()
BYTES_PER_TOKEN = 4
"""About what a token of a large vocabulary holds of English text and code."""
BYTES = "bytes"

Encode = Callable[[str], Iterable[int]]


class TextTokens:
    """`tokenizer`: a function from text to ids, a model's folder (needs the extra `native`), or `bytes`: each
    4 bytes of UTF-8 from the start of the prompt on are a token, numbered as they appear. So equal prefixes
    stay equal, lengths are about those of a real tokenizer, and the result does not depend on what is
    installed.
    """

    def __init__(self, tokenizer: str | Path | Encode = BYTES) -> None:
        self._encode = None if tokenizer == BYTES else _encoder(tokenizer)

    def tokens(self, content: str, ids: IdMap) -> Tokens:
        """Of a prompt. Raises `BrokenLineError` for a text that is no Unicode."""
        if self._encode is not None:
            return Tokens(list(self._encode(content)))
        data = _utf8(content)
        pieces = (data[start : start + BYTES_PER_TOKEN] for start in range(0, len(data), BYTES_PER_TOKEN))
        return Tokens([ids.number(piece, EVERYBODY) for piece in pieces])

    def count(self, content: str) -> int:
        """Of an output, which gets no ids."""
        if self._encode is not None:
            return len(list(self._encode(content)))
        return cdiv(len(_utf8(content)), BYTES_PER_TOKEN)


def _utf8(content: str) -> bytes:
    try:
        return content.encode()
    except UnicodeEncodeError as error:
        raise BrokenLineError(f"a text that is no Unicode: {error.reason}") from error


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
