"""The tokenizer of a Hugging Face folder, as its files describe it.

Token ids become text one token at a time, at a constant cost per token. There are two streams, and the deltas
of both, joined, equal `Tokenizer.decode` of all tokens:

* `ByteStream`: byte-level BPE writes bytes, so an incremental UTF-8 decoder is exact;
* `WindowStream`: any other decoder may look at neighbours. The stream decodes a short window that begins with
  tokens already sent, as context, and sends what the newest tokens add.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from sagellm.core.errors import ModelError, RequestError
from sagellm.core.protocols.tokenizer import Message, TokenStream
from sagellm.core.types import SamplingParams, Tokens
from sagellm.engines.native.chat_template import ChatTemplate
from sagellm.engines.native.control_tokens import ControlTokens, RenderedChat, token_ids, valid_unicode
from sagellm.engines.native.folder_files import (
    MAX_TOKEN_ID,
    SPECIAL_NAMES,
    ConfigJson,
    GenerationJson,
    TokenIds,
    TokenizerConfigJson,
    read_checked,
    read_model_text,
)
from sagellm.engines.native.tokenizer_files import read_tokenizer

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SPACE_MARK = "\u2581"

REASONING_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Start and end of reasoning: of Qwen, DeepSeek and most others, Magistral, Seed-OSS, Kimi."""
REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""One byte, in a vocabulary with byte fallback."""


def byte_alphabet() -> dict[str, int]:
    """Printable stand-ins of bytes in byte-level BPE (GPT-2). Each is the byte itself or a code point from
    256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def decoder_kinds(decoder: Mapping[str, Any] | None) -> frozenset[str]:
    """The types in the `decoder` entry of a tokenizer.json, sequences flattened."""
    decoder = decoder or {}
    kind = decoder.get("type", "none")
    own = frozenset() if kind == "Sequence" else frozenset({str(kind)})
    return own.union(*map(decoder_kinds, decoder.get("decoders", ())))


_ALPHABET = byte_alphabet()


