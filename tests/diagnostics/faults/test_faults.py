"""Each of ten planted faults is found within the minute's preset."""

from __future__ import annotations

import asyncio

import pytest

from sagellm.diagnostics.verify import PRESETS, Preset, VerifyReport, verify
from sagellm.engines.build import load
from tests.diagnostics.faults.planted import FAULTS, Plant, WrongAdapter
from tests.effort import usual
from tests.serving.live import serving

SMALL = {"kv.num_blocks": 160, "kv.swap_space_gb": 0.05}
QUICK = Preset(budget_s=60.0, long_tokens=512, max_rounds=1)


def report_with(plant: Plant, monkeypatch: pytest.MonkeyPatch, preset: Preset) -> VerifyReport:
    plant.install(monkeypatch)
    with serving(load(None, SMALL), log_requests=False) as live:
        return asyncio.run(verify(live.url, preset, seed=3))


@pytest.mark.parametrize("name", usual(["cross-salt hit"], FAULTS))
def test_every_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_with(FAULTS[name](), monkeypatch, QUICK)
    assert report.exit_code == 1, report.to_json()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_found_within_the_minute(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_with(FAULTS[name](), monkeypatch, PRESETS["minute"])
    assert report.exit_code == 1, report.to_json()
    assert report.duration_s < 75


@pytest.mark.slow
@pytest.mark.parametrize("plant", [Plant(), WrongAdapter(right=True)], ids=["none", "adapters kept apart"])
def test_without_a_fault_nothing_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_with(plant, monkeypatch, QUICK)
    assert (report.outcome, report.findings) == ("clean", ())
