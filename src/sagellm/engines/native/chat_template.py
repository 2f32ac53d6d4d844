"""Chat templates of Hugging Face folders: foreign Jinja code, rendered in a sandbox.

While a template runs, its special tokens are single characters that no message can hold. The output shows
where they went, whatever the template does with its texts. Text that looks like a special token and is none
of these characters is text of a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from sagellm.core.errors import ModelError, RequestError, UnsupportedParameterError
from sagellm.core.protocols.tokenizer import Message
from sagellm.engines.native.control_tokens import RenderedChat, any_of, valid_unicode
from sagellm.engines.native.template_sandbox import TemplateLimitError, TemplateSandbox

TEXT_PART = "text"
_OPERATIONS_PER_MESSAGE = 1000
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_FIRST_HALF, _LAST_HALF = 0xD800, 0xDFFF
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
"""What a foreign template may raise on messages that it was not written for."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for training; serving renders its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `special_tokens` (`bos_token`, `eos_token`, ...) are variables in it;
    `control_texts` are all texts that the tokenizer reads as special tokens.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_texts: Collection[str] = (),
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._environment = environment = TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self._control = any_of(control_texts)
        self._token_of: dict[str, str] = {}
        self._shadows = _shadows(control_texts)
        self._words = set(_ROLES)
        self._template = self._compiled(source)
        self._special_tokens = {name: self._opaque(text) for name, text in special_tokens.items()}
        self._marked = any_of([*self._token_of, *control_texts])
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt; `options` are more variables of the template.

        Raises `RequestError` where the template refuses the messages (order of roles, say) or takes too long.

        A text is the template's own special token if no character of it comes from `messages` or `options`. A
        template may build a token from pieces ('<|' + role + '|>'). A second rendering finds this: it marks
        the characters of messages and options. If the two differ in more than the marks, the token is text.
        """
        given = {"tools": None, "documents": None, **(options or {})}
        given["messages"] = [self._plain(i, message) for i, message in enumerate(messages)]
        given["add_generation_prompt"] = add_generation_prompt
        extra = _OPERATIONS_PER_MESSAGE * len(messages)
        try:
            _mapped(given, lambda text: valid_unicode(text, "messages"))
            with self._environment.rendering(extra):
                text = self._template.render({**self._special_tokens, **given})
        except TemplateLimitError as error:
            raise RequestError(f"the chat template was stopped: {error}", "messages") from error
        except _TEMPLATE_FAILURES as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
        return self._split_tokens(text, self._origin(given, extra) if self._control.search(text) else "")

    def _origin(self, given: Mapping[str, Any], extra_operations: int) -> str:
        """The prompt with message characters marked; empty if the template fails."""
        marked = {name: _mapped(value, self._shadow) for name, value in given.items()}
        try:
            with self._environment.rendering(extra_operations):
                return self._template.render({**self._special_tokens, **marked})
        except _TEMPLATE_FAILURES:
            return ""

    def _compiled(self, source: str) -> Template:
        """The template, with each special token in its texts as one character."""
        try:
            tree = self._environment.parse(source)
            for text in tree.find_all(nodes.TemplateData):
                text.data = self._opaque(text.data)
            for constant in tree.find_all(nodes.Const):
                if isinstance(constant.value, str):
                    self._words.add(constant.value)
                    constant.value = self._opaque(constant.value)
            self._words |= {node.attr for node in tree.find_all(nodes.Getattr)}
            self._words = {word for word in self._words if re.fullmatch(r"\w+", word)}
            return self._environment.from_string(tree)
        except TemplateSyntaxError as error:
            where = f"line {error.lineno}"
            raise ModelError(f"the chat template does not parse, {where}: {error.message}") from error
        except (RecursionError, SyntaxError, MemoryError) as error:  # of Python's own compiler
            raise ModelError(
                f"the chat template cannot be compiled, it is nested too deeply: {error}"
            ) from error

    def _opaque(self, text: str) -> str:
        """A template's text with half a surrogate pair for each special token. No valid text holds half a
        surrogate pair.
        """
        if _HALF_PAIR.search(text):
            raise ModelError("the chat template holds half a surrogate pair: it is not valid Unicode")
        characters = {token: char for char, token in self._token_of.items()}

        def character(match: re.Match[str]) -> str:
            char = characters.setdefault(match[0], chr(_FIRST_HALF + len(characters)))
            self._token_of[char] = match[0]
            return char

        found = self._control.sub(character, text)
        if len(self._token_of) + len(self._shadows) > _LAST_HALF - _FIRST_HALF:
            raise ModelError(f"the chat template has {len(self._token_of)} special tokens: too many")
        return found

    def _shadow(self, text: str) -> str:
        """A message's text in marked characters, except roles and words of the template. The template may
        compare these.
        """
        return text if text in self._words else text.translate(self._shadows)

    def _split_tokens(self, text: str, origin: str) -> RenderedChat:
        unmarked = {ord(mark): chr(char) for char, mark in self._shadows.items()}
        if origin.translate(unmarked) != text:
            origin = ""
        parts, end, spells_tokens = [], 0, False
        for match in self._marked.finditer(text):
            token = self._token_of.get(match[0])
            if token is None and origin and origin[match.start() : match.end()] == match[0]:
                token = match[0]
            if token is None:
                spells_tokens = True
            else:
                parts += [text[end : match.start()], token]
                end = match.end()
        return RenderedChat((*parts, text[end:]), spells_tokens)

    def _plain(self, position: int, message: Message) -> dict[str, Any]:
        """The message without nulls, content as one string, `developer` as `system` if unknown."""
        where = f"messages[{position}]"
        role = message.get("role")
        if not isinstance(role, str):
            raise RequestError(f"{where} has no role: send 'system', 'user' or 'assistant'", f"{where}.role")
        plain = {key: value for key, value in message.items() if value is not None}
        plain["content"] = content_text(message.get("content"), f"{where}.content")
        if role == "developer" and not self._knows_developer:
            plain["role"] = "system"
        return plain


def _shadows(control_texts: Collection[str]) -> dict[int, str]:
    """A mark for each character of a special token, except spaces, which templates trim."""
    characters = sorted({char for text in control_texts for char in text if not char.isspace()})
    return {ord(char): chr(_LAST_HALF - i) for i, char in enumerate(characters)}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def content_text(content: object, where: str) -> str:
    """A message's content as one string, text parts joined by line breaks. `where` names it in errors."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{where} must be a string or a list of text parts", where)
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is not None and kind != TEXT_PART:
        raise UnsupportedParameterError(
            f"{where}: parts of type {str(kind)[:100]!r} are not supported, only {TEXT_PART!r}",
            f"{where}.type",
        )
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind is None or not isinstance(text, str):
        raise RequestError(f'{where} must be an object {{"type": "text", "text": "..."}}', where)
    return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT002 - templates pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT002
) -> str:
    """JSON as templates expect it; Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
