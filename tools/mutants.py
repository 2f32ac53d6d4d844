"""Mutation tests of KV management and the step. Do the tests notice when one operator is wrong?

    python tools/mutants.py [--count 200] [--seed 0] [--only PART] [--jobs 1] [--verbose]

Takes a seeded sample of small changes (another comparison, another sign, another boolean, a call left out) to
the prefix indexes, pools, quota, KV manager, batch, planner, commit and `adaptive`, and prints those that no
test notices. Changes that no test can notice are in `tests/equivalent_mutants.txt` with the reason, and are
not run. Exits 1 where fewer than 90 % are killed, or where a survivor is not listed; 2 where a test fails on
the source as it is.

First runs all tests of these modules once on the source as it is, and notes which statements each executes. A
test that does not execute the changed statement cannot notice the change, so a mutant is tried only on those
that do: first those of the nearest files, quick ones first. A test kills a mutant only if it and those before
it, in the same order and under the same limits of time and memory, pass on the source as it is.

`build/mutants` keeps what was noted and which mutants were killed, until a file of `src` or `tests` changes,
so that a run that was interrupted goes on. The test that killed a mutant on an earlier tree is tried first.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "sagellm"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
STATE = ROOT / "build" / "mutants"
MODULES = (
    *(f"kvmgr/prefix_cache/{name}.py" for name in ("radix", "_tree", "_index_base", "_extents", "hashed")),
    *(f"kvmgr/kv_pool/{name}.py" for name in ("pool_base", "free_list", "buddy", "quota")),
    *sorted(str(path.relative_to(PACKAGE)) for path in (PACKAGE / "kvmgr" / "manager").glob("*.py")),
    "kvmgr/scheduler_ir/batch.py",
    "kvmgr/eviction/adaptive/policy.py",
    "engines/planner.py",
    "engines/commit.py",
)
NEAREST: Mapping[str, tuple[str, ...]] = {
    "kvmgr/prefix_cache": ("contracts/test_prefix_index.py", "kvmgr/test_radix.py", "kvmgr/test_hashed.py"),
    "kvmgr/kv_pool": ("contracts/test_kv_pool.py", "kvmgr/test_quota.py", "engines/test_engine_fuzz.py"),
    "kvmgr/manager": ("kvmgr/test_manager.py", "kvmgr/test_books.py", "engines/test_engine_fuzz.py"),
    "kvmgr/scheduler_ir": (
        "kvmgr/scheduler_ir/test_batch.py",
        "engines/test_engine.py",
        "benchmarks/simulate/test_fast_forward.py",
    ),
    "kvmgr/eviction": ("kvmgr/test_eviction_adaptive.py",),
    "engines": ("engines/test_engine.py", "engines/test_engine_fuzz.py", "engines/test_overlap.py"),
}
"""By the beginning of a module's path: the tests that notice most of its mutants."""
ELSEWHERE = ("lifetime", "learned", "predictive", "llm", "graph", "text", "calibrate", "devices", "outputs")
"""Tests that say nothing of these modules, and take their time."""
ALL = tuple(
    str(path.relative_to(ROOT / "tests"))
    for folder in (
        "contracts",
        "kvmgr",
        "kvmgr/scheduler_ir",
        "engines",
        "engines/simulator",
        "benchmarks/simulate",
    )
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
    if not any(word in path.name for word in ELSEWHERE)
)
NEEDED = 0.9
PASSED = re.compile(" (PASSED|SKIPPED|XFAIL)")
SECONDS_PER_TEST = 300
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""What an operator is replaced with."""


@dataclass(frozen=True)
class Mutant:
    """One change: in function `where` of `path`, the code `before` becomes `after`. `source` is the changed
    file. `number` tells equal changes of one function apart; `statement` is the line of the statement that is
    executed whenever the changed code is, 0 for code of a class body."""

    path: str
    where: str
    before: str
    after: str
    number: int
    line: int
    statement: int
    source: str

    @property
    def name(self) -> str:
        """Stays the same while the function does: what `tests/equivalent_mutants.txt` lists."""
        again = f" #{self.number}" if self.number else ""
        return f"{self.path}::{self.where}: {self.before} -> {self.after}{again}"

    def rank(self, seed: int) -> bytes:
        """Its place in the sample: other mutants do not change it."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).digest()


def mutants(path: str) -> Iterator[Mutant]:
    """Every mutant of a module, in order of the source."""
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    seen: dict[tuple[str, str, str], int] = {}
    for where, statement, node, field, index in _sites(tree):
        before = ast.unparse(node)
        held = getattr(node, field)
        line = getattr(node, "lineno", 0)
        _change(node, field, index)
        after = ast.unparse(node)
        source = ast.unparse(tree)
        setattr(node, field, held)
        key = (where, before, after)
        number = seen[key] = seen.get(key, -1) + 1
        before, after = before.partition("\n")[0], after.partition("\n")[0]
        yield Mutant(path, where, before, after, number, line, statement, source)


