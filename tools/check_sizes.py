"""Sizes and names that `make check` holds: files, functions, module READMEs, decisions.

    python tools/check_sizes.py [ROOT]

Prints the lengths of our functions and every breach; exits 1 where there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
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
    breaches += _single_importer_breaches(root, sources)
    _print_spread(sources, sorted(lengths.values()))
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
    """Each function with its length from `def` on, contracts left out."""
    for path in paths:
        if path.parent.name == "protocols":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                yield f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def _print_spread(sources: list[Path], lengths: list[int]) -> None:
    """Print figures without a limit.

    Limits on the size of pieces only make more pieces."""
    if lengths:
        files = sorted(map(_num_lines, sources))
        print(
            f"{len(files)} files, {sum(files)} lines: median {median(files):g}, p90 {_p90(files)}; "
            f"{len(lengths)} functions: median {median(lengths):g} lines, p90 {_p90(lengths)}, "
            f"longest {lengths[-1]}"
        )


def _p90(ordered: list[int]) -> int:
    return ordered[len(ordered) * 9 // 10]


def _single_importer_breaches(root: Path, sources: list[Path]) -> Iterator[str]:
    """Private modules that one other module imports, and that would fit into it."""
    imported_by: dict[Path, set[Path]] = defaultdict(set)
    names = {_module_name(root, path): path for path in sources}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    if name in names:
                        imported_by[names[name]].add(path)
    for path, importers in imported_by.items():
        if path.stem.startswith("_") and path.stem != "__init__" and len(importers) == 1:
            [importer] = importers
            if _num_lines(path) + _num_lines(importer) <= MAX_FILE_LINES:
                yield f"{path}: only {importer} imports it; it belongs there"


def _module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
