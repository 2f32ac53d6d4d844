"""`Launcher`: where a supervisor's instances run, and what it must do for that.

There are two: processes of this host (`local_launcher.py`) and actors of a Ray cluster (`ray_launcher.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sagellm.control_plane.fleet.keys import FleetKey
from sagellm.control_plane.fleet_instances import FleetInstance, instance_config, publishing
from sagellm.core.config_layers import Resolved


@dataclass(frozen=True, slots=True)
class StartEvents:
    """What a launcher reports of one start, from any thread.

    `on_endpoint`: it will be served there. `on_end`: it has ended, with the reason, and unless `close` was
    called. `on_refusal`: there is no place for it, with what is missing; nothing was started.
    """

    on_endpoint: Callable[[str], object]
    on_end: Callable[[str], object]
    on_refusal: Callable[[str], object]


class Running(Protocol):
    """What was started once, until its end."""

    def close(self) -> None:
        """End it, within some seconds. May be called again."""


class Launcher(Protocol):
    """Starts instances, each in a place that it has from `reserve` to `release`.

    It may be started again there. Methods are called by one thread and return at once; `close` and
    `Running.close` wait.
    """

    def reserve(self, instances: Sequence[FleetInstance]) -> None:
        """Keep a place for each, or for none. Raises `CapacityError` where it is known that not all fit."""

    def release(self, name: str) -> None:
        """Give a place back, after the end of what ran there."""

    def endpoint(self, name: str) -> str:
        """Where an instance is served; empty: `on_endpoint` says it after the start."""

    def start(self, instance: FleetInstance, events: StartEvents) -> Running:
        """Raises `OSError` where nothing can be started now."""

    def close(self) -> None:
        """Give back all that is left. No start may come afterwards."""


def instance_options(
    resolved: Resolved, instance: FleetInstance, number: int, key: FleetKey
) -> dict[str, Any]:
    """The options of `instance_process.instance_server`, without where it listens. They go through JSON.

    `number`: of the instance among those that publish KV events on one host.
    """
    config = publishing(
        instance_config(resolved, instance.group), resolved.config.events, instance.name, number
    )
    return {
        "name": instance.name,
        "kind": instance.type.value,
        "report_s": resolved.config.fleet.heartbeat_s,
        "key": key.text,
        "config": config.model_dump(mode="json"),
        "rank": number,
    }


def free_number(taken: Collection[int]) -> int:
    """The lowest number that is not taken."""
    return next(number for number in itertools.count() if number not in taken)
