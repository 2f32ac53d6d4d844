"""Prints a results file of the peers' harness as a Markdown table. README.md shows it.

python tools/engines_table.py benchmarks/results/2026-11-22-engines-S.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

NAMES = {
    "sagellm": "sageLLM",
    "sagellm-torch": "sageLLM, `engine.kernels: off`",
    "llamacpp": "llama.cpp",
    "vllm": "vLLM CPU",
    "vllm-inproc": "vLLM CPU, in one process",
    "hf": "transformers",
}
COLUMNS = (
    ("prefill 512 / 2048 / 8192, tok/s", tuple((name, "prefill_tps") for name in ("a512", "a2048", "a8192"))),
    ("decode, batch 1 / 8 / 32, tok/s", tuple((name, "decode_tps") for name in ("b1", "b8", "b32"))),
    ("48 mixed sequences, tok/s", (("c", "out_tps"),)),
    ("12 conversations x 4 turns, s", (("d", "total"),)),
    ("16,384 tokens + 64, s", (("e", "total"),)),
    ("memory at batch 8, MB", (("b8", "rss_mb"),)),
    ("cold start, s", (("cold", "total"),)),
)


def table(path: Path) -> str:
    """Medians over the repeats of each engine; "-" where it was not run."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    engines = [name for name in NAMES if any(row["engine"] == name for row in rows)]
    head = "| | " + " | ".join(title for title, _ in COLUMNS) + " |"
    lines = [head, "|---" * (len(COLUMNS) + 1) + "|"]
    for engine in engines:
        mine = [row for row in rows if row["engine"] == engine]
        cells = [" / ".join(_median(mine, *pair) for pair in wanted) for _, wanted in COLUMNS]
        lines.append(f"| {NAMES[engine]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _median(rows: Sequence[Mapping[str, Any]], workload: str, key: str) -> str:
    found = [row[key] for row in rows if row["workload"] == workload and key in row]
    if not found:
        return "-"
    middle = median(found)
    return f"{middle:.3g}" if middle < 1000 else f"{middle:,.0f}"


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")
