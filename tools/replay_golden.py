"""Hit blocks of every policy and of the optimum on the kept traces.

python tools/replay_golden.py             print, and say what differs from what is kept python
tools/replay_golden.py --write     keep: after a policy was added, or meant to choose otherwise
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.sweep import OPTIMUM, ReplaySweepPlan, run_sweep
from sagellm.benchmarks.traces import read_trace
from sagellm.core.registry import registry

FOLDER = Path(__file__).parent.parent / "tests" / "golden"
GOLDEN = FOLDER / "replay_hits.json"
COMMAND = "python tools/replay_golden.py --write"
TRACES = ("agents", "chat", "tenants")
CAPACITIES = ("2%", "10%", "30%")

Hits = dict[str, dict[str, dict[str, int]]]
"""By policy, trace and capacity."""


def policies() -> list[str]:
    """Those of the package, and the bound."""
    return [*registry("policy").own_names(), OPTIMUM]


def load(trace: str) -> BlockTrace:
    return block_trace(read_trace(FOLDER / "traces" / f"{trace}.jsonl"))


def hits(policy: str, trace: BlockTrace) -> dict[str, int]:
    """By capacity."""
    results = run_sweep(trace, ReplaySweepPlan((policy,), CAPACITIES))
    return {result.case.capacity.text: result.measures.hit_blocks for result in results}


def kept() -> Hits:
    found: Hits = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    return found


def main(*, write: bool) -> int:
    traces = {name: load(name) for name in TRACES}
    found = {policy: {name: hits(policy, trace) for name, trace in traces.items()} for policy in policies()}
    if write:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    print(json.dumps(found, indent=1))
    before = kept()
    different = [policy for policy in found | before if found.get(policy) != before.get(policy)]
    print(f"different from {GOLDEN.name}: {', '.join(different) or 'none'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(write="--write" in sys.argv[1:]))
