"""Every command that prints a table, on a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sagellm.benchmarks import _tables
from sagellm.benchmarks._tables import Table

GOLDEN = Path(__file__).parent.parent / "golden" / "traces"
CHAT = str(GOLDEN / "chat.jsonl")
COMMANDS: list[Sequence[str]] = [
    ("trace", "info", CHAT),
    ("trace", "info", str(GOLDEN / "tenants.jsonl")),
    ("replay", CHAT, "-j", "1", "--capacity", "5%", "--seed", "0", "--seed", "1"),
    ("replay", CHAT, "-j", "1", "--capacity", "5%", "--causes"),
    ("simulate", "--trace", CHAT, "--requests", "20", "--preset", "vllm-like", "--preset", "adaptive"),
    ("bench", "conversation", "--blocks", "500"),
    ("bench", "fairness", "--capacity", "1%"),
    ("bench", "micro", "prefix_cache", "--quick", "--sections", "a", "--index", "radix"),
    ("bench", "micro", "scheduler_ir", "--quick", "--sections", "e"),
    ("bench", "engine", "--shape", "tiny", "--only", "decode", "--repeats", "1"),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_no_label_is_cut(cli: Any, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tables: list[Table] = []
    original = Table.__rich_console__

    def noted(self: Table, *given: Any) -> Any:
        tables.append(self)
        return original(self, *given)

    monkeypatch.setattr(_tables.Table, "__rich_console__", noted)
    result = cli(*arguments)
    assert result.exit_code == 0, result.output
    assert tables
    assert "…" not in result.stdout
    words = set(re.findall(r"\S+", result.stdout))
    for table in tables:
        names = [row[index] for row in table.rows for index in range(table.num_names)]
        labels = {word for label in [*table.columns, *names] for word in label.split()}
        assert {word for word in labels if len(word) < 16} <= words
