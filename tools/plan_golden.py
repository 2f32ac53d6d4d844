"""The plans of a few small scenarios, as text.

python tools/plan_golden.py             print, and say what differs from what is kept
python tools/plan_golden.py --write     keep: after a pass was meant to decide otherwise
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagellm.cli.explain import parse_request, run_scenario
from sagellm.engines.build import load_config
from sagellm.kvmgr.scheduler_ir.explain import ScheduleLog
from sagellm.kvmgr.scheduler_ir.text import print_plan

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "plans"
COMMAND = "python tools/plan_golden.py --write"
CLOSING = ("chunked_prefill", "memory_aware_preemption")
CACHE_AWARE = ("prefix_cache_aware", *CLOSING)
STEP_S = 0.05


@dataclass(frozen=True)
class Scene:
    """Requests in the form of `sagellm explain`, with named passes. So no default changes them."""

    requests: Sequence[str]
    passes: tuple[str, ...]
    num_blocks: int
    max_batched_tokens: int = 16
    block_size: int = 4


SCENES: Mapping[str, Scene] = {
    "chunked_prefill_and_decode": Scene(("a=9+6", "b=30+3,at=1", "c=5+2,at=2"), CLOSING, 32),
    "preemption_and_resume": Scene(("a=7+9", "b=7+9"), CLOSING, 6),
    "shared_prefix": Scene(
        ("a=14+6,prefix=system:8", "b=13+3,at=1,prefix=system:8", "c=9+2,at=2"), CACHE_AWARE, 32
    ),
    "priorities": Scene(("a=12+4", "b=12+4", "c=12+2,at=1,priority=1"), ("priority_based", *CLOSING), 32, 8),
    "waits_for_memory": Scene(("a=7+30", "b=6+2,at=1"), CLOSING, 4),
}


def run(scene: Scene) -> ScheduleLog:
    given = {
        "scheduler.passes": scene.passes,
        "scheduler.max_num_seqs": 4,
        "scheduler.max_batched_tokens": scene.max_batched_tokens,
        "kv.num_blocks": scene.num_blocks,
        "kv.block_size": scene.block_size,
    }
    config = load_config(cli=given, environ={}).config
    return run_scenario(config, [parse_request(text) for text in scene.requests], STEP_S)


def text(scene: Scene) -> str:
    """Every step's plan, complete."""
    requests = f"# sagellm explain {' '.join(scene.requests)}\n"
    return "\n".join([requests, *(print_plan(step.plan, step.before) for step in run(scene).steps)])


def kept(name: str) -> str:
    path = FOLDER / f"{name}.txt"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(*, write: bool) -> int:
    found = {name: text(scene) for name, scene in SCENES.items()}
    if write:
        FOLDER.mkdir(exist_ok=True)
        for name, plans in found.items():
            (FOLDER / f"{name}.txt").write_text(plans, encoding="utf-8")
        return 0
    print("\n".join(found.values()))
    different = [name for name, plans in found.items() if plans != kept(name)]
    print(f"different from {FOLDER.name}: {', '.join(different) or 'none'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(write="--write" in sys.argv[1:]))
