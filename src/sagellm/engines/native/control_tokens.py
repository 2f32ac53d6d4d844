"""Tells a chat template's own special tokens from those spelled in messages.

`RenderedChat` is a rendered prompt with the template's own tokens marked. `ControlTokens` knows the special
tokens of a tokenizer and encodes a marked prompt so that no other text becomes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from sagellm.core.errors import RequestError
from sagellm.core.types import Tokens

_MARK = "\ufdd0"
"""A code point that Unicode reserves for use inside a program (a noncharacter)."""
_DELIMITER = re.compile(r"<[|\uff5c][^<>|\uff5c]*[|\uff5c]>")


def token_ids(tokenizer: FastTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of a text. Raises `RequestError` where the tokenizer cannot process it. That happens, for
    example, where a pattern of the tokenizer backtracks without end.
    """
    try:  # of a batch, since that lets other threads run meanwhile and `encode` does not
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the Rust library, and no `Exception`
            raise
        raise RequestError(f"the model's tokenizer cannot process this text: {error}") from None
    ids: list[int] = encoding.ids
    return ids


def valid_unicode(text: str, parameter: str | None = None) -> str:
    """The text. Raises `RequestError`, for that parameter of the request, if it has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"character {error.start} of the text"
        raise RequestError(f"{where} is half a surrogate pair: send valid Unicode", parameter) from error
    return text


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt in parts: the template's special tokens at odd positions, texts between. `spells_tokens` is
    whether a text contains the text of a special token.
    """

    parts: tuple[str, ...]
    spells_tokens: bool = False

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The template's own special tokens."""
        return self.parts[1::2]


class ControlTokens:
    """The special tokens of a tokenizer, as text and as ids."""

    def __init__(self, fast: FastTokenizer, model: Mapping[str, Any], named: Collection[str] = ()) -> None:
        """`model` is the object of that name in tokenizer.json. An added token is special if it is marked so,
        if the model's folder names it (`named`: the end of text, say) or if it looks like `_DELIMITER`: some
        folders mark the tokens around a turn as ordinary ones.
        """
        self._fast = fast
        added = fast.get_added_tokens_decoder()
        self._ids = {
            token.content: i
            for i, token in added.items()
            if token.content
            and (token.special or token.content in named or _DELIMITER.fullmatch(token.content))
        }
        unknown = model.get("unk_id") if "unk_id" in model else fast.token_to_id(model.get("unk_token") or "")
        self._control_ids = frozenset(self._ids.values()) - {unknown}
        """All but the one that stands for text that the vocabulary lacks."""

    @property
    def texts(self) -> Collection[str]:
        return self._ids.keys()

    def are_those_of(self, chat: RenderedChat, ids: Iterable[int]) -> bool:
        """Whether the special tokens among `ids` are those that the template wrote. `ids` are the tokenizer's
        own for the prompt. It may find others where it normalizes a text first.
        """
        own = [self._ids[text] for text in chat.tokens]
        found = [i for i in ids if i in self._control_ids]
        return found == [i for i in own if i in self._control_ids]

    def encode(self, chat: RenderedChat) -> Tokens:
        """The prompt's ids; texts have no special token, whatever they spell. One pass over the whole prompt,
        so that spaces and merges beside a special token are as in the tokenizer itself. A noncharacter U+FDD0
        in a text is read as U+FFFD.
        """
        tokenizer, original_ids, marks = self._literal
        marked = "".join(
            marks[part] if i % 2 else part.replace(_MARK, "\ufffd") for i, part in enumerate(chat.parts)
        )
        ids = token_ids(tokenizer, marked, add_special_tokens=False)
        return Tokens([original_ids.get(token_id, token_id) for token_id in ids])

    @cached_property
    def _literal(self) -> tuple[FastTokenizer, dict[int, int], dict[str, str]]:
        """A tokenizer that knows special tokens by marks, its ids' originals, and the marks. It is a copy
        that does not find special tokens by their text. Made when a message first spells a special token.
        """
        description = json.loads(self._fast.to_str())
        added = description.pop("added_tokens")
        marks = {text: f"{_MARK}{token_id}{_MARK}" for text, token_id in self._ids.items()}
        _hide_special_tokens(
            description["model"],
            {text: marks[text] for text, i in self._ids.items() if i in self._control_ids},
        )
        copy = FastTokenizer.from_str(json.dumps({**description, "added_tokens": [], "post_processor": None}))
        names = [marks.get(entry["content"], entry["content"]) for entry in added]
        copy.add_tokens([_unmarked(entry, name) for entry, name in zip(added, names, strict=True)])
        ids = {
            token_id: entry["id"]
            for entry, name in zip(added, names, strict=True)
            if (token_id := copy.token_to_id(name)) is not None
        }
        return copy, ids, marks


def _unmarked(entry: dict[str, Any], content: str) -> AddedToken:
    """The added token under another name, matched anywhere."""
    flags = {key: entry[key] for key in ("lstrip", "rstrip", "normalized")}
    return AddedToken(content, **flags, single_word=entry["single_word"] and content == entry["content"])


def _hide_special_tokens(model: dict[str, Any], marks: dict[str, str]) -> None:
    """Rename special tokens in a model's vocabulary, so that texts cannot match them."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {f"{marks[text]}v" if text in marks else text: i for text, i in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[f"{marks[text]}v" if text in marks else text, score] for text, score in vocab]
    if model.get("merges"):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [
            [left, right]
            for left, right in pairs
            if left not in marks and right not in marks and left + right not in marks
        ]


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost longest of `words`, in linear time. Alternatives at each point differ
    in their first character, so the number of words does not matter.
    """
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_alternatives(root) if root else r"(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    options = [_chain(char, child) for char, child in node.items() if char]
    if not options:
        return ""
    return f"(?:{'|'.join(options)}){'?' if '' in node else ''}"


def _chain(char: str, node: dict[str, Any]) -> str:
    """A character and, without nesting, those that must follow it."""
    literal = [re.escape(char)]
    while len(node) == 1 and "" not in node:
        [(char, node)] = node.items()
        literal.append(re.escape(char))
    return "".join(literal) + _alternatives(node)
