"""Mutation tests of the KV books and the step: do the tests notice when one operator is wrong?

    python tools/mutants.py [--count 200] [--seed 0] [--only PART] [--jobs 1] [--verbose]

Takes a seeded sample of small changes (another comparison, another sign, another boolean, a call left out) to
the prefix indexes, pools, quota, KV manager, batch, planner, commit and `adaptive`. For each it runs the
tests of these on a changed copy of `src` until one fails, the nearest first. Prints the mutants that no test
noticed. Those that cannot be noticed are in `tests/equivalent_mutants.txt` with the reason, and are not run.
Exits 1 where fewer than 90 % are killed, or where a survivor is not listed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "sagellm"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
MODULES = (
    *(
        f"kvmgr/prefix_cache/{name}.py"
        for name in ("radix", "_tree", "_node", "_leaves", "hashed", "_records")
    ),
    *(f"kvmgr/kv_pool/{name}.py" for name in ("_ledger", "free_list", "buddy", "quota")),
    *sorted(str(path.relative_to(PACKAGE)) for path in (PACKAGE / "kvmgr" / "manager").glob("*.py")),
    "kvmgr/scheduler_ir/batch.py",
    "kvmgr/eviction/adaptive.py",
    "engines/_planner.py",
    "engines/_commit.py",
)
NEAREST: Mapping[str, tuple[str, ...]] = {
    "kvmgr/prefix_cache": ("contracts/test_prefix_index.py", "kvmgr/test_radix.py", "kvmgr/test_hashed.py"),
    "kvmgr/kv_pool": ("contracts/test_kv_pool.py", "kvmgr/test_quota.py", "engines/test_engine_fuzz.py"),
    "kvmgr/manager": ("kvmgr/test_manager.py", "kvmgr/test_books.py", "engines/test_engine_fuzz.py"),
    "kvmgr/scheduler_ir": (
        "kvmgr/scheduler_ir/test_batch.py",
        "engines/test_engine.py",
        "benchmarks/simulate/test_leaps.py",
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
SECONDS_PER_TEST = 120
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""What an operator is replaced with."""


@dataclass(frozen=True)
class Mutant:
    """One change: in `path`, in the function `where`, the code `before` is `after`; `source` is the file with
    it. `number` tells equal changes of one function apart."""

    path: str
    where: str
    before: str
    after: str
    number: int
    line: int
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
    for where, node, field, index in _sites(tree):
        before = ast.unparse(node)
        held = copy.copy(getattr(node, field))
        line = getattr(node, "lineno", 0)
        _change(node, field, index)
        after = ast.unparse(node)
        source = ast.unparse(tree)
        setattr(node, field, held)
        key = (where, before, after)
        number = seen[key] = seen.get(key, -1) + 1
        yield Mutant(path, where, before.partition("\n")[0], after.partition("\n")[0], number, line, source)


def _sites(tree: ast.Module) -> Iterator[tuple[str, ast.AST, str, int]]:
    """Each place that can be changed: its function, the node, the field of the node, the index in that."""
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        where, node = stack.pop()
        inside = where
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = f"{where}.{node.name}".lstrip(".")
        stack += [(inside, child) for child in reversed(list(ast.iter_child_nodes(node)))]
        if not inside:
            continue
        match node:
            case ast.Compare(ops=ops):
                yield from ((inside, node, "ops", i) for i, op in enumerate(ops) if type(op) in OTHER)
            case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
                yield inside, node, "op", 0
            case ast.UnaryOp(op=ast.Not()):
                yield inside, node, "operand", 0
            case ast.UnaryOp(op=ast.USub()):
                yield inside, node, "op", 0
            case ast.Constant(value=bool()):
                yield inside, node, "value", 0
            case ast.Expr(value=ast.Call()):
                yield inside, node, "value", 0


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
    """`count` of the mutants of all modules whose path contains `only`, chosen by seed and name."""
    every = [one for path in MODULES if only in path for one in mutants(path)]
    return sorted(every, key=lambda one: one.rank(seed))[:count]


def is_killed(mutant: Mutant, *, verbose: bool) -> bool:
    """Whether a test fails on the changed source."""
    with tempfile.TemporaryDirectory(prefix="sagellm-mutant-") as folder:
        package = Path(folder, "sagellm")
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        (package / mutant.path).write_text(mutant.source, encoding="utf-8")
        near = next(tests for prefix, tests in NEAREST.items() if mutant.path.startswith(prefix))
        return any(not passes(Path(folder), tests, verbose=verbose) for tests in (near, ALL))


def passes(source: Path, tests: Sequence[str], *, verbose: bool) -> bool:
    """Whether these tests pass on the package in the folder `source`."""
    markers = "not gpu and not slow and not peer and not traces"
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    options += [f"--timeout={SECONDS_PER_TEST}", "--timeout-method=thread"]  # a hang ends the process
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", markers, *(f"tests/{one}" for one in tests)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(source),
            "HYPOTHESIS_PROFILE": "mutants",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if verbose:
        print("\n".join(line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))
    if run.returncode not in (0, 1, 2):  # 2: a module that cannot be imported
        raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    return run.returncode == 0


def equivalent() -> dict[str, str]:
    """Names of mutants that no test can notice, with the reason."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    listed = (line.partition("  # ") for line in lines if line and not line.startswith("#"))
    return {name.strip(): reason for name, _, reason in listed}


def main() -> int:
    parser = argparse.ArgumentParser(description="Do the tests notice when one operator is wrong?")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="say which test noticed")
    options = parser.parse_args()
    chosen, known = sample(options.count, options.seed, options.only), equivalent()
    if not passes(ROOT / "src", ALL, verbose=True):
        print("the tests fail on the source as it is", file=sys.stderr)
        return 2
    tried = [one for one in chosen if one.name not in known]
    print(f"{len(chosen)} mutants, {len(chosen) - len(tried)} of them listed as equivalent", flush=True)
    killed = 0
    with ThreadPoolExecutor(options.jobs) as workers:
        outcomes = workers.map(lambda one: is_killed(one, verbose=options.verbose), tried)
        for number, (mutant, is_noticed) in enumerate(zip(tried, outcomes, strict=True), 1):
            killed += is_noticed
            if options.verbose or not is_noticed:
                fate = "killed" if is_noticed else "SURVIVES"
                print(f"{number:4} {fate} line {mutant.line} {mutant.name}", flush=True)
    print(f"{killed} of {len(tried)} killed ({killed / max(1, len(tried)):.1%})")
    return 0 if killed >= NEEDED * len(tried) and killed == len(tried) else 1


if __name__ == "__main__":
    sys.exit(main())
