"""Checks documents: shown output, links, and what no file may contain.

    python tools/check_docs.py            compare
    python tools/check_docs.py --write    write the program's output into the documents

A document shows output in a fenced block under a line `<!-- output of: sagellm run --help -->`, figures in a
table under a line `<!-- table of: benchmarks/results/FILE.json -->`, and the keys of a section of the
configuration under a line `<!-- table of: keys of fleet -->`.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import config_table
import engines_table
import guests_table
from sagellm.core.ports import SagePorts

ROOT = Path(__file__).resolve().parent.parent
README = Path("README.md")
PORTS_FILE = Path("src/sagellm/core/ports.py")
SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "results", "third_party"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".cfg", ".txt", ".html", ".js", ".css", ""}

BLOCK = re.compile(
    r"(<!-- output of: (?P<command>[^\n]+?) -->\n+```\w*\n)(?P<shown>.*?)(?P<end>^```$)",
    re.DOTALL | re.MULTILINE,
)
TABLE = re.compile(r"(<!-- table of: (?P<file>[^\n]+?) -->\n+)(?P<shown>(?:^\|.*\n)*)", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
# Assembled from pieces, so that this file does not hold what it forbids.
FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w./])/(?:" + "work|home|root|Users" + r")/\w"),
    "a package registry": re.compile(
        "pypi" + r"\.org|files\.python" + r"hosted|download\.py" + r"torch\.org"
    ),
    "a port number": re.compile(r"(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1?\]):[1-9]\d{2,4}\b"),
}


def main(*, write: bool) -> int:
    breaches = [*_ports_in_code(), *_forbidden(), *_broken_links(), *_stale_outputs(write=write)]
    for breach in breaches:
        print(breach)
    return 1 if breaches else 0


def _files(*suffixes: str) -> Iterator[Path]:
    """Our text files, relative to the root; of hidden folders only `.ci`."""
    for folder, names, files in os.walk(ROOT):
        names[:] = sorted(
            n for n in names if n not in SKIPPED_FOLDERS and (not n.startswith(".") or n == ".ci")
        )
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix in (suffixes or TEXT_SUFFIXES) and name not in {"LICENSE", ".git"}:
                yield path.relative_to(ROOT)


def _text(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _ports_in_code() -> Iterator[str]:
    """Ports that are written as numbers outside the file that names them."""
    ports = {int(port): port.name for port in SagePorts}
    for path in _files(".py"):
        if path == PORTS_FILE or path.parts[0] != "src":
            continue
        for node in ast.walk(ast.parse(_text(path))):
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value in ports:
                yield f"{path}:{node.lineno}: {node.value} is SagePorts.{ports[node.value]}"


def _forbidden() -> Iterator[str]:
    for path in _files():
        text = BLOCK.sub("", _text(path)) if path.suffix == ".md" else _text(path)
        for what, pattern in FORBIDDEN.items():
            for found in pattern.finditer(text):
                if path == README and found.group() == f"localhost:{SagePorts.HTTP}":
                    continue  # what a client needs to know
                yield f"{path}: holds {what}: {found.group()}"


def _broken_links() -> Iterator[str]:
    for path in _files(".md"):
        for found in LINK.finditer(FENCED.sub("", _text(path))):
            target = found["target"].partition("#")[0]
            if target and "://" not in target and not (ROOT / path.parent / target).exists():
                yield f"{path}: links to {target}, which is not there"


def _stale_outputs(*, write: bool) -> Iterator[str]:
    for path in _files(".md"):
        text = _text(path)
        fresh = BLOCK.sub(lambda found: found[1] + _output_of(found["command"]) + found["end"], text)
        fresh = TABLE.sub(lambda found: found[1] + _table(found["file"]), fresh)
        if fresh == text:
            continue
        if write:
            (ROOT / path).write_text(fresh, encoding="utf-8")
        else:
            yield f"{path}: shows output that is not the program's any more; make docs writes it"


def _table(source: str) -> str:
    """Keys of the configuration, results of whole engines, or of policies inside other engines."""
    if source.startswith(config_table.PREFIX):
        return config_table.table(source.removeprefix(config_table.PREFIX))
    path = ROOT / source
    is_of_guests = '"host"' in path.read_text(encoding="utf-8")
    return guests_table.table(path) if is_of_guests else engines_table.table(path)


def _output_of(command: str) -> str:
    """What a command prints in a plain terminal of 100 columns, without local settings."""
    program, *arguments = shlex.split(command)
    if program != "sagellm":
        raise ValueError(f"only sagellm's own output can be shown, not {command!r}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SAGELLM_")}
    environment |= {"COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "sagellm", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


if __name__ == "__main__":
    sys.exit(main(write="--write" in sys.argv[1:]))
