"""What the trace formats share: their contract, ids and checked fields."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from sagellm.benchmarks.traces.record import Trace, TraceRequest
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.types import Namespace, Tokens

MOST = 10**18
SHARED_NAMESPACE = Namespace()
BYTES_PER_TOKEN = 4
"""About the length of a token of a large vocabulary, in English text and code."""
BYTES = "bytes"
WORDS = "words"
_WORD_PIECES = re.compile(r" ?\w{1,8}| ?[^\w\s]{1,4}|\s{1,8}")
Encode = Callable[[str], Iterable[int]]


class BrokenLineError(ValueError):
    """A line that its format cannot read; the message gives the reason."""


class IdTooLargeError(Exception):
    """An id does not fit into int32, in a file with unchanged ids."""


class TraceFormat(Protocol):
    """Reads the lines of one file, in order; each file gets a new reader. `block_tokens` and `title` (the
    trace's own name, if any) are final after the last line. With `from_zero`, times are shifted so that
    the earliest is 0."""

    block_tokens: int
    title: str | None
    from_zero: bool

    def recognises(self, line: str, record: Mapping[str, Any] | None) -> bool:
        """Whether a file of this format can hold this line. `record` is the line as a JSON object, or None
        if it is none."""
        ...

    def parse(self, line_number: int, line: str, ids: IdMap) -> Iterable[TraceRequest]:
        """Returns the requests of a line, none for a header. Raises `BrokenLineError`, and then returns
        none."""
        ...


class TraceWriter(Protocol):
    """A format that can also be written."""

    def write(self, trace: Trace, file: TextIO) -> None: ...


class IdMap:
    """Ids of a file as int32. They are used unchanged or, with `renumber`, replaced by consecutive ints in
    order of appearance, for each namespace."""

    def __init__(self, *, renumber: bool = False) -> None:
        self._tables: defaultdict[Namespace, defaultdict[Any, int]] | None = None
        if renumber:
            self._tables = defaultdict(_numbering)

    def tokens(self, ids: Any, namespace: Namespace, name: str = "hash_ids") -> Tokens:
        """Returns a list of ids as `Tokens`. Raises `BrokenLineError` for anything but a list of whole
        numbers, `IdTooLargeError` if an unchanged id does not fit."""
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise BrokenLineError(f"{name} must be a list of whole numbers")
        if self._tables is not None:
            table = self._tables[namespace]
            return Tokens([table[value] for value in ids])
        try:
            return Tokens(ids)
        except OverflowError as error:
            raise IdTooLargeError from error

    def number(self, key: Any, namespace: Namespace) -> int:
        """Returns a consecutive int for any hashable key, for content without ids."""
        if self._tables is None:
            self._tables = defaultdict(_numbering)
        return self._tables[namespace][key]


def _numbering() -> defaultdict[Any, int]:
    return defaultdict(itertools.count().__next__)


def json_object(line: str) -> dict[str, Any]:
    """Returns the line as a JSON object; raises `BrokenLineError`."""
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise BrokenLineError("JSON that is nested too deeply") from error
    except ValueError as error:
        raise BrokenLineError(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenLineError(f"must be a JSON object, not a {type(value).__name__}")
    return value


def whole(record: Mapping[str, Any], name: str) -> int:
    """Returns a field that is a whole number from 0 to below `MOST`."""
    value = required(record, name)
    if type(value) is not int or not 0 <= value < MOST:
        shown = brief(value) if type(value) is not int or value < MOST else "one of over 18 digits"
        raise BrokenLineError(f"{name} must be a whole number from 0 on, got {shown}")
    return value


def number(record: Mapping[str, Any], name: str) -> float:
    """Returns a field that is a finite number."""
    value = required(record, name)
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and -MOST < value < MOST:
        return float(value)
    raise BrokenLineError(f"{name} must be a finite number, got {brief(value)}")


def text(record: Mapping[str, Any], name: str) -> str:
    value = required(record, name)
    if not isinstance(value, str):
        raise BrokenLineError(f"{name} must be a text, got {brief(value)}")
    return value


def objects(record: Mapping[str, Any], name: str, what: str = "JSON objects") -> list[dict[str, Any]]:
    """Returns a field that is a list of JSON objects. `what` names them in the error."""
    value = required(record, name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BrokenLineError(f"{name} must be a list of {what}, got {brief(value)}")
    return value


def required(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise BrokenLineError(f"{name} is missing; the line has {', '.join(record) or 'nothing'}")
    return record[name]


def brief(value: Any) -> str:
    """Returns the value as a message shows it."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


class TextTokens:
    """Tokens of texts, for formats that hold the prompts themselves.

    `tokenizer` is a function from text to ids, a model's folder (needs the extra `native`), or one of two
    that need nothing installed and number their tokens as they appear. `bytes`: each 4 bytes of UTF-8 from
    the start of the prompt on are a token. Then equal prefixes stay equal, and lengths are about those of a
    real tokenizer. `words`: at most 8 letters of a word with the space before it, 4 signs or 8 spaces are a
    token. Then equal texts behind different ones stay equal too, as with a real tokenizer.
    """

    def __init__(self, tokenizer: str | Path | Encode = BYTES) -> None:
        self._pieces = {BYTES: _byte_pieces, WORDS: _word_pieces}.get(str(tokenizer))
        self._encode = None if self._pieces else _encoder(tokenizer)

    def tokens(self, content: str, ids: IdMap) -> Tokens:
        """Tokens of a prompt. Raises `BrokenLineError` for a text that is not valid Unicode."""
        if self._encode is not None:
            return Tokens(list(self._encode(content)))
        assert self._pieces is not None
        return Tokens([ids.number(piece, SHARED_NAMESPACE) for piece in self._pieces(_utf8(content))])

    def count(self, content: str) -> int:
        """Number of tokens of an output, which gets no ids."""
        if self._encode is not None:
            return len(list(self._encode(content)))
        assert self._pieces is not None
        return len(self._pieces(_utf8(content)))


def _byte_pieces(data: bytes) -> Sequence[object]:
    return [data[start : start + BYTES_PER_TOKEN] for start in range(0, len(data), BYTES_PER_TOKEN)]


def _word_pieces(data: bytes) -> Sequence[object]:
    return _WORD_PIECES.findall(data.decode())


def _utf8(content: str) -> bytes:
    try:
        return content.encode()
    except UnicodeEncodeError as error:
        raise BrokenLineError(f"a text that is no Unicode: {error.reason}") from error


def _encoder(tokenizer: str | Path | Encode) -> Encode:
    if callable(tokenizer):
        return tokenizer
    if not Path(tokenizer).is_dir():
        raise ConfigError(f"tokenizer {str(tokenizer)!r}: a model's folder, {BYTES!r} or {WORDS!r}")
    try:
        from sagellm.engines.native.tokenizer import Tokenizer
    except ImportError as error:
        raise MissingExtraError("a model's tokenizer", "native") from error
    return Tokenizer.from_folder(tokenizer).encode