def _sites(tree: ast.Module) -> Iterator[tuple[str, int, ast.AST, str, int]]:
    """Each place that can be changed. A place is its function, the line of its statement, the node, the field
    of the node and the index in that field."""
    stack: list[tuple[str, int, ast.AST]] = [("", 0, tree)]
    while stack:
        where, line, node = stack.pop()
        inside = where
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = f"{where}.{node.name}".lstrip(".")
            line = _first_line(node) if isinstance(node, ast.FunctionDef) else 0
        elif isinstance(node, ast.stmt) and line:
            line = node.lineno
        stack += [(inside, line, child) for child in reversed(list(ast.iter_child_nodes(node)))]
        if not inside:
            continue
        match node:
            case ast.Compare(ops=ops):
                yield from ((inside, line, node, "ops", i) for i, op in enumerate(ops) if type(op) in OTHER)
            case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
                yield inside, line, node, "op", 0
            case ast.UnaryOp(op=ast.Not()):
                yield inside, line, node, "operand", 0
            case ast.UnaryOp(op=ast.USub()):
                yield inside, line, node, "op", 0
            case ast.Constant(value=bool()):
                yield inside, line, node, "value", 0
            case ast.Expr(value=ast.Call()):
                yield inside, line, node, "value", 0


def _first_line(function: ast.FunctionDef) -> int:
    """The line of the first statement behind the docstring, 0 if there is none."""
    return next((statement.lineno for statement in function.body if not _is_text(statement)), 0)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _change(node: ast.AST, field: str, index: int) -> None:
    """Change one operator, constant or call in place."""
    held = getattr(node, field)
    changed: object
    if field == "ops":
        changed = [*held[:index], OTHER[type(held[index])](), *held[index + 1 :]]
    elif field == "operand":
        changed = ast.UnaryOp(ast.Not(), held)
    elif isinstance(held, ast.USub):
        changed = ast.UAdd()
    elif field == "op":
        changed = OTHER[type(held)]()
    elif isinstance(node, ast.Constant):
        changed = not held
    else:
        changed = ast.Constant(value=...)
    setattr(node, field, changed)


def sample(count: int, seed: int, only: str) -> list[Mutant]:
    """`count` of all mutants whose name contains `only`, chosen by seed and name."""
    every = (mutant for path in MODULES for mutant in mutants(path))
    return sorted((mutant for mutant in every if only in mutant.name), key=lambda mutant: mutant.rank(seed))[
        :count
    ]


def with_marks(path: str) -> str:
    """Adds marks to the source of a module. Each statement of a function first notes path and line in
    `EXECUTED` of `mutants_plugin`."""
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for node in {id(node): node for function in functions for node in ast.walk(function)}.values():
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [each for statement in statements for each in _marked(path, statement)])
    future = max(i for i, node in enumerate(tree.body) if _is_text(node) or isinstance(node, ast.ImportFrom))
    tree.body.insert(future + 1, ast.parse("from mutants_plugin import EXECUTED as _executed").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _marked(path: str, statement: ast.stmt) -> list[ast.stmt]:
    if _is_text(statement):
        return [statement]
    return [*ast.parse(f"_executed.add({f'{path}:{statement.lineno}'!r})").body, statement]


@dataclass(frozen=True)
class Test:
    """What a test of the unchanged source took and executed (`path:line` of statements)."""

    seconds: float
    executed: frozenset[str]


def measure(report: Path) -> None:
    """Runs all tests on the unchanged source. Writes a line for each to `report`. Exits where one fails."""
    unfinished = report.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="sagellm-mutant-") as folder:
        package = _copy(Path(folder))
        for path in MODULES:
            (package / path).write_text(with_marks(path), encoding="utf-8")
        tests = [f"tests/{folder}" for folder in ALL]
        failed = first_failure(Path(folder), tests, SECONDS_PER_TEST, {"MUTANTS_REPORT": str(unfinished)})
    if failed:
        _refuse(failed)
    unfinished.replace(report)


def _refuse(failed: str) -> NoReturn:
    print(f"fails on the source as it is: {failed}", file=sys.stderr)
    os._exit(2)  # other mutants are being tried in threads


def read_report(report: Path) -> dict[str, Test]:
    lines = (json.loads(line) for line in report.read_text(encoding="utf-8").splitlines())
    return {line["test"]: Test(line["seconds"], frozenset(line["executed"])) for line in lines}


