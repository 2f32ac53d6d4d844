"""How much a test tries: a part by default, everything where there is time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

FULL = 100
"""`max_examples` of a profile under which every count of examples is taken as it is written."""


def examples(count: int) -> int:
    """`max_examples` of a costly test: `count` under the profiles `slow` and `explore`, half of it by
    default."""
    return max(1, count * min(settings().max_examples, FULL) // FULL)


def usual(chosen: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Parameters of a costly test: all cases, those that are not among the chosen marked `slow`."""
    listed = list(cases)
    unknown = [one for one in chosen if one not in listed]
    if unknown:
        raise ValueError(f"{unknown} are none of the cases {listed}")
    return [_param(one) if one in chosen else _param(one, pytest.mark.slow) for one in listed]


def _param(case: Any, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
