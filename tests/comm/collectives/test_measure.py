"""Measuring the ways of each collective. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sagellm.comm.collectives import measure as measuring
from sagellm.comm.collectives.measure import (
    AUTO,
    BF16,
    COPY_SLOT,
    COPY_WHOLE,
    INT8,
    KB,
    MeasurementPlan,
    fastest_table,
    main,
    measure,
)
from sagellm.comm.collectives.metrics import CollectiveKind
from sagellm.comm.collectives.selection import WAYS, SelectionTable
from sagellm.core.errors import CommError

QUICK = MeasurementPlan(sizes_kb=(1, 300), rounds=2, calls=2, with_limits=True, with_wire_formats=True)


def test_every_way_is_timed_and_checked() -> None:
    seconds = measure(2, QUICK)
    assert set(seconds) == set(WAYS)
    for kind, by_size in seconds.items():
        extra = {BF16, INT8, COPY_WHOLE, COPY_SLOT} if kind is CollectiveKind.ALL_REDUCE else set()
        assert set(by_size) == {KB, 300 * KB}
        for ways in by_size.values():
            assert set(ways) == {*WAYS[kind], AUTO} | extra
            assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in ways.values())
    assert set(fastest_table(seconds).rows) == set(WAYS)


def test_large_buffers_get_fewer_rounds() -> None:
    plan = MeasurementPlan()
    assert [plan.rounds_of(size << 10) for size in (1, 1024, 65536)] == [20, 11, 5]
    assert [plan.calls_in_a_row(size << 10) for size in (1, 1024, 65536)] == [50, 32, 2]


def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(CommError, match=r"none\.json cannot be read"):
        measure(2, MeasurementPlan(table=str(tmp_path / "none.json")))


def test_the_command_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {
        kind: {KB: {way: [float(place + 1)] for place, way in enumerate((*ways, AUTO))}}
        for kind, ways in WAYS.items()
    }
    monkeypatch.setattr(measuring, "measure", lambda world_size, plan: fixed)
    main(["--output", str(tmp_path / "table.json")])
    table = SelectionTable.of_json(json.loads((tmp_path / "table.json").read_text(encoding="utf-8")))
    assert table.rows == {kind: ((), (ways[0],)) for kind, ways in WAYS.items()}
