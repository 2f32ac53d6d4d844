"""Checks plain English and names, in code and documents.

    python tools/check_words.py [PATH ...]     default: src, tools, examples, benchmarks, docs, README.md

The terms are in docs/glossary.md. Prints every breach as `file:line: what`, and exits 1 if there is any:

* words for persons ("who", "nobody", ...) where the subject is a request, a block or a thread;
* a first docstring sentence of 15 words or more;
* a variable named after nothing in particular (`one`, `out`, `news`, `here`);
* `-(-a // b)`, which is `cdiv(a, b)`;
* a public class of `src` whose name another one has.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOTS = ("src", "tools", "examples", "benchmarks", "docs", "README.md", "CONTRIBUTING.md")
EXCLUDED = {"check_words.py", "demo.py", "demo_data.py", "demo_words.py"}
"""This file, which holds the words, and the texts that the demo model learns: they speak of people."""
MAX_FIRST_SENTENCE = 14
VAGUE_VARIABLES = {"one", "ones", "out", "news", "here"}
PEOPLE = (
    "authors? clients? contributors? customers? developers? engineers? maintainers? operators? people "
    "persons? readers? researchers? reviewers? teams? those users? anyone"
).replace(" ", "|")
"""After these nouns "who" is right: a client or a tenant is a person or speaks for one."""
PERSON_WORDS = re.compile(
    r"\b(?:whom|whoever|nobody|somebody|everybody|anybody|no one)\b"
    rf"|\b(?!(?:{PEOPLE})\b)\w+[^\w\s]*\s+(?P<who>who)\b"
    r"|(?:^|[^\w\s]\s*)who\b",
    re.IGNORECASE,
)
CEILING = re.compile(r"-\(-")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
SENTENCE_END = re.compile(r"\.(?=\s|$)|\n\s*\n")


def main(paths: Iterable[Path]) -> int:
    breaches: list[str] = []
    classes: dict[str, list[str]] = defaultdict(list)
    for path in _files(paths):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            breaches += _persons(path, [(1, FENCED.sub(_blank_lines, text))])
            continue
        tree = ast.parse(text)
        breaches += _persons(path, _texts(text))
        breaches += _long_sentences(path, tree)
        breaches += _vague_variables(path, tree)
        breaches += [
            f"{path}:{number}: write cdiv(a, b)"
            for number, line in enumerate(text.splitlines(), 1)
            if CEILING.search(line) and path.name != "blocks.py"
        ]
        if "src" in path.parts:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].append(f"{path}:{node.lineno}")
    breaches += [
        f"{places[0]}: public class {name} exists again at {', '.join(places[1:])}"
        for name, places in classes.items()
        if len(places) > 1
    ]
    print(*breaches, sep="\n", end="\n" if breaches else "")
    print(f"{len(breaches)} breaches of words and names")
    return 1 if breaches else 0


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in found if file.suffix in {".py", ".md"} and file.name not in EXCLUDED)


def _blank_lines(fenced: re.Match[str]) -> str:
    return "\n" * fenced.group().count("\n")


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments and strings, docstrings among them, with their first lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def _persons(path: Path, texts: Iterable[tuple[int, str]]) -> Iterator[str]:
    for first_line, text in texts:
        for found in PERSON_WORDS.finditer(text):
            line = first_line + text.count("\n", 0, found.end() - 1)
            words = " ".join(found.group().split())
            yield f"{path}:{line}: {words!r} is for people: name the request, block or thread"


def _long_sentences(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        num_words = len(SENTENCE_END.split(docstring, maxsplit=1)[0].split())
        if num_words > MAX_FIRST_SENTENCE:
            line = getattr(node, "lineno", 1)
            most = MAX_FIRST_SENTENCE
            yield f"{path}:{line}: first docstring sentence has {num_words} words, at most {most}"


def _vague_variables(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if isinstance(node, ast.Name) and stored else getattr(node, "arg", None)
        if isinstance(node, (ast.Name, ast.arg)) and name in VAGUE_VARIABLES:
            yield f"{path}:{node.lineno}: a variable named {name!r} does not say what it holds"


if __name__ == "__main__":
    chosen = [Path(name) for name in sys.argv[1:] or ROOTS]
    sys.exit(main(chosen))