class Tokenizer:
    """Encodes, decodes and renders chats as the model's folder demands. Thread-safe. `default_sampling` holds
    the recommendations of generation_config.json, by the names of `SamplingParams`. With
    `special_in_messages`, a special token spelled in a chat message is that token, not text.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
        default_sampling: Mapping[str, Any] | None = None,
        special_in_messages: bool = False,
    ) -> None:
        fast.no_truncation()  # a folder may keep what its training set
        fast.no_padding()
        self._fast = fast
        self._special_in_messages = special_in_messages
        description = json.loads(fast.to_str())
        self.special_tokens = dict(special_tokens or {})
        eos_token_ids = frozenset(eos_token_ids)
        known = (fast.id_to_token(i) for i in eos_token_ids if 0 <= i <= MAX_TOKEN_ID)
        eos = {token for token in known if token is not None}
        self._control = ControlTokens(fast, description["model"], eos.union(self.special_tokens.values()))
        self.default_sampling = dict(default_sampling or {})
        self._template = (
            ChatTemplate(chat_template, self.special_tokens, self._control.texts) if chat_template else None
        )
        eos_id = fast.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids = eos_token_ids if eos_id is None else eos_token_ids | {eos_id}
        found = (list(map(fast.token_to_id, markers)) for markers in REASONING_MARKERS)
        pairs = (tuple(token_id for token_id in pair if token_id is not None) for pair in found)
        self.reasoning_token_ids: tuple[int, ...] = next((pair for pair in pairs if len(pair) == 2), ())
        self._kinds = decoder_kinds(description.get("decoder"))
        added = fast.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(
        cls, folder: str | Path, chat_template: str | None = None, *, special_in_messages: bool = False
    ) -> Tokenizer:
        """Read a model folder; `chat_template` (Jinja source) replaces the folder's own."""
        folder = Path(folder)
        config = read_checked(TokenizerConfigJson, folder / "tokenizer_config.json")
        token_map = read_checked(TokenizerConfigJson, folder / "special_tokens_map.json")
        generation = read_checked(GenerationJson, folder / "generation_config.json")
        model = read_checked(ConfigJson, folder / "config.json")
        return cls(
            read_tokenizer(folder),
            special_tokens=_special_tokens(config, token_map),
            chat_template=chat_template or _chat_template(folder, config),
            eos_token_ids=_ids(generation.eos_token_id) | _ids(model.eos_token_id),
            default_sampling=_default_sampling(generation, folder),
            special_in_messages=special_in_messages,
        )

    @cached_property
    def vocab_size(self) -> int:
        return max(self._fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Tokens:
        """Token ids of a text, with special tokens as tokenizer.json's post-processor adds them. The flags
        add_bos_token and add_eos_token do not count, as in transformers 5. Raises `RequestError` for text
        without a UTF-8 form, or that the tokenizer cannot process.
        """
        return Tokens(token_ids(self._fast, valid_unicode(text), add_special_tokens=add_special_tokens))

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> Tokens:
        """Token ids of a chat. The template writes special tokens; no others are added. So there is one BOS
        at most. A special token spelled in a message, a name or a tool's argument is text, with the ids that
        the tokenizer gives it without special tokens.
        """
        chat = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, template_options=template_options
        )
        if self._special_in_messages or not chat.spells_tokens:
            ids = self.encode(chat.text, add_special_tokens=False)
            if self._special_in_messages or self._control.are_those_of(chat, ids):
                return ids
        return self._control.encode(chat)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt that `encode_chat` encodes. Raises `RequestError`."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template: give one with --chat-template FILE, or send a plain prompt "
                "(sagellm run --raw, /v1/completions)",
                "messages",
                code="no_chat_template",
            )
        if not messages:
            raise RequestError("messages is empty: send at least one message", "messages")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, options=template_options
        )

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text; ids without a token (a padded vocabulary) write nothing."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def stream(self, *, skip_special_tokens: bool = True) -> TokenStream:
        """An incremental detokenizer whose deltas, joined, are `decode` with the same option."""
        hidden = self._special_ids if skip_special_tokens else frozenset()
        if self._kinds == {"ByteLevel"}:
            return ByteStream(lambda token_id: b"" if token_id in hidden else self.token_bytes(token_id))
        return WindowStream(
            lambda ids: str(self._fast.decode(ids, skip_special_tokens=False)),
            writes=lambda token_id: token_id not in hidden and bool(self._token(token_id)),
            open_ended=self._is_fallback_byte if "ByteFallback" in self._kinds else lambda _: False,
            holds_replacement="ByteLevel" in self._kinds,
        )

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if not token:
            return b""
        if "ByteLevel" in self._kinds:
            known = all(char in _ALPHABET for char in token)
            return bytes(_ALPHABET[char] for char in token) if known else token.encode()
        if self._is_fallback_byte(token_id):
            return bytes([int(token[3:5], 16)])
        spaced = "Metaspace" in self._kinds or "Replace" in self._kinds
        return (token.replace(_SPACE_MARK, " ") if spaced else token).encode()

    def _is_fallback_byte(self, token_id: int) -> bool:
        return "ByteFallback" in self._kinds and _BYTE_TOKEN.fullmatch(self._token(token_id)) is not None

    def _token(self, token_id: int) -> str:
        """The vocabulary's entry, empty for an id without one."""
        return (self._fast.id_to_token(token_id) if token_id >= 0 else None) or ""


def _special_tokens(*sources: TokenizerConfigJson) -> dict[str, str]:
    """Special tokens by name; the first source that has one wins."""
    tokens: dict[str, str] = {}
    for source in sources:
        for name in SPECIAL_NAMES:
            entry = getattr(source, name)
            if entry is not None:
                tokens.setdefault(name, entry if isinstance(entry, str) else entry.content)
    return tokens


def _chat_template(folder: Path, config: TokenizerConfigJson) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's entry (`default` of several)."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        return read_model_text(path)
    entry = config.chat_template
    if isinstance(entry, list):
        return {named.name: named.template for named in entry}.get("default")
    return entry


def _ids(entry: TokenIds) -> set[int]:
    return {entry} if isinstance(entry, int) else set(entry or ())


def _default_sampling(generation: GenerationJson, folder: Path) -> dict[str, Any]:
    """Recommended parameters; `do_sample: false` means greedy."""
    if generation.do_sample is False:
        return {"temperature": 0.0}
    given = {key: value for key in _SAMPLING_KEYS if (value := getattr(generation, key)) is not None}
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ModelError(f"{folder / 'generation_config.json'}: {error}") from error
    return given


class ByteStream:
    """Stream of a byte-level vocabulary; `token_bytes(id)` is empty for hidden ids."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """Stream over any decoder whose text only grows at its end. `writes(id)` is whether a token takes part in
    decoding at all, `open_ended(id)` whether its text may change with its successor (in a byte-fallback run,
    where one invalid byte spoils the whole run). The window is `context + fresh`; `_sent` characters of its
    text have been returned.
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
        """All text is sent: fresh tokens become the context of the next."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._sent = len(self._decode(self._window))
