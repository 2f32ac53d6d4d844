"""Decisions of a scheduler as text, one line per step, and what is kept of vLLM's own.

A line names who computes, in order: `a` one token more, `b:17` so many, `c:30@64` so many from a position on
that does not follow from the step before. Then who is new, resumed, preempted and finished, who waits (where
that is not as in the line before, `-` for nobody), and how many blocks are free.

    python -m tests.peers.decisions PYTHON     keep what vLLM decides; PYTHON: its environment's interpreter
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.peers.workloads import SCRIPTED, Workload

Record = Mapping[str, Any]
"""`scheduled` holds [request, number of tokens, first position]; the others names; `free_blocks` a number."""

DRIVER = Path(__file__).parent / "vllm_driver.py"
GOLDEN = Path(__file__).parent.parent / "golden" / "vllm_decisions.json"
COMMAND = "python -m tests.peers.decisions PYTHON"


def lines(records: Sequence[Record]) -> list[str]:
    """Every decision is in the text: equal lines, equal decisions."""
    return list(_lines(records))


def _lines(records: Sequence[Record]) -> Iterator[str]:
    reached: dict[str, int] = {}
    waiting: list[str] = []
    for one in records:
        scheduled = []
        for name, count, start in one["scheduled"]:
            size = "" if count == 1 else f":{count}"
            scheduled.append(name + size + ("" if reached.get(name) == start else f"@{start}"))
            reached[name] = start + count
        parts = [" ".join(scheduled)]
        parts += [
            f"{key} {' '.join(one[key])}" for key in ("new", "resumed", "preempted", "finished") if one[key]
        ]
        if one["waiting"] != waiting:
            parts.append(f"waiting {' '.join(one['waiting']) or '-'}")
            waiting = one["waiting"]
        yield " | ".join([*parts, f"free {one['free_blocks']}"])


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> str | None:
    """The first step in which two texts differ; None if none does."""
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return f"step {number} of {len(theirs)}\n  ours:   {mine}\n  theirs: {other}"
    return None if len(ours) == len(theirs) else f"ours has {len(ours)} steps, theirs {len(theirs)}"


def digest(workload: Workload) -> str:
    return sha256(json.dumps(workload.as_json(), sort_keys=True).encode()).hexdigest()[:16]


def ask_vllm(python: str, workloads: Sequence[Workload]) -> tuple[str, list[list[str]]]:
    """The version of vLLM, and what its scheduler decides on each workload. `python`: the interpreter of its
    environment."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "workloads.json"), Path(folder, "decisions.json")
        source.write_text(json.dumps([one.as_json() for one in workloads]))
        done = subprocess.run([python, DRIVER, source, target], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the driver failed in {python}:\n{done.stderr[-2000:]}")
        answer = json.loads(target.read_text())
    return answer["version"], [lines(one) for one in answer["runs"]]


def kept() -> dict[str, Any]:
    """`version` of the peer, and by name of the workload its `digest` and `steps`."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def keep(python: str) -> None:
    workloads = [make() for make in SCRIPTED]
    version, runs = ask_vllm(python, workloads)
    steps = {
        one.name: {"digest": digest(one), "steps": run} for one, run in zip(workloads, runs, strict=True)
    }
    GOLDEN.write_text(json.dumps({"version": version, "workloads": steps}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    keep(*sys.argv[1:])
