"""Each of ten planted faults is found within the minute's preset."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sagellm.diagnostics.verify import PRESETS, Preset, VerifyReport, verify
from tests.diagnostics.faults.planted import FAULTS, Plant, WindowModel, WrongAdapter
from tests.effort import usual
from tests.serving.live import serving

QUICK = Preset(budget_s=60.0, long_tokens=512, max_rounds=1)


def report_with(plant: Plant, folder: Path, preset: Preset, *, seed: int = 3) -> VerifyReport:
    with pytest.MonkeyPatch.context() as patch:
        plant.install(patch)
        with serving(plant.load(folder), log_requests=False) as live:
            return asyncio.run(verify(live.url, preset, seed=seed))


@pytest.mark.parametrize("name", usual(["cross-salt hit"], FAULTS))
def test_every_fault_is_found(name: str, tmp_path: Path) -> None:
    report = report_with(FAULTS[name](), tmp_path, QUICK)
    assert report.exit_code == 1, report.to_json()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found_within_the_minute(name: str, seed: int, tmp_path: Path) -> None:
    report = report_with(FAULTS[name](), tmp_path, PRESETS["minute"], seed=seed)
    assert report.exit_code == 1, report.to_json()
    assert report.duration_s < 75


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [Plant(), WindowModel(), WrongAdapter(right=True)],
    ids=["none", "sliding windows", "adapters kept apart"],
)
def test_without_a_fault_nothing_is_found(plant: Plant, tmp_path: Path) -> None:
    report = report_with(plant, tmp_path, QUICK)
    assert (report.outcome, report.findings) == ("clean", ())
