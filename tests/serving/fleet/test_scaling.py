"""A front that scales its fleet: what it asks of its operations, and what a dry run leaves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from sagellm.control_plane.autoscaling import GroupReport
from sagellm.core.clock import ManualClock
from sagellm.core.config_layers import given_layer, resolve
from sagellm.core.errors import ConfigError
from sagellm.core.fleet_config import FleetConfig
from sagellm.core.protocols.router import ExecutionInstance, InstanceType
from sagellm.serving.fleet.scaling import FleetCounts, FleetScaling


def fleet_of(**values: Any) -> FleetConfig:
    groups = {"decode": {"type": "decoding", "max_count": 4}, "prefill": {"type": "prefilling"}}
    given = {"fleet.groups": groups, **{f"fleet.{name}": value for name, value in values.items()}}
    return resolve([given_layer(given)]).config.fleet


class ScriptedOperations:
    """A decode group of so many rows in all, whose instances come and go at once."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.size, self.rows, self.done = clock, 1, 0.3, list[str]()

    async def counts(self) -> FleetCounts:
        instances = [
            ExecutionInstance(
                f"decode-{i}",
                InstanceType.DECODING,
                num_running=round(100 * self.rows / self.size),
                max_num_seqs=100,
            )
            for i in range(self.size)
        ]
        return FleetCounts({"decode": GroupReport(instances)}, int(self.rows * 1000 * self.clock.now()), 0, 0)

    async def resize(self, group: str, count: int) -> None:
        self.done.append(f"{group} has {count}")
        self.size = count

    async def remove(self, name: str) -> None:
        self.done.append(f"{name} ends")
        self.size -= 1


def run(scaling: FleetScaling, clock: ManualClock, seconds: int) -> None:
    async def turns() -> None:
        for _ in range(seconds):
            await scaling.turn()
            clock.advance(1.0)

    asyncio.run(turns())


def test_a_fleet_grows_and_shrinks_with_its_load() -> None:
    clock = ManualClock()
    operations = ScriptedOperations(clock)
    scaling = FleetScaling(fleet_of(), operations, clock, dry_run=False)
    run(scaling, clock, 60)
    assert operations.done == []
    operations.rows = 1.5
    run(scaling, clock, 60)
    assert operations.done == ["decode has 2"]
    operations.rows = 0.2
    run(scaling, clock, 400)
    assert operations.done == ["decode has 2", "decode-1 ends"]


def test_a_dry_run_says_once_what_it_would_do(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    operations = ScriptedOperations(clock)
    operations.rows = 1.5
    with caplog.at_level(logging.INFO, "sagellm.fleet"):
        run(FleetScaling(fleet_of(), operations, clock, dry_run=True), clock, 60)
    assert operations.done == []
    assert caplog.messages == ["autoscaling, dry run: decode: add 1: load 1.88 of 1 instances (batch rows)"]


@pytest.mark.parametrize("options", [{"rows": 2}, {"speed": 1}])
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    clock = ManualClock()
    with pytest.raises(ConfigError, match=r"fleet.autoscaling_options"):
        FleetScaling(fleet_of(autoscaling_options=options), ScriptedOperations(clock), clock, dry_run=True)
