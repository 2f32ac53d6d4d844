"""The Jinja environment of chat templates: sandboxed, and with a limit on the work and memory of a rendering.

Jinja's sandbox limits one `range` and nothing else. Here each loop iteration, call, filter and operator costs
one operation, more on long texts, and what would make a text or list too large is refused before it is made.
Operations are counted, not timed, so that a template is refused everywhere or nowhere.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_OPERATIONS = 500_000
MAX_SIZE = 1 << 24
"""Characters of a text, or items of a list."""
_CHARS_PER_OPERATION = 256
_ITEMS_PER_OPERATION = 16
_MAX_INTEGER_BITS = 10_000
_SIZED = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "truncate", "wordwrap",
     "zfill")
)  # fmt: skip
"""Filters and methods whose result grows with a number that they are given."""
_COMPARING_TESTS = ("in", "==", "eq", "equalto", "!=", "ne")
_SLOW_FILTERS = ("striptags", "urlize")
"""Filters that may take more than linear time."""
_FORMATS = frozenset({"format", "format_map"})
_WIDE_FORMAT = re.compile(r"%(?:\([^()%]*\))?[-+ #0]*(?:\*|\d{5}|\d*\.(?:\*|\d{5}))|\{[^{}]*(?:\{|\d{5})")
"""A width of five digits, or one that is given as an argument."""


class TemplateLimitError(TemplateRuntimeError):
    """A rendering took too many operations or too much memory."""


class _Counted(NodeTransformer):
    """Makes what takes time reach the environment: iterations, `~`, comparisons and slices."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as Jinja calls it
        self.generic_visit(node)
        counted = nodes.EnvironmentAttribute("iteration")  # the cheapest that reaches the environment
        if node.test is None:
            node.body.insert(0, nodes.ExprStmt(counted, lineno=node.lineno))
        else:  # its items may all fail the test
            node.test = nodes.And(nodes.Not(counted), node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered("concatenated", nodes.List(node.nodes))

    def visit_Operand(self, node: nodes.Operand) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.expr, nodes.Const):
            node.expr = _filtered("counted", node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered("counted", node.node)
        return node


def _filtered(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Several threads may render at once: each has its own count, which `begin` resets."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, optimized=False)  # nothing is computed before the count begins
        self._thread = threading.local()
        self.filters = {name: self._limited_filter(name, made) for name, made in self.filters.items()}
        self.filters["concatenated"] = lambda pieces: self.concat(map(str, pieces))
        self.filters["counted"] = self._result
        for name in _SLOW_FILTERS:
            del self.filters[name]
        self.tests = {
            **self.tests,
            **{name: self._limited_test(self.tests[name]) for name in _COMPARING_TESTS},
        }
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
        return self._result(super().call(context, called, *args, **options))

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
        return self._result(super().call_binop(context, operator, left, right))

    def _limited_filter(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, counted; the text it works on follows what Jinja passes to some filters first."""
        first = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def limited(*args: Any, **options: Any) -> Any:
            value = args[first]
            if isinstance(value, Iterator):
                value = list(value)  # so that what it takes is known
            self._spend(value)
            rest = _checked(name, value, args[first + 1 :], options)
            return self._result(made(*args[:first], value, *rest, **options))

        return limited

    def _limited_test(self, made: Any) -> Callable[[Any, Any], Any]:
        def limited(value: Any, other: Any) -> Any:
            self._spend(other)
            return made(value, other)

        return limited

    def _result(self, result: Any) -> Any:
        """What an operation made, counted by its size."""
        _check_size(_length(result))
        self._spend(result)
        return result

    def _spend(self, value: object) -> None:
        """One operation on a value, more on a long one."""
        per_operation = _CHARS_PER_OPERATION if isinstance(value, str) else _ITEMS_PER_OPERATION
        left = getattr(self._thread, "left", MAX_OPERATIONS) - 1 - _length(value) // per_operation
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
    elif name == "sum" and any(isinstance(one, (list, tuple)) for one in given):
        raise TemplateLimitError("it adds lists by the filter sum")
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


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else 0


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
