"""Token ids to text, one token at a time, at a constant cost per token.

Two ways, with the same promise (the deltas, joined, equal `Tokenizer.decode` of all tokens):

* byte-level BPE writes bytes, so an incremental UTF-8 decoder is exact and needs no second look;
* every other decoder may look at neighbours. Its stream decodes a short window whose first tokens are context
  that has been sent already, and sends what the newest tokens add to it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def byte_alphabet() -> dict[str, int]:
    """Printable stand-ins of bytes in byte-level BPE (GPT-2): the byte itself or a code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def decoder_kinds(decoder: Mapping[str, Any] | None) -> frozenset[str]:
    """The types in the `decoder` entry of a tokenizer.json, sequences flattened."""
    return frozenset(_walk_kinds(decoder or {}))


def _walk_kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    if decoder.get("type") != "Sequence":
        yield str(decoder.get("type", "none"))
    for part in decoder.get("decoders", ()):
        yield from _walk_kinds(part)


def is_byte_token(token: str) -> bool:
    """Whether a byte-fallback vocabulary means one byte by this token, as in `<0xE4>`."""
    return _BYTE_TOKEN.fullmatch(token) is not None


class ByteStream:
    """Stream of a byte-level vocabulary. `token_bytes(id)` is empty for ids that write nothing."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """Stream over any decoder whose text only grows at its end as tokens are added.

    `writes(id)` says whether a token takes part in decoding at all, `open_ended(id)` whether its text may
    still change with its successor (in a byte-fallback run, where one invalid byte spoils the whole run).
    The window is `context + fresh`; `_sent` characters of its text have been handed out.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        writes: Callable[[int], bool],
        open_ended: Callable[[int], bool],
        *,
        holds_replacement: bool,
    ) -> None:
        self._decode = decode
        self._writes = writes
        self._open_ended = open_ended
        self._holds_replacement = holds_replacement
        self._window: list[int] = []
        self._num_context = 0
        self._sent = 0

    def push(self, token_id: int) -> str:
        if not self._writes(token_id):
            return ""
        self._window.append(token_id)
        if self._open_ended(token_id):
            return ""
        text = self._decode(self._window)
        if self._holds_replacement and text.endswith(REPLACEMENT):
            return self._take(text, len(text) - 1)
        delta = self._take(text, len(text))
        self._slide()
        return delta

    def finish(self) -> str:
        text = self._decode(self._window)
        return self._take(text, len(text))

    def _take(self, text: str, end: int) -> str:
        start, self._sent = self._sent, max(self._sent, end)
        return text[start:end]

    def _slide(self) -> None:
        """All is sent: what was fresh becomes the context of what follows."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._sent = len(self._decode(self._window))
