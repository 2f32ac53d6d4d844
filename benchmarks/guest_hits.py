"""What our policies reuse inside another engine's own KV manager, beside `sagellm replay`.

    HOST_PYTHON benchmarks/guest_hits.py vllm TRACE=TITLE ... --capacity 1% [--policy NAME] [--out FILE]

Runs in the host's environment, with sageLLM importable. A row is one replay of a whole trace: the host as
it is, the host with our LRU (a check: the same hits as its own order), the host with a policy, and that
policy in our own index. The last column is CPU time of the whole replay over all blocks of prompts, in us.
`lmdeploy,lmdeploy_repaired` adds a row of the second host in its own order. `tools/guests_table.py` prints
the file as the table of docs/guests.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sagellm.benchmarks.replay.block_trace import BlockTrace, block_trace
from sagellm.benchmarks.replay.sweep import ReplaySweepPlan, capacity, run_case
from sagellm.benchmarks.reporting import environment
from sagellm.benchmarks.traces import read_trace
from sagellm.core.clock import ManualClock
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.engines.build_kv import make_policy


def digests(trace: BlockTrace) -> list[list[bytes]]:
    """A hash for each block of each request."""
    spaces: dict[Any, bytes] = {}
    return [
        [
            number.to_bytes(8, "little")
            + spaces.setdefault(request.namespace, len(spaces).to_bytes(24, "little"))
            for number in request.ids
        ]
        for request in trace.requests
    ]


def served(name: str, trace: BlockTrace, size: int, policy: str | None) -> dict[str, Any]:
    """Replay a trace in the host, with its own order or with a policy."""
    clock = ManualClock(trace.requests[0].time_s)

    def made() -> EvictionPolicy:
        assert policy is not None
        return make_policy(policy, capacity=size, clock=clock)

    module = importlib.import_module(f"benchmarks.hosts.{name}")
    host = module.Host(size, None if policy is None else made, clock)
    hits, began_s = 0, time.thread_time()
    for request, path in zip(trace.requests, digests(trace), strict=True):
        clock.advance(max(0.0, request.time_s - clock.now()))
        hits += host.serve(path[:size], request.num_output_tokens)
    return {
        "host": name, "policy": policy or "own", "capacity": size, "ratio": hits / trace.num_blocks,
        "us_per_block": 1e6 * (time.thread_time() - began_s) / trace.num_blocks,
    }  # fmt: skip


def replayed(trace: BlockTrace, size: int, policy: str) -> dict[str, Any]:
    """The same policy in `sagellm replay`."""
    plan = ReplaySweepPlan((policy,), (str(size),))
    result = run_case(trace, plan, plan.cases(trace)[0])
    return {
        "host": "sagellm replay", "policy": policy, "capacity": size, "ratio": result.block_ratio,
        "us_per_block": 1e6 * (result.cpu_s or 0.0) / trace.num_blocks,
    }  # fmt: skip


def rows_of(trace: BlockTrace, share: str, hosts: list[str], policy: str) -> Iterator[dict[str, Any]]:
    """The rows of one trace and capacity, as they are done."""
    size = capacity(share, trace.num_unique).num_blocks
    yield served(hosts[0], trace, size, None)
    for other in hosts[1:]:
        yield served(other, trace, size, None)
    yield served(hosts[0], trace, size, "lru")
    yield served(hosts[0], trace, size, policy)
    yield replayed(trace, size, policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("hosts", help="vllm, sglang, lmdeploy or lmdeploy,lmdeploy_repaired")
    parser.add_argument("traces", nargs="+", help="FILE or FILE=TITLE")
    parser.add_argument(
        "--capacity", action="append", help="blocks, or a share of the unique ones; default 5%%"
    )
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows, hashes = [], {}
    for file, _, title in (text.partition("=") for text in asked.traces):
        trace = block_trace(read_trace(Path(file)))
        hashes[title or trace.name] = trace.sha256
        for share in asked.capacity or ["5%"]:
            for row in rows_of(trace, share, asked.hosts.split(","), asked.policy):
                rows.append({"trace": title or trace.name, "share": share, **row})
                print(*rows[-1].values(), sep="  ", flush=True)
    if asked.out is not None:
        results = {"environment": asdict(environment()), "sha256": hashes, "rows": rows}
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
