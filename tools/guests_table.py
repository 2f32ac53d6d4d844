"""Prints results of `benchmarks/guest_hits.py` as a Markdown table. docs/guests.md shows them.

python tools/guests_table.py benchmarks/results/2026-11-25-guests-vllm.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HOSTS = {"vllm": "vLLM", "lmdeploy": "LMDeploy", "lmdeploy_repaired": "LMDeploy", "sglang": "SGLang"}


def table(path: Path) -> str:
    """A row for each trace and capacity: reused blocks, CPU time per block."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    columns = list(dict.fromkeys((row["host"], row["policy"]) for row in rows))
    places = list(dict.fromkeys((row["trace"], row["share"], row["capacity"]) for row in rows))
    found = {(row["trace"], row["share"], row["host"], row["policy"]): row for row in rows}
    lines = [
        "| trace | capacity, blocks | " + " | ".join(_title(*column) for column in columns) + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for trace, share, capacity in places:
        cells = [_cell(found.get((trace, share, *column))) for column in columns]
        lines.append(f"| {trace} | {capacity:,} ({share}) | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _title(host: str, policy: str) -> str:
    if host == "sagellm replay":
        return f"`{host}`, `{policy}`"
    if policy == "own":
        return (
            f"{HOSTS[host]}, its LRU repaired"
            if host == "lmdeploy_repaired"
            else f"{HOSTS[host]}, its own order"
        )
    return f"{HOSTS[host]}, our `{policy}`"


def _cell(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['ratio']:.2%} ({row['us_per_block']:.1f} us)"


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")