def killer(mutant: Mutant, measured: Mapping[str, Test], former: str) -> str:
    """The first test that fails on the changed source; empty if there is none. `former` killed it before."""
    near = next(files for prefix, files in NEAREST.items() if mutant.path.startswith(prefix))
    tests = sorted(_reaching(mutant, measured), key=lambda test: measured[test].seconds)
    nearest = tuple(test for test in tests if test.removeprefix("tests/").partition("::")[0] in near)
    others = tuple(test for test in tests if test not in set(nearest))
    with tempfile.TemporaryDirectory(prefix="sagellm-mutant-") as folder:
        package = _copy(Path(folder))
        (package / mutant.path).write_text(mutant.source, encoding="utf-8")
        for some in (((former,) if former in measured else ()), nearest, others):
            limit_s = 20 + 10 * max((measured[test].seconds for test in some), default=0.0)
            failed = first_failure(Path(folder), some, limit_s) if some else ""
            if failed:
                begun = some[: some.index(failed) + 1] if failed in some else some
                _must_pass(begun, limit_s)
                return failed
    return ""


def _reaching(mutant: Mutant, measured: Mapping[str, Test]) -> list[str]:
    """Tests that execute the statement. For code of a class body, all tests of the module."""
    place = f"{mutant.path}:{mutant.statement or ''}"
    if mutant.statement:
        return [name for name, test in measured.items() if place in test.executed]
    return [name for name, test in measured.items() if any(line.startswith(place) for line in test.executed)]


@cache
def _must_pass(tests: tuple[str, ...], limit_s: float) -> None:
    if failed := first_failure(ROOT / "src", tests, limit_s):
        _refuse(failed)


def _copy(folder: Path) -> Path:
    package = folder / "sagellm"
    return Path(shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__")))


def first_failure(
    source: Path, tests: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """The first of these tests that fails on the package in the folder `source`. Empty if all pass."""
    options = ["-x", "-v", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "mutants_plugin"]
    options += [f"--timeout={limit_s:.0f}", "--timeout-method=thread"]  # a hang ends the process
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as listed:
        listed.write("\n".join(tests))
        listed.flush()
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"@{listed.name}"],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(source), str(ROOT / "tools"))),
                "HYPOTHESIS_PROFILE": "mutants",
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode == 0:
        return ""
    begun = [line for line in run.stdout.splitlines() if line.startswith("tests/")]
    failed = next((line for line in begun if not PASSED.search(line)), "")
    return (
        re.split(r" (?:FAILED|ERROR|\+{3})", failed)[0].strip()
        or f"pytest ended with {run.returncode}: {run.stdout[-300:]}"
    )


def tree_digest() -> str:
    """Changes with each file that can change an outcome."""
    digest = hashlib.sha256()
    files = [path for top in ("src", "tests") for path in (ROOT / top).rglob("*.py")]
    for path in sorted([*files, *(ROOT / "tools").glob("mutants*.py")]):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def equivalent() -> dict[str, str]:
    """Names of mutants that no test can notice, with the reason."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    listed = (line.partition("  # ") for line in lines if line and not line.startswith("#"))
    return {name.strip(): reason for name, _, reason in listed}


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the tests notice when one operator is wrong?")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="say which test noticed")
    options = parser.parse_args()
    state = STATE / tree_digest()
    state.mkdir(parents=True, exist_ok=True)
    report, outcomes = state / "executed.jsonl", state / "outcomes.jsonl"
    if not report.exists():
        measure(report)
    measured = read_report(report)
    chosen, known = sample(options.count, options.seed, options.only), equivalent()
    tried = [mutant for mutant in chosen if mutant.name not in known]
    print(f"{len(chosen)} mutants, {len(chosen) - len(tried)} of them listed as equivalent", flush=True)
    killers = read_outcomes(outcomes)
    former: dict[str, str] = {}
    for path in STATE.glob("*/outcomes.jsonl"):
        former |= {name: by for name, by in read_outcomes(path).items() if by}

    def outcome(mutant: Mutant) -> str:
        if mutant.name not in killers:
            killers[mutant.name] = killer(mutant, measured, former.get(mutant.name, ""))
            with outcomes.open("a", encoding="utf-8") as file:
                file.write(json.dumps([mutant.name, killers[mutant.name]]) + "\n")
        return killers[mutant.name]

    with ThreadPoolExecutor(options.jobs) as workers:
        for number, (mutant, by) in enumerate(zip(tried, workers.map(outcome, tried), strict=True), 1):
            if options.verbose or not by:
                print(f"{number:4} {by or 'SURVIVES'}: line {mutant.line} {mutant.name}", flush=True)
    killed = sum(killers[mutant.name] != "" for mutant in tried)
    print(f"{killed} of {len(tried)} killed ({killed / max(1, len(tried)):.1%})")
    return 0 if killed >= NEEDED * len(tried) and killed == len(tried) else 1


def read_outcomes(path: Path) -> dict[str, str]:
    """Outcomes of mutants already tried on this tree, by name. The value is the test that noticed the mutant,
    or empty."""
    return (
        dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        if path.exists()
        else {}
    )


if __name__ == "__main__":
    sys.exit(main())
