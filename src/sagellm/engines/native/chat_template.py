"""Chat templates of Hugging Face folders: Jinja, rendered in a sandbox, since they are foreign code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sagellm.core.errors import ModelError, RequestError, UnsupportedParameterError
from sagellm.core.protocols.tokenizer import Message

TEXT_PART = "text"
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
    """`{% generation %}` marks the assistant's tokens for training; when serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template; `special_tokens` (`bos_token`, `eos_token`, ...) are variables in it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            where = f"line {error.lineno}"
            raise ModelError(f"the chat template does not parse, {where}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; `options` are more variables. What the template itself refuses (order of roles,
        say) is a `RequestError`."""
        variables = {**self._special_tokens, "tools": None, "documents": None, **(options or {})}
        variables["messages"] = [self._plain(i, message) for i, message in enumerate(messages)]
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(variables)
        except _TEMPLATE_FAILURES as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error

    def _plain(self, position: int, message: Message) -> dict[str, Any]:
        """The message without nulls, its content one string, `developer` as `system` where it is unknown."""
        where = f"messages[{position}]"
        role = message.get("role")
        if not isinstance(role, str):
            raise RequestError(f"{where} has no role: send 'system', 'user' or 'assistant'", f"{where}.role")
        plain = {key: value for key, value in message.items() if value is not None}
        plain["content"] = content_text(message.get("content"), f"{where}.content")
        if role == "developer" and not self._knows_developer:
            plain["role"] = "system"
        return plain


def content_text(content: object, where: str) -> str:
    """A message's content as one string; text parts are joined by line breaks. `where` names it in errors."""
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
    """JSON as templates expect it: Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
