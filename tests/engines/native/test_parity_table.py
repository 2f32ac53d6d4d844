"""The cases of the parity table, for a family of each kind; slow: for all, and the table in the document."""

from __future__ import annotations

import pytest

from tests.effort import usual
from tests.parity_table import CASES, DOCUMENT, row, shown, table
from tests.tiny_models import TINY_MODELS

FEW = ("llama", "gemma3", "gemma4", "gemma4-wide-windows", "olmo3-window-mix", "glm4")


@pytest.mark.parametrize("name", usual(FEW, TINY_MODELS))
def test_every_case_gives_the_tokens_of_transformers(name: str) -> None:
    found = row(name)
    assert list(found) == list(CASES)
    assert {case: equal for case, (equal, _) in found.items()} == {
        case: compared for case, (_, compared) in found.items()
    }
    line = table({name: found}).splitlines()[-1]
    assert line in shown(DOCUMENT.read_text(encoding="utf-8")), "run python -m tests.parity_table --write"


def test_the_table_has_all_models() -> None:
    lines = shown(DOCUMENT.read_text(encoding="utf-8")).splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == list(TINY_MODELS)
