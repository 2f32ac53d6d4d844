"""Sizes and names that `make check` holds: files, functions, module READMEs, decisions.

    python tools/check_sizes.py [ROOT]

Prints the lengths of our functions and every breach; exits 1 where there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 12
MAX_P90_LINES = 40
MAX_README_LINES = 60
MAX_DECISION_LINES = 40
DIRECTIONS = ("comm", "kvmgr", "accel")
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "misc"}
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|raise NotImplemented" + r"Error)\b")


def main(root: Path) -> int:
    sources = sorted((root / "src").rglob("*.py"))
    everywhere = [
        path
        for top in ("src", "tools", "tests", "examples", "benchmarks")
        for path in (root / top).rglob("*.py")
    ]
    breaches = [
        *_file_breaches(sources),
        *_name_breaches(everywhere),
        *_unfinished(everywhere),
        *_readme_breaches(root),
        *_decision_breaches(root),
    ]
    lengths = dict(_functions(sources))
    breaches += [
        f"{where}: {lines} lines, at most {MAX_FUNCTION_LINES}"
        for where, lines in lengths.items()
        if lines > MAX_FUNCTION_LINES
    ]
    breaches += _spread_breaches(list(lengths.values()))
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


def _file_breaches(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{path}: {lines} lines, at most {MAX_FILE_LINES}"


def _name_breaches(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        if VAGUE_NAMES & {path.stem, path.parent.name}:
            yield f"{path}: the name says nothing of what is in it"


def _unfinished(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = UNFINISHED.search(line)
            if found:
                yield f"{path}:{number}: {found.group()}"


def _readme_breaches(root: Path) -> Iterator[str]:
    for direction in DIRECTIONS:
        for init in sorted((root / "src" / "sagellm" / direction).glob("*/__init__.py")):
            readme = init.parent / "README.md"
            if not readme.exists():
                yield f"{init.parent}: no README.md"
            elif _num_lines(readme) > MAX_README_LINES:
                yield f"{readme}: {_num_lines(readme)} lines, at most {MAX_README_LINES}"


def _decision_breaches(root: Path) -> Iterator[str]:
    for path in sorted((root / "docs" / "decisions").glob("*.md")):
        if not re.fullmatch(r"\d{4}-[a-z0-9-]+", path.stem):
            yield f"{path}: a decision is named NNNN-title.md"
        if _num_lines(path) > MAX_DECISION_LINES:
            yield f"{path}: {_num_lines(path)} lines, at most {MAX_DECISION_LINES}"


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _functions(paths: list[Path]) -> Iterator[tuple[str, int]]:
    """Each function with its lines from `def` on, docstring included; contracts hold promises, not code."""
    for path in paths:
        if path.parent.name == "protocols":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                yield f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def _spread_breaches(lengths: list[int]) -> Iterator[str]:
    if not lengths:
        return
    ordered = sorted(lengths)
    middle, p90 = median(ordered), ordered[len(ordered) * 9 // 10]
    print(f"{len(ordered)} functions: median {middle:g} lines, 90 % at most {p90}, longest {ordered[-1]}")
    if middle >= MAX_MEDIAN_LINES:
        yield f"median function length {middle:g}, must be under {MAX_MEDIAN_LINES}"
    if p90 >= MAX_P90_LINES:
        yield f"90th percentile of function length {p90}, must be under {MAX_P90_LINES}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
