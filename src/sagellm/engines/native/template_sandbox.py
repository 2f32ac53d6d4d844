"""The Jinja environment of chat templates: sandboxed, and with a limit on the work and memory of a rendering.

Jinja's sandbox limits one `range` and nothing else. Here each loop iteration, call, filter and operator costs
one operation, more on long texts, and what would make a text or list too large is refused before it is made.
Operations are counted, not timed, so that a template is refused everywhere or nowhere.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Sized
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_OPERATIONS = 500_000
MAX_SIZE = 1 << 26
"""Characters of a text, or items of a list."""
_CHARS_PER_OPERATION = 256
_MAX_INTEGER_BITS = 10_000
_SIZED = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "truncate", "wordwrap",
     "zfill")
)  # fmt: skip
"""Filters and methods whose result grows with a number that they are given."""
_FORMATS = frozenset({"format", "format_map"})
_WIDE_FORMAT = re.compile(r"%(?:\([^()%]*\))?[-+ #0]*(?:\*|\d{5}|\d*\.(?:\*|\d{5}))|\{[^{}]*(?:\{|\d{5})")
"""A width of five digits, or one that is given as an argument."""


class TemplateLimitError(TemplateRuntimeError):
    """A rendering took too many operations or too much memory."""


class _Counted(NodeTransformer):
    """Counts in the body of each loop, and makes `~` a filter, since filters reach the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as Jinja calls it
        self.generic_visit(node)
        counted = nodes.EnvironmentAttribute("iteration")  # the cheapest that reaches the environment
        node.body.insert(0, nodes.ExprStmt(counted, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "concatenated", [], [], None, None, lineno=node.lineno)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Several threads may render at once: each has its own count, which `begin` resets."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False)  # nothing is computed before the count begins
        self._thread = threading.local()
        self.filters = {name: self._limited_filter(name, made) for name, made in self.filters.items()}
        self.filters["concatenated"] = lambda pieces: self.concat(map(str, pieces))
        del self.globals["lipsum"]

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        self.filters[name] = self._limited_filter(name, made)

    def begin(self, extra_operations: int = 0) -> None:
        """Before a rendering: it may take `MAX_OPERATIONS` and the extra ones."""
        self._thread.left = MAX_OPERATIONS + extra_operations

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        return parsed

    @property
    def iteration(self) -> None:
        """Read by each iteration of a loop, which counts it."""
        self._spend(None)

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a template, a macro or a block has written."""
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            _check_size(size)
            kept.append(piece)
        return "".join(kept)

    def call(self, context: Context, called: Any, /, *args: Any, **options: Any) -> Any:
        """A call of a macro, a function or a method."""
        owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        name = getattr(called, "__name__", "")
        self._spend(owner)
        if isinstance(owner, str):
            args = _checked(name, owner, args, options)
        return _checked_result(super().call(context, called, *args, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator of `intercepted_binops`."""
        self._spend(left)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if operator == "*":
            _check_size(_length(left) * _number(right))
            _check_size(_length(right) * _number(left))
        if isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            )
            if bits > _MAX_INTEGER_BITS:
                raise TemplateLimitError("it computes with a number of thousands of digits")
        return _checked_result(super().call_binop(context, operator, left, right))

    def _limited_filter(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, counted; the text it works on follows what Jinja passes to some filters first."""
        first = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def limited(*args: Any, **options: Any) -> Any:
            value = args[first]
            self._spend(value)
            if name == "join" and not isinstance(value, Sized):
                value = list(value)
            rest = _checked(name, value, args[first + 1 :], options)
            return _checked_result(made(*args[:first], value, *rest, **options))

        return limited

    def _spend(self, value: object) -> None:
        left = getattr(self._thread, "left", MAX_OPERATIONS) - 1 - _length(value) // _CHARS_PER_OPERATION
        self._thread.left = left
        if left < 0:
            raise TemplateLimitError("it takes too many operations for these messages")


def _checked(name: str, value: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter or method of `value`, if its result cannot be too large."""
    given = [*args, *options.values()]
    if name in _SIZED:
        most = max(map(_number, given), default=0)
        _check_size((_length(value) + 1) * most if most > 1 else 0)
    elif name in _FORMATS and isinstance(value, str):
        _check_format(value)
    elif name == "replace" and len(given) > 1 and isinstance(value, str):
        old, new = str(given[0]), str(given[1])
        _check_size(len(value) + value.count(old) * len(new))
    elif name == "join" and isinstance(value, str) and args:  # the method: `value` stands between the items
        items = list(args[0])
        _check_joined(items, value)
        return (items,)
    elif name == "join":
        _check_joined(value, str(given[0]) if given else "")
    return args


def _check_joined(items: Iterable[Any], separator: str) -> None:
    _check_size(sum(_length(item) + len(separator) for item in items))


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError(
            "a format with a width of five digits, or one that is an argument, is refused"
        )


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"it makes a text or list of more than {MAX_SIZE} characters or items")


def _checked_result(result: Any) -> Any:
    _check_size(_length(result))
    return result


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
