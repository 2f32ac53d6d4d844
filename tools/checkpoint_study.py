"""Compares rules for checkpoints of recurrent state on the collection of traces.

    python tools/checkpoint_study.py FOLDER                  the traces for judging: a table in Markdown
    python tools/checkpoint_study.py FOLDER --develop        those on which `value` was developed

Half of the conversation trace's time and half of the coding sessions are for judging, with all of miniswe and
taubench. The 95 % interval of a ratio comes from 2,000 resamples of sessions, or of 50 stretches of the trace
where it has no sessions.
"""

from __future__ import annotations

import argparse
import dataclasses
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sagellm.benchmarks.checkpoints.groups import PRESETS
from sagellm.benchmarks.checkpoints.replayer import BOUND, VALUE, CheckpointPlan, run_checkpoints
from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.traces import Trace, read_trace

BASELINES = ("three-per-path", "vllm-sparse")
OTHERS = ("junctions", "prompt-end", "every-4096", "dense")
CONVERSATIONS = ("1%", "2%", "5%", "10%", "25%", "unlimited")
SESSIONS = ("0.5%", "1%", "2%", "5%", "10%", "unlimited")
SMALL = ("10%", "25%", "50%", "100%", "unlimited")
JUDGING = (
    ("conversation, 2nd half", "mooncake_conversation_first_half.jsonl.xz", 1, CONVERSATIONS),
    ("coding agents, half 0", "cc_agentic_sessions_a.jsonl.xz", 0, SESSIONS),
    ("miniswe", "lmcache_miniswe_a.jsonl.xz", None, SMALL),
    ("taubench", "lmcache_taubench_a.jsonl.xz", None, SMALL),
)
DEVELOPING = (
    ("conversation, 1st half", "mooncake_conversation_first_half.jsonl.xz", 0, CONVERSATIONS),
    ("synthetic", "mooncake_synthetic_first_half.jsonl.xz", None, CONVERSATIONS),
    ("coding agents, half 1", "cc_agentic_sessions_a.jsonl.xz", 1, SESSIONS),
    ("magagent", "lmcache_magagent_a.jsonl.xz", None, SMALL),
)
PIECES, RESAMPLES = 50, 2000


def half(trace: Trace, part: int) -> Trace:
    """One half: of the sessions, or of the time where there are none."""
    middle_s = trace.requests[-1].time_s / 2
    return dataclasses.replace(
        trace,
        requests=tuple(
            request
            for request in trace.requests
            if part
            == (
                request.time_s >= middle_s
                if request.session is None
                else zlib.crc32(request.session.encode()) % 2
            )
        ),
    )


def interval(trace: BlockTrace, ours: array[int], theirs: array[int]) -> tuple[float, float]:
    """The 95 % interval of the ratio of two policies' hit tokens."""
    count = len(trace.requests)
    if trace.requests[0].session is None:
        pieces = np.arange(count) * PIECES // count
    else:
        pieces = np.unique([str(request.session) for request in trace.requests], return_inverse=True)[1]
    sums = [np.bincount(pieces, np.asarray(hits)) for hits in (ours, theirs)]
    drawn = np.random.default_rng(0).integers(0, len(sums[0]), (RESAMPLES, len(sums[0])))
    above, below = (hits[drawn].sum(axis=1) for hits in sums)
    low, high = np.quantile(above / np.maximum(1, below), (0.025, 0.975))
    return float(low), float(high)


def rows(label: str, trace: BlockTrace, groups: str, capacities: Sequence[str]) -> list[str]:
    plan = CheckpointPlan(PRESETS[groups], (*BASELINES, VALUE, BOUND, *OTHERS), tuple(capacities))
    found = {(result.capacity, result.policy): result for result in run_checkpoints(trace, plan)}
    made = []
    for capacity in capacities:
        ours = found[capacity, VALUE]
        cells = [label, groups, capacity]
        shown = [found[capacity, policy] for policy in (VALUE, *BASELINES, BOUND, *OTHERS)]
        cells += [f"{100 * result.token_ratio:.1f}" for result in shown]
        for policy in BASELINES:
            theirs = found[capacity, policy]
            low, high = interval(trace, ours.hits, theirs.hits)
            ratio = ours.hit_tokens / max(1, theirs.hit_tokens)
            cells.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
        made.append(f"| {' | '.join(cells)} |")
    dense, all_of_it = found["unlimited", "dense"], found["unlimited", VALUE]
    assert dense.peak_bytes is not None
    tenth = f"{dense.peak_bytes / 10 / (1 << 30)}GiB"
    small = run_checkpoints(trace, CheckpointPlan(PRESETS[groups], (VALUE,), (tenth,)))[0]
    made.append(
        f"<!-- {label}, {groups}: dense unlimited {100 * dense.token_ratio:.1f} % in "
        f"{dense.peak_bytes / (1 << 30):.0f} GiB; value at a tenth {100 * small.token_ratio:.1f} %, "
        f"unlimited {100 * all_of_it.token_ratio:.1f} % -->"
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--develop", action="store_true")
    parser.add_argument("--groups", action="append", choices=PRESETS)
    given = parser.parse_args()
    names = ("value", *BASELINES, "bound", *OTHERS, *(f"value / {name}" for name in BASELINES))
    print(f"| trace | groups | budget | {' | '.join(names)} |\n|{'---|' * (3 + len(names))}")
    for label, file, part, capacities in DEVELOPING if given.develop else JUDGING:
        read = read_trace(given.folder / file)
        trace = block_trace(read if part is None else half(read, part))
        for groups in given.groups or PRESETS:
            print("\n".join(rows(label, trace, groups, capacities)), flush=True)


if __name__ == "__main__":
    main()
