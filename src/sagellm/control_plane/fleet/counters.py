"""`FleetCounters`: what instances have counted, also those that are gone.

So no counter of `/metrics` ever falls.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from sagellm.control_plane.fleet.sums import summed_diagnostics, summed_stats
from sagellm.core.protocols.engine import EngineDiagnostics, EngineStats

NO_STATS, NO_DIAGNOSTICS = EngineStats(0, 0, 0, 0, 0), EngineDiagnostics()


@dataclass(slots=True)
class _Process:
    """The last figures of one process of an instance. `start_id`: as in its facts."""

    start_id: str
    stats: EngineStats = NO_STATS
    diagnostics: EngineDiagnostics = NO_DIAGNOSTICS


class FleetCounters:
    """Sums over instances. Of one that is away its counters stay, and nothing else.

    A process that is connected again goes on counting where it was; one that takes its place begins at 0,
    and is added to it.
    """

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._ended_stats, self._ended_diagnostics = NO_STATS, NO_DIAGNOSTICS

    def begin(self, instance_id: str, start_id: str) -> None:
        """This process is there now."""
        former = self._processes.get(instance_id)
        if former is not None and former.start_id == start_id:
            return
        if former is not None:
            ended = [self._ended_stats, _counted(former.stats)]
            self._ended_stats = summed_stats(ended, 0, 0, 0, ())
            gone = [self._ended_diagnostics, _counted_of(former.diagnostics)]
            self._ended_diagnostics = summed_diagnostics([], gone)
        self._processes[instance_id] = _Process(start_id)

    def take(self, instance_id: str, figures: EngineStats | EngineDiagnostics) -> None:
        """Newer figures of the process that is there."""
        process = self._processes[instance_id]
        if isinstance(figures, EngineStats):
            process.stats = figures
        else:
            process.diagnostics = figures

    def stats(
        self,
        present: Collection[str],
        num_running: int,
        num_waiting: int,
        num_steps: int,
        faults: tuple[str, ...],
    ) -> EngineStats:
        """The sums. `present`: instances whose last figures are of now; the rest as of `summed_stats`."""
        known = [
            process.stats if name in present else _counted(process.stats)
            for name, process in self._processes.items()
        ]
        return summed_stats([*known, self._ended_stats], num_running, num_waiting, num_steps, faults)

    def diagnostics(self, present: Collection[str]) -> EngineDiagnostics:
        """The sums, as of `stats`."""
        full, counted = [], [self._ended_diagnostics]
        for name, process in self._processes.items():
            if name in present:
                full.append(process.diagnostics)
            else:
                counted.append(_counted_of(process.diagnostics))
        return summed_diagnostics(full, counted)


def _counted(stats: EngineStats) -> EngineStats:
    """Without what is true of a moment alone."""
    return replace(NO_STATS, num_preemptions=stats.num_preemptions, reuse=stats.reuse, misses=stats.misses)


def _counted_of(found: EngineDiagnostics) -> EngineDiagnostics:
    """Without what is true of a moment alone."""
    return replace(
        found,
        internal_fragmentation=0.0,
        external_fragmentation=0.0,
        num_pinned_prefixes=0,
        num_pinned_blocks=0,
        checkpoints={**found.checkpoints, "resident": 0} if found.checkpoints else {},
        tiers=[tier._replace(total=0, cached=0, held=0, fault="") for tier in found.tiers],
    )
