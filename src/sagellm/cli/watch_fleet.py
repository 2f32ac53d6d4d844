"""`sagellm watch --url`: the instances of a fleet, live."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from sagellm.benchmarks.reporting import Table, print_tables, write_json
from sagellm.cli.fleet import NotServingError, ask
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError
from sagellm.diagnostics.watch.fleet import (
    FleetGrowth,
    Status,
    fleet_line,
    fleet_lines,
    fleet_table,
    instance_tables,
    state_changes,
)
from sagellm.diagnostics.watch.page import duration

TIMEOUT_S = 10.0
LINE_S = 60.0


@dataclass(slots=True)
class FleetWatch:
    """Looks at a fleet again and again. `instance`: also at this one, which needs the admin key `key`.

    `api_key`: a client's; None: the admin key is shown.
    `trouble`: why the last look gave nothing; empty if it did. Then `fleet` and `detail` are older."""

    url: str
    key: str | None = None
    api_key: str | None = None
    instance: str | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    fleet: Status | None = None
    detail: Status | None = None
    trouble: str = ""
    _growth: FleetGrowth = field(default_factory=FleetGrowth)

    def look(self) -> None:
        """Ask the front. Raises `ConfigError` if it never answered, unless it is about to."""
        is_first = self.fleet is None
        try:
            self.fleet = ask("GET", self.url, "/v1/fleet", self.api_key or self.key, timeout_s=TIMEOUT_S)
            self._growth.update(self.fleet)
            if self.instance is not None:
                path = f"/v1/admin/fleet/instances/{quote(self.instance, safe='')}"
                self.detail = ask("GET", self.url, path, self.key, timeout_s=TIMEOUT_S)
            self.trouble = ""
        except ConfigError as error:
            if is_first and not isinstance(error, NotServingError):
                raise
            self.trouble = str(error)

    @property
    def watched(self) -> Status | None:
        """The status with what was counted while it was watched."""
        return None if self.fleet is None else self._growth.applied(self.fleet)

    def tables(self, seconds: float) -> list[Table]:
        if self.watched is None:
            return []
        title = f"instances; what is counted, in the {duration(seconds)} of this watch"
        return [
            fleet_table(self.watched, title),
            *(() if self.detail is None else instance_tables(self.detail)),
        ]

    def lines(self) -> list[str]:
        trouble = [self.trouble] if self.trouble else []
        return trouble if self.fleet is None else [*trouble, *fleet_lines(self.fleet)]


def watch_fleet(
    watch: FleetWatch, interval: float, seconds: float, ended: threading.Event, json_file: Path | None
) -> None:
    """Show the fleet until the time is up or the event is set.

    Then print it, and write its figures."""
    began_s = watch.clock.now()
    terminal = Console(stderr=True)
    next_line_s, trouble = LINE_S, ""
    before: Status | None = None
    with Live(console=terminal, transient=True, auto_refresh=False) as live:
        while True:
            watch.look()
            passed_s = watch.clock.now() - began_s
            if terminal.is_terminal:
                live.update(Group(*watch.tables(passed_s), *map(Text, watch.lines())), refresh=True)
            elif watch.trouble and watch.trouble != trouble:
                _log(watch.trouble)
            elif watch.watched is not None:
                for change in state_changes(before, watch.watched):
                    _log(change)
                if passed_s >= next_line_s:
                    next_line_s += LINE_S
                    _log(f"{duration(passed_s)}: {fleet_line(watch.watched)}")
            before, trouble = watch.fleet, watch.trouble
            if (
                ended.wait(max(0.0, min(interval, seconds - passed_s, threading.TIMEOUT_MAX)))
                or passed_s >= seconds
            ):
                break
    print_tables(watch.tables(watch.clock.now() - began_s))
    for line in watch.lines():
        print(line)
    if json_file is not None:
        write_json(json_file, {"status": watch.fleet, "watched": watch.watched, "instance": watch.detail})
    if watch.fleet is None:
        raise ConfigError(f"the fleet did not serve within {duration(seconds)}: {watch.trouble}")


def _log(text: str) -> None:
    print(f"sagellm: {text}", file=sys.stderr, flush=True)
