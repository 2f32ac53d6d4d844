"""The Jinja sandbox of chat templates, with limits on work and memory.

Jinja's own sandbox limits one `range` and nothing else. In this one each loop iteration, call, filter and
operator costs one operation, more on long texts, and a text or list that would be too large is refused before
it is made. Operations are counted, not timed, so a template is refused on every machine or on none.

`[x, x]` holds `x` once, but `str`, `tojson`, comparisons and hashes go through it twice: thirty such lists,
each in the next, are a billion items. So these cost operations by a measure in which a part counts as often
as it appears.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_OPERATIONS = 500_000
MAX_SIZE = 1 << 24
"""Characters of a text, or items of a list."""
_CHARS_PER_OPERATION = 256
_ITEMS_PER_OPERATION = 16
_MAX_INTEGER_BITS = 10_000
_SIZED = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "truncate", "wordwrap", "zfill")
)
"""Filters and methods whose result grows with a number or text that they are given."""
_ITEM_CHARS = _CHARS_PER_OPERATION // _ITEMS_PER_OPERATION
_SHALLOW_FILTERS = frozenset(
    ("batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", "reject",
     "rejectattr", "reverse", "select", "selectattr", "slice")
)  # fmt: skip
"""Filters that do not look into an item."""
_SHALLOW_TESTS = frozenset(
    ("boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none",
     "number", "sameas", "sequence", "string", "true", "undefined")
)  # fmt: skip
_NUMBER_TESTS = frozenset({"divisibleby", "even", "odd"})
"""With a text, `%` would format it."""
_WITH_PARTS = (list, tuple, dict, KeysView, ValuesView, ItemsView)
_SLOW_FILTERS = ("pprint", "striptags", "urlize")
"""Filters that may take more than linear time."""
_FORMATS = frozenset({"format", "format_map"})
_WIDE_FORMAT = re.compile(r"%(?:\([^()%]*\))?[-+ #0]*(?:\*|\d{5}|\d*\.(?:\*|\d{5}))|\{[^{}]*(?:\{|\d{5})")
"""A width of five digits, or one that is given as an argument."""


class TemplateLimitError(TemplateRuntimeError):
    """A rendering took too many operations or too much memory."""


class _Counted(NodeTransformer):
    """Makes costly nodes call the environment: loops, `~`, comparisons, keys and slices."""

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

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Comparing two values costs at most what going through the second costs."""
        self.generic_visit(node)
        node.expr = _filtered("hashed", node.expr)
        for operand in node.ops:
            among = operand.op in ("in", "notin")
            operand.expr = _filtered("searched" if among else "compared", operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _filtered("hashed", node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered("counted", node.node)
        return node


def _filtered(name: str, value: nodes.Expr) -> nodes.Expr:
    if isinstance(value, nodes.Const):
        return value
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _BareNamespace(Namespace):
    """A namespace whose text leaves its values out: they change and need no measure."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Count(threading.local):
    """Operations that a rendering has left, and the measures of its lists and dicts. `measures`, by id, keep
    their values, so that no other value gets the same id.
    """

    def __init__(self) -> None:
        self.left = MAX_OPERATIONS
        self.measures: dict[int, tuple[object, int, int]] = {}


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment. Several threads may render at once: each has its own count."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # Not optimized: nothing is computed before the count begins.
        super().__init__(**options, optimized=False, finalize=self._charge_parts)
        self._count = _Count()
        for name in _SLOW_FILTERS:
            del self.filters[name]
        self.filters = {name: self._limited_filter(name, made) for name, made in self.filters.items()}
        self.filters["concatenated"] = lambda pieces: self.concat(map(str, map(self._charge_parts, pieces)))
        self.filters["counted"] = self._result
        self.filters["compared"] = self._compared
        self.filters["hashed"] = self._hashed
        self.filters["searched"] = self._searched
        self.tests = {name: self._limited_test(name, made) for name, made in self.tests.items()}
        self.globals["namespace"] = _BareNamespace
        del self.globals["lipsum"]

    def add_filter(self, name: str, made: Callable[..., Any]) -> None:
        self.filters[name] = self._limited_filter(name, made)

    @contextmanager
    def rendering(self, extra_operations: int = 0) -> Iterator[None]:
        """Within, this thread may take `MAX_OPERATIONS` and the extra ones."""
        self._count.left = MAX_OPERATIONS + extra_operations
        try:
            yield
        finally:
            self._count.measures.clear()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        return parsed

    @property
    def iteration(self) -> None:
        """Counts an iteration of a loop, which reads it."""
        self._spend(None)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a template, a macro or a block has written."""
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
        if isinstance(called, type):  # a namespace or dict
            self._charge_all(args)
        elif not isinstance(called, (Macro, LoopContext)):
            found = () if isinstance(owner, dict) else (owner,)  # a dict's methods look at a key alone
            self._charge_all((*found, *args, *options.values()))
        if isinstance(owner, str):
            if name == "join" and args:  # the method: `owner` stands between the items
                args = (list(args[0]),)
                _check_joined(args[0], owner)
            self._check_arguments(name, owner, [*args, *options.values()])
        return self._result(super().call(context, called, *args, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator of `intercepted_binops`."""
        self._spend(left)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            self._charge_parts(right)
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
        """The filter, counted. Jinja passes other arguments before the value to some filters."""
        first = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def limited(*args: Any, **options: Any) -> Any:
            value = args[first]
            if isinstance(value, Iterator):
                value = list(value)  # so that what it takes is known
            self._spend(value)
            rest = args[first + 1 :]
            given = [*rest, *options.values()]
            if name not in _SHALLOW_FILTERS:
                self._charge_all((value, *given))
            if name == "join":
                _check_joined(value, str(given[0]) if given else "")
            self._check_arguments(name, value, given)
            return self._result(made(*args[:first], value, *rest, **options))

        return limited

    def _limited_test(self, name: str, made: Any) -> Callable[..., Any]:
        if name in _SHALLOW_TESTS:
            return made  # type: ignore[no-any-return]
        first = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def limited(*args: Any) -> Any:
            value, rest = args[first], args[first + 1 :]
            if name in _NUMBER_TESTS and isinstance(value, str):
                raise TemplateRuntimeError(f"{name} is a test of numbers, not of texts")
            if name == "in":
                return made(self._hashed(value), *map(self._searched, rest))
            return made(*args[:first], *map(self._compared, args[first:]))

        return limited

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`. An error names what is missing, whatever it is."""
        return super().getitem(obj, self._charge_parts(argument))

    def _hashed(self, value: Any) -> Any:
        """A key of a dict, or a value that may be one."""
        return self._charge_parts(value) if isinstance(value, tuple) else value

    def _searched(self, values: Any) -> Any:
        """The right side of `in`."""
        if isinstance(values, dict):
            self._take(1)
            return values
        return self._compared(values)

    def _compared(self, value: Any) -> Any:
        """A side of a comparison, an iterator as a list."""
        if isinstance(value, Iterator):
            value = self._result(list(value))
        if isinstance(value, str):
            self._spend(value)
        return self._charge_parts(value)

    def _charge_parts(self, value: Any) -> Any:
        """The value. Counts its measure if it has parts: before it is printed, compared or hashed."""
        if isinstance(value, _WITH_PARTS):
            chars, _ = self._measure(value)
            _check_size(chars)
            self._take(1 + chars // _CHARS_PER_OPERATION)
        return value

    def _charge_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._charge_parts(value)

    def _measure(self, value: object) -> tuple[int, int]:
        """At most how many characters the value prints, roughly, and its lists' depth. A rendering goes
        through each list and dict once, wherever it appears.
        """
        if isinstance(value, str):
            return _ITEM_CHARS + len(value), 0
        if isinstance(value, int):
            return _ITEM_CHARS + value.bit_length() // 3, 0
        if not isinstance(value, _WITH_PARTS):
            return _ITEM_CHARS, 0
        measures = self._count.measures
        if id(value) not in measures:
            self._take(1)
            parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            found = [self._measure(part) for part in parts]
            chars = _ITEM_CHARS + sum(chars for chars, _ in found)
            measures[id(value)] = value, chars, 1 + max((depth for _, depth in found), default=0)
        return measures[id(value)][1:]

    def _result(self, result: Any) -> Any:
        """The result of an operation, counted by its size."""
        _check_size(_length(result))
        self._spend(result)
        return result

    def _spend(self, value: object) -> None:
        """Count one operation on a value, more on a long one."""
        per_operation = _CHARS_PER_OPERATION if isinstance(value, str) else _ITEMS_PER_OPERATION
        self._take(1 + _length(value) // per_operation)

    def _take(self, num_operations: int) -> None:
        self._count.left -= num_operations
        if self._count.left < 0:
            raise TemplateLimitError("it takes too many operations for these messages")

    def _check_arguments(self, name: str, value: Any, given: list[Any]) -> None:
        """Raise for a filter or method whose result would be too large."""
        if name == "tojson":
            chars, depth = self._measure(value)
            _check_size(chars // _ITEM_CHARS * depth * sum(map(_width, given)))
        elif name in _SIZED:
            most = max(map(_width, given), default=0)
            _check_size((_length(value) + 1) * most if most > 1 else 0)
        elif name == "round" and max(map(_number, given), default=0) > _MAX_INTEGER_BITS // 4:
            raise TemplateLimitError("it rounds to thousands of digits")
        elif name in _FORMATS and isinstance(value, str):
            _check_format(value)
        elif name == "replace" and len(given) > 1 and isinstance(value, str):
            old, new = str(given[0]), str(given[1])
            _check_size(len(value) + value.count(old) * len(new))
        elif name == "sum" and any(isinstance(value, (list, tuple)) for value in given):
            raise TemplateLimitError("it adds lists by the filter sum")


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


def _width(value: object) -> int:
    """How far numbers or texts can widen what they are put into."""
    if isinstance(value, (list, tuple)):
        return sum(map(_width, value))
    return _number(value) or _length(value)
