"""No regular expression of ours takes more than linear time, whatever it is given.

Every pattern in `src` is found in the source and tried, the way its file uses it, on texts made of its own
characters. A pattern that is not written out as one literal is listed here with the reason why it is safe.
"""

from __future__ import annotations

import ast
import itertools
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from sagellm.core.config import ORIGIN

SRC = Path(__file__).parents[1] / "src" / "sagellm"
METHODS = {"match", "fullmatch", "search", "findall", "finditer", "sub", "subn", "split"}
COMPUTED = {
    "engines/native/control_tokens.py": "a trie of the special tokens: no repetition, each start ends at the "
    "first character that no token has there",
    "core/config.py": "ORIGIN, below, in pydantic's engine",
    "core/fleet_config.py": "ADDRESS and URL, in the same engine",
    "engines/chips.py": "a table of device names, each with one repetition at most",
}
"""Files with a pattern that is no literal."""
BY_HELPER = {"kvmgr/scheduler_ir/text.py": {"match"}}
"""Methods called on a pattern that a function gets as its argument."""
MODULE = re.compile(r"\b(re|regex)\b")
"""A file without this word uses no regular expression."""
SMALL, LARGE = 2**9, 2**12
FIXED = (" ", "\n", "\0", "a", "0", '"', "\\")

Use = tuple[str, int, str]
"""A pattern, its flags and the method it is used with."""


def calls_of_re(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Calls `re.FUNCTION(...)` with their function."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=function)):
                yield node, function


def flags_of(call: ast.Call) -> int:
    names = [node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute) and node.attr.isupper()]
    return sum(int(getattr(re, name)) for name in names)


def uses_of(name: str, tree: ast.AST) -> set[str]:
    """Methods of a compiled pattern that the file mentions: `NAME.search(...)`, `map(NAME.search, ...)`."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in METHODS)
    return {node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == name}


@cache
def patterns_of(path: Path) -> tuple[list[Use], int]:
    """The literal patterns of a file with their uses, and how many are no literals."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    key = path.relative_to(SRC).as_posix()
    compiled = {
        id(node.value): node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found: list[Use] = []
    num_computed = 0
    for call, function in calls_of_re(tree):
        if function not in METHODS | {"compile"}:
            continue
        pattern = ast.literal_eval(call.args[0]) if isinstance(call.args[0], ast.Constant) else None
        if not isinstance(pattern, str):
            num_computed += 1
            continue
        methods = {function}
        if function == "compile":
            methods = uses_of(compiled.get(id(call), ""), tree) or BY_HELPER.get(key, set())
            assert methods, f"{key}:{call.lineno}: the use of this pattern is not found: see BY_HELPER"
        found += [(pattern, flags_of(call), method) for method in sorted(methods)]
    return found, num_computed


def all_files() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if MODULE.search(path.read_text(encoding="utf-8")))


def all_uses() -> list[Any]:
    return [
        pytest.param(*use, id=f"{path.name}-{use[2]}-{use[0][:40]!a}")
        for path in all_files()
        for use in patterns_of(path)[0]
    ]


def attacks(pattern: str, size: int) -> Iterator[str]:
    """Repetitions of two of the pattern's characters, alone, after one more, and before an end that fails."""
    letters = sorted({*FIXED, *(char for char in pattern if not char.isalnum())})
    for first, second in itertools.product(letters, repeat=2):
        yield (first + second) * (size // 2)
        yield first + second * size + "\0"
    for word in re.findall(r"\w{2,}", pattern):
        yield word * (size // len(word))
        yield word + " " * size + "\0"


def seconds(run: Callable[[str], object], text: str) -> float:
    began = time.thread_time()
    run(text)
    return time.thread_time() - began


def runner(pattern: str, flags: int, method: str) -> Callable[[str], object]:
    compiled = re.compile(pattern, flags)
    match method:
        case "sub" | "subn":
            return lambda text: compiled.sub("", text)
        case "finditer":
            return compiled.findall
        case _:
            return lambda text: getattr(compiled, method)(text)


def slow_texts(run: Callable[[str], object], pattern: str) -> Iterator[str]:
    """The texts that take far more than eight times as long when they are eight times as long."""
    for small, large in zip(attacks(pattern, SMALL), attacks(pattern, LARGE), strict=True):
        first = max(seconds(run, small), 2e-5)
        if seconds(run, large) > 24 * first:  # noise, or not linear: look closer
            best = max(min(seconds(run, small) for _ in range(5)), 2e-5)
            if min(seconds(run, large) for _ in range(3)) > 24 * best:
                yield large[:20]


@pytest.mark.parametrize(("pattern", "flags", "method"), all_uses())
def test_a_pattern_takes_linear_time(pattern: str, flags: int, method: str) -> None:
    assert not list(slow_texts(runner(pattern, flags, method), pattern))


def test_computed_patterns_are_listed() -> None:
    computed = {path.relative_to(SRC).as_posix() for path in all_files() if patterns_of(path)[1]}
    assert computed <= set(COMPUTED)


def test_the_attacks_find_what_is_quadratic() -> None:
    """Among them the pattern by which the server once counted the values of a body."""
    for pattern in (r'"[^"\\]*(?:\\.[^"\\]*)*"', r"\s+$", r"[ \t]+c", r"(a+)0(a+)"):
        assert any(slow_texts(re.compile(pattern, re.DOTALL).findall, pattern)), pattern


def test_patterns_of_pydantic_run_in_its_linear_engine() -> None:
    sources = [path.read_text(encoding="utf-8") for path in SRC.rglob("*.py")]
    assert not [source for source in sources if "python-re" in source or "regex_engine" in source]
    adapter = TypeAdapter(Annotated[str, Field(pattern=ORIGIN)])

    def validate(text: str) -> None:
        with pytest.raises(ValidationError):
            adapter.validate_python(text)

    assert not list(slow_texts(validate, ORIGIN))


def test_no_other_engine_of_regular_expressions_is_used() -> None:
    for path in all_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert "regex" not in names, path
            assert module not in ("re", "regex"), f"{path}: `import re`, so that this file finds the patterns"
